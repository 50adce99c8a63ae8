"""Lazy buffers: buffers that are None, without a known shape, until training sets them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave.state.copying import failure_message
from ptsave.support.torch_modules import (
    WrappedHook,
    buffers_of,
    non_persistent_buffers_of,
    pre_hooks_of,
)


def register_lazy_buffer(module: nn.Module, name: str) -> None:
    """Declare a buffer that may be None until training sets it, and that accepts any saved shape.

    Loading stays strict about all other entries.  ``module.load_state_dict`` and
    :func:`ptsave.load_state_dict` both load such a buffer.  The declaration is copied and pickled
    with the module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    name : str
        The attribute that becomes the buffer.  If it is None or a tensor already, it keeps its
        value.  If the module has no such attribute, the buffer is None.

    Raises
    ------
    TypeError, KeyError
        The same errors as from :meth:`torch.nn.Module.register_buffer`.
    ValueError
        If the module has a buffer of that name with ``persistent=False``.

    Notes
    -----
    Loading sets the buffer as follows.  If the state dict lacks the buffer, the buffer becomes
    None.  If the saved tensor has the shape of the present tensor, the present tensor is
    overwritten.  Otherwise a new tensor with the same dtype and device replaces the present tensor.
    If the buffer is None, the new tensor has the saved dtype, and the device of the module's other
    tensors.  All other load pre-hooks of the module run before the buffer changes.  If loading
    fails, or one of these hooks removes the buffer's key, the buffer stays as it was.

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
    if name not in buffers_of(module):
        attributes = vars(module)
        present = {name: attributes.pop(name)} if name in attributes else {}
        try:
            module.register_buffer(name, present.get(name))
        except (KeyError, TypeError):
            attributes.update(present)
            raise
    elif name in non_persistent_buffers_of(module):
        raise ValueError(
            f"the buffer {name!r} is left out of state dicts: register it with persistent=True, "
            "or let register_lazy_buffer register it"
        )
    if all(hook.name != name for hook in lazy_buffer_hooks(module)):
        module.register_load_state_dict_pre_hook(LazyBufferHook(name))


def lazy_buffer_hooks(module: nn.Module) -> list[LazyBufferHook]:
    """Return the load pre-hooks of a module that `register_lazy_buffer` has registered."""
    return [hook.hook for hook in pre_hooks_of(module).values() if is_lazy_buffers(hook)]


def is_lazy_buffers(hook: Any) -> bool:
    """Return whether a load pre-hook was registered by `register_lazy_buffer`."""
    return type(hook) is WrappedHook and type(hook.hook) is LazyBufferHook


class LazyBufferHook:
    """A load pre-hook that gives one buffer the shape that it has in the state dict.

    The new tensor gets its values before it replaces the buffer, so no code sees a buffer without
    values.
    """

    __module__ = "ptsave.lazy_buffers"  # the name in users' pickles

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Set the buffer that torch will load into, after the pre-hooks that follow this one."""
        hooks = pre_hooks_of(module)
        keys = [*hooks]
        own = (at for at, hook in enumerate(hooks.values()) if getattr(hook, "hook", None) is self)
        later = keys[next(own, len(keys)) + 1 :]
        was_there = prefix + self.name in state_dict
        self._wait_for(later, module, was_there, state_dict, prefix, *rest)

    def wanted(self, state_dict: Mapping[str, Any], key: str, present: Any) -> Any:
        """Return a tensor with the buffer's future shape, without reading any values.

        The result is None if the state dict lacks the buffer, and `present` if torch will load into
        the present tensor or report an error.  Otherwise it is the entry in the state dict.
        """
        if key not in state_dict:
            return None
        saved = state_dict[key]
        if not isinstance(saved, Tensor) or is_lazy(saved) or is_lazy(present):
            return present
        return present if present is not None and present.shape == saved.shape else saved

    def _wait_for(
        self, later: list[int], module: nn.Module, was_there: bool, *arguments: Any
    ) -> None:
        """Load the buffer after the hooks with the keys `later` have run."""
        if later:
            hooks = pre_hooks_of(module)
            hooks[later[0]] = _Relay(self, later, module, was_there)
        else:
            self._load(module, was_there, *arguments)

    def _load(
        self,
        module: nn.Module,
        was_there: bool,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *key_lists: Any,
    ) -> None:
        key = prefix + self.name
        if was_there and key not in state_dict:
            return  # a later hook has removed it
        present = buffers_of(module).get(self.name)
        saved = self.wanted(state_dict, key, present)
        if saved is present:
            return
        if saved is None:
            buffers_of(module)[self.name] = None
        elif local_metadata.get("assign_to_params_buffers", False):
            buffers_of(module)[self.name] = saved.detach()
        else:
            try:
                new = new_buffer(module, present, saved)
                if not new.is_meta:  # torch warns of a copy to the meta device
                    with torch.no_grad():
                        new.copy_(saved)
                buffers_of(module)[self.name] = new
            except Exception as error:
                error_msgs: list[str] = key_lists[-1]
                error_msgs.append(failure_message(key, saved, saved, error))
                if present is None:  # so that torch does not load the buffer, too
                    del state_dict[key]
                else:
                    state_dict[key] = present


class _Relay:
    """Takes a pre-hook's place for one call, so that a lazy buffer is loaded after that hook.

    A hook cannot move itself behind the other hooks while torch iterates over them, but it can
    replace the next hook.
    """

    lazy: LazyBufferHook
    hook: Any

    def __init__(
        self, lazy: LazyBufferHook, later: list[int], module: nn.Module, was_there: bool
    ) -> None:
        hook: Any = pre_hooks_of(module)[later[0]]
        if type(hook) is _Relay and hook.lazy is lazy:  # left by an interrupted load
            hook = hook.hook
        self.lazy = lazy
        self.hook = hook
        self._later = later
        self._module = module
        self._was_there = was_there

    def __call__(self, *arguments: Any) -> None:
        pre_hooks_of(self._module)[self._later[0]] = self.hook
        self.hook(*arguments)
        self.lazy._wait_for(self._later[1:], self._module, self._was_there, *arguments)


def new_buffer(module: nn.Module, present: Tensor | None, saved: Tensor) -> Tensor:
    """Return an empty tensor for a buffer of a module, in the shape of `saved`.

    The new tensor has the dtype and device of `present`. If `present` is None, the new tensor has
    the dtype of `saved` and the device of the module's other tensors.
    """
    if present is not None:
        return torch.empty_like(saved, dtype=present.dtype, device=present.device)
    others = itertools.chain(module.parameters(), module.buffers())
    device = next((tensor.device for tensor in others), saved.device)
    return torch.empty_like(saved, device=device)
