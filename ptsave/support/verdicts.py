"""Remembers that files were whole, in files of the user's cache directory.

A verdict is a small file whose name is a digest of a file's identity: device, inode, size, times
and serialization id.  Only its content makes it a verdict.  A process that checks a file locks its
verdict, so other processes of the host wait for the check and then read the verdict.  Damage is
never remembered.  Without a usable directory, nothing is remembered.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import NamedTuple

from ptsave.support.threads import PAUSE

_MAX_VERDICTS = 1024  # if there are more, only the newest half is kept
_HEAD = "ptsave: this file was whole: "
# A file may change twice within one tick of the clock that its times come from.
_TICK_NS = 100_000_000
_COARSE_TICK_NS = 2_000_000_000  # of a file system whose times are whole seconds
_held: set[int] = set()  # locked files; a forked child must not hold the locks


class Identity(NamedTuple):
    """Identifies a file's contents; `descriptor` is the open file, `label` its serialization id."""

    descriptor: int
    label: str

    def key(self) -> str:
        """Return a digest of the identity as it is now."""
        status = os.fstat(self.descriptor)
        times = status.st_mtime_ns, status.st_ctime_ns
        facts = (status.st_dev, status.st_ino, status.st_size, *times, self.label)
        return sha256(repr(facts).encode("utf-8", "backslashreplace")).hexdigest()

    def is_settled(self) -> bool:
        """Whether a later change of the file must change its times."""
        changed = os.fstat(self.descriptor).st_ctime_ns
        tick = _TICK_NS if changed % 1_000_000_000 else _COARSE_TICK_NS
        return time.time_ns() - changed > tick


class Verdict:
    """The verdict about a file while this process holds its lock; see `hold`."""

    def __init__(self, identity: Identity, key: str, folder: int | None, file: int | None) -> None:
        self._identity = identity
        self._key = key
        self._folder = folder
        self._file = file
        self._may_be_remembered = identity.is_settled()

    @property
    def is_whole(self) -> bool:
        """Whether an earlier check found the file whole."""
        return self._file is not None and _is_whole(self._file, self._key)

    def remember(self) -> None:
        """Remember that the file is whole, unless it has changed meanwhile."""
        if self._file is None or self._folder is None or not self._may_be_remembered:
            return
        if self._identity.key() != self._key:
            return
        with suppress(OSError):  # for example, the disk is full
            text = _text_of(self._key)
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
            _remove_old(self._folder)


@contextmanager
def hold(path: str | None, identity: Identity, pause: Callable[[], None]) -> Iterator[Verdict]:
    """Lock a file's verdict in the directory `path`; call `pause` while another process does."""
    key = identity.key()
    folder = None if path is None else _open_folder(path)
    file = None if folder is None else _open_verdict(folder, key)
    try:
        if file is not None:
            _held.add(file)
            _lock(file, pause)
        yield Verdict(identity, key, folder, file)
    finally:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may share the lock
            _held.discard(file)
            os.close(file)
        if folder is not None:
            os.close(folder)


def is_remembered(path: str | None, identity: Identity) -> bool:
    """Whether a verdict in the directory `path` says that a file is whole; does not lock it."""
    folder = None if path is None else _open_folder(path)
    if folder is None:
        return False
    key = identity.key()
    file = _open_verdict(folder, key, os.O_RDONLY)
    os.close(folder)
    if file is None:
        return False
    try:
        return _is_whole(file, key)
    finally:
        os.close(file)


def _lock(file: int, pause: Callable[[], None]) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pause()
            time.sleep(PAUSE)
        except OSError:  # a file system without locks: the processes check side by side
            return None


def _open_folder(path: str) -> int | None:
    """Open the directory; None unless it belongs to this user alone."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(folder)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return folder
    os.close(folder)
    return None


def _open_verdict(folder: int, key: str, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(key, flags, 0o600, dir_fd=folder)
    except OSError:
        return None
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    os.close(file)
    return None


def _is_whole(file: int, key: str) -> bool:
    text = _text_of(key)
    return os.pread(file, len(text) + 1, 0) == text


def _text_of(key: str) -> bytes:
    return f"{_HEAD}{key}\n".encode()


def _remove_old(folder: int) -> None:
    names = [name for name in os.listdir(folder) if re.fullmatch("[0-9a-f]{64}", name)]
    if len(names) <= _MAX_VERDICTS:
        return
    ages = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns for name in names}
    for name in sorted(names, key=ages.__getitem__)[: -_MAX_VERDICTS // 2]:
        os.unlink(name, dir_fd=folder)


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
