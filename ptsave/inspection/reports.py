"""Lists files without their tensors' values, and verifies undamaged files, both without torch.

Files that are not plain are listed with torch; `verification` examines damaged files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ptsave import _core
from ptsave.contents.captures import with_short_records
from ptsave.contents.files import ShardFiles
from ptsave.contents.outline import Outline, outline_of
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import LocalFile
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection
from ptsave.tree.tree import EntryTree, entry_not_found

if TYPE_CHECKING:
    from ptsave.contents.contents import ChunkInfo, Contents, Facts, Place

NO_CHECKSUMS = (
    "a safetensors file has no checksums: header and sizes are right, values were not checked"
)
_READ_AT_ONCE_NBYTES = 512 << 20  # between two updates of a progress bar


@dataclass(frozen=True)
class Totals:
    """Sums over the tensors of files; sizes in bytes."""

    n_tensors: int = 0
    tensor_nbytes: int = 0  # of the elements
    n_storages: int = 0  # a storage that tensors share counts once
    storage_nbytes: int = 0
    unused_nbytes: int = 0  # bytes of storages that are certainly in no tensor
    file_nbytes: int = 0

    def __add__(self, other: Totals) -> Totals:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Totals(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class FileListing:
    """The contents of one file; facts, places, sharing and chunks are indexed by tensor number."""

    path: str
    kind: str  # "pt", "safetensors", ...
    metadata: dict[str, str]  # as `Archive.metadata`
    tree: EntryTree  # the tensors have no values
    facts: list[Facts]
    places: list[Place]
    sharing: dict[int, list[int]] = field(repr=False)  # numbers of all tensors with that storage
    totals: Totals
    # Parts of the tensors of a distributed checkpoint.
    chunks: dict[int, Sequence[ChunkInfo]] = field(default_factory=dict, repr=False)


def list_files(files: ShardFiles, *, recover: bool = False) -> Iterator[FileListing]:
    """Yield a listing of each file, without torch for plain ones; the files may be inconsistent."""
    for path in files.paths:
        source = files.open_one(path)
        with pausing_garbage_collection():
            outlined = None if recover else outline_of(source)
            if outlined is not None:
                source.close()
                yield listing_of(outlined)
                continue
            from ptsave.contents.opening import OpenOptions, open_one  # imports torch

            yield listing_of(open_one(source, files, OpenOptions(recover=recover)))


def listing_of(contents: Contents | Outline) -> FileListing:
    """Return the listing of an open file."""
    tree = EntryTree(with_short_records(contents.obj, contents.path))
    chunks: dict[int, Sequence[ChunkInfo]] = {}
    if isinstance(contents, Outline):
        facts = contents.facts_of(tree.tensors)
    else:
        from ptsave.contents.contents import facts_of  # imports torch

        facts = facts_of(tree.tensors)
        if contents.kind == "dcp":
            found_chunks = map(contents.chunks_of, tree.tensors)
            chunks = {number: found for number, found in enumerate(found_chunks) if found}
    places = contents.places_of(tree.tensors)
    groups = _groups_of([place[0] for place in places])
    sharing = {number: group for group in groups.values() for number in group}
    firsts = facts  # the first tensor of each storage
    if sharing:
        firsts = [f for i, f in enumerate(facts) if sharing.get(i, (i,))[0] == i]
    sizes = [found[5] for found in firsts]
    unused = sum(
        [size - found[4] for found, size in zip(firsts, sizes, strict=True) if size > found[4]]
    )
    for first, group in groups.items():
        _, _, _, _, nbytes, size = facts[first]
        used = _used_nbytes({facts[number] for number in group}, size)
        unused -= used - min(nbytes, size)
    totals = Totals(
        len(facts),
        sum([found[4] for found in facts]),
        len(firsts),
        sum(sizes),
        unused,
        contents.nbytes,
    )
    return FileListing(
        contents.path,
        contents.kind,
        contents.metadata,
        tree,
        facts,
        places,
        sharing,
        totals,
        chunks,
    )


def _groups_of(storages: list[object]) -> dict[int, list[int]]:
    """Return groups of tensors that share a storage, by the number of the first tensor."""
    groups: dict[int, list[int]] = {}
    if len(set(storages)) == len(storages):
        return groups
    first_of: dict[object, int] = {}
    for number, storage in enumerate(storages):
        first = first_of.setdefault(storage, number)
        if first != number:
            groups.setdefault(first, [first]).append(number)
    return groups


def totals_of(listing: FileListing, numbers: Sequence[int]) -> Totals:
    """Return the sums over the tensors of some nodes; `unused_nbytes` is 0 for a part of a file."""
    nodes, facts, sharing = listing.tree.nodes, listing.facts, listing.sharing
    tensors = [nodes[number].tensor for number in numbers if nodes[number].tensor >= 0]
    if len(tensors) == len(facts):
        return listing.totals
    storages = {sharing[i][0] if i in sharing else i for i in tensors}
    return Totals(
        len(tensors),
        sum([facts[i][4] for i in tensors]),
        len(storages),
        sum([facts[i][5] for i in storages]),
        0,
        listing.totals.file_nbytes,
    )


def _used_nbytes(views: set[Facts], storage_nbytes: int) -> int:
    """Return an upper bound of the bytes of a storage that some views use."""
    nbytes = end = 0
    for _, shape, stride, begin, view_nbytes, _ in sorted(views, key=lambda view: view[3]):
        n_elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=False))
        if math.prod(shape) == n_elements:  # without gaps: common bytes count once
            nbytes += max(begin + view_nbytes - max(begin, end), 0)
            end = max(end, begin + view_nbytes)
        else:
            nbytes += view_nbytes
    return min(nbytes, storage_nbytes)


def select(listings: Sequence[FileListing], patterns: Sequence[str]) -> list[list[int]]:
    """Return each file's matching node numbers; raise KeyError if a pattern matches nothing."""
    if not patterns:
        return [[*range(len(listing.tree.nodes))] for listing in listings]
    for pattern in patterns:
        if not any(listing.tree.select([pattern]) for listing in listings):
            names = [node.name for listing in listings for node in listing.tree.nodes]
            raise entry_not_found(" ".join(each.path for each in listings), pattern, names)
    return [listing.tree.select(patterns) for listing in listings]


# ------------------------------------------------------------------------------------ verification


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
    is_unfinished: bool = False  # the file has no end; its recoverable part was verified


def compare_with_index(files: ShardFiles, shards: list[Verification]) -> list[Problem]:
    """Return the problems between shards: tensors in two files, or not in the indexed one."""
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
    """Verify an undamaged, plain local archive or safetensors file, as `verify_file` does.

    Returns None for any other file: examining a damaged file needs torch.
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
    limits = archive.limits()  # the offset where each record ends
    begin = done = 0
    for end, limit in enumerate(limits, 1):
        if limit - done < _READ_AT_ONCE_NBYTES and end < len(limits):
            continue
        if not archive.are_whole(begin, end, n_threads=n_threads):
            return False
        if progress is not None:
            progress(limit)
        begin, done = end, limit
    return True
