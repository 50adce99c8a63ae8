"""Many save to one path, many read it: every reader finds a whole file, the old one or a new one.

``PTSAVE_STRESS_SECONDS`` is how long all cases together take (default 3; ``make stress`` takes ten
minutes).  tests/writing/test_two_savers.py has the moments that matter, one by one.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from _system import Child

import ptsave
from ptsave.inspection.verification import verify_file

pytestmark = [pytest.mark.timeout(0), pytest.mark.usefixtures("_leaves_nothing_open")]

SECONDS = float(os.environ.get("PTSAVE_STRESS_SECONDS", "3"))
STATE_NBYTES = 2 << 20
LINK = "link.pt"
_FORKING = threading.Lock()  # filelock, which some torch imports, refuses two forks at a time

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """How many save, from where, and into what."""

    disk: str  # "" for that of pytest's temporary directories
    processes: bool
    n_savers: int
    n_readers: int = 2

    def __str__(self) -> str:
        kind = "processes" if self.processes else "threads"
        return f"{self.n_savers} {kind}{f' on {self.disk}' if self.disk else ''}"


CASES = [
    Case(disk, processes, n_savers)
    for disk, processes, n_savers in itertools.product(["", "/dev/shm"], [True, False], [2, 3, 8])
]


def state_of(saver: int) -> State:
    """Return what a saver writes: its number in every element, and a size of its own."""
    n = STATE_NBYTES // 16 + 1000 * saver
    return {f"layer{i}.weight": torch.full((n,), float(saver)) for i in range(4)}


def check(found: State) -> None:
    """Fail unless all is of one saver."""
    (saver,) = {float(tensor[0]) for tensor in found.values()}
    expected = state_of(int(saver))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (name, saver)


# ------------------------------------------------------------------------------------ one turn each


def save(path: Path, saver: int, turn: int) -> None:
    """Save in one of the ways that replace a file."""
    state = state_of(saver)
    ways: list[Callable[[], object]] = [
        lambda: ptsave.save(state, path),
        lambda: ptsave.save(state, path.with_name(LINK)),
        lambda: ptsave.async_save(state, path).result(),
        lambda: ptsave.save(state, path, fsync=True),
    ]
    ways[turn % (len(ways) if turn % 5 == 0 else 2)]()


def overwrite(path: Path, saver: int, turn: int) -> None:
    """Save in place, or in one case of three by a rename."""
    ptsave.save(state_of(saver), path, atomic=saver == turn % 3)


def read(path: Path, reader: int, turn: int) -> None:
    """Read all of the file, in one of the ways that there are."""
    ways = [_load, _map, _load_stock, _open, _load_into, _verify]
    ways[(reader + turn) % len(ways)](path)


def _load(path: Path) -> None:
    check(ptsave.load(path))


def _map(path: Path) -> None:
    check(ptsave.load(path, mmap=True))


def _load_stock(path: Path) -> None:
    check(torch.load(path))


def _open(path: Path) -> None:
    with ptsave.open(path) as archive:
        check({name: archive[name] for name in state_of(0)})


def _load_into(path: Path) -> None:
    # Which sizes are right only the file can say.
    (saver,) = ptsave.load(path)["layer0.weight"][:1].tolist()
    target = state_of(int(saver))
    try:
        ptsave.load_into(path, target)
    except RuntimeError as error:
        if "size mismatch" not in str(error):  # replaced by another one's meanwhile
            raise
    else:
        check(target)


def _verify(path: Path) -> None:
    assert verify_file(str(path)).problems == []


# ------------------------------------------------------------------------------------ many at once


class Crowd:
    """Functions that run at the same time, each until its time is over, at least once."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._threads: list[threading.Thread] = []
        self.errors: list[str] = []

    def add(self, action: Callable[[int], None], *, process: bool) -> None:
        target = self._in_child if process else self._repeat
        self._threads.append(threading.Thread(target=target, args=(action,)))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _repeat(self, action: Callable[[int], None]) -> None:
        try:
            for turn in itertools.count():
                action(turn)
                if time.monotonic() > self._end or self.errors:
                    return
        except BaseException:
            self.errors.append(traceback.format_exc())

    def _in_child(self, action: Callable[[int], None]) -> None:
        with _FORKING:
            child = Child(lambda: self._repeat_or_fail(action))
        status, error = child.wait()
        if status:
            self.errors.append(error or f"wait status {status}")

    def _repeat_or_fail(self, action: Callable[[int], None]) -> None:
        self._repeat(action)
        assert not self.errors, self.errors[0]


@pytest.fixture
def folder(case: Case, tmp_path: Path) -> Iterator[Path]:
    if not case.disk:
        yield tmp_path
        return
    if not os.path.isdir(case.disk):
        pytest.skip(f"no {case.disk}")
    with tempfile.TemporaryDirectory(dir=case.disk) as name:
        yield Path(name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_readers_find_a_whole_file(folder: Path, case: Case) -> None:
    path = folder / "model.pt"
    ptsave.save(state_of(0), path)
    path.with_name(LINK).symlink_to(path.name)
    crowd = Crowd(SECONDS / len(CASES) / 2)
    for saver in range(case.n_savers):
        crowd.add(partial(save, path, saver), process=case.processes)
    for reader in range(case.n_readers):
        crowd.add(partial(read, path, reader), process=case.processes)
    crowd.run()
    assert not crowd.errors, crowd.errors[0]
    check(ptsave.load(path))
    assert sorted(os.listdir(folder)) == [LINK, path.name]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_last_one_that_overwrites_leaves_a_whole_file(folder: Path, case: Case) -> None:
    """In place no reader is safe, but two savers do not mix, nor with one that replaces."""
    path = folder / "model.pt"
    crowd = Crowd(SECONDS / len(CASES) / 2)
    for saver in range(case.n_savers):
        crowd.add(partial(overwrite, path, saver), process=case.processes)
    crowd.run()
    assert not crowd.errors, crowd.errors[0]
    check(ptsave.load(path))
    assert os.listdir(folder) == [path.name]
