"""The engine.  Offsets count from the archive's beginning, sizes are in bytes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, final

import torch
from typing_extensions import Buffer

# (name without the root folder, payload, nbytes).  A payload is bytes, the address of memory, a
# function that makes it and returns its address, or None for a hole.
PlannedRecord: TypeAlias = tuple[str, bytes | int | Callable[[], int] | None, int]
Progress: TypeAlias = Callable[[int], None] | None
_T = TypeVar("_T")

class FormatError(RuntimeError):
    args: tuple[str, str, str | None, int | None]

class LayoutMismatchError(RuntimeError): ...

@final
class WriteOptions:
    def __init__(
        self,
        *,
        compute_crcs: bool,
        n_threads: int,
        chunk_nbytes: int,
        payloads_are_still: bool,
        max_pinned_nbytes: int,
        n_direct_threads: int = 0,
        direct_nbytes: int | None = None,
        in_background: bool = False,
    ) -> None: ...

# Where objects are the values of dicts: (a dict's number, its key, the object's number).
def find_values(
    dicts: Sequence[dict[str, Any]], values: Sequence[object]
) -> list[tuple[int, str, int]]: ...

# The pairs (name, object) whose object has an attribute of its own that is true.
def having(pairs: list[tuple[str, _T]], attribute: str) -> list[tuple[str, _T]]: ...

# Whether the engine copies from and to this device.
def can_stage(device: torch.device) -> bool: ...

@final
class StorageList:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None: ...
    def __len__(self) -> int: ...
    # Each is in CPU memory, or on an accelerator that WritePlan can take it from.
    @property
    def in_reach(self) -> bool: ...
    # At most so much host memory copies take, for an archive with that alignment; a CPU storage
    # without memory has no bytes.
    def staging_nbytes(self, alignment: int) -> int: ...

# Copies of storages.  Their memory is there from the beginning, their bytes come with copy(); those
# of storages that are not in CPU memory are the caller's to copy.
@final
class Snapshot:
    def __init__(self, sources: StorageList, *, without_bytes: bool = False) -> None: ...
    @property
    def storages(self) -> StorageList: ...
    # Lets go of the sources, too.  Calls `when_slow` once if that takes long, which returns whether
    # a plan follows the copy from then on: it ends when each byte is copied or written.
    def copy(
        self, *, n_threads: int, progress: Progress, when_slow: Callable[[], bool] | None = None
    ) -> None: ...
    # The plan that followed needs nothing more.
    def close(self) -> None: ...
    def release(self) -> None: ...
    # The same in a forked child, where accelerators must not be touched: frees nothing.
    def abandon(self) -> None: ...

# A planned file, as the bindings give it to each kind of plan.
class _FilePlan:
    @property
    def nbytes(self) -> int: ...
    @property
    def has_holes(self) -> bool: ...
    @property
    def is_sequential(self) -> bool: ...
    @property
    def is_pinned(self) -> bool: ...
    def write_file(
        self,
        path: bytes,
        display: bytes,
        *,
        durable: bool,
        options: WriteOptions,
        progress: Progress,
    ) -> None: ...
    # By way of `scratch`, an empty file open for reading and writing, if that is given.
    def write_in_place(
        self,
        path: bytes,
        *,
        scratch: int | None,
        durable: bool,
        options: WriteOptions,
        progress: Progress,
    ) -> None: ...
    def write_stream(
        self,
        sink: Callable[[memoryview], object],
        skip: Callable[[int], object],
        *,
        options: WriteOptions,
        progress: Progress,
    ) -> None: ...

@final
class WritePlan(_FilePlan):
    # A list of storages, all in reach, stands for the records data/0, data/1, ...
    def __init__(
        self, root: str, records: Sequence[PlannedRecord | StorageList], alignment: int
    ) -> None: ...
    # Lets the next write, of a file that is replaced, take storages that are still being copied.
    def follow(self, copies: Snapshot) -> None: ...
    # Lets go of the storages to write; nothing can be written after.
    def release(self) -> None: ...
    # The same in a forked child, where accelerators must not be touched: does not free their part.
    def abandon(self) -> None: ...
    # These payloads are in sources: (record, source, offset, CRC if it is known, parts).
    def read_from(
        self,
        sources: PayloadSources,
        payloads: Sequence[tuple[str, int, int, int | None, Sequence[SourcePart]]],
    ) -> None: ...
    # Of the last write: the records whose CRC differed, each with the CRC found.  Raises
    # FormatError.
    @property
    def damaged(self) -> list[tuple[str, int]]: ...
    # Writes tensors on accelerators as this thread's current streams leave them now; with the same
    # chunk size.
    def begin_staging(self, *, options: WriteOptions) -> None: ...
    # Copies it to the host.
    def stage(self, *, n_threads: int, progress: Progress) -> None: ...
    def write_descriptor(
        self,
        fd: int,
        offset: int,
        name: bytes,
        *,
        durable: bool,
        options: WriteOptions,
        progress: Progress,
    ) -> None: ...
    def write_memory(
        self, target: Buffer, *, options: WriteOptions, progress: Progress
    ) -> None: ...

# Where payloads come from: files, each a descriptor, which stays the caller's, and a name; or the
# address and size of memory, which has to live as long, and a name.  `direct`: files may be read
# past the page cache.
@final
class PayloadSources:
    def __init__(
        self, items: Sequence[tuple[int, bytes] | tuple[int, int, bytes]], *, direct: bool
    ) -> None: ...

# Where a payload that is not one range comes from, in its order: (begin in the payload, source,
# offset).
SourcePart: TypeAlias = tuple[int, int, int]

# A file that is a header and payloads: (size, source, offset, CRC if it is known, parts).
@final
class PackedPlan(_FilePlan):
    def __init__(
        self,
        header: bytes,
        sources: PayloadSources,
        payloads: Sequence[tuple[int, int, int, int | None, Sequence[SourcePart]]],
    ) -> None: ...
    # Of contiguous tensors, on accelerators that can_stage() or in CPU memory, as they are now.
    @staticmethod
    def of_tensors(header: bytes, tensors: Sequence[torch.Tensor]) -> PackedPlan: ...
    # As of WritePlan; all payloads must be memory.
    def follow(self, copies: Snapshot) -> None: ...
    # Of the last write: the payloads whose CRC differed, each with the CRC found.  Raises
    # FormatError.
    @property
    def damaged(self) -> list[tuple[int, int]]: ...

# The number of bytes that have a checksum of their own in a file of CheckedPlan.
CHECKED_BLOCK_NBYTES: int

# A file of pieces at offsets of their own, in order: bytes, contiguous tensors in CPU memory or on
# accelerators that can_stage(), or bytes of sources (size, source, offset, parts).  Zeros between
# them, up to a multiple of CHECKED_BLOCK_NBYTES; then the CRC-32 of each block, four bytes.
@final
class CheckedPlan(_FilePlan):
    def __init__(
        self,
        pieces: list[tuple[int, bytes | torch.Tensor | tuple[int, int, int, Sequence[SourcePart]]]],
        sources: PayloadSources | None = None,
    ) -> None: ...
    # Of the last write: the bytes behind the blocks.
    @property
    def block_crcs(self) -> bytes: ...

# The CRC-32 of blocks of CHECKED_BLOCK_NBYTES, one after the other, from a table of those of each.
def crc_of_blocks(table: torch.Tensor) -> int: ...

# That of bytes followed by so many others.
def crc32_combine(crc_a: int, crc_b: int, nbytes_b: int) -> int: ...

# Fills tensors in CPU memory, of any strides: (number of the file, offset, bytes from one element
# of each dimension to the next in the file, tensor).  A table is all that CheckedPlan writes behind
# the blocks of a file, as far as it is needed, or None: nothing of that file is checked.  Gaps of
# up to max_gap bytes may be read.  Returns the blocks whose checksum differs: (number of the file,
# offset); nothing of what was read together with one is in its place.
def read_checked(
    files: RangeFiles,
    boxes: Sequence[tuple[int, int, Sequence[int], torch.Tensor]],
    tables: Sequence[torch.Tensor | None],
    *,
    n_threads: int,
    max_gap: int,
    progress: Progress,
) -> list[tuple[int, int]]: ...

# Numbers the records of storages for an archive that grows.  What an object adds is pending until
# commit() or rollback().
@final
class NumberedStorages:
    def __init__(self) -> None: ...
    # As pickle_object(), with these numbers; None if the object needs Python's pickler: rollback().
    def pickle(self, obj: object) -> bytes | None: ...
    # Of a storage that was not met before in the object; `tensor` refers to it.
    def number(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor | None, dtype: torch.dtype
    ) -> int: ...
    # Those that have to be written.
    @property
    def fresh(self) -> StorageList: ...
    @property
    def fresh_nbytes(self) -> int: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    # Every storage is written anew from here on.
    def forget(self) -> None: ...

# The beginning and the end of a pickle of a dict, between which parts add its entries.
DICT_HEAD: bytes
STOP: bytes

# Records that are written together, and copies of their storages in slabs of a size.
@final
class AppendBatch:
    def __init__(self, *, slab_nbytes: int) -> None: ...
    # Adds the pending storages, as they are now if `copy`, and a part of the pickle of a dict.
    # Returns tensor_statistics of `measured` if that is the only one of them, with `copy`.
    def add(
        self,
        storages: NumberedStorages,
        pickle: bytes,
        *,
        copy: bool,
        n_threads: int,
        measured: torch.Tensor | None = None,
    ) -> tuple[Any, ...] | None: ...
    # Of calls of add().
    @property
    def n_groups(self) -> int: ...
    # How many of the first have no more than this many bytes.
    def n_groups_within(self, nbytes: int) -> int: ...
    @property
    def is_staged(self) -> bool: ...
    # Writes the first groups, at least one; returns offset and size of their pickles in the file.
    def write(
        self,
        archive: AppendedArchive,
        journal_name: str,
        *,
        n_groups: int,
        direct: bool,
        options: WriteOptions,
        progress: Progress,
    ) -> tuple[int, int]: ...
    def release(self) -> None: ...
    # The same in a forked child, where accelerators must not be touched.
    def abandon(self) -> None: ...

# A temporary file that becomes an archive.  In a forked child only keep() may be called.
@final
class AppendedArchive:
    def __init__(self, path: bytes, display: bytes, *, root: str, alignment: int) -> None: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...
    def sync(self) -> None: ...
    def close(self, pickle: bytes, *, compute_crcs: bool, durable: bool) -> None: ...
    # Lets go of the temporary file, which stays; or removes it.
    def keep(self) -> None: ...
    def discard(self) -> None: ...
    # In the directory of the target; b"" once it is not ours any more.
    @property
    def temporary_name(self) -> bytes: ...
    # Of all batches that were written.
    @property
    def nbytes(self) -> int: ...

# The rest of an archive behind these records: (name, offset of the header, size, CRC, end).
def closing_bytes(
    root: str,
    alignment: int,
    records: Sequence[tuple[str, int, int, int, int]],
    pickle: bytes,
) -> bytes: ...

# The name that a file gets which replaces `path`; None for a link of /proc to an open file.
def resolve_links(path: bytes) -> bytes | None: ...

# Removes a file without waiting until its blocks are free; False if there is none.
def remove_file(path: bytes) -> bool: ...

# Closes a descriptor, maybe the last one of a removed file, without waiting for its file system.
def release_later(fd: int) -> None: ...

# Waits until the blocks of all files that were replaced or removed are free.
def finish_releases() -> None: ...

# Removes the temporary files that killed writers of `path` have left.
def remove_leftovers(path: bytes) -> None: ...

@final
class Record:
    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> int: ...
    @property
    def header_offset(self) -> int: ...
    # By the central directory alone; Reader.payload_offset asks the local header, too.
    @property
    def payload_offset(self) -> int: ...
    # Where the next record, or the central directory, begins.
    @property
    def limit(self) -> int: ...
    @property
    def stored_nbytes(self) -> int: ...
    @property
    def method(self) -> int: ...
    # Whether torch's reader takes it for a directory, and so reads nothing of it.
    @property
    def directory(self) -> bool: ...
    @property
    def stored(self) -> bool: ...
    @property
    def encrypted(self) -> bool: ...

@final
class DamagedRecord:
    @property
    def name(self) -> str: ...
    @property
    def payload_offset(self) -> int: ...
    @property
    def expected_crc(self) -> int: ...
    @property
    def actual_crc(self) -> int: ...

class StorageSource: ...

@final
class Reader(StorageSource):
    @staticmethod
    def open_descriptor(fd: int, offset: int, name: bytes, *, direct: bool) -> Reader: ...
    @staticmethod
    def open_memory(buffer: Buffer, name: str) -> Reader: ...
    # Closes the file until lend_file() opens the same one again: neither while it is being read.
    def close_file(self) -> None: ...
    def lend_file(self, fd: int, offset: int, *, direct: bool) -> None: ...
    # Of the open file, which stays the reader's; -1 for memory, and where it is closed.
    @property
    def descriptor(self) -> int: ...
    @property
    def root(self) -> str: ...
    @property
    def has_crcs(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def nbytes_to_read(self) -> int: ...
    @property
    def all_stored(self) -> bool: ...
    @property
    def storages_have_crcs(self) -> bool: ...
    def record(self, record: int) -> Record: ...
    def records(self) -> list[Record]: ...
    # Of the records that are no storages (not in the folder data/).
    def other_names(self) -> list[str]: ...
    def find(self, name: str) -> int | None: ...
    def payload_offset(self, record: int) -> int: ...
    def read(self, record: int, *, verify: bool) -> bytes: ...
    # The next two do not touch storages that the others have made, and are safe for concurrent use.
    # No record twice; no targets: nothing is kept.  Targets are in CPU memory or on accelerators
    # that can_stage().
    def read_records(
        self,
        records: list[int],
        targets: list[torch.Tensor],
        *,
        n_threads: int,
        verify: bool,
        max_pinned_nbytes: int,
    ) -> list[DamagedRecord]: ...
    # Fills contiguous tensors, in CPU memory or on accelerators that can_stage(), from offsets on.
    # Parts for accelerators do not overlap.
    def read_ranges(
        self,
        ranges: Sequence[tuple[int, torch.Tensor]],
        *,
        n_threads: int,
        max_pinned_nbytes: int,
    ) -> None: ...
    # (number, name, payload offset, location) of each record; the location is that of the storage
    # that the engine's unpickler has taken from it.
    def places(self) -> list[tuple[int, str, int, str | None]]: ...
    # None: all storages.
    def start(
        self, records: list[int] | None, *, n_threads: int, verify: bool, exact_offsets: bool
    ) -> None: ...
    # Places all storages without reading them; the next five are for those.
    def reserve(self) -> None: ...
    # Storages saved at `location` go to `device`, an accelerator that can_stage() or the CPU.
    def place(self, location: str, device: torch.device) -> None: ...
    def placed_storage(self, record: int, device: torch.device) -> torch.UntypedStorage: ...
    def plan_copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    # Makes the planned copies, and reads `records` into their storages.
    def fill(
        self,
        records: list[int],
        *,
        n_threads: int,
        verify: bool,
        max_pinned_nbytes: int,
        progress: Progress,
    ) -> list[DamagedRecord]: ...
    def is_filled(self, record: int) -> bool: ...
    # The records of which targets of copies have got bytes.
    def changed(self) -> list[int]: ...
    # The records whose storages somebody refers to.
    def referenced(self) -> list[int]: ...
    def record_of(self, tensor: torch.Tensor) -> int | None: ...
    def records_of(self, tensors: list[torch.Tensor]) -> list[int | None]: ...
    def wait(self, record: int, *, progress: Progress) -> None: ...
    def wait_all(self, *, progress: Progress) -> list[DamagedRecord]: ...
    def storage(self, record: int) -> torch.Tensor: ...
    def release_storages(self) -> None: ...
    def read_at(self, offset: int, nbytes: int) -> bytes: ...
    def cancel(self) -> None: ...

# Bytes of an archive's end that find_central_directory may need.
MAX_TAIL_NBYTES: int

# Offset and size of the central directory in an archive of `nbytes` bytes that ends with `tail`.
def find_central_directory(tail: bytes, nbytes: int) -> tuple[int, int]: ...

# (dtype, shape, stride, offset in the storage, size, size of the storage; all three in bytes) of
# each tensor; None for one that is not strided.
def tensor_facts(
    tensors: list[torch.Tensor],
) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...], int, int, int] | None]: ...

# Of each value the index of the first one of its shape, dtype, layout, device and flags (such as
# contiguous; pinned ones differ if that is asked for); -1 if its type is none of `types`.
def tensor_kinds(
    values: list[Any], types: tuple[type, ...], *, pinned: bool = False
) -> list[int]: ...

# Contiguous tensors in CPU memory, with any values.
def empty_tensors(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> list[torch.Tensor]: ...

# The address of each tensor; 0 for one without elements in memory, None for one of a subclass.
def addresses(tensors: list[torch.Tensor]) -> list[int | None]: ...

# Of each tensor whether it takes bytes of a dtype that follow each other, as they are in a file: it
# is of exactly torch's own types, contiguous, and in CPU memory or on an accelerator that can_stage
# is true of.
def take_bytes(tensors: list[torch.Tensor], dtypes: list[torch.dtype]) -> list[bool]: ...

# Whether the memory of no tensor may overlap another one's.
def are_apart(tensors: list[torch.Tensor]) -> bool: ...

# Whether `target.copy_(source)` moves numbers and can neither fail nor warn: both are tensors of
# exactly torch's own types, strided, of one shape and on real devices.
def copies_plainly(target: Any, source: Any) -> bool: ...

# Copies pairs (target, source) that copy plainly, from `begin` on, as `copy_` does under no_grad;
# returns the index of the first pair of large tensors, or of two types, which torch has to copy.
def copy_small(pairs: list[tuple[torch.Tensor, torch.Tensor]], begin: int) -> int: ...

# In both a list has a value for each instance or row, anything else is the value of all.
# Instances with these attributes, without a call of the class's initializer.
def instances(kind: type[_T], attributes: dict[str, Any]) -> list[_T]: ...

# Bytes as they are, an int as 32 bits, a str as its size in 32 bits and UTF-8.
def packed_rows(columns: tuple[Any, ...]) -> bytes: ...

# mapped_nbytes: memory of the pool; used_nbytes: of it, in use; n_mappings: how often it has grown.
def staging_statistics() -> dict[str, int]: ...
def trim_staging_pool() -> None: ...

# Makes the memory that the pool has for later saves present, on a thread that gives way to others.
def populate_staging_pool(*, progress: Progress) -> None: ...

# Page-locked memory that torch keeps for accelerators, if ptsave has used any.
def release_pinned_memory() -> None: ...
def crc32(data: Buffer, crc: int = 0) -> int: ...
def payload_offset_after(
    header_offset: int, full_name: str, nbytes: int, alignment: int
) -> int: ...
def rebuilds_blindly(pickle: bytes, dtypes: set[str], opaque: set[str] = ...) -> bool: ...

# Why a pickle of any protocol would make Python's unpickler allocate more memory than its bytes
# justify, or that it is cut short; None if neither.
def unjustified_claim(pickle: bytes) -> str | None: ...

# Nothing: Python's pickler must do it, or raise.
def pickle_object(obj: object) -> tuple[bytes, StorageList] | None: ...

# Addresses without memory, which stand for bytes that are elsewhere.
def unfilled_storages(sizes: Sequence[int]) -> StorageList: ...
def untyped_storages(storages: StorageList) -> list[torch.UntypedStorage]: ...
def unpickle_weights_only(
    pickle: bytes,
    persistent_load: Callable[[Any], Any],
    *,
    encoding: str,
    storages: StorageSource | None,
    unpickler_type: Any = None,  # in the place of torch's; a subclass that allows more
) -> Any: ...

# The files of one load; a file is a descriptor, which stays the caller's, and its name.  Safe for
# concurrent use.
class RangeFiles:
    def __init__(
        self, files: Sequence[tuple[int, bytes]], *, direct: bool, n_threads: int
    ) -> None: ...
    # Fills contiguous tensors, in CPU memory or on accelerators that can_stage(): (number of the
    # file, offset, tensor).  Ranges of a file do not overlap, nor do tensors.  Gaps between them
    # of up to max_gap bytes may be read.
    def read(
        self,
        ranges: Sequence[tuple[int, int, torch.Tensor]],
        *,
        n_threads: int,
        max_pinned_nbytes: int,
        max_gap: int = ...,
        progress: Progress,
    ) -> None: ...

# Copies the bytes of contiguous CPU tensors to ones of that size on devices that can_stage():
# (source, target).  Sources do not overlap.
def copy_to_devices(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    n_threads: int,
    max_pinned_nbytes: int,
) -> None: ...

# The number of bytes below which such copies cost more than they save.
MIN_PINNED_NBYTES: int

# Whether the CPU and accelerators convert all values of a dtype alike: not from floating point to
# integers, where what does not fit becomes anything.
def convert_alike(source: torch.dtype, target: torch.dtype) -> bool: ...

# Parts of a file as uint8 tensors whose bytes are had from it when they are used; the second only
# of parts that the page cache holds.
def map_range(fd: int, name: bytes, *, offset: int, nbytes: int) -> torch.Tensor: ...
def map_cached_range(fd: int, name: bytes, *, offset: int, nbytes: int) -> torch.Tensor | None: ...

# Whether a file lies on a network file system, or one that a program serves.
def is_remote(fd: int, name: bytes) -> bool: ...

# Makes the memory of such a tensor independent of the file, where it is.
def detach_from_file(storage: torch.UntypedStorage, name: bytes) -> None: ...

# A CPU storage with any bytes in memory of its own, in huge pages where there are any.
def huge_page_storage(nbytes: int) -> torch.UntypedStorage: ...

# How many hold the storage in C++; its Python object is one of them.
def storage_use_count(storage: torch.UntypedStorage) -> int: ...

# The fields of tree.capture_schema.Statistics, of a contiguous tensor in CPU memory; None if its
# elements are no numbers.
def tensor_statistics(tensor: torch.Tensor, n_threads: int = 1) -> tuple[Any, ...] | None: ...

# The counts and sizes of comparison.measures.TensorDifference; None if the elements of one are no
# numbers.
def tensor_difference(
    a: torch.Tensor, b: torch.Tensor, rtol: float = 0.0, atol: float = 0.0, n_threads: int = 1
) -> dict[str, Any] | None: ...
