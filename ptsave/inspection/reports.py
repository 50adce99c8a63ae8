"""Lists files without their tensors' values, and verifies undamaged files, both without torch.

Files that `outline_of` cannot read are listed with torch; `verification` examines damaged files.
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
from ptsave.contents.safetensors_fields import damaged_in
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import LocalFile
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection
from ptsave.tree.tree import EntryTree, entry_not_found

if TYPE_CHECKING:
    from ptsave.contents.contents import ChunkInfo, Contents, Facts, Place

NO_CHECKSUMS = (
    "a safetensors file has no checksums, unless ptsave has written it: header and sizes are "
    "right, but values were not checked"
)
_READ_AT_ONCE_NBYTES = 512 << 20  # bytes read from one update of the progress bar to the next


@dataclass(frozen=True)
class Totals:
    """Numbers and sizes (in bytes) of the tensors in files, summed up."""

    n_tensors: int = 0
    tensor_nbytes: int = 0  # of the tensors' elements
    n_storages: int = 0  # a storage that tensors share counts once
    storage_nbytes: int = 0
    unused_nbytes: int = 0  # a lower bound of the bytes in storages that no tensor uses
    file_nbytes: int = 0

    def __add__(self, other: Totals) -> Totals:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Totals(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class FileListing:
    """The contents of one file; keys of `sharing` and `chunks` are tensors' indices in `facts`."""

    path: str
    kind: str  # "pt", "safetensors", ...
    metadata: dict[str, str]  # as `Archive.metadata`
    tree: EntryTree  # the tensors have no values
    facts: list[Facts]
    places: list[Place]
    sharing: dict[int, list[int]] = field(repr=False)  # tensors that share a storage
    totals: Totals
    # Of a distributed checkpoint: the parts of each tensor.
    chunks: dict[int, Sequence[ChunkInfo]] = field(default_factory=dict, repr=False)


def list_files(files: ShardFiles, *, recover: bool = False) -> Iterator[FileListing]:
    """Yield a listing of each file; does not check that the files belong together."""
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
    """Return groups of tensors that share a storage; the key is the first tensor's number."""
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
    """Return totals of the nodes `numbers`; if a tensor is left out, `unused_nbytes` is 0."""
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
    """Return how many bytes of a storage the `views` use at most."""
    nbytes = end = 0
    for _, shape, stride, begin, view_nbytes, _ in sorted(views, key=lambda view: view[3]):
        n_elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=False))
        if math.prod(shape) == n_elements:  # has no gaps: shared bytes count once
            nbytes += max(begin + view_nbytes - max(begin, end), 0)
            end = max(end, begin + view_nbytes)
        else:
            nbytes += view_nbytes
    return min(nbytes, storage_nbytes)


def select(listings: Sequence[FileListing], patterns: Sequence[str]) -> list[list[int]]:
    """Return each file's nodes that match a pattern; raise KeyError for one without a match."""
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
    """A fault in a file or a directory, and the tensors that are known to be damaged.

    ``ptsave verify --json`` prints these fields under the same names.
    """

    reason: str
    record: str | None = None
    offset: int | None = None  # of the fault in the file, in bytes
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """The result of verifying one file."""

    path: str
    problems: list[Problem]  # empty if every check succeeds
    remarks: list[str] = field(default_factory=list)  # checks that could not be made, and why
    n_records: int = 0  # 0 for a file that is not an archive
    nbytes: int = 0
    tensors: list[str] | None = None  # names; None if they are unknown
    whole: list[str] | None = None  # names of the tensors that can still be read
    has_checksums: bool = True  # if not, damage to values may not be found
    is_unfinished: bool = False  # the file's end is missing; the rest was verified


def compare_with_index(files: ShardFiles, shards: list[Verification]) -> list[Problem]:
    """Return a problem for each tensor that is not where the index puts it, or is in two files."""
    problems = []
    found: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors or []:
            other = found.setdefault(name, shard.path)
            if other != shard.path and files.weight_map is None and files.ranks is None:
                problems.append(Problem(f"{name} is in two files, {other} and {shard.path}"))
    readable = {shard.path: set(shard.tensors) for shard in shards if shard.tensors is not None}
    for name, path in (files.weight_map or {}).items():
        if path in readable and name not in readable[path]:
            problems.append(Problem(f"{name} is not in {path}, where the index puts it"))
    return problems


def whole_file(path: str, progress: ProgressCallback | None) -> Verification | None:
    """Verify a local archive or safetensors file without torch; return None if this fails.

    It fails for a damaged file, and for other kinds of files; `verify_file` examines them.
    """
    if is_url(path):
        return None
    try:
        source = LocalFile.open(path)
    except OSError:
        return None
    try:
        outline = outline_of(source)
        return None if outline is None else _verified(outline, source, progress)
    except (OSError, CorruptCheckpointError):
        return None
    finally:
        source.close()


def _verified(
    outline: Outline, source: LocalFile, progress: ProgressCallback | None
) -> Verification | None:
    tree = EntryTree(outline.obj)
    if not tree.is_whole:
        return None
    path, nbytes, archive = outline.path, outline.nbytes, outline.archive
    names = [name for name, _ in tree.named_tensors()]
    if outline.checked is not None:
        is_whole = not damaged_in(source, outline.checked, progress)
        return Verification(path, [], [], 0, nbytes, names, names) if is_whole else None
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
