"""Buffers that are None until training gives them a tensor, and have no shape before that."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.parameter import is_lazy

__all__ = ["LazyBufferHook", "register_lazy_buffer"]


def register_lazy_buffer(module: nn.Module, name: str) -> None:
    """Declare a buffer that is saved when it is set, and loads in whatever shape the file has.

    Loading stays strict about everything else.  It works with ``module.load_state_dict`` and
    :func:`ptsave.load_state_dict`, and the declaration is copied and pickled with the module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    name : str
        The attribute.  If it is None or a tensor already, it keeps that value; if the module has
        no such attribute, it becomes None.

    Raises
    ------
    TypeError, KeyError
        As from :meth:`torch.nn.Module.register_buffer`.
    ValueError
        If there is a buffer of that name that state dicts leave out (``persistent=False``).

    Notes
    -----
    Loading sets the buffer as follows.  A state dict without it makes it None.  If its shape is the
    present one, the present tensor is overwritten.  If not, a new tensor takes its place: with the
    present one's dtype and device, or, where there is none, with the dtype in the state dict and on
    the device of the module's other tensors.  A load pre-hook that renames its key must have been
    registered before.

    Examples
    --------
    >>> import torch, ptsave
    >>> class Memory(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.seen = None
    ...         ptsave.register_lazy_buffer(self, "seen")
    >>> trained, fresh = Memory(), Memory()
    >>> trained.seen = torch.arange(3)
    >>> fresh.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    >>> fresh.seen
    tensor([0, 1, 2])
    """
    if name not in module._buffers:
        attributes = vars(module)
        present = {name: attributes.pop(name)} if name in attributes else {}
        try:
            module.register_buffer(name, present.get(name))
        except (KeyError, TypeError):
            attributes.update(present)
            raise
    elif name in module._non_persistent_buffers_set:
        raise ValueError(
            f"the buffer {name!r} is left out of state dicts: register it with persistent=True, "
            "or not at all, before register_lazy_buffer"
        )
    if not any(_declares(hook, name) for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(LazyBufferHook(name))


def _declares(hook: Any, name: str) -> bool:
    declared = hook.hook if type(hook) is _WrappedHook else None
    return type(declared) is LazyBufferHook and declared.name == name


class LazyBufferHook:
    """A load pre-hook that gives one buffer the shape that it has in the state dict.

    It looks at shapes, dtypes and devices, never at values.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Put in place what torch will copy or assign to."""
        key = prefix + self.name
        if key not in state_dict:
            module._buffers[self.name] = None
            return
        saved, present = state_dict[key], module._buffers.get(self.name)
        if not isinstance(saved, Tensor) or is_lazy(saved):
            return  # torch says what is wrong
        if present is not None and present.shape == saved.shape:
            return
        if local_metadata.get("assign_to_params_buffers", False):
            place = torch.empty_like(saved, device="meta")
        elif present is not None:
            place = torch.empty_like(saved, dtype=present.dtype, device=present.device)
        else:
            place = torch.empty_like(saved, device=_device_of(module, saved))
        module._buffers[self.name] = place


def _device_of(module: nn.Module, saved: Tensor) -> torch.device:
    others = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in others), saved.device)
