"""The checkpoints in a directory, local or at a URL: lists, opens and removes them.

The directory is the only record, so no index can disagree with it.  An object store needs no locks
and no renames, because a save shows a key only when the checkpoint is complete.  Only one process
removes old checkpoints there: the rank that saves, or rank 0.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ptsave.errors import CheckpointWarning, SaveError
from ptsave.sources.locations import LocalFolder, sync_path
from ptsave.training.naming import Naming, WholeFiles
from ptsave.training.retention import Retention
from ptsave.writing.targets import resolve_folder

# Errors of opening a file that another process, or another host, has removed.
_GONE = {errno.ENOENT, errno.ESTALE}
_MAX_TRIES = 100  # a try fails only if a checkpoint was written and pruned meanwhile


def create_directory(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, fsync: bool
) -> Path | str:
    """Make a directory for checkpoints, with its parents, and return its absolute path or its URL.

    Raises a SaveError if files cannot be listed and made there.
    """
    folder = resolve_folder(directory, storage_options)
    if folder.is_url:
        folder.make()
        return folder.path
    path = Path(os.path.abspath(folder.path))
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
        os.sync()  # for a directory that may not be read, or cannot be synced by itself


class CheckpointDirectory:
    """The checkpoints of one directory; files of other names are ignored.

    A directory that does not exist has no checkpoints.
    """

    def __init__(
        self,
        path: Path | str,
        naming: Naming | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        is_local = isinstance(path, Path)
        self.folder = LocalFolder(str(path)) if is_local else resolve_folder(path, storage_options)
        self._naming = naming or WholeFiles()
        # Keeps pruning apart from a restore that chooses a checkpoint.
        self._lock = threading.Lock()
        self._held: list[int] = []
        # By file name: the file's identity, and the entries that decide whether it stays.
        self._entries: dict[str, tuple[object, Mapping[str, Any]]] = {}

    def steps(self) -> list[int]:
        return sorted(self._names())

    def latest(self) -> Path | Any | None:
        names = self._names()
        return self.place_of(names[max(names)][0]) if names else None

    def path_of(self, step: int) -> Path | Any:
        """Return where the checkpoint of a step is, or would be."""
        names = self._names().get(step)
        return self.place_of(names[0] if names else self._naming.name_of(step))

    def place(self, step: int) -> tuple[Path | Any, int | None]:
        """Return where to save a step, and the highest step that exists."""
        names = self._names()
        name = self._naming.new_name(step, names.get(step, []))
        return self.place_of(name), max(names, default=None)

    @contextmanager
    def opened(self, step: int | None) -> Iterator[Any]:
        """Yield the open file of a step (None: the highest step).

        This object does not prune the step meanwhile.  If another process removes the file before
        it is open, the choice is made again; an open file stays whole.  Raises a FileNotFoundError
        if there is no such checkpoint.
        """
        for n_left in reversed(range(_MAX_TRIES)):
            with ExitStack() as stack:
                name = stack.enter_context(self._held_back(step))
                try:
                    stream = stack.enter_context(self.open_file(name))
                except OSError as error:
                    if error.errno in _GONE and n_left:
                        continue
                    raise
                yield stream
                return

    @contextmanager
    def _held_back(self, step: int | None) -> Iterator[str]:
        """Yield the name of a step's file, and keep this object from pruning it meanwhile."""
        with self._lock:
            chosen, name = self.choose(step)
            self._held.append(chosen)
        try:
            yield name
        finally:
            with self._lock:
                self._held.remove(chosen)

    def holds(self, name: str) -> bool:
        """Return whether a file exists; True if that cannot be told."""
        try:
            return name in self.folder.regular_files()
        except OSError:
            return True

    def choose(self, step: int | None) -> tuple[int, str]:
        """Return a step (None: the highest step), and the name of its file."""
        names = self._names()
        chosen = max(names, default=None) if step is None else step
        if chosen is None or chosen not in names:
            raise self._no_checkpoint(step, sorted(names))
        return chosen, names[chosen][0]

    def open_file(self, name: str) -> AbstractContextManager[Any]:
        """Open a file that `choose` named, in this process or another."""
        if self.folder.is_url:
            return nullcontext(self.place_of(name))  # the reader opens its own connections
        return open(self.folder.join(name), "rb")

    def remove_step(self, step: int) -> None:
        """Remove all files of a step; raise a FileNotFoundError if there are none."""
        self.choose(step)
        for name in self._names()[step]:
            with suppress(FileNotFoundError):  # another process was faster
                self.folder.remove(name)

    def prune(self, retention: Retention, written: int) -> None:
        """Remove the checkpoints that may go after the step `written` was saved.

        A file that cannot be read or removed is a `CheckpointWarning`.  Does nothing while another
        process prunes: each would keep different checkpoints, and together they would keep too few.
        An incomplete step does not count.
        """
        remarks: list[str] = []
        with self._lock, self.folder.locked() as alone:
            if not alone:
                return
            names = self._names()

            def read(step: int, wanted: Collection[str]) -> Mapping[str, Any] | None:
                try:
                    return self._entries_of(self._naming.judged(names[step]), wanted)
                except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                    remarks.append(
                        f"a checkpoint of step {step} cannot be read, so it stays: {error}"
                    )
                    return None

            for step in retention.spare(names, written, read):
                if step in self._held:  # being restored: stays beside the checkpoints to keep
                    continue
                for name in names[step]:
                    try:
                        self.folder.remove(name)
                    except OSError as error:
                        remarks.append(f"an old checkpoint cannot be removed, so it stays: {error}")
        for remark in remarks:
            warnings.warn(remark, CheckpointWarning, stacklevel=2)

    def _entries_of(self, name: str, wanted: Collection[str]) -> Mapping[str, Any]:
        """Return the wanted entries that a file has; reads each version of the file once."""
        from ptsave.contents.archive import open as open_archive

        identity = self.folder.identity(name)
        known, entries = self._entries.get(name, (None, {}))
        if known != identity:
            place, options = self.place_of(name), self.folder.storage_options
            with open_archive(place, storage_options=options) as archive:
                entries = {key: archive[key,] for key in wanted if (key,) in archive}
            self._entries[name] = identity, entries
        return entries

    def remove_leftovers(self) -> None:
        """Remove the files that killed processes have left."""
        self.folder.remove_leftovers(self._naming.is_checkpoint)
        with self._lock:
            for name in self._naming.dead(self.folder.regular_files()):
                with suppress(FileNotFoundError):  # another rank was faster
                    self.folder.remove(name)

    def _names(self) -> dict[int, list[str]]:
        """Return the file names of each step, the one to read first in front."""
        return self._naming.checkpoints(self.folder.regular_files())

    def _no_checkpoint(self, step: int | None, steps: list[int]) -> FileNotFoundError:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        some = ", ".join(map(str, steps[-8:]))
        there = f"only of {'..., ' if len(steps) > 8 else ''}{some}" if steps else "nor any other"
        message = f"there is {wanted}" + ("" if step is None else f", {there}")
        message += self._naming.remark(self.folder.regular_files())
        return FileNotFoundError(errno.ENOENT, message, str(self.path))

    def place_of(self, name: str) -> Path | Any:
        """Return the path, or the URL, of a file of this name."""
        place = self.folder.file(name)
        return Path(place) if isinstance(place, str) else place.path
