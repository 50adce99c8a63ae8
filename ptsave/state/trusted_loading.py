"""Recognizes modules whose own entries are loaded by torch's code alone, not by user code.

For such a module, `ptsave.state.modules` does the work of torch's code itself. For every other
module it calls the module's own code. The functions here never look at values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.modules import module as module_module
from torch.overrides import is_tensor_like

from ptsave.state.copying import PLAIN_TYPES
from ptsave.state.lazy_buffers import is_lazy_buffers
from ptsave.support.torch_modules import (
    LOAD_METHOD,
    InstanceNorm,
    NormBase,
    WrappedHook,
    buffers_of,
    having,
    lazy_load_hook,
    load_method_of,
    non_persistent_buffers_of,
    parameters_of,
    post_hooks_of,
    pre_hooks_of,
    registration_hooks,
)


def _torchs(function: Any, home: ModuleType) -> Any:
    """Return `function` if it is torch's own; otherwise, return an object that equals no other."""
    code = getattr(function, "__code__", None)
    return function if code is not None and code.co_filename == home.__file__ else object()


# Other code may replace one of these functions, before or after ptsave is imported.  Then ptsave
# must call the replacement.
_LOAD_STATE_DICT = _torchs(nn.Module.load_state_dict, module_module)
_MODULE = _torchs(load_method_of(nn.Module), module_module)
_NORM = _torchs(load_method_of(NormBase), batchnorm)
_INSTANCE_NORM = _torchs(load_method_of(InstanceNorm), instancenorm)
_SET_ATTRIBUTE = (nn.Module.__setattr__, nn.RNNBase.__setattr__)
_REGISTER = (nn.Module.register_parameter, nn.Module.register_buffer)


def overrides_load_state_dict(module: nn.Module) -> bool:
    """Return whether ``module.load_state_dict`` is not torch's own method."""
    return getattr(module.load_state_dict, "__func__", None) is not _LOAD_STATE_DICT


def sets_extra_state(module: nn.Module) -> bool:
    """Return whether the module overrides `set_extra_state`, by torch's own test."""
    default = nn.Module.set_extra_state
    return getattr(module.__class__, "set_extra_state", default) is not default


def own_tensors(
    module: nn.Module, lazy_buffers: Mapping[str, Tensor | None] | None = None
) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module loads itself, as torch collects them.

    `lazy_buffers` holds the future tensors of buffers that will change.
    """
    own: dict[str, Tensor]
    own = {name: tensor for name, tensor in parameters_of(module).items() if tensor is not None}
    if buffers_of(module):
        hidden = non_persistent_buffers_of(module)
        buffers = {**buffers_of(module), **lazy_buffers} if lazy_buffers else buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and name not in hidden:
                own[name] = buffer
    return own


def begin_plainly(
    module: nn.Module, entries: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> tuple[dict[str, Tensor], bool] | None:
    """Call `run_trusted_code` for a module, if only trusted code runs before its copies.

    Trusted code is `run_trusted_code`, and hooks of lazy buffers that see only plain tensors.
    Returns the module's `own_tensors`, and whether the module sets extra state afterwards. If the
    module's own code has to load the entries, this function does nothing and returns None.
    """
    if not runs_torchs_method(module, entries, prefix, metadata):
        return None
    for hook in pre_hooks_of(module).values():
        if not _is_trusted_hook(hook, module, entries, prefix):
            return None
    run_trusted_code(module, entries, prefix, metadata)
    return own_tensors(module), sets_extra_state(module)


def runs_torchs_method(
    module: nn.Module, entries: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> bool:
    """Return whether torch's method loads a module's own entries; hooks do not count."""
    cls = type(module)
    found = getattr(cls, LOAD_METHOD, None)
    if found is not _MODULE and not _is_trusted_norm(module, entries, prefix, metadata):
        return False
    return LOAD_METHOD not in vars(module) and cls.__getattribute__ is object.__getattribute__


def may_run_others_code(model: nn.Module) -> bool:
    """Return whether hooks, overrides or extra state may take part in loading a model."""
    return any(
        pre_hooks_of(module)
        or post_hooks_of(module)
        or getattr(type(module), LOAD_METHOD, None) is not _MODULE
        or LOAD_METHOD in vars(module)
        or sets_extra_state(module)
        for module in model.modules()
    )


def has_code_of_its_own(module: nn.Module, prefix: str, names: Container[str | None]) -> bool:
    """Return whether loading entries with these `names` runs the module's own code.

    The hooks of lazy buffers do not count.
    """
    cls = type(module)
    if load_method_of(cls) is not _MODULE and _is_trusted_norm(module, {}, prefix, {}):
        counts = bool(module.track_running_stats)
        overrides = counts and prefix + "num_batches_tracked" not in names
        overrides |= not counts and prefix + "running_mean" in names
    else:
        overrides = load_method_of(cls) is not _MODULE
    return bool(
        overrides
        or LOAD_METHOD in vars(module)
        or cls.__getattribute__ is not object.__getattribute__
        or post_hooks_of(module)
        or sets_extra_state(module)
        or any(not is_lazy_buffers(hook) for hook in pre_hooks_of(module).values())
    )


def have_code_of_their_own(
    modules: list[tuple[str, nn.Module]], names: Container[str | None]
) -> bool:
    """Return whether `has_code_of_its_own` is true for any (prefix, module) with these `names`."""
    classes = {type(module) for _, module in modules}
    plain = {
        cls
        for cls in classes
        if load_method_of(cls) is _MODULE
        and cls.__getattribute__ is object.__getattribute__
        and cls.set_extra_state is nn.Module.set_extra_state
    }
    own = [each for each in modules if type(each[1]) not in plain] if plain != classes else []
    for attribute_of in (pre_hooks_of, post_hooks_of, load_method_of):
        own += having(modules, attribute_of)
    return any(
        has_code_of_its_own(module, f"{prefix}." if prefix else "", names) for prefix, module in own
    )


def hooks_that_look(module: nn.Module) -> list[Callable[..., Any]]:
    """Return a module's load pre-hooks, except the hooks of lazy buffers and lazy modules.

    Hooks of these two kinds only give tensors their shapes.
    """
    found = []
    for hook in pre_hooks_of(module).values():
        method = hook.hook if type(hook) is WrappedHook else hook
        is_lazy_modules = getattr(method, "__func__", None) is lazy_load_hook
        if not (is_lazy_modules or is_lazy_buffers(hook)):
            found.append(hook)
    return found


def run_trusted_code(
    module: nn.Module, entries: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Do the step that torch's norm modules add to ``_load_from_state_dict``.

    For state dicts older than version 2, this step adds the buffer ``num_batches_tracked``.
    """
    version = metadata.get("version")
    if load_method_of(type(module)) is _MODULE or (version is not None and version >= 2):
        return
    norm: Any = module
    key = prefix + "num_batches_tracked"
    if norm.track_running_stats and key not in entries:
        count = norm.num_batches_tracked
        usable = count is not None and count.device != torch.device("meta")
        entries[key] = count if usable else torch.tensor(0, dtype=torch.long)


def gives_lists_away(module: nn.Module) -> bool:
    """Return whether code outside torch and ptsave gets the lists of keys, and may edit them."""
    name = LOAD_METHOD
    code = [vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)]
    code += [getattr(hook, "hook", hook) for hook in pre_hooks_of(module).values()]
    return name in vars(module) or not all(
        (getattr(each, "__module__", None) or "").startswith(("torch.", "ptsave.")) for each in code
    )


def assigns_plainly(module: nn.Module) -> bool:
    """Return whether setting a parameter or buffer of the module runs torch's code alone."""
    cls = type(module)
    return (
        cls.__setattr__ in _SET_ATTRIBUTE
        and (cls.register_parameter, cls.register_buffer) == _REGISTER
        and not any(registration_hooks)
    )


def _is_trusted_hook(hook: Any, module: nn.Module, entries: dict[str, Any], prefix: str) -> bool:
    """Return whether a hook is the hook of a lazy buffer, and will see only plain tensors."""
    if not is_lazy_buffers(hook):
        return False
    name = hook.hook.name
    seen = (entries.get(prefix + name), buffers_of(module).get(name))
    return all(type(each) in PLAIN_TYPES or not is_tensor_like(each) for each in seen)


def _is_trusted_norm(
    module: nn.Module, entries: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> bool:
    """Return whether a module is a norm of torch whose method only adds `num_batches_tracked`."""
    overrides = [vars(cls)[LOAD_METHOD] for cls in type(module).__mro__ if LOAD_METHOD in vars(cls)]
    if overrides == [_INSTANCE_NORM, _NORM, _MODULE]:
        # An instance norm raises its own error for statistics that it does not track.
        names = (prefix + "running_mean", prefix + "running_var")
        return not any(name in entries for name in names) or bool(module.track_running_stats)
    return overrides == [_NORM, _MODULE]
