"""AsyncCheckpointer: what is in its directory at any time, and what it says when that fails."""

from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import itertools
import os
import pickle
import resource
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _system import Gate, as_nobody, in_child, run_python
from stock_comparison import assert_same_object
from torch import nn
from torch.utils.serialization import config as torch_config
from warm_python import WarmProcess

import ptsave
from ptsave import _C
from ptsave.background.saves import writes_held_back
from ptsave.training.checkpoint import restore_entries
from ptsave.training.directory import CheckpointDirectory

IS_ROOT = os.geteuid() == 0
TOKEN = "0123456789abcdef"
MIB = 1 << 20


def training(seed: int = 0) -> dict[str, Any]:
    """A model, an optimizer and a scheduler that have made one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def states(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: obj.state_dict() for name, obj in objects.items()}


def name_of(step: int) -> str:
    return f"step-{step:08d}.pt"


def leftover_of(name: str, token: str = TOKEN) -> str:
    return f".{name}.{token}.ptsave"


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"not a checkpoint")


def save_all(checkpointer: ptsave.AsyncCheckpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, value=torch.tensor(step))
    checkpointer.wait()


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let every larger write of this process fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_too_much(checkpointer: ptsave.AsyncCheckpointer, step: int) -> BaseException:
    """Let the save of a step fail; returns its error, without asking the future for it."""
    with file_size_limit(MIB):
        future = checkpointer.save(step, weight=torch.ones(MIB))
        concurrent.futures.wait([future])
    assert future._exception is not None
    return future._exception


@pytest.fixture
def checkpointer(tmp_path: Path) -> ptsave.AsyncCheckpointer:
    return ptsave.AsyncCheckpointer(tmp_path)


# ------------------------------------------------------------------------------- saving, restoring


def test_wait_lets_the_writes_go_on_that_its_thread_holds_back(tmp_path: Path) -> None:
    with writes_held_back(), ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, weight=torch.ones(3))
        checkpointer.wait()
        assert checkpointer.steps() == [1]


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    with ptsave.AsyncCheckpointer(tmp_path, keep=None) as checkpointer:
        for step in range(20):
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.save(step, model=model)
        with torch.no_grad():
            model.weight.fill_(-1)
    for step in range(20):
        checkpointer.restore(step, model=model)
        assert torch.equal(model.weight, torch.full((100, 100), float(step)))


def test_staging_in_the_background(tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(tmp_path, staging="background") as checkpointer:
        weight = torch.ones(MIB)
        future = checkpointer.save(1, weight=weight)
        future.wait_staged()
        weight.zero_()
    assert torch.equal(checkpointer.restore()["weight"], torch.ones(MIB))


def test_names_that_are_free_for_objects(tmp_path: Path) -> None:
    names = ["self", "step", "strict", "map_location", "weights_only", "verify", "keep"]
    names += ["f", "targets", "objects", "obj", "staging", "rank"]
    objects: dict[str, Any] = {name: nn.Linear(1, i + 1) for i, name in enumerate(names)}
    targets: dict[str, Any] = {name: nn.Linear(1, i + 1) for i, name in enumerate(names)}
    options = ("strict", "map_location", "weights_only", "verify")
    with ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(3, **objects)
    free = {name: target for name, target in targets.items() if name not in options}
    rest = checkpointer.restore(3, **free)
    for name in options:
        targets[name].load_state_dict(rest.pop(name))
    assert rest == {}
    assert_same_object(states(targets), states(objects))


def test_step_as_a_keyword_of_restore_is_explained(tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(3, step=3)
    with pytest.raises(TypeError, match=r"restore\(3, \.\.\.\)"):
        checkpointer.restore(step=3)
    assert checkpointer.restore() == {"step": 3}


def test_nothing_to_restore(tmp_path: Path, checkpointer: ptsave.AsyncCheckpointer) -> None:
    assert checkpointer.latest() is None
    assert checkpointer.steps() == []
    with pytest.raises(FileNotFoundError, match="no checkpoint") as caught:
        checkpointer.restore(model=nn.Linear(1, 1))
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path)
    save_all(checkpointer, 4, 5)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3, only of 4, 5"):
        checkpointer.restore(3)


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), torch.tensor(5)])
def test_whatever_is_an_index_is_a_step(tmp_path: Path, step: Any) -> None:
    with ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(step, value=1)
        assert checkpointer.path(step) == checkpointer.path(5)
    assert checkpointer.steps() == [5]
    assert checkpointer.restore(step) == {"value": 1}


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, torch.tensor(1.0)])
def test_what_is_no_step(tmp_path: Path, checkpointer: ptsave.AsyncCheckpointer, step: Any) -> None:
    with pytest.raises(TypeError, match="step must be an int"):
        checkpointer.save(step, value=1)
    with pytest.raises(TypeError, match="step must be an int"):
        checkpointer.path(step)
    assert os.listdir(tmp_path) == []


def test_negative_steps_are_refused(checkpointer: ptsave.AsyncCheckpointer) -> None:
    for call in (checkpointer.save, checkpointer.path, checkpointer.restore):
        with pytest.raises(ValueError, match="step must be at least 0, not -1"):
            call(-1)


@pytest.mark.parametrize("keep", [True, 1.5, "3", 0, -1])
def test_keep_that_is_no_number_or_none(tmp_path: Path, keep: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"keep must be (an int|at least 1)"):
        ptsave.AsyncCheckpointer(tmp_path / "new", keep)
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------ names in the folder


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    steps = [0, 9, 10, 99_999_999, 100_000_000, 10**30]
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=None)
    for step in steps:
        checkpointer.save(step, value=1)
    checkpointer.wait()
    assert checkpointer.steps() == steps
    assert checkpointer.latest() == checkpointer.path(10**30)
    for step in steps:
        assert checkpointer.path(step).is_file()


def test_other_zero_padding(tmp_path: Path) -> None:
    ptsave.save({"value": 5}, tmp_path / "step-5.pt")
    ptsave.save({"value": 12}, tmp_path / "step-012.pt")
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=2)
    assert checkpointer.steps() == [5, 12]
    assert checkpointer.path(5).name == "step-5.pt"
    assert checkpointer.restore() == {"value": 12}
    checkpointer.save(12, value=13)
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-012.pt", "step-5.pt"]
    assert checkpointer.restore(12) == {"value": 13}
    checkpointer.save(13, value=13)
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-00000013.pt", "step-012.pt"]


def test_files_of_the_user_beside_checkpoints_stay(tmp_path: Path) -> None:
    """Only with a local directory, such a file would be a manifest."""
    (tmp_path / "step-00000002.pt.json").write_text("{}")
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 1, 2, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002.pt.json", "step-00000003.pt"]


def test_two_names_of_one_step(tmp_path: Path) -> None:
    ptsave.save({"value": "other"}, tmp_path / "step-5.pt")
    ptsave.save({"value": "ours"}, tmp_path / name_of(5))
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    assert checkpointer.steps() == [5]
    assert checkpointer.restore() == {"value": "ours"}
    save_all(checkpointer, 6)
    assert os.listdir(tmp_path) == [name_of(6)]


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    foreign = ["model.pt", "step-1.pth", "step-.pt", "step--1.pt", "step-+2.pt", "step-1e3.pt"]
    foreign += ["Step-3.pt", "step-4.pt ", "step-4.pt\n", "xstep-5.pt", "step-٣.pt", "step-1_0.pt"]
    foreign += [leftover_of("model.pt"), leftover_of("step-x.pt"), ".step-1.pt.ptsave"]
    foreign += [leftover_of("step-1.pt", TOKEN[1:]), leftover_of("step-1.pt", TOKEN.upper())]
    make_files(tmp_path, *foreign)
    folders = [name_of(50), leftover_of(name_of(51))]
    for name in folders:
        (tmp_path / name).mkdir()
    (tmp_path / name_of(52)).symlink_to("nowhere")
    (tmp_path / name_of(53)).symlink_to(name_of(53))
    os.mkfifo(tmp_path / name_of(54))
    others = {*foreign, *folders, name_of(52), name_of(53), name_of(54)}
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    save_all(checkpointer, 1, 2)
    assert set(os.listdir(tmp_path)) == {*others, name_of(2)}


def test_relative_directory_is_that_of_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ptsave.AsyncCheckpointer("checkpoints") as checkpointer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpointer.save(1, value=1)
    assert os.listdir(tmp_path / "checkpoints") == [name_of(1)]
    assert checkpointer.latest() == tmp_path / "checkpoints" / name_of(1)


# ----------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize(("keep", "fsync"), [(1, True), (3, False)])
def test_the_highest_steps_stay(tmp_path: Path, keep: int, fsync: bool) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep, fsync=fsync)
    for step in range(6):
        save_all(checkpointer, step)
        assert checkpointer.steps() == list(range(6))[max(step + 1 - keep, 0) : step + 1]
    checkpointer.close()
    assert len(os.listdir(tmp_path)) == keep


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=2)
    save_all(checkpointer, 1, 2)
    with checkpointer.path(2).open("rb") as reader:
        checkpointer.save(2, value="new")
        checkpointer.wait()
        assert ptsave.load(reader) == {"value": torch.tensor(2)}, "written beside it, not over it"
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.restore() == {"value": "new"}


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=3)
    save_all(checkpointer, 10, 11, 12)
    with pytest.warns(ptsave.CheckpointWarning, match="of step 12 is there.*step 5") as seen:
        checkpointer.save(5, value=5)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    checkpointer.wait()
    assert checkpointer.steps() == [5, 11, 12], "what was just saved stays"
    assert checkpointer.latest() == checkpointer.path(12)
    save_all(checkpointer, 6)  # said once
    assert checkpointer.steps() == [6, 11, 12]
    save_all(checkpointer, 13)
    assert checkpointer.steps() == [11, 12, 13]


def test_going_back_with_one_kept(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 10)
    with pytest.warns(ptsave.CheckpointWarning):
        save_all(checkpointer, 5)
    assert checkpointer.steps() == [5, 10], "the one just saved, and the latest"
    save_all(checkpointer, 6)
    assert checkpointer.steps() == [6, 10]
    save_all(checkpointer, 11)
    assert checkpointer.steps() == [11]


def test_old_checkpoints_go_when_the_save_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 1)
    seen: list[tuple[bool, list[int]]] = []
    remove_file = _C.remove_file

    def remove(path: bytes) -> bool:
        seen.append((future.done(), checkpointer.steps()))
        return remove_file(path)

    monkeypatch.setattr(_C, "remove_file", remove)
    future = checkpointer.save(2, weight=torch.ones(4 * MIB))
    checkpointer.wait()
    assert seen == [(True, [1, 2])]
    assert checkpointer.steps() == [2]


class Restored:
    """Runs something in the middle of a restore."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def load_state_dict(self, state: Any) -> None:
        self.action()


def test_a_checkpoint_that_is_being_restored_stays(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 1)
    seen: list[list[int]] = []

    def go_on() -> None:
        save_all(checkpointer, 2, 3)
        seen.append(checkpointer.steps())

    checkpointer.restore(value=Restored(go_on))
    assert seen == [[1, 3]]
    save_all(checkpointer, 4)
    assert checkpointer.steps() == [4]

    def fail() -> None:
        raise KeyError("wrong")

    with pytest.raises(KeyError, match="wrong"):
        checkpointer.restore(value=Restored(fail))
    save_all(checkpointer, 5)
    assert checkpointer.steps() == [5], "not held for ever by a restore that failed"


def test_a_step_that_is_being_restored_takes_no_newer_ones_place(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=2)
    save_all(checkpointer, 1, 2)
    seen: list[list[int]] = []

    def go_on() -> None:
        save_all(checkpointer, 3, 4)
        seen.append(checkpointer.steps())

    checkpointer.restore(1, value=Restored(go_on))
    assert seen == [[1, 3, 4]]
    save_all(checkpointer, 5)
    assert checkpointer.steps() == [4, 5]


def test_failed_saves_prune_nothing(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 1)
    make_files(tmp_path, name_of(0))
    save_too_much(checkpointer, 2)
    with pytest.raises(ptsave.SaveError):
        checkpointer.wait()
    assert checkpointer.steps() == [0, 1]
    assert checkpointer.restore() == {"value": torch.tensor(1)}
    save_all(checkpointer, 3)
    assert checkpointer.steps() == [3]


def test_what_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    save_all(checkpointer, 1)

    def refuse(path: bytes) -> bool:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fsdecode(path))

    with monkeypatch.context() as patch:
        patch.setattr(_C, "remove_file", refuse)
        with pytest.warns(ptsave.CheckpointWarning, match=f"cannot be removed.*{name_of(1)}"):
            save_all(checkpointer, 2)
    assert checkpointer.steps() == [1, 2]
    save_all(checkpointer, 3)
    assert checkpointer.steps() == [3]


@pytest.mark.skipif(not IS_ROOT, reason="only root can become someone else")
def test_checkpoints_of_others_in_a_sticky_directory_stay(tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, value=1)  # all imports, which may be from files of root's

    def save() -> None:
        warns = pytest.warns(ptsave.CheckpointWarning, match="cannot be removed")
        with warns, ptsave.AsyncCheckpointer(folder, keep=1) as checkpointer:
            checkpointer.save(2, value=2)
        assert checkpointer.steps() == [1, 2]

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which everybody can get to
        ptsave.save([1], Path(folder, name_of(1)))
        os.chmod(folder, 0o1777)
        as_nobody(save)


# -------------------------------------------------------------------------------- failures, waiting


def test_errors_are_raised_once_and_in_order(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    first, second = save_too_much(checkpointer, 1), save_too_much(checkpointer, 2)
    future = checkpointer.save(3, value=3)
    future.result()  # the earlier ones are no concern of this one
    for expected in (first, second):
        with pytest.raises(ptsave.SaveError) as caught:
            checkpointer.wait()
        assert caught.value is expected
        assert caught.value.errno == errno.EFBIG
    checkpointer.wait()
    checkpointer.close()
    assert os.listdir(tmp_path) == [name_of(3)]


def test_close(checkpointer: ptsave.AsyncCheckpointer) -> None:
    checkpointer.save(1, value=1)
    error = save_too_much(checkpointer, 2)
    with pytest.raises(ptsave.SaveError) as caught:
        checkpointer.close()
    assert caught.value is error
    checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(3, value=3)
    assert checkpointer.restore() == {"value": 1}


def test_failures_that_are_known_are_not_raised_again(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    with file_size_limit(MIB):
        future = checkpointer.save(1, weight=torch.ones(MIB))
        assert isinstance(future.exception(), ptsave.SaveError)
    checkpointer.wait()
    error = save_too_much(checkpointer, 2)
    with pytest.raises(ptsave.SaveError) as caught:
        checkpointer.close()
    assert caught.value is error


def test_failed_saves_that_only_warn(tmp_path: Path) -> None:
    """Each warns once; the future has the error.  Errors of the program are raised as ever."""
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, on_error="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = [save_too_much(checkpointer, step) for step in (1, 2)]
        checkpointer.wait()
    assert [str(each.message) for each in caught] == [
        f"{tmp_path}: step {step} was not saved: {error}"
        for step, error in zip((1, 2), errors, strict=True)
    ]
    assert {each.category for each in caught} == {ptsave.CheckpointWarning}
    assert {type(error) for error in errors} == {ptsave.SaveError}
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpointer.save(4, value=lambda: None)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'warn', not 'no'"):
        checkpointer.save(4, value=1, on_error="no")  # type: ignore[arg-type]
    save_all(checkpointer, 4)
    with file_size_limit(MIB):
        concurrent.futures.wait([checkpointer.save(5, w=torch.ones(MIB), on_error="raise")])
    with pytest.raises(ptsave.SaveError):
        checkpointer.close()
    assert checkpointer.steps() == [4]


def test_interrupted_wait(checkpointer: ptsave.AsyncCheckpointer) -> None:
    """Ctrl-C ends the waiting, not the save."""
    gate = Gate()  # keeps other saves waiting
    first = ptsave.async_save([1], gate)
    checkpointer.save(1, value=1)
    timer = threading.Timer(
        0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        checkpointer.wait()
    timer.join()
    assert checkpointer.steps() == []
    gate.opened.set()
    checkpointer.wait()
    assert checkpointer.steps() == [1]
    assert first.exception() is None


def test_pending_saves(checkpointer: ptsave.AsyncCheckpointer) -> None:
    """They do not count yet, but for the warning about going back."""
    gate = Gate()  # keeps other saves waiting
    first = ptsave.async_save([1], gate)
    checkpointer.save(2, value=2)
    assert checkpointer.latest() is None
    with pytest.raises(FileNotFoundError):
        checkpointer.restore()
    with pytest.warns(ptsave.CheckpointWarning, match="of step 2"):
        cancelled = checkpointer.save(1, value=1)
    assert cancelled.cancel()
    gate.opened.set()
    checkpointer.close()
    assert checkpointer.steps() == [2]
    assert first.exception() is None


def test_the_end_of_a_block_raises_what_failed(tmp_path: Path) -> None:
    with pytest.raises(ptsave.SaveError), ptsave.AsyncCheckpointer(tmp_path) as checkpointer:
        save_too_much(checkpointer, 1)


def test_an_error_in_the_block_is_not_masked(tmp_path: Path) -> None:
    error = ZeroDivisionError("of the training")
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    failures: list[BaseException] = []

    def train() -> None:
        with checkpointer:
            checkpointer.save(1, value=1)
            failures.extend(save_too_much(checkpointer, step) for step in (2, 3))
            raise error

    with warnings.catch_warnings(record=True) as seen:  # where notes are not known
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError) as caught:
            train()
    assert caught.value is error
    notes = getattr(error, "__notes__", None) or [str(warning.message) for warning in seen]
    assert notes == [f"a checkpoint was also not saved: {failure}" for failure in failures]
    assert checkpointer.steps() == [1]


def test_the_error_of_a_future_in_the_block_is_not_its_own_note(tmp_path: Path) -> None:
    with (
        pytest.raises(ptsave.SaveError) as caught,
        ptsave.AsyncCheckpointer(tmp_path) as checkpointer,
        file_size_limit(MIB),
    ):
        checkpointer.save(1, weight=torch.ones(MIB)).result()
    assert not hasattr(caught.value, "__notes__")


def test_what_cannot_be_pickled_raises_in_the_call(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    with pytest.raises(Exception, match="pickle"):
        checkpointer.save(1, function=lambda: None)
    checkpointer.close()
    assert os.listdir(tmp_path) == []


def test_directory_removed_during_training(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = ptsave.AsyncCheckpointer(folder)
    folder.rmdir()
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    future = checkpointer.save(1, value=1)
    error = future.exception()
    assert isinstance(error, ptsave.SaveError)
    assert error.errno == errno.ENOENT
    assert str(folder) in str(error)
    checkpointer.save(2, value=2)
    with pytest.raises(ptsave.SaveError):
        checkpointer.wait()
    folder.mkdir()
    save_all(checkpointer, 2)
    assert checkpointer.steps() == [2]


def test_name_that_is_too_long_for_a_file(checkpointer: ptsave.AsyncCheckpointer) -> None:
    error = checkpointer.save(10**300, value=1).exception()
    assert isinstance(error, ptsave.SaveError)
    assert error.errno == errno.ENAMETOOLONG


def test_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    with ptsave.AsyncCheckpointer(str(folder)) as checkpointer:
        checkpointer.save(1, value=1)
    ptsave.AsyncCheckpointer(folder).close()
    assert ptsave.AsyncCheckpointer(folder, fsync=False).steps() == [1]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_directory_that_is_a_file(tmp_path: Path, name: str) -> None:
    make_files(tmp_path, "file")
    with pytest.raises(ptsave.SaveError, match="is a file: use another directory") as caught:
        ptsave.AsyncCheckpointer(tmp_path / name)
    assert caught.value.errno == errno.ENOTDIR
    assert caught.value.filename == str(tmp_path / name)


@pytest.mark.parametrize("name", ["", b""])
def test_directory_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    """An empty name, of a variable that is not set, does not mean the current directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ptsave.SaveError, match="it is empty") as caught:
        ptsave.AsyncCheckpointer(name)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(ptsave.SaveError, match="it is empty"):
        ptsave.save_model({"weight": torch.ones(2)}, name)
    assert os.listdir(tmp_path) == []


def test_directory_that_cannot_be_made() -> None:
    with pytest.raises(ptsave.SaveError, match="cannot be made") as caught:
        ptsave.AsyncCheckpointer("/proc/checkpoints")
    assert caught.value.filename == "/proc/checkpoints"


@pytest.mark.skipif(not IS_ROOT, reason="only root can become someone else")
def test_directory_that_may_not_be_written() -> None:
    def make() -> None:
        for path in ("/usr", "/usr/checkpoints"):
            with pytest.raises(ptsave.SaveError) as caught:
                ptsave.AsyncCheckpointer(path)
            assert (caught.value.errno, caught.value.filename) == (errno.EACCES, path)

    as_nobody(make)


# ----------------------------------------------------------------------------- processes, leftovers


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    leftovers = [leftover_of(name_of(5)), leftover_of("step-5.pt"), leftover_of(name_of(10**30))]
    make_files(tmp_path, *leftovers, "other.pt")
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    assert os.listdir(tmp_path) == ["other.pt"]
    make_files(tmp_path, *leftovers)
    save_all(checkpointer, 1)
    assert set(os.listdir(tmp_path)) == {"other.pt", name_of(1)}


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / leftover_of(name_of(5))
    make_files(tmp_path, path.name)
    with path.open("rb") as theirs:  # a lock is one description's: as good as another process's
        fcntl.flock(theirs, fcntl.LOCK_EX)
        checkpointer = ptsave.AsyncCheckpointer(tmp_path)
        save_all(checkpointer, 5, 6)
        assert path.exists()
    save_all(checkpointer, 7)
    assert set(os.listdir(tmp_path)) == {name_of(step) for step in (5, 6, 7)}


_SAVE_ON_COMMAND = """
import sys, time, warnings, torch, ptsave
directory, keep = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "(?s).*is there already")  # going back is meant
with ptsave.AsyncCheckpointer(directory, keep=keep, fsync=False) as checkpointer:
    print("ready", flush=True)
    for line in sys.stdin:
        step, begin = line.split()
        while time.monotonic() < float(begin):
            pass
        checkpointer.save(int(step), weight=torch.full((100,), int(step)))
        checkpointer.wait()
        print("saved", flush=True)
"""


@pytest.mark.parametrize("keep", [1, 3])
def test_two_processes_that_prune_at_once(tmp_path: Path, keep: int) -> None:
    """Each would keep another set, one having gone back: together they may not keep fewer."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    there = CheckpointDirectory(tmp_path)

    def answers() -> list[str]:
        streams = [process.stdout for process in processes]
        return [stream.readline().strip() for stream in streams if stream is not None]

    with ExitStack() as stack:
        processes = [
            stack.enter_context(WarmProcess(_SAVE_ON_COMMAND, tmp_path, keep, **pipes))
            for _ in range(2)
        ]
        assert answers() == ["ready"] * 2
        for round_number in range(10):
            begin = time.monotonic() + 0.002
            steps = 1000 + 2 * round_number, round_number  # the second is always the lowest
            for process, step in zip(processes, steps, strict=True):
                print(step, begin, file=process.stdin, flush=True)
            assert answers() == ["saved"] * 2
            assert steps[0] in there.steps()
            assert min(keep, round_number + 1) <= len(there.steps()) <= keep + 2
    assert [process.returncode for process in processes] == [0, 0]
    assert len(os.listdir(tmp_path)) == len(there.steps())
    for step in there.steps():
        loaded = ptsave.load(there.path_of(step))["weight"]
        assert torch.equal(loaded, torch.full((100,), step))
    with ptsave.AsyncCheckpointer(tmp_path, keep=keep) as checkpointer:
        save_all(checkpointer, 2000)
    assert len(there.steps()) == keep


def test_while_another_process_prunes_nothing_is_removed(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, keep=1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    save_all(checkpointer, 1, 2)
    assert checkpointer.steps() == [1, 2]
    os.close(descriptor)
    save_all(checkpointer, 3)
    assert checkpointer.steps() == [3]


def after_each_listing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let something happen between the choice of a checkpoint and its opening."""
    names = CheckpointDirectory._names

    def listed(directory: CheckpointDirectory) -> dict[int, list[str]]:
        found = names(directory)
        action()
        return found

    monkeypatch.setattr(CheckpointDirectory, "_names", listed)


@pytest.mark.parametrize("n_times", [1, 20])
def test_the_chosen_checkpoint_is_removed_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_times: int
) -> None:
    """The choice is made again: the values are those of the step that is there in the end."""
    steps = iter(range(2, n_times + 2))
    ptsave.save_checkpoint(tmp_path / name_of(1), model=nn.Linear(2, 2), step=1)
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    saved = [nn.Linear(2, 2)]

    def replace() -> None:
        for step in itertools.islice(steps, 1):
            saved.append(nn.Linear(2, 2))
            ptsave.save_checkpoint(tmp_path / name_of(step), model=saved[-1], step=step)
            os.unlink(tmp_path / name_of(step - 1))

    after_each_listing(monkeypatch, replace)
    model = nn.Linear(2, 2)
    assert checkpointer.restore(model=model) == {"step": n_times + 1}
    assert_same_object(dict(model.state_dict()), dict(saved[-1].state_dict()))


def test_a_checkpoint_that_is_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    value = torch.arange(100_000.0)
    checkpointer.save(1, value={"weight": value}, other=value + 1).result()

    def removed(*args: Any, **options: Any) -> Any:
        os.unlink(tmp_path / name_of(1))
        return restore_entries(*args, **options)

    monkeypatch.setattr("ptsave.training.checkpoint.restore_entries", removed)
    target = {"weight": torch.zeros(100_000)}
    rest = checkpointer.restore(value=target)
    assert torch.equal(target["weight"], value)
    assert torch.equal(rest["other"], value + 1)


@pytest.mark.parametrize("step", [None, 3])
def test_all_checkpoints_are_removed_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    save_all(checkpointer, 3)
    after_each_listing(monkeypatch, lambda: (tmp_path / name_of(3)).unlink(missing_ok=True))
    wanted = "there is no checkpoint" if step is None else "no checkpoint of step 3, nor any other"
    with pytest.raises(FileNotFoundError, match=wanted) as caught:
        checkpointer.restore(step, value={})
    assert caught.value.filename == str(tmp_path)


def test_choosing_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    listings: list[object] = []

    def phantom(directory: CheckpointDirectory) -> dict[int, list[str]]:
        listings.append(directory)
        return {7: [name_of(7)]}

    monkeypatch.setattr(CheckpointDirectory, "_names", phantom)
    with pytest.raises(FileNotFoundError) as caught:
        checkpointer.restore(value={})
    assert caught.value.filename == str(tmp_path / name_of(7))
    assert 1 < len(listings) <= 1000


def test_errors_of_a_target_are_no_reason_to_choose_again(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    save_all(checkpointer, 1)
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise FileNotFoundError(errno.ENOENT, "no vocabulary", "words.txt")

    with pytest.raises(FileNotFoundError, match="no vocabulary"):
        checkpointer.restore(value=Restored(fail))
    assert calls == [1]


@pytest.mark.parametrize(("maps", "new_format"), [(False, False), (False, True), (True, True)])
def test_what_restore_reads(tmp_path: Path, maps: bool, new_format: bool) -> None:
    saved = nn.Linear(2, 2)
    torch.save(
        {"model": saved.state_dict(), "step": 3},
        tmp_path / name_of(3),
        _use_new_zipfile_serialization=new_format,
    )
    model = nn.Linear(2, 2)
    options: Any = torch_config  # a module with methods, which type checkers do not know
    with options.patch({"load.mmap": maps}):
        assert ptsave.AsyncCheckpointer(tmp_path).restore(model=model) == {"step": 3}
    assert_same_object(dict(model.state_dict()), dict(saved.state_dict()))


def test_damage_is_reported_with_the_path(checkpointer: ptsave.AsyncCheckpointer) -> None:
    save_all(checkpointer, 1)
    path = checkpointer.path(1)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ptsave.CorruptCheckpointError) as caught:
        checkpointer.restore()
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


def test_restoring_while_another_process_saves_and_prunes(tmp_path: Path) -> None:
    script = f"""
import itertools, sys, threading, torch, ptsave
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
with ptsave.AsyncCheckpointer({str(tmp_path)!r}, keep=1, fsync=False) as checkpointer:
    for step in itertools.count():
        checkpointer.save(step, state={{'weight': torch.full((16,), step)}}, step=step).result()
        if ended.is_set():
            break
"""
    writer = WarmProcess(script, stdin=subprocess.PIPE)
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    try:
        while checkpointer.latest() is None:
            assert writer.poll() is None
            time.sleep(0.01)
        restored: set[int] = set()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            target = {"weight": torch.full((16,), -1)}
            step = checkpointer.restore(state=target)["step"]
            assert torch.equal(target["weight"], torch.full((16,), step))
            restored.add(step)
    finally:
        writer.communicate()
    assert writer.returncode == 0
    assert len(restored) > 10


@pytest.mark.parametrize("end", ["", "raise KeyError('the end')"])
def test_the_interpreter_waits_for_saves(tmp_path: Path, end: str) -> None:
    script = f"""
import torch, ptsave
checkpointer = ptsave.AsyncCheckpointer({str(tmp_path)!r}, keep=1)
for step in range(3):
    checkpointer.save(step, weight=torch.full((1 << 20,), step))
{end}
"""
    result = run_python(script, status=None)
    # "Error:" is the message: Python 3.13 shows the line of the script, too.
    assert result.stderr.count("Error:") == end.count("Error"), result.stderr
    assert os.listdir(tmp_path) == [name_of(2)]
    assert torch.equal(ptsave.load(tmp_path / name_of(2))["weight"], torch.full((MIB,), 2))


def test_unasked_errors_are_warnings_at_exit(tmp_path: Path) -> None:
    script = f"""
import resource, torch, ptsave
checkpointer = ptsave.AsyncCheckpointer({str(tmp_path)!r}, keep=1)
checkpointer.save(1, value=1).result()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
checkpointer.save(2, weight=torch.ones(1 << 20))
"""
    result = run_python(script)
    assert "CheckpointWarning" in result.stderr
    assert str(tmp_path / name_of(2)) in result.stderr
    assert os.listdir(tmp_path) == [name_of(1)]


def test_forked_process(tmp_path: Path) -> None:
    """It has no pending saves, and can make its own; the parent's are not disturbed."""
    checkpointer = ptsave.AsyncCheckpointer(tmp_path / "checkpoints", keep=2)
    futures = [checkpointer.save(step, weight=torch.ones(8 * MIB)) for step in range(3)]

    def child() -> None:
        checkpointer.wait()
        checkpointer.save(100, value=1).result()
        checkpointer.close()
        assert checkpointer.restore(100) == {"value": 1}

    in_child(child)
    checkpointer.wait()
    assert all(future.exception() is None for future in futures)
    assert checkpointer.steps()[-1] == 100
