"""The findings of verifying files, and those about files that belong together."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptsave.contents.shard_files import ShardFiles

__all__ = ["NO_CHECKSUMS", "Problem", "Verification", "compare_with_index"]

NO_CHECKSUMS = (
    "a safetensors file has no checksums: header and sizes are right, values were not checked"
)


@dataclass(frozen=True)
class Problem:
    """A fault of a file or a directory.

    Attributes
    ----------
    reason : str
        The kind of damage, in words.
    record : str or None
        The damaged record, if it is one.
    offset : int or None
        Position in the file, in bytes.
    entries : list of str
        The tensors that are damaged by it, as far as is known.
    """

    reason: str
    record: str | None = None
    offset: int | None = None
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """The result of verifying one file.

    Attributes
    ----------
    path : str
        The file.
    problems : list of Problem
        Empty for a file that is whole, as far as could be checked.
    remarks : list of str
        Checks that could not be made, and why.
    n_records : int
        Number of records; 0 for a file that is no archive.
    nbytes : int
        The size of the file.
    tensors : list of str or None
        The names of all tensors that are known; None if there is no telling.
    whole : list of str or None
        Names of those that can still be read.
    has_checksums : bool
        Whether values were compared with checksums; without them damage may not show.
    is_unfinished : bool
        Whether it has no end, and the rest was verified as far as it can be recovered.
    """

    path: str
    problems: list[Problem]
    remarks: list[str] = field(default_factory=list)
    n_records: int = 0
    nbytes: int = 0
    tensors: list[str] | None = None
    whole: list[str] | None = None
    has_checksums: bool = True
    is_unfinished: bool = False


def compare_with_index(files: ShardFiles, shards: list[Verification]) -> list[Problem]:
    """Return the problems of a set of shards whose files, each by itself, are whole.

    Parameters
    ----------
    files : ShardFiles
        The set.
    shards : list of Verification
        Result of each of its files.
    """
    problems = []
    found: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors or []:
            other = found.setdefault(name, shard.path)
            if other != shard.path and files.weight_map is None and files.ranks is None:
                problems.append(Problem(f"{name} is in {other} and in {shard.path}"))
    readable = {shard.path: set(shard.tensors) for shard in shards if shard.tensors is not None}
    for name, path in (files.weight_map or {}).items():
        if path in readable and name not in readable[path]:
            problems.append(Problem(f"{name} is not in {path}, where the index puts it"))
    return problems
