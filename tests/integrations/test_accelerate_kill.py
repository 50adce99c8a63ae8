"""Processes that are killed at any moment of ``save_state``, and go on from the old or the new.

As `test_kill`, with the same environment variables.
"""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from _system import Child, in_child
from client_checkpoints import assert_same_state
from kill_rounds import ROUNDS, SEED
from test_accelerate import prepared, state_of, train

from ptsave.integrations import staged_folders

pytestmark = [
    pytest.mark.kill,
    pytest.mark.timeout(0),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_torch_thread"),
]
_N_STEPS = 60  # of a run; then another one begins
_N_KILLS = max(ROUNDS // 10, 5)
_NOTE = "loss 0.5"


@pytest.fixture(scope="module")
def expected(accelerate: Any, one_torch_thread: None) -> list[Any]:
    """The states after each step of a training that nobody kills."""
    random.seed(0)
    parts = prepared(accelerate)
    states = [copy.deepcopy(state_of(parts))]
    for _ in range(_N_STEPS):
        train(parts, 1)
        states.append(copy.deepcopy(state_of(parts)))
    return states


@pytest.fixture(params=["exchanged", "renamed", "filled"], autouse=True)
def _replaced_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let directories replace each other as on file systems that cannot exchange or rename, too."""
    if request.param == "renamed":
        monkeypatch.setattr(staged_folders, "_exchange", lambda *_: False)
    elif request.param == "filled":
        error = OSError(errno.EXDEV, "Invalid cross-device link")
        monkeypatch.setattr(staged_folders, "_exchange", Mock(side_effect=error))


def begun(accelerate: Any, folder: Path) -> tuple[Any, ...]:
    """Return a training as its checkpoint says, or one that begins."""
    random.seed(0)
    parts = prepared(accelerate)
    if is_saved(folder):
        parts[0].load_state(str(folder))
    return parts


def is_saved(folder: Path) -> bool:
    """Return whether there is a state: also where its directory has no name just now."""
    left = staged_folders.StagedFolder(str(folder), fsync=False).left_behind()
    return (folder / "optimizer.bin").exists() or left is not None


def step_of(parts: tuple[Any, ...]) -> int:
    step: int = parts[3].state_dict()["last_epoch"]
    return step


class Runs:
    """A training that saves after each step into one directory, in children that die."""

    def __init__(self, accelerate: Any, folder: Path, expected: list[Any]) -> None:
        self.accelerate, self.folder = accelerate, folder
        self._expected = expected
        self.n_left = 0
        self._begin()

    def _begin(self) -> None:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "note").write_text(_NOTE)
        self.n_steps = 0

    def kill_after(self, seconds: float) -> None:
        with self._child() as child:
            time.sleep(seconds)
            child.kill()
        self.check()

    @contextmanager
    def _child(self) -> Iterator[Child]:
        """Yield a process that trains; afterwards the step is known that it is sure to have saved.

        It must have ended by then.
        """
        source, sink = os.pipe()
        child = Child(lambda: self._train(sink))
        os.close(sink)
        with os.fdopen(source, "rb") as stream:
            yield child
            told = stream.read()
        self.n_steps = max([self.n_steps, *struct.unpack(f"{len(told) // 4}i", told)])

    def advance(self) -> None:
        """Train for a step and save."""
        parts = begun(self.accelerate, self.folder)
        train(parts, 1)
        parts[0].save_state(self.folder)

    def _train(self, sink: int) -> None:
        parts = begun(self.accelerate, self.folder)
        while True:
            if step_of(parts) < _N_STEPS:
                train(parts, 1)
            parts[0].save_state(self.folder)
            os.write(sink, struct.pack("i", step_of(parts)))

    def check(self) -> None:
        """The state is that of one step, at least the last one of which the child has told."""
        names = set(os.listdir(self.folder.parent))
        assert names <= {"state", ".state.ptsave"}
        self.n_left += ".state.ptsave" in names
        if not is_saved(self.folder):
            assert self.n_steps == 0
            return
        parts = begun(self.accelerate, self.folder)
        assert step_of(parts) in (self.n_steps, self.n_steps + 1)
        assert_same_state(state_of(parts), self._expected[step_of(parts)])
        self.n_steps = step_of(parts)  # the child may have died before it told
        if step_of(parts) == _N_STEPS:
            self.finish()
            self._begin()

    def finish(self) -> None:
        """The next process to save puts everything in order."""
        begun(self.accelerate, self.folder)[0].save_state(self.folder)
        assert os.listdir(self.folder.parent) == ["state"]
        assert (self.folder / "note").read_text() == _NOTE


def test_killed_at_random_moments(accelerate: Any, expected: Any, tmp_path: Path) -> None:
    generator = random.Random(SEED)
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    runs = Runs(accelerate, tmp_path / "run" / "state", expected)
    for _ in range(_N_KILLS):
        runs.kill_after(generator.uniform(0, 0.3))
    runs.finish()
    if _N_KILLS >= 50:  # otherwise the moments were not in the middle of anything
        assert runs.n_left > _N_KILLS // 10


# What changes names, or removes; a process is killed before and after each call of these.
_CALLS = ((os, "rename"), (shutil, "rmtree"), (staged_folders, "_exchange"))


def test_killed_at_each_change_of_names(accelerate: Any, expected: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "state"
    runs = Runs(accelerate, folder, expected)
    in_child(runs.advance)
    before = shutil.copytree(folder.parent, tmp_path / "before")
    n_kills = 0
    while True:
        shutil.rmtree(folder.parent)
        shutil.copytree(before, folder.parent)
        runs.n_steps = 1
        child = Child(runs.advance, functools.partial(_die_at, n_kills))
        status, message = child.wait()
        assert os.WIFSIGNALED(status) or status == 0, message
        runs.check()
        runs.finish()
        if status == 0:
            break
        n_kills += 1
    assert n_kills >= 6


def _die_at(number: int) -> None:
    """Let this process be killed when so many of the calls have begun or ended."""
    counter = itertools.count()

    def die() -> None:
        if next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            die()
            result = call(*args, **kwargs)
            die()
            return result

        return function

    for module, name in _CALLS:
        setattr(module, name, dying(getattr(module, name)))
