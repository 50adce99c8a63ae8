"""`RecordReader`: the interface of ``torch._C.PyTorchFileReader`` over ptsave's engine."""

from __future__ import annotations

from typing import NoReturn

import torch

from ptsave import _C
from ptsave.archive.format_errors import MINIZ_ADVICE, raise_corrupt
from ptsave.errors import CorruptCheckpointError
from ptsave.support import config
from ptsave.support.progress import ProgressCallback

__all__ = ["ID_RECORD", "SMALL_RECORDS", "RecordReader"]

# torch writes at most 40 bytes into each of these.
SMALL_RECORDS = frozenset(
    {
        *("byteorder", "version", ".data/version", ".format_version", ".storage_alignment"),
        ".data/serialization_id",
    }
)
_MAX_SMALL_NBYTES = 64 << 10
ID_RECORD = ".data/serialization_id"


class RecordReader:
    """An archive as torch's unpickling sees it, over ptsave's engine.

    It has the methods of ``torch._C.PyTorchFileReader`` that ``torch.serialization._load`` uses.

    Parameters
    ----------
    engine : _C.Reader
        An open archive.
    path : str
        Its name in messages.
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
        if not self.has_record(ID_RECORD):
            return ""
        return self.get_record(ID_RECORD).decode("ascii", "replace")

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
        if found.name in SMALL_RECORDS and found.nbytes > _MAX_SMALL_NBYTES:
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
