"""Whatever kills a saving process, at any moment: the file is the old one or the new one, whole.

Children that keep overwriting a checkpoint are forked from this process, which has torch and ptsave
imported already, and killed after a random time.  ``PTSAVE_KILL_ROUNDS`` sets how often (default
14, `make kill` does 1000), ``PTSAVE_KILL_SEED`` repeats a run's times.
"""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from _system import Child
from kill_rounds import ROUNDS, SEED

import ptsave

pytestmark = [pytest.mark.kill, pytest.mark.timeout(0)]

TEMPORARY = re.compile(r"\.model\.pt\.[0-9a-f]{16}\.ptsave")

Contents = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """How the children save; `replaces` is whether there is a file to begin with."""

    name: str
    nbytes: int
    fsync: bool
    direct_io: bool
    replaces: bool = True


CASES = [
    Case("small", 100_000, fsync=False, direct_io=True),
    Case("small durable", 100_000, fsync=True, direct_io=True),
    Case("large", 40_000_000, fsync=False, direct_io=True),
    Case("large durable", 40_000_000, fsync=True, direct_io=True),
    Case("large durable buffered", 40_000_000, fsync=True, direct_io=False),
    Case("small fresh", 100_000, fsync=False, direct_io=True, replaces=False),
    Case("large fresh", 40_000_000, fsync=True, direct_io=True, replaces=False),
]


def make_contents(nbytes: int, version: int) -> Contents:
    """Several tensors of different sizes; the versions differ in sizes and in every byte."""
    sizes = [nbytes // 2 + 1000 * version, nbytes // 3, *([64 + version] * 20)]
    return {
        f"layer{i}.weight": torch.full((size,), 2 * (i % 100) + version, dtype=torch.uint8)
        for i, size in enumerate(sizes)
    }


class Rounds:
    """One folder, two versions of a checkpoint, and the children that die writing them."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case = case
        self.path = folder / "model.pt"
        self.versions = [make_contents(case.nbytes, version) for version in (0, 1)]
        self.whole: list[bytes] = []
        for version in self.versions:
            started = time.perf_counter()
            self._save(version)
            self.save_seconds = time.perf_counter() - started
            self.whole.append(self.path.read_bytes())
        self.n_leftovers = 0

    def run(self, generator: random.Random) -> None:
        if not self.case.replaces:
            self.path.unlink()
        child = self._fork()
        time.sleep(generator.uniform(0, 2.5 * self.save_seconds))
        child.kill()
        self._check()

    def _fork(self) -> Child:
        ready, announce = os.pipe()
        child = Child(lambda: self._keep_saving(announce))
        os.close(announce)
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        return child

    def _keep_saving(self, announce: int) -> NoReturn:
        os.write(announce, b"!")
        while True:
            for version in self.versions:
                self._save(version)

    def _save(self, version: Contents) -> None:
        ptsave.save(version, self.path, fsync=self.case.fsync)

    def _check(self) -> None:
        names = set(os.listdir(self.path.parent))
        leftovers = names - {"model.pt"}
        assert all(TEMPORARY.fullmatch(name) for name in leftovers), names
        assert len(leftovers) <= 1, "earlier leftovers are gone"
        self.n_leftovers += len(leftovers)
        if self.path.exists():
            now = self.path.read_bytes()
            assert now in self.whole, "neither the old file nor the new one"
            self._check_contents(self.whole.index(now))
        else:
            assert not self.case.replaces, "the old file is gone"
        self._save(self.versions[0])
        assert os.listdir(self.path.parent) == ["model.pt"]
        assert self.path.read_bytes() == self.whole[0]

    def _check_contents(self, version: int) -> None:
        for load in (ptsave.load, torch.load):
            loaded = load(self.path)
            assert list(loaded) == list(self.versions[version])
            for name, expected in self.versions[version].items():
                assert torch.equal(loaded[name], expected), name


def test_killed_saves_leave_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    n_rounds = {
        case: ROUNDS // len(CASES) + (i < ROUNDS % len(CASES)) for i, case in enumerate(CASES)
    }
    n_leftovers = 0
    for number, (case, n) in enumerate(n_rounds.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("PTSAVE_DIRECT_IO", "1" if case.direct_io else "0")
        rounds = Rounds(folder, case)
        for _ in range(n):
            print(case.name)
            rounds.run(generator)
        n_leftovers += rounds.n_leftovers
    # Otherwise the moments were not in the middle of anything, and nothing was tested.
    assert n_leftovers > ROUNDS // 10
