"""The directory of a checkpoint: where it may be, its files, and how new ones replace old ones.

A save writes files with new names, replaces ``.metadata`` by one rename, and only then removes
files that it no longer names.  So a reader finds either the old checkpoint or the new one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ptsave.dcp.metadata import dump_metadata, load_metadata, metadata_name
from ptsave.errors import CorruptCheckpointError, SaveError, UnsupportedUrlError
from ptsave.sources.locations import LocalFolder, is_url, is_url_source, options_of, with_path
from ptsave.sources.ranges import FsspecFile

_SUFFIX = ".distcp"
# ptsave's __<rank>_<16 hex digits>.distcp, and FileSystemWriter's __<rank>_<number>.distcp.
_RANK_FILE = re.compile(r"__(?P<rank>\d+)_([0-9a-f]{16}|\d+)\.distcp")
_RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")


class CheckpointDirectory(LocalFolder):
    """The local directory of one checkpoint."""

    def has_checkpoint(self, rank: int | None) -> bool:
        """Return whether there is metadata of all ranks, or of a rank that saves by itself."""
        return self.is_taken(metadata_name(rank))

    def new_name(self, rank: int) -> str:
        """Return a name for a rank's file that no save has had."""
        return f"__{rank}_{secrets.token_hex(8)}{_SUFFIX}"

    def publish(
        self, metadata: Metadata, sizes: dict[str, int], rank: int | None, *, fsync: bool
    ) -> None:
        """Make a set of files the checkpoint, and remove the previous one.

        `sizes` has the bytes of each file that the metadata names.  `rank` saves by itself; None is
        a save of all ranks.  If another save has removed some of the files, this is a SaveError,
        and the old checkpoint stays.
        """
        from ptsave.streaming.streamed_files import write_bytes

        data = dump_metadata(metadata)
        with self.locked(wait=True):
            self._require(sizes)
            name = metadata_name(rank)
            write_bytes(self.file(name), data, fsync=fsync)
            if fsync:
                self.sync()
            self._remove_others(set(sizes), rank)

    def remove_unnamed(self, names: Iterable[str], rank: int) -> None:
        """Remove files that a rank has written, unless metadata names them."""
        there = [name for name in names if self.is_taken(name)]
        if not there:
            return
        with self.locked(wait=True):
            metadata = [*map(self.bytes_of, (metadata_name(None), metadata_name(rank)))]
            for name in there:
                if not any(name.encode() in data for data in metadata):
                    self.remove(name)

    def _require(self, sizes: dict[str, int]) -> None:
        for name, nbytes in sizes.items():
            path = self.file(name)
            try:
                found = os.stat(path).st_size
            except FileNotFoundError:
                found = -1
            if found != nbytes:
                raise SaveError(
                    5,
                    "another save to this directory has replaced the checkpoint meanwhile, and "
                    "removed this file, or the rank that wrote it has another directory at this "
                    "path: all ranks have to save to one that they share"
                    if found < 0
                    else "the file has changed its size",
                    path,
                )

    def _remove_others(self, kept: set[str], rank: int | None) -> None:
        """Remove the files of older checkpoints and of killed saves."""
        names = self.files()
        kept = kept | self._named_by_ranks(names, rank)
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None or name in kept or rank not in (None, int(match["rank"])):
                continue
            self.remove(name)
        self.remove_leftovers(lambda name: _RANK_FILE.fullmatch(name) is not None)

    def _named_by_ranks(self, names: list[str], rank: int | None) -> set[str]:
        """Return the files that other metadata in the directory names."""
        named: set[str] = set()
        for name in names:
            match = _RANK_METADATA.fullmatch(name)
            if match is not None and int(match["rank"]) == rank:
                continue  # it has just been written
            if match is None and (name != metadata_name(None) or rank is None):
                continue
            try:
                infos = load_metadata(self.file(name)).storage_data.values()
                named |= {info.relative_path for info in infos}
            except (OSError, CorruptCheckpointError, AttributeError):
                # Its names are unknown, so no file that it might name is removed.
                pattern = rf"__{match['rank']}_.*" if match is not None else r"__.*"
                named |= {each for each in names if re.fullmatch(pattern, each)}
        return named


# ---------------------------------------------------- where a checkpoint may be: URLs for loads


def directory_name(path: str | os.PathLike[str]) -> str:
    """Return a path as text; an empty path is the current directory, as in torch's classes.

    >>> directory_name(""), directory_name("checkpoint/")
    ('.', 'checkpoint/')
    """
    return os.fsdecode(path) or os.curdir


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the directory that `path` names; a URL is an UnsupportedUrlError."""
    name = directory_name(path)
    if isinstance(path, str) and is_url(name):
        raise UnsupportedUrlError.of(name)
    return name


def remote_metadata(
    path: str | os.PathLike[str], name: str, storage_options: Mapping[str, Any] | None
) -> FsspecFile | None:
    """Open the metadata of a checkpoint at a URL; return None for a local directory."""
    if not (isinstance(path, str) and is_url_source(path, storage_options)):
        return None
    url = with_path(path, lambda directory: os.path.join(directory, name))
    return FsspecFile(url, options_of(storage_options))


def accepts(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint can be at `checkpoint_id`, by the rules of FileSystemWriter."""
    if not isinstance(checkpoint_id, str):
        return isinstance(checkpoint_id, os.PathLike)
    if is_url(checkpoint_id):
        return False
    parent = os.path.dirname(os.path.abspath(checkpoint_id))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK)
