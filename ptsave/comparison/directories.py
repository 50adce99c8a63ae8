"""Pairs all that is in two directories, so that a comparison leaves nothing out."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field

from ptsave import _core
from ptsave.contents.checkpoint_files import CheckpointFiles, look_into, named_checkpoints
from ptsave.contents.shard_files import ShardFiles
from ptsave.sources.opening import Folder, open_folder_or_file

__all__ = ["FilePair", "FilePairs", "pairs_in"]

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True)
class FilePair:
    """Two checkpoints, or two other files, of one name.

    Attributes
    ----------
    name : str
        The name, relative to the directories; ``""`` of the model, or of an only checkpoint.
    a, b : ShardFiles
        The files.
    are_checkpoints : bool
        Whether both begin as checkpoints do.
    """

    name: str
    a: ShardFiles
    b: ShardFiles
    are_checkpoints: bool

    def same_bytes(self) -> bool:
        """Compare two single files byte by byte."""
        paths = self.a.paths, self.b.paths
        if len(paths[0]) != 1 or len(paths[1]) != 1:
            return False
        with closing(self.a.open_one(paths[0][0])) as a, closing(self.b.open_one(paths[1][0])) as b:
            if a.nbytes != b.nbytes:
                return False
            with a.stream() as one, b.stream() as other:
                while piece := one.read(_CHUNK_NBYTES):
                    if piece != other.read(len(piece)):
                        return False
        return True


@dataclass
class FilePairs:
    """What two directories hold.

    Attributes
    ----------
    pairs : list of FilePair
        What both have.
    only_in_a, only_in_b : list of str
        Names of checkpoints, other files and directories that one of them has.
    problems : list of str
        What is damaged, or missing.
    """

    pairs: list[FilePair] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def pairs_in(a: Folder, b: Folder, prefix: str = "") -> FilePairs:
    """Return what two directories hold, and the directories in them; `prefix` is for all names.

    Raises
    ------
    OSError, CorruptCheckpointError, ValueError
        As from `find_files`.
    """
    sides = look_into(a, distributed=True), look_into(b, distributed=True)
    checkpoints = named_checkpoints(a, sides[0]), named_checkpoints(b, sides[1])
    files = _others_in(a, sides[0]) | checkpoints[0], _others_in(b, sides[1]) | checkpoints[1]
    found = FilePairs(problems=[*sides[0].problems, *sides[1].problems])
    for name in files[0].keys() & files[1].keys():
        are_checkpoints = name in checkpoints[0] and name in checkpoints[1]
        found.pairs.append(FilePair(prefix + name, files[0][name], files[1][name], are_checkpoints))
    found.pairs.sort(key=lambda pair: pair.name)
    names = {*files[0], *sides[0].directories}, {*files[1], *sides[1].directories}
    found.only_in_a = [prefix + name for name in sorted(names[0] - names[1])]
    found.only_in_b = [prefix + name for name in sorted(names[1] - names[0])]
    for name in sides[0].directories:
        if name in sides[1].directories:
            inner = pairs_in(_folder_in(a, name), _folder_in(b, name), f"{prefix}{name}/")
            for kind, values in vars(inner).items():
                getattr(found, kind).extend(values)
    return found


def _others_in(folder: Folder, found: CheckpointFiles) -> dict[str, ShardFiles]:
    """Return the files that are no checkpoints, nor being written."""
    return {
        name: ShardFiles([folder.join(name)], storage_options=folder.storage_options)
        for name in found.ignored
        if not _core.target_of_temporary(os.fsencode(name))
    }


def _folder_in(folder: Folder, name: str) -> Folder:
    found = open_folder_or_file(folder.join(name), folder.storage_options)
    assert isinstance(found, Folder)
    return found
