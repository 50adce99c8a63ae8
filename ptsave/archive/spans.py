"""Reads parts of records into memory: spans of bytes, or the values of tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import resources, to_device
from ptsave.archive.reader import RecordReader
from ptsave.errors import CorruptCheckpointError
from ptsave.support import config
from ptsave.support.calls import ProgressCallback
from ptsave.support.torch_names import negated_view
from ptsave.tree.extents import blocks_of

if TYPE_CHECKING:
    from ptsave.archive.damage import Damage
    from ptsave.sources.ranges import LocalFile

Range: TypeAlias = tuple[int, int, Tensor]  # number of the file, offset in it, target
Allocator: TypeAlias = Callable[[int], torch.UntypedStorage]  # makes a CPU storage of n bytes

MIB = 1 << 20
# Largest gap between wanted bytes, in bytes, that is fetched rather than skipped.
MAX_FETCHED_GAP = 1 * MIB
# Largest gap that is read in a local file.
MAX_READ_GAP = 16 << 10
# Limits of a batch, and of a request; some file systems send a batch's requests at the same time.
BATCH_NBYTES = 64 * MIB
_REQUEST_NBYTES = 8 * MIB
_MAX_SPARSE_NBYTES = 64 << 20  # read at once, even if most bytes are not needed
_MIN_SENT_NBYTES = 256 << 10  # of a block that is sent to an accelerator alone
_PACK_NBYTES = 16 << 20  # of blocks that are sent together
MIN_NBYTES = 1 << 20  # for less, malloc reuses memory whose pages exist
_MIN_THREADED_NBYTES = 4 << 20  # of a checksum; for less, a thread takes longer to start
_CPU = torch.device("cpu")
_MAX_LENT = 256  # storages; with more, the pool forgets the oldest


class Span(NamedTuple):
    """A part of a record's payload, from byte `begin` on, to be read into a uint8 `target`."""

    record: int
    begin: int
    target: Tensor


class SpanReader(Protocol):
    """Reads bytes into the targets of spans; safe for concurrent use.

    `max_gap` is the largest gap between wanted bytes that is read rather than skipped.
    `reach_devices` says whether targets may be on accelerators.
    """

    max_gap: int
    reach_devices: bool

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        """Fill the targets; a span that covers all of its record must be the record's only span.

        If `verify` is None, spans that cover their records are compared with checksums, but others
        are not.  If True, each record is read completely and compared; if False, none is compared.
        """
        ...

    def check(self, records: Sequence[int]) -> None:
        """Compare records with their checksums; raise an error for the first damaged record."""
        ...


class ArchiveSpans(SpanReader, Protocol):
    """A `SpanReader` for an archive, whose records may have checksums."""

    def find_damage(self, records: Sequence[int], *, verify: bool) -> list[Damage]:
        """Read records and return their damage; with `verify`, also compare their checksums."""
        ...


class EngineSpans:
    """`ArchiveSpans` for archives that the engine reads itself, in files or in memory."""

    max_gap = MAX_READ_GAP
    reach_devices = True

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._engine = reader.engine
        self._can_verify = self._engine.storages_have_crcs
        self._resources = resources(reader.limits)

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        whole, parts = divided(self._engine, spans)
        verify = verify if self._can_verify else False
        with self._reader.opened():
            if verify and parts:
                self.check([span.record for span in parts])
            if whole:
                targets = [span.target for span in whole]
                self._transfer([s.record for s in whole], targets, verify=verify is not False)
            if parts:
                self._read_parts(parts)

    def _read_parts(self, parts: Sequence[Span]) -> None:
        records = {span.record for span in parts}
        offsets = {record: self._engine.payload_offset(record) for record in records}
        self._engine.read_ranges(
            [(offsets[span.record] + span.begin, span.target) for span in parts],
            **self._resources,
        )

    def check(self, records: Sequence[int]) -> None:
        with self._reader.opened():
            self._transfer(sorted(set(records)), [], verify=True)

    def find_damage(self, records: Sequence[int], *, verify: bool) -> list[Damage]:
        from ptsave.archive.damage import Damage, damage_at

        try:
            with self._reader.opened():
                damaged = self._engine.read_records(
                    list(records), [], verify=verify, **self._resources
                )
        except (CorruptCheckpointError, OSError) as error:
            if len(records) > 1:  # the engine stops at the first error
                return [d for number in records for d in self.find_damage([number], verify=verify)]
            return [damage_at(self._reader, records[0], error)]
        return [
            Damage(
                found.name,
                found.payload_offset,
                f"its CRC-32 is {found.actual_crc:08x}, not {found.expected_crc:08x}",
                CorruptCheckpointError(f"{self._reader.path}: record {found.name} is damaged"),
                found,
            )
            for found in damaged
        ]

    def _transfer(self, records: list[int], targets: list[Tensor], *, verify: bool) -> None:
        damaged = self._engine.read_records(records, targets, verify=verify, **self._resources)
        if damaged:
            from ptsave.archive.damage import damage_of

            raise damage_of(self._reader, damaged)


def range_files(files: Sequence[LocalFile], *, direct: bool = True) -> _C.RangeFiles:
    """Open local files for `read_ranges`, and keep them open; `direct` bypasses the page cache."""
    limits = config.current()
    with ExitStack() as stack:
        opened = [stack.enter_context(file.opened()).for_engine for file in files]
        direct = direct and limits.direct_reads
        return _C.RangeFiles(opened, n_threads=limits.n_readers, direct=direct)


def read_ranges(
    files: _C.RangeFiles,
    ranges: Sequence[Range],
    progress: ProgressCallback | None = None,
    *,
    crcs: Sequence[int | None] = (),
    **options: int,
) -> list[tuple[int, int]]:
    """Fill tensors from ranges of files, with several threads.

    `crcs` is empty, or has the checksum of each range or None.  Returns (file, offset) of the
    ranges that do not match.
    """
    limits = resources(config.current())
    return files.read(ranges, crcs=crcs, progress=progress, **limits, **options)


def divided(engine: _C.Reader, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return two lists: the spans that cover a complete record, and the other spans."""
    whole: list[Span] = []
    parts: list[Span] = []
    for span in spans:
        is_whole = span.begin == 0 and len(span.target) == engine.record(span.record).nbytes
        (whole if is_whole else parts).append(span)
    return whole, parts


def batches(
    spans: Sequence[Span], max_nbytes: int = BATCH_NBYTES, max_span_nbytes: int = _REQUEST_NBYTES
) -> Iterator[list[Span]]:
    """Yield lists of spans, up to `max_nbytes` each; divide spans over `max_span_nbytes`."""
    batch: list[Span] = []
    nbytes = 0
    for span in spans:
        for begin in range(0, len(span.target), max_span_nbytes):
            target = span.target[begin : begin + max_span_nbytes]
            if nbytes + len(target) > max_nbytes:
                yield batch
                batch, nbytes = [], 0
            batch.append(Span(span.record, span.begin + begin, target))
            nbytes += len(target)
    if batch:
        yield batch


def memory_of(target: Tensor) -> memoryview:
    """Return a memoryview of a uint8 tensor, without NumPy; the tensor must outlive the view."""
    array = (ctypes.c_ubyte * len(target)).from_address(target.data_ptr())
    return memoryview(array).cast("B")


def new_storage(nbytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """Return memory on `device`, whatever torch's default device is."""
    return torch.UntypedStorage(nbytes, device=device)


def read_view(
    spans: SpanReader,
    record: int | None,
    view: Tensor,
    verify: bool | None,
    device: torch.device = _CPU,
    *,
    allocate: Allocator = new_storage,
) -> Tensor:
    """Read the values of `view` into new memory, and skip large gaps between the values.

    `record` is None for a storage without bytes.  `verify` is as in `SpanReader.read`.  Large parts
    are sent to an accelerator one by one, and small parts in packs; host memory holds one pack at a
    time.  `allocate` makes the memory for a result on the CPU.
    """
    blocks = blocks_of(view, spans.max_gap)
    nbytes = blocks.nbytes * len(blocks.begins)
    if device != _CPU:
        device = torch.empty(0, device=device).device  # with the device's number
        if nbytes < _C.MIN_PINNED_NBYTES or not _C.can_stage(device):
            return to_device(read_view(spans, record, view, verify), device)
    if record is not None and nbytes > max(_MAX_SPARSE_NBYTES, 2 * view.nbytes):
        if verify:
            spans.check([record])
        return _read_halves(spans, record, view, device)
    storage = allocate(nbytes) if device == _CPU else new_storage(nbytes, device)
    if record is not None:
        memory = bytes_of(storage)
        parts = [
            Span(record, begin, memory[i * blocks.nbytes : (i + 1) * blocks.nbytes])
            for i, begin in enumerate(blocks.begins)
        ]
        if device == _CPU or (spans.reach_devices and blocks.nbytes >= _MIN_SENT_NBYTES):
            spans.read(parts, verify=verify)
        else:
            _read_packs(spans, parts, verify)
    result = view_as(storage, view, 0, blocks.stride)
    return result.contiguous() if result.nbytes < storage.nbytes() else result


def _read_packs(spans: SpanReader, parts: Sequence[Span], verify: bool | None) -> None:
    """Fill adjacent targets in an accelerator's memory; send small parts together, in packs."""
    if verify:
        spans.check([parts[0].record])
    if verify is None and len(parts) == 1:  # it may be a whole record, which is compared then
        _read_pack(spans, parts, None)
        return
    for pack in batches(parts, _PACK_NBYTES, _PACK_NBYTES):
        _read_pack(spans, pack, False)


def _read_pack(spans: SpanReader, pack: Sequence[Span], verify: bool | None) -> None:
    here = bytes_of(new_storage(sum(len(part.target) for part in pack)))
    pieces = here.split([len(part.target) for part in pack])
    spans.read(
        [Span(part.record, part.begin, piece) for part, piece in zip(pack, pieces, strict=True)],
        verify=verify,
    )
    there = bytes_of(pack[0].target.untyped_storage())
    begin = pack[0].target.storage_offset()
    _C.copy_to_devices([(here, there[begin : begin + len(here)])], **resources(config.current()))


def _read_halves(spans: SpanReader, record: int, view: Tensor, device: torch.device) -> Tensor:
    """Read a view in two halves; the bytes between its values would take too much memory."""
    result = torch.empty(view.shape, dtype=view.dtype, device=device)
    dims = [dim for dim in range(view.dim()) if view.shape[dim] > 1]
    dim = max(dims, key=view.stride)
    half = view.shape[dim] // 2
    for begin, n in ((0, half), (half, view.shape[dim] - half)):
        part = read_view(spans, record, view.narrow(dim, begin, n), False, device)
        result.narrow(dim, begin, n).copy_(part)
    return result


def crc_of(memory: Tensor) -> int:
    """Return the CRC-32 of a contiguous CPU tensor's bytes."""
    is_large = memory.nbytes >= _MIN_THREADED_NBYTES
    return _C.crc32_of(memory, n_threads=config.current().n_threads if is_large else 0)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a uint8 tensor over all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_as(
    storage: torch.UntypedStorage, like: Tensor, offset: int, stride: tuple[int, ...]
) -> Tensor:
    """Return a tensor over `storage` with the dtype, shape, conj bit and neg bit of `like`."""
    tensor = torch.empty(0, dtype=like.dtype, device=storage.device)
    tensor.set_(storage, offset, like.shape, stride)
    if like.is_conj():
        tensor = tensor.conj()
    return negated_view(tensor) if like.is_neg() else tensor


def unfilled_tensors(kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Return tensors of these dtypes and shapes; they have addresses, but no memory yet."""
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in kinds]
    storages = _C.untyped_storages(_C.unfilled_storages(sizes))
    tensors = []
    for (dtype, shape), storage in zip(kinds, storages, strict=True):
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensors.append(tensor.set_(storage, 0, tuple(shape), _contiguous_stride(shape)))
    return tensors


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.append(stride[-1] * max(n, 1))
    return tuple(reversed(stride[: len(shape)]))


class RecycledMemory:
    """Lends memory for tensors, and lends the same memory again after its tensors are gone.

    New memory pages cost more time than the copy into them, and a model has many tensors of one
    size.  Memory is lent again only for the same number of bytes, so no tensor wastes memory.  The
    pool lends without a limit, but keeps idle memory only while lent and idle memory together fit
    into `max_nbytes`.  Safe for concurrent use.

    >>> memory = RecycledMemory(1 << 24)
    >>> tensor = memory.tensor(torch.Size([1024, 512]), torch.float32)
    >>> place = tensor.data_ptr()
    >>> del tensor
    >>> memory.tensor(torch.Size([1 << 19]), torch.int32).data_ptr() == place
    True
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._storages: list[torch.UntypedStorage] = []
        self._lock = Lock()

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in CPU memory, with arbitrary values."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < MIN_NBYTES:
            return torch.empty(shape, dtype=dtype, device=_CPU)
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        contiguous = torch.empty(shape, dtype=dtype, device="meta").stride()
        return tensor.set_(self.storage(nbytes), 0, shape, contiguous)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return CPU memory with arbitrary contents."""
        if nbytes < MIN_NBYTES:
            return new_storage(nbytes)
        with self._lock:
            return self._recycled(nbytes)

    def _recycled(self, nbytes: int) -> torch.UntypedStorage:
        lent, idle = self._sorted_by_use()
        found = next((storage for storage in idle if storage.nbytes() == nbytes), None)
        if found is None:
            found = _C.huge_page_storage(nbytes)
        else:
            idle = [storage for storage in idle if storage is not found]
        room_nbytes = self._max_nbytes - nbytes - sum(storage.nbytes() for storage in lent)
        self._storages = [*lent[-_MAX_LENT:], found]
        for storage in idle:
            room_nbytes -= storage.nbytes()
            if room_nbytes >= 0:
                self._storages.append(storage)
        return found

    def _sorted_by_use(self) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        lent: list[torch.UntypedStorage] = []
        idle: list[torch.UntypedStorage] = []
        for number in range(len(self._storages)):
            (idle if is_idle(self._storages, number) else lent).append(self._storages[number])
        return lent, idle


def is_idle(storages: list[torch.UntypedStorage], number: int) -> bool:
    """Whether nothing but the list `storages` refers to ``storages[number]``."""
    # Python's two references are the list's and getrefcount's argument.  In C++, each tensor and
    # the Python object itself count as one use.
    return sys.getrefcount(storages[number]) <= 2 and _C.storage_use_count(storages[number]) == 1
