"""One path, and somebody else who saves to it, removes it or points it elsewhere meanwhile.

Between any two calls that a save makes of the system the other one gets its turn, in one thread, so
that nothing is left to chance.  test_stress.py leaves it to chance, for as long as one likes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child
from torch.utils.serialization import config

import ptsave
from ptsave.archive import loading
from ptsave.contents import directories, opening
from ptsave.contents import files as finding
from ptsave.conversion.converting import convert
from ptsave.inspection import verification
from ptsave.inspection.verification import verify_file
from ptsave.sources import ranges
from ptsave.writing import targets as writing

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

MINE: dict[str, Any] = {"name": "mine", "weight": torch.arange(5000.0)}
THEIRS: dict[str, Any] = {
    "name": "theirs",
    "weight": torch.arange(3000).flip(0),
    "bias": torch.ones(3),
}
OLD: dict[str, Any] = {"name": "old", "weight": torch.zeros(10)}
_MAX_CALLS = 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with `OLD`."""
    path = tmp_path / "model.pt"
    ptsave.save(OLD, path)
    return path


def name_in(path: Path) -> str:
    """Return whose file it is, after checking that torch finds all of it."""
    loaded = torch.load(path)
    expected = {"mine": MINE, "theirs": THEIRS, "old": OLD}[loaded["name"]]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected if key != "name")
    assert ptsave.load(path).keys() == expected.keys()
    return str(loaded["name"])


# The modules that open what is read, and decide on its kind.
_OPENERS = tuple(
    str(module.__file__) for module in (directories, finding, opening, verification, ranges)
)


@contextmanager
def meanwhile(action: Callable[[], object], n: int, *files: str) -> Iterator[list[str]]:
    """Do something before the n-th call of something built in that a module of `files` makes."""
    calls: list[str] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        is_there = event == "c_call" and frame.f_code.co_filename in (files or [writing.__file__])
        if is_there and not isinstance(argument.__self__, str):
            calls.append(argument.__name__)
            if len(calls) == n:
                sys.setprofile(None)
                action()
                sys.setprofile(watch)

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


_LOADING = (str(loading.__file__),)


def at_every_call(
    prepare: Callable[[], object], action: Callable[[], object], *files: str
) -> Iterator[str]:
    """Do something again and again; yield where `action` came in between, until it came after."""
    for n in range(1, _MAX_CALLS):
        prepare()
        with meanwhile(action, n, *files) as calls:
            yield f"call {n}"
        if len(calls) < n:
            assert n > (5 if files != _LOADING else 3), "nothing was tested"
            return
    pytest.fail("too many calls")


# ------------------------------------------------------------------------------------ replaced


@pytest.mark.parametrize("fsync", [False, True])
def test_another_save_at_any_moment(tmp_path: Path, fsync: bool) -> None:
    """Never does a save overwrite a file that somebody else has just put there."""
    path = tmp_path / "model.pt"
    kept = tmp_path / "theirs.pt"  # a second name, which keeps what they have written

    def save_theirs() -> None:
        ptsave.save(THEIRS, path)
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)

    for where in at_every_call(lambda: ptsave.save(OLD, path), save_theirs):
        ptsave.save(MINE, path, fsync=fsync)
        assert name_in(path) == "mine", where
        if kept.exists():
            assert name_in(kept) == "theirs", where
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "theirs.pt"]


@pytest.mark.parametrize("atomic", [False, True])
def test_removal_at_any_moment(tmp_path: Path, atomic: bool) -> None:
    path = tmp_path / "model.pt"
    mask = os.umask(0o022)
    try:
        remove = lambda: path.unlink(missing_ok=True)  # noqa: E731
        for where in at_every_call(lambda: ptsave.save(OLD, path), remove):
            ptsave.save(MINE, path, atomic=atomic)
            if path.exists():  # else it was removed after all
                assert name_in(path) == "mine", where
                assert stat.S_IMODE(path.stat().st_mode) == 0o644, where
    finally:
        os.umask(mask)
    assert set(os.listdir(tmp_path)) <= {"model.pt"}


def test_creation_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    remove = lambda: path.unlink(missing_ok=True)  # noqa: E731
    for where in at_every_call(remove, lambda: ptsave.save(THEIRS, path)):
        ptsave.save(MINE, path)
        assert name_in(path) == "mine", where


@pytest.mark.parametrize("atomic", [False, True])
def test_link_that_is_pointed_elsewhere_at_any_moment(tmp_path: Path, atomic: bool) -> None:
    first, second, link = (tmp_path / name for name in ("first.pt", "second.pt", "link.pt"))

    def prepare() -> None:
        ptsave.save(OLD, first)
        ptsave.save(THEIRS, second)
        link.unlink(missing_ok=True)
        link.symlink_to("first.pt")

    def turn() -> None:
        other = tmp_path / "other"
        other.symlink_to("second.pt")
        other.rename(link)

    for where in at_every_call(prepare, turn):
        ptsave.save(MINE, link, atomic=atomic)
        assert link.is_symlink(), where
        names = name_in(first), name_in(second)
        assert names in [("mine", "theirs"), ("old", "mine")], where


def test_name_in_a_directory_that_is_an_open_descriptor(tmp_path: Path, path: Path) -> None:
    """A link of /proc on the way is a directory; only at the end is it an open file."""
    inode = path.stat().st_ino
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ptsave.save(MINE, f"/proc/self/fd/{directory}/model.pt")
        assert name_in(path) == "mine"
        assert path.stat().st_ino != inode, "replaced"
    finally:
        os.close(directory)


def test_open_file_that_has_its_name_still(tmp_path: Path) -> None:
    # As torch does it: what has the file open gets the new contents.
    path = tmp_path / "model.pt"
    link = tmp_path / "link.pt"
    ptsave.save(OLD, path)
    with path.open("r+b") as stream:
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        for name in (f"/proc/self/fd/{stream.fileno()}", f"/dev/fd/{stream.fileno()}", link):
            ptsave.save(OLD, path, atomic=False)
            ptsave.save(MINE, name)
            assert os.path.samestat(os.fstat(stream.fileno()), path.stat())
            assert name_in(path) == "mine"


# ------------------------------------------------------------------------------------ in place


def lock_as_a_save_does(path: Path) -> int:
    """Hold up other saves that overwrite a file; return the descriptor to be closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    last_byte = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, (1 << 63) - 2, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, last_byte)
    return descriptor


def _save_in_place(path: Path, timer: threading.Timer) -> None:
    ptsave.save(MINE, path, atomic=False)
    timer.cancel()


def test_saves_that_overwrite_one_file_take_turns(path: Path) -> None:
    descriptor = lock_as_a_save_does(path)
    saving = threading.Thread(target=lambda: ptsave.save(MINE, path, atomic=False))
    saving.start()
    saving.join(0.3)
    try:
        assert saving.is_alive()
        assert name_in(path) == "old"
    finally:
        os.close(descriptor)
        saving.join()
    assert name_in(path) == "mine"


def test_a_save_that_waits_can_be_interrupted(path: Path) -> None:
    descriptor = lock_as_a_save_does(path)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _save_in_place(path, timer)
    finally:
        os.close(descriptor)
        timer.join()
    assert name_in(path) == "old"


def test_locks_of_others_hold_nobody_up(path: Path) -> None:
    with path.open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        ptsave.save(MINE, path, atomic=False)
        assert name_in(path) == "mine"


# ------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize("shared", [False, True])
def test_mapping_of_a_file_that_is_replaced(tmp_path: Path, shared: bool) -> None:
    """What is mapped is the file whose pickle was read, at whatever moment it is replaced."""
    config.load.mmap_flags = 1 if shared else 2  # MAP_SHARED, MAP_PRIVATE
    path = tmp_path / "model.pt"
    last = {}

    def save(obj: dict[str, Any]) -> None:
        ptsave.save(obj, path)
        last["saved"] = obj

    for where in at_every_call(lambda: save(OLD), lambda: save(MINE), *_LOADING):
        loaded = ptsave.load(path, mmap=True)
        expected = {"old": OLD, "mine": MINE}[loaded["name"]]
        assert torch.equal(loaded["weight"], expected["weight"]), where
        found = torch.load(path)  # and it is not changed
        assert found["name"] == last["saved"]["name"]
        assert torch.equal(found["weight"], last["saved"]["weight"])


def test_verification_of_a_file_that_is_replaced(tmp_path: Path) -> None:
    """One file is verified from beginning to end, though another has its name by then."""
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"

    def replace() -> None:
        torch.save(3, other)
        other.rename(path)

    for where in at_every_call(lambda: ptsave.save(OLD, path), replace, *_OPENERS):
        found = verify_file(path)
        assert found.problems == [], where
        assert (found.tensors or []) in (["weight"], [])


def test_source_of_a_conversion_that_is_replaced(tmp_path: Path) -> None:
    """Its kind is that of the file whose tensors are read, not of another one of the name."""
    path, other, target = (tmp_path / name for name in ("model.bin", "other.bin", "target.pt"))
    ptsave.save_model({"weight": torch.zeros(10)}, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()

    def replace() -> None:
        torch.save({"other": torch.ones(3)}, other)
        other.rename(path)

    for where in at_every_call(lambda: path.write_bytes(whole), replace, *_OPENERS):
        convert(path, target, force=True)
        assert list(torch.load(target)) in (["weight"], ["other"]), where


def test_locked_files_stay_free_after_a_fork(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    large = {"name": "mine", "weight": torch.zeros(64 << 20, dtype=torch.uint8)}
    saving = threading.Thread(target=lambda: ptsave.save(large, path, atomic=False))
    saving.start()
    while not path.exists():
        time.sleep(0.001)
    child = Child(lambda: time.sleep(30))
    saving.join()
    try:
        begin = time.monotonic()
        ptsave.save(MINE, path, atomic=False)
        assert time.monotonic() - begin < 10
    finally:
        child.kill()
    assert name_in(path) == "mine"
