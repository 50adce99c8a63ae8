"""Finds this process's rank in its job, by torch.distributed or a launcher's environment."""

from __future__ import annotations

import operator
from typing import Any

from torch import distributed

from ptsave.support.config import read_integer


def group_of_job() -> Any:
    """Return torch.distributed's default group if all ranks of the job are in it; else None."""
    if _has_group() and distributed.get_world_size() > 1:
        return distributed.group.WORLD
    return None


def checked_rank(rank: object) -> int | None:
    """Return a rank as an int, or None; raise if it is not a number from 0 on."""
    if rank is None:
        return None
    try:
        if isinstance(rank, bool):
            raise TypeError
        number = operator.index(rank)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"rank must be a number from 0 on, or None, not {rank!r}") from None
    if number < 0:
        raise ValueError(f"rank must be a number from 0 on, or None, not {rank!r}")
    return number


def check_rank_is_named(directory: str, rank: int | None) -> None:
    """Raise if the caller names no `rank` and all ranks would save to one directory."""
    if rank is not None:
        return
    n_ranks = _n_ranks()
    if n_ranks > 1:
        raise RuntimeError(
            f"{directory}: of the {n_ranks} ranks of this job, each would replace the others' "
            "checkpoints, which have the same names: if all have the same values (DDP), make "
            "AsyncCheckpointer(directory, rank=0) on all of them and call save() on rank 0 only; "
            "if each has its own, call torch.distributed.init_process_group() first, or say "
            "which part each saves: AsyncCheckpointer(directory, rank=rank, world_size=n)"
        )


def check_rank_saves(directory: str, rank: int | None) -> None:
    """Raise if this process would save to checkpoints of another rank, or of no rank."""
    check_rank_is_named(directory, rank)
    own = _own_rank() if _n_ranks() > 1 else None
    if own not in (None, rank):
        raise RuntimeError(
            f"{directory}: this process is rank {own}, and the checkpoints are those of rank "
            f"{rank}: call save() there only, or give each rank a directory of its own"
        )


def check_rank_of_file(file: str, rank: int | None, call: str) -> None:
    """Raise if all ranks of a job would replace a file, or if it is another rank's file.

    `call` is the call up to its file, for messages: ``"capture(model, "``.
    """
    n_ranks = _n_ranks()
    if n_ranks == 1:
        return
    if rank is None:
        raise RuntimeError(
            f"{file}: of the {n_ranks} ranks of this job, each would replace the others' file: "
            f"make {call}path, rank=0) on rank 0 only, or give each rank a file, "
            f"{call}f'run-{{rank}}.pt', rank=rank)"
        )
    if (own := _own_rank()) not in (None, rank):
        raise RuntimeError(
            f"{file}: this process is rank {own}, and the file is that of rank {rank}: write it "
            "there only, or give each rank a file of its own"
        )


def _n_ranks() -> int:
    """Return the number of processes in the job, or 1 if it is unknown.

    ``WORLD_SIZE`` counts if the process group has one rank: one process of several may have made a
    group for itself.
    """
    n_in_group = distributed.get_world_size() if _has_group() else 1
    if n_in_group > 1:
        return n_in_group
    return read_integer("WORLD_SIZE", 1)


def _own_rank() -> int | None:
    if _has_group() and distributed.get_world_size() > 1:
        return distributed.get_rank()
    rank = read_integer("RANK", -1, minimum=0)
    return None if rank < 0 else rank


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
