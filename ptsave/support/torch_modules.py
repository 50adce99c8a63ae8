"""Private names of torch.nn.Module and torch.optim.Optimizer.

torch 2.9.1, 2.11.0 and 2.13.0 have all these names.  If a name is missing, `private` raises an
ImportError that contains the name.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules import lazy
from torch.nn.modules import module as module_module
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY_SUFFIX
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.modules.module import _WrappedHook as WrappedHook
from torch.optim import Optimizer

from ptsave.support.torch_names import private

# Imported names that other modules import from here.
__all__ = ["EXTRA_STATE_KEY_SUFFIX", "IncompatibleKeys", "InstanceNorm", "NormBase", "WrappedHook"]

_T = TypeVar("_T")
_module = nn.Module()


_attribute_of: dict[Any, str] = {}  # names of attributes, by the functions that get them


def _attribute(name: str) -> Any:
    """Return a function that returns a module's attribute `name`; every module must have it."""
    private(_module, name)
    getter = attrgetter(name)
    _attribute_of[getter] = name
    return getter


# These return a module's own dicts, so a change of such a dict changes the module.
parameters_of: Callable[[nn.Module], dict[str, Tensor | None]] = _attribute("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = _attribute("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _attribute("_modules")
non_persistent_buffers_of: Callable[[nn.Module], set[str]]
non_persistent_buffers_of = _attribute("_non_persistent_buffers_set")
pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = _attribute("_load_state_dict_pre_hooks")
post_hooks_of: Callable[[nn.Module], dict[int, Any]] = _attribute("_load_state_dict_post_hooks")

# Calls a function with each tensor of a module and its children, and puts the result in its place.
apply_to_tensors_of: Callable[[nn.Module], Callable[[Callable[[Tensor], Tensor]], nn.Module]]
apply_to_tensors_of = _attribute("_apply")

# The method by which a module loads its own part of a state dict; some modules override it.
LOAD_METHOD = "_load_from_state_dict"
load_method_of: Callable[[Any], Any] = _attribute(LOAD_METHOD)

# Registers a load pre-hook, which torch calls without the module; returns the hook's handle.
register_pre_hook: Callable[[nn.Module, Callable[..., None]], Any]
register_pre_hook = private(nn.Module, "_register_load_state_dict_pre_hook")
lazy_load_hook: Any = private(lazy.LazyModuleMixin, "_lazy_load_hook")
# Global hooks that torch calls when a parameter or a buffer of any module is set.
registration_hooks: tuple[dict[int, Any], ...] = (
    private(module_module, "_global_parameter_registration_hooks"),
    private(module_module, "_global_buffer_registration_hooks"),
)

private(Optimizer, "_process_value_according_to_param_policy")
optimizer_pre_hooks_of: Callable[[Any], dict[int, Any]]
optimizer_pre_hooks_of = attrgetter("_optimizer_load_state_dict_pre_hooks")
optimizer_post_hooks_of: Callable[[Any], dict[int, Any]]
optimizer_post_hooks_of = attrgetter("_optimizer_load_state_dict_post_hooks")
# The attribute of a state dict that holds the versions of modules.
METADATA = "_metadata"


def optimizer_policy() -> Callable[..., Tensor]:
    """Return torch's method that casts an optimizer's state, or the one that a user put there."""
    return Optimizer._process_value_according_to_param_policy


def modules_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return pairs (name, module) for a model; a module with several names has several pairs.

    The result is the same as from ``named_modules(remove_duplicate=False)``, whose nested
    generators take more time.
    """
    found: list[tuple[str, nn.Module]] = []
    _note_modules(model, "", found)
    return found


def _note_modules(module: nn.Module, name: str, found: list[tuple[str, nn.Module]]) -> None:
    if type(module).named_modules is not nn.Module.named_modules:
        found += module.named_modules(prefix=name, remove_duplicate=False)
        return
    found.append((name, module))
    for key, child in children_of(module).items():
        if child is not None:
            _note_modules(child, f"{name}.{key}" if name else key, found)


def having(
    modules: list[tuple[str, nn.Module]], attribute_of: Callable[[nn.Module], Any]
) -> list[tuple[str, nn.Module]]:
    """Return the pairs (name, module) whose module has a non-empty value of this attribute."""
    from ptsave import _C  # not at import: strip_prefix needs no engine

    return _C.having(modules, _attribute_of[attribute_of])


def tensors_in(
    model: nn.Module, modules: list[tuple[str, nn.Module]] | None = None
) -> dict[str, Tensor]:
    """Return the parameters of a model, then its buffers; a shared tensor has several names.

    `modules` is the result of `modules_in` for the model, if the caller has it already.
    """
    found: dict[str, Tensor] = {}
    modules = modules_in(model) if modules is None else modules
    if type(model).named_parameters is nn.Module.named_parameters:
        _note_tensors(modules, parameters_of, found)
    else:
        found.update(model.named_parameters(remove_duplicate=False))
    if type(model).named_buffers is nn.Module.named_buffers:
        _note_tensors(modules, buffers_of, found)
    else:
        found.update(model.named_buffers(remove_duplicate=False))
    return found


def _note_tensors(
    modules: list[tuple[str, nn.Module]],
    table_of: Callable[[nn.Module], dict[str, Tensor | None]],
    found: dict[str, Tensor],
) -> None:
    for prefix, module in having(modules, table_of):
        for name, tensor in table_of(module).items():
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
