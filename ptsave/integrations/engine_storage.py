"""Storage for torch_checkpointing: files, streams and directories of this machine.

The library calls ``torch.save(object, stream)``.  The stream is also a path, which torch.save asks
for first, so the engine saves the object.  The engine also reads whole files, and verifies them.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from typing_extensions import Buffer

from ptsave import _C
from ptsave.archive.damage import damage_of
from ptsave.archive.reader import RecordReader
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.serialization import save
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.sources.locations import name_for, sync_path
from ptsave.support import config
from ptsave.support.calls import check_flags

__all__ = ["ReadStream", "Storage", "StorageConfig"]

# From this size on several threads read faster than one.
_MIN_PARALLEL_NBYTES = 8 << 20


@dataclass(kw_only=True, unsafe_hash=True)
class StorageConfig:
    """Makes the storage, in each process that saves or loads.

    Parameters
    ----------
    fsync : bool, default True
        Whether a checkpoint survives power loss once it has its name.
    verify : bool, default True
        Whether files of tensors are compared with their checksums when they are read whole.

    Examples
    --------
    >>> from torch_checkpointing import CheckpointManager  # doctest: +SKIP
    >>> from ptsave.integrations.torch_checkpointing import StorageConfig  # doctest: +SKIP
    >>> options = CheckpointManager.Config(storage_config=StorageConfig())  # doctest: +SKIP
    """

    fsync: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        check_flags(fsync=self.fsync, verify=self.verify)

    def create_storage(self) -> Storage:
        """Return the storage."""
        kind = getattr(sys.modules[type(self).__module__], "Storage", Storage)
        return cast("Storage", kind(self))


class Storage:
    """Files and directories of this machine, written and read by the engine."""

    def __init__(self, config: StorageConfig) -> None:
        self._fsync = config.fsync
        self.verifies = config.verify  # whether files that have checksums are compared with them

    @property
    def mmap_fill_workers(self) -> int:
        """Number of streams that read one file: one, as the engine has its own threads."""
        return 1

    def stream_read(self, path: Path, read_args: Any = None) -> io.RawIOBase | io.BytesIO:
        """Open a file; read it whole first, and verify it, unless `read_args` says otherwise."""
        stream = ReadStream(path, verify=self.verifies)
        if read_args is not None and not read_args.pre_read_full_file:
            return stream
        with stream:
            return io.BytesIO(stream.readall())

    def read(self, path: Path, read_args: Any = None) -> bytes:
        """Return the verified bytes of a file."""
        with ReadStream(path, verify=self.verifies) as stream:
            return stream.readall()

    def stream_write(self, path: Path) -> io.RawIOBase:
        """Return a stream whose file appears, complete, when the stream is closed."""
        return WriteStream(path, fsync=self._fsync)

    def get_write_stream(self, path: Path, data: object) -> io.RawIOBase:
        """Return a stream that saves `data` when torch.save gets the stream next."""
        return ObjectStream(path, data, fsync=self._fsync)

    def write(self, path: Path, data: Buffer) -> None:
        """Write a file, which appears complete or not at all."""
        with WriteStream(path, fsync=self._fsync) as stream:
            stream.write(memoryview(data).cast("B"))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory, by default with its parents and only if it is missing."""
        if recursive:
            os.makedirs(path, exist_ok=True)
        else:
            os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and its contents."""
        shutil.rmtree(path)

    def delete(self, path: Path) -> None:
        """Remove a file."""
        os.remove(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a file or a directory, durably with `fsync`.

        A file replaces a file, and a directory an empty directory; all else is an OSError, as is
        another file system.
        """
        if self._fsync and os.path.isdir(src_path):
            for folder, _, _ in os.walk(src_path):
                sync_path(folder)
        try:
            os.rename(src_path, dst_path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                message = f"{os.strerror(error.errno)}: the name of {src_path} is taken, remove it"
                raise type(error)(error.errno, message, str(dst_path)) from None
            raise
        if self._fsync:
            for folder in {os.path.dirname(dst_path) or ".", os.path.dirname(src_path) or "."}:
                sync_path(folder)

    def ls(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def exists(self, path: Path) -> bool:
        """Return whether a path exists."""
        return os.path.exists(path)

    def getsize(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        return os.path.getsize(path)

    def isdir(self, path: Path) -> bool:
        """Return whether a path is a directory."""
        return os.path.isdir(path)

    def remap_path(self, path: Path) -> str:
        """Return the path as other programs know it, which is the same."""
        return str(path)


class ReadStream(io.FileIO):
    """Reads a file; `verify` compares an archive that is read at once with its checksums."""

    read = io.RawIOBase.read  # type: ignore[assignment]  # by the methods below

    def __init__(self, path: Path, *, verify: bool) -> None:
        super().__init__(os.fspath(path))
        self._path = os.fspath(path)
        self._verify = verify
        self._nbytes = os.fstat(self.fileno()).st_size

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer up to the end of the file, and verify an archive that is read whole."""
        # The views are released before an error is raised.  Its traceback would keep them, and the
        # buffer's owner may want to unmap the memory.
        with memoryview(buffer) as whole, whole.cast("B") as view:
            begin = self.tell()
            nbytes = min(view.nbytes, max(self._nbytes - begin, 0))
            if nbytes < _MIN_PARALLEL_NBYTES and nbytes < self._nbytes:
                return super().readinto(view) or 0
            if nbytes:
                self._fill(view, nbytes, begin)
            self.seek(begin + nbytes)
            error = None
            if self._verify and nbytes == self._nbytes:
                with view[:nbytes] as data:
                    error = self._damage(data)
        if error is not None:
            raise error
        return nbytes

    def readall(self) -> bytes:
        data = bytearray(max(self._nbytes - self.tell(), 0))
        n = self.readinto(data)
        return bytes(memoryview(data)[:n])

    def _fill(self, view: memoryview, nbytes: int, begin: int) -> None:
        limits = config.current()
        files = [(self.fileno(), os.fsencode(self._path))]
        _C.RangeFiles(files, direct=limits.direct_reads, n_threads=limits.n_readers).read(
            [(0, begin, torch.frombuffer(view, dtype=torch.uint8, count=nbytes))],
            n_threads=limits.n_readers,
            max_pinned_nbytes=limits.max_pinned_nbytes,
            progress=None,
        )

    def _damage(self, data: memoryview) -> CorruptCheckpointError | None:
        if bytes(data[: len(ZIP_MAGIC)]) != ZIP_MAGIC:
            return None  # JSON, metadata, safetensors: no checksums
        limits = config.current()
        try:
            engine = _C.Reader.open_memory(data, os.fsencode(self._path))
        except CorruptCheckpointError:
            return None  # truncated, or another kind of zip file: the caller decides
        reader = RecordReader(engine, self._path, limits, verify=True)
        if not (engine.has_crcs and engine.storages_have_crcs and engine.all_stored):
            return None
        damaged = engine.read_records(
            list(range(len(engine.records()))),
            [],
            n_threads=limits.n_threads,
            verify=True,
            max_pinned_nbytes=limits.max_pinned_nbytes,
        )
        return damage_of(reader, damaged) if damaged else None


class WriteStream(io.RawIOBase):
    """Writes a file that appears, complete, when the stream is closed without an error."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._fsync = fsync
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        return self._opened().write(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _opened(self) -> io.BufferedWriter:
        if self._file is None:
            folder, name = os.path.split(self._path)
            if not os.path.isdir(folder or "."):
                message = f"Parent directory {folder} does not exist."
                raise SaveError(errno.ENOENT, message, self._path)
            self._file = open(os.path.join(folder, name_for(name)), "xb")  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Publish the file under its name."""
        if self.closed:
            return
        try:
            with self._opened() as file:
                file.flush()
                if self._fsync:
                    os.fsync(file.fileno())
            os.replace(file.name, self._path)
            if self._fsync:
                sync_path(os.path.dirname(self._path) or ".")
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the stream, and leave the file at the path as it is."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._file.name)
            self._file = None
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        if error is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        """Abort a stream that was not closed."""
        self.abort()


class _ObjectSavedError(Exception):
    """Ends the torch.save call that asked a stream for its path."""


class ObjectStream(WriteStream):
    """Saves `data` with the engine when torch.save gets the stream, in a ``with`` block.

    Bytes that are written to the stream go to the file as usual.
    """

    def __init__(self, path: Path, data: object, *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._data = data

    def __fspath__(self) -> str:
        """Save the object when torch.save asks for the path, then end torch.save by an error.

        The ``with`` block catches that error.
        """
        save(self._data, self._path, fsync=self._fsync)
        raise _ObjectSavedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        super().__exit__(kind, error, traceback)
        return isinstance(error, _ObjectSavedError)
