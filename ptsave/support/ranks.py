"""Finds the rank of this process in its job: torch.distributed, or a launcher's environment."""

from __future__ import annotations

import operator
from typing import Any

from torch import distributed

from ptsave.support.config import read_integer

__all__ = [
    "check_rank_is_named",
    "check_rank_of_file",
    "check_rank_saves",
    "checked_rank",
    "group_of_job",
]


def group_of_job() -> Any:
    """Return torch.distributed's default group if all ranks of the job are in it; else None."""
    if _has_group() and distributed.get_world_size() > 1:
        return distributed.group.WORLD
    return None


def checked_rank(rank: object) -> int | None:
    """Return the number of a rank, or None.

    Raises
    ------
    TypeError, ValueError
        If it is no number, or a negative one.
    """
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
    """Refuse a directory of checkpoints that all ranks of a job would save to.

    Parameters
    ----------
    directory : str
        The directory of the checkpoints.
    rank : int or None
        The rank whose checkpoints these are, if somebody has said so.

    Raises
    ------
    RuntimeError
        Nobody has, and there are several ranks.
    ValueError
        ``WORLD_SIZE`` is no positive integer.
    """
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
    """Refuse a save to checkpoints of another rank; arguments as of `check_rank_is_named`.

    Raises
    ------
    RuntimeError
        This process is another rank of a job of several, or nobody has said whose they are.
    ValueError
        ``WORLD_SIZE`` or ``RANK`` is no such number.
    """
    check_rank_is_named(directory, rank)
    own = _own_rank() if _n_ranks() > 1 else None
    if own not in (None, rank):
        raise RuntimeError(
            f"{directory}: this process is rank {own}, and the checkpoints are those of rank "
            f"{rank}: call save() there only, or give each rank a directory of its own"
        )


def check_rank_of_file(file: str, rank: int | None, call: str) -> None:
    """Refuse a file that all ranks of a job would replace, or that is another rank's.

    Parameters
    ----------
    file : str
        The file.
    rank : int or None
        The rank whose file it is, if somebody has said so.
    call : str
        The call and its arguments before the file, for messages: ``"capture(model, "``.

    Raises
    ------
    RuntimeError
        Nobody has, and there are several ranks; or this process is another one.
    ValueError
        ``WORLD_SIZE`` or ``RANK`` is no such number.
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
    """Return how many processes the job has; 1 if nobody says.

    Of the process group and ``WORLD_SIZE``, the larger number counts: one process of several may
    have made a group for itself.
    """
    n_in_group = distributed.get_world_size() if _has_group() else 1
    if n_in_group > 1:
        return n_in_group
    return read_integer("WORLD_SIZE", 1, minimum=1)


def _own_rank() -> int | None:
    if _has_group() and distributed.get_world_size() > 1:
        return distributed.get_rank()
    rank = read_integer("RANK", -1, minimum=0)
    return None if rank < 0 else rank


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
