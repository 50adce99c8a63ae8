"""The results of verifying files; verifies whole files without torch, and checks sets of files.

`verification` judges all other files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptsave import _core
from ptsave.contents.files import ShardFiles
from ptsave.contents.outline import Outline, outline_of
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import LocalFile
from ptsave.support import config
from ptsave.support.calls import ProgressCallback
from ptsave.tree.tree import EntryTree

NO_CHECKSUMS = (
    "a safetensors file has no checksums: header and sizes are right, values were not checked"
)
_READ_AT_ONCE_NBYTES = 512 << 20  # between two updates of a progress bar


@dataclass(frozen=True)
class Problem:
    """A fault of a file or a directory, and the tensors that are known to be damaged by it.

    The fields are keys of ``ptsave verify --json``.
    """

    reason: str
    record: str | None = None
    offset: int | None = None  # in the file, in bytes
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """The result of verifying one file."""

    path: str
    problems: list[Problem]  # empty if every check succeeds
    remarks: list[str] = field(default_factory=list)  # checks that could not be made, and why
    n_records: int = 0  # 0 for a file that is no archive
    nbytes: int = 0
    tensors: list[str] | None = None  # names; None if they are unknown
    whole: list[str] | None = None  # names of the tensors that can still be read
    has_checksums: bool = True  # without checksums, damage to values may not show
    is_unfinished: bool = False  # it has no end, and the recoverable part was verified


def compare_with_index(files: ShardFiles, shards: list[Verification]) -> list[Problem]:
    """Return the problems between shards: tensors in two files, or not where the index says."""
    problems = []
    found: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors or []:
            other = found.setdefault(name, shard.path)
            if other != shard.path and files.weight_map is None and files.ranks is None:
                problems.append(Problem(f"{name} is in {other} and in {shard.path}"))
    readable = {shard.path: set(shard.tensors) for shard in shards if shard.tensors is not None}
    for name, path in (files.weight_map or {}).items():
        if path in readable and name not in readable[path]:
            problems.append(Problem(f"{name} is not in {path}, where the index puts it"))
    return problems


def whole_file(path: str, progress: ProgressCallback | None) -> Verification | None:
    """Return the result of `verify_file` for a plain local archive or safetensors file, if whole.

    None for any other file, also a damaged one: only torch can tell what is left of it.
    """
    if is_url(path):
        return None
    try:
        source = LocalFile.open(path)
    except OSError:
        return None
    try:
        outline = outline_of(source)
        return None if outline is None else _verified(outline, progress)
    except (OSError, CorruptCheckpointError):
        return None
    finally:
        source.close()


def _verified(outline: Outline, progress: ProgressCallback | None) -> Verification | None:
    tree = EntryTree(outline.obj)
    if not tree.is_whole:
        return None
    path, nbytes, archive = outline.path, outline.nbytes, outline.archive
    names = [name for name, _ in tree.named_tensors()]
    if outline.kind == "safetensors":
        return Verification(path, [], [NO_CHECKSUMS], 0, nbytes, names, names, has_checksums=False)
    if archive is None or not archive.has_crcs or not _is_whole(archive, progress):
        return None
    known = names or None
    return Verification(path, [], [], archive.n_records, nbytes, known, known)


def _is_whole(archive: _core.Archive, progress: ProgressCallback | None) -> bool:
    n_threads = config.current().n_readers
    for begin, end, limit in _batches(archive.limits()):
        if not archive.are_whole(begin, end, n_threads=n_threads):
            return False
        if progress is not None:
            progress(limit)
    return True


def _batches(limits: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of records, by their numbers, and the offset where each range ends."""
    begin = done = 0
    for end, limit in enumerate(limits, 1):
        if limit - done >= _READ_AT_ONCE_NBYTES or end == len(limits):
            yield begin, end, limit
            begin, done = end, limit
