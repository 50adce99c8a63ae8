"""Finds the files of a checkpoint, and all checkpoints in a directory, by their content.

If each rank wrote its own file, the files do not say how to join the parts of a tensor.  So each
rank's object stays a separate entry: ``rank0``, ``rank1``, ..., or ``model.rank0`` if the name of
the file is ``model_0.pt``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ptsave import _core
from ptsave.contents.files import (
    INDEX_SUFFIX,
    ShardFiles,
    find_shards,
    is_index,
    is_metadata,
    is_rank_metadata,
    is_zero_file,
    numbered_sets,
    read_index,
)
from ptsave.errors import CorruptCheckpointError, NotCheckpointError, UnsupportedSourceError
from ptsave.sources.kinds import (
    is_dcp,
    is_gguf,
    is_known,
    is_legacy,
    is_safetensors,
    what_came_instead,
    what_it_is,
)
from ptsave.sources.locations import describe
from ptsave.sources.ranges import Folder, RangeSource, folder_of, open_folder_or_file, open_source
from ptsave.support.text import some_of

_INDEX = r"(?P<single>.*\.(?:safetensors|bin|pth?|ckpt))" + re.escape(INDEX_SUFFIX)
# A file with such a name is reported as damaged if it is not a checkpoint.
PROMISING = r"(?i).*\.(?:safetensors|pth?|ckpt)"
# Other programs use the suffix .bin, too.  So this pattern has only the names that transformers,
# accelerate, peft and diffusers give to checkpoints.
_PROMISING_BIN = (
    r"(?:.*[_-])?(?:model|optimizer|scheduler|training_args|sampler|scaler|weights|dl_state_dict)"
    r"(?:[_-].*)?\.bin"
)
_METADATA = ".metadata"
_SUFFIX = ".distcp"
# <item>_<rank>.pt, as torch_checkpointing names its files.
_ITEM = r"(?P<item>.+)_(?P<rank>0|[1-9]\d{0,6})\.pt"
# File names of ptsave.AsyncCheckpointer: a step, a save of the step, and a rank's part of the save.
_STEP = (
    r"(?P<save>step-(?P<step>\d+)\.(?P<session>[0-9a-f]{16})-(?P<count>\d{1,9}))"
    r"\.rank-(?P<rank>\d{1,9})-of-(?P<size>\d{1,9})\.pt"
)
_MAX_RANKS = 1 << 20
_Keys = tuple[str, ...]


def find_files(
    f: Any, storage_options: Mapping[str, Any] | None = None, *, distributed: bool = False
) -> ShardFiles:
    """Return the files of the checkpoint at `f`: a path, a URL, or a file object.

    `f` may also name a directory or an index of shards.  With `distributed`, the directory may have
    one file per rank, or a DCP checkpoint, whose metadata file is then returned.  A directory with
    several checkpoints raises ValueError, unless one has a standard name (``model.safetensors``).
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
    """Return the files of the checkpoint at `place`, which is the opened `f`."""
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
            "the path of this file, or of its directory"
        )
    if not is_index(place):
        return ShardFiles([path], source=place)
    if not is_named:
        raise UnsupportedSourceError(
            f"{path} is an index, whose shards lie beside it: pass the path or the URL of the "
            "index, or of its directory"
        )
    return read_index(place, folder_of(path, storage_options))


def _only_checkpoint_in(folder: Folder) -> ShardFiles:
    """Return the checkpoint in a directory; raise an error if there is not exactly one."""
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
        # In the order of their names.  The shards of a model are one set; any other checkpoint
        # file is a set of its own.
        self.sets: list[ShardFiles] = []
        # Messages about missing shards, damaged indices, and files that are not checkpoints
        # although they have a checkpoint's name.
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}  # names of other files, and their formats if known
        self.gguf: list[str] = []  # names of GGUF models among these other files
        self.directories: list[str] = []  # names of subdirectories, which are not searched


def checkpoint_files(f: Any, storage_options: Mapping[str, Any] | None = None) -> CheckpointFiles:
    """Return all checkpoints in a file or directory; raise OSError if a directory has none."""
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
            found.problems.append(_reason(error))
        return found
    found = look_into(place, distributed=True)
    if not found.sets and not found.problems:
        raise FileNotFoundError(
            errno.ENOENT, f"no checkpoint in this directory{_rest(found)}", place.path
        )
    return found


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"


def _require_all(files: ShardFiles) -> None:
    """Raise FileNotFoundError if a shard that an index names does not exist."""
    for path in files.paths if files.weight_map else ():
        try:
            files.open_one(path).close()
        except FileNotFoundError:
            raise
        except OSError:
            pass  # verification reports this error


def look_into(folder: Folder, *, distributed: bool = False) -> CheckpointFiles:
    """Return the checkpoints and other files of a directory; `distributed` as for `find_files`."""
    entries = folder.names()
    metadata = find_metadata(folder, entries)
    is_read = bool(metadata) and distributed
    if not is_read and (metadata or ".metadata" in entries):
        raise IsADirectoryError(
            errno.EISDIR,
            "this is a distributed checkpoint: load it with torch.distributed.checkpoint, look "
            "into it with ptsave.open, or make one file of it with `ptsave convert`",
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
            continue  # that file is the model, and each numbered file is a checkpoint of its own
        found.sets.append(_files_in(folder, numbered.names))
        if numbered.missing and not found.problems:  # an index may have reported it
            found.problems.append(_reason(numbered.error(folder)))
        names.difference_update(numbered.names)
    found.sets += [_files_in(folder, [name]) for name in names]
    found.sets.sort(key=_by_number)
    return found


def _by_number(files: ShardFiles) -> list[str]:
    """Return a checkpoint's sort key; numbers in names count by their value, so 10 follows 9."""
    return [re.sub(r"\d+", lambda found: found[0].zfill(20), path) for path in files.paths]


def named_checkpoints(folder: Folder, found: CheckpointFiles) -> dict[str, ShardFiles]:
    """Return a dict from names to the checkpoints in `found`, the result of `look_into`.

    The name ``""`` means the model that `find_shards` returns, or the only checkpoint.  If ranks
    have saved a step of an AsyncCheckpointer several times, the step's name means the last save.
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
    """Add to `found` each complete set of ranks' files, and a problem if a step lacks files."""
    try:
        sets = rank_sets(folder, names)
    except FileNotFoundError as error:
        found.problems.append(_reason(error))
        return
    found.sets += sets
    names.difference_update(each.name_of(path) for each in sets for path in each.paths)
    # A part with a manifest may lie in the directory of one host, without the other hosts' parts.
    known = found.ignored.keys()
    unfinished = sorted(n for n in names if is_step_of_rank(n) and f"{n}.json" not in known)
    if unfinished:
        found.problems.append(
            f"{folder.join(unfinished[0])} is one rank's part of a step, but other parts of this "
            "step are missing"
        )


def _rest(found: CheckpointFiles) -> str:
    """Return the end of an error message: it names subdirectories, which may have checkpoints."""
    if not found.directories:
        return ""
    text = "to search a subdirectory, pass its path"
    if version_numbers(found.directories):
        text = "this directory has versions of ptsave.deltas: pass the path of one version"
    return f"; {text} ({some_of(found.directories, 3)})"


def _files_in(
    folder: Folder, names: Iterable[str], ranks: tuple[_Keys, ...] | None = None
) -> ShardFiles:
    paths = [folder.join(name) for name in names]
    return ShardFiles(paths, path=folder.path, storage_options=folder.storage_options, ranks=ranks)


def _sort_by_content(found: CheckpointFiles, folder: Folder, entries: list[str]) -> set[str]:
    """Return the `entries` that are checkpoints, and record all other entries in `found`."""
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
            found.problems.append(f"{path} is not a checkpoint: {what.text}")
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
    """Return what a file is, or None for a checkpoint; raise IsADirectoryError for a directory."""
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
            return _Else("not a regular file")
        return None  # verification reports this error
    what = None if is_legacy(head) or is_safetensors(head, nbytes) else what_it_is(head, nbytes)
    if what is None:
        return None
    is_something_else = what_came_instead(head, nbytes) is None and is_known(head)
    if is_promising and not is_something_else:
        return _Else(what, is_damage=True)
    text = what.partition(":")[0].removeprefix("it is ") if is_something_else else ""
    return _Else(text, is_gguf=is_gguf(head))


def _add_indexed(found: CheckpointFiles, folder: Folder, index: str, names: set[str]) -> None:
    """Add an index's shards to `found`; ignore the index if a single file has the same model."""
    match = re.fullmatch(_INDEX, index)
    assert match is not None
    if match["single"] in names:
        found.ignored[index] = f"not used, because {match['single']} exists"
        return
    del found.ignored[index]
    try:
        files = read_index(open_source(folder.join(index), folder.storage_options), folder)
        files = files._replace(path=files.index_path, storage_options=folder.storage_options)
        _require_all(files)
    except FileNotFoundError as error:
        found.problems.append(_reason(error))
        return
    except CorruptCheckpointError as error:
        found.problems.append(str(error))
        return
    shards = {path: files.name_of(path) for path in files.paths}
    # Files that are not checkpoints have been reported, except files in subdirectories.
    paths = [path for path, name in shards.items() if name in names or "/" in name]
    weight_map = {name: path for name, path in (files.weight_map or {}).items() if path in paths}
    found.sets.append(files._replace(paths=paths, weight_map=weight_map))
    names.difference_update(shards.values())


# ------------------------------------------------------------------------------- files of ranks


def is_rank_file(name: str) -> bool:
    """Whether `name` is a file name of torch.distributed.checkpoint."""
    return name.endswith(_SUFFIX) or name == _METADATA or is_rank_metadata(name)


def nbytes_of_ranks(path: str) -> int:
    """If `path` is DCP metadata, return the total size of the data files beside it; otherwise 0."""
    folder, name = os.path.split(path)
    if name != _METADATA and not is_rank_metadata(name):
        return 0
    with os.scandir(folder or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX))


def find_metadata(folder: Folder, names: list[str]) -> list[str]:
    """Return the names of the metadata files of torch.distributed.checkpoint in a directory.

    There is one file for all ranks, or one for each rank that has saved by itself.  If there are
    data files but no metadata file, this raises FileNotFoundError.
    """
    has_files = any(name.endswith(_SUFFIX) for name in names)
    if _METADATA in names and (has_files or _is_metadata(folder, _METADATA)):
        return [_METADATA]
    found = [name for name in names if is_rank_metadata(name)]
    if found and (has_files or all(_is_metadata(folder, name) for name in found)):
        return found
    if has_files:
        raise FileNotFoundError(
            errno.ENOENT,
            "there are files of a distributed checkpoint, but not the .metadata file that "
            "describes them: the save has not ended, or .metadata was not copied",
            folder.join(_METADATA),
        )
    return []


def _is_metadata(folder: Folder, name: str) -> bool:
    try:
        return is_dcp(open_source(folder.join(name), folder.storage_options).head)
    except OSError:  # for example, a directory
        return False


def metadata_files(folder: Folder, names: list[str]) -> ShardFiles:
    """Return the checkpoint of the only metadata file in `names`; several raise ValueError."""
    if len(names) > 1:
        raise ValueError(
            f"{folder.path} holds the checkpoints of {len(names)} ranks, each saved by itself: "
            f"pass the path of one ({some_of(names, 3)})"
        )
    return _files_in(folder, names)


def is_step(name: str) -> bool:
    """Whether `name` is a step that an AsyncCheckpointer of one process saved: step-00000100.pt."""
    return re.fullmatch(r"step-\d+\.pt", name) is not None


def is_step_of_rank(name: str) -> bool:
    """Whether `name` is one rank's file of a step of an AsyncCheckpointer."""
    return re.fullmatch(_STEP, name) is not None


def has_manifests(names: Iterable[str]) -> bool:
    """Whether a file with one of these names is a manifest of ``AsyncCheckpointer(local=...)``."""
    files = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return any(is_step(file) or is_step_of_rank(file) for file in files)


def version_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of directories of `ptsave.deltas`, such as weight_v000001, in order."""
    found = map(re.compile(r"weight_v(\d{6,15})").fullmatch, names)
    return sorted(int(match[1]) for match in found if match is not None)


def find_rank_set(folder: Folder, names: Iterable[str]) -> ShardFiles | None:
    """Return the files that ranks have written into a directory; None if there are none.

    For an AsyncCheckpointer, these are the files of the newest complete step.  If all steps are
    incomplete, or a rank's file is missing, this raises FileNotFoundError.
    """
    names = list(names)
    sets = rank_sets(folder, names)
    if not sets and any(map(is_step_of_rank, names)):
        last = max(filter(None, map(re.compile(_STEP).fullmatch, names)), key=_order)
        there, size = set(folder.names()), min(int(last["size"]), _MAX_RANKS)
        parts = (f"{last['save']}.rank-{rank}-of-{last['size']}.pt" for rank in range(size))
        raise FileNotFoundError(
            errno.ENOENT,
            f"a rank's part is missing: {last[0]} exists, but no step has the parts of all ranks",
            folder.join(next((part for part in parts if part not in there), last[0])),
        )
    return sets[-1] if sets else None


def rank_sets(folder: Folder, names: Iterable[str]) -> list[ShardFiles]:
    """Return complete sets of ranks' files, newest last; raise if <item>_<rank>.pt is missing."""
    names = list(names)
    steps = _steps(folder, names)
    if steps or any(map(is_step_of_rank, names)):
        return steps
    items = [*filter(None, map(re.compile(_ITEM).fullmatch, names))]
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
                f"the file of rank {missing} is missing, but there are files of {len(each)} other "
                "ranks",
                folder.join(f"{item}_{missing}.pt"),
            )
    items.sort(key=lambda match: (match["item"], int(match["rank"])))
    keys = tuple((match["item"], f"rank{match['rank']}") for match in items)
    return [_files_in(folder, (match[0] for match in items), keys)]


def _order(match: re.Match[str]) -> tuple[int, str, int]:
    return int(match["step"]), match["session"], int(match["count"])


def _steps(folder: Folder, names: list[str]) -> list[ShardFiles]:
    saves: dict[tuple[int, str, int], dict[int, str]] = {}
    sizes: dict[tuple[int, str, int], int] = {}
    for match in filter(None, map(re.compile(_STEP).fullmatch, names)):
        saves.setdefault(_order(match), {})[int(match["rank"])] = match[0]
        sizes[_order(match)] = int(match["size"])
    return [
        _files_in(
            folder,
            (parts[rank] for rank in sorted(parts)),
            tuple((f"rank{rank}",) for rank in sorted(parts)),
        )
        for save, parts in sorted(saves.items())
        if sizes[save] <= _MAX_RANKS and set(parts) == set(range(sizes[save]))
    ]
