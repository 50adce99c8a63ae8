"""Writes files of placeholder tensors, whose payloads (bytes) are in other files or in memory.

A placeholder is a tensor without values: its storage is only an address, which is never read.  The
pickler does not read storages, so it writes the same pickle as torch does for real tensors.  The
code that splits real tensors into shards can also split placeholders.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter
from math import prod
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.damage import RecordDamage, damage_of, member_pieces
from ptsave.archive.opening import open_source_archive
from ptsave.archive.spans import bytes_of, memory_of, unfilled_tensors
from ptsave.contents.contents import Contents, LoadedContents, UnreadContents
from ptsave.contents.safetensors import (
    SafetensorsContents,
    header_of,
    safetensors_dtypes,
    stored_shape,
)
from ptsave.contents.safetensors_fields import let_library_read
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.sources.kinds import regular_only
from ptsave.sources.ranges import LocalFile, RangeSource, expect_no_more_reads
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection
from ptsave.support.torch_names import storage_id
from ptsave.tree.extents import span_of
from ptsave.tree.leaves import tensors_over
from ptsave.writing.planning import pickle_object, plan_archive
from ptsave.writing.targets import FileTarget, FileWriter, name_of, scratch_folder

if TYPE_CHECKING:
    from ptsave.contents.dcp import DcpContents
    from ptsave.dcp.checkpoint import Chunk, DcpTensor
    from ptsave.dcp.rank_files import RankFiles
    from ptsave.dcp.read_plan import StoredTensor

# The most bytes of a tensor in memory at once, if it is rearranged or joined from ranks' parts.
_PIECE_NBYTES = 32 << 20
# If ranks wrote more files, tensors are copied first; otherwise all files would stay open.
_MAX_FILES = 128
# The most chunks whose checksums are found together.
_N_CHUNKS = 4096
_SPOOL_ALIGNMENT = 64
_ZIP64_HEADER_NBYTES = 30 + 20 + 4  # of a local header and the start of its padding
# The most bytes of a remote file in memory, and in one request.
_BATCH_NBYTES = 32 << 20
_REQUEST_NBYTES = 8 << 20


class StoragePlace(NamedTuple):
    """The range of a source (a file or memory) with the bytes of a storage or of one tensor."""

    source: int  # number of the source, which is a file or memory
    offset: int  # of the first byte in the source
    nbytes: int
    crc: int | None = None  # of the bytes, if known
    contents: UnreadContents | None = None  # the archive that has the bytes as a record
    record: int = 0  # number of that record
    # For bytes in several ranges: the begin in the storage, the source and the offset of each.
    parts: tuple[tuple[int, int, int], ...] = ()
    path: str = ""  # directory of a checkpoint of many ranks
    entry: str = ""  # the tensor in that checkpoint


class PayloadSources:
    """The sources (files and memory) with the bytes of all tensors of one conversion.

    `stack` closes the sources.  `folder` is the directory for an unnamed temporary file.
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
        """Return these sources as an object of the C++ engine."""
        if self._opened is None:
            self._opened = _C.PayloadSources(self._items, direct=self.limits.direct_reads)
        return self._opened

    def add_file(self, fd: int, name: str) -> int:
        """Add a file and return its number; the caller keeps and closes the descriptor."""
        return self._add((fd, os.fsencode(name)))

    def _add(self, item: tuple[int, bytes] | tuple[int, int, bytes]) -> int:
        self._opened = None
        self._items.append(item)
        return len(self._items) - 1

    def localize(self, source: RangeSource) -> LocalFile:
        """Return a local file with the bytes of a source; a compressed archive is inflated."""
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
        with suppress(CorruptCheckpointError):  # opening the file later reports the damage
            reader = open_source_archive(source, verify=True)
        if reader is None or reader.engine.all_stored:
            return source
        from zipfile import ZipFile, ZipInfo

        file = TemporaryFile(self._folder, self._stack)
        with file.buffered() as stream, ZipFile(stream, "w") as archive:
            for index, record in enumerate(reader.engine.records()):
                info = ZipInfo(f"archive/{record.name}")
                end = stream.tell() + _ZIP64_HEADER_NBYTES + len(info.filename.encode())
                padding = bytes(-end % _SPOOL_ALIGNMENT)  # as in torch's files
                info.extra = b"FB" + len(padding).to_bytes(2, "little") + padding
                with archive.open(info, "w", force_zip64=True) as member:
                    deque(map(member.write, member_pieces(reader, index)), 0)
        source = file.as_source(source.name)
        self._stack.callback(source.close)
        return source

    def add(self, contents: Contents) -> None:
        """Add the tensors of an opened file, which `localize` has returned."""
        if isinstance(contents, UnreadContents):
            self._add_unread(contents)
        elif isinstance(contents, LoadedContents):  # its storages are in memory
            away = {key: where for key, where in contents.locations.items() if where != "cpu"}
            self.locations.update(away)
        elif contents.kind == "dcp":
            payloads = RankPayloads(cast("DcpContents", contents), self)
            self.locations.update(payloads.locations)
            self._ranks.append(payloads)
        elif isinstance(contents, SafetensorsContents):
            assert isinstance(contents.source, LocalFile)
            expect_no_more_reads(contents.source.descriptor)
            source = self.add_file(contents.source.descriptor, contents.path)
            for stored in contents.header.tensors:
                begin = contents.source.begin + stored.offset
                place = StoragePlace(
                    source,
                    begin,
                    stored.nbytes,
                    stored.crc,
                    path=contents.path,
                    entry=stored.name,
                )
                self.put(contents.obj[stored.name].untyped_storage(), place)

    def _add_unread(self, contents: UnreadContents) -> None:
        source = self.add_file(contents.reader.engine.descriptor, contents.path)
        self._unread.append((source, contents))
        tensors = tensors_over(contents.obj)
        for tensor, (_, _, _, location) in zip(tensors, contents.places_of(tensors), strict=True):
            if location not in (None, "cpu"):
                self.locations[storage_id(tensor.untyped_storage())] = location

    def put(self, storage: torch.UntypedStorage, place: StoragePlace) -> None:
        """Note where the bytes of a placeholder's storage are."""
        if storage.nbytes():
            self._known[storage.data_ptr()] = place
            self._kept.append(storage)

    def places_of(self, storages: Sequence[torch.UntypedStorage]) -> list[StoragePlace | None]:
        """Return the places of storages; None for storages in memory and for empty storages."""
        return self._places_of(storages, [bytes_of(storage) for storage in storages])

    def _places_of(
        self, storages: Sequence[torch.UntypedStorage], tensors: list[Tensor]
    ) -> list[StoragePlace | None]:
        """Return the places of storages; `tensors[i]` is a tensor in `storages[i]`."""
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

    def payloads_of(self, tensors: Sequence[Tensor]) -> list[StoragePlace]:
        """Return where the tensors' bytes are; copy non-contiguous tensors to a temporary file."""
        places = self._places_of([tensor.untyped_storage() for tensor in tensors], [*tensors])
        payloads = [
            self._payload_of(tensor.detach(), place)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        whole = set(payloads)
        check_records([place for place in places if place is not None and place not in whole])
        return payloads

    def payloads_in_memory(self, tensors: Sequence[Tensor]) -> list[StoragePlace] | None:
        """Do what `payloads_of` does, but faster; None if a tensor is not contiguous in memory."""
        if self._known or self._unread or self._ranks or not all(map(is_in_order, tensors)):
            return None
        payloads = []
        for tensor in tensors:
            nbytes = tensor.nbytes
            number = self._add((tensor.data_ptr(), nbytes, b"memory")) if nbytes else 0
            payloads.append(StoragePlace(number, 0, nbytes))
        self._kept += tensors
        return payloads

    def contiguous(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous placeholders; tensors of the same place, dtype and shape share one."""
        payloads = self.payloads_of(list(tensors.values()))
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors.values()]
        made: dict[Any, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, tensor, payload, empty in zip(
            tensors, tensors.values(), payloads, unfilled_tensors(kinds), strict=True
        ):
            key = (payload, *kinds[len(result)]) if payload.nbytes else name
            result[name] = stand_in = made.setdefault(key, empty)
            self.put(stand_in.untyped_storage(), payload)
            self.copy_location(tensor, stand_in)
        return result

    def scratch_for(self, status: os.stat_result) -> int | None:
        """Return a new temporary file's descriptor if a source has this `status`, else None."""
        files = (item[0] for item in self._items if len(item) == 2)
        if not any(os.path.samestat(os.fstat(fd), status) for fd in files):
            return None
        return TemporaryFile(self._folder, self._stack).descriptor

    def copy_location(self, tensor: Tensor, stand_in: Tensor) -> None:
        """Record that the placeholder `stand_in` was saved from the same device as the tensor."""
        location = self.locations.get(storage_id(tensor.untyped_storage()))
        if location is not None:
            self.locations[storage_id(stand_in.untyped_storage())] = location

    def _payload_of(self, tensor: Tensor, place: StoragePlace | None) -> StoragePlace:
        if tensor.numel() == 0:
            return StoragePlace(0, 0, 0)
        if not is_in_order(tensor):
            return self._spooled(tensor, place)
        if place is None:
            place = self.memory(tensor.untyped_storage())
        if tensor.nbytes == place.nbytes:
            return place
        assert not place.parts  # tensors of distributed checkpoints fill their storages
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return StoragePlace(place.source, place.offset + offset, tensor.nbytes)

    def memory(self, storage: torch.UntypedStorage) -> StoragePlace:
        """Add a storage that is in memory, and return its place."""
        number = self._add((storage.data_ptr(), storage.nbytes(), b"memory"))
        place = StoragePlace(number, 0, storage.nbytes())
        self.put(storage, place)
        return place

    def _spooled(self, tensor: Tensor, place: StoragePlace | None) -> StoragePlace:
        contents = None if place is None else place.contents
        views = (
            view if contents is None else contents.read_slice(view, ..., False)
            for view in (tensor[index] for index in _pieces(tensor.shape, tensor.itemsize))
        )
        source, begin = self.spool(views)
        return StoragePlace(source, begin, tensor.nbytes)

    def spool(self, pieces: Iterable[Tensor]) -> tuple[int, int]:
        """Write elements to the temporary file; return its source number and the first offset."""
        if self._spool is None:
            self._spool = TemporaryFile(self._folder, self._stack)
            self._spool_number = self.add_file(self._spool.descriptor, "temporary file")
        self._opened = None  # the engine's object has the old size of the file
        begin = self._spool.begin_aligned(_SPOOL_ALIGNMENT)
        for values in pieces:
            plain = values.resolve_conj().resolve_neg().contiguous()
            offset = int(plain.storage_offset()) * plain.itemsize
            flat = torch.empty(0, dtype=torch.uint8)
            flat.set_(plain.untyped_storage(), offset, (plain.nbytes,), (1,))
            self._spool.write_all(memory_of(flat))
        return self._spool_number, begin


class SourceCheckpoint:
    """An open checkpoint with unread tensors, in files that `localize` has returned."""

    def __init__(self, contents: Contents, sources: PayloadSources) -> None:
        self.contents = contents
        self.path = contents.path
        self.obj = contents.obj
        self.nbytes = contents.nbytes
        parts = contents.parts
        self.paths = [part.path for part in parts]
        self.is_safetensors = True
        self.has_checksums = False  # of safetensors files
        self.metadata: dict[str, str] = {}
        self.remarks: list[str] = []
        for part in parts:
            sources.add(part)
            if isinstance(part, SafetensorsContents):
                self.metadata.update(part.header.metadata)
                self.has_checksums |= part.header.has_checksums
                continue
            self.is_safetensors = False
            if part.kind == "dcp":
                checkpoint = cast("DcpContents", part).checkpoint
                self.paths.append(checkpoint.metadata_path)
                self.paths += [checkpoint.file(name) for name in checkpoint.sizes]
            if isinstance(part, UnreadContents) and not part.reader.engine.storages_have_crcs:
                self.remarks.append(
                    f"{part.path} has no checksums of its storages: they are copied unverified"
                )


class TemporaryFile:
    """An unnamed file in `folder`, or in ``$TMPDIR`` if `folder` is not writable."""

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
        """Return the file as a source; messages call it `name`."""
        self._file.seek(0)
        return LocalFile(self._file, name)

    @contextmanager
    def buffered(self) -> Iterator[IO[bytes]]:
        """Yield a buffered stream that writes to the file; an OSError becomes a SaveError."""
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
        """Write bytes at the end of the file; if that fails, the SaveError names the folder."""
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


def _pieces(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices that cut a tensor into parts of at most `_PIECE_NBYTES`, in order.

    >>> list(_pieces((3, 1 << 25), 1)) == [(slice(i, i + 1),) for i in range(3)]
    True
    """
    nbytes = itemsize * prod(shape)
    if nbytes <= _PIECE_NBYTES or not shape:
        yield ()
        return
    row = nbytes // shape[0]
    step = max(_PIECE_NBYTES // row, 1)
    for begin in range(0, shape[0], step):
        part = slice(begin, begin + step)
        if row <= _PIECE_NBYTES:
            yield (part,)
        else:
            yield from ((part, *rest) for rest in _pieces(shape[1:], itemsize))


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


# ------------------------------------------------------------------- files of several ranks


class _InPlace(NamedTuple):
    """A tensor to read directly from ranks' files; `chunks` are in the order of its bytes."""

    tensor: Tensor
    stored: DcpTensor
    chunks: list[StoredTensor]


class RankPayloads:
    """The tensors of one distributed checkpoint, as sources of a conversion.

    If each chunk is one range of the tensor's bytes (each rank has rows, or one rank has all), its
    bytes go from the ranks' files to the new file.  Any other tensor, such as
    a tensor split by columns, is first copied to a temporary file, piece by piece, and verified.
    """

    def __init__(self, contents: DcpContents, sources: PayloadSources) -> None:
        self._contents = contents
        self._checkpoint = contents.checkpoint
        self._sources = sources
        self._verify = sources.limits.verify
        self._numbers: dict[str, int] = {}
        self.locations = contents.locations
        self._tensors = {
            tensor.untyped_storage().data_ptr(): tensor
            for tensor in tensors_over(contents.obj)
            if contents.stored_tensor(tensor) is not None and tensor.nbytes
        }

    def place(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Tell the sources where the bytes of this checkpoint's storages are."""
        pointers = dict.fromkeys(storage.data_ptr() for storage in storages)
        tensors = [self._tensors[each] for each in pointers if each in self._tensors]
        if self._checkpoint.is_remote or len(self._checkpoint.sizes) > _MAX_FILES:
            for tensor in tensors:
                self._spool(tensor)
            return
        batch: list[_InPlace] = []
        n_chunks = 0
        with self._checkpoint.rank_files(verify=self._verify) as files:
            for tensor in tensors:
                found = self._in_place(files, tensor)
                if found is None:
                    self._spool(tensor)
                    continue
                batch.append(found)
                n_chunks += len(found.chunks)
                if n_chunks >= _N_CHUNKS:
                    self._put(files, batch)
                    batch, n_chunks = [], 0
            self._put(files, batch)

    # ------------------------------------------------------------------------ in their files

    def _in_place(self, files: RankFiles, tensor: Tensor) -> _InPlace | None:
        """Return a tensor's chunks in the order of its bytes; None if it must be copied first."""
        stored = self._contents.stored_tensor(tensor)
        assert stored is not None
        self._checkpoint.require_tensor(stored)
        if not all(_is_range(chunk, stored) for chunk in stored.chunks):
            return None
        chunks = sorted(stored.chunks, key=lambda chunk: chunk.offsets)
        found: list[StoredTensor] = []
        for chunk in chunks:
            each = self._checkpoint.stored(files, stored, chunk)
            if each is None or each.dtype != stored.dtype or not each.is_packed:
                return None
            found.append(each)
        return _InPlace(tensor, stored, found)

    def _put(self, files: RankFiles, batch: list[_InPlace]) -> None:
        crcs = iter(self._crcs(files, [chunk for each in batch for chunk in each.chunks]))
        for each in batch:
            self._put_one(each, crcs)

    def _put_one(self, found: _InPlace, crcs: Iterator[int | None]) -> None:
        parts: list[tuple[int, int, int]] = []
        begin = 0
        whole: int | None = 0
        for chunk in found.chunks:
            crc = next(crcs)
            parts.append((begin, self._number(chunk.file), chunk.offset))
            if whole is not None:
                whole = None if crc is None else _C.crc32_combine(whole, crc, chunk.nbytes)
            begin += chunk.nbytes
        _, source, offset = parts[0]
        place = StoragePlace(
            source,
            offset,
            begin,
            whole,
            parts=tuple(parts) if len(parts) > 1 else (),
            path=self._checkpoint.path,
            entry=found.stored.name,
        )
        self._sources.put(found.tensor.untyped_storage(), place)

    def _crcs(self, files: RankFiles, chunks: list[StoredTensor]) -> list[int | None]:
        """Return the checksums of chunks; None for a checksum that is unknown or not wanted."""
        if not self._verify:
            return [None] * len(chunks)
        crcs: list[int | None] = [chunk.crc for chunk in chunks]
        checked = [i for i, chunk in enumerate(chunks) if chunk.file in self._checkpoint.checked]
        found = files.crcs_of([chunks[i] for i in checked])
        for i, crc in zip(checked, found, strict=True):
            crcs[i] = crc
        return crcs

    def _number(self, file: str) -> int:
        """Return the number of a file among the sources; open the file if it is new."""
        if file not in self._numbers:
            path = self._checkpoint.file(file)
            descriptor = regular_only(path, os.O_RDONLY | os.O_CLOEXEC)
            self._sources._stack.callback(os.close, descriptor)
            self._numbers[file] = self._sources.add_file(descriptor, path)
        return self._numbers[file]

    # --------------------------------------------------------------- through a temporary file

    def _spool(self, tensor: Tensor) -> None:
        pieces = (
            self._contents.read_slice(tensor, index, self._verify)
            for index in _pieces(tensor.shape, tensor.itemsize)
        )
        source, begin = self._sources.spool(pieces)
        place = StoragePlace(source, begin, tensor.nbytes)
        self._sources.put(tensor.untyped_storage(), place)


def _is_range(chunk: Chunk, stored: DcpTensor) -> bool:
    """Whether a chunk is one range of the tensor's elements, in their order."""
    is_cut = False
    for n, size in zip(reversed(chunk.sizes), reversed(stored.shape), strict=True):
        if is_cut and n != 1:
            return False
        is_cut = is_cut or n != size
    return True


class StreamedPlan:
    """The plan of a file, and the expected checksums of the tensors' bytes."""

    nbytes: int  # the size of the file
    engine_plan: _C.WritePlan | _C.PackedPlan  # the layout of the file, and its payloads' places
    _places: Mapping[Any, StoragePlace]  # the places of the payloads, by their keys
    _has_crcs = True  # whether the file, or one of its payloads, has checksums

    def __init__(self, target: FileTarget, sources: PayloadSources) -> None:
        self.path = name_of(target)
        self._target = target
        self._sources = sources

    def write(self, *, fsync: bool, progress: ProgressCallback | None) -> None:
        """Write the file; if a record does not match its checksum, raise and write no file."""
        writer = FileWriter(
            self.engine_plan,
            compute_crcs=self._has_crcs,
            fsync=fsync,
            atomic=True,
            progress=progress,
            scratch_for=self._sources.scratch_for,
            limits=self._sources.limits,
        )
        try:
            writer.write_file(self._target)
        except CorruptCheckpointError:
            self._require_undamaged()
            raise

    def _require_undamaged(self) -> None:
        """Raise an error that names the damaged entries if the last write has found damage."""
        damaged: dict[UnreadContents, list[RecordDamage]] = {}
        for key, crc in self.engine_plan.damaged:
            place = self._places[key]
            if place.contents is None:
                raise CorruptCheckpointError(
                    f"{place.path}: {place.entry} does not match its checksum; copy the checkpoint "
                    "again, or find the damage with `ptsave verify`",
                    path=place.path,
                    entries=[place.entry],
                )
            record = place.contents.reader.engine.record(place.record)
            each = RecordDamage(record.name, place.offset, record.crc, crc)
            damaged.setdefault(place.contents, []).append(each)
        for contents, records in damaged.items():
            raise damage_of(contents.reader, records)


class PicklePlan(StreamedPlan):
    """The plan of a file in torch.save's format for an object whose tensors are placeholders."""

    def __init__(self, obj: Any, target: FileTarget, sources: PayloadSources) -> None:
        super().__init__(target, sources)
        data, storages = pickle_object(obj, pickle, 2, sources.locations)
        plan = plan_archive(target, data, storages, False)
        self._storages = storages
        places = sources.places_of(_C.untyped_storages(storages))
        self._places = {f"data/{i}": place for i, place in enumerate(places) if place is not None}
        if self._places:
            plan.read_from(
                sources.open(),
                [(name, p.source, p.offset, p.crc, p.parts) for name, p in self._places.items()],
            )
        self.engine_plan = plan
        self.nbytes = plan.nbytes


class SafetensorsPlan(StreamedPlan):
    """The plan of a safetensors file for tensors, which may be placeholders."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        target: FileTarget,
        sources: PayloadSources,
        metadata: Mapping[str, str],
        *,
        checksums: bool = False,
    ) -> None:
        super().__init__(target, sources)
        if sys.byteorder != "little":
            raise NotImplementedError(
                "safetensors files are little-endian, but this machine is not"
            )
        _check_names(tensors)
        with pausing_garbage_collection():
            in_order, header, crcs_at = header_of(tensors, metadata, checksums=checksums)
        self._places, self._has_crcs = {}, checksums
        if any(tensor.device.type != "cpu" for tensor in in_order):
            self.engine_plan = _C.PackedPlan.of_tensors(header, in_order, crcs_at)
        else:
            payloads = sources.payloads_in_memory(in_order) or sources.payloads_of(in_order)
            self._places = dict(enumerate(payloads))
            self.engine_plan = _packed_plan(header, sources, payloads, crcs_at)
            self._has_crcs |= any(payload.crc is not None for payload in payloads)
        self.nbytes = self.engine_plan.nbytes
        from safetensors import SafetensorError

        try:
            let_library_read(header, self.nbytes, self.path)
        except SafetensorError as error:
            raise ValueError(f"safetensors cannot hold these tensors: {error}") from None
        except OSError as error:
            raise SaveError.from_os_error(error, self.path) from None


# ------------------------------------------------------------------------------ tensors with values


def write_safetensors(
    tensors: Mapping[str, Tensor],
    target: FileTarget,
    metadata: Mapping[str, str],
    *,
    fsync: bool = False,
    are_checked: bool = False,
    checksums: bool = False,
) -> None:
    """Write tensors that have values, with the same bytes as ``safetensors.torch.save_file``.

    Unlike that function, this one takes tensors that share memory or are not contiguous.  If the
    engine cannot read a tensor in place, a copy on the CPU exists during the call.  `are_checked`
    means that the tensors have passed `check_safetensors`.  With `checksums`, the metadata has
    them, too.
    """
    if not are_checked:
        check_safetensors(tensors)
    with pausing_garbage_collection(), ExitStack() as stack:
        sources = PayloadSources(stack, scratch_folder(target))
        plain = {name: _in_reach(tensor) for name, tensor in tensors.items()}
        plan = SafetensorsPlan(plain, target, sources, metadata, checksums=checksums)
        plan.write(fsync=fsync, progress=None)


def write_bytes(
    target: FileTarget, head: bytes, values: Tensor | None = None, *, fsync: bool = False
) -> None:
    """Replace a file atomically by `head` and the bytes of `values`, a contiguous CPU tensor."""
    with ExitStack() as stack:
        sources = PayloadSources(stack, scratch_folder(target))
        payloads = sources.payloads_of([] if values is None else [values])
        plan = _packed_plan(head, sources, payloads)
        writer = FileWriter(plan, compute_crcs=False, fsync=fsync, atomic=True, progress=None)
        writer.write_file(target)


def write_copy(file: LocalFile, target: FileTarget, *, fsync: bool) -> None:
    """Replace a file atomically by the bytes of another one."""
    with ExitStack() as stack:
        sources = PayloadSources(stack, scratch_folder(target))
        number = sources.add_file(file.descriptor, file.name)
        plan = _packed_plan(b"", sources, [StoragePlace(number, file.begin, file.nbytes)])
        writer = FileWriter(plan, compute_crcs=False, fsync=fsync, atomic=True, progress=None)
        writer.write_file(target)


def check_safetensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError for tensors that safetensors files cannot hold."""
    _check_names(tensors)
    dtypes = safetensors_dtypes()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"safetensors files hold only dense tensors, but {name!r} is {layout}: write a .pt "
                "file"
            )
        if tensor.dtype not in dtypes:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(
                f"safetensors files cannot hold {name!r}, whose dtype is {dtype}: write a .pt file"
            )
        stored_shape(tensor.dtype, tensor.shape)
        storage = tensor.untyped_storage()
        if tensor.numel() and (tensor.is_meta or span_of(tensor)[1] > storage.nbytes()):
            raise TypeError(f"{name!r} has no memory for its values, so it cannot be written")


def _in_reach(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous CPU copy if the engine cannot write the tensor itself."""
    if is_in_order(tensor) and (tensor.device.type == "cpu" or _C.can_stage(tensor.device)):
        return tensor.detach()
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _packed_plan(
    head: bytes,
    sources: PayloadSources,
    payloads: Iterable[StoragePlace],
    crcs_at: int | None = None,
) -> _C.PackedPlan:
    each = [
        (payload.nbytes, payload.source, payload.offset, payload.crc, payload.parts)
        for payload in payloads
    ]
    return _C.PackedPlan(head, sources.open(), each, crcs_at)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == "__metadata__":
            raise ValueError("a safetensors tensor cannot have the name '__metadata__': rename it")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"a safetensors tensor cannot have the name {name!r}, which is not valid Unicode: "
                "rename it"
            ) from None
