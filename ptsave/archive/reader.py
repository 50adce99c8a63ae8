"""`RecordReader` has the methods of ``torch._C.PyTorchFileReader``, but uses ptsave's engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.serialization import LoadEndianness

from ptsave import _C
from ptsave.errors import MINIZ_ADVICE, CorruptCheckpointError, CorruptRecordError
from ptsave.support.calls import ProgressCallback
from ptsave.support.config import Config
from ptsave.support.text import size_text
from ptsave.support.torch_names import CHECKPOINT_OFFSET

if TYPE_CHECKING:
    from ptsave.sources.ranges import LocalFile

_BYTE_ORDER = "byteorder"
ID_RECORD = ".data/serialization_id"
# The small records that torch's loader asks for, and all small records.  torch writes at most 40
# bytes in each record.
LOADERS_RECORDS = (".format_version", _BYTE_ORDER, ".storage_alignment", ID_RECORD)
SMALL_RECORDS = (*LOADERS_RECORDS, "version", ".data/version")
_MAX_SMALL_NBYTES = 64 << 10
# The file format versions that torch reads (caffe2/serialize/versions.h).
_MIN_VERSION = 1
_MAX_VERSION = 10
_MAX_DIGITS = 1000
_MAX_QUOTED = 200


class RecordReader:
    """An open archive; it has the methods that ``torch.serialization._load`` calls on a reader."""

    is_fetched = False  # whether bytes come from a source that the engine cannot read
    reads_when_asked = False  # whether a storage is read when unpickling asks for it, not ahead
    verifies: bool  # with reads_when_asked: whether storages are compared with checksums

    def __init__(self, engine: _C.Reader, path: str, limits: Config, *, verify: bool) -> None:
        self.engine = engine
        self.path = path
        self.limits = limits
        self.wait_for_bytes = True  # hand out a storage only when it is filled
        self.allows_values = False  # make harmless values that torch's unpickler refuses
        self.is_blind = False  # whether the pickle only rebuilds plain tensors, with torch's code
        self.leaves_opaque = False  # make harmless values, and an `Opaque` for other objects
        self.verify = verify and limits.verify
        self.progress: ProgressCallback | None = None  # called with the bytes read so far
        self.small: dict[str, bytes] = {}  # records read so far, except storages
        self._parked: LocalFile | None = None  # while parked: opens the file for each read
        self._n_users = 0
        self._lock = Lock()

    def close(self) -> None:
        """Release the archive, even if something still refers to this reader."""
        del self.engine
        self._parked = None
        self.small.clear()

    def park(self, file: LocalFile) -> None:
        """Close the archive's file; `file` opens it again for each read.

        A checkpoint may have more files than a process may open at once.
        """
        self._parked = file
        self.engine.close_file()

    def opened(self) -> AbstractContextManager[None]:
        """Keep the file open during the ``with`` block, so that the block can read with `engine`.

        Raises OSError if a parked file is gone or has been replaced.  Safe for concurrent use.
        """
        return nullcontext() if self._parked is None else self._opened_again(self._parked)

    @contextmanager
    def _opened_again(self, parked: LocalFile) -> Iterator[None]:
        engine = self.engine
        with self._lock:
            if self._n_users == 0:
                with parked.opened() as file:
                    direct = self.limits.direct_reads
                    engine.lend_file(file.descriptor, file.begin, direct=direct)
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    engine.close_file()

    # ------------------------------------------------------------------- torch's reader interface

    def has_record(self, name: str) -> bool:
        return self.find(name) is not None

    def get_all_records(self) -> list[str]:
        return [record.name for record in self.engine.records()]

    def get_record(self, name: str) -> bytes:
        if name not in self.small:
            record = self._find(name)
            self.require_small(record)
            with self.opened():
                self.small[name] = self.engine.read(record, verify=self.verify)
        return self.small[name]

    def get_record_size(self, name: str) -> int:
        return self.engine.record(self._find(name)).nbytes

    def get_record_offset(self, name: str) -> int:
        with self.opened():
            return self.engine.payload_offset(self._find(name))

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
        """Return a tensor over a record's storage; the storage may not be filled yet."""
        record = self.find_storage(name, nbytes)
        if self.wait_for_bytes:
            self.engine.wait(record, progress=self.progress)
        return self.engine.storage(record)

    def find_storage(self, name: str, nbytes: int) -> int:
        """Return the number of a record; raise an error unless its size is `nbytes`."""
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

    # -------------------------------------------------------------------------- small records

    def for_loader(self) -> LoadersView:
        """Return a view of the archive for torch's loader."""
        return LoadersView(self, self.small_records())

    def small_records(self) -> dict[str, bytes]:
        """Read data.pkl and the `SMALL_RECORDS`; return the contents of records by their names."""
        for name in (*filter(self.has_record, SMALL_RECORDS), "data.pkl"):
            self.get_record(name)
        return self.small

    def check_small_records(self) -> None:
        """Read all records except storages; reading verifies their names, headers and checksums."""
        for name in self.engine.other_names():
            self.get_record(name)

    def check_records(self) -> None:
        """Raise an error for a version that torch does not read, or for damage outside storages."""
        self.check_version()
        if self.verify:
            self.check_small_records()

    def is_native_byte_order(self) -> bool:
        """Whether torch would treat the storages as being in this machine's byte order."""
        if self.has_record(_BYTE_ORDER):
            return self.get_record(_BYTE_ORDER) == sys.byteorder.encode()
        default = torch.serialization.get_default_load_endianness()
        if default is LoadEndianness.NATIVE:
            return True
        order = "big" if default is LoadEndianness.BIG else "little"
        return order == sys.byteorder

    def check_version(self) -> None:
        """Raise torch's error for a version, a byte order or an alignment that torch refuses."""
        for name, pattern, what in (
            (_BYTE_ORDER, rb"little|big", "Unknown endianness type"),
            (".storage_alignment", rb"\s*[+-]?\d{1,18}\s*", "not an alignment"),
        ):
            if self.has_record(name) and not re.fullmatch(pattern, self.get_record(name)):
                shown = self.get_record(name)[:_MAX_QUOTED].decode("latin-1")
                raise CorruptRecordError(
                    f"{self.path}: record {name}: {what}: {shown}", path=self.path, record=name
                )
        name = ".data/version" if self.has_record(".data/version") else "version"
        if not self.has_record(name):
            self.fail(
                'Expected hasRecord("version") to be true, but got false.  (Could this error '
                "message be improved?  If so, please report an enhancement request to PyTorch.)",
                name,
            )
        text = self.get_record(name).decode("latin-1")
        number = re.match(r"\s*[+-]?\d+", text)
        # int() refuses numbers of thousands of digits.
        if number is None or len(number[0]) > _MAX_DIGITS or int(number[0]) >= 1 << 64:
            shown = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
            self.fail(f"Couldn't parse the version {shown} as Long Long.", name)
        version = int(number[0])
        attempt = f"Attempted to read a PyTorch file with version {version}, but the"
        if version < _MIN_VERSION:
            self.fail(
                f"{attempt} minimum supported version for reading is {_MIN_VERSION}. Your "
                "PyTorch script module file is too old. Please regenerate it with latest version "
                "of PyTorch to mitigate this issue.",
                name,
            )
        if version > _MAX_VERSION:
            self.fail(
                f"{attempt} maximum supported version for reading is {_MAX_VERSION}. The "
                "version of your PyTorch installation may be too old, please upgrade PyTorch to "
                "latest version to mitigate this issue.",
                name,
            )

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of the archive, from `offset` on."""
        with self.opened():
            return self.engine.read_at(offset, nbytes)

    def end_of_storages(self) -> int:
        """Return the offset behind the last storage, or behind data.pkl if there is no storage."""
        records = self.engine.records()
        storages = [record for record in records if record.name.startswith("data/")]
        read = storages or [record for record in records if record.name == "data.pkl"]
        return max(record.payload_offset + record.nbytes for record in read)

    def find(self, name: str) -> int | None:
        """Return the number of a record; None if no record has that name."""
        try:
            return self.engine.find(name)
        except UnicodeEncodeError:  # a lone surrogate, which names in archives never have
            return None

    def require_small(self, record: int) -> None:
        """Raise an error if the record is one of the `SMALL_RECORDS` but too large."""
        found = self.engine.record(record)
        if found.name in SMALL_RECORDS and found.nbytes > _MAX_SMALL_NBYTES:
            self.fail(
                f"the record has {found.nbytes} bytes, more than the {_MAX_SMALL_NBYTES} that are "
                "allowed, so torch.save did not write this record: restore the file from a copy",
                found.name,
            )

    def _find(self, name: str) -> int:
        record = self.find(name)
        if record is None:
            name = name.encode("utf-8", "backslashreplace").decode()
            message = f"PytorchStreamReader failed locating file {name}: file not found"
            self.fail(f"{message}{MINIZ_ADVICE}", name, MINIZ_ADVICE)
        return record

    def fail(self, message: str, record: str, advice: str = "") -> NoReturn:
        """Raise a :class:`CorruptCheckpointError` about a record."""
        raise self.failure(message, record, advice)

    def failure(self, message: str, record: str, advice: str = "") -> CorruptCheckpointError:
        """Return a :class:`CorruptCheckpointError` about a record."""
        message = f"{self.path}: record {record}: {message}"
        return CorruptCheckpointError(message, path=self.path, record=record, advice=advice)

    @contextmanager
    def naming_what_needs_memory(self) -> Iterator[None]:
        """In the block, add the file and its size to a `MemoryError` that has no message."""
        try:
            yield
        except MemoryError as error:
            if str(error) not in ("", "std::bad_alloc"):
                raise
            raise MemoryError(
                f"{self.path}: too little memory for the file's {size_text(self.engine.nbytes)}: "
                "free some memory, raise the limit (ulimit -v, or the container's limit), or read "
                "parts of the file with ptsave.open"
            ) from None


class LoadersView:
    """An archive with the methods that ``torch.serialization._load`` calls.

    The contents of records come from the dict `small`; all other calls go to `reader`.
    """

    def __init__(self, reader: Any, small: Mapping[str, bytes]) -> None:
        self._reader = reader
        self.has_record = small.__contains__
        self.get_record = small.__getitem__
        self.serialization_id = partial(str, small.get(ID_RECORD, b""), "ascii", "replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class UnfilledView(LoadersView):
    """An archive whose storages have no bytes; it tells torch this machine's byte order.

    For another byte order, :func:`torch.load` would swap bytes even on the meta device, and crash
    with a segmentation fault.  An invalid byte order is not hidden, so torch refuses it.  `names`
    are the `LOADERS_RECORDS` that torch sees.
    """

    def __init__(self, reader: Any, names: Iterable[str] = LOADERS_RECORDS) -> None:
        small = {name: reader.get_record(name) for name in names if reader.has_record(name)}
        small["data.pkl"] = reader.get_record("data.pkl")
        if small.get(_BYTE_ORDER) in (None, b"little", b"big"):
            small[_BYTE_ORDER] = sys.byteorder.encode()
        super().__init__(reader, small)

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> torch.Tensor:
        """Make a storage on the meta device; older torch releases would read the bytes instead."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        setattr(tensor.untyped_storage(), CHECKPOINT_OFFSET, self.get_record_offset(name))
        return tensor
