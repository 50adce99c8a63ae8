"""Streams of files for torch_checkpointing: verified ones, atomic ones, and one for an object."""

from __future__ import annotations

import errno
import io
import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Buffer

from ptsave import _C
from ptsave.archive.damage import damage_of
from ptsave.archive.reader import RecordReader
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.serialization import save
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.support import config
from ptsave.support.syncing import sync_path

__all__ = ["ObjectStream", "ReadStream", "WriteStream"]

# From here on several threads read faster than one.
_MIN_PARALLEL_NBYTES = 8 << 20


class ReadStream(io.RawIOBase):
    """Reads a file; whole archives are compared with their checksums.

    Parameters
    ----------
    path : Path
        The file.
    verify : bool
        Whether they are.
    """

    def __init__(self, path: Path, *, verify: bool) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._verify = verify
        self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
        self._nbytes = os.fstat(self._file.fileno()).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer from where the stream is, up to the end of the file.

        Raises
        ------
        OSError
            If the file cannot be read.
        CorruptCheckpointError
            If it is an archive, all of it was read, and it differs from its checksums.
        """
        # Views are let go of before an error is raised, whose traceback would keep them: who owns
        # the memory may want to unmap it then.
        with memoryview(buffer) as whole, whole.cast("B") as view:
            begin = self._file.tell()
            nbytes = min(view.nbytes, max(self._nbytes - begin, 0))
            if nbytes < _MIN_PARALLEL_NBYTES and nbytes < self._nbytes:
                return self._file.readinto(view) or 0
            if nbytes:
                self._fill(view, nbytes, begin)
            self._file.seek(begin + nbytes)
            error = None
            if self._verify and nbytes == self._nbytes:
                with view[:nbytes] as data:
                    error = self._damage(data)
        if error is not None:
            raise error
        return nbytes

    def readall(self) -> bytes:
        data = bytearray(max(self._nbytes - self._file.tell(), 0))
        n = self.readinto(data)
        return bytes(memoryview(data)[:n])

    def _fill(self, view: memoryview, nbytes: int, begin: int) -> None:
        limits = config.current()
        files = [(self._file.fileno(), os.fsencode(self._path))]
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
            engine = _C.Reader.open_memory(data, self._path)
        except _C.FormatError:
            return None  # cut off, or a zip file of another kind: for torch to say, or to hand out
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

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class WriteStream(io.RawIOBase):
    """Writes a file that appears, whole, when the stream is closed without an error.

    Parameters
    ----------
    path : Path
        The file.
    fsync : bool
        Whether it survives power loss then.
    """

    def __init__(self, path: Path, *, fsync: bool) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._fsync = fsync
        self._temporary = ""
        self._file: io.BufferedWriter | None = None

    def __enter__(self) -> Any:
        if not os.path.isdir(folder := os.path.dirname(self._path) or "."):
            raise SaveError(errno.ENOENT, f"Parent directory {folder} does not exist.", self._path)
        return self

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
            # Of the engine's form, so that leftovers of a killed process are known as such.
            self._temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.ptsave")
            self._file = open(self._temporary, "xb")  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Give the file its name."""
        if self.closed:
            return
        try:
            self._commit()
        except BaseException:
            self.abort()
            raise
        super().close()

    def _commit(self) -> None:
        with self._opened() as file:
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        os.replace(self._temporary, self._path)
        self._file = None
        if self._fsync:
            sync_path(os.path.dirname(self._path) or ".")

    def abort(self) -> None:
        """Close the stream, and leave the file at the path as it is."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._temporary)
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
        """Do not commit a stream that nobody has closed."""
        self.abort()


class _ObjectSavedError(Exception):
    """Ends the torch.save that asked a stream for its path."""


class ObjectStream(WriteStream):
    """Saves one object by the engine when it is given to torch.save, in a ``with`` block.

    Bytes that are written to it go to the file as with any stream.

    Parameters
    ----------
    path : Path
        The file.
    data : object
        The object.
    fsync : bool
        Whether the file survives power loss when the block ends.
    """

    def __init__(self, path: Path, data: object, *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._data = data

    def __fspath__(self) -> str:
        """Save the object, where torch.save asks for the path to write to.

        Raises
        ------
        Exception
            Which the ``with`` block takes back; or those of :func:`ptsave.save`.
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
