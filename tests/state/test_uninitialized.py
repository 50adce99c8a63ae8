"""Restoring uninitialized parameters and buffers (of a new `LazyLinear`), as torch does."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object, assert_same_outcome, stock_load, stock_save
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

import ptsave


class Uninitialized(LazyModuleMixin, nn.Module):
    """Has a parameter and a buffer without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = UninitializedParameter()
        self.register_buffer("mean", UninitializedBuffer())


class Initialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("mean", torch.ones(3))


def initialized_lazily() -> nn.Module:
    module = nn.LazyLinear(4)
    module(torch.ones(2, 3))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LazyLinear": lambda: nn.LazyLinear(4),
    "LazyLinear, called": initialized_lazily,
    "Linear": lambda: nn.Linear(3, 4),
    "LazyBatchNorm1d": nn.LazyBatchNorm1d,
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "Uninitialized": Uninitialized,
    "Initialized": Initialized,
    "nested": lambda: nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4), nn.LazyBatchNorm1d()),
    "nested, initialized": lambda: nn.Sequential(
        nn.Linear(2, 3), nn.Linear(3, 4), nn.BatchNorm1d(4)
    ),
}


@pytest.fixture(autouse=True)
def _no_announcements() -> Iterator[None]:
    """Lazy modules are announced as new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        yield


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def state_of(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: type(each) if is_lazy(each) else each for name, each in tensors.items()}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("target", MODULES)
@pytest.mark.parametrize("source", MODULES)
def test_every_source_into_every_target(
    source: str, target: str, assign: bool, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"
    state_dict = make(source).state_dict()
    has_uninitialized = any(map(is_lazy, state_dict.values()))
    stock_save(state_dict, path)
    stock_save({"model": state_dict, "epoch": 3}, tmp_path / "checkpoint.pt")
    for weights_only in {False, not has_uninitialized}:
        options = {"weights_only": weights_only}

        def by_torch(module: nn.Module, options: Any = options) -> Any:
            return module.load_state_dict(stock_load(path, **options), assign=assign)

        def by_load_into(module: nn.Module, options: Any = options) -> Any:
            return ptsave.load_into(path, module, assign=assign, **options)

        def by_load_state_dict(module: nn.Module, options: Any = options) -> Any:
            return ptsave.load_state_dict(module, stock_load(path, **options), assign=assign)

        def by_load_checkpoint(module: nn.Module, options: Any = options) -> Any:
            rest = ptsave.load_checkpoint(tmp_path / "checkpoint.pt", model=module, **options)
            assert rest == {"epoch": 3}
            return nn.modules.module._IncompatibleKeys([], [])

        doors = [by_load_into, by_load_state_dict] + ([] if assign else [by_load_checkpoint])
        for door in doors:
            assert_same_outcome(
                functools.partial(loaded, door, target), functools.partial(loaded, by_torch, target)
            )


def loaded(load: Callable[[nn.Module], Any], name: str) -> Any:
    target = make(name)
    return tuple(load(target)), state_of(target)


def test_a_parameter_that_gets_its_shape_trains(tmp_path: Path) -> None:
    stock_save(nn.Linear(3, 4).state_dict(), tmp_path / "state.pt")
    module = nn.LazyLinear(4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ptsave.load_into(tmp_path / "state.pt", module)
    before = copy.deepcopy(module.state_dict())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert type(module) is nn.Linear
    assert not torch.equal(module.weight, before["weight"])


@pytest.mark.parametrize("saved", ["of uninitialized", "with state"])
def test_optimizers(saved: str, tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    if saved == "with state":
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    else:
        optimizer = torch.optim.AdamW(nn.LazyLinear(3).parameters(), lr=0.5)
    stock_save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    stock_save({"o": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    expected, into, checkpoint, at_once = (
        torch.optim.AdamW(nn.LazyLinear(3).parameters(), lr=0.1) for _ in range(4)
    )
    expected.load_state_dict(stock_load(tmp_path / "optimizer.pt"))
    ptsave.load_into(tmp_path / "optimizer.pt", into)
    ptsave.load_checkpoint(tmp_path / "checkpoint.pt", o=checkpoint)
    ptsave.load_optimizer_state_dict(at_once, stock_load(tmp_path / "optimizer.pt"))
    for found in (into, checkpoint, at_once):
        assert_same_object(found.state_dict(), expected.state_dict())


def test_what_is_left_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "rest.pt"
    stock_save({"model": nn.LazyLinear(4).state_dict(), "rest": [UninitializedBuffer()]}, path)
    rest = ptsave.load_checkpoint(path, model=nn.LazyLinear(4), weights_only=False)
    assert [type(each) for each in rest["rest"]] == [UninitializedBuffer]


def test_dicts(tmp_path: Path) -> None:
    """torch has nothing like it: two without a shape fit, and one gets its shape from the file."""
    without, within = tmp_path / "without.pt", tmp_path / "within.pt"
    stock_save(dict(nn.LazyLinear(4).state_dict()), without)
    stock_save(dict(nn.Linear(3, 4).state_dict()), within)
    target = dict(nn.LazyLinear(4).state_dict())
    parameter = target["weight"]
    ptsave.load_into(without, target, weights_only=False)
    assert is_lazy(target["weight"])
    ptsave.load_into(within, target)
    assert target["weight"] is parameter
    assert_same_object(parameter.detach(), stock_load(within)["weight"])
    before = parameter.detach().clone()
    with pytest.raises(RuntimeError, match="weight is uninitialized in the file") as caught:
        ptsave.load_into(without, target, weights_only=False)
    assert torch.equal(parameter, before)
    assert not hasattr(caught.value, "overwritten")


def test_the_entries_that_an_error_names(tmp_path: Path) -> None:
    """Naming them goes past those that have no memory."""
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(2, 2))
    stock_save(module.state_dict(), tmp_path / "state.pt")
    target = nn.Sequential(nn.LazyLinear(4), nn.Linear(2, 2))

    def fail(*_: Any) -> None:
        raise LookupError("of a hook")

    hooked: Any = target[1]
    hooked.register_load_state_dict_pre_hook(fail)
    with pytest.raises(LookupError) as caught:
        ptsave.load_into(tmp_path / "state.pt", target, weights_only=False)
    assert caught.value.overwritten == ["1.weight", "1.bias"]  # type: ignore[attr-defined]
