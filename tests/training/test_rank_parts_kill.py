"""Jobs of several ranks of which one is killed at a random moment, and which go on afterwards.

Like `test_checkpointer_kill`.  Whatever happens, a step that counts has the parts of one save, and
the ranks that live learn of the death and end.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from _system import Child
from kill_rounds import ROUNDS, SEED

import ptsave

pytestmark = [pytest.mark.kill, pytest.mark.timeout(0)]

_N_ELEMENTS = 200_000
_KEEP = 3
_LIMIT_S = 60


def _values(step: int, rank: int) -> torch.Tensor:
    return torch.full((_N_ELEMENTS,), float(100 * step + rank))


def _train(folder: Path, rank: int, size: int, run: int) -> None:
    """Go on from the latest step that all ranks have."""
    try:
        checkpointer = ptsave.AsyncCheckpointer(
            folder, keep=_KEEP, fsync=False, rank=rank, world_size=size
        )
        (folder / f".met-{run}-{rank}").touch()
        first = 0
        if checkpointer.latest() is not None:
            values = torch.zeros(_N_ELEMENTS)
            first = checkpointer.restore(values={"x": values})["step"]
            assert torch.equal(values, _values(first, rank))
        for step in range(
            first, first + 1000
        ):  # the first once more, in the place of what is there
            checkpointer.save(step, values={"x": _values(step, rank)}, step=step, run=run)
            if step % 3 == 0:
                checkpointer.wait()
    except RuntimeError as error:
        if "has ended" not in str(error):
            raise


def _check(folder: Path, size: int) -> int:
    """Check what counts, and return the highest step."""
    parts: dict[str, set[int]] = {}
    for name in os.listdir(folder):
        if name.startswith("step-"):
            save, _, rest = name.partition(".rank-")
            parts.setdefault(save, set()).add(int(rest.partition("-")[0]))
    complete = {save for save, ranks in parts.items() if len(ranks) == size}
    for save in complete:
        entries = [
            torch.load(folder / f"{save}.rank-{rank}-of-{size}.pt", weights_only=True)
            for rank in range(size)
        ]
        assert len({(entry["step"], entry["run"]) for entry in entries}) == 1
        for rank, entry in enumerate(entries):
            assert torch.equal(entry["values"]["x"], _values(entry["step"], rank))
    return max((int(save[5:13]) for save in complete), default=-1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_is_killed(tmp_path: Path, size: int) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    folder = tmp_path / "run"
    folder.mkdir()
    highest = -1
    for run in range(max(ROUNDS // 5, 4)):
        children = [
            Child(lambda rank=rank, run=run: _train(folder, rank, size, run))  # type: ignore[misc]
            for rank in range(size)
        ]
        time.sleep(generator.uniform(0.05, 0.15) * size)
        victim = generator.randrange(size)
        children[victim].kill()
        alive = [child for rank, child in enumerate(children) if rank != victim]
        if all((folder / f".met-{run}-{rank}").exists() for rank in range(size)):
            start = time.monotonic()
            for child in alive:
                child.join()
            assert time.monotonic() - start < _LIMIT_S
        else:  # they may wait for it to begin; a launcher ends them
            for child in alive:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                child.wait()
        now = _check(folder, size)
        assert now >= highest
        highest = now
    assert highest > 0
    names = [name for name in os.listdir(folder) if not name.startswith(".met")]
    assert len(names) <= 10 * size  # what never was complete is cleaned up
