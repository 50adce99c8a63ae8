"""Copiers: put the tensors of a state dict into a module or an optimizer, at once or later.

Loading a state dict decides on sources and targets; a `Copier` decides *when* to copy. A restore
from a file collects the copies, so that everything can be checked before the first byte of a target
changes.
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


class Replacement(NamedTuple):
    """A tensor that replaces a buffer once it holds the values of its source.

    `new` and `source` are both None for a buffer that becomes None.
    """

    buffers: dict[str, Tensor | None]
    name: str
    new: Tensor | None
    source: Tensor | None

    def make(self) -> None:
        """Put the new tensor into the dict of buffers."""
        self.buffers[self.name] = self.new


class Copier(Protocol):
    """Decides when tensors of a state dict are copied, whether they hold values yet or not."""

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each source into its target, as ``copy_`` does under no_grad.

        Only for pairs (target, source) whose copies cannot fail: strided tensors of exactly torch's
        own types, of one shape, on real devices.
        """

    def replace(self, replacement: Replacement) -> None:
        """Copy `source` into `new`, as by `copy`, and then make `new` the buffer.

        If the values do not arrive, the buffer stays as it is.
        """

    def note_assigned(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because a module gets the entries themselves."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """Return ``source.to(dtype=dtype, device=device)``: `source` itself if nothing changes."""

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code will only look at them.

        Nothing has been passed to `copy` yet, and that code changes nothing. A copier whose tensors
        are stand-ins replaces them in the dict.
        """

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Give these entries their values, because other people's code is about to run.

        That code may also look at every target, so all copies passed to `copy` must be done when
        this returns. A copier whose tensors are stand-ins replaces them in the dict.
        """

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Do what `show` does, and return the dict for that code, which may edit it.

        The dict may read an entry only when that code asks for it.
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
        """Do nothing: all values are always there."""

    def lend(self, state_dict: Mapping[Any, Any]) -> None:
        """Do nothing: all values are always there."""

    def convert(self, source: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        return source.to(dtype=dtype, device=device)

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        """Do nothing: all values are always there."""

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        self.show(entries)
        return entries


class CopyLater(CopyNow):
    """Copies when it must, or at the end, so that errors are known before the first copy."""

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
    """Copies nothing, for a trial run that finds the errors of a load."""

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Do nothing."""

    def replace(self, replacement: Replacement) -> None:
        """Do nothing."""


class LookOnly(CopyNothing):
    """Copies nothing, and lets `copier` lend values to code that looks at them."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        self._copier.lend(state_dict)


def tensors_in(obj: Any) -> list[Tensor]:
    """Return the tensors of nested containers and of their attributes, and one for each storage.

    Uninitialized parameters and buffers are left out, because they have no memory.
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
