"""Raises an error of one rank on all ranks of an accelerate job, which would wait for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ptsave.errors import SaveError

__all__ = ["raised_on_all"]


@contextmanager
def raised_on_all(accelerator: Any, place: str) -> Iterator[None]:
    """Run the block on all ranks; all leave it together, and if it raises on one, all raise.

    The other ranks raise a SaveError that quotes the error and names `place`.  KeyboardInterrupt
    and SystemExit leave the block without waiting.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    text = None if own is None else f"{type(own).__name__}: {own}"
    texts = _texts_of_all(accelerator, text)
    failed = [rank for rank, each in enumerate(texts) if each is not None]
    if not failed:
        return
    with suppress(RuntimeError):  # a rank that exits before the others took its message loses it
        accelerator.wait_for_everyone()
    if own is not None:
        raise own
    rank = failed[0]
    raise SaveError(f"{place}: rank {rank} could not complete the checkpoint: {texts[rank]}")


def _texts_of_all(accelerator: Any, text: str | None) -> list[str | None]:
    n_ranks = accelerator.num_processes
    if n_ranks == 1:
        return [text]
    utils = importlib.import_module("accelerate.utils")
    if accelerator.distributed_type == utils.DistributedType.XLA:  # gathers only tensors
        return [utils.broadcast_object_list([text], rank)[0] for rank in range(n_ranks)]
    texts: list[str | None] = utils.gather_object([text])
    return texts
