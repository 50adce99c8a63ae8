"""ptsave's C++ engine.  Offsets count from the archive's beginning; sizes are in bytes."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, final

import torch
from typing_extensions import Buffer

# (name without the root folder, payload, nbytes).  A payload is bytes, the address of memory, a
# function that makes the payload and returns its address, or None for a hole.
PlannedRecord: TypeAlias = tuple[str, bytes | int | Callable[[], int] | None, int]
Progress: TypeAlias = Callable[[int], None] | None
_T = TypeVar("_T")

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

# Finds `values` among the values of dicts: (number of the dict, key, number in `values`).
def find_values(
    dicts: Sequence[dict[str, Any]], values: Sequence[object]
) -> list[tuple[int, str, int]]: ...

# Returns the pairs (name, object) whose object has a true value for `attribute` in its __dict__.
def having(pairs: list[tuple[str, _T]], attribute: str) -> list[tuple[str, _T]]: ...

# Whether the engine can copy from and to this device.
def can_stage(device: torch.device) -> bool: ...

# Raises a RuntimeError if the device's current stream captures a graph.
def refuse_capture(device: torch.device) -> None: ...

@final
class StorageList:
    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None: ...
    def __len__(self) -> int: ...
    # Whether each storage is in CPU memory or on an accelerator that can_stage().
    @property
    def in_reach(self) -> bool: ...
    # An upper bound of the host memory for copies, in bytes, given an archive's alignment.  CPU
    # storages without memory count as empty.
    def staging_nbytes(self, alignment: int) -> int: ...

# Copies of storages.  Their memory is reserved at once; copy() fills the copies of storages in CPU
# memory, and the caller copies all others.
@final
class Snapshot:
    def __init__(self, sources: StorageList, *, without_bytes: bool = False) -> None: ...
    @property
    def storages(self) -> StorageList: ...
    # Copies the sources in CPU memory, and then releases all sources.  Calls `when_slow` once if
    # copying is slow.  If that returns True, a plan follows the copy; the call ends when each byte
    # is copied or written.
    def copy(
        self, *, n_threads: int, progress: Progress, when_slow: Callable[[], bool] | None = None
    ) -> None: ...
    # Ends the reads of the plan that follows.
    def close(self) -> None: ...
    def release(self) -> None: ...
    # Replaces release() in a forked child, which must not touch accelerators: frees nothing.
    def abandon(self) -> None: ...

# The methods that all plans of files have; the module has no such class.
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
        sharing: Sharing | None = None,
    ) -> None: ...
    # Writes through `scratch`, if given: an empty file open for reading and writing.
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

class FileHashes: ...

# Lets write_file() share pieces with an older archive: a descriptor with a name, and its hashes.
class Sharing:
    def __init__(
        self,
        plan: WritePlan,
        base: tuple[int, bytes] | None = None,
        hashes: FileHashes | None = None,
    ) -> None: ...
    @property
    def nbytes_shared(self) -> int: ...
    # The new file's identity and hashes, after the write, if its file system can share.
    @property
    def hashed(self) -> tuple[tuple[int, ...], FileHashes] | None: ...

# The XXH3-128 of bytes that arrive in pieces.
class Xxh3:
    def __init__(self) -> None: ...
    def update(self, data: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...

@final
class WritePlan(_FilePlan):
    # A list of storages, all in reach, stands for the records data/0, data/1, and so on.
    def __init__(
        self, root: str, records: Sequence[PlannedRecord | StorageList], alignment: int
    ) -> None: ...
    # Lets the next write_file() read storages that are still being copied.
    def follow(self, copies: Snapshot) -> None: ...
    # Releases the storages.  Afterwards, nothing can be written.
    def release(self) -> None: ...
    # Replaces release() in a forked child, which must not touch accelerators or free their memory.
    def abandon(self) -> None: ...
    # Reads these payloads from sources: (record, source, offset, CRC if known, parts).
    def read_from(
        self,
        sources: PayloadSources,
        payloads: Sequence[tuple[str, int, int, int | None, Sequence[SourcePart]]],
    ) -> None: ...
    # The offset and the size of each record's payload.
    @property
    def payloads(self) -> list[tuple[int, int]]: ...
    # Pairs (record, CRC found) for the records with a wrong CRC in the last write.
    @property
    def damaged(self) -> list[tuple[str, int]]: ...
    # Fixes the values of accelerators' tensors after the work now on this thread's current
    # streams.  Later writes must use the same chunk size.
    def begin_staging(self, *, options: WriteOptions) -> None: ...
    # Copies these tensors to the host.
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

# The sources of payloads: (descriptor, name) of files, or (address, size, name) of memory.
# Descriptors stay the caller's; the memory must outlive the sources.  With `direct`, reads may
# bypass the page cache.
@final
class PayloadSources:
    def __init__(
        self, items: Sequence[tuple[int, bytes] | tuple[int, int, bytes]], *, direct: bool
    ) -> None: ...

# A part of a payload that is not one range: (begin in the payload, source, offset in the source).
SourcePart: TypeAlias = tuple[int, int, int]

# A file of a header and payloads: (size, source, offset, CRC if known, parts).
@final
class PackedPlan(_FilePlan):
    def __init__(
        self,
        header: bytes,
        sources: PayloadSources,
        payloads: Sequence[tuple[int, int, int, int | None, Sequence[SourcePart]]],
        # Where the header has eight hexadecimal digits for each payload's CRC-32.
        crcs_at: int | None = None,
    ) -> None: ...
    # Plans the present values of contiguous tensors in CPU memory or on accelerators that
    # can_stage().
    @staticmethod
    def of_tensors(
        header: bytes, tensors: Sequence[torch.Tensor], crcs_at: int | None = None
    ) -> PackedPlan: ...
    # Like WritePlan.follow(); all payloads must be in host memory.
    def follow(self, copies: Snapshot) -> None: ...
    # Pairs (payload, CRC found) for the payloads with a wrong CRC in the last write.
    @property
    def damaged(self) -> list[tuple[int, int]]: ...

# Size of the blocks with a checksum in a file of CheckedPlan.
CHECKED_BLOCK_NBYTES: int

# A file of pieces at given offsets, in order, with zeros between them.  A piece is bytes, a
# contiguous tensor in CPU memory or on an accelerator that can_stage(), or a part of sources
# (size, source, offset, parts).  The pieces are padded to a multiple of CHECKED_BLOCK_NBYTES; the
# CRC-32 of each block, four bytes, follows.
@final
class CheckedPlan(_FilePlan):
    def __init__(
        self,
        pieces: list[tuple[int, bytes | torch.Tensor | tuple[int, int, int, Sequence[SourcePart]]]],
        sources: PayloadSources | None = None,
    ) -> None: ...
    # The CRCs behind the blocks of the last write.
    @property
    def block_crcs(self) -> bytes: ...

# The CRC-32 of consecutive blocks of CHECKED_BLOCK_NBYTES, from a table of the blocks' CRCs.
def crc_of_blocks(table: torch.Tensor) -> int: ...

# The CRC-32 of A followed by B, from both CRCs and B's size.
def crc32_combine(crc_a: int, crc_b: int, nbytes_b: int) -> int: ...

# Fills CPU tensors of any strides from boxes: (number of the file, offset, strides in the file in
# bytes, tensor).  A table has the CRCs that CheckedPlan writes behind a file's blocks, as far as
# they are needed; with None, the file is not checked.  Gaps of up to max_gap bytes may be read.
# Returns the damaged blocks: (number of the file, offset).  Bytes that were read together with a
# damaged block are not put into their places.
def read_checked(
    files: RangeFiles,
    boxes: Sequence[tuple[int, int, Sequence[int], torch.Tensor]],
    tables: Sequence[torch.Tensor | None],
    *,
    n_threads: int,
    max_gap: int,
    progress: Progress,
) -> list[tuple[int, int]]: ...

# Numbers the records of storages for a growing archive.  An object's new storages are pending
# until commit() or rollback().
@final
class NumberedStorages:
    def __init__(self) -> None: ...
    # Like pickle_object(), with these numbers.  After a result of None, call rollback().
    def pickle(self, obj: object) -> bytes | None: ...
    # Numbers a storage at its first reference in the object, which is by `tensor`.
    def number(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor | None, dtype: torch.dtype
    ) -> int: ...
    # The bytes of the pending storages that have to be written.
    @property
    def fresh_nbytes(self) -> int: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    # Forgets all storages, so that later ones are written again.
    def forget(self) -> None: ...

# The beginning and the end of a pickle of a dict; parts between them add its entries.
DICT_HEAD: bytes
STOP: bytes

# Records that are written together, and copies of their storages in slabs of one size.
@final
class AppendBatch:
    def __init__(self, *, slab_nbytes: int) -> None: ...
    # Adds the pending storages, with their present values if `copy`, and a part of the pickle of a
    # dict.  With `copy`, returns the tensor_statistics of `measured` if its storage is the only
    # one.
    def add(
        self,
        storages: NumberedStorages,
        pickle: bytes,
        *,
        copy: bool,
        n_threads: int,
        measured: torch.Tensor | None = None,
    ) -> tuple[Any, ...] | None: ...
    # The number of calls of add().
    @property
    def n_groups(self) -> int: ...
    # The number of first groups that together have at most this many bytes.
    def n_groups_within(self, nbytes: int) -> int: ...
    @property
    def is_staged(self) -> bool: ...
    # Writes the first groups, at least one; returns offset and size of their pickle's parts.
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
    # Replaces release() in a forked child, which must not touch accelerators.
    def abandon(self) -> None: ...

# A temporary file that becomes an archive.  In a forked child only keep() may be called.
@final
class AppendedArchive:
    def __init__(self, path: bytes, display: bytes, *, root: str, alignment: int) -> None: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...
    def sync(self) -> None: ...
    def close(self, pickle: bytes, *, compute_crcs: bool, durable: bool) -> None: ...
    # Close the temporary file: keep() leaves it, discard() removes it.
    def keep(self) -> None: ...
    def discard(self) -> None: ...
    # The temporary file's name in the target's directory; b"" after close(), keep() or discard().
    @property
    def temporary_name(self) -> bytes: ...
    # The size of all written batches.
    @property
    def nbytes(self) -> int: ...

# The rest of an archive behind these records: (name, header offset, size, CRC, end).
def closing_bytes(
    root: str,
    alignment: int,
    records: Sequence[tuple[str, int, int, int, int]],
    pickle: bytes,
) -> bytes: ...

# The name at the end of `path`'s symbolic links; None for a link of /proc to an open file.
def resolve_links(path: bytes) -> bytes | None: ...

# Removes a file without waiting until its blocks are free; False if it does not exist.
def remove_file(path: bytes) -> bool: ...

# Closes a descriptor, maybe the last one of a removed file, without waiting for its file system.
def release_later(fd: int) -> None: ...

# Waits until the blocks of all replaced and removed files are free.
def finish_releases() -> None: ...

# Removes the temporary files that killed writers of `path` left.
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
    # From the central directory alone; Reader.payload_offset also reads the local header.
    @property
    def payload_offset(self) -> int: ...
    # The offset of the next record or the central directory.
    @property
    def limit(self) -> int: ...
    @property
    def stored_nbytes(self) -> int: ...
    @property
    def method(self) -> int: ...
    # Whether torch's reader takes the record as a directory and does not read it.
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
    def open_memory(buffer: Buffer, name: bytes) -> Reader: ...
    # Closes the file until lend_file() opens it again.  Neither may be called during a read.
    def close_file(self) -> None: ...
    def lend_file(self, fd: int, offset: int, *, direct: bool) -> None: ...
    # The open file's descriptor, which stays the reader's; -1 for memory or a closed file.
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
    # The names of all records outside the folder data/, which holds the storages.
    def other_names(self) -> list[str]: ...
    def find(self, name: str) -> int | None: ...
    def payload_offset(self, record: int) -> int: ...
    def read(self, record: int, *, verify: bool) -> bytes: ...
    # Reads records into targets in CPU memory or on accelerators that can_stage(); without
    # targets, only checks.  No record may occur twice.  Like read_ranges(), it does not affect
    # storages of other calls and is safe for concurrent use.  `progress` gets 0 ten times a second;
    # if it raises, the call ends.
    def read_records(
        self,
        records: list[int],
        targets: list[torch.Tensor],
        *,
        n_threads: int,
        verify: bool,
        max_pinned_nbytes: int,
        progress: Progress = None,
    ) -> list[DamagedRecord]: ...
    # Reads (offset, tensor) into contiguous tensors in CPU memory or on accelerators that
    # can_stage().  Parts for accelerators must not overlap.
    def read_ranges(
        self,
        ranges: Sequence[tuple[int, torch.Tensor]],
        *,
        n_threads: int,
        max_pinned_nbytes: int,
    ) -> None: ...
    # (number, name, payload offset, location) of each record.  The location is the saved location
    # of the storage if the engine's unpickler has used the storage, else None.
    def places(self) -> list[tuple[int, str, int, str | None]]: ...
    # Reads `records`, or all storages for None, in the background.
    def start(
        self, records: list[int] | None, *, n_threads: int, verify: bool, exact_offsets: bool
    ) -> None: ...
    # Places all storages without reading them, for plan_copy(), fill(), is_filled() and changed().
    def reserve(self) -> None: ...
    # Loads storages saved at `location` to `device`, the CPU or an accelerator that can_stage().
    def place(self, location: str, device: torch.device) -> None: ...
    def placed_storage(self, record: int, device: torch.device) -> torch.UntypedStorage: ...
    def plan_copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    # Makes the copies noted by plan_copy(), and reads `records` into their storages.
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
    # The records whose targets have changed or may have changed.
    def changed(self) -> list[int]: ...
    # The records whose storages are still referenced outside the reader; frees all others.
    def referenced(self) -> list[int]: ...
    def record_of(self, tensor: torch.Tensor) -> int | None: ...
    def records_of(self, tensors: list[torch.Tensor]) -> list[int | None]: ...
    def wait(self, record: int, *, progress: Progress) -> None: ...
    def wait_all(self, *, progress: Progress) -> list[DamagedRecord]: ...
    def storage(self, record: int) -> torch.Tensor: ...
    def release_storages(self) -> None: ...
    def read_at(self, offset: int, nbytes: int) -> bytes: ...
    def cancel(self) -> None: ...

# The bytes at an archive's end that find_central_directory may need.
MAX_TAIL_NBYTES: int

# Offset and size of the central directory in an archive of `nbytes` bytes that ends with `tail`;
# `name` is the file's in errors.
def find_central_directory(tail: bytes, nbytes: int, name: bytes) -> tuple[int, int]: ...

# (dtype, shape, stride, offset in the storage, size, size of the storage) of each tensor; the last
# three are in bytes.  None for a tensor that is not strided.
def tensor_facts(
    tensors: list[torch.Tensor],
) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...], int, int, int] | None]: ...

# For each value, the index of the first value with the same shape, strides, dtype, layout, device
# and flags; -1 if its type is not in `types`.  With `pinned`, pinned memory is a flag.
def tensor_kinds(
    values: list[Any], types: tuple[type, ...], *, pinned: bool = False
) -> list[int]: ...

# Uninitialized contiguous tensors in CPU memory.
def empty_tensors(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> list[torch.Tensor]: ...

# The address of each tensor; 0 if it has no elements in memory, None for a subclass of Tensor.
def addresses(tensors: list[torch.Tensor]) -> list[int | None]: ...

# For each tensor, whether the contiguous bytes of its dtype can be read into it from a file.  It
# must be of exactly torch's own types, contiguous, and in CPU memory or on an accelerator that
# can_stage().
def take_bytes(tensors: list[torch.Tensor], dtypes: list[torch.dtype]) -> list[bool]: ...

# Whether no two tensors can overlap in memory.
def are_apart(tensors: list[torch.Tensor]) -> bool: ...

# Whether `target.copy_(source)` copies numbers and can neither fail nor warn.  Both must be of
# exactly torch's own types, strided, of one shape and on real devices.
def copies_plainly(target: Any, source: Any) -> bool: ...

# Copies pairs (target, source) that copy plainly, from `begin` on, as `copy_` does under no_grad.
# Returns the index of the first pair that torch has to copy, because it is large or has two types.
def copy_small(pairs: list[tuple[torch.Tensor, torch.Tensor]], begin: int) -> int: ...

# Makes instances with these attributes, without calling the class's initializer.  A list has one
# value for each instance, any other object is the value of all.
def instances(kind: type[_T], attributes: dict[str, Any]) -> list[_T]: ...

# Packs columns row by row: bytes unchanged, an int as 32 bits, a str as its size in 32 bits, then
# UTF-8.  Columns are as for instances().
def packed_rows(columns: tuple[Any, ...]) -> bytes: ...

# mapped_nbytes is the pool's address space, used_nbytes the used part; n_mappings counts mappings.
def staging_statistics() -> dict[str, int]: ...
def trim_staging_pool() -> None: ...

# Makes the pool's free memory present for later saves, on a thread of low priority.
def populate_staging_pool(*, progress: Progress) -> None: ...

# Returns torch's free page-locked memory to the system, if ptsave has used any.
def release_pinned_memory() -> None: ...
def crc32(data: Buffer, crc: int = 0) -> int: ...
def payload_offset_after(
    header_offset: int, full_name: str, nbytes: int, alignment: int
) -> int: ...
def rebuilds_blindly(pickle: bytes, dtypes: set[str], opaque: set[str] = ...) -> bool: ...

# The reason to refuse a pickle of any protocol: it is truncated, or would make Python's unpickler
# allocate more memory than its bytes justify.  None if there is no reason.
def unjustified_claim(pickle: bytes) -> str | None: ...

# None if only Python's pickler can write the object or raise the right error.
def pickle_object(obj: object) -> tuple[bytes, StorageList] | None: ...

# Storages with addresses but without memory, which stand for bytes elsewhere.
def unfilled_storages(sizes: Sequence[int]) -> StorageList: ...
def untyped_storages(storages: StorageList) -> list[torch.UntypedStorage]: ...
def unpickle_weights_only(
    pickle: bytes,
    persistent_load: Callable[[Any], Any],
    *,
    encoding: str,
    storages: StorageSource | None,
    unpickler_type: Any = None,  # a subclass of torch's that allows more
) -> Any: ...

# The files of one load: (descriptor, which stays the caller's, name).  Safe for concurrent use.
class RangeFiles:
    def __init__(
        self, files: Sequence[tuple[int, bytes]], *, direct: bool, n_threads: int
    ) -> None: ...
    # Reads (number of the file, offset, tensor) into contiguous tensors in CPU memory or on
    # accelerators that can_stage().  Neither a file's ranges nor the tensors may overlap.  Gaps of
    # up to max_gap bytes may be read.  Returns (number of the file, offset) of each range that does
    # not have its CRC-32 in crcs; None is not compared.
    def read(
        self,
        ranges: Sequence[tuple[int, int, torch.Tensor]],
        *,
        crcs: Sequence[int | None] = (),
        n_threads: int,
        max_pinned_nbytes: int,
        max_gap: int = ...,
        progress: Progress,
    ) -> list[tuple[int, int]]: ...

# The CRC-32 of a contiguous tensor in CPU memory.
def crc32_of(tensor: torch.Tensor, *, n_threads: int) -> int: ...

# Copies (source, target): contiguous CPU tensors to contiguous tensors of the same size on
# accelerators that can_stage().  Sources must not overlap.
def copy_to_devices(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    n_threads: int,
    max_pinned_nbytes: int,
) -> None: ...

# For fewer bytes, copy_to_devices() costs more than it saves.
MIN_PINNED_NBYTES: int

# Whether the CPU and all accelerators convert all values of a dtype alike.  They do not from
# floating point to integers, because values that do not fit have no defined result.
def convert_alike(source: torch.dtype, target: torch.dtype) -> bool: ...

# Map a part of a file as a uint8 tensor; its bytes are read on access. map_cached_range() returns
# None unless the page cache holds the whole part.
def map_range(fd: int, name: bytes, *, offset: int, nbytes: int) -> torch.Tensor: ...
def map_cached_range(fd: int, name: bytes, *, offset: int, nbytes: int) -> torch.Tensor | None: ...

# Whether a file is on a network file system or on FUSE.
def is_remote(fd: int, name: bytes) -> bool: ...

# Replaces the memory of a mapped tensor's storage by a copy at the same address.
def detach_from_file(storage: torch.UntypedStorage, name: bytes) -> None: ...

# A CPU storage in its own memory, with huge pages if possible.
def huge_page_storage(nbytes: int) -> torch.UntypedStorage: ...

# A CPU storage for copies from or to `device`; None if the system refuses to lock memory.
def page_locked_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage | None: ...

# The number of references to the storage in C++, including its Python object's.
def storage_use_count(storage: torch.UntypedStorage) -> int: ...

# The fields of capturing.schema.Statistics for a contiguous CPU tensor; None without numbers.
def tensor_statistics(tensor: torch.Tensor, n_threads: int = 1) -> tuple[Any, ...] | None: ...

# The counts and sizes of capturing.comparison.TensorDifference; None if a tensor has no numbers.
def tensor_difference(
    a: torch.Tensor, b: torch.Tensor, rtol: float = 0.0, atol: float = 0.0, n_threads: int = 1
) -> dict[str, Any] | None: ...

# A patch is a u32 count, as many u32 positions in ascending order, and as many bytes.  A change of
# a tensor is a patch, or new contents of the same size as the tensor's.  Tensors are contiguous, on
# the CPU.

# The patch that changes the bytes of `before` to those of `after`, at most MAX_PATCHED_NBYTES.
# `digest` takes all of `after`, unless nothing has changed.
def find_changes(
    before: torch.Tensor, after: torch.Tensor, digest: Xxh3 | None = None
) -> torch.Tensor: ...

MAX_PATCHED_NBYTES: int

# Raises ValueError unless the positions ascend and are less than `nbytes`.
def check_patch(patch: bytes, nbytes: int) -> None: ...

# The patch that has the effect of two patches, which `check_patch` has accepted.
def merge_patches(older: bytes | torch.Tensor, newer: bytes | torch.Tensor) -> torch.Tensor: ...

# The change that undoes a change; `source` has the old bytes.
def inverse(data: bytes | torch.Tensor, source: torch.Tensor) -> torch.Tensor: ...

# Makes changes (data, target, digest).  The digest takes the new bytes.  Signal handlers run
# afterwards.
def apply_changes(
    changes: Sequence[tuple[bytes | torch.Tensor, torch.Tensor, Xxh3 | None]], *, n_threads: int
) -> None: ...

# Copies the bytes of `source` from `begin` on to all of `target`.  Then applies steps
# (bytes, is_xor) to the copy: patches of `source`, or bytes to combine with those of `target`.
def patched_copy(
    source: torch.Tensor,
    begin: int,
    target: torch.Tensor,
    steps: Sequence[tuple[bytes | torch.Tensor, bool]],
) -> None: ...
