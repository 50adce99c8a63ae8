"""The directory of a checkpoint: the names of its files, and how new files replace old ones.

A save writes files with new names, replaces ``.metadata`` by one rename, and only then removes
files that it no longer names.  So a reader finds either the old checkpoint or the new one.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed.checkpoint.metadata import Metadata

from ptsave.dcp.metadata import dump_metadata, load_metadata, metadata_name
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.streaming.streamed_files import write_bytes
from ptsave.support.syncing import sync_path
from ptsave.writing.folders import LocalFolder

_SUFFIX = ".distcp"
# ptsave's __<rank>_<16 hex digits>.distcp, and FileSystemWriter's __<rank>_<number>.distcp.
_RANK_FILE = re.compile(r"__(?P<rank>\d+)_([0-9a-f]{16}|\d+)\.distcp")
_RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")


class CheckpointDirectory:
    """The local directory of one checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = LocalFolder(path)

    def make(self) -> None:
        """Make the directory, with its parents."""
        os.makedirs(self.path, exist_ok=True)

    def file(self, name: str) -> str:
        """Return the path of a file in it."""
        return os.path.join(self.path, name)

    def has_checkpoint(self, rank: int | None) -> bool:
        """Return whether there is metadata of all ranks, or of a rank that saves by itself."""
        return os.path.lexists(self.file(metadata_name(rank)))

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
        data = dump_metadata(metadata)
        with self._alone():
            self._require(sizes)
            name = metadata_name(rank)
            write_bytes(self.file(name), data, fsync=fsync)
            if fsync:
                sync_path(self.path)
            self._remove_others(set(sizes), rank)

    def remove_unnamed(self, names: Iterable[str], rank: int) -> None:
        """Remove files that a rank has written, unless metadata names them."""
        there = [name for name in names if os.path.lexists(self.file(name))]
        if not there:
            return
        with self._alone():
            metadata = [*map(self._folder.bytes_of, (metadata_name(None), metadata_name(rank)))]
            for name in there:
                if not any(name.encode() in data for data in metadata):
                    self._folder.remove(name)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other saves that publish here, if the file system has locks."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

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
        names = self._folder.files()
        kept = kept | self._named_by_ranks(names, rank)
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None or name in kept or rank not in (None, int(match["rank"])):
                continue
            self._folder.remove(name)
        self._folder.remove_leftovers(lambda name: _RANK_FILE.fullmatch(name) is not None)

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
