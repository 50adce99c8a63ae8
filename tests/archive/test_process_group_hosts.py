"""`process_group=` over several hosts: one rank of each reads, if all of them have the file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRanks, fail_read
from stock_comparison import assert_same_object, failure_of
from torch import distributed, nn

import ptsave
from ptsave.archive import group_archive, group_records
from ptsave.models import group_weights
from ptsave.support import group_call

HOSTS = "abab"  # of four ranks
SIZE = 30_000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "CHUNK_NBYTES", 1 << 15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.arange(SIZE), "b": torch.ones(3)}, folder / "model.pt")
    return folder


class Ranks:
    """Runs ranks of pretended hosts, and counts which of them open files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.opened = 0
        self.opens_instead: Path | None = None

    def run(self, action: Callable[[int], object], hosts: str = HOSTS) -> None:
        def act(rank: int) -> None:
            self._patch.setattr(group_call, "host_identity", lambda: hosts[rank])
            for module, name in ((group_archive, "open_source"), (group_weights, "find_files")):
                self._patch.setattr(module, name, partial(self._open, getattr(module, name)))
            action(rank)

        ForkedRanks(self._folder, act, len(hosts)).join()

    def _open(self, opens: Callable[..., Any], *args: Any) -> Any:
        self.opened += 1
        return opens(self.opens_instead or args[0], *args[1:])


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


@pytest.mark.parametrize("hosts", [HOSTS, "abb", "ab"])
def test_one_rank_of_each_host_reads(folder: Path, ranks: Ranks, hosts: str) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        for _ in range(2):  # the second time over the same group of a host
            assert_same_object(ptsave.load(path, process_group=group), torch.load(path))
        target = {"a": torch.zeros(SIZE).long(), "b": torch.zeros(3)}
        ptsave.load_into(path, target, process_group=group)
        model = nn.ParameterDict({name: torch.zeros_like(t).float() for name, t in target.items()})
        ptsave.load_model(model, folder, process_group=group)
        assert target["a"].sum() == torch.arange(SIZE).sum()
        assert model["a"][-1] == SIZE - 1
        assert ranks.opened == (4 if rank < 2 else 0)
        if len(hosts) == 4:
            made = group_call.host_group(group, [rank % 2, rank % 2 + 2])
            assert group_call.timeout_of_group(made) == group_call.timeout_of_group(group)

    ranks.run(load, hosts)


@pytest.mark.parametrize("why", ["one host", "missing", "other time", "other contents"])
def test_otherwise_one_rank_reads_for_all(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    path = folder / "model.pt"
    hosts = "aaa" if why == "one host" else "aba"

    def load(rank: int) -> None:
        if rank == 1 and why in ("missing", "other time"):
            found = None if why == "missing" else (path.stat().st_size, 3)
            monkeypatch.setattr(group_call, "_identity_of", lambda path: found)
        if rank == 1 and why == "other contents":  # of the same size, and the same time
            own = folder.parent / "own.pt"
            torch.save({"a": torch.arange(SIZE) + 1, "b": torch.ones(3)}, own)
            monkeypatch.setattr(ranks, "opens_instead", own)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert_same_object(loaded, torch.load(path))
        assert ranks.opened == int(rank == 0 or (rank == 1 and why == "other contents"))
        model = nn.ParameterDict({"a": torch.zeros(SIZE), "b": torch.zeros(3)})
        ptsave.load_model(model, path, process_group=distributed.group.WORLD)
        assert model["a"][-1] == SIZE - 1

    ranks.run(load, hosts)


def test_what_fails_on_one_host_fails_on_all(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        if rank == 1:
            fail_read(monkeypatch, 3, path)
        error = failure_of(lambda: ptsave.load(path, process_group=distributed.group.WORLD))
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (5, str(path))
        assert rank == 1 or "rank 1 of 4" in str(error)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert loaded["a"].sum() == torch.arange(SIZE).sum()

    ranks.run(load)


def test_a_rank_of_another_host_that_ends_is_no_hang(folder: Path, ranks: Ranks) -> None:
    path = folder / "model.pt"

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        ptsave.load(path, process_group=group)
        if rank == 3:
            os._exit(0)
        error = failure_of(lambda: ptsave.load(path, process_group=group))
        assert re.search(rf"{path}: rank {rank} of 4 .*has ended or does not answer", str(error))
        os._exit(0)  # the group cannot be ended any more

    ranks.run(load)


# ------------------------------------------------------------------------- backends without a CPU


def test_a_backend_that_has_only_devices(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks go over memory of the device, for which a subclass stands."""
    path = folder / "model.pt"
    device = torch.device("meta")

    class OnDevice(torch.Tensor):
        """Memory that only this backend has."""

    empty, broadcast, n_sent = torch.empty, distributed.broadcast, 0

    def allocate(*args: Any, **options: Any) -> Any:
        if options.get("device") is not device:
            return empty(*args, **options)
        return empty(*args, **{**options, "device": "cpu"}).as_subclass(OnDevice)

    def send(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal n_sent
        if not options.get("async_op"):  # of objects, whose memory torch chooses
            return broadcast(tensor, *args, **options)
        assert isinstance(tensor, OnDevice)
        n_sent += 1
        return broadcast(tensor.as_subclass(torch.Tensor), *args, **options)

    def load(rank: int) -> None:
        monkeypatch.setattr(group_call, "device_of_group", lambda group: device)
        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(distributed, "broadcast", send)
        loaded = ptsave.load(path, process_group=distributed.group.WORLD)
        assert torch.equal(loaded["a"], torch.arange(SIZE))
        assert n_sent >= SIZE * 8 >> 15

    ForkedRanks(tmp_path, load).join()


def test_a_backend_whose_devices_are_not_here(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(rank: int) -> None:
        class Elsewhere:
            _device_types = (torch.device("xpu"),)

        found = group_call.device_of_group
        monkeypatch.setattr(group_call, "device_of_group", lambda group: found(Elsewhere()))
        call = partial(ptsave.load, folder / "model.pt", process_group=distributed.group.WORLD)
        with pytest.raises(RuntimeError, match=r"type xpu, .*new_group\(backend=.gloo.\)"):
            call()

    ForkedRanks(tmp_path, load).join()


def test_ranks_of_a_host_wait_for_data_as_long_as_the_group(tmp_path: Path) -> None:
    """Gloo lets ranks connect for five times the timeout that a group is made with."""

    def act(rank: int) -> None:
        near = group_call.host_group(distributed.group.WORLD, [0, 1])
        assert group_call.timeout_of_group(near) == timedelta(seconds=10)
        if rank == 1:
            time.sleep(6)
        distributed.barrier(near)

    ForkedRanks(tmp_path, act, timeout_s=10).join()


@pytest.mark.parametrize(("timeout", "connecting"), [(1800, 360), (60, 12), (10, 5), (2, 2)])
def test_ranks_of_a_host_connect_within_the_timeout(timeout: int, connecting: int) -> None:
    found = group_call._connecting(timedelta(seconds=timeout))
    assert found == timedelta(seconds=connecting)
