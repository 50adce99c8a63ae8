"""Recognises directories of torch.distributed.checkpoint by the files in them."""

from __future__ import annotations

import errno
import os
import re

from ptsave.contents.shard_files import ShardFiles
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
