"""Adds the checkpoint, the rank and the step to errors of DCP's collectives.

DCP sends plans and results of all ranks to one rank and back.  If a rank ends or does not answer,
the process group's error names neither the checkpoint nor the rank.  The new error has the same
type, so that callers still catch it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ptsave.support import torch_dcp

# The directory or URL of the save or load that this thread is making.
_checkpoint: ContextVar[object] = ContextVar("_checkpoint", default=None)


def _naming_checkpoint(function: Callable[..., Any], storage: str) -> Callable[..., Any]:
    """Wrap a function of DCP so that errors during a call can name its checkpoint."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        token = _checkpoint.set(getattr(given[storage], "checkpoint_id", None))
        try:
            return function(*args, **kwargs)
        finally:
            _checkpoint.reset(token)

    return call


save_state_dict = _naming_checkpoint(torch_dcp.save_state_dict, "storage_writer")
load_state_dict = _naming_checkpoint(torch_dcp.load_state_dict, "storage_reader")


def _naming_ranks(name: str) -> Callable[..., Any]:
    """Wrap a method that exchanges values between ranks so that its errors name the rank."""
    method = getattr(torch_dcp.DistWrapper, name)

    @functools.wraps(method)
    def exchange(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except RuntimeError as error:
            raise self.named(error) from error

    return exchange


def _noting_step(name: str) -> Callable[..., Any]:
    """Wrap a method that makes one step of a save or load so that errors name the step."""
    method = getattr(torch_dcp.DistWrapper, name)

    @functools.wraps(method)
    def make(self: Any, step: str, *args: Any) -> Any:
        self.step = step
        return method(self, step, *args)

    return make


class NamingGroup(torch_dcp.DistWrapper):  # type: ignore[misc]  # found at run time
    """DCP's wrapper of a process group, with errors that name checkpoint, rank and step."""

    step = ""

    def named(self, error: RuntimeError) -> RuntimeError:
        """Return an error of the same type that names the checkpoint, the rank and the step."""
        where, step = _checkpoint.get(), f" in the step {self.step!r}" if self.step else ""
        message = (
            f"{'the checkpoint' if where is None else where}: rank {self.get_rank()} of "
            f"{self.get_world_size()} could not go on{step}: another rank has ended or does not "
            f"answer: {error}"
        )
        try:
            return type(error)(message)
        except TypeError:  # the type needs other arguments
            return RuntimeError(message)

    broadcast_object = _naming_ranks("broadcast_object")
    gather_object = _naming_ranks("gather_object")
    all_gather_object = _naming_ranks("all_gather_object")
    scatter_object = _naming_ranks("scatter_object")
    barrier = _naming_ranks("barrier")

    reduce_scatter = _noting_step("reduce_scatter")
    all_reduce = _noting_step("all_reduce")
    all_gather = _noting_step("all_gather")
    broadcast = _noting_step("broadcast")
