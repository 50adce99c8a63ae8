"""What the tests of state dicts share: what a load by torch, and one by ptsave, has done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from stock_comparison import assert_same_object
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import ptsave

Log = list[Any]
Case = Callable[[Log], tuple[nn.Module, Any]]


@dataclass
class Outcome:
    """Everything that a load can be told apart by."""

    result: Any = None
    error: str = ""
    warned: list[str] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    kept_objects: dict[str, bool] = field(default_factory=dict)
    log: Log = field(default_factory=list)
    state_dict: Any = None
    metadata: Any = None


def stock_load_state_dict(
    module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
) -> Any:
    return module.load_state_dict(state_dict, strict, **({"assign": assign} if assign else {}))


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers of each module, once, whatever the modules are called."""
    modules, tensors = [module], {}
    for number, each in enumerate(modules):
        for named in (each._parameters, each._buffers):
            tensors.update({f"{number}, {name}": tensor for name, tensor in named.items()})
        for child in each._modules.values():
            if child is not None and all(child is not known for known in modules):
                modules.append(child)
    return tensors


def comparable(obj: Any) -> Any:
    """Return a type in place of a tensor that has no memory to compare."""
    if isinstance(obj, Tensor) and (is_lazy(obj) or obj._is_zerotensor()):
        return type(obj)
    return obj


def built(case: Case, log: Log) -> tuple[nn.Module, Any]:
    """Build a case, with the same numbers each time."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile imports what is deprecated
        return case(log)


def outcome_of(load: Callable[..., Any], case: Case, **options: Any) -> Outcome:
    """Build the case and load it once."""
    outcome = Outcome()
    module, state_dict = built(case, outcome.log)
    before = tensors_of(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = load(module, state_dict, **options)
            outcome.result = (type(result), tuple(result)) if isinstance(result, tuple) else result
        except Exception as error:
            # How deep Python may go is one thing, what it was doing there another.
            message = "" if isinstance(error, RecursionError) else str(error)
            outcome.error = f"{type(error)}: {message}"
    outcome.warned = [f"{warning.category}: {warning.message}" for warning in caught]
    after = tensors_of(module)
    outcome.tensors = {name: comparable(tensor) for name, tensor in after.items()}
    outcome.kept_objects = {name: after[name] is before.get(name) for name in after}
    if isinstance(state_dict, Mapping):
        outcome.state_dict = {key: comparable(entry) for key, entry in state_dict.items()}
    outcome.metadata = getattr(state_dict, "_metadata", None)
    return outcome


def assert_same_load(case: Case, **options: Any) -> Outcome:
    """Both must do the same to the same module; returns what ptsave did."""
    expected = outcome_of(stock_load_state_dict, case, **options)
    actual = outcome_of(ptsave.load_state_dict, case, **options)
    for name in ("error", "warned", "result", "kept_objects", "log", "metadata"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine == theirs, f"{name}:\n{mine!r}\nis not\n{theirs!r}"
    # In one comparison, so that what the module shares with the state dict counts.
    assert_same_object([actual.tensors, actual.state_dict], [expected.tensors, expected.state_dict])
    return actual


def saved(module: nn.Module) -> dict[str, Any]:
    """Return a state dict with tensors of its own and other values, metadata included."""
    state_dict = module.state_dict()
    for key, value in state_dict.items():
        if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
            fresh = value.clone()
            state_dict[key] = ~fresh if value.dtype is torch.bool else fresh.add_(1)
    return state_dict
