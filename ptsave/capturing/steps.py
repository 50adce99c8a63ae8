"""Marks a capture's steps at the steps of an optimizer, or counts steps that are not marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ptsave.support.torch_capture import never_compiled


class OptimizerSteps:
    """Calls `step` after each step of an optimizer.

    Without an optimizer, it counts the steps of the model's optimizers.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, step: Callable[[], None]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._handle: Any = None
        # By the id of a parameter: a program may make a new optimizer for each step.
        self._counts: dict[int, int] = {}

    def check(self) -> None:
        """Raise a ValueError if the optimizer has no parameter of a model that is trained."""
        optimizer = self._optimizer
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            return
        is_trained = any(each.requires_grad for each in self._model.parameters())
        if is_trained and self._first_trained(optimizer) is None:
            raise ValueError(
                f"optimizer, of {type(optimizer).__name__}, has none of the model's "
                "parameters: give the one that trains it, or none and call capture.step() at the "
                "end of each step"
            )

    def install(self) -> None:
        """Register the hook."""
        if self._optimizer is None:
            self._handle = register_optimizer_step_post_hook(self._count)
        else:
            self._handle = self._optimizer.register_step_post_hook(self._mark)

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def n_unmarked(self) -> int:
        """The largest number of unmarked steps of one parameter's optimizers."""
        return max(self._counts.values(), default=0)

    @never_compiled
    def _mark(self, *_: object) -> None:
        self._step()

    @never_compiled
    def _count(self, optimizer: Optimizer, *_: object) -> None:
        if (first := self._first_trained(optimizer)) is not None:
            self._counts[first] = self._counts.get(first, 0) + 1

    def _first_trained(self, optimizer: Optimizer) -> int | None:
        """Return the id of an optimizer's first parameter that is the model's, or None."""
        own = {id(parameter) for parameter in self._model.parameters()}
        ids = (id(each) for group in optimizer.param_groups for each in group["params"])
        return next((each for each in ids if each in own), None)
