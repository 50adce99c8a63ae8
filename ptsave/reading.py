"""An archive on its way in: its records, storages filled in the background, and the damage."""

from __future__ import annotations

import io
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch

from ptsave import _C, config
from ptsave.errors import CheckpointWarning, CorruptCheckpointError, CorruptPickleError
from ptsave.not_checkpoints import (
    is_zip,
    refuse_special_file,
    refuse_special_stream,
    regular_only,
)
from ptsave.progress import ProgressCallback
from ptsave.remote_errors import named_errors

__all__ = [
    "MINIZ_ADVICE",
    "RecordDamage",
    "RecordReader",
    "bare_message",
    "corrupt",
    "describe",
    "open_archive",
    "raise_corrupt",
    "real_file",
]

# What torch writes into these has at most 40 bytes.
_SMALL_RECORDS = frozenset(
    {
        *("byteorder", "version", ".data/version", ".format_version", ".storage_alignment"),
        ".data/serialization_id",
    }
)
_MAX_SMALL_NBYTES = 64 << 10
_ID_RECORD = ".data/serialization_id"
_ID_N_DIGITS = 20  # of names, and then of checksums
# What torch says when miniz fails; people search for it.
MINIZ_ADVICE = (
    ". This is an internal miniz error. If you are seeing this error, there is a high likelihood "
    "that your checkpoint file is corrupted. This can happen if the checkpoint was not saved "
    "properly, was transferred incorrectly, or the file was modified after saving."
)


def open_archive(f: Any) -> _C.Reader | None:
    """Open `f` with ptsave's own reader.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        What :func:`torch.load` takes.

    Returns
    -------
    _C.Reader or None
        None if `f` does not begin as a zip archive, or is of a kind that only torch's loader reads.

    Raises
    ------
    CorruptCheckpointError
        If it begins as an archive and is none.
    """
    try:
        with named_errors(describe(f)):
            return _open(f)
    except _C.FormatError as error:
        raise_corrupt(error, describe(f))


def _open(f: Any) -> _C.Reader | None:
    if isinstance(f, (str, os.PathLike)):
        return _open_path(os.fspath(f))
    if type(f) is tempfile.SpooledTemporaryFile:
        f = f._file  # a BytesIO, or the file it has become
    if type(f) is io.BytesIO:
        begin = f.tell()
        with f.getbuffer() as view:
            if not is_zip(bytes(view[begin : begin + 4])):
                return None
            return _C.Reader.open_memory(view[begin:], name="BytesIO")
    raw = real_file(f)
    if raw is not None:
        return _open_file_object(raw)
    return None


def describe(f: Any) -> str:
    """Return what to call `f` in a message."""
    if isinstance(f, (str, os.PathLike)):
        return os.fsdecode(f)
    name = getattr(f, "name", None)
    return name if isinstance(name, str) else f"<{type(f).__name__}>"


def real_file(f: Any) -> Any:
    """Return the file object whose bytes are those behind its descriptor, or None if `f` is none.

    Subclasses may do anything with the bytes, and a buffered object may sit on one.
    """
    if type(f) is tempfile._TemporaryFileWrapper:
        f = f.file
    elif _is_fsspec_local(f):
        f = f.f
    if type(f) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom):
        return f if not f.closed and type(f.raw) is io.FileIO else None
    return f if type(f) is io.FileIO and not f.closed else None


def _is_fsspec_local(f: object) -> bool:
    """Whether `f` is fsspec's wrapper of a local file, as Lightning opens checkpoints."""
    local = sys.modules.get("fsspec.implementations.local")
    return local is not None and type(f) is local.LocalFileOpener


def _open_path(path: str | bytes) -> _C.Reader | None:
    if not isinstance(path, str) or path.endswith(".safetensors"):
        with suppress(FileNotFoundError):  # which torch says in words of its own
            refuse_special_file(path)  # or torch's loader would wait for somebody to write to it
        return None
    if "\0" in path or stat.S_ISCHR(os.stat(path).st_mode):  # /dev/null: as torch has it
        return None
    with open(path, "rb", buffering=0, opener=regular_only) as stream:
        return _open_file_object(stream)


def _open_file_object(stream: Any) -> _C.Reader | None:
    if not stream.readable():
        return None
    refuse_special_stream(stream, describe(stream))
    fd = stream.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    begin = stream.tell()
    if not is_zip(os.pread(fd, 4, begin)):
        return None
    name = os.fsencode(str(stream.name))
    return _C.Reader.open_descriptor(fd, begin, name, direct=config.current().direct_reads)


def _folded(crcs: Iterable[int]) -> int:
    """Return what a serialization id says of checksums (docs/format.md)."""
    seed = 0
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFF_FFFF_FFFF_FFFF
    return seed


def raise_corrupt(error: _C.FormatError, path: str) -> NoReturn:
    """Raise what the engine found wrong with an archive as a :class:`CorruptCheckpointError`."""
    raise corrupt(error, path) from None


def corrupt(error: _C.FormatError, path: str) -> CorruptCheckpointError:
    """Return what the engine found wrong with an archive as a :class:`CorruptCheckpointError`."""
    reason, detail, record, offset = error.args
    by_torch = reason.startswith("Pytorch")
    parts = [f"{reason}{MINIZ_ADVICE if by_torch else ''} ({detail})"]
    if record is not None:
        parts.append(f"record {record}")
    if offset is not None:
        parts.append(f"offset {offset}")
    kind = CorruptPickleError if record == "data.pkl" else CorruptCheckpointError
    message = f"{path}: {'; '.join(parts)}"
    return kind(message, path=path, record=record, offset=offset)


def bare_message(error: BaseException, path: str) -> str:
    """Return what an error about a file says, without the file, the record and torch's advice."""
    text = str(error).replace(MINIZ_ADVICE, "").removeprefix(f"{path}: ")
    record = getattr(error, "record", None)
    return text if record is None else text.removeprefix(f"record {record}: ")


class RecordDamage(NamedTuple):
    """A record that does not match its checksum, as the engine says it by ``_C.DamagedRecord``."""

    name: str
    payload_offset: int
    expected_crc: int
    actual_crc: int


class RecordReader:
    """What torch's unpickling asks of an archive, answered by ptsave's engine.

    It has the methods of ``torch._C.PyTorchFileReader`` that ``torch.serialization._load`` uses.

    Parameters
    ----------
    engine : _C.Reader
        An open archive.
    path : str
        What to call it in messages.
    verify : bool
        Whether checksums are compared.

    Attributes
    ----------
    progress : ProgressCallback or None
        Called while waiting, with the bytes read so far.
    wait_for_bytes : bool
        Whether a storage is handed out only when it is filled.
    """

    def __init__(self, engine: _C.Reader, path: str, *, verify: bool) -> None:
        self.engine = engine
        self.path = path
        self.wait_for_bytes = True
        self.verify = verify and config.current().verify
        self.progress: ProgressCallback | None = None
        self._small: dict[str, bytes] = {}

    def close(self) -> None:
        """Let go of the archive, even if something still refers to this reader."""
        del self.engine
        self._small.clear()

    # ------------------------------------------------------------------- torch's reader interface

    def has_record(self, name: str) -> bool:
        return self.find(name) is not None

    def get_all_records(self) -> list[str]:
        return [record.name for record in self.engine.records()]

    def get_record(self, name: str) -> bytes:
        if name not in self._small:
            record = self._find(name)
            self.require_small(record)
            try:
                self._small[name] = self.engine.read(record, verify=self.verify)
            except _C.FormatError as error:
                raise_corrupt(error, self.path)
        return self._small[name]

    def get_record_size(self, name: str) -> int:
        return self.engine.record(self._find(name)).nbytes

    def get_record_offset(self, name: str) -> int:
        try:
            return self.engine.payload_offset(self._find(name))
        except _C.FormatError as error:
            raise_corrupt(error, self.path)

    def get_record_header_offset(self, name: str) -> int:
        return self.engine.record(self._find(name)).header_offset

    def get_record_offset_no_read(self, cursor: int, name: str, nbytes: int, alignment: int) -> int:
        full_name = f"{self.engine.root}/{name}"
        if not name.isascii():
            self._find(name)
        return _C.payload_offset_after(cursor, full_name, nbytes, alignment)

    def serialization_id(self) -> str:
        if not self.has_record(_ID_RECORD):
            return ""
        return self.get_record(_ID_RECORD).decode("ascii", "replace")

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> torch.Tensor:
        """Return a tensor over the storage of a record, which may still be being filled."""
        record = self.find_storage(name, nbytes)
        if self.wait_for_bytes:
            self.engine.wait(record, progress=self.progress)
        return self.engine.storage(record)

    def find_storage(self, name: str, nbytes: int) -> int:
        """Return the number of a record, which must be as large as the pickle says."""
        record = self._find(name)
        found = self.engine.record(record).nbytes
        if found != nbytes:
            raise CorruptCheckpointError(
                f"record size ({found} bytes) does not match expected size ({nbytes} bytes = "
                f"{nbytes} elements * 1 bytes/element) for dtype Byte: {self.path}, record {name}",
                path=self.path,
                record=name,
                offset=self.engine.record(record).header_offset,
            )
        return record

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the archive, wherever they are in it."""
        return self.engine.read_at(offset, nbytes)

    def end_of_storages(self) -> int:
        """Return the offset behind the last storage; behind data.pkl if there are none."""
        records = self.engine.records()
        storages = [record for record in records if record.name.startswith("data/")]
        read = storages or [record for record in records if record.name == "data.pkl"]
        return max(record.payload_offset + record.nbytes for record in read)

    def find(self, name: str) -> int | None:
        """Return the number of a record; None if there is none of that name."""
        try:
            return self.engine.find(name)
        except UnicodeEncodeError:  # a lone surrogate, which no archive has in a name
            return None

    def require_small(self, record: int) -> None:
        """Refuse a record of torch's own, such as the version, that is larger than any can be."""
        found = self.engine.record(record)
        if found.name in _SMALL_RECORDS and found.nbytes > _MAX_SMALL_NBYTES:
            self.fail(
                f"it has {found.nbytes} bytes, and such a record at most {_MAX_SMALL_NBYTES}: the "
                "file was not written by torch.save, restore it from a copy",
                found.name,
            )

    def _find(self, name: str) -> int:
        record = self.find(name)
        if record is None:
            name = name.encode("utf-8", "backslashreplace").decode()
            message = f"PytorchStreamReader failed locating file {name}: file not found"
            self.fail(f"{message}{MINIZ_ADVICE}", name)
        return record

    def fail(self, message: str, record: str) -> NoReturn:
        """Raise a :class:`CorruptCheckpointError` about a record."""
        raise self.failure(message, record)

    def failure(self, message: str, record: str) -> CorruptCheckpointError:
        """Return a :class:`CorruptCheckpointError` about a record."""
        return CorruptCheckpointError(
            f"{self.path}: record {record}: {message}", path=self.path, record=record
        )

    # ------------------------------------------------------------------------- filling of storages

    def verifies_storages(self, stacklevel: int = 7) -> bool:
        """Whether storages are compared with checksums; warns if they should be and have none."""
        if not self.verify or self.engine.storages_have_crcs:
            return self.verify
        if self.storages_were_left_out():
            return False
        warnings.warn(
            f"{self.path} was written without checksums of its storages "
            "(set_crc32_options(False)): they are loaded unverified",
            CheckpointWarning,
            stacklevel=stacklevel,
        )
        return False

    def storages_were_left_out(self) -> bool:
        """Whether ``torch.serialization.skip_data`` wrote the file, for others to fill it in.

        Only storages have no checksums then, and the serialization id is made of that: an ordinary
        file that has lost them says otherwise.
        """
        if self.engine.storages_have_crcs or not self.engine.has_crcs:
            return False
        records = [record for record in self.engine.records() if record.name != _ID_RECORD]
        crcs = [record.crc for record in records if record.nbytes]
        return self.serialization_id()[_ID_N_DIGITS:] == f"{_folded(crcs):0{_ID_N_DIGITS}}"

    @contextmanager
    def reading_storages(self, *, exact_offsets: bool) -> Iterator[None]:
        """Fill the storages of all tensors in the background; what is not done at the end stops."""
        try:
            self.engine.start(
                None,
                n_threads=config.current().n_readers,
                verify=self.verifies_storages(),
                exact_offsets=exact_offsets,
            )
            yield
        except _C.FormatError as error:
            raise_corrupt(error, self.path)
        finally:
            self.engine.cancel()

    def reserve_storages(self) -> None:
        """Give storages their places without reading them; `fill` does that."""
        try:
            self.engine.reserve()
        except _C.FormatError as error:
            raise_corrupt(error, self.path)
        self.wait_for_bytes = False

    def fill(
        self, records: Iterable[int], *, verify: bool, progress: ProgressCallback | None
    ) -> None:
        """Make the copies that were planned, and read these records into their storages."""
        try:
            damaged = self.engine.fill(
                list(records),
                n_threads=config.current().n_readers,
                verify=verify,
                max_pinned_nbytes=config.current().max_pinned_nbytes,
                progress=progress,
            )
        except _C.FormatError as error:
            raise_corrupt(error, self.path)
        if damaged:
            raise self.damage(damaged)

    def wait_for_storages(self) -> None:
        """Wait until every storage is filled, and refuse the archive if any is damaged."""
        damaged = self.engine.wait_all(progress=self.progress)
        if damaged:
            raise self.damage(damaged)

    def release_storages(self) -> None:
        """Make the storages that were handed out ordinary ones: until now none could be resized."""
        self.engine.release_storages()

    def damage(self, damaged: Sequence[_C.DamagedRecord | RecordDamage]) -> CorruptCheckpointError:
        """Return what to raise when these records do not match their checksums."""
        from ptsave.entries import entries_using

        first = damaged[0]
        entries = entries_using(self, {record.name for record in damaged})
        others = f"; {len(damaged) - 1} more damaged records" if len(damaged) > 1 else ""
        used_by = f"; used by {', '.join(entries[:8])}" if entries else ""
        more = ", ..." if len(entries) > 8 else ""
        return CorruptCheckpointError(
            f"{self.path}: record {first.name} at offset {first.payload_offset} is damaged: its "
            f"CRC-32 is {first.actual_crc:08x}, not {first.expected_crc:08x}"
            f"{others}{used_by}{more}. "
            "Restore the file from a copy, or pass verify=False to load it as it is.",
            path=self.path,
            record=first.name,
            offset=first.payload_offset,
            entries=entries,
        )
