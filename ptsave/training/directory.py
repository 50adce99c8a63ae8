"""The checkpoints in a directory: names, listing, pruning, locks.

The directory is the only record: no index could disagree with it.  A file called
``step-<number>.pt`` is a complete checkpoint, because only a rename makes one.  The number counts,
however many zeros are before it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ptsave import _C
from ptsave.errors import CheckpointWarning, SaveError
from ptsave.support.syncing import sync_path

__all__ = ["CheckpointDirectory", "create_directory"]

_NAME = re.compile(r"step-([0-9]+)\.pt")
# Errors of opening a file that another process, or another host, has removed.
_GONE = {errno.ENOENT, errno.ESTALE}
_MAX_TRIES = 100  # each fails only if another checkpoint was written and pruned meanwhile
_MIN_N_DIGITS = 8  # so that for a hundred million steps the order of names is that of steps


def create_directory(directory: str | os.PathLike[str], *, fsync: bool) -> Path:
    """Make a directory for checkpoints, with its parents, and return its absolute path.

    Raises
    ------
    SaveError
        If it cannot be made, is something else, or files cannot be listed and made in it.
    """
    path = Path(os.path.abspath(os.fsdecode(directory)))
    try:
        created = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in created if fsync else []:
            _sync(each.parent)  # a file is as durable as the names on the way to it
    except (FileExistsError, NotADirectoryError):
        message = "The directory for checkpoints, or one above it, is a file: name another one"
        raise SaveError(errno.ENOTDIR, message, str(path)) from None
    except OSError as error:
        number = error.errno or errno.EIO
        message = f"The directory for checkpoints cannot be made: {os.strerror(number)}"
        raise SaveError(number, message, str(path)) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        message = (
            "Files cannot be listed and made in the directory for checkpoints: change its "
            "permissions, or name another one"
        )
        raise SaveError(errno.EACCES, message, str(path))
    return path


def _sync(path: Path) -> None:
    try:
        sync_path(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL):
            raise
        os.sync()  # a directory that may not be read, or cannot be synced by itself


class CheckpointDirectory:
    """The files ``step-<number>.pt`` of one directory.  Other files in it are not looked at.

    Parameters
    ----------
    path : Path
        The directory.  While it does not exist it has no checkpoints.
    """

    path: Path | str

    def __init__(self, path: Path | str) -> None:
        self.path = path
        # Between a restore that chooses a checkpoint and the removal of old ones.
        self._lock = threading.Lock()
        self._held: list[int] = []

    def steps(self) -> list[int]:
        return sorted(self._names())

    def latest(self) -> Path | Any | None:
        names = self._names()
        return self._place_of(names[max(names)][0]) if names else None

    def path_of(self, step: int) -> Path | Any:
        """Return where the checkpoint of a step is, or would be."""
        return self.place(step)[0]

    def place(self, step: int) -> tuple[Path | Any, int | None]:
        """Return where a step is, or would be, and the highest step that is there."""
        names = self._names()
        name = names[step][0] if step in names else _name(step)
        return self._place_of(name), max(names, default=None)

    @contextmanager
    def opened(self, step: int | None) -> Iterator[Any]:
        """Yield the open file of a step (None: of the highest one), which is not pruned meanwhile.

        Another process may prune it all the same.  If that has happened before the file was open,
        the choice is made again; an open file stays whole.

        Raises
        ------
        FileNotFoundError
            If there is no such checkpoint.
        """
        for n_left in reversed(range(_MAX_TRIES)):
            with ExitStack() as stack:
                path = stack.enter_context(self._held_back(step))
                try:
                    stream = stack.enter_context(self._open(path))
                except OSError as error:
                    if error.errno in _GONE and n_left:
                        continue
                    raise
                yield stream
                return

    @contextmanager
    def _held_back(self, step: int | None) -> Iterator[Path | Any]:
        """Yield the path of a step, which this object does not prune meanwhile."""
        with self._lock:
            names = self._names()
            chosen = max(names, default=None) if step is None else step
            if chosen is None or chosen not in names:
                raise self._no_checkpoint(step, sorted(names))
            self._held.append(chosen)
        try:
            yield self._place_of(names[chosen][0])
        finally:
            with self._lock:
                self._held.remove(chosen)

    def prune(self, keep: int, written: int) -> None:
        """Remove the lowest steps until `keep` are left, after the step `written` was saved.

        That one stays, and so does the highest: after going back to an earlier step both are
        somebody's newest.  A file that cannot be removed is a `CheckpointWarning`.  While another
        process is at it, nothing is done: each would keep another one, and together they would keep
        fewer.
        """
        with self._lock, self._locked() as alone:
            if not alone:
                return
            names = self._names()
            kept = {written, max(names, default=written), *self._held}
            spare = [step for step in sorted(names) if step not in kept]
            for step in spare[: max(len(names) - keep, 0)]:
                for name in names[step]:
                    self._remove_or_warn(name)

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed processes that were writing checkpoints."""
        with suppress(FileNotFoundError):
            targets = {_C.target_of_temporary(name) for name in os.listdir(os.fsencode(self.path))}
            for target in targets:
                if _NAME.fullmatch(os.fsdecode(target)):
                    _C.remove_leftovers(os.path.join(os.fsencode(self.path), target))

    def _names(self) -> dict[int, list[str]]:
        """Return the names of each step's files: one, unless somebody has made others."""
        names: dict[int, list[str]] = {}
        for name in self._files():
            match = _NAME.fullmatch(name)
            if match:
                names.setdefault(int(match[1]), []).append(name)
        return {step: _own_first(step, several) for step, several in names.items()}

    def _no_checkpoint(self, step: int | None, steps: list[int]) -> FileNotFoundError:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        some = ", ".join(map(str, steps[-8:]))
        there = f"only of {'..., ' if len(steps) > 8 else ''}{some}" if steps else "nor any other"
        message = f"there is {wanted}" + ("" if step is None else f", {there}")
        return FileNotFoundError(errno.ENOENT, message, str(self.path))

    def _remove_or_warn(self, name: str) -> None:
        try:
            self._remove(name)
        except OSError as error:
            message = f"an old checkpoint cannot be removed, so it stays: {error}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)

    # ------------------------------------------------------------------------ the file system

    def _place_of(self, name: str) -> Path | Any:
        return Path(self.path, name)

    def _files(self) -> list[str]:
        """Return the names of the files that are there."""
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return [entry.name for entry in entries if _is_file(entry)]
        return []

    def _open(self, path: Path | Any) -> AbstractContextManager[Any]:
        return open(os.fspath(path), "rb")

    def _remove(self, name: str) -> None:
        _C.remove_file(os.path.join(os.fsencode(self.path), os.fsencode(name)))

    def _locked(self) -> AbstractContextManager[bool]:
        """Return a context that yields whether no other process prunes."""
        return _locked(Path(self.path))


def _name(step: int) -> str:
    return f"step-{step:0{_MIN_N_DIGITS}d}.pt"


def _own_first(step: int, names: list[str]) -> list[str]:
    if len(names) == 1:
        return names
    return sorted(names, key=lambda name: (name != _name(step), name))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads nowhere
        return False


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Yield whether no other process has locked the directory; lock it meanwhile."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _try_lock(descriptor)
    finally:
        with suppress(OSError):  # by hand: a process forked meanwhile has the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system on which directories have no locks
    return True
