"""Training runs that are killed at random moments, and go on: of one process, of several ranks."""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child
from kill_rounds import ROUNDS, SEED
from stock_comparison import assert_same_object
from torch import nn

import ptsave

pytestmark = [pytest.mark.kill, pytest.mark.timeout(0)]

KEEP = 3
TEMPORARY = re.compile(r"\.step-\d{8}\.pt\.[0-9a-f]{16}\.ptsave")
BALLAST_NBYTES = 3_000_000  # so that a save takes longer than a step


class Training:
    """What happens in a step depends on its number and the state, and on nothing else."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.99)
        self.n_steps = 0

    def advance(self) -> None:
        generator = torch.Generator().manual_seed(self.n_steps)
        loss = self.model(torch.randn(16, 8, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.n_steps += 1

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def entries(self) -> dict[str, Any]:
        """What its checkpoint has to hold."""
        states = {name: obj.state_dict() for name, obj in self.objects().items()}
        return {**states, "step": self.n_steps, "ballast": ballast(self.n_steps)}


def ballast(step: int) -> torch.Tensor:
    return torch.full((BALLAST_NBYTES,), step % 256, dtype=torch.uint8)


def train(folder: Path, n_steps: int | None, progress: int) -> None:
    """Go on from the latest checkpoint to step `n_steps`; writes a byte for each one saved."""
    training = Training()
    with ptsave.AsyncCheckpointer(folder, keep=KEEP) as checkpointer:
        if checkpointer.latest() is not None:
            rest = checkpointer.restore(**training.objects())
            training.n_steps = rest["step"]
        previous = None
        while training.n_steps != n_steps:
            training.advance()
            step = training.n_steps
            future = checkpointer.save(step, **training.objects(), step=step, ballast=ballast(step))
            future.add_done_callback(lambda _: os.write(progress, b"."))
            if previous is not None:
                previous.result()  # one is being written, one is waiting
            previous = future


class Uninterrupted:
    """The same training in this process, which nobody kills."""

    def __init__(self) -> None:
        self._training = Training()
        self._entries: dict[int, dict[str, Any]] = {}

    def entries(self, step: int) -> dict[str, Any]:
        while self._training.n_steps < step:
            self._training.advance()
            entries = copy.deepcopy(self._training.entries())
            del entries["ballast"]
            self._entries[self._training.n_steps] = entries
        return {**self._entries[step], "ballast": ballast(step)}

    def forget_before(self, step: int) -> None:
        self._entries = {n: entries for n, entries in self._entries.items() if n >= step}


class Rounds:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Uninterrupted()
        self.n_saved = 0
        self.n_leftovers = 0

    def run(self, seconds: float) -> None:
        with self._child(None) as child:
            time.sleep(seconds)
            child.kill()
        self._check()

    def finish(self) -> None:
        steps = ptsave.AsyncCheckpointer(self.folder).steps()
        last = steps[-1] + 5 if steps else 5
        with self._child(last) as child:
            child.join()
        self._check()
        names = [f"step-{step:08d}.pt" for step in range(last - KEEP + 1, last + 1)]
        assert sorted(os.listdir(self.folder)) == names

    @contextmanager
    def _child(self, n_steps: int | None) -> Iterator[Child]:
        progress, sink = os.pipe()
        child = Child(lambda: train(self.folder, n_steps, sink))
        os.close(sink)
        with os.fdopen(progress, "rb") as stream:
            yield child
            self.n_saved += len(stream.read())

    def _check(self) -> None:
        names = set(os.listdir(self.folder)) if self.folder.exists() else set()
        leftovers = {name for name in names if TEMPORARY.fullmatch(name)}
        assert len(leftovers) <= 1, names
        self.n_leftovers += len(leftovers)
        checkpointer = ptsave.AsyncCheckpointer(self.folder, keep=KEEP)
        steps = checkpointer.steps()
        assert set(os.listdir(self.folder)) == {checkpointer.path(step).name for step in steps}
        assert names - leftovers == set(os.listdir(self.folder))
        assert len(steps) >= min(KEEP, self.n_saved)
        for step in steps:
            expected = self.reference.entries(step)
            for load in (ptsave.load, torch.load):
                assert_same_object(load(checkpointer.path(step)), expected)
        if steps:
            assert checkpointer.latest() == checkpointer.path(steps[-1])
            self.reference.forget_before(steps[0])


RULES: dict[str, Any] = {"keep_every": 10, "keep_best": 2, "metric": "m", "keep_marked": "marked"}


def entries_of(step: int) -> dict[str, Any]:
    return {"m": step * 37 % 101, "marked": step % 7 == 0, "ballast": ballast(step)}


def save_by_rules(folder: Path, last: int | None) -> None:
    with ptsave.AsyncCheckpointer(folder, 1, fsync=False, **RULES) as checkpointer:
        step = max(checkpointer.steps(), default=0)
        while step != last:
            step += 1
            checkpointer.save(step, **entries_of(step)).result()


def promised(last: int) -> set[int]:
    steps = range(1, last + 1)
    best = sorted(steps, key=lambda step: (entries_of(step)["m"], -step))[:2]
    return {last, *best, *(step for step in steps if step % 10 == 0 or step % 7 == 0)}


def test_killed_trainings_keep_what_the_rules_promise(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")
    for _ in range(min(ROUNDS, 50)):  # each keeps more files
        child = Child(lambda: save_by_rules(tmp_path, None))
        time.sleep(generator.uniform(0, 0.1))
        child.kill()
        if steps := ptsave.AsyncCheckpointer(tmp_path).steps():
            assert promised(steps[-1]) <= set(steps)
    last = max(steps, default=0) + 5
    Child(lambda: save_by_rules(tmp_path, last)).join()
    assert set(ptsave.AsyncCheckpointer(tmp_path).steps()) == promised(last)
    for step in promised(last):
        assert_same_object(torch.load(tmp_path / f"step-{step:08d}.pt"), entries_of(step))


@pytest.mark.usefixtures("one_torch_thread")  # or the results have other bits in children
def test_killed_trainings_go_on_where_they_were(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    rounds = Rounds(tmp_path / "checkpoints")
    for _ in range(ROUNDS):
        rounds.run(generator.uniform(0, 0.15))
    rounds.finish()
    assert rounds.n_saved > 0
    if ROUNDS >= 100:  # otherwise the moments were not in the middle of anything
        assert rounds.n_leftovers > ROUNDS // 10


# --------------------------------------------------------------------------------- several ranks
# Whatever happens, a step that counts has the parts of one save, and the ranks that live learn of
# the death and end.

_N_ELEMENTS = 200_000
_LIMIT_S = 60


def values_of(step: int, rank: int) -> torch.Tensor:
    return torch.full((_N_ELEMENTS,), float(100 * step + rank))


def train_rank(folder: Path, rank: int, size: int, run: int) -> None:
    """Go on from the latest step that all ranks have."""
    try:
        checkpointer = ptsave.AsyncCheckpointer(
            folder, keep=KEEP, fsync=False, rank=rank, world_size=size
        )
        (folder / f".met-{run}-{rank}").touch()
        first = 0
        if checkpointer.latest() is not None:
            values = torch.zeros(_N_ELEMENTS)
            first = checkpointer.restore(values={"x": values})["step"]
            assert torch.equal(values, values_of(first, rank))
        for step in range(first, first + 1000):  # the first once more, in place of what is there
            checkpointer.save(step, values={"x": values_of(step, rank)}, step=step, run=run)
            if step % 3 == 0:
                checkpointer.wait()
    except RuntimeError as error:
        if "has ended" not in str(error):
            raise


def check_parts(folder: Path, size: int) -> int:
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
            assert torch.equal(entry["values"]["x"], values_of(entry["step"], rank))
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
            Child(lambda rank=rank, run=run: train_rank(folder, rank, size, run))  # type: ignore[misc]
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
        now = check_parts(folder, size)
        assert now >= highest
        highest = now
    assert highest > 0
    names = [name for name in os.listdir(folder) if not name.startswith(".met")]
    assert len(names) <= 10 * size  # what never was complete is cleaned up
