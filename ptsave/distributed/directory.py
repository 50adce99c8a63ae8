"""The directory of a checkpoint: names of its files, and how a new set replaces the old one.

A save writes files whose names nobody has used, then replaces ``.metadata`` by one rename, and only
then removes files that it no longer names.  So a reader finds the old checkpoint or the new one.
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

__all__ = ["CheckpointDirectory"]

_SUFFIX = ".distcp"
# Ours, __<rank>_<16 hex digits>.distcp, and those of FileSystemWriter, __<rank>_<number>.distcp.
_RANK_FILE = re.compile(r"__(?P<rank>\d+)_([0-9a-f]{16}|\d+)\.distcp")
_RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")


class CheckpointDirectory:
    """The local directory of one checkpoint.

    Parameters
    ----------
    path : str
        The directory.
    """

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
        """Return whether there is metadata: of all ranks, or of one that saves by itself."""
        return os.path.lexists(self.file(metadata_name(rank)))

    def new_name(self, rank: int) -> str:
        """Return a name for a rank's file that no save has had."""
        return f"__{rank}_{secrets.token_hex(8)}{_SUFFIX}"

    def publish(
        self, metadata: Metadata, sizes: dict[str, int], rank: int | None, *, fsync: bool
    ) -> None:
        """Make a set of files the checkpoint, and remove the one before.

        Parameters
        ----------
        metadata : Metadata
            The bytes to write.
        sizes : dict of str to int
            The files that it names, and the bytes of each.
        rank : int or None
            The rank that saves by itself; None for a save of all ranks.
        fsync : bool
            Whether all is on the disk when the call returns.

        Raises
        ------
        SaveError
            If the metadata cannot be written, or another save to the directory has removed some of
            the files; the old checkpoint is unchanged.
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
        """Remove files that a rank has written, as far as no metadata names them."""
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
        """Wait for other saves that are publishing here, where the file system knows locks."""
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
        """Return the files of ranks that have saved by themselves, and of the common checkpoint."""
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
                # Its names are not known: nothing that it might name is removed.
                pattern = rf"__{match['rank']}_.*" if match is not None else r"__.*"
                named |= {each for each in names if re.fullmatch(pattern, each)}
        return named
