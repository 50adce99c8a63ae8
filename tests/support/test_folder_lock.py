"""Directories that one process at a time has for itself."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from _system import Child, in_child, in_threads

import ptsave
from ptsave.support.locks import FolderLock


def held(folder: Path) -> FolderLock:
    return FolderLock(str(folder / "root"), ".lock", "step-1")


def test_second_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    lock = held(tmp_path)
    with pytest.raises(ptsave.SaveError, match=r"another process is saving.*step-1") as caught:
        held(tmp_path)
    assert caught.value.errno == errno.EBUSY
    lock.release()
    assert os.listdir(tmp_path) == []
    held(tmp_path).release()


def test_process_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    locks = []
    in_child(lambda: locks.append(held(tmp_path)))
    assert os.listdir(tmp_path / "root") == [".lock"]
    held(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_child_of_the_holder_holds_nothing(tmp_path: Path) -> None:
    """A worker that is forked meanwhile lives on."""
    lock = held(tmp_path)
    source, sink = os.pipe()
    child = Child(lambda: (os.write(sink, b"!"), threading.Event().wait()))
    try:
        os.read(source, 1)  # it runs
        lock.close()  # as the end of its process does
        held(tmp_path).release()
    finally:
        child.kill()
        os.close(source)
        os.close(sink)


def test_several_that_wait(tmp_path: Path) -> None:
    """Each that ends removes the directory; the others get a lock of the next one, in turn."""
    n_holders = 0

    def hold_often(_: int) -> None:
        nonlocal n_holders
        for _ in range(20):
            lock = FolderLock(str(tmp_path / "root"), ".lock", "step-1", wait=True)
            n_holders += 1
            time.sleep(0.001)
            assert n_holders == 1
            n_holders -= 1
            lock.release()

    in_threads(hold_often, range(8))
    assert os.listdir(tmp_path) == []


def test_other_files_stay(tmp_path: Path) -> None:
    lock = held(tmp_path)
    (tmp_path / "root" / "file").touch()
    lock.release()
    assert os.listdir(tmp_path / "root") == ["file"]


def test_file_that_loses_its_name_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = held(tmp_path)
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        first.release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = held(tmp_path)
    with pytest.raises(ptsave.SaveError):
        held(tmp_path)
    lock.release()


def test_without_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    first, second = held(tmp_path), held(tmp_path)
    first.release()
    second.release()
    assert os.listdir(tmp_path) == []
