"""What needs no torch.  Offsets count from the archive's beginning, sizes are in bytes."""

from typing import Any, NamedTuple, TypeAlias, final

# As of contents.contents, but for the dtype, which is its name.
Facts: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int, int, int]

# Stands for a tensor of a file; (number, record, offset, location) of its storage, None for an
# empty one.
class OutlinedTensor(NamedTuple):
    facts: Facts
    place: tuple[object, str | None, int | None, str | None] | None

# A `.pt` file that is only looked at.
@final
class Archive:
    @staticmethod
    def open_descriptor(fd: int, offset: int, name: bytes, *, direct: bool) -> Archive: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def all_stored(self) -> bool: ...
    # Whether every record can be compared with its checksum.
    @property
    def has_crcs(self) -> bool: ...
    @property
    def n_records(self) -> int: ...
    # None without a record of that name.
    def nbytes_of(self, name: str) -> int | None: ...
    # Compared with its checksum.
    def read(self, name: str) -> bytes: ...
    # (object,) of a pickle, with an OutlinedTensor for each tensor; None if torch must make it.
    def outline(self, pickle: bytes) -> tuple[Any] | None: ...
    # Compares records, by their numbers, with their checksums.
    def are_whole(self, begin: int, end: int, *, n_threads: int) -> bool: ...
    # Where the next record, or the central directory, begins behind each record.
    def limits(self) -> list[int]: ...

# The CRC-32 of each range (offset, nbytes) of a file.
def crcs_of_ranges(
    fd: int, name: bytes, ranges: list[tuple[int, int]], *, n_threads: int
) -> list[int]: ...

# The name of the file that a temporary file was to replace; b"" for any other directory entry.
def target_of_temporary(entry: bytes) -> bytes: ...
