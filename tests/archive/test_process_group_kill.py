"""Ranks that load a file together while one of them is killed: the others learn of it, at once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from forked_ranks import ForkedRanks
from kill_rounds import ROUNDS, SEED
from torch import distributed

import ptsave
from ptsave.archive import group_archive
from ptsave.support import group_call

pytestmark = [pytest.mark.kill, pytest.mark.timeout(0)]

_TIMEOUT_S = 60.0


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300_000,), value), **{f"b{i}": torch.ones(i) for i in range(30)}}


def _load_for_ever(path: Path, folder: Path, rank: int, size: int) -> None:
    """Load until a rank is gone; of what an error leaves in targets nothing is asked."""
    group = distributed.group.WORLD
    target = _state(0.0)
    model = torch.nn.ParameterDict(_state(0.0))

    def load() -> None:
        while True:
            loaded = ptsave.load(path, process_group=group)
            assert torch.equal(loaded["a"], _state(7.0)["a"])
            ptsave.load_into(path, target, process_group=group)
            assert torch.equal(target["a"], loaded["a"])
            ptsave.load_model(model, path, process_group=group)
            assert torch.equal(model["a"], loaded["a"])

    (folder / f"ready-{rank}").touch()
    with pytest.raises(RuntimeError) as caught:
        load()
    assert str(path) in str(caught.value)
    assert f"rank {rank} of {size}" in str(caught.value)
    os._exit(0)  # the group cannot be ended any more


def test_a_rank_is_killed_while_all_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 1 << 16)
    chance = random.Random(SEED)
    path = tmp_path / "a.pt"
    torch.save(_state(7.0), path)
    # Two or four ranks, on one host or on two; the first or the last of them is killed.
    cases = itertools.product((2, 4), ("aaaa", "abab"), (0, -1))
    for number, (size, hosts, victim) in zip(range(max(8, ROUNDS // 5)), itertools.cycle(cases)):
        folder = tmp_path / str(number)
        folder.mkdir()

        def act(rank: int, folder: Path = folder, size: int = size, hosts: str = hosts) -> None:
            monkeypatch.setattr(group_call, "host_identity", lambda: hosts[rank])
            _load_for_ever(path, folder, rank, size)

        ranks = ForkedRanks(folder, act, size, timeout_s=_TIMEOUT_S)
        while len(list(folder.glob("ready-*"))) < size:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        killed = ranks.children[victim]
        with suppress(ProcessLookupError):
            os.kill(killed.pid, signal.SIGKILL)
        begin = time.monotonic()
        for rank, (status, message) in enumerate(child.wait() for child in ranks.children):
            if rank == victim % size:
                assert os.WIFSIGNALED(status), f"seed {SEED}: {message}"
            else:
                assert status == 0, f"seed {SEED}: {message or status}"
        assert time.monotonic() - begin < _TIMEOUT_S + 60, f"seed {SEED}"
