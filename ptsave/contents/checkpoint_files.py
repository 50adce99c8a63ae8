"""Finds the checkpoints in a directory by content: sets of shards, single files, other files."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from ptsave import _C
from ptsave.contents.shard_files import (
    INDEX_SUFFIX,
    ShardFiles,
    directory_error,
    find_shards,
    numbered_sets,
)
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    is_known,
    is_legacy,
    is_safetensors,
    regular_only,
    what_came_instead,
    what_it_is,
)
from ptsave.tree.flat import some_of

__all__ = ["CheckpointFiles", "checkpoint_files"]

_INDEX = re.compile(r"(?P<single>.*\.(?:safetensors|bin|pth?|ckpt))" + re.escape(INDEX_SUFFIX))
# A file of such a name that is no checkpoint is a damaged one.
_PROMISING = re.compile(r".*\.(?:safetensors|pth?|ckpt)", re.I)
# Other programs have files of this suffix, too: these names are those of transformers, accelerate,
# peft and diffusers.
_PROMISING_BIN = re.compile(
    r"(?:.*[_-])?(?:model|optimizer|scheduler|training_args|sampler|scaler|weights|dl_state_dict)"
    r"(?:[_-].*)?\.bin"
)


@dataclass
class CheckpointFiles:
    """The checkpoints and other files in a directory.

    Attributes
    ----------
    path : str
        The directory.
    sets : list of ShardFiles
        The checkpoints, in the order of their names: the shards of one model together, with their
        index, every other file by itself.
    problems : list of str
        Problems of the directory: shards that are missing, damaged indices, files that are
        named like checkpoints and are none.
    ignored : dict of str to str
        Names of the other files, and their formats, as far as these are known.
    directories : list of str
        Names of the subdirectories, which are not looked into.
    """

    path: str
    sets: list[ShardFiles] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)


def checkpoint_files(path: str) -> CheckpointFiles:
    """Return which checkpoints are in a directory; it is not recursive.

    Raises
    ------
    OSError
        If it cannot be read, holds no checkpoint, or is a distributed one.
    """
    entries = sorted(os.listdir(path))
    if ".metadata" in entries:
        raise directory_error(path, path)
    found = CheckpointFiles(path)
    names = _sort_by_content(found, entries)
    for index in list(filter(_INDEX.fullmatch, found.ignored)):
        _add_indexed(found, index, names)
    for numbered in numbered_sets(names):
        if numbered.single in names:
            continue  # which is the model, and these are files of their own
        found.sets.append(_shards(path, numbered.names))
        if numbered.missing and not found.problems:  # an index may have said so
            found.problems.append(
                f"{os.path.join(path, numbered.missing)}: a shard is missing: there is "
                f"{numbered.names[0]}, but not this one of its set"
            )
        names.difference_update(numbered.names)
    found.sets += [_shards(path, [name]) for name in names]
    found.sets.sort(key=lambda files: files.paths)
    if not found.sets and not found.problems:
        raise FileNotFoundError(
            errno.ENOENT, f"no checkpoint in this directory{_rest(found)}", path
        )
    return found


def _rest(found: CheckpointFiles) -> str:
    """Name the subdirectories, in which there could be a checkpoint after all."""
    if not found.directories:
        return ""
    return f", whose subdirectories ({some_of(found.directories, 3)}) are not looked into"


def _shards(directory: str, names: Iterable[str]) -> ShardFiles:
    return ShardFiles([os.path.join(directory, name) for name in sorted(names)])


def _sort_by_content(found: CheckpointFiles, entries: list[str]) -> set[str]:
    """Return the names of checkpoints; note the formats of the other entries."""
    names: set[str] = set()
    for name in entries:
        path = os.path.join(found.path, name)
        if os.path.isdir(path):
            found.directories.append(name)
        elif (what := _what_else(path, name)) is None:
            names.add(name)
        elif what.is_damage:
            found.problems.append(f"{path} is no checkpoint: {what.text}")
        else:
            found.ignored[name] = what.text
    return names


@dataclass(frozen=True)
class _Else:
    text: str
    is_damage: bool = False


def _what_else(path: str, name: str) -> _Else | None:
    """Return the format of a file that is no checkpoint; None for a checkpoint."""
    is_promising = bool(_PROMISING.fullmatch(name) or _PROMISING_BIN.fullmatch(name))
    if _C.target_of_temporary(os.fsencode(name)):
        return _Else("a save that has not ended")
    if not os.path.exists(path):
        return _Else("it is a link that leads nowhere", is_promising)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return _Else("no regular file")
        with open(path, "rb", buffering=0, opener=regular_only) as stream:
            head, nbytes = stream.read(HEAD_NBYTES), os.fstat(stream.fileno()).st_size
    except OSError:
        return None  # which is said when it is verified
    what = None if is_legacy(head) or is_safetensors(head, nbytes) else what_it_is(head, nbytes)
    if what is None:
        return None
    is_something_else = what_came_instead(head, nbytes) is None and is_known(head)
    if is_promising and not is_something_else:
        return _Else(what, is_damage=True)
    return _Else(what.partition(":")[0].removeprefix("it is ") if is_something_else else "")


def _add_indexed(found: CheckpointFiles, index: str, names: set[str]) -> None:
    """Add the set of an index, unless the model is there in one file, which readers prefer."""
    match = _INDEX.fullmatch(index)
    assert match is not None
    if match["single"] in names:
        found.ignored[index] = f"not used: {match['single']} is there"
        return
    del found.ignored[index]
    try:
        files = find_shards(os.path.join(found.path, index))
    except FileNotFoundError as error:
        found.problems.append(f"{error.filename}: {error.strerror}")
        return
    except CorruptCheckpointError as error:
        found.problems.append(str(error))
        return
    shards = {os.path.basename(path) for path in files.paths}
    # A file that is no checkpoint has been named already.
    paths = [path for path in files.paths if os.path.basename(path) in names]
    weight_map = {name: path for name, path in (files.weight_map or {}).items() if path in paths}
    found.sets.append(ShardFiles(paths, weight_map, files.index_path))
    names.difference_update(shards)
