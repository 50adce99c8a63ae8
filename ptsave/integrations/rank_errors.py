"""Lets all ranks of an accelerate job raise if one does: otherwise the others would wait for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ptsave.errors import SaveError

__all__ = ["raised_on_all"]


@contextmanager
def raised_on_all(accelerator: Any, place: str) -> Iterator[None]:
    """Run the block on all ranks at once; all of them leave it when all have ended it.

    An interruption (KeyboardInterrupt, SystemExit) leaves it at once.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        This process's.
    place : str
        What is being written, for messages.

    Raises
    ------
    Exception
        The block's own, on the ranks where it raises.
    SaveError
        On the other ranks then; it quotes that error.
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
    with suppress(RuntimeError):  # a process that ends now would take its message along
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
    if accelerator.distributed_type == utils.DistributedType.XLA:  # which gathers tensors only
        return [utils.broadcast_object_list([text], rank)[0] for rank in range(n_ranks)]
    texts: list[str | None] = utils.gather_object([text])
    return texts
