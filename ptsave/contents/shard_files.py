"""The files of a model in a directory, by the names that the Hugging Face layout gives them."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ptsave.errors import CheckpointWarning, CorruptCheckpointError, NotCheckpointError
from ptsave.sources.kinds import what_came_instead
from ptsave.sources.opening import Folder, folder_of, open_source
from ptsave.sources.ranges import RangeSource
from ptsave.support.text import some_of
from ptsave.support.user_warnings import warn_user
from ptsave.tree.containers import items_of

__all__ = [
    "FORMATS",
    "INDEX_SUFFIX",
    "NumberedSet",
    "ShardFiles",
    "ShardFormat",
    "find_shards",
    "is_index",
    "is_parallel_part",
    "is_zero_file",
    "merged",
    "name_lost_entries",
    "numbered_sets",
    "read_index",
    "refuse_files_of_ranks",
    "refuse_parallel_parts",
    "refuse_what_came_instead",
    "those_in_index",
    "without_lost",
]

_T = TypeVar("_T")

INDEX_SUFFIX = ".index.json"
_MAX_INDEX_NBYTES = 256 << 20
_MAX_SHARDS = 99_999
_N_NAMED = 3
_N_LOST_NAMED = 8


class ShardFormat(NamedTuple):
    """File names of one format in the Hugging Face layout."""

    stem: str
    suffix: str
    pattern: str  # of shards where there is no index

    @property
    def single(self) -> str:
        """The file of a model that is not split."""
        return self.stem + self.suffix

    @property
    def index_name(self) -> str:
        return self.single + INDEX_SUFFIX


# In the order in which they are preferred, as transformers and inference engines do.
FORMATS = {
    "safetensors": ShardFormat("model", ".safetensors", r"[^.].*\.safetensors"),
    "bin": ShardFormat("pytorch_model", ".bin", r"pytorch_model.*\.bin"),
    "model bin": ShardFormat("model", ".bin", r"model(?:[-_.].*)?\.bin"),
    "pt": ShardFormat("model", ".pt", r"[^.].*\.pt"),
    "consolidated": ShardFormat("consolidated", ".pth", r"consolidated.*\.pth"),
    "pth": ShardFormat("model", ".pth", r"[^.].*\.pth"),
}
# consolidated.00.pth, as Llama and Mistral were published
_PARALLEL_PART = r"consolidated\.\d+\.pth(?:$|[?#:])"
# <item>_<rank>.pt of torch_checkpointing, and the files of DeepSpeed's ZeRO.
_FILE_OF_RANK = r"(?P<item>.+)_\d+\.pt"
_STEP_OF_RANK = r"step-\d+\..+\.rank-\d+-of-\d+\.pt"
_ZERO_FILE = r"(?:(?:bf16|fp16)_)?zero_pp_rank_\d+_mp_rank_\d+.*_states\.pt"
_NUMBERED = r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)"


class ShardFiles(NamedTuple):
    """The files of a checkpoint.

    Attributes
    ----------
    paths : list of str
        Paths or URLs, in the order of their names.
    weight_map : dict of str to str or None
        Paths of files by names of tensors, if there is an index that says so.
    index_path : str
        The index, or "".
    path : str
        The directory, index or file that was asked for.
    storage_options : mapping
        For the file system of URLs.
    source : RangeSource or None
        The only file, open.
    ranks : tuple of tuple of str or None
        For each file the keys below which its object is, if ranks have written one each.
    """

    paths: list[str]
    weight_map: dict[str, str] | None = None
    index_path: str = ""
    path: str = ""
    storage_options: Mapping[str, Any] = MappingProxyType({})
    source: RangeSource | None = None
    ranks: tuple[tuple[str, ...], ...] | None = None

    @property
    def is_one(self) -> bool:
        """Whether this is one file, all of which counts."""
        return len(self.paths) == 1 and self.weight_map is None and self.ranks is None

    def name_of(self, path: str) -> str:
        """Return the name of a file in the directory of all of them."""
        folder = folder_of(self.index_path or self.paths[0], self.storage_options).path
        links = zip(folder.split("::"), path.split("::"), strict=True)
        return next(link[len(own) :].lstrip("/") for own, link in links if own != link)

    def close(self) -> None:
        """Let go of the file that is open, if one is: its name is enough to open it again."""
        if self.source is not None:
            self.source.close()

    def open(self) -> Iterator[RangeSource]:
        """Open the files, one after another."""
        return map(self.open_one, self.paths)

    def open_one(self, path: str) -> RangeSource:
        """Open one of the files; the error says so if it is a shard that is missing."""
        if self.source is not None:
            return self.source
        try:
            return open_source(path, self.storage_options)
        except FileNotFoundError as error:
            if self.weight_map is None:
                raise
            raise self.missing(path) from error

    def missing(self, path: str) -> FileNotFoundError:
        """Return the error for a shard that the index names and that is not there."""
        tensors = [name for name, shard in (self.weight_map or {}).items() if shard == path]
        return FileNotFoundError(
            errno.ENOENT,
            f"a shard is missing that {self.index_path} names, with {some_of(tensors, 3)}",
            path,
        )


def find_shards(folder: Folder) -> ShardFiles | None:
    """Return the files of the model in a directory, by their names; None if there are none.

    A directory with several formats is read as the first of safetensors, ``pytorch_model*.bin``,
    ``model*.bin``, ``*.pt``, ``consolidated*.pth`` and ``*.pth``.  Within a format, an unsplit
    ``model.safetensors`` (``pytorch_model.bin``) beside an index, or beside numbered shards, is the
    model, as it is for transformers.

    Raises
    ------
    FileNotFoundError
        If an index, or the names of the others, promise a file that is not there.
    CorruptCheckpointError
        If an index is damaged.
    ValueError
        If there are several indices.
    """
    names = folder.names()
    for each in FORMATS.values():
        files = _find_format(folder, names, each)
        if files is not None:
            return files
    return None


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


def without_lost(files: ShardFiles, objects: Iterable[tuple[str, Any]]) -> ShardFiles:
    """Return a set with an index of only the entries that its shards, of which some are cut, hold.

    A `CheckpointWarning` names the others.

    Parameters
    ----------
    files : ShardFiles
        The files.
    objects : iterable of (str, object)
        The paths of the files, and the object of each.
    """
    if files.weight_map is None:
        return files
    there = {path: obj.keys() for path, obj in objects if isinstance(obj, Mapping)}
    kept = {name: path for name, path in files.weight_map.items() if name in there.get(path, ())}
    lost = [name for name in files.weight_map if name not in kept]
    if lost:
        named = some_of(lost, _N_LOST_NAMED)
        warn_user(f"{files.index_path}: not in the shards: {named}", CheckpointWarning)
    return files._replace(weight_map=kept)


def refuse_parallel_parts(found: Iterable[tuple[str, str]], files: ShardFiles) -> None:
    """Refuse files of which each has a part of the same tensors, for one rank of a job.

    Parameters
    ----------
    found : iterable of (str, str)
        Names, and the paths of their files.
    files : ShardFiles
        The files.

    Raises
    ------
    ValueError
        The message says how to go on.
    """
    if files.weight_map is not None or not all(map(is_parallel_part, files.paths)):
        return
    homes: dict[str, str] = {}
    for name, path in found:
        other = homes.setdefault(name, path)
        if other != path:
            raise ValueError(
                f"{name!r} is in {other} and in {path}: these {len(files.paths)} files are the "
                "parts of a model that was divided among as many ranks, and nothing in them says "
                "along which dimension.  Let each rank load the part of its number, by its path, "
                "or load them all one by one with ptsave.load() and join them as the model's own "
                "code does"
            )


def is_parallel_part(path: str) -> bool:
    """Whether a file is a part of a model that was divided among ranks, by its name.

    >>> is_parallel_part("llama/consolidated.00.pth")
    True
    """
    return re.search(_PARALLEL_PART, path) is not None


def is_zero_file(path: str) -> bool:
    """Whether a file is one rank's of DeepSpeed's ZeRO, by its name.

    >>> is_zero_file("global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    True
    """
    return re.fullmatch(_ZERO_FILE, path.rpartition("/")[2]) is not None


def refuse_files_of_ranks(files: ShardFiles) -> None:
    """Refuse files that ranks of a job have written, each its own part, by their names.

    Raises
    ------
    ValueError
        The message names their writer, and says how to go on.
    """
    names = [path.rpartition("/")[2] for path in files.paths]
    if any(map(is_zero_file, names)):
        raise ValueError(
            f"{files.path or files.paths[0]} is a DeepSpeed ZeRO checkpoint of {len(names)} files, "
            "in which each rank has its part of flattened tensors: make one file of it with the "
            "zero_to_fp32.py beside it, or look into its files one by one, by their paths"
        )
    if all(map(re.compile(_STEP_OF_RANK).fullmatch, names)):
        raise ValueError(
            f"{files.path or files.paths[0]} holds {len(names)} files in which ranks have saved "
            "their parts with ptsave.AsyncCheckpointer: let its restore() load them on as many "
            "ranks, look into all with ptsave.open(), or pass the path of one"
        )
    ranks = [
        match for match in map(re.compile(_FILE_OF_RANK).fullmatch, names) if match is not None
    ]
    items = sorted({match["item"] for match in ranks})
    if len(ranks) == len(names) > len(items):
        raise ValueError(
            f"{files.path or files.paths[0]} holds {len(names)} files named <item>_<rank>, as "
            f"torch_checkpointing writes them ({some_of(items, 3)}): each is what one rank has of "
            "it.  Pass the path of one, or load them on as many ranks with that library"
        )


def name_lost_entries(error: CorruptCheckpointError, path: str, files: ShardFiles) -> None:
    """Name the tensors of a shard that is too damaged to name them, if there is an index."""
    if not error.entries and files.weight_map is not None:
        error.entries = [name for name, shard in files.weight_map.items() if shard == path]
        more = ", ..." if len(error.entries) > _N_NAMED else ""
        named = ", ".join(error.entries[:_N_NAMED]) + more
        error.args = (f"{error}; {files.index_path} says that it holds {named}",)


def merged(objects: Iterable[tuple[str, Any]], files: ShardFiles) -> dict[Any, Any]:
    """Return the dicts of a model's files as one.

    Parameters
    ----------
    objects : iterable of (str, object)
        The paths of the files, and the object of each.
    files : ShardFiles
        The files; a name counts in the one that the index says.

    Raises
    ------
    TypeError
        If one of the objects is no dict.
    CorruptCheckpointError
        If the index promises a name that is in no file.
    ValueError
        If a name is in two files and no index says which one counts.
    """
    if files.ranks is not None:
        return _nested(zip(files.ranks, objects, strict=True))
    result: dict[Any, Any] = {}
    homes: dict[Any, str] = {}
    found: Iterable[tuple[Any, str, Any]]
    found = (item for path, obj in objects for item in _items_of(obj, path))
    if files.weight_map is not None:  # or each file is looked at before the next one is loaded
        found = those_in_index(((item[0], item[1], item) for item in found), files)
    for name, path, each in found:
        if name in result:
            refuse_parallel_parts([(name, homes[name]), (name, path)], files)
            refuse_files_of_ranks(files)
            raise ValueError(
                f"{name!r} is in {homes[name]} and in {path}: no index says which; if these are "
                "several checkpoints, pass the path of one"
            )
        result[name] = each
        homes[name] = path
    return result


def _nested(objects: Iterable[tuple[tuple[str, ...], tuple[str, Any]]]) -> dict[Any, Any]:
    """Return the objects of ranks below their keys."""
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
    if shard_format.single in names and (indices or _belong(numbered, shard_format)):
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
    _require_all_numbers(folder, shards)
    return ShardFiles([folder.join(name) for name in shards]) if shards else None


def _belong(numbered: Iterable[str], shard_format: ShardFormat) -> bool:
    """Whether a set of shards has names that begin and end like those of an unsplit model."""
    ours = (shard_format.stem, shard_format.suffix)
    return any(name.startswith(ours[0]) and name.endswith(ours[1]) for name in numbered)


def _require_all_numbers(folder: Folder, names: Iterable[str]) -> None:
    """Refuse a set that its names, ``...-00002-of-00008...``, say is not complete."""
    for numbered in numbered_sets(names):
        if numbered.missing:
            raise FileNotFoundError(
                errno.ENOENT,
                f"a shard is missing: there is {numbered.names[0]}, but not this one of its set",
                folder.join(numbered.missing),
            )


class NumberedSet(NamedTuple):
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
    for match in filter(None, map(re.compile(_NUMBERED).fullmatch, sorted(names))):
        if match["stem"].endswith(".rank"):
            continue  # a rank's part of an AsyncCheckpointer, of which the first is 0
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
    """Whether a file is an index of shards, by its content; a damaged one by its name.

    Examples
    --------
    >>> import io
    >>> from ptsave.sources.opening import open_source
    >>> is_index(open_source(io.BytesIO(b'{"weight_map": {"weight": "a.safetensors"}}')))
    True
    """
    if source.kind is not None:
        return False
    head, nbytes = source.head, source.nbytes
    if source.name.endswith(INDEX_SUFFIX):
        return what_came_instead(head, nbytes) is None
    if not head.lstrip().startswith(b"{") or nbytes > _MAX_INDEX_NBYTES:
        return False
    try:
        return bool(_weight_map_in(source))
    except CorruptCheckpointError:
        return False


def read_index(source: RangeSource, folder: Folder) -> ShardFiles:
    """Return the files that an index names, which lie beside it.

    Raises
    ------
    FileNotFoundError
        If one is not there.
    CorruptCheckpointError
        If the index is damaged.
    """
    with closing(source):
        in_folder = _weight_map_in(source)
    paths = {shard: folder.join(shard) for shard in {*in_folder.values()}}
    weight_map = {name: paths[shard] for name, shard in in_folder.items()}
    files = ShardFiles(sorted({*paths.values()}), weight_map, source.name)
    for shard in files.paths:
        if not folder.exists(shard):
            raise files.missing(shard)
    return files


def _weight_map_in(source: RangeSource) -> dict[str, str]:
    path = source.name
    refuse_what_came_instead(source)
    if source.nbytes > _MAX_INDEX_NBYTES:
        raise CorruptCheckpointError(f"{path}: too large for an index of shards", path=path)
    (text,) = source.read([(0, source.nbytes)])
    try:
        index: Any = json.loads(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise CorruptCheckpointError(f"{path}: not JSON: {error}", path=path) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{path}: an index of shards has a weight_map", path=path)
    sound: set[str] = set()  # names of files that have been looked at
    for tensor, name in weight_map.items():
        if isinstance(name, str) and (name in sound or _is_inside(name)):
            sound.add(name)
        else:
            raise CorruptCheckpointError(
                f"{path}: the file of {tensor} must be one in this directory, not {name!r}",
                path=path,
            )
    return weight_map


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def refuse_what_came_instead(source: RangeSource) -> None:
    """Raise for a file that a download has left in place of the one that was wanted.

    Raises
    ------
    NotCheckpointError
        If it is a git-lfs pointer, a web page, or empty.
    """
    instead = what_came_instead(source.head, source.nbytes)
    if instead is not None:
        path = source.name
        raise NotCheckpointError(f"{path} is no checkpoint: {instead}", path=path)
