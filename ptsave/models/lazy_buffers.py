"""A model's lazy buffers to which a checkpoint gives another shape, or None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ptsave.models.shards import Entry
from ptsave.state.lazy_buffers import lazy_buffer_hooks, new_buffer
from ptsave.state.renaming import Renaming
from ptsave.support.torch_modules import buffers_of, having, pre_hooks_of


@dataclass(eq=False, repr=False)
class _LazyBuffer:
    """One buffer, under all of its names in the model."""

    module: nn.Module
    name: str
    full_names: list[str] = field(default_factory=list)
    entry: Entry | None = None  # None: the checkpoint has nothing for it
    new: Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether the present tensor is filled, because it has the entry's shape."""
        present = buffers_of(self.module)[self.name]
        return self.entry is not None and present is not None and present.shape == self.entry.shape

    def like(self) -> Tensor | None:
        """Return a tensor of the entry's shape and dtype that takes no memory."""
        if self.entry is None:
            return None
        return torch.empty((), dtype=self.entry.dtype, device="cpu").expand(self.entry.shape)


class LazyBuffers:
    """The buffers that :func:`ptsave.register_lazy_buffer` has declared in a model.

    A new tensor replaces a buffer only once it holds the checkpoint's values, so a failed load
    leaves the buffer as it was. `modules` lists each module under all of its names. The later of
    two entries with one name counts. `changing` holds the buffers that get another tensor, or None.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        entries: Sequence[Entry],
        renaming: Renaming,
    ) -> None:
        found: dict[tuple[int, str], _LazyBuffer] = {}
        by_name: dict[str | None, Entry] = {}
        for prefix, module in having(modules, pre_hooks_of):
            for hook in lazy_buffer_hooks(module):
                by_name = by_name or {renaming(entry.name): entry for entry in entries}
                if hook.name in buffers_of(module):
                    key = (id(module), hook.name)
                    lazy = found.setdefault(key, _LazyBuffer(module, hook.name))
                    full_name = f"{prefix}.{hook.name}" if prefix else hook.name
                    lazy.full_names.append(full_name)
                    lazy.entry = by_name.get(full_name, lazy.entry)
        self.changing = [lazy for lazy in found.values() if not lazy.stays]

    def in_place_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors by name as the load leaves them; new buffers have no values."""
        tensors = dict(tensors)
        for lazy in self.changing:
            like = lazy.like()
            for name in lazy.full_names:
                tensors.pop(name, None)
                if like is not None:
                    tensors[name] = like
        return tensors

    def allocate(self) -> dict[str, Tensor]:
        """Allocate the new buffers, where the model is now, and return them by name."""
        tensors = {}
        for lazy in self.changing:
            like = lazy.like()
            if like is not None:
                lazy.new = new_buffer(lazy.module, buffers_of(lazy.module)[lazy.name], like)
                tensors.update(dict.fromkeys(lazy.full_names, lazy.new))
        return tensors

    def put(self) -> None:
        """Put the new tensors, which hold their values by now, into their modules."""
        for lazy in self.changing:
            buffers_of(lazy.module)[lazy.name] = lazy.new
