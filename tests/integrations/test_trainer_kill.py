"""transformers' Trainer in processes that are killed at any moment, and resumed.

As `test_kill`, with the same environment variables.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from _system import Child
from client_checkpoints import assert_same_state
from kill_rounds import ROUNDS, SEED
from tiny_trainers import N_STEPS, assert_same_checkpoint, make_trainer, state_of

pytestmark = [
    pytest.mark.kill,
    pytest.mark.timeout(0),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_torch_thread"),
]
_N_KILLS = max(ROUNDS // 10, 4)
_OPTIONS = {"save_steps": 1, "save_total_limit": None}


@pytest.fixture(scope="module")
def stock(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint after each step of a training that nobody kills."""
    folder = tmp_path_factory.mktemp("stock")
    trained = make_trainer(transformers, "stock", folder, **_OPTIONS)
    trained.train()
    return {"state": state_of(trained), "folder": folder}


class Runs:
    """A training that saves after each step, in children that die."""

    def __init__(self, transformers: Any, kind: str, folder: Path, stock: Path) -> None:
        self._transformers, self._kind, self._stock = transformers, kind, stock
        self.folder = folder
        self._n_complete = 0
        self.n_left = 0

    def trained(self) -> Any:
        """Train from the last complete checkpoint, or from the beginning, to the end."""
        trainer = make_trainer(self._transformers, self._kind, self.folder, **_OPTIONS)
        trainer.train(resume_from_checkpoint=True if self._steps() else None)
        return trainer

    def kill_after(self, seconds: float) -> None:
        child = Child(self._train_and_stay)
        time.sleep(seconds)
        child.kill()
        self.check()
        if self._steps()[-1:] == [N_STEPS]:
            shutil.rmtree(self.folder)
            self._n_complete = 0

    def _train_and_stay(self) -> None:
        self.trained()
        signal.pause()

    def _steps(self) -> list[int]:
        names = os.listdir(self.folder) if self.folder.exists() else []
        return sorted(int(name[len("checkpoint-") :]) for name in names if name[0] != ".")

    def check(self) -> None:
        """Every directory with a checkpoint's name is as stock's; no step is missing."""
        steps = self._steps()
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= self._n_complete
        self._n_complete = len(steps)
        self.n_left += bool(list(self.folder.glob(".checkpoint-*.ptsave")))
        for step in steps:
            found = self.folder / f"checkpoint-{step}"
            assert_same_checkpoint(found, self._stock / found.name)
            assert json.loads((found / "trainer_state.json").read_text())["global_step"] == step


@pytest.mark.parametrize("kind", ["blocking", "background"])
def test_killed_at_random_moments(kind: str, transformers: Any, stock: Any, tmp_path: Path) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    runs = Runs(transformers, kind, tmp_path / "run", stock["folder"])
    start = time.monotonic()
    runs.trained()
    seconds = time.monotonic() - start
    shutil.rmtree(runs.folder)
    for _ in range(_N_KILLS):
        runs.kill_after(generator.uniform(0, seconds))
    assert_same_state(state_of(runs.trained()), stock["state"])
    runs.check()
    assert not list(runs.folder.glob(".*"))
    if _N_KILLS >= 50:  # otherwise the moments were not in the middle of anything
        assert runs.n_left > _N_KILLS // 10
