"""Writes a planned file to its target: a path, a URL, a real file, memory, or a `write` method.

* A regular file is replaced by a rename.  In three cases, it is overwritten in place instead.  (1)
  The directory does not allow a replacement (no permission, sticky, a mount point).  (2) The path
  is a link of ``/proc`` to an open file (``/dev/stdout``).  (3) The save has ``atomic=False``, and
  this process has not mapped the file.  The choice depends only on links, directories, owners and
  mounts, which other saves do not change.
* From 16 MiB on, a save with ``fsync`` bypasses the page cache.  Without ``fsync``, only bytes for
  which the kernel would make writers wait bypass the cache (`direct_nbytes`).  A large background
  save bypasses the cache completely.  Other bytes go through the cache until the cache turns out to
  be slow (`MemoryGauge` in csrc/core/memory/pages.h); from then on, all bytes bypass the cache.
* A URL is written as a stream.  The docstring of `UrlLocation` says when the file appears.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ptsave import _C
from ptsave.errors import SaveError, operation_of
from ptsave.sources.locations import (
    LocalFolder,
    Location,
    is_url_target,
    real_file,
    refuse_storage_options,
    refuse_url_target,
)
from ptsave.support import config
from ptsave.support.calls import ProgressCallback

if TYPE_CHECKING:
    from ptsave.sources.url_locations import UrlLocation
    from ptsave.writing.sharing import Base

FileTarget: TypeAlias = "str | UrlLocation"

# If a rename raises one of these errors, this file can still be overwritten in place.
_RENAME_REFUSED = {errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES}
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP}
# Smaller files gain nothing from direct writes: with fsync, they take one write and one sync.
_MIN_DIRECT_NBYTES = 16 << 20
# Payloads of accelerators go through page-locked memory, whose sizes are powers of two, and a
# staged chunk needs a few bytes more than its contents.  So the contents leave this many bytes
# free.  The number is a multiple of any disk's block size.
_STAGING_SLACK = 64 << 10


def resolve(f: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> FileTarget:
    """Return the file or directory that a path or URL names; a ``file://`` URL gives a path."""
    if is_url_target(f):
        from ptsave.sources.url_locations import resolve_url

        return resolve_url(str(f), storage_options)
    refuse_url_target(f, storage_options)
    path = os.fsdecode(f)
    if not path:
        raise SaveError(errno.ENOENT, "invalid file name: it is empty", path)
    return path


def resolve_folder(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Location:
    """Return the directory that a path or URL names, as a `Location`."""
    target = resolve(directory, storage_options)
    return LocalFolder(target) if isinstance(target, str) else target


def is_url_file(target: object) -> TypeGuard[UrlLocation]:
    """Return whether a value is a `UrlLocation`, without importing its module."""
    return isinstance(target, Location) and target.is_url


def name_of(target: FileTarget) -> str:
    """Return the path or the URL of a target."""
    return target.path if is_url_file(target) else str(target)


def exists(target: FileTarget) -> bool:
    """Return whether the target exists; a broken symbolic link counts as existing."""
    return target.is_there() if is_url_file(target) else os.path.lexists(str(target))


def scratch_folder(target: FileTarget) -> str:
    """Return a directory for temporary files: the directory of a local target, or the system's."""
    if isinstance(target, str):
        return os.path.dirname(target) or "."
    import tempfile

    return tempfile.gettempdir()


def root_for_path(path: str) -> str:
    """Return the name of the root folder that torch gives an archive at `path`: the file's stem."""
    if not path.isascii():
        return "archive"  # torch opens such files in Python, and its zip writer gets no name
    name = path.replace("\\", "/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return stem if dot else name


def refuse_safetensors_name(f: object) -> None:
    """Raise ValueError if a file to write in torch's format is named ``*.safetensors``."""
    f = f.path if is_url_file(f) else f
    name = os.fsdecode(f) if isinstance(f, (str, os.PathLike)) else ""
    if name.endswith(".safetensors"):
        raise ValueError(
            f"{name}: torch.load expects a safetensors file under this name, but this function "
            "writes torch's format: choose a name like model.pt, or write a dict of tensors with "
            "ptsave.save_model(tensors, path)"
        )


def check_path(path: str) -> None:
    """If `path` cannot be written to, raise the error now, before time is spent on pickling."""
    if "\0" in path:
        raise ValueError("embedded null byte")
    _require_root(path)
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        message = f"Parent directory {parent} does not exist."
        raise SaveError(errno.ENOENT, message, path)
    if os.path.isdir(path):
        message = f"File {path} cannot be opened: open file failed with strerror: Is a directory"
        raise SaveError(errno.EISDIR, message, path)


def _require_root(path: str) -> None:
    if not root_for_path(path):
        raise RuntimeError(f"invalid file name: {path}")


def resolve_target(f: Any, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Return a path as a str, a URL as a `UrlLocation`, and any other object as it is.

    If the target cannot be written to, this function raises the error, before any pickling.
    """
    if is_url_file(f):
        return f
    if isinstance(f, (str, os.PathLike)):
        path: Any = os.fspath(f)
        if isinstance(path, bytes):  # torch takes bytes for a file object and refuses them
            check_stream(path)
        target = resolve_file(f, storage_options)
        if isinstance(target, str):
            check_path(target)
        return target
    refuse_storage_options(storage_options)
    check_stream(f)
    return f


def resolve_file(
    f: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> FileTarget:
    """Return the file that a path or URL names; raise SaveError for a URL without a file name."""
    target = resolve(f, storage_options)
    if not isinstance(target, str):
        target.require_file_name()
        _require_root(target.path)
    return target


def check_stream(stream: object) -> None:
    """Raise torch's error for an object that has no callable attribute ``write``."""
    if callable(getattr(stream, "write", None)):
        return
    message = f"Buffer of {str(type(stream)).strip('<>')} has no callable attribute 'write'"
    if not hasattr(stream, "write"):
        raise AttributeError(message)
    raise TypeError(message)


def direct_nbytes(nbytes: int, *, fsync: bool, in_background: bool = False) -> int:
    """Return how many of `nbytes` to write directly, without the page cache.

    With `fsync`, all.  Otherwise, the cache is faster while it only stores bytes.  The kernel has
    two limits for dirty pages.  Above the middle between them, writers may have to wait twice as
    long as direct writes take.  So only the bytes above the middle are written directly.  In the
    background, no caller waits, and direct writes leave more cores and memory to the program.
    """
    if nbytes < _MIN_DIRECT_NBYTES:
        return 0
    if fsync:
        return nbytes
    begin, limit = _dirty_limits()
    if in_background:
        return nbytes if nbytes > limit // 2 else 0
    n_ranks = config.local_world_size()  # other ranks of this host save, too
    excess = config.dirty_nbytes() + nbytes * n_ranks - (begin + limit) // 2
    return min(max(0, -(-excess // n_ranks)), nbytes)


def replaceable_file(path: str) -> str:
    """Return the absolute path of the file that a save to `path` replaces, or raise SaveError."""
    is_special, target, can_replace = _behind(path)
    if is_special:
        raise SaveError(errno.EINVAL, "not a regular file", path)
    if target is None or not can_replace:
        message = "the file cannot be replaced, and this kind of save cannot write in place"
        raise SaveError(errno.EACCES, message, path)
    return target


def _behind(path: str) -> tuple[bool, str | None, bool]:
    """Return (is it a special file, the file behind its links or None, can a rename replace that).

    Other saves may replace or remove the file at any moment.  So the result depends only on things
    that no save changes: links, the directory and its owner.
    """
    with _translated_errors(path):
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            return True, None, False
        if status is not None:
            status = _writable_status(path)
        resolved = _C.resolve_links(os.fsencode(path))
        if resolved is None:  # a link to an open file
            return False, None, False
        target = absolute(os.fsdecode(resolved))
        return False, target, _can_replace(target, status)


class FileWriter:
    """Writes the file that `plan` describes to a path or a URL.

    `scratch_for` gets the status of a file to overwrite in place.  It returns the descriptor of an
    empty file if the plan reads that file; else, None.  With `payloads_are_still`, no code may
    change the tensors during the write, so the disk may read their memory directly.
    """

    def __init__(
        self,
        plan: _C.WritePlan | _C.PackedPlan | _C.CheckedPlan,
        *,
        compute_crcs: bool,
        fsync: bool,
        atomic: bool,
        progress: ProgressCallback | None,
        scratch_for: Callable[[os.stat_result], int | None] = lambda _: None,
        payloads_are_still: bool = False,
        limits: config.Config | None = None,
        base: Base | None = None,
    ) -> None:
        self._plan = plan
        self._compute_crcs = compute_crcs
        self._fsync = fsync
        self._atomic = atomic
        self._progress = progress
        self._scratch_for = scratch_for
        self._payloads_are_still = payloads_are_still
        self._config = config.current() if limits is None else limits
        self._base = base
        self._is_following = False
        self.nbytes_shared = 0  # with the base, in the last write

    def write_file(self, target: FileTarget) -> None:
        """Write to a URL or a path, as the docstring of this module describes."""
        if not isinstance(target, str):
            self._write_url(target)
            return
        is_special, file, can_replace = _behind(target)
        if is_special:
            self._write_special(target)
        elif file is None:
            self._write_in_place(target, target)
        elif can_replace and (self._atomic or _is_mapped(file)):
            self._replace(file, target)
        else:
            self._write_in_place(file, target)

    def _write_url(self, target: UrlLocation) -> None:
        base = payloads = None
        if self._base is not None and isinstance(self._plan, _C.WritePlan):
            base, payloads = self._base.location(), self._plan.payloads
        with target.opened(self._plan.nbytes, payloads=payloads, base=base) as sink:
            self._write_stream(sink.write, _zero_writer(sink.write))
        self.nbytes_shared = getattr(sink, "nbytes_shared", 0)

    def _write_special(self, path: str) -> None:
        raise SaveError(errno.EINVAL, "not a regular file", path)

    def _replace(self, target: str, path: str) -> None:
        sharing = None
        if self._base is not None and isinstance(self._plan, _C.WritePlan):
            sharing = self._base.sharing_for(self._plan)
        try:
            self._plan.write_file(
                os.fsencode(target),
                os.fsencode(path),
                durable=self._fsync,
                options=self._options(),
                progress=self._progress,
                sharing=sharing,
            )
        except OSError as error:
            if operation_of(error) != "rename" or not _is_refused(error.errno, target):
                raise SaveError.from_os_error(error, path) from None
            self._write_in_place(target, path)
        else:
            if self._base is not None and sharing is not None:
                self.nbytes_shared = sharing.nbytes_shared
                self._base.remember(sharing)
        finally:
            del sharing  # a traceback must not keep the base open

    def _write_in_place(self, target: str, path: str) -> None:
        with _translated_errors(path):
            if _is_mapped(target):
                message = (
                    "tensors of this process are mapped from the file, which can be overwritten "
                    "but not replaced: save to another file, or load them without mmap"
                )
                raise SaveError(errno.EBUSY, message, path)
            status = _status(target)
            scratch = None if status is None else self._scratch_for(status)
            self._plan.write_in_place(
                os.fsencode(target),
                scratch=scratch,
                durable=self._fsync,
                options=self._options(),
                progress=self._progress,
            )

    def _write_stream(
        self, write: Callable[[memoryview], object], skip: Callable[[int], object]
    ) -> None:
        self._plan.write_stream(
            _complete_writer(write),
            skip,
            options=self._options(),
            progress=self._progress,
        )

    def _direct_nbytes(self) -> int | None:
        """Return how many bytes always bypass the page cache; None if no byte may bypass it."""
        if not self._config.direct_io or self._plan.has_holes:
            return None
        if self._plan.nbytes < _MIN_DIRECT_NBYTES:
            return None
        # The program goes on while copies are written, but waits for a write that `follow` began.
        in_background = self._payloads_are_still and not self._is_following
        return direct_nbytes(self._plan.nbytes, fsync=self._fsync, in_background=in_background)

    def _options(self) -> _C.WriteOptions:
        chunk_nbytes = self._config.write_chunk_nbytes
        return _C.WriteOptions(
            compute_crcs=self._compute_crcs,
            n_threads=0 if self._plan.is_sequential else self._config.n_threads,
            n_direct_threads=0 if self._plan.is_sequential else self._config.n_direct_writers,
            direct_nbytes=self._direct_nbytes(),
            chunk_nbytes=chunk_nbytes - (_STAGING_SLACK if self._plan.is_pinned else 0),
            payloads_are_still=self._payloads_are_still,
            max_pinned_nbytes=self._config.max_pinned_nbytes,
        )


class TargetWriter(FileWriter):
    """Writes the archive that `plan` describes to a path, a URL or a file-like object."""

    _plan: _C.WritePlan

    def begin_staging(self) -> None:
        """Save accelerators' tensors as they are at this point of the caller's streams."""
        self._plan.begin_staging(options=self._options())

    def follow(self, copies: _C.Snapshot, target: Any) -> bool:
        """Let `write` begin while storages are still being copied; return whether this is possible.

        The target has to be a large file.  It has to be replaced as a whole: then a failed copy
        leaves the old file.  The write has to bypass the page cache, because new memory for the
        cache takes as much time as new memory for the copies.
        """
        is_direct = self._config.direct_io and self._plan.nbytes >= _MIN_DIRECT_NBYTES
        if not isinstance(target, str) or not self._atomic or not is_direct:
            return False
        if self._plan.has_holes or self._plan.is_pinned:
            return False
        try:
            replaceable_file(target)
        except SaveError:
            return False
        self._plan.follow(copies)
        self._is_following = True
        return True

    def write(self, target: Any) -> None:
        """Write to a path, a URL, or a file-like object at its current position."""
        if isinstance(target, str) or is_url_file(target):
            self.write_file(target)
            return
        raw = real_file(target)
        if type(target) is io.BytesIO:
            self._write_bytesio(target)
        elif raw is not None and _is_plain(raw):
            self._write_descriptor(raw)
        else:
            self._write_stream(target.write, lambda nbytes: target.seek(nbytes, os.SEEK_CUR))
        target.flush()

    def _write_special(self, path: str) -> None:
        with _translated_errors(path), open(path, "wb", buffering=0) as stream:
            self._write_stream(stream.write, _zero_writer(stream.write))

    def _write_bytesio(self, stream: io.BytesIO) -> None:
        begin = stream.tell()
        end = begin + self._plan.nbytes
        old_nbytes = stream.getbuffer().nbytes
        try:
            if old_nbytes < end:
                stream.seek(end - 1)
                stream.write(b"\0")
            with stream.getbuffer() as view:
                self._plan.write_memory(
                    view[begin:end], options=self._options(), progress=self._progress
                )
        except BaseException:
            stream.truncate(max(old_nbytes, begin))
            stream.seek(begin)
            raise
        stream.seek(end)

    def _write_descriptor(self, stream: Any) -> None:
        stream.flush()
        begin = stream.tell()
        with _translated_errors(str(stream.name)):
            self._plan.write_descriptor(
                stream.fileno(),
                begin,
                os.fsencode(str(stream.name)),
                durable=self._fsync,
                options=self._options(),
                progress=self._progress,
            )
        stream.seek(begin + self._plan.nbytes)


@contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        raise SaveError.from_os_error(error, path) from None


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _writable_status(path: str) -> os.stat_result | None:
    """Return the status of a file, or None if it was removed; raise if it is not writable."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        number = error.errno or errno.EACCES
        reason = f"File {path} cannot be opened: open file failed with strerror"
        raise SaveError(number, f"{reason}: {os.strerror(number)}", path) from None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def absolute(path: str) -> str:
    """Return an absolute path; links and ``..`` in it stay as they are."""
    if os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        reason = "the working directory has been deleted: use an absolute path"
        raise SaveError(errno.ENOENT, reason, path) from None


def _can_replace(target: str, status: os.stat_result | None) -> bool:
    """Return whether the directory of `target` allows a new file to replace `target`."""
    if status is None:
        return True  # if the directory does not allow it, creating the file raises an error
    parent = os.path.dirname(target)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return False
    directory = os.stat(parent)
    owners = {0, directory.st_uid, status.st_uid}
    return not directory.st_mode & stat.S_ISVTX or os.geteuid() in owners


def _is_refused(number: int | None, target: str) -> bool:
    """Return whether a rename's error means that this file can never be replaced."""
    if number in _UNSUPPORTED:
        return True
    if number == errno.EBUSY:  # network file systems also raise it for a file in use
        return mount_of(target) != mount_of(os.path.dirname(target))
    return number in _RENAME_REFUSED and os.path.exists(target)


def mount_of(path: str) -> str:
    """Return the ID of the mount that a file or directory is on; empty if unknown."""
    try:
        with _located(path) as descriptor:
            fields = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:
        return ""
    return next((field for field in fields if field.startswith("mnt_id:")), "")


def _is_mapped(target: str) -> bool:
    """Return whether this process has the file memory-mapped."""
    try:
        with _located(target) as descriptor:
            status = os.fstat(descriptor)
            name = os.readlink(f"/proc/self/fd/{descriptor}")  # as /proc/self/maps names it
    except FileNotFoundError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        # On btrfs and overlayfs, this list has another device number than the file's status.
        return any(
            fields[4] == str(status.st_ino) and (fields[3] == device or fields[-1] == name)
            for fields in (line.rstrip("\n").split(maxsplit=5) for line in maps)
        )


@contextmanager
def _located(path: str) -> Iterator[int]:
    """Open a file or directory to find out where it is, but not to read or write it."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_plain(stream: Any) -> bool:
    """Return whether a file object is a regular file that can be written at any position."""
    import fcntl

    if not stream.writable() or not stream.seekable():
        return False
    flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
    if flags & (os.O_APPEND | os.O_DIRECT):
        return False
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _complete_writer(write: Callable[[memoryview], object]) -> Callable[[memoryview], None]:
    """Return a function that writes all bytes, even if `write` takes only some at a time."""

    def write_all(view: memoryview) -> None:
        rest = view
        while rest.nbytes:
            n = write(rest)
            if not isinstance(n, int) or n >= rest.nbytes or n < 0:
                break  # many file-like objects return None, or something that is not a number
            if n == 0:
                raise OSError(errno.EIO, "write() took none of the bytes")
            rest = rest[n:]
        # The memory of the views will be reused: code that has kept a view gets an error.
        for each in (rest, view):
            with suppress(BufferError):  # other code still uses the view
                each.release()

    return write_all


def _zero_writer(write: Callable[[memoryview], object]) -> Callable[[int], None]:
    """Return a function that writes a number of zero bytes, for targets that cannot seek."""
    write_all = _complete_writer(write)
    zeros = bytes(1 << 20)

    def write_zeros(nbytes: int) -> None:
        while nbytes:
            piece = min(nbytes, len(zeros))
            write_all(memoryview(zeros)[:piece])
            nbytes -= piece

    return write_zeros


def _dirty_limits() -> tuple[int, int]:
    """Return the numbers of dirty bytes that make the kernel write, and that make writers wait."""
    limit = _dirty_limit("dirty", 1 << 30)
    begin = _dirty_limit("dirty_background", 1 << 29)
    return (begin if begin < limit else limit // 2), limit


def _dirty_limit(name: str, default: int) -> int:
    try:
        limit = int(Path(f"/proc/sys/vm/{name}_bytes").read_text())
        if limit > 0:
            return limit
        ratio = int(Path(f"/proc/sys/vm/{name}_ratio").read_text())
    except (OSError, ValueError):
        return default
    # In a control group, the ratio applies to the memory that the group's limit leaves.
    return config.available_nbytes() * ratio // 100
