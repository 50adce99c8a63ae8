"""The results of verifying files, and the checks of files that belong together."""

from __future__ import annotations

from dataclasses import dataclass, field

from ptsave.contents.shard_files import ShardFiles

NO_CHECKSUMS = (
    "a safetensors file has no checksums: header and sizes are right, values were not checked"
)


@dataclass(frozen=True)
class Problem:
    """A fault of a file or a directory, and the tensors that are known to be damaged by it.

    The fields are keys of ``ptsave verify --json``.
    """

    reason: str
    record: str | None = None
    offset: int | None = None  # in the file, in bytes
    entries: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verification:
    """The result of verifying one file."""

    path: str
    problems: list[Problem]  # empty if every check succeeds
    remarks: list[str] = field(default_factory=list)  # checks that could not be made, and why
    n_records: int = 0  # 0 for a file that is no archive
    nbytes: int = 0
    tensors: list[str] | None = None  # names; None if they are unknown
    whole: list[str] | None = None  # names of the tensors that can still be read
    has_checksums: bool = True  # without checksums, damage to values may not show
    is_unfinished: bool = False  # it has no end, and the recoverable part was verified


def compare_with_index(files: ShardFiles, shards: list[Verification]) -> list[Problem]:
    """Return the problems between shards: tensors in two files, or not where the index says."""
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
