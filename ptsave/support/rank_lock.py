"""Locks a file per rank in a directory, for as long as the rank's process lives.

A file is locked before it gets its name, so a file without a lock belongs to a dead process.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from ptsave.support.locks import HeldLock, is_locked

_N_TOKEN_DIGITS = 16


def new_token() -> str:
    """Return 16 hexadecimal digits, higher than any token of an earlier millisecond."""
    return f"{time.time_ns() // 1_000_000:011x}{secrets.randbits(20):05x}"


class RankLock(HeldLock):
    """Holds the locked file of a rank, which contains `token`.

    Raises a RuntimeError if another process, or another object of this process, holds the file.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._path = _path(folder, rank, size)
        if is_held(folder, rank, size):
            raise RuntimeError(
                f"{folder}: another process saves as rank {rank} of {size} here: end it, or give "
                "this job a directory of its own (if it is this process, close the other object)"
            )
        self.token = new_token()
        self._hold(_locked_file(self._path, self.token))
        if token_of(folder, rank, size) != self.token:
            self._close()
            raise RuntimeError(f"{folder}: two processes began to save as rank {rank} of {size}")

    def release(self) -> None:
        """Remove the file, so that another process may take the rank."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            self._close()

    def leave(self, word: str) -> None:
        """Leave the file with a last word in it; another process may take the rank."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, word.encode())
            finally:
                self._close()


def is_held(folder: Path, rank: int, size: int) -> bool:
    """Return whether a process holds the file of a rank."""
    return token_of(folder, rank, size) != ""


def token_of(folder: Path, rank: int, size: int) -> str:
    """Return the token in a rank's file, or an empty string if no process holds the file."""
    held, text = _read(folder, rank, size)
    return text[:_N_TOKEN_DIGITS] if held else ""


def last_word_of(folder: Path, rank: int, size: int) -> str | None:
    """Return the last word of a rank that has ended, or None if its process holds the file.

    The word is empty if the rank ended without one.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = RankLock(pathlib.Path(folder), 0, 2)
    ...     print(last_word_of(pathlib.Path(folder), 0, 2))
    ...     lock.leave("written")
    ...     print(last_word_of(pathlib.Path(folder), 0, 2))
    None
    written
    """
    held, text = _read(folder, rank, size)
    return None if held else text[_N_TOKEN_DIGITS:]


def _read(folder: Path, rank: int, size: int) -> tuple[bool, str]:
    """Return whether a process holds a rank's file, and its text."""
    try:
        descriptor = os.open(_path(folder, rank, size), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False, ""
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        return is_locked(descriptor), file.read()


def _locked_file(path: Path, token: str) -> int:
    temporary = path.with_name(f"{path.name}.{token}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        os.write(descriptor, token.encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return descriptor


def _path(folder: Path, rank: int, size: int) -> Path:
    return folder / f".rank-{rank}-of-{size}"
