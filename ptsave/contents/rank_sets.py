"""Recognises the files that the ranks of a job have saved: DCP's, and sets with a file per rank.

The files of a set do not say how the parts of a tensor belong together.  So each rank's object is
an entry of its own, ``rank0``, ``rank1``, ..., or ``model.rank0`` if the file names give an item.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from ptsave.contents.shard_files import ShardFiles, is_parallel_part, is_zero_file
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.kinds import is_dcp
from ptsave.sources.opening import Folder, open_source
from ptsave.sources.ranges import FsspecFile, LocalFile, RangeSource
from ptsave.support.text import some_of

_METADATA = ".metadata"
# Patterns take time to compile, so only names with this beginning are matched.
_OF_RANK = "__"
_RANK_METADATA = r"__\d+\.metadata"
_SUFFIX = ".distcp"
_RANK_FILE = r"__\d+_(?:[0-9a-f]{16}|\d+)\.distcp"


def is_rank_file(name: str) -> bool:
    """Whether a file name is that of a file of torch.distributed.checkpoint."""
    return name.endswith(_SUFFIX) or name == _METADATA or _is_rank_metadata(name)


def _is_rank_metadata(name: str) -> bool:
    return name.startswith(_OF_RANK) and re.fullmatch(_RANK_METADATA, name) is not None


def is_metadata(source: RangeSource) -> bool:
    """Whether a file is the metadata of a DCP checkpoint, by its content or its name."""
    name = os.path.basename(source.name)
    return source.kind == "dcp" or name == _METADATA or _is_rank_metadata(name)


def require_files_beside(source: RangeSource) -> None:
    """Raise UnsupportedSourceError for DCP metadata without a directory, as in a file object."""
    if not isinstance(source, (LocalFile, FsspecFile)):
        raise UnsupportedSourceError(
            f"{source.name} is the metadata of a distributed checkpoint, whose other files lie "
            "beside it: pass its path or URL, or those of its directory"
        )


def refuse_file_of_rank(source: RangeSource) -> None:
    """Raise UnsupportedSourceError for the file of one rank, whose archives lie end to end."""
    folder, name = os.path.split(source.name)
    if name.startswith(_OF_RANK) and re.fullmatch(_RANK_FILE, name):
        raise UnsupportedSourceError(
            f"{source.name} is what one rank has saved of a distributed checkpoint, which only the "
            f"metadata beside it describes: pass the directory, {folder or os.curdir}"
        )


def nbytes_of_ranks(path: str) -> int:
    """Return the size of all files that local metadata may describe; 0 for another file."""
    folder, name = os.path.split(path)
    if name != _METADATA and not _is_rank_metadata(name):
        return 0
    with os.scandir(folder or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX))


def find_metadata(folder: Folder, names: list[str]) -> list[str]:
    """Return the names of the metadata files in a DCP directory; none for other directories.

    There is one for all ranks, or else one for each rank that has saved by itself.  Files of ranks
    without metadata are a FileNotFoundError.
    """
    has_files = any(name.endswith(_SUFFIX) for name in names)
    if _METADATA in names and (has_files or _is_metadata(folder, _METADATA)):
        return [_METADATA]
    found = [name for name in names if _is_rank_metadata(name)]
    if found and (has_files or all(_is_metadata(folder, name) for name in found)):
        return found
    if has_files:
        raise FileNotFoundError(
            errno.ENOENT,
            "there are files of a distributed checkpoint, and not the .metadata that says what is "
            "in them: its save has not ended, or the file was not copied",
            folder.join(_METADATA),
        )
    return []


def _is_metadata(folder: Folder, name: str) -> bool:
    try:
        return is_dcp(open_source(folder.join(name), folder.storage_options).head)
    except OSError:  # a directory, say
        return False


def metadata_files(folder: Folder, names: list[str]) -> ShardFiles:
    """Return the only checkpoint in a directory; several names of metadata are a ValueError."""
    if len(names) > 1:
        raise ValueError(
            f"{folder.path} holds the checkpoints of {len(names)} ranks, each saved by itself: "
            f"pass the path of one ({some_of(names, 3)})"
        )
    paths = [folder.join(names[0])]
    return ShardFiles(paths, path=folder.path, storage_options=folder.storage_options)


# <item>_<rank>.pt, as torch_checkpointing names them.
_ITEM = r"(?P<item>.+)_(?P<rank>0|[1-9]\d{0,6})\.pt"
# Files of ptsave.AsyncCheckpointer: a step, one save of it, and a rank's part of the save.
_STEP = (
    r"(?P<save>step-(?P<step>\d+)\.(?P<session>[0-9a-f]{16})-(?P<count>\d{1,9}))"
    r"\.rank-(?P<rank>\d{1,9})-of-(?P<size>\d{1,9})\.pt"
)
_MAX_RANKS = 1 << 20
_Keys = tuple[str, ...]


def is_step(name: str) -> bool:
    """Whether a file name is that of a step of an AsyncCheckpointer of one process.

    >>> is_step("step-00000100.pt")
    True
    """
    return re.fullmatch(r"step-\d+\.pt", name) is not None


def is_step_of_rank(name: str) -> bool:
    """Whether a file name is that of a rank's part of a step of an AsyncCheckpointer.

    >>> is_step_of_rank("step-00000100.0123456789abcdef-0.rank-1-of-2.pt")
    True
    """
    return re.fullmatch(_STEP, name) is not None


def find_rank_set(folder: Folder, names: Iterable[str]) -> ShardFiles | None:
    """Return the files that ranks have written into a directory, or None.

    The newest complete step of an AsyncCheckpointer counts.  If there are only incomplete steps, or
    a rank's file of an item is missing, this is a FileNotFoundError.
    """
    names = list(names)
    sets = rank_sets(folder, names)
    if not sets and any(map(is_step_of_rank, names)):
        parts = [match for match in map(re.compile(_STEP).fullmatch, names) if match is not None]
        _refuse_missing(folder, max(parts, key=_order)[0])
    return sets[-1] if sets else None


def rank_sets(folder: Folder, names: Iterable[str]) -> list[ShardFiles]:
    """Return all complete sets of ranks' files in a directory, the newest last.

    A gap in the rank numbers of an item is a FileNotFoundError.
    """
    names = list(names)
    steps = _steps(folder, names)
    if steps or any(map(is_step_of_rank, names)):
        return steps
    items = [match for match in map(re.compile(_ITEM).fullmatch, names) if match is not None]
    others = [name for name in names if name.endswith(".pt") and not re.fullmatch(_ITEM, name)]
    ranks: dict[str, set[int]] = {}
    for match in items:
        ranks.setdefault(match["item"], set()).add(int(match["rank"]))
    is_set = ranks and all(0 in each for each in ranks.values()) and len(ranks) < len(items)
    if others or not is_set or any(map(is_zero_file, names)):
        return []
    for item, each in ranks.items():
        missing = next((rank for rank in range(max(each)) if rank not in each), None)
        if missing is not None:
            raise FileNotFoundError(
                errno.ENOENT,
                f"the file of rank {missing} is missing: there are those of {len(each)} others",
                folder.join(f"{item}_{missing}.pt"),
            )
    items.sort(key=lambda match: (match["item"], int(match["rank"])))
    keys: dict[str, _Keys] = {match[0]: (match["item"], f"rank{match['rank']}") for match in items}
    return [_files(folder, keys)]


def ranks_of_parts(files: ShardFiles) -> tuple[_Keys, ...] | None:
    """Return a key for each of ``consolidated.00.pth``, ``.01.pth``, ...; None for other files."""
    if files.weight_map is not None or not all(map(is_parallel_part, files.paths)):
        return None
    return tuple((f"rank{number}",) for number in range(len(files.paths)))


def _order(match: re.Match[str]) -> tuple[int, str, int]:
    return int(match["step"]), match["session"], int(match["count"])


def _steps(folder: Folder, names: list[str]) -> list[ShardFiles]:
    saves: dict[tuple[int, str, int], dict[int, str]] = {}
    sizes: dict[tuple[int, str, int], int] = {}
    for match in filter(None, map(re.compile(_STEP).fullmatch, names)):
        saves.setdefault(_order(match), {})[int(match["rank"])] = match[0]
        sizes[_order(match)] = int(match["size"])
    return [
        _files(folder, {parts[rank]: (f"rank{rank}",) for rank in sorted(parts)})
        for save, parts in sorted(saves.items())
        if sizes[save] <= _MAX_RANKS and set(parts) == set(range(sizes[save]))
    ]


def _refuse_missing(folder: Folder, name: str) -> None:
    match = re.fullmatch(_STEP, name)
    assert match is not None
    there = set(folder.names())
    size = min(int(match["size"]), _MAX_RANKS)
    parts = (f"{match['save']}.rank-{rank}-of-{match['size']}.pt" for rank in range(size))
    missing = next((part for part in parts if part not in there), name)
    raise FileNotFoundError(
        errno.ENOENT,
        f"a rank's part is missing: there is {name}, and no step has all of its parts",
        folder.join(missing),
    )


def _files(folder: Folder, keys: dict[str, _Keys]) -> ShardFiles:
    paths = [folder.join(name) for name in keys]
    return ShardFiles(
        paths,
        path=folder.path,
        storage_options=folder.storage_options,
        ranks=tuple(keys.values()),
    )
