"""Maps placeholder tensors to byte ranges in files, in memory, or in one temporary file.

A placeholder's storage is only an address, of an unread archive or of a read-only mapping that is
never touched.  The pickler never looks into storages, so it writes the pickle that torch would
write.  The code that splits real tensors into shards splits placeholders, too.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import BufferedWriter
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.checks import member_pieces
from ptsave.archive.opening import open_source_archive
from ptsave.archive.spans import memory_of
from ptsave.archive.views import bytes_of, unfilled_tensors
from ptsave.contents.contents import Contents, LoadedContents, UnreadContents
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.sources.ranges import LocalFile, RangeSource, expect_no_more_reads
from ptsave.streaming.places import Payload, StoragePlace
from ptsave.support import config
from ptsave.support.torch_tensors import storage_id
from ptsave.tree.entry_reading import tensors_over

if TYPE_CHECKING:
    from ptsave.streaming.rank_payloads import RankPayloads

_T = TypeVar("_T")

# The most bytes in memory of a tensor that has to be rearranged.
_PIECE_NBYTES = 32 << 20
_SPOOL_ALIGNMENT = 64
_ZIP64_HEADER_NBYTES = 30 + 20 + 4  # of a record, with the beginning of its padding
# The most bytes of a remote file in memory, and in one request.
_BATCH_NBYTES = 32 << 20
_REQUEST_NBYTES = 8 << 20


class PayloadSources:
    """The sources of all tensors of one conversion.

    `stack` closes them.  `folder` is for a temporary file, which never has a name.
    """

    def __init__(self, stack: ExitStack, folder: str) -> None:
        self.limits = config.current()
        self._stack = stack
        self._folder = folder
        self._items: list[tuple[int, bytes] | tuple[int, int, bytes]] = []
        self._known: dict[int, StoragePlace] = {}  # by the addresses of storages in `_kept`
        self._kept: list[torch.UntypedStorage | Tensor] = []
        self._unread: list[tuple[int, UnreadContents]] = []
        self._ranks: list[RankPayloads] = []
        self._opened: _C.PayloadSources | None = None  # None after a change
        self._spool: TemporaryFile | None = None
        self._spool_number = 0
        # Devices other than the CPU that storages were saved from, by `storage_id`.
        self.locations: dict[int, str] = {}

    def open(self) -> _C.PayloadSources:
        """Return the engine's form of these sources."""
        if self._opened is None:
            self._opened = _C.PayloadSources(self._items, direct=self.limits.direct_reads)
        return self._opened

    def add_file(self, fd: int, name: str) -> int:
        """Add a file, whose descriptor stays the caller's, and return its number."""
        return self._add((fd, os.fsencode(name)))

    def _add(self, item: tuple[int, bytes] | tuple[int, int, bytes]) -> int:
        self._opened = None
        self._items.append(item)
        return len(self._items) - 1

    def localize(self, source: RangeSource) -> LocalFile:
        """Return a local file with the bytes of a source: the source itself, or a temporary file.

        A compressed archive is inflated into a temporary file.
        """
        if not isinstance(source, LocalFile):
            file = TemporaryFile(self._folder, self._stack)
            for begin in range(0, source.nbytes, _BATCH_NBYTES):
                end = min(begin + _BATCH_NBYTES, source.nbytes)
                steps = range(begin, end, _REQUEST_NBYTES)
                for piece in source.read([(at, min(at + _REQUEST_NBYTES, end)) for at in steps]):
                    file.write_all(piece)
            source = file.as_source(source.name)
        self._stack.callback(source.close)
        return self._inflated(source) if source.kind == "zip" else source

    def _inflated(self, source: LocalFile) -> LocalFile:
        reader = None
        with suppress(CorruptCheckpointError):  # opening it reports the damage
            reader = open_source_archive(source, verify=True)
        if reader is None or reader.engine.all_stored:
            return source
        from zipfile import ZipFile, ZipInfo

        file = TemporaryFile(self._folder, self._stack)
        with file.buffered() as stream, ZipFile(stream, "w") as archive:
            for index, record in enumerate(reader.engine.records()):
                info = ZipInfo(f"archive/{record.name}")
                end = stream.tell() + _ZIP64_HEADER_NBYTES + len(info.filename.encode())
                padding = bytes(-end % _SPOOL_ALIGNMENT)  # as torch pads: others are copied
                info.extra = b"FB" + len(padding).to_bytes(2, "little") + padding
                with archive.open(info, "w", force_zip64=True) as member:
                    deque(map(member.write, member_pieces(reader, index)), 0)
        source = file.as_source(source.name)
        self._stack.callback(source.close)
        return source

    def add(self, contents: Contents) -> None:
        """Add an open file that `localize` has returned."""
        if isinstance(contents, UnreadContents):
            self._add_unread(contents)
        elif isinstance(contents, LoadedContents):  # its storages are in memory
            away = {key: where for key, where in contents.locations.items() if where != "cpu"}
            self.locations.update(away)
        elif contents.kind == "dcp":
            self._add_ranks(contents)
        elif isinstance(contents, SafetensorsContents):
            assert isinstance(contents.source, LocalFile)
            expect_no_more_reads(contents.source.descriptor)
            source = self.add_file(contents.source.descriptor, contents.path)
            for stored in contents.header.tensors:
                begin = contents.source.begin + stored.offset
                place = StoragePlace(source, begin, stored.nbytes)
                self.put(contents.obj[stored.name].untyped_storage(), place)

    def _add_unread(self, contents: UnreadContents) -> None:
        source = self.add_file(contents.reader.engine.descriptor, contents.path)
        self._unread.append((source, contents))
        tensors = tensors_over(contents.obj)
        for tensor, (_, _, _, location) in zip(tensors, contents.places_of(tensors), strict=True):
            if location not in (None, "cpu"):
                self.locations[storage_id(tensor.untyped_storage())] = location

    def _add_ranks(self, contents: Contents) -> None:
        from ptsave.streaming.rank_payloads import RankPayloads  # its torch module takes a second

        payloads = RankPayloads(contents, self)
        self.locations.update(payloads.locations)
        self._ranks.append(payloads)

    def put(self, storage: torch.UntypedStorage, place: StoragePlace) -> None:
        """Register the place of a storage without values."""
        if storage.nbytes():
            self._known[storage.data_ptr()] = place
            self._kept.append(storage)

    def places_of(self, storages: Sequence[torch.UntypedStorage]) -> list[StoragePlace | None]:
        """Return the places of storages, with None for those in memory and for empty ones."""
        return self._places_of(storages, [bytes_of(storage) for storage in storages])

    def _places_of(
        self, storages: Sequence[torch.UntypedStorage], tensors: list[Tensor]
    ) -> list[StoragePlace | None]:
        """Return the places of storages, each given with a tensor over it."""
        for payloads in self._ranks:
            payloads.place([s for s in storages if s.data_ptr() not in self._known])
        places = [self._known.get(storage.data_ptr()) for storage in storages]
        for source, contents in self._unread:
            for i, number in enumerate(contents.reader.engine.records_of(tensors)):
                if number is not None and places[i] is None and storages[i].nbytes():
                    place = _place_in(contents, source, number)
                    self.put(storages[i], place)
                    places[i] = place
        return places

    def payloads_of(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Return the payloads of strided tensors, in the order of their elements.

        Tensors with another order of bytes are rearranged in the temporary file.
        """
        places = self._places_of([tensor.untyped_storage() for tensor in tensors], [*tensors])
        payloads = [
            self._payload_of(tensor.detach(), place)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        whole = {payload.place for payload in payloads}
        check_records([place for place in places if place is not None and place not in whole])
        return payloads

    def payloads_in_memory(self, tensors: Sequence[Tensor]) -> list[Payload] | None:
        """Return the payloads of tensors that have values, with less work for each.

        This is None if storages are registered, or if a tensor has to be rearranged.
        """
        if self._known or self._unread or self._ranks or not all(map(is_in_order, tensors)):
            return None
        payloads = []
        for tensor in tensors:
            nbytes = tensor.nbytes
            number = self._add((tensor.data_ptr(), nbytes, b"memory")) if nbytes else 0
            payloads.append(Payload(nbytes, number))
        self._kept += tensors
        return payloads

    def contiguous(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous tensors without values; equal memory in one shape is one tensor."""
        payloads = self.payloads_of(list(tensors.values()))
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors.values()]
        made: dict[Any, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, tensor, payload, empty in zip(
            tensors, tensors.values(), payloads, unfilled_tensors(kinds), strict=True
        ):
            key = (payload, *kinds[len(result)]) if payload.nbytes else name
            result[name] = stand_in = made.setdefault(key, empty)
            place = StoragePlace(payload.source, payload.offset, payload.nbytes)
            self.put(stand_in.untyped_storage(), payload.place or place)
            self.copy_location(tensor, stand_in)
        return result

    def scratch_for(self, status: os.stat_result) -> int | None:
        """Return a temporary file if the file with this status is a source, otherwise None."""
        files = (item[0] for item in self._items if len(item) == 2)
        if not any(os.path.samestat(os.fstat(fd), status) for fd in files):
            return None
        return TemporaryFile(self._folder, self._stack).descriptor

    def copy_location(self, tensor: Tensor, stand_in: Tensor) -> None:
        """Record that a tensor's stand-in was saved from the same device."""
        location = self.locations.get(storage_id(tensor.untyped_storage()))
        if location is not None:
            self.locations[storage_id(stand_in.untyped_storage())] = location

    def _payload_of(self, tensor: Tensor, place: StoragePlace | None) -> Payload:
        if tensor.numel() == 0:
            return Payload(0)
        if not is_in_order(tensor):
            return self._spooled(tensor, place)
        if place is None:
            place = self.memory(tensor.untyped_storage())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        is_whole = tensor.nbytes == place.nbytes
        at = place.offset + offset
        if not is_whole:
            assert not place.parts  # tensors of ranks fill their storages
            return Payload(tensor.nbytes, place.source, at)
        return Payload(tensor.nbytes, place.source, at, place, place.crc, place.parts)

    def memory(self, storage: torch.UntypedStorage) -> StoragePlace:
        """Add a storage that is in memory, and return its place."""
        number = self._add((storage.data_ptr(), storage.nbytes(), b"memory"))
        place = StoragePlace(number, 0, storage.nbytes())
        self.put(storage, place)
        return place

    def _spooled(self, tensor: Tensor, place: StoragePlace | None) -> Payload:
        contents = None if place is None else place.contents
        views = (
            view if contents is None else contents.read_slice(view, ..., False)
            for view in _pieces(tensor)
        )
        source, begin = self.spool(views)
        return Payload(tensor.nbytes, source, begin)

    def spool(self, pieces: Iterable[Tensor]) -> tuple[int, int]:
        """Write tensors' elements to the temporary file; return its number and their offset."""
        if self._spool is None:
            self._spool = TemporaryFile(self._folder, self._stack)
            self._spool_number = self.add_file(self._spool.descriptor, "temporary file")
        self._opened = None  # it has the file's old size
        begin = self._spool.begin_aligned(_SPOOL_ALIGNMENT)
        for values in pieces:
            flat = _bytes_in(values.resolve_conj().resolve_neg().contiguous())
            self._spool.write_all(memory_of(flat))
        return self._spool_number, begin

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Keep something open as long as the sources."""
        return self._stack.enter_context(context)


class TemporaryFile:
    """A file without a name, which is gone when it is closed, or with the process.

    If `folder` takes no files, it is in ``$TMPDIR``.  `stack` closes it.
    """

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self._folder = folder
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            self._folder = tempfile.gettempdir()
        try:
            file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SaveError.from_os_error(error, self._folder) from None
        self._file = stack.enter_context(file)
        self.descriptor = int(self._file.fileno())

    def as_source(self, name: str) -> LocalFile:
        """Return the bytes of the file under another name."""
        self._file.seek(0)
        return LocalFile(self._file, name)

    @contextmanager
    def buffered(self) -> Iterator[IO[bytes]]:
        """Write through a stream of the standard library; errors are a SaveError."""
        stream = BufferedWriter(self._file)
        try:
            yield stream
            stream.flush()
        except OSError as error:
            raise SaveError.from_os_error(error, self._folder) from None
        finally:
            stream.detach()

    def begin_aligned(self, alignment: int) -> int:
        """Seek to the next multiple of `alignment`, and return that offset."""
        return int(self._file.seek(-(-self._file.tell() // alignment) * alignment))

    def write_all(self, data: bytes | memoryview) -> None:
        """Write bytes at the end; a SaveError names the folder."""
        rest = memoryview(data)
        try:
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise SaveError.from_os_error(error, self._folder) from None


def is_in_order(tensor: Tensor) -> bool:
    """Whether the bytes of a strided tensor are its elements, one after the other."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def check_records(places: Iterable[StoragePlace]) -> None:
    """Compare the records at these places with their checksums."""
    found: dict[UnreadContents, set[int]] = {}
    for place in places:
        if place.crc is not None and place.contents is not None:
            found.setdefault(place.contents, set()).add(place.record)
    for contents, records in found.items():
        contents.check(sorted(records))


def _bytes_in(values: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    offset = int(values.storage_offset()) * values.itemsize
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(values.untyped_storage(), offset, (values.nbytes,), (1,))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield parts that, one after the other, are the whole tensor."""
    if tensor.nbytes <= _PIECE_NBYTES:
        yield tensor
        return
    dim = next(dim for dim, n in enumerate(tensor.shape) if n > 1)
    n_rows = tensor.shape[dim]
    step = max(_PIECE_NBYTES * n_rows // tensor.nbytes, 1)
    for begin in range(0, n_rows, step):
        yield from _pieces(tensor.narrow(dim, begin, min(step, n_rows - begin)))


def _place_in(contents: UnreadContents, source: int, number: int) -> StoragePlace:
    engine = contents.reader.engine
    record = engine.record(number)
    verify = contents.reader.verify and engine.storages_have_crcs
    return StoragePlace(
        source,
        contents.begin + engine.payload_offset(number),
        record.nbytes,
        record.crc if verify else None,
        contents,
        number,
    )
