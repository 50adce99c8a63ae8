"""Finds the files of a checkpoint, and all checkpoints in a directory, by their content."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ptsave import _core
from ptsave.contents.rank_sets import (
    find_metadata,
    find_rank_set,
    is_metadata,
    is_rank_file,
    is_step,
    is_step_of_rank,
    metadata_files,
    rank_sets,
)
from ptsave.contents.shard_files import (
    INDEX_SUFFIX,
    ShardFiles,
    find_shards,
    is_index,
    numbered_sets,
    read_index,
)
from ptsave.errors import CorruptCheckpointError, NotCheckpointError, UnsupportedSourceError
from ptsave.sources.kinds import (
    is_gguf,
    is_known,
    is_legacy,
    is_safetensors,
    what_came_instead,
    what_it_is,
)
from ptsave.sources.local import describe
from ptsave.sources.opening import Folder, folder_of, open_folder_or_file, open_source
from ptsave.sources.ranges import RangeSource
from ptsave.support.text import some_of

_INDEX = r"(?P<single>.*\.(?:safetensors|bin|pth?|ckpt))" + re.escape(INDEX_SUFFIX)
# A file with such a name that is no checkpoint counts as damaged.
PROMISING = r"(?i).*\.(?:safetensors|pth?|ckpt)"
# Other programs use this suffix, too.  These are the names of transformers, accelerate, peft and
# diffusers.
_PROMISING_BIN = (
    r"(?:.*[_-])?(?:model|optimizer|scheduler|training_args|sampler|scaler|weights|dl_state_dict)"
    r"(?:[_-].*)?\.bin"
)


def find_files(
    f: Any, storage_options: Mapping[str, Any] | None = None, *, distributed: bool = False
) -> ShardFiles:
    """Return the files of the checkpoint at `f`, which may be anything that `open_source` takes.

    `f` may also be a directory or an index of shards.  With `distributed`, the caller can read
    checkpoints of torch.distributed.checkpoint, by their metadata, and sets of one file per rank.
    A directory whose names point to no model must hold only one checkpoint: several are a
    ValueError.
    """
    place = open_folder_or_file(f, storage_options)
    if distributed and isinstance(place, Folder):
        names = place.names()
        metadata = find_metadata(place, names)
        if metadata:
            return metadata_files(place, metadata)
        ranks = find_rank_set(place, names)
        if ranks is not None:
            return ranks
    return _files_of(place, f, storage_options or {})


def _files_of(
    place: Folder | RangeSource, f: Any, storage_options: Mapping[str, Any]
) -> ShardFiles:
    if isinstance(place, Folder):
        path, files = place.path, find_shards(place) or _only_checkpoint_in(place)
    else:
        path = place.name
        try:
            files = _files_at(place, f, storage_options)
        except BaseException:
            place.close()
            raise
    return files._replace(path=path, storage_options=storage_options)


def _files_at(place: RangeSource, f: Any, storage_options: Mapping[str, Any]) -> ShardFiles:
    path = place.name
    is_named = isinstance(f, (str, os.PathLike))
    if is_metadata(place) and not is_named:
        raise UnsupportedSourceError(
            f"{path} is the metadata of a distributed checkpoint, whose files lie beside it: pass "
            "its path, or that of its directory"
        )
    if not is_index(place):
        return ShardFiles([path], source=place)
    if not is_named:
        raise UnsupportedSourceError(
            f"{path} is an index, whose shards lie beside it: pass the path or the URL of the "
            "index, or of their directory"
        )
    return read_index(place, folder_of(path, storage_options))


def _only_checkpoint_in(folder: Folder) -> ShardFiles:
    """Return the only checkpoint in a directory whose file names point to no model."""
    found = look_into(folder)
    if len(found.sets) == 1 and not found.problems:
        return found.sets[0]
    if found.sets:
        names = [files.name_of(path) for files in found.sets for path in files.paths]
        raise ValueError(
            f"{folder.path} holds several checkpoints: {some_of(names, 3)}; pass the path of one"
        )
    if found.problems:
        raise CorruptCheckpointError(found.problems[0], path=folder.path)
    if found.gguf:
        raise NotCheckpointError(
            f"{folder.path} holds a GGUF model ({some_of(found.gguf, 3)}) and no checkpoint: open "
            "it with the gguf package",
            path=folder.path,
        )
    raise FileNotFoundError(
        errno.ENOENT,
        "no *.safetensors, pytorch_model*.bin or *.pt in this directory, nor any other checkpoint"
        f"{_rest(found)}",
        folder.path,
    )


class CheckpointFiles:
    """The checkpoints and the other files in a directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        # In the order of their names: the shards of a model are one set, any other file is one.
        self.sets: list[ShardFiles] = []
        # Missing shards, damaged indices, and files named like checkpoints that are none.
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}  # names of other files, and their formats if known
        self.gguf: list[str] = []  # those of GGUF models
        self.directories: list[str] = []  # names of subdirectories, which are not searched


def checkpoint_files(f: Any, storage_options: Mapping[str, Any] | None = None) -> CheckpointFiles:
    """Return every checkpoint at `f`, as for `find_files`; a directory with none is an OSError."""
    place = open_folder_or_file(f, storage_options)
    if not isinstance(place, Folder):
        found = CheckpointFiles(describe(f))
        try:
            files = _files_of(place, f, storage_options or {})
            _require_all(files)
            found.sets.append(files)
        except CorruptCheckpointError as error:  # the index
            found.problems.append(str(error))
        except FileNotFoundError as error:  # a shard
            found.problems.append(f"{error.filename}: {error.strerror}")
        return found
    found = look_into(place, distributed=True)
    if not found.sets and not found.problems:
        raise FileNotFoundError(
            errno.ENOENT, f"no checkpoint in this directory{_rest(found)}", place.path
        )
    return found


def _require_all(files: ShardFiles) -> None:
    """Raise if a shard of an index does not exist; at a URL, only opening it tells."""
    for path in files.paths if files.weight_map else ():
        try:
            files.open_one(path).close()
        except FileNotFoundError:
            raise
        except OSError:
            pass  # verification reports it


def look_into(folder: Folder, *, distributed: bool = False) -> CheckpointFiles:
    """Return the checkpoints and other files of a directory; `distributed` as for `find_files`."""
    entries = folder.names()
    metadata = find_metadata(folder, entries)
    is_read = bool(metadata) and distributed
    if not is_read and (metadata or ".metadata" in entries):
        raise IsADirectoryError(
            errno.EISDIR,
            "it is a distributed checkpoint: load that with torch.distributed.checkpoint, look "
            "into it with ptsave.open, or make a file of it with `ptsave convert`",
            folder.path,
        )
    found = CheckpointFiles(folder.path)
    if metadata:
        entries = [name for name in entries if not is_rank_file(name)]
        found.sets += [metadata_files(folder, [name]) for name in metadata]
    names = _sort_by_content(found, folder, entries)
    for index in list(filter(re.compile(_INDEX).fullmatch, found.ignored)):
        _add_indexed(found, folder, index, names)
    if distributed:
        _add_rank_sets(found, folder, names)
    for numbered in numbered_sets(names):
        if numbered.single in names:
            continue  # that file is the model, and each of these stands alone
        found.sets.append(_shards(folder, numbered.names))
        if numbered.missing and not found.problems:  # an index may have reported it
            found.problems.append(
                f"{folder.join(numbered.missing)}: a shard is missing: there is "
                f"{numbered.names[0]}, but not this one of its set"
            )
        names.difference_update(numbered.names)
    found.sets += [_shards(folder, [name]) for name in names]
    found.sets.sort(key=lambda files: files.paths)
    return found


def named_checkpoints(folder: Folder, found: CheckpointFiles) -> dict[str, ShardFiles]:
    """Return the checkpoints that `look_into` has found in a directory, by their names.

    ``""`` names the model, as readers find it, or the only checkpoint.  Steps of an
    AsyncCheckpointer are no model.  If ranks have saved a step more than once, its name means the
    last save.
    """
    are_steps = any(is_step_of_rank(name) or is_step(name) for name in folder.names())
    model = None if are_steps else find_shards(folder)
    paths = set(model.paths) if model else set()
    named = {_name_of(each): each for each in found.sets if not paths.issuperset(each.paths)}
    if model is not None:
        named[""] = model
    return {"": found.sets[0]} if len(found.sets) == 1 else named


def _name_of(files: ShardFiles) -> str:
    name = files.name_of(files.index_path or files.paths[0])
    return name.partition(".")[0] if is_step_of_rank(name) else name


def _add_rank_sets(found: CheckpointFiles, folder: Folder, names: set[str]) -> None:
    """Add the sets that ranks have written; each part of an incomplete step stays by itself."""
    try:
        sets = rank_sets(folder, names)
    except FileNotFoundError as error:
        found.problems.append(f"{error.filename}: {error.strerror}")
        return
    found.sets += sets
    names.difference_update(each.name_of(path) for each in sets for path in each.paths)
    unfinished = sorted(filter(is_step_of_rank, names))
    if unfinished:
        found.problems.append(
            f"{folder.join(unfinished[0])}: it is a rank's part of a step, and not all parts of "
            "that are there"
        )


def _rest(found: CheckpointFiles) -> str:
    """Name the subdirectories, in which there could be a checkpoint after all."""
    if not found.directories:
        return ""
    return f"; subdirectories are not looked into: name one ({some_of(found.directories, 3)})"


def _shards(folder: Folder, names: Iterable[str]) -> ShardFiles:
    paths = [folder.join(name) for name in sorted(names)]
    return ShardFiles(paths, path=folder.path, storage_options=folder.storage_options)


def _sort_by_content(found: CheckpointFiles, folder: Folder, entries: list[str]) -> set[str]:
    """Return the names of checkpoints, and record the other entries in `found`."""
    names: set[str] = set()
    for name in entries:
        path = folder.join(name)
        try:
            what = _what_else(path, name, folder)
        except IsADirectoryError:
            found.directories.append(name)
            continue
        if what is None:
            names.add(name)
        elif what.is_damage:
            found.problems.append(f"{path} is no checkpoint: {what.text}")
        else:
            found.ignored[name] = what.text
            if what.is_gguf:
                found.gguf.append(name)
    return names


class _Else(NamedTuple):
    text: str
    is_damage: bool = False
    is_gguf: bool = False


def _what_else(path: str, name: str, folder: Folder) -> _Else | None:
    """Return the format of a file that is no checkpoint, or None; raise for a directory."""
    is_promising = bool(re.fullmatch(PROMISING, name) or re.fullmatch(_PROMISING_BIN, name))
    if _core.target_of_temporary(os.fsencode(name)):
        return _Else("a save that has not ended")
    if not folder.exists(path):
        return _Else("it is a link that leads nowhere", is_promising)
    try:
        source = open_source(path, folder.storage_options)
        head, nbytes = source.head, source.nbytes
    except IsADirectoryError:
        raise
    except OSError as error:
        if error.errno == errno.ESPIPE:
            return _Else("no regular file")
        return None  # verification reports it
    what = None if is_legacy(head) or is_safetensors(head, nbytes) else what_it_is(head, nbytes)
    if what is None:
        return None
    is_something_else = what_came_instead(head, nbytes) is None and is_known(head)
    if is_promising and not is_something_else:
        return _Else(what, is_damage=True)
    text = what.partition(":")[0].removeprefix("it is ") if is_something_else else ""
    return _Else(text, is_gguf=is_gguf(head))


def _add_indexed(found: CheckpointFiles, folder: Folder, index: str, names: set[str]) -> None:
    """Add the set of an index, unless the model is also there as one file, which readers prefer."""
    match = re.fullmatch(_INDEX, index)
    assert match is not None
    if match["single"] in names:
        found.ignored[index] = f"not used: {match['single']} is there"
        return
    del found.ignored[index]
    try:
        files = read_index(open_source(folder.join(index), folder.storage_options), folder)
        files = files._replace(path=files.index_path, storage_options=folder.storage_options)
        _require_all(files)
    except FileNotFoundError as error:
        found.problems.append(f"{error.filename}: {error.strerror}")
        return
    except CorruptCheckpointError as error:
        found.problems.append(str(error))
        return
    shards = {path: files.name_of(path) for path in files.paths}
    # Files that are no checkpoints are reported already, except those in subdirectories.
    paths = [path for path, name in shards.items() if name in names or "/" in name]
    weight_map = {name: path for name, path in (files.weight_map or {}).items() if path in paths}
    found.sets.append(files._replace(paths=paths, weight_map=weight_map))
    names.difference_update(shards.values())
