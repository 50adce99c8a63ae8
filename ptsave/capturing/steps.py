"""Optimizers whose steps are those of a capture, and those whose steps nobody marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ptsave.support.torch_capture import never_compiled

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Marks the steps of an optimizer; without one, counts those of the model's optimizers.

    Parameters
    ----------
    model : torch.nn.Module
        The model that is captured.
    optimizer : torch.optim.Optimizer or None
        The one whose steps are marked.
    step : callable
        Marks a step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, step: Callable[[], None]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._handle: Any = None
        # By the first parameter of the model's: an optimizer may be made for each step.
        self._counts: dict[int, int] = {}

    def check(self) -> None:
        """Refuse an optimizer that does not train the model.

        Raises
        ------
        ValueError
            If it has none of the parameters of a model that has some to train.
        """
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
        """The most steps that the optimizers of one parameter have taken without being marked."""
        return max(self._counts.values(), default=0)

    @never_compiled
    def _mark(self, *_: object) -> None:
        self._step()

    @never_compiled
    def _count(self, optimizer: Optimizer, *_: object) -> None:
        if (first := self._first_trained(optimizer)) is not None:
            self._counts[first] = self._counts.get(first, 0) + 1

    def _first_trained(self, optimizer: Optimizer) -> int | None:
        """Return the id of the first parameter of an optimizer that is the model's, if one is."""
        own = {id(parameter) for parameter in self._model.parameters()}
        ids = (id(each) for group in optimizer.param_groups for each in group["params"])
        return next((each for each in ids if each in own), None)
