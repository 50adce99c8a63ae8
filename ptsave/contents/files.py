"""The files of a checkpoint: an index and its shards, the Hugging Face layout, files of ranks."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from ptsave.errors import (
    CheckpointWarning,
    CorruptCheckpointError,
    NotCheckpointError,
    UnsupportedSourceError,
)
from ptsave.sources.kinds import what_came_instead
from ptsave.sources.ranges import Folder, FsspecFile, LocalFile, RangeSource, folder_of, open_source
from ptsave.support.calls import warn_user
from ptsave.support.text import some_of
from ptsave.tree.containers import items_of

_T = TypeVar("_T")

INDEX_SUFFIX = ".index.json"
_MAX_INDEX_NBYTES = 256 << 20
_MAX_SHARDS = 99_999
_SMALL_TEXTS = ("version", "byteorder", "serialization_id", "format_version", "storage_alignment")
_N_NAMED = 3
_N_LOST_NAMED = 8


class ShardFormat(NamedTuple):
    """File names of one format in the Hugging Face layout."""

    stem: str
    suffix: str
    pattern: str  # matches the names of shards that have no index

    @property
    def single(self) -> str:
        """Name of the file of a model that is not split into shards."""
        return self.stem + self.suffix

    @property
    def index_name(self) -> str:
        return self.single + INDEX_SUFFIX


# In the order of preference that transformers and inference engines have.
FORMATS = {
    "safetensors": ShardFormat("model", ".safetensors", r"[^.].*\.safetensors"),
    "bin": ShardFormat("pytorch_model", ".bin", r"pytorch_model.*\.bin"),
    "model bin": ShardFormat("model", ".bin", r"model(?:[-_.].*)?\.bin"),
    "pt": ShardFormat("model", ".pt", r"[^.].*\.pt"),
    "consolidated": ShardFormat("consolidated", ".pth", r"consolidated.*\.pth"),
    "pth": ShardFormat("model", ".pth", r"[^.].*\.pth"),
}
# consolidated.00.pth: Llama and Mistral were published under such names.
_PARALLEL_PART = r"consolidated\.\d+\.pth(?:$|[?#:])"
# <item>_<rank>.pt of torch_checkpointing, parts of ptsave's steps, and files of DeepSpeed's ZeRO.
_FILE_OF_RANK = r"(?P<item>.+)_\d+\.pt"
_STEP_OF_RANK = r"step-\d+\..+\.rank-\d+-of-\d+\.pt"
_ZERO_FILE = r"(?:(?:bf16|fp16)_)?zero_pp_rank_\d+_mp_rank_\d+.*_states\.pt"
_METADATA = ".metadata"
# Patterns take time to compile, so only names with this beginning are matched.
_OF_RANK = "__"
_RANK_METADATA = r"__\d+\.metadata"
_RANK_FILE = r"__\d+_(?:[0-9a-f]{16}|\d+)\.distcp"
_NUMBERED = r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)"


class ShardFiles(NamedTuple):
    """The files of a checkpoint."""

    paths: list[str]  # paths or URLs, in the order of their names
    weight_map: dict[str, str] | None = None  # file paths by tensor names, from the index
    index_path: str = ""
    path: str = ""  # the directory, index or file that the caller asked for
    storage_options: Mapping[str, Any] = MappingProxyType({})
    source: RangeSource | None = None  # the only file, if it is already open
    ranks: tuple[tuple[str, ...], ...] | None = None  # for each file: keys that lead to its object

    @property
    def is_one(self) -> bool:
        """Whether this is a single file without an index."""
        return len(self.paths) == 1 and self.weight_map is None and self.ranks is None

    def name_of(self, path: str) -> str:
        """Return the path of a file relative to the checkpoint's directory."""
        folder = folder_of(self.index_path or self.paths[0], self.storage_options).path
        links = zip(folder.split("::"), path.split("::"), strict=True)
        return next(link[len(own) :].lstrip("/") for own, link in links if own != link)

    def close(self) -> None:
        """Close `source`, if there is one."""
        if self.source is not None:
            self.source.close()

    def open(self) -> Iterator[RangeSource]:
        """Open the files, one after another."""
        return map(self.open_one, self.paths)

    def open_one(self, path: str) -> RangeSource:
        """Open one of the files; the error for a missing shard names the index and the tensors."""
        if self.source is not None:
            return self.source
        try:
            return open_source(path, self.storage_options)
        except FileNotFoundError as error:
            if self.weight_map is None:
                raise
            raise self.missing(path) from error

    def missing(self, path: str) -> FileNotFoundError:
        """Return the error for a shard that the index names but that does not exist."""
        tensors = [name for name, shard in (self.weight_map or {}).items() if shard == path]
        return FileNotFoundError(
            errno.ENOENT,
            f"a shard is missing: {self.index_path} says that it holds {some_of(tensors, 3)}",
            path,
        )


def find_shards(folder: Folder) -> ShardFiles | None:
    """Find a model's files in a directory by their names; return None if there are none.

    If the directory has several formats, the first one in `FORMATS` is used.  As in transformers,
    an unsplit ``model.safetensors`` or ``pytorch_model.bin`` is preferred to an index or shards.
    """
    names = folder.names()
    for each in FORMATS.values():
        files = _find_format(folder, names, each)
        if files is not None:
            return files
    return None


def is_rank_metadata(name: str) -> bool:
    """Whether `name` is the name of one rank's metadata file of torch.distributed.checkpoint."""
    return name.startswith(_OF_RANK) and re.fullmatch(_RANK_METADATA, name) is not None


def is_metadata(source: RangeSource) -> bool:
    """Whether a file's content or name shows that it is the metadata of a DCP checkpoint."""
    name = os.path.basename(source.name)
    return source.kind == "dcp" or name == _METADATA or is_rank_metadata(name)


def require_files_beside(source: RangeSource) -> None:
    """Raise UnsupportedSourceError for DCP metadata that is neither a local file nor at a URL."""
    if not isinstance(source, (LocalFile, FsspecFile)):
        raise UnsupportedSourceError(
            f"{source.name} is the metadata of a distributed checkpoint, whose other files lie "
            "beside it: pass the path or URL of this file, or of its directory"
        )


def refuse_file_of_rank(source: RangeSource) -> None:
    """Raise UnsupportedSourceError for one rank's DCP file, which holds many small archives."""
    folder, name = os.path.split(source.name)
    if name.startswith(_OF_RANK) and re.fullmatch(_RANK_FILE, name):
        raise UnsupportedSourceError(
            f"{source.name} is one rank's file of a distributed checkpoint, and only the metadata "
            f"beside it describes its content: pass the directory, {folder or os.curdir}"
        )


def those_in_index(found: Iterable[tuple[str, str, _T]], files: ShardFiles) -> list[_T]:
    """Return each item whose file is the one that the index names; without an index, all items.

    `found` yields the name of each item, the path of its file, and the item.  If an item is not in
    the file that the index names for it, this raises CorruptCheckpointError.
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
            f"{path}: tensor {name} is not in this shard, but {files.index_path} says that it is",
            path=path,
            entries=[name],
        )
    return kept


def without_lost(files: ShardFiles, objects: Iterable[tuple[str, Any]]) -> ShardFiles:
    """Return `files` without the entries that damaged shards have lost, and warn of the loss."""
    if files.weight_map is None:
        return files
    there = {path: obj.keys() for path, obj in objects if isinstance(obj, Mapping)}
    kept = {name: path for name, path in files.weight_map.items() if name in there.get(path, ())}
    lost = [name for name in files.weight_map if name not in kept]
    if lost:
        named = some_of(lost, _N_LOST_NAMED)
        warn_user(f"{files.index_path}: the shards have lost {named}", CheckpointWarning)
    return files._replace(weight_map=kept)


def refuse_parallel_parts(found: Iterable[tuple[str, str]], files: ShardFiles) -> None:
    """Raise ValueError if two ranks' files of a divided model have a tensor of the same name."""
    if files.weight_map is not None or not all(map(is_parallel_part, files.paths)):
        return
    homes: dict[str, str] = {}
    for name, path in found:
        other = homes.setdefault(name, path)
        if other != path:
            raise ValueError(
                f"{name!r} is in {other} and in {path}: these {len(files.paths)} files are the "
                "parts of a model that was divided among ranks, and the files do not say along "
                "which dimension.  Let each rank load the file with the rank's number, by its "
                "path, or load all files one by one with ptsave.load() and join them as the "
                "model's own code does"
            )


def is_parallel_part(path: str) -> bool:
    """Whether the name of a file shows that it is one rank's part of a divided model."""
    return re.search(_PARALLEL_PART, path) is not None


def ranks_of_parts(files: ShardFiles) -> tuple[tuple[str, ...], ...] | None:
    """Return keys like "rank0" if all files have names like ``consolidated.00.pth``, else None."""
    if files.weight_map is not None or not all(map(is_parallel_part, files.paths)):
        return None
    return tuple((f"rank{number}",) for number in range(len(files.paths)))


def is_zero_file(path: str) -> bool:
    """Whether the name of a file shows that it is one rank's file of DeepSpeed's ZeRO."""
    return re.fullmatch(_ZERO_FILE, path.rpartition("/")[2]) is not None


def refuse_files_of_ranks(files: ShardFiles) -> None:
    """Raise ValueError if the names of the files show that each holds one rank's part."""
    names = [path.rpartition("/")[2] for path in files.paths]
    if any(map(is_zero_file, names)):
        raise ValueError(
            f"{files.path or files.paths[0]} is a DeepSpeed ZeRO checkpoint of {len(names)} files, "
            "in which each rank has its part of flattened tensors: make one file of them with the "
            "zero_to_fp32.py beside them, or look into the files one by one, by their paths"
        )
    if all(map(re.compile(_STEP_OF_RANK).fullmatch, names)):
        raise ValueError(
            f"{files.path or files.paths[0]} holds {len(names)} files in which ranks have saved "
            "their parts with ptsave.AsyncCheckpointer: load them with AsyncCheckpointer.restore() "
            "on as many ranks, look into all files with ptsave.open(), or pass the path of one file"
        )
    ranks = [
        match for match in map(re.compile(_FILE_OF_RANK).fullmatch, names) if match is not None
    ]
    items = sorted({match["item"] for match in ranks})
    if len(ranks) == len(names) > len(items):
        raise ValueError(
            f"{files.path or files.paths[0]} holds {len(names)} files named <item>_<rank>, as "
            f"torch_checkpointing writes them ({some_of(items, 3)}): each holds one rank's part.  "
            "Pass the path of one file, or load all with that library on the same number of ranks"
        )


def name_lost_entries(error: CorruptCheckpointError, path: str, files: ShardFiles) -> None:
    """If a shard's error names no tensors, add the tensors that the index lists for the shard."""
    if not error.entries and files.weight_map is not None:
        error.entries = [name for name, shard in files.weight_map.items() if shard == path]
        more = ", ..." if len(error.entries) > _N_NAMED else ""
        named = ", ".join(error.entries[:_N_NAMED]) + more
        error.args = (f"{error}; {files.index_path} says that this shard holds {named}",)


def merged(objects: Iterable[tuple[str, Any]], files: ShardFiles) -> dict[Any, Any]:
    """Return the dicts of a model's files as one dict.

    `objects` yields the path and the object of each file.  With an index, each entry comes from the
    file that the index names.  Without an index, two files with an entry of the same name raise
    ValueError.  If the files belong to ranks, each object becomes an entry such as ``rank0``.
    """
    if files.ranks is not None:
        return _nested(zip(files.ranks, objects, strict=True))
    result: dict[Any, Any] = {}
    homes: dict[Any, str] = {}
    found: Iterable[tuple[Any, str, Any]]
    found = (item for path, obj in objects for item in _items_of(obj, path))
    if files.weight_map is not None:  # otherwise each file is checked before the next loads
        found = those_in_index(((item[0], item[1], item) for item in found), files)
    for name, path, each in found:
        if name in result:
            refuse_parallel_parts([(name, homes[name]), (name, path)], files)
            refuse_files_of_ranks(files)
            raise ValueError(
                f"{name!r} is in {homes[name]} and in {path}, and no index says which one to use: "
                "if these are several checkpoints, pass the path of one"
            )
        result[name] = each
        homes[name] = path
    return result


def _nested(objects: Iterable[tuple[tuple[str, ...], tuple[str, Any]]]) -> dict[Any, Any]:
    """Return nested dicts; the keys of each item in `objects` lead to the object of this item."""
    result: dict[Any, Any] = {}
    for keys, (_, obj) in objects:
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = obj
    return result


def _items_of(obj: Any, path: str) -> Iterator[tuple[Any, str, Any]]:
    if not isinstance(obj, Mapping):
        raise TypeError(f"{path} holds {type(obj).__name__}, not a dict of tensors")
    for name, value in items_of(obj):
        yield name, path, value


def _find_format(folder: Folder, names: list[str], shard_format: ShardFormat) -> ShardFiles | None:
    indices = [name for name in names if name.endswith(shard_format.suffix + INDEX_SUFFIX)]
    numbered = [name for name in names if re.fullmatch(_NUMBERED, name)]
    # The names of a model's shards begin and end like the name of its unsplit file.
    begin, end = shard_format.stem, shard_format.suffix
    is_split = any(name.startswith(begin) and name.endswith(end) for name in numbered)
    if shard_format.single in names and (indices or is_split):
        return ShardFiles([folder.join(shard_format.single)])
    if indices:
        standard = shard_format.index_name
        if standard not in indices and len(indices) > 1:
            raise ValueError(
                f"{folder.path} holds several models: {', '.join(indices)}; pass the path of one"
            )
        path = folder.join(standard if standard in indices else indices[0])
        return read_index(open_source(path, folder.storage_options), folder)
    shards = [name for name in names if re.fullmatch(shard_format.pattern, name)]
    for each in numbered_sets(shards):
        if each.missing:
            raise each.error(folder)
    return ShardFiles([folder.join(name) for name in shards]) if shards else None


class NumberedSet(NamedTuple):
    """Files that belong together: their names differ only in a number."""

    names: list[str]  # of the files that exist, in order
    missing: str  # the first missing name, or ""
    single: str  # the name that one unsplit file would have

    def error(self, folder: Folder) -> FileNotFoundError:
        """Return the error for the first missing file."""
        words = f"a shard is missing: there is {self.names[0]}, but not this file of the same set"
        return FileNotFoundError(errno.ENOENT, words, folder.join(self.missing))


def numbered_sets(names: Iterable[str]) -> list[NumberedSet]:
    """Return the sets of files among `names` that are called ``...-00002-of-00008...``.

    >>> numbered_sets(["a.pt", "model-1-of-3.pt", "model-3-of-3.pt"])[0].missing
    'model-2-of-3.pt'
    """
    sets: dict[tuple[str, ...], list[str]] = {}
    for match in filter(None, map(re.compile(_NUMBERED).fullmatch, sorted(names))):
        if match["stem"].endswith(".rank"):
            continue  # a rank's file from an AsyncCheckpointer; ranks begin at 0, shards at 1
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


def is_index(source: RangeSource) -> bool:
    """Whether the name or the content of a file shows that it is an index of shards."""
    if source.kind is not None:
        return False
    head, nbytes = source.head, source.nbytes
    if source.name.endswith(INDEX_SUFFIX):
        return what_came_instead(head, nbytes) is None
    if not head.lstrip().startswith(b"{") or nbytes > _MAX_INDEX_NBYTES:
        return False
    try:
        return bool(index_in(source)["weight_map"])
    except CorruptCheckpointError:
        return False


def read_index(source: RangeSource, folder: Folder) -> ShardFiles:
    """Read and close an index file, and return the shards that the index names."""
    with closing(source):
        in_folder: dict[str, str] = index_in(source, may_be_empty=False)["weight_map"]
    paths = {shard: folder.join(shard) for shard in {*in_folder.values()}}
    weight_map = {name: paths[shard] for name, shard in in_folder.items()}
    files = ShardFiles(sorted({*paths.values()}), weight_map, source.name)
    for shard in files.paths:
        if not folder.exists(shard):
            raise files.missing(shard)
    return files


def index_in(source: RangeSource, *, may_be_empty: bool = True) -> dict[str, Any]:
    """Return the JSON object of an index, whose weight_map names files in the index's directory."""
    path = source.name
    refuse_what_came_instead(source)
    if source.nbytes > _MAX_INDEX_NBYTES:
        raise CorruptCheckpointError(f"{path}: too large for an index of shards", path=path)
    (text,) = source.read([(0, source.nbytes)])
    try:
        index: Any = json.loads(text.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also not UTF-8
        raise CorruptCheckpointError(f"{path}: not JSON: {error}", path=path) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not (weight_map or may_be_empty):
        raise CorruptCheckpointError(f"{path}: the index of shards has no weight_map", path=path)
    sound: set[str] = set()  # names that are checked already
    for tensor, name in weight_map.items():
        if isinstance(name, str) and (name in sound or _is_inside(name)):
            sound.add(name)
        else:
            raise CorruptCheckpointError(
                f"{path}: the file of {tensor} must be in this directory, and not {name!r}",
                path=path,
            )
    return cast("dict[str, Any]", index)


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def refuse_what_came_instead(source: RangeSource) -> None:
    """Raise NotCheckpointError for a git-lfs pointer, a web page or an empty file."""
    instead = what_came_instead(source.head, source.nbytes)
    if instead is not None:
        path = source.name
        raise NotCheckpointError(f"{path} is not a checkpoint: {instead}", path=path)


def metadata_of(small: Mapping[str, bytes]) -> dict[str, str]:
    """Return an archive's format, and the text of small records such as ``version``."""
    found = {
        text: next((small[name] for name in places if name in small), None)
        for text, *places in ((text, f".data/{text}", f".{text}", text) for text in _SMALL_TEXTS)
    }
    texts = {text: data.decode("utf-8", "replace") for text, data in found.items() if data}
    return {"format": "pt", **{text: value.strip() for text, value in texts.items()}}
