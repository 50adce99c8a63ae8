"""Copiers: put the tensors of a state dict into a module or an optimizer, at once or later.

Loading a state dict decides on sources and targets; a `Copier` decides *when*.  `CopyNow` copies
at once, as torch does.  A restore from a file collects the copies instead, so that everything can
be checked before the first byte of a target changes, and the file's bytes go directly to their
place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ptsave import _C
from ptsave.support.torch_tensors import untyped_of
from ptsave.tree.containers import walk

__all__ = [
    "Copier",
    "CopyLater",
    "CopyNothing",
    "CopyNow",
    "LookOnly",
    "Replacement",
    "tensors_in",
]


class Replacement(NamedTuple):
    """A tensor that takes a buffer's place when it holds the values of its source.

    Attributes
    ----------
    buffers, name : dict, str
        The dict that holds the buffer, and its key.
    new, source : Tensor or None
        None, both of them, for a buffer that becomes None.
    """

    buffers: dict[str, Tensor | None]
    name: str
    new: Tensor | None
    source: Tensor | None

    def make(self) -> None:
        """Let the new tensor be the buffer."""
        self.buffers[self.name] = self.new


class Copier(Protocol):
    """Decides when tensors of a state dict are copied, whether they hold values yet or not."""

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Let each target hold the values of its source, as by ``copy_`` under no_grad.

        Only for pairs (target, source) whose copies cannot fail: tensors of exactly torch's own
        types, strided, of one shape, on real devices.
        """

    def replace(self, replacement: Replacement) -> None:
        """Let `new` hold the values of `source`, as by `copy`, and then be the buffer.

        If the values do not arrive, the buffer stays as it is.
        """

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because a module is getting them themselves."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return ``source.to(dtype=dtype, device=device)``: `source` itself if nothing changes."""

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code will only look at them.

        Nothing has been passed to `copy` yet, and nothing will have changed afterwards.  A copier
        whose tensors are stand-ins puts others in their places in the dict.
        """

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code is about to run.

        It may also look at every target: all copies passed to `copy` must be done when this
        returns.  A copier whose tensors are stand-ins puts others in their places in the dict.
        """

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Do what `show` does, and return the dict for that code, which may edit it.

        It may be one that reads an entry when it is asked for.
        """


class CopyNow:
    """Copies at once, as torch does."""

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        n_done = _C.copy_small(copies, 0)
        if n_done < len(copies):
            with torch.no_grad():
                while n_done < len(copies):
                    target, source = copies[n_done]
                    target.copy_(source)
                    n_done = _C.copy_small(copies, n_done + 1)

    def replace(self, replacement: Replacement) -> None:
        if replacement.new is not None and replacement.source is not None:
            self.copy([(replacement.new, replacement.source)])
        replacement.make()

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        """Do nothing: nobody asks."""

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Do nothing: everything is always there."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        return source.to(dtype=dtype, device=device)

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Do nothing: everything is always there."""

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        self.show(entries)
        return entries


class CopyLater(CopyNow):
    """Copies when it must, or in the end, so that errors are known before the first copy."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._replacements: deque[Replacement] = deque()

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._copies += copies

    def replace(self, replacement: Replacement) -> None:
        self._replacements.append(replacement)

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self.finish()

    def finish(self) -> None:
        """Make all copies."""
        super().copy(self._copies)
        self._copies.clear()
        while self._replacements:
            self._make(self._replacements.popleft())

    def _make(self, replacement: Replacement) -> None:
        if replacement.new is not None and replacement.source is not None:
            super().copy([(replacement.new, replacement.source)])
        replacement.make()


class CopyNothing(CopyNow):
    """Copies nothing: for a trial run, which finds the errors of a load."""

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Do nothing."""

    def replace(self, replacement: Replacement) -> None:
        """Do nothing."""


class LookOnly(CopyNothing):
    """Copies nothing, and lends values to those who look at them before anything changes.

    Parameters
    ----------
    copier : Copier
        Knows where the values are.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self._copier.lend(state_dict)


def tensors_in(obj: Any) -> list[Tensor]:
    """Return the tensors of nested containers and of their attributes, and one for each storage.

    Uninitialized parameters and buffers are left out, because they have no memory.
    Each container is looked at once.
    """
    found: list[Tensor] = []
    for value in walk(obj, (Mapping, list, tuple, set, frozenset), keys=True):
        if isinstance(value, Tensor):
            if not is_lazy(value):
                found.append(value)
        elif isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            untyped = untyped_of(value) if isinstance(value, torch.TypedStorage) else value
            found.append(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
    return found
