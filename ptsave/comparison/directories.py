"""Pairs everything in two directories, so that a comparison leaves nothing out."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field

from ptsave import _core
from ptsave.contents.checkpoint_files import CheckpointFiles, look_into, named_checkpoints
from ptsave.contents.shard_files import ShardFiles
from ptsave.sources.opening import Folder, open_folder_or_file

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True)
class FilePair:
    """Two checkpoints, or two other files, of one name."""

    name: str  # relative to the directories; "" for the model, or for an only checkpoint
    a: ShardFiles
    b: ShardFiles
    are_checkpoints: bool  # both begin as checkpoints do

    def same_bytes(self) -> bool:
        """Whether both are single files with the same bytes."""
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
    """The files that two directories share, and the names that only one of them has."""

    pairs: list[FilePair] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # damaged or missing files


def pairs_in(a: Folder, b: Folder, prefix: str = "") -> FilePairs:
    """Return the pairs of two directories and their subdirectories; names begin with `prefix`."""
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
    """Return the files that are no checkpoints and are not being written."""
    return {
        name: ShardFiles([folder.join(name)], storage_options=folder.storage_options)
        for name in found.ignored
        if not _core.target_of_temporary(os.fsencode(name))
    }


def _folder_in(folder: Folder, name: str) -> Folder:
    found = open_folder_or_file(folder.join(name), folder.storage_options)
    assert isinstance(found, Folder)
    return found
