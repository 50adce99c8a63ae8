"""Finds the files of a model: one file, or a directory of shards with or without an index."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ptsave.errors import CorruptCheckpointError, NotCheckpointError
from ptsave.sources.kinds import HEAD_NBYTES, regular_only, what_came_instead
from ptsave.sources.ranges import expect_no_more_reads
from ptsave.sources.remote_errors import named_errors

__all__ = [
    "FORMATS",
    "INDEX_SUFFIX",
    "NumberedSet",
    "ShardFiles",
    "ShardFormat",
    "directory_error",
    "files_at",
    "find_shards",
    "merged",
    "numbered_sets",
    "refuse_what_is_no_checkpoint",
    "those_in_index",
]

_T = TypeVar("_T")

INDEX_SUFFIX = ".index.json"
_MAX_INDEX_NBYTES = 256 << 20
_MAX_SHARDS = 99_999


@dataclass(frozen=True)
class ShardFormat:
    """File names of one format in the Hugging Face layout."""

    stem: str
    suffix: str
    pattern: re.Pattern[str]  # of shards where there is no index

    @property
    def single(self) -> str:
        """The file of a model that is not split."""
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        return self.single + INDEX_SUFFIX


# In the order in which they are preferred, as transformers and inference engines do.
FORMATS = {
    "safetensors": ShardFormat("model", ".safetensors", re.compile(r"[^.].*\.safetensors")),
    "bin": ShardFormat("pytorch_model", ".bin", re.compile(r"pytorch_model.*\.bin")),
    "pt": ShardFormat("model", ".pt", re.compile(r"[^.].*\.pt")),
}
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)")


@dataclass(frozen=True)
class ShardFiles:
    """The files of a model.

    Attributes
    ----------
    paths : list of str
        In the order of their names.
    weight_map : dict of str to str or None
        Paths of files by names of tensors, if there is an index that says so.
    index_path : str
        The index, or "".
    """

    paths: list[str]
    weight_map: dict[str, str] | None = None
    index_path: str = ""


def find_shards(path: str) -> ShardFiles:
    """Return the files of the model at `path`, all of which exist.

    A directory with several formats is read as the first of safetensors, ``pytorch_model*.bin``
    and ``*.pt``.  Within a format, an unsplit ``model.safetensors`` (``pytorch_model.bin``) beside
    an index, or beside numbered shards, is the model, as it is for transformers.

    Raises
    ------
    FileNotFoundError
        If there is nothing, or if an index, or the names of the others, promise a file that is not
        there.
    CorruptCheckpointError
        If an index is damaged.
    """
    if not os.path.isdir(path):
        if path.endswith(INDEX_SUFFIX):
            return _indexed(path)
        os.stat(path)  # raises the system's error, with the file's name
        return ShardFiles([path])
    names = sorted(os.listdir(path))
    for shard_format in FORMATS.values():
        found = _find_format(path, names, shard_format)
        if found is not None:
            return found
    raise FileNotFoundError(
        errno.ENOENT, "no *.safetensors, pytorch_model*.bin or *.pt in this directory", path
    )


def files_at(path: str) -> ShardFiles | None:
    """Return the files of the model in a directory, or that an index names; None for a file.

    Raises
    ------
    OSError
        If there is no model in the directory, or a part of it is missing.
    """
    is_directory = os.path.isdir(path)
    if not is_directory and not (path.endswith(INDEX_SUFFIX) and os.path.exists(path)):
        return None
    if is_directory and ".metadata" in os.listdir(path):
        raise directory_error(path, path)
    return find_shards(path)


def those_in_index(found: Iterable[tuple[str, str, _T]], files: ShardFiles) -> list[_T]:
    """Return the items of a model's files, each from the file that the index names.

    Parameters
    ----------
    found : iterable of (str, str, object)
        Names, the paths of their files, and their items.
    files : ShardFiles
        The files; a name counts in the one that the index says.

    Raises
    ------
    CorruptCheckpointError
        If the index promises a name that is in no file.
    """
    if files.weight_map is None:
        return [each for _, _, each in found]
    promised = dict(files.weight_map)
    kept = []
    for name, path, each in found:
        if files.weight_map.get(name, path) == path:
            kept.append(each)
            promised.pop(name, None)
    for name, path in promised.items():
        raise CorruptCheckpointError(
            f"{path}: there is no tensor {name} in this shard, where {files.index_path} puts it",
            path=path,
            entries=[name],
        )
    return kept


def merged(found: Iterable[tuple[Any, str, _T]], files: ShardFiles) -> dict[Any, _T]:
    """Return the items of a model's files by name; arguments as of `those_in_index`.

    Raises
    ------
    CorruptCheckpointError
        If the index promises a name that is in no file.
    ValueError
        If a name is in two files and no index says which one counts.
    """
    result: dict[Any, _T] = {}
    homes: dict[Any, str] = {}
    named = ((name, path, (name, path, each)) for name, path, each in found)
    for name, path, each in those_in_index(named, files):
        if name in result:
            raise ValueError(f"{name!r} is in {homes[name]} and in {path}: no index says which")
        result[name] = each
        homes[name] = path
    return result


def directory_error(name: str | bytes, path: str) -> OSError:
    """Return the error for a directory that is opened as a file."""
    hint = "open one of the files in it"
    if ".metadata" in map(os.fsdecode, os.listdir(name)):
        hint = "it is a distributed checkpoint: load that with torch.distributed.checkpoint"
    return IsADirectoryError(errno.EISDIR, f"it is a directory: {hint}", path)


def _find_format(directory: str, names: list[str], shard_format: ShardFormat) -> ShardFiles | None:
    indices = [name for name in names if name.endswith(shard_format.suffix + INDEX_SUFFIX)]
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    if shard_format.single in names and (indices or _belong(numbered, shard_format)):
        return ShardFiles([os.path.join(directory, shard_format.single)])
    if indices:
        standard = shard_format.index
        if standard not in indices and len(indices) > 1:
            raise ValueError(
                f"{directory} holds several models: {', '.join(indices)}; pass the path of one"
            )
        return _indexed(os.path.join(directory, standard if standard in indices else indices[0]))
    shards = [name for name in names if shard_format.pattern.fullmatch(name)]
    _require_all_numbers(directory, shards)
    return ShardFiles([os.path.join(directory, name) for name in shards]) if shards else None


def _belong(numbered: Iterable[str], shard_format: ShardFormat) -> bool:
    """Whether a set of shards has names that begin and end like those of an unsplit model."""
    ours = (shard_format.stem, shard_format.suffix)
    return any(name.startswith(ours[0]) and name.endswith(ours[1]) for name in numbered)


def _require_all_numbers(directory: str, names: Iterable[str]) -> None:
    """Refuse a set that its names, ``...-00002-of-00008...``, say is not complete."""
    for numbered in numbered_sets(names):
        if numbered.missing:
            raise FileNotFoundError(
                errno.ENOENT,
                f"a shard is missing: there is {numbered.names[0]}, but not this one of its set",
                os.path.join(directory, numbered.missing),
            )


@dataclass(frozen=True)
class NumberedSet:
    """Files whose names say that they belong together.

    Attributes
    ----------
    names : list of str
        Those that are there, in their order.
    missing : str
        The first that is not, or "".
    single : str
        Name of the file if the set were not split.
    """

    names: list[str]
    missing: str
    single: str


def numbered_sets(names: Iterable[str]) -> list[NumberedSet]:
    """Return the sets of files among `names` that are called ``...-00002-of-00008...``.

    >>> numbered_sets(["a.pt", "model-1-of-3.pt", "model-3-of-3.pt"])[0].missing
    'model-2-of-3.pt'
    """
    sets: dict[tuple[str, ...], list[str]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(names))):
        key = match["stem"], match["count"], match["suffix"], str(len(match["number"]))
        sets.setdefault(key, []).append(match[0])
    found = []
    for (stem, count, suffix, width), present in sets.items():
        numbers = range(1, int(count) + 1 if int(count) <= _MAX_SHARDS else 1)
        wanted = (f"{stem}-{number:0{width}}-of-{count}{suffix}" for number in numbers)
        there = set(present)
        missing = next((name for name in wanted if name not in there), "")
        found.append(NumberedSet(present, missing, stem + suffix))
    return found


def _indexed(index_path: str) -> ShardFiles:
    directory = os.path.dirname(index_path)
    weight_map = {
        tensor: os.path.join(directory, name) for tensor, name in _read_index(index_path).items()
    }
    missing: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        missing.setdefault(shard, []).append(tensor)
    for shard, tensors in sorted(missing.items()):
        if not os.path.exists(shard):
            more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            raise FileNotFoundError(
                errno.ENOENT,
                f"a shard is missing that {index_path} names, with {', '.join(tensors[:3])}{more}",
                shard,
            )
    return ShardFiles(sorted(missing), weight_map, index_path)


def _read_index(path: str) -> dict[str, str]:
    refuse_what_is_no_checkpoint(path)
    if os.stat(path).st_size > _MAX_INDEX_NBYTES:
        raise CorruptCheckpointError(f"{path}: too large for an index of shards", path=path)
    try:
        with open(path, encoding="utf-8", opener=regular_only) as stream:
            index: Any = json.load(stream)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise CorruptCheckpointError(f"{path}: not JSON: {error}", path=path) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{path}: an index of shards has a weight_map", path=path)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise CorruptCheckpointError(
                f"{path}: the file of {tensor} must be one in this directory, not {name!r}",
                path=path,
            )
    return weight_map


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def refuse_what_is_no_checkpoint(path: str) -> None:
    """Raise for a file that a download has left in place of the one that was wanted.

    Raises
    ------
    NotCheckpointError
        If it is a git-lfs pointer, a web page, or empty.
    OSError
        If it cannot be opened, or is a directory.
    """
    with named_errors(path), open(path, "rb", opener=regular_only) as stream:
        expect_no_more_reads(stream.fileno())
        head = stream.read(HEAD_NBYTES)
        instead = what_came_instead(head, os.fstat(stream.fileno()).st_size or len(head))
    if instead is not None:
        raise NotCheckpointError(f"{path} is no checkpoint: {instead}", path=path)
