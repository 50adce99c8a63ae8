"""Whatever kills a process that saves a model, at any moment: the old set is there or the new one.

As `test_kill`, with the same environment variables.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from _system import Child
from _weights import assert_equal
from kill_rounds import ROUNDS, SEED
from safetensors.torch import load_file
from test_save_model import FORMATS, SINGLE, read_stock
from torch import Tensor, nn

import ptsave

pytestmark = [pytest.mark.kill, pytest.mark.timeout(0)]


@dataclass(frozen=True)
class Case:
    """Two models that replace each other, each in one file or in shards."""

    name: str
    sizes: tuple[str, str]  # of shards
    fsync: bool = False


CASES = [
    Case("shards by shards", ("300KB", "500KB")),
    Case("durable shards", ("300KB", "300KB"), fsync=True),
    Case("shards by one file", ("300KB", "1GB")),
    Case("one file by one file", ("1GB", "1GB")),
]


def make_model(version: int) -> dict[str, Tensor]:
    """Tensors whose sizes and values tell the versions apart."""
    return {
        f"weight{i}": torch.full((40_000 + 1000 * i + version,), 2.0 * i + version)
        for i in range(12)
    }


class Rounds:
    """One folder, two models, and the children that die writing them."""

    def __init__(self, folder: Path, case: Case, kind: Any) -> None:
        self.folder, self.case, self.kind = folder, case, kind
        self.models = [make_model(version) for version in (0, 1)]
        self.names: list[set[str]] = []
        for version in (0, 1):
            started = time.perf_counter()
            self._save(version)
            self.save_seconds = time.perf_counter() - started
            self.names.append(self._names())
        self.n_interrupted = 0

    def run(self, generator: random.Random) -> None:
        child = Child(self._keep_saving)
        time.sleep(generator.uniform(0, 4 * self.save_seconds))
        child.kill()
        self._check()

    def _keep_saving(self) -> NoReturn:
        while True:
            for version in (0, 1):
                self._save(version)

    def _save(self, version: int) -> None:
        ptsave.save_model(
            self.models[version],
            self.folder,
            max_shard_size=self.case.sizes[version],
            format=self.kind,
            fsync=self.case.fsync,
        )

    def _names(self) -> set[str]:
        return set(os.listdir(self.folder))

    def _check(self) -> None:
        found = self._read()
        version = int(found["weight0"][0])
        assert_equal(found, self.models[version])
        model = nn.ParameterDict({name: torch.empty_like(each) for name, each in found.items()})
        ptsave.load_model(model, self.folder)
        assert_equal(model.state_dict(), self.models[version])
        before = self._names()
        self.n_interrupted += len(before) != len(self.names[version])
        self._save(0)
        after = self._names()
        assert len(after) == len(self.names[0]), (before, after)
        assert not [name for name in after if name.startswith(".")], after
        assert_equal(self._read(), self.models[0])

    def _read(self) -> dict[str, Tensor]:
        """Read as transformers does: of a file and an index, the file counts."""
        single = self.folder / SINGLE[self.kind]
        if not single.exists():
            return read_stock(self.folder, self.kind)
        return dict(load_file(single) if self.kind == "safetensors" else torch.load(single))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_killed_saves_leave_the_old_set_or_the_new_one(
    case: Case, kind: Any, tmp_path: Path
) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    rounds = Rounds(tmp_path, case, kind)
    n = max(ROUNDS // (len(CASES) * len(FORMATS)), 3)
    for _ in range(n):
        rounds.run(generator)
    if n >= 20:  # otherwise chance decides
        assert rounds.n_interrupted > 0, "nothing was interrupted, so nothing was tested"
