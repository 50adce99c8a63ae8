"""Streams for torch_checkpointing: for verified reads, atomic writes, and one saved object."""

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

# From this size on several threads read faster than one.
_MIN_PARALLEL_NBYTES = 8 << 20


class ReadStream(io.RawIOBase):
    """Reads a file; `verify` compares an archive that is read at once with its checksums."""

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
        """Fill a buffer up to the end of the file, and verify an archive that is read whole."""
        # The views are released before an error is raised.  Its traceback would keep them, and the
        # buffer's owner may want to unmap the memory.
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

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class WriteStream(io.RawIOBase):
    """Writes a file that appears, complete, when the stream is closed without an error."""

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
            # The engine's form of temporary names, which marks leftovers of killed processes.
            self._temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.ptsave")
            self._file = open(self._temporary, "xb")  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Publish the file under its name."""
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
