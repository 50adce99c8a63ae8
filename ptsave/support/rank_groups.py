"""Lets the ranks of a job exchange small values: over torch.distributed, or over a directory.

Values can be written as JSON.  Each call is collective: all ranks make it, in the same order, and
none returns before all have called.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ptsave.support.rank_lock import RankLock, is_held, new_token, token_of

__all__ = ["FileRanks", "GroupRanks", "Ranks"]

_TIMEOUT_S = 1800.0  # torch.distributed's own
_LONGEST_PAUSE_S = 0.1


class Ranks(Protocol):
    """The ranks of a job, seen from one of them."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def session(self) -> str:
        """16 hexadecimal digits, the same on all ranks, and higher than any earlier job's."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks.

        Raises
        ------
        RuntimeError
            If a rank has ended, or does not call within the timeout.
        """


class GroupRanks:
    """The ranks of a process group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group.  This process belongs to it.
    place : str
        The directory that they save to, for errors.

    Notes
    -----
    The group is not kept alive: ``destroy_process_group()`` waits for its threads then.  One that
    runs on when the interpreter ends may free what Python made, and takes the process along.
    """

    def __init__(self, group: Any, place: str) -> None:
        self._group = weakref.ref(group)
        self._place = place
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self.session = str(self.gather(new_token())[0])

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
    """Ranks that know their numbers, and see one directory, but have no process group.

    Each locks a file of its own while it lives.  The session is made of the files of all ranks that
    live; a store for its values is a file named after it.

    Parameters
    ----------
    folder : Path
        A directory that all ranks see, on a file system with ``flock``.
    rank, size : int
        This process's number, and how many there are.
    timeout : float, default 1800
        Seconds until ranks that do not come are given up.

    Raises
    ------
    RuntimeError
        Another process has this number, or ranks do not come.
    OSError
        The directory cannot be written, or its file system has no locks.
    """

    def __init__(self, folder: Path, rank: int, size: int, timeout: float = _TIMEOUT_S) -> None:
        self.rank, self.size = rank, size
        self._folder, self._timeout = folder, timeout
        self._n_gathered = 0
        self.lock = RankLock(folder, rank, size)
        self.session = ""
        try:
            self._meet()
        except BaseException:
            self.lock.release()
            raise
        if rank == 0:
            self._remove_stores()

    def _meet(self) -> None:
        """Wait until all ranks know the same session.

        A file that is held may be that of an object whose end is near; so the files are read again
        until everybody has said in the session's store that these are the ones.
        """

        def look() -> bool:
            tokens = [token_of(self._folder, rank, self.size) for rank in range(self.size)]
            if "" in tokens:
                return False
            digest = hashlib.sha256("".join(tokens).encode()).hexdigest()
            session = max(tokens)[:11] + digest[:5]
            if session != self.session:
                self.session = session
                self._store = FileStore(str(self._folder / f".ranks-{session}"), self.size)
                self._store.set(f"0/{self.rank}", "here")
            return bool(self._store.check([f"0/{rank}" for rank in range(self.size)]))

        self._wait(look, "the ranks have", lambda: False)

    def gather(self, value: Any) -> list[Any]:
        self._n_gathered += 1
        self._store.set(f"{self._n_gathered}/{self.rank}", json.dumps(value))
        return [json.loads(self._value(rank)) for rank in range(self.size)]

    def _value(self, rank: int) -> bytes:
        key = f"{self._n_gathered}/{rank}"

        def look() -> bool:
            return bool(self._store.check([key]))

        def ended() -> bool:
            return not is_held(self._folder, rank, self.size) and not look()

        self._wait(look, f"rank {rank} of {self.size} has", ended)
        return bytes(self._store.get(key))

    def _wait(self, look: Callable[[], bool], who_has: str, ended: Callable[[], bool]) -> None:
        end, pause = time.monotonic() + self._timeout, 0.001
        while not look():
            if ended():
                raise RuntimeError(f"{self._folder}: {who_has} ended")
            if time.monotonic() > end:
                raise RuntimeError(f"{self._folder}: {who_has} not come in {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _remove_stores(self) -> None:
        """Remove those that earlier sessions have left."""
        for path in self._folder.glob(".ranks-*"):
            if path.name != f".ranks-{self.session}":
                path.unlink(missing_ok=True)
