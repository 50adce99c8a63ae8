"""Finds this process's rank in its job, from torch.distributed or a launcher's variables."""

from __future__ import annotations

import operator
from typing import Any

from torch import distributed

from ptsave.support.config import read_integer


def group_of_job() -> Any:
    """Return torch.distributed's default group if it has several ranks; otherwise, return None."""
    if _has_group() and distributed.get_world_size() > 1:
        return distributed.group.WORLD
    return None


def checked_rank(rank: object) -> int | None:
    """Return a rank as an int, None as None; raise for anything but an integer of at least 0."""
    if rank is None:
        return None
    try:
        if isinstance(rank, bool):
            raise TypeError
        number = operator.index(rank)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"rank must be an integer of at least 0, or None, not {rank!r}") from None
    if number < 0:
        raise ValueError(f"rank must be an integer of at least 0, or None, not {rank!r}")
    return number


def check_rank_is_named(directory: str, rank: int | None) -> None:
    """Raise a RuntimeError if `rank` is None, but several ranks would save to `directory`."""
    if rank is not None:
        return
    n_ranks = _n_ranks()
    if n_ranks > 1:
        raise RuntimeError(
            f"{directory}: this job has {n_ranks} ranks, and each would replace the others' "
            "checkpoints, which have the same names. If all ranks have the same values (DDP), make "
            "AsyncCheckpointer(directory, rank=0) on all ranks, and call save() on rank 0 only. "
            "If each rank has its own values, call torch.distributed.init_process_group() first, "
            "or pass each rank's number in AsyncCheckpointer(directory, rank=rank, world_size=n)"
        )


def check_rank_saves(directory: str, rank: int | None) -> None:
    """In a job with several ranks, raise if `rank` is None or is not this process's rank."""
    check_rank_is_named(directory, rank)
    own = _own_rank() if _n_ranks() > 1 else None
    if own not in (None, rank):
        raise RuntimeError(
            f"{directory}: this process is rank {own}, and the checkpoints belong to rank {rank}: "
            "call save() on that rank only, or give each rank its own directory"
        )


def check_rank_of_file(file: str, rank: int | None, call: str) -> None:
    """In a job with several ranks, raise if `rank` is None or is not this process's rank.

    `call` is the beginning of the user's call, for messages, such as ``"capture(model, "``.
    """
    n_ranks = _n_ranks()
    if n_ranks == 1:
        return
    if rank is None:
        raise RuntimeError(
            f"{file}: this job has {n_ranks} ranks, and each would replace the others' file: "
            f"call {call}path, rank=0) on rank 0 only, or give each rank its own file with "
            f"{call}f'run-{{rank}}.pt', rank=rank)"
        )
    if (own := _own_rank()) not in (None, rank):
        raise RuntimeError(
            f"{file}: this process is rank {own}, and the file belongs to rank {rank}: write it "
            "on that rank only, or give each rank its own file"
        )


def _n_ranks() -> int:
    """Return the number of processes in the job, or 1 if it is unknown.

    If the process group has one rank, ``WORLD_SIZE`` is used, because one process of several may
    have made a group for itself.
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
