"""Safetensors files: reads headers, opens and loads files, and makes headers for new files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import accelerator_of, to_device
from ptsave.archive.spans import (
    BATCH_NBYTES,
    MAX_FETCHED_GAP,
    MAX_READ_GAP,
    Allocator,
    Span,
    batches,
    bytes_of,
    crc_of,
    memory_of,
    new_storage,
    range_files,
    read_ranges,
    read_view,
    unfilled_tensors,
    view_as,
)
from ptsave.archive.unpickling import fills_storages, is_meta_location
from ptsave.contents.contents import CPU, OneFile, Place
from ptsave.contents.safetensors_fields import (
    CHECKSUMS,
    DTYPES,
    LENGTH_NBYTES,
    N_CRC_DIGITS,
    REWRITTEN,
    SafetensorsFields,
    crcs_in,
    damaged_in,
    read_fields,
)
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection, progress_bar
from ptsave.support.text import some_of
from ptsave.support.torch_names import restore_location

if TYPE_CHECKING:
    from ptsave.archive.loading import LoadOptions
    from ptsave.archive.maps import Checked, MapCheck

_HEADER_ALIGNMENT = 8
_MAX_NAMED = 8

# How many numbers an element of torch's packed dtypes has.  Shapes in files count the numbers.
_N_PACKED = {torch.float4_e2m1fn_x2: 2}
# Smaller tensors are copied: a copy costs less, and a process may have only 65,530 mappings.
_MIN_MAPPED_NBYTES = 64 << 10


class StoredTensor(NamedTuple):
    """Type and place of a tensor in a file; a tuple for speed, because there may be 100,000."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # of its first byte in the file
    nbytes: int
    crc: int | None  # None: the file has no checksum, or it is not compared


class SafetensorsHeader(NamedTuple):
    """The tensors and the metadata of a safetensors file."""

    tensors: list[StoredTensor]  # in the order of their bytes
    metadata: dict[str, str]  # the writer's __metadata__, without checksums
    has_checksums: bool


def read_header(source: RangeSource, *, verify: bool = True) -> SafetensorsHeader:
    """Read a header, and check that its tensors lie within the file and do not overlap.

    Without `verify`, the tensors have no checksums.
    """
    with pausing_garbage_collection():
        stored = read_fields(source)
        crcs = crcs_in(stored, source.name) if verify else [None] * len(stored.tensors)
        tensors = list(_stored_tensors(source, stored, crcs))
    return SafetensorsHeader(tensors, stored.metadata, stored.checksums is not None)


def stored_shape(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """Return a torch tensor's shape as the file states it: packed numbers are counted one by one.

    A tensor without dimensions raises ValueError if its dtype packs several numbers in an element.

    >>> stored_shape(torch.float32, [3, 2]), stored_shape(torch.float4_e2m1fn_x2, [3, 2])
    ([3, 2], [3, 4])
    """
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return list(shape)
    if not shape:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"safetensors cannot store a 0-dim {name} tensor: reshape it to [1]")
    return [*shape[:-1], shape[-1] * n_packed]


@functools.cache
def _dtype_of(name: str) -> torch.dtype | None:
    """Return torch's dtype for a dtype name of the format; None if torch lacks this dtype."""
    dtype: torch.dtype | None = getattr(torch, DTYPES.get(name, ""), None)
    return dtype


def _stored_tensors(
    source: RangeSource, stored: SafetensorsFields, crcs: Sequence[int | None]
) -> Iterator[StoredTensor]:
    first, max_end = stored.nbytes, source.nbytes
    kinds: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype, int]] = {}  # many tensors are alike
    for (name, entry), crc in zip(stored.tensors, crcs, strict=True):
        key = (entry["dtype"], *entry["shape"])
        if key not in kinds:
            kinds[key] = _kind_of(source, name, entry)
        shape, dtype, nbytes = kinds[key]
        begin, end = entry["data_offsets"]
        begin, end = first + begin, first + end
        if end - begin != nbytes or not first <= begin <= end <= max_end:
            raise CorruptCheckpointError(
                f"{source.name}: the header gives tensor {name} an impossible place",
                path=source.name,
                offset=begin,
            )
        # StoredTensor(...) takes twice as long.
        yield tuple.__new__(StoredTensor, (name, shape, dtype, begin, nbytes, crc))


def _kind_of(
    source: RangeSource, name: str, entry: Mapping[str, Any]
) -> tuple[torch.Size, torch.dtype, int]:
    """Return the shape, dtype and size in bytes that a tensor of the file has in torch."""
    dtype, shape = _dtype_of(entry["dtype"]), entry["shape"]
    n_packed = 1 if dtype is None else _N_PACKED.get(dtype, 1)
    if dtype is None or (n_packed > 1 and (not shape or shape[-1] % n_packed)):
        raise CorruptCheckpointError(
            f"{source.name}: torch has no type for tensor {name}: {entry['dtype']} of shape "
            f"{shape}",
            path=source.name,
        )
    if n_packed > 1:
        shape = [*shape[:-1], shape[-1] // n_packed]
    return torch.Size(shape), dtype, prod(shape) * dtype.itemsize


class SafetensorsContents(OneFile):
    """`Contents` of a safetensors file.

    With `maps`, the tensors are views of one map of a local file.  By default, only large tensors
    in the page cache of a local file system are mapped.  Threads read all other tensors in large
    blocks; a mapping would be slower, because each page fault reads only a few pages.  `spans`
    numbers the tensors by their positions in `header.tensors`.
    """

    def __init__(self, source: RangeSource, *, maps: bool = False, verify: bool = True) -> None:
        self.header = header = read_header(source, verify=verify)
        self.has_crcs = any(each.crc is not None for each in header.tensors)
        self.kind = "safetensors"  # the file's own "format" is the library it was written for
        self.metadata = {"format": "safetensors", **header.metadata}
        self.nbytes = source.nbytes
        self.path = source.name
        self._stored = header.tensors
        self.source = source
        self._maps = maps
        self.spans = _SourceSpans(source, header.tensors)
        self._whole: set[int] = set()  # mapped tensors that have their checksums

    def _made_obj(self) -> dict[str, Tensor]:
        """Make the unread tensors when `obj` is first used, because there may be 100,000."""
        tensors = unfilled_tensors([(stored.dtype, stored.shape) for stored in self._stored])
        return {stored.name: each for stored, each in zip(self._stored, tensors, strict=True)}

    obj: Any = cached_property(_made_obj)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(tensor): number for number, tensor in enumerate(self.obj.values())}

    def park(self) -> None:
        if isinstance(self.source, LocalFile) and self.map_check is None:
            self.source.park()

    @cached_property
    def _map(self) -> torch.UntypedStorage:
        assert isinstance(self.source, LocalFile)
        return self.source.map(0, self.nbytes).untyped_storage()

    def watch(self, on_map: Callable[[Checked, torch.UntypedStorage], MapCheck]) -> MapCheck:
        """Let `on_map` check the map; from then on, its check compares tensors."""
        assert isinstance(self.source, LocalFile)
        self.map_check = on_map(_CheckedTensors(self.source, self._stored), self._map)
        return self.map_check

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        stored = (self._stored[self._numbers[id(tensor)]] for tensor in tensors)
        return [(tensor.name, None, tensor.offset, None) for tensor in stored]

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        self.require_checksums(verify)
        if self.map_check is not None and verify is not False:
            numbers = [self._numbers[id(tensor)] for tensor in tensors]
            self.map_check.compare(numbers, bytes_of(self._map))
        found: list[Tensor] = []
        spans: dict[int, Span] = {}
        for tensor in tensors:
            number = self._numbers[id(tensor)]
            mapped = self._mapped(number, verify)
            if mapped is not None:
                found.append(mapped)
                continue
            span = spans.get(number)
            if span is None:
                is_fresh = allocate is new_storage and tensor.nbytes >= _MIN_MAPPED_NBYTES
                storage = (_C.huge_page_storage if is_fresh else allocate)(tensor.nbytes)
                span = spans[number] = Span(number, 0, bytes_of(storage))
            found.append(view_as(span.target.untyped_storage(), tensor, 0, tensor.stride()))
        self.spans.read([*spans.values()], verify=verify)
        return found

    def _mapped(self, number: int, verify: bool | None) -> Tensor | None:
        """Map a tensor into memory and return it; None if it should be read instead.

        The checksum of a mapped tensor is compared once, unless `map_check` compares it.
        """
        file, stored = self.source, self._stored[number]
        begin, nbytes = stored.offset, stored.nbytes
        if not isinstance(file, LocalFile) or nbytes < (1 if self._maps else _MIN_MAPPED_NBYTES):
            return None
        if self._maps:
            memory = bytes_of(self._map[begin : begin + nbytes])
        else:
            cached = file.map_cached(begin, nbytes)
            if cached is None:
                return None
            memory = cached
        is_checked = verify is False or self.map_check is not None or number in self._whole
        if not is_checked and stored.crc is not None:
            if crc_of(memory) != stored.crc:
                raise damaged(self.path, [stored])
            self._whole.add(number)
        if memory.data_ptr() % stored.dtype.itemsize:
            memory = memory.clone()
        return memory.view(stored.dtype).view(stored.shape)

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        if _C.can_stage(device):
            return self.read_slice(tensor, ..., verify, device)
        return super().read_to(device, tensor, verify)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        self.require_checksums(verify)
        number = self._numbers[id(tensor)]
        if self.map_check is not None and verify is not False:
            self.map_check.compare([number], bytes_of(self._map))
        mapped = None if _C.can_stage(device) else self._mapped(number, verify)
        if mapped is not None:
            return to_device(mapped[index].clone(), device)
        return read_view(self.spans, number, tensor[index], verify, device, allocate=allocate)

    def verify(self, *, progress: bool) -> None:
        self.require_checksums(True)
        if self.map_check is not None:
            self.map_check.wait()
            return
        with progress_bar(progress, "verifying", self.nbytes) as callback:
            if found := self.find_damage(callback):
                raise damaged(self.path, found)

    def find_damage(self, progress: ProgressCallback | None) -> list[StoredTensor]:
        """Read all tensors that have checksums, and return those that do not match them."""
        if isinstance(self.source, LocalFile):
            with self.source.opened() as file:
                places = [(each.offset, each.nbytes, each.crc) for each in self._stored]
                return [self._stored[i] for i in damaged_in(file, places, progress)]
        found: list[StoredTensor] = []
        for some in self.spans.batches(range(len(self._stored))):
            try:
                self.spans.check(some)
            except CorruptCheckpointError as error:
                found += [self._stored[i] for i in some if self._stored[i].name in error.entries]
            if progress is not None:
                last = self._stored[some[-1]]
                progress(last.offset + last.nbytes)
        return found

    def require_checksums(self, verify: bool | None) -> None:
        if verify and not self.has_crcs:
            reason = "this safetensors file has no checksums to compare, or PTSAVE_VERIFY=0"
            raise ValueError(f"{self.path}: {reason}")


class _CheckedTensors:
    """The tensors of a mapped file, for its `MapCheck`."""

    label = "safetensors"

    def __init__(self, file: LocalFile, tensors: Sequence[StoredTensor]) -> None:
        self._file = file
        self._tensors = tensors
        self.descriptor = file.descriptor
        self.verifies = any(each.crc is not None for each in tensors)

    def checked(self) -> set[int]:
        return {i for i, each in enumerate(self._tensors) if each.crc is not None and each.nbytes}

    def place(self, entry: int) -> tuple[int, int, int]:
        stored = self._tensors[entry]
        assert stored.crc is not None
        return stored.offset, stored.nbytes, stored.crc

    def compare(self, entries: list[int], progress: ProgressCallback) -> None:
        """Compare tensors with their checksums; raise CorruptCheckpointError for damage."""
        some = [self._tensors[i] for i in entries]
        places = [(each.offset, each.nbytes, each.crc) for each in some]
        if found := damaged_in(self._file, places, progress):
            raise damaged(self._file.name, [some[i] for i in found])


class _SourceSpans:
    """Reads ranges of bytes of a file's tensors: a `SpanReader` whose records are tensors."""

    progress: ProgressCallback | None = None

    def __init__(self, source: RangeSource, tensors: Sequence[StoredTensor]) -> None:
        self._source = source
        self._tensors = tensors
        self.reach_devices = isinstance(source, LocalFile)
        self.max_gap = MAX_READ_GAP if self.reach_devices else MAX_FETCHED_GAP

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        file = self._source
        stored = [self._tensors[span.record] for span in spans]
        are_whole = [
            len(span.target) == each.nbytes for span, each in zip(spans, stored, strict=True)
        ]
        if verify and not all(are_whole):
            self.check([span.record for span in spans])
        crcs = [
            each.crc if is_whole and verify is not False else None
            for each, is_whole in zip(stored, are_whole, strict=True)
        ]
        if isinstance(file, LocalFile):
            if spans:
                ranges = [
                    (0, file.begin + self._tensors[each.record].offset + each.begin, each.target)
                    for each in spans
                ]
                found = read_ranges(
                    range_files([file]), ranges, self.progress, crcs=crcs, max_gap=self.max_gap
                )
                self._refuse_damage({offset - file.begin for _, offset in found})
            return
        for batch in batches(spans):
            begins = [self._tensors[span.record].offset + span.begin for span in batch]
            pieces = self._source.read(
                [(begin, begin + len(s.target)) for begin, s in zip(begins, batch, strict=True)]
            )
            for span, piece in zip(batch, pieces, strict=True):
                memory_of(span.target)[:] = piece
            if self.progress is not None:
                self.progress(begins[-1] + len(batch[-1].target))
        self._refuse_damage(
            {
                each.offset
                for span, each, crc in zip(spans, stored, crcs, strict=True)
                if crc is not None and crc != crc_of(span.target)
            }
        )

    def check(self, records: Sequence[int]) -> None:
        """Compare tensors with their checksums; raise CorruptCheckpointError for damage."""
        for some in self.batches(dict.fromkeys(records)):
            sizes = [self._tensors[i].nbytes for i in some]
            targets = [bytes_of(new_storage(nbytes)) for nbytes in sizes]
            self.read(
                [Span(i, 0, each) for i, each in zip(some, targets, strict=True)], verify=None
            )

    def batches(self, records: Iterable[int]) -> Iterator[list[int]]:
        """Yield the tensors that have checksums, in lists of up to `BATCH_NBYTES`."""
        batch: list[int] = []
        nbytes = 0
        for record in records:
            stored = self._tensors[record]
            if stored.crc is None or not stored.nbytes:
                continue
            if batch and nbytes + stored.nbytes > BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(record)
            nbytes += stored.nbytes
        if batch:
            yield batch

    def _refuse_damage(self, offsets: set[int]) -> None:
        if offsets:
            found = [each for each in self._tensors if each.offset in offsets and each.nbytes]
            raise damaged(self._source.name, found)


def damaged(path: str, tensors: Sequence[StoredTensor]) -> CorruptCheckpointError:
    """Return the error for tensors that do not match their checksums."""
    return damaged_tensors(path, [each.name for each in tensors], tensors[0].offset)


def damaged_tensors(path: str, names: list[str], offset: int) -> CorruptCheckpointError:
    """Return the error for damaged tensors; the first one is at `offset`."""
    verb = "does" if len(names) == 1 else "do"
    return CorruptCheckpointError(
        f"{path}: {some_of(names, _MAX_NAMED)} at offset {offset} {verb} not match the checksum in "
        f"the header. {REWRITTEN}",
        path=path,
        offset=offset,
        entries=names,
    )


# ------------------------------------------------------------------------------------ loading


def load_safetensors(source: RangeSource, options: LoadOptions) -> dict[str, Tensor]:
    """Load all tensors, in the file's order, to the devices that `map_location` gives."""
    try:
        tensors = _tensors_of(source, options)
    except ImportError as error:  # in torch's words
        raise RuntimeError(
            "Attempting to load a safetensors file but safetensors is not installed. "
            f"Please install safetensors with: pip install safetensors ({error})"
        ) from error
    location = options.map_location
    return tensors if location is None else {k: _placed(v, location) for k, v in tensors.items()}


def _tensors_of(source: RangeSource, options: LoadOptions) -> dict[str, Tensor]:
    location = options.map_location
    fills = fills_storages(location)
    verify = options.verify and config.current().verify
    if fills and (options.maps or not isinstance(source, LocalFile)):
        # As with torch archives, nothing is compared before a mapped file is returned.
        watched = options.on_map is not None
        verify = verify and (watched or not options.maps)
        contents = SafetensorsContents(source, maps=options.maps, verify=verify)
        if options.on_map is not None:
            contents.require_checksums(verify)
            _require_aligned(contents)
            contents.watch(options.on_map)
        with progress_bar(options.progress, "loading", source.nbytes) as contents.spans.progress:
            values = contents.read(list(contents.obj.values()), False if watched else None)
        return dict(zip(contents.obj, values, strict=True))
    stored, device = read_header(source, verify=verify).tensors, CPU
    if fills:
        device = accelerator_of(location) or CPU
    elif is_meta_location(location):
        device = torch.device("meta")
    tensors = {
        each.name: torch.empty(each.shape, dtype=each.dtype, device=device) for each in stored
    }
    if fills and isinstance(source, LocalFile):
        begin = source.begin
        some = [each for each in stored if each.nbytes]
        ranges = [(0, begin + each.offset, tensors[each.name]) for each in some]
        crcs = [each.crc for each in some]
        with progress_bar(options.progress, "loading", source.nbytes) as callback:
            found = read_ranges(range_files([source]), ranges, callback, crcs=crcs)
        if found:
            offsets = {offset - begin for _, offset in found}
            raise damaged(source.name, [each for each in some if each.offset in offsets])
    return tensors


def _require_aligned(contents: SafetensorsContents) -> None:
    """Raise ValueError for a tensor that cannot be a view of a map."""
    for stored in contents.header.tensors:
        if stored.offset % stored.dtype.itemsize and stored.nbytes:
            raise ValueError(
                f"{contents.path}: {stored.name} at offset {stored.offset} cannot be mapped: "
                f"{stored.dtype} needs a multiple of {stored.dtype.itemsize}: load without mmap"
            )


def _placed(tensor: Tensor, map_location: Any) -> Tensor:
    """Move a CPU tensor to the device that `map_location` gives for tensors saved on the CPU."""
    storage = restore_location(map_location)(tensor.untyped_storage(), "cpu")
    placed = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return placed.set_(storage, 0, tensor.shape, tensor.stride())


# ----------------------------------------------------------------------------------- new files


@functools.cache
def safetensors_dtypes() -> dict[torch.dtype, str]:
    """Return the names of dtypes that the library can write, in the order of tensors in a file."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError(
            "writing safetensors files needs the safetensors library: pip install safetensors"
        ) from None
    found = {name: getattr(torch, text, None) for name, text in DTYPES.items()}
    dtypes: dict[str, torch.dtype] = {name: dtype for name, dtype in found.items() if dtype}
    known = {name: dtype for name, dtype in dtypes.items() if _can_write(save, dtype)}
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype in known.items()})
    header = json.loads(data[8:])
    return {known[name]: fields["dtype"] for name, fields in header.items()}


def _can_write(save: Callable[[dict[str, Tensor]], bytes], dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # the library raises errors of many types
        return False
    return True


def names_in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the order in which a safetensors file stores the tensors."""
    ranks = {dtype: rank for rank, dtype in enumerate(safetensors_dtypes())}
    return sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name.encode()))


class NewHeader(NamedTuple):
    """The header of a new file, and the tensors in the order of the file."""

    tensors: list[Tensor]
    data: bytes
    crcs_at: int | None  # where the checksums stand in `data`, which are zeros


def header_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, checksums: bool
) -> NewHeader:
    """Return the header that the library would write; with room for `checksums` if there are any.

    Checksums in `metadata`, which are those of other tensors, are left out.
    """
    dtypes = safetensors_dtypes()
    names = names_in_order(tensors)
    checksums = checksums and bool(names)
    metadata = {key: value for key, value in metadata.items() if key != CHECKSUMS}
    if checksums:
        metadata = {CHECKSUMS: "0" * (N_CRC_DIGITS * len(names)), **metadata}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        shape = stored_shape(tensor.dtype, tensor.shape)
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    data = len(text).to_bytes(LENGTH_NBYTES, "little") + text
    key = f'"{CHECKSUMS}":"'.encode()
    crcs_at = data.index(key) + len(key) if checksums else None
    return NewHeader([tensors[name] for name in names], data, crcs_at)
