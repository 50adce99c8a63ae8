"""Checkpoints that are directories: complete under their name, or absent.

The files are written into ``.<name>.ptsave/<name>``, which no library takes for a checkpoint.  Then
a rename gives the directory its name; an existing directory is exchanged in one step where the file
system can, and removed.  A directory that cannot be renamed gets the files one by one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ptsave.background.async_safetensors import async_save_safetensors, covers_its_storage
from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.background.saves import writes_held_back
from ptsave.errors import StagingFullError
from ptsave.installation import installed
from ptsave.streaming import safetensors_functions
from ptsave.support.folder_lock import FolderLock
from ptsave.support.syncing import sync_path

__all__ = ["StagedFolder", "give_up", "in_place_of", "staged_folders_in", "writes_in_background"]

_SUFFIX = ".ptsave"
# Entries of the root beside the new folder, whose name differs from these: the replaced folder,
# the new folder's inode number, and a sign that the files are being moved.
_OLD, _MARK, _FILLING = ".old", ".new", ".filling"
_LOCK = ".lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MAX_NAME_BYTES = 255
# Errors of renaming a directory whose files can still be renamed.  It is a mount point, another
# user's directory in /tmp, or in a lower layer of a container's file system.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM)


class StagedFolder:
    """A directory that is written at `path`, the same on all ranks, until it is named `final`.

    With `keeps_others` entries that only the replaced directory has are moved into the new one, and
    a directory that cannot be renamed may be replaced.  With `above` the temporary `root` is, if
    possible, beside the parent of `final`: some libraries take all names in it for checkpoints.
    """

    def __init__(
        self, final: str, *, fsync: bool, keeps_others: bool = False, above: bool = False
    ) -> None:
        self.final = os.path.realpath(final)
        self._fsync = fsync
        self._keeps_others = keeps_others
        self._lock: FolderLock | None = None
        parent, name = os.path.split(self.final)
        if above and not _is_fixed(parent):
            beside, parent_name = os.path.split(parent)
            self.root = os.path.join(beside, _root_name(f"{parent_name}.{name}"))
        elif keeps_others and _is_fixed(self.final):
            self.root = os.path.join(self.final, _root_name(name))
        else:
            self.root = os.path.join(parent, _root_name(name))
        self.path = os.path.join(self.root, name)

    def claim(self) -> None:
        """Lock the folder until `discard`, and clear up leftovers; one rank of a job calls it.

        Raises SaveError if another process is writing the folder.
        """
        self._lock = FolderLock(self.root, _LOCK, self.final)
        self._put_in_order()

    @property
    def is_claimed(self) -> bool:
        """Whether this object holds the folder's lock."""
        return self._lock is not None

    def discard_leftover(self) -> None:
        """Discard the folder unless another process is writing it, or it cannot be locked."""
        with suppress(OSError):
            self._lock = FolderLock(self.root, _LOCK, self.final)
        if self.is_claimed:
            self.discard()

    def check_name(self) -> None:
        """Raise FileExistsError if a file has the name."""
        if os.path.lexists(self.final) and not os.path.isdir(self.final):
            raise FileExistsError(
                errno.EEXIST,
                "a checkpoint is a directory, and a file has its name: move it, or save elsewhere",
                self.final,
            )

    def publish(self) -> None:
        """Give the folder its name; after an OSError the folder that had the name keeps it."""
        self.check_name()
        if self._fsync:
            _sync_tree(Path(self.path))
        self._note_which_is_new()
        self._take_name()
        if self._fsync:
            _sync(Path(self.final).parent)
        self.discard()  # removes the replaced folder

    def discard(self) -> None:
        """Remove the unpublished folder, or the replaced one, and clear up after killed processes.

        A folder that lost its name to a killed process gets it back if no successor has it.
        """
        self._put_in_order()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def complete(self) -> None:
        """Move the rest of the files that a killed process was moving; after an OSError they stay.

        Raises SaveError if another process is writing the folder.
        """
        if os.path.lexists(self._filling):
            self.claim()
            self.discard()

    def _put_in_order(self) -> None:
        if os.path.lexists(self._filling) and os.path.isdir(self.path):
            self._fill()
        self.restore()
        if self._keeps_others:
            for replaced in self._replaced():
                _move_missing(replaced, self.final, fsync=self._fsync)
        _remove_all_but(_LOCK, self.root)

    def restore(self) -> None:
        """Give a folder its name back that a killed process took, if no successor has it.

        Only a process that writes here may call it: another writer could be between its renames.
        """
        if self.left_behind() is not None:
            os.rename(self._old, self.final)

    def left_behind(self) -> str | None:
        """Return the old folder's path if a process was killed between its two renames."""
        return self._old if os.path.isdir(self._old) and not os.path.lexists(self.final) else None

    @property
    def _is_inside(self) -> bool:
        """Whether the root is inside the directory that has the name."""
        return os.path.dirname(self.root) == self.final

    @property
    def _old(self) -> str:
        return os.path.join(self.root, _OLD)

    @property
    def _mark(self) -> str:
        return os.path.join(self.root, _MARK)

    @property
    def _filling(self) -> str:
        return os.path.join(self.root, _FILLING)

    def _note_which_is_new(self) -> None:
        """Note the new directory's inode number, before the directories exchange their names."""
        if self._keeps_others:
            Path(self._mark).write_text(str(os.stat(self.path).st_ino))
            if self._fsync:
                _sync(Path(self._mark))
                _sync(Path(self.root))

    def _replaced(self) -> list[str]:
        """Return the path of the directory that the new one has replaced, if it has."""
        with suppress(FileNotFoundError):
            mark = Path(self._mark).read_text()
            if mark == str(os.stat(self.final).st_ino):
                return [path for path in (self.path, self._old) if os.path.isdir(path)]
        return []

    def _take_name(self) -> None:
        if not os.path.lexists(self.final):
            os.rename(self.path, self.final)
        elif self._keeps_others and (self._is_inside or _is_at_work_in(self.final)):
            self._fill()
        else:
            try:
                self._replace()
            except OSError as error:
                if not self._keeps_others or error.errno not in _FIXED:
                    raise
                self._fill()

    def _fill(self) -> None:
        """Move the files one by one into the directory that has the name."""
        Path(self._filling).touch()
        if self._fsync:
            _sync(Path(self.root))
        _move_over(self.path, self.final, fsync=self._fsync)
        os.unlink(self._filling)

    def _replace(self) -> None:
        if _exchange(self.path, self.final):
            return
        os.rename(self.final, self._old)
        try:
            os.rename(self.path, self.final)
        except BaseException:
            os.rename(self._old, self.final)
            raise


def staged_folders_in(
    directory: str, prefix: str, *, keeps_others: bool = False
) -> list[StagedFolder]:
    """Return the staged folders in a directory, also of dead processes, by their final prefix."""
    folders = []
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(f".{prefix}") and entry.name.endswith(_SUFFIX):
                final = os.path.join(directory, entry.name[1 : -len(_SUFFIX)])
                folders.append(StagedFolder(final, fsync=False, keeps_others=keeps_others))
    return folders


def _move_missing(old: str, new: str, *, fsync: bool) -> None:
    """Move the entries that `new` lacks from `old` into it, also in subdirectories."""
    for name in os.listdir(old):
        source, target = os.path.join(old, name), os.path.join(new, name)
        if not os.path.lexists(target):
            os.rename(source, target)
        elif _is_directory(source) and _is_directory(target):
            _move_missing(source, target, fsync=fsync)
    if fsync:
        _sync(Path(new))


def _move_over(new: str, old: str, *, fsync: bool) -> None:
    """Move the entries of `new` into `old`, where they replace files of the same names."""
    for name in sorted(os.listdir(new)):
        source, target = os.path.join(new, name), os.path.join(old, name)
        if _is_directory(source) and os.path.isdir(target):
            _move_over(source, target, fsync=fsync)
        else:
            os.rename(source, target)
    if fsync:
        _sync(Path(old))


def _remove_all_but(name: str, folder: str) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != name:
                with suppress(OSError):
                    os.unlink(entry.path)


def _root_name(name: str) -> str:
    """Return the root's name; a digest shortens one that is too long."""
    whole = f".{name}{_SUFFIX}"
    if len(os.fsencode(whole)) <= _MAX_NAME_BYTES:
        return whole
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name[:50]}-{digest}{_SUFFIX}"


def _is_fixed(folder: str) -> bool:
    """Return whether a directory is a mount point, or its parent is not writable."""
    if not os.path.isdir(folder):
        return False
    parent = os.path.dirname(folder)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return True
    return os.path.ismount(folder) or _mount_of(folder) != _mount_of(parent)


def _mount_of(folder: str) -> str | None:
    """Return the number of a directory's mount, which also tells bind mounts apart."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        try:
            told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        finally:
            os.close(descriptor)
        if match := re.search(r"^mnt_id:\s*(\d+)", told, re.MULTILINE):
            return match[1]
    return None


def _is_at_work_in(folder: str) -> bool:
    """Return whether a directory is or contains the current directory."""
    with suppress(OSError):  # the current directory has been removed
        current = Path.cwd()
        return any(os.path.samefile(folder, each) for each in (current, *current.parents))
    return False


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _exchange(path: str, other: str) -> bool:
    """Exchange two names in one step; return False where the system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = os.fsencode(path), os.fsencode(other)
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), path, None, other)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    if not path.is_symlink():
        sync_path(path)


@contextmanager
def writes_in_background(folder: StagedFolder, *, fsync: bool) -> Iterator[list[SaveFuture]]:
    """Let ``torch.save`` and ``save_file`` into a folder only copy the tensors; yield the futures.

    The files are written after the block, or within it if memory for the copies runs out.  Calls
    for files elsewhere, or with tensors that safetensors has to check, write at once.  After an
    error in the block each save is cancelled or has ended.
    """
    futures: list[SaveFuture] = []
    try:
        with _held_back(folder, futures, fsync=fsync):
            yield futures
    except BaseException:
        give_up(futures)
        raise


def give_up(futures: Sequence[SaveFuture]) -> None:
    """Cancel saves, and wait for those that cannot be cancelled."""
    for future in [each for each in futures if not each.cancel()]:
        future.exception()


@contextmanager
def _held_back(folder: StagedFolder, futures: list[SaveFuture], *, fsync: bool) -> Iterator[None]:
    with installed(safetensors=True, fsync=fsync), writes_held_back() as release:
        save = torch.save

        def begin(function: Callable[..., SaveFuture], *args: Any) -> None:
            try:
                future = function(*args, fsync=fsync, when_full="raise")
            except StagingFullError:  # earlier saves have to be written first
                release()
                future = function(*args, fsync=fsync, when_full="wait")
            futures.append(future)

        def save_later(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if _is_in(f, folder.path) and not args and not kwargs:
                begin(async_save, obj, f)
            else:
                save(obj, f, *args, **kwargs)

        def take_file(tensors: Any, filename: Any, metadata: Any) -> bool:
            if not (_is_in(filename, folder.path) and _can_wait(tensors, filename, metadata)):
                return False
            begin(async_save_safetensors, tensors, os.fspath(filename), metadata or {})
            return True

        with in_place_of(save, save_later), safetensors_functions.taken_by(take_file):
            yield


@contextmanager
def in_place_of(old: Callable[..., Any], new: Callable[..., Any]) -> Iterator[None]:
    """Replace ``torch.save`` or ``torch.load`` in the block."""
    _substitute(old, new)
    try:
        yield
    finally:
        _substitute(new, old)


def _substitute(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    modules: list[ModuleType] = [torch, torch.serialization]
    for module in modules:
        for name in ("save", "load"):
            if getattr(module, name) is old:
                setattr(module, name, new)


def _is_in(path: Any, folder: str) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(folder + os.sep)


def _can_wait(tensors: Any, filename: Any, metadata: Any) -> bool:
    if not safetensors_functions.engine_can_save(tensors, filename, metadata):
        return False
    each = [tensor for tensor in tensors.values() if tensor.numel()]
    places = {(tensor.device, tensor.data_ptr()) for tensor in each}
    return len(places) == len(each) and all(map(covers_its_storage, each))
