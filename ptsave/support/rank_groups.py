"""Lets the ranks of a job exchange small values, over torch.distributed or a directory.

Values must be JSON values.  Each call is collective: all ranks make their calls in the same order,
and a call returns only after all ranks have made it.  `session` is a text of 16 hexadecimal digits,
the same on all ranks, and greater than in earlier jobs.  `gather` raises a RuntimeError
if a rank has ended or is late.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from torch import distributed

from ptsave.support.group_call import timeout_of_group
from ptsave.support.locks import HeldLock, is_locked

_TIMEOUT_S = 1800.0  # torch.distributed's default
_LONGEST_PAUSE_S = 0.1
_N_TOKEN_DIGITS = 16


class GroupRanks:
    """The ranks of a process group; `place` is the directory that error messages name.

    The reference to the group is weak, so that ``destroy_process_group()`` ends the threads of the
    group.  If a thread outlived the interpreter, it could free Python objects, and so crash the
    process.
    """

    def __init__(self, group: Any, place: str) -> None:
        self._group = weakref.ref(group)
        self._place = place
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self.session = str(self.gather(new_token())[0])
        timeout = timeout_of_group(group)
        self.timeout_s = _TIMEOUT_S if timeout is None else timeout.total_seconds()

    def gather(self, value: Any) -> list[Any]:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this job has been destroyed")
        values: list[Any] = [None] * self.size
        try:
            distributed.all_gather_object(values, value, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._place}: rank {self.rank} of {self.size} could not go on: another rank has "
                f"ended or does not answer: {error}"
            ) from error
        return values


class FileRanks:
    """Ranks that know their numbers and share one directory, but have no process group.

    Each rank has its own file, and locks it with ``flock`` as long as the rank runs.
    `session` is computed from all these files.  Each rank writes its values to a second file, named
    after the session.  Raises a RuntimeError if a rank does not join within `timeout` seconds.

    torch's FileStore is one file that all ranks append to: if a rank is killed within a write, the
    other ranks wait for the rest of it for ever.
    """

    def __init__(self, folder: Path, rank: int, size: int, timeout: float = _TIMEOUT_S) -> None:
        self.rank, self.size = rank, size
        self._folder, self.timeout_s = folder, timeout
        self._calls: list[tuple[int, Any]] = []
        self.lock = RankLock(folder, rank, size)
        self.session = ""
        try:
            self._meet()
        except BaseException:
            self.lock.release()
            raise
        if rank == 0:
            self._remove_values()

    def _meet(self) -> None:
        """Wait until all ranks know the same session.

        A locked file may belong to an earlier `FileRanks` that is about to end.  So each rank reads
        all files again until every rank has confirmed the session.
        """

        def look() -> bool:
            tokens = [token_of(self._folder, rank, self.size) for rank in range(self.size)]
            if "" in tokens:
                return False
            digest = hashlib.sha256("".join(tokens).encode()).hexdigest()
            session = max(tokens)[:11] + digest[:5]
            if session != self.session:
                self.session = session
                self._write((0, "here"))
            return all(self._values(rank) for rank in range(self.size))

        self._wait(look, "the ranks have", lambda: False)

    def gather(self, value: Any) -> list[Any]:
        number, _ = self._calls[-1]
        self._write((number + 1, value))
        return [self._value(rank, number + 1) for rank in range(self.size)]

    def _write(self, call: tuple[int, Any]) -> None:
        """Write this rank's value; the value before stays for ranks that have yet to read it."""
        self._calls = [*self._calls[-1:], call]
        path = self._values_path(self.rank)
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps(self._calls))
        os.rename(temporary, path)

    def _values(self, rank: int) -> dict[int, Any]:
        """Return a rank's values of its last two calls, each with the number of its call."""
        path = self._values_path(rank)
        try:
            return dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, RecursionError) as error:
            raise RuntimeError(f"{path} does not hold values of rank {rank}: {error}") from None

    def _value(self, rank: int, number: int) -> Any:
        values: dict[int, Any] = {}

        def look() -> bool:
            values.update(self._values(rank))
            return number in values

        def ended() -> bool:
            return not is_held(self._folder, rank, self.size) and not look()

        self._wait(look, f"rank {rank} of {self.size} has", ended)
        return values[number]

    def _values_path(self, rank: int) -> Path:
        return self._folder / f".ranks-{self.session}.{rank}"

    def _wait(self, look: Callable[[], bool], who_has: str, ended: Callable[[], bool]) -> None:
        end, pause = time.monotonic() + self.timeout_s, 0.001
        while not look():
            if ended():
                raise RuntimeError(f"{self._folder}: {who_has} ended")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{self._folder}: {who_has} not joined in {self.timeout_s:.0f} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _remove_values(self) -> None:
        """Remove the values of earlier sessions."""
        for path in self._folder.glob(".ranks-*"):
            if not path.name.startswith(f".ranks-{self.session}."):
                path.unlink(missing_ok=True)


class LoneRank:
    """A rank that cannot communicate with the others, so it can restore but not save."""

    session = "0" * _N_TOKEN_DIGITS
    timeout_s = _TIMEOUT_S

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        """Return only this rank's value."""
        return [value]


Ranks: TypeAlias = "GroupRanks | FileRanks | LoneRank"


# ----------------------------------------------------------------------------- a file for each rank

# A file is locked before it gets its final name, so if a file has no lock, its rank has ended.


def new_token() -> str:
    """Return 16 hexadecimal digits, greater than any token made in an earlier millisecond."""
    return f"{time.time_ns() // 1_000_000:011x}{secrets.randbits(20):05x}"


class RankLock(HeldLock):
    """Holds a lock on the file of a rank; the file contains `token`.

    Raises a RuntimeError if another process, or another object of this process, holds the file.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._path = _path(folder, rank, size)
        if is_held(folder, rank, size):
            raise RuntimeError(
                f"{folder}: another process, or another object of this process, saves as rank "
                f"{rank} of {size} here: end that process, close that object, or give this job its "
                "own directory"
            )
        self.token = new_token()
        self._hold(_locked_file(self._path, self.token))
        if token_of(folder, rank, size) != self.token:
            self.close()
            raise RuntimeError(f"{folder}: two processes began to save as rank {rank} of {size}")

    def release(self) -> None:
        """Remove the file, so that another process may take the rank."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            self.close()

    def leave(self, word: str) -> None:
        """Append `word` to the file and unlock it, so that another process may take the rank."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, word.encode())
            finally:
                self.close()


def is_held(folder: Path, rank: int, size: int) -> bool:
    """Return whether a process holds the file of a rank."""
    return token_of(folder, rank, size) != ""


def token_of(folder: Path, rank: int, size: int) -> str:
    """Return the token in a rank's file, or an empty string if no process holds the file."""
    held, text = _read(folder, rank, size)
    return text[:_N_TOKEN_DIGITS] if held else ""


def last_word_of(folder: Path, rank: int, size: int) -> str | None:
    """Return the word that a rank passed to `leave`, or None if a process still holds the file.

    The word is empty if the rank ended without `leave`, or if there is no file.

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
    """Return whether a process holds a rank's file, and the file's text."""
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
