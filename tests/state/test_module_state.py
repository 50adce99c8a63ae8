"""`ptsave.load_state_dict` does to a module what ``module.load_state_dict`` does, case by case."""

from __future__ import annotations

import contextlib
import cProfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from _state_dicts import Case, Log, assert_same_load, built, saved, stock_load_state_dict
from _system import run_python
from hypothesis import given
from hypothesis import strategies as st
from stock_comparison import assert_same_object
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ptsave

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 3),
        nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU())),
        nn.ModuleDict({"a": nn.Embedding(4, 3), "b": nn.LayerNorm(3)}),
    )


def fits(module: nn.Module) -> Any:
    return module, saved(module)


def and_more(module: nn.Module, entries: dict[Any, Any]) -> Any:
    return module, {**saved(module), **entries}


def changed(module: nn.Module, change: Callable[[Any], object]) -> Any:
    return module, {key: change(value) for key, value in saved(module).items()}


ONE = torch.ones(1)
CASES |= {
    "everything_fits": lambda log: fits(nested()),
    "a_leaf": lambda log: fits(nn.Linear(2, 2)),
    "an_empty_state_dict": lambda log: (nested(), {}),
    "a_module_without_anything": lambda log: (nn.Module(), {"a": ONE.clone(), "a.b": ONE.clone()}),
    "keys_that_end_in_dots": lambda log: and_more(
        nested(),
        dict.fromkeys(
            ("0.", "0..weight", "1..", "..", "0.weight.", "10.weight", "1.1.1.x"), ONE.clone()
        ),
    ),
    "extra_state_that_nobody_wants": lambda log: and_more(
        nested(), {"_extra_state": 1, "1._extra_state": 2, "2._extra_state.x": 3}
    ),
    "another_dtype": lambda log: changed(nested(), Tensor.double),
    "a_half_precision_module": lambda log: (nested().half(), saved(nested())),
    "parameters_as_entries": lambda log: changed(
        nested(), lambda value: nn.Parameter(value, False) if value.is_floating_point() else value
    ),
    "entries_that_require_grad": lambda log: changed(nn.Linear(2, 2), Tensor.requires_grad_),
    "its_own_state_dict": lambda log: ((m := nested()), m.state_dict(keep_vars=True)),
    "its_own_detached_state_dict": lambda log: ((m := nested()), m.state_dict()),
}


@case
def missing_and_unexpected(log: Log) -> Any:
    module, state_dict = fits(nested())
    for key in ("0.bias", "1.1.0.weight", "2.b.weight"):
        del state_dict[key]
    for key in ("0.weight.more", "1.extra", "1.1.7.weight", "nowhere", "nowhere.at.all", "", "."):
        state_dict[key] = torch.ones(1)
    return module, state_dict


@case
def keys_in_another_order(log: Log) -> Any:
    module, state_dict = fits(nested())
    keys = list(state_dict)
    return module, OrderedDict((key, state_dict[key]) for key in keys[::2] + keys[::-2])


@case
def several_errors(log: Log) -> Any:
    module, state_dict = fits(nested())
    del state_dict["2.a.weight"]
    state_dict.update({"x": 1, "0.weight": torch.ones(5), "1.0.bias": "no tensor", "0.bias": None})
    return module, state_dict


@case
def one_element_for_no_dimension(log: Log) -> Any:
    module = nn.Module()
    for name in ("scale", "shift", "wrong"):
        module.register_parameter(name, nn.Parameter(torch.tensor(1.0)))
    values = {"scale": torch.tensor([5.0]), "shift": torch.tensor(6.0), "wrong": torch.ones(1, 1)}
    return module, values


@case
def frozen_parameters(log: Log) -> Any:
    module = nested()
    module[0].requires_grad_(False)
    return fits(module)


@case
def buffers_of_every_kind(log: Log) -> Any:
    module = nn.Module()
    module.register_buffer("a", torch.ones(2))
    module.register_buffer("hidden", torch.ones(2), persistent=False)
    module.register_buffer("none", None)
    module.register_parameter("no_parameter", None)
    module.b = nn.Buffer(torch.ones(2))
    values = {name: torch.zeros(2) for name in ("a", "b", "hidden", "none", "no_parameter")}
    return module, values


@case
def tied_parameters(log: Log) -> Any:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    state_dict = saved(module)
    state_dict["1.weight"] = state_dict["1.weight"] * 2
    return module, state_dict


@case
def a_shared_submodule(log: Log) -> Any:
    shared = nn.Linear(2, 2)
    return fits(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared}))


@case
def children_that_are_none(log: Log) -> Any:
    module = nested()
    module[1].register_module("gone", None)
    return and_more(module, {"1.gone.weight": torch.ones(1)})


# ------------------------------------------------------------------------------- unusual tensors


def with_parameter(value: Tensor, entry: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a module with a usual child beside one buffer, and its state dict."""
    module = nn.Module()
    module.register_buffer("first", torch.ones(2))
    module.register_buffer("value", value)
    module.child = nn.Linear(2, 2)
    return module, {"first": torch.zeros(2), "value": entry, **saved_child()}


def saved_child() -> dict[str, Any]:
    return {"child.weight": torch.ones(2, 2), "child.bias": torch.ones(2)}


class TaggedTensor(Tensor):
    """A subclass that torch's functions know nothing special about."""


class NoTensor:
    """What torch takes for a tensor, by its protocol."""

    shape = torch.Size([2])
    is_meta = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


ZEROS = torch.zeros(2, dtype=torch.cfloat)

PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "transposed target": lambda: (torch.zeros(3, 2).t(), torch.rand(2, 3)),
    "strided target": lambda: (torch.zeros(8)[::2], torch.rand(4)),
    "expanded target": lambda: (torch.zeros(1).expand(3), torch.rand(3)),
    "overlapping target": lambda: (torch.zeros(4).as_strided((3, 2), (1, 1)), torch.rand(3, 2)),
    "expanded source": lambda: (torch.zeros(3), torch.rand(1).expand(3)),
    "overlapping source": lambda: ((base := torch.zeros(4))[:3], base[1:]),
    "complex": lambda: (ZEROS.clone(), torch.rand(2, dtype=torch.cdouble)),
    "complex to real": lambda: (torch.zeros(2), ZEROS + 1),
    "real to complex": lambda: (ZEROS.clone(), torch.rand(2)),
    "conjugate source": lambda: (ZEROS.clone(), torch.tensor([1j, 2j]).conj()),
    "conjugate target": lambda: (ZEROS.clone().conj(), torch.tensor([1j, 2j])),
    "negative source": lambda: (torch.zeros(2), torch.tensor([1j, 2j]).conj().imag),
    "float8": lambda: (torch.zeros(2).to(torch.float8_e5m2), torch.rand(2).to(torch.float8_e5m2)),
    "float to float8": lambda: (torch.zeros(2).to(torch.float8_e5m2), torch.rand(2)),
    "bool": lambda: (torch.zeros(2).bool(), torch.tensor([0.5, 0.0])),
    "sparse": lambda: (torch.zeros(2, 2).to_sparse(), torch.eye(2).to_sparse()),
    "sparse to strided": lambda: (torch.zeros(2, 2), torch.eye(2).to_sparse()),
    "strided to sparse": lambda: (torch.zeros(2, 2).to_sparse(), torch.eye(2)),
    "meta source": lambda: (torch.zeros(2), torch.ones(2, device="meta")),
    "meta target": lambda: (torch.zeros(2, device="meta"), torch.ones(2)),
    "both meta": lambda: (torch.zeros(2, device="meta"), torch.ones(2, device="meta")),
    "zero tensor": lambda: (torch.ones(2), torch._efficientzerotensor((2,))),
    "subclass source": lambda: (torch.zeros(2), torch.ones(2).as_subclass(TaggedTensor)),
    "subclass target": lambda: (torch.zeros(2).as_subclass(TaggedTensor), torch.ones(2)),
    "no tensor": lambda: (torch.zeros(2), NoTensor()),
    "a list": lambda: (torch.zeros(2), [1.0, 2.0]),
    "empty": lambda: (torch.zeros(0, 3), torch.zeros(0, 3)),
    "other empty": lambda: (torch.zeros(0, 3), torch.zeros(0, 4)),
}
TENSORS: dict[str, Case] = {
    name: lambda log, make=make: with_parameter(*make())  # type: ignore[misc]
    for name, make in PAIRS.items()
}


@case
def inference_tensors(log: Log) -> Any:
    with torch.inference_mode():
        target, source = torch.zeros(2), torch.ones(2)
    module, state_dict = with_parameter(torch.zeros(2), source)
    module.register_buffer("target", target)
    return module, {**state_dict, "target": torch.ones(2)}


@case
def a_module_on_meta(log: Log) -> Any:
    with torch.device("meta"):
        module = nested()
    return module, saved(nested())


# --------------------------------------------------------------------------------- other mappings


class ReadOnly(Mapping[str, Any]):
    """A mapping that is no dict and notes what is read."""

    def __init__(self, items: dict[str, Any], log: Log) -> None:
        self.items_, self.log = items, log

    def __getitem__(self, key: str) -> Any:
        self.log.append(key)
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class OddString(str):
    """A string of another type."""

    __slots__ = ()


CASES |= {
    "a_mapping_that_is_no_dict": lambda log: ((m := nested()), ReadOnly(saved(m), log)),
    "a_mapping_proxy": lambda log: ((m := nested()), MappingProxyType(dict(saved(m)))),
    "no_mapping": lambda log: (nested(), [1, 2]),
    "a_number_as_key": lambda log: and_more(nested(), {3: torch.ones(1)}),
    "bytes_as_key": lambda log: and_more(nested(), {b"x": torch.ones(1)}),
    "strings_of_another_type": lambda log: (
        (m := nested()),
        {OddString(key): value for key, value in saved(m).items()},
    ),
}


# --------------------------------------------------------------------------------------- metadata


@case
def batch_norm_of_version_1(log: Log) -> Any:
    module, state_dict = fits(nested())
    del state_dict["1.0.num_batches_tracked"]
    state_dict._metadata["1.0"]["version"] = 1
    return module, state_dict


@case
def batch_norms_without_metadata(log: Log) -> Any:
    module = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True, affine=True),
    )
    state_dict = dict(saved(module))
    del state_dict["0.num_batches_tracked"]
    return module, state_dict


@case
def batch_norm_on_meta_without_metadata(log: Log) -> Any:
    module = nn.BatchNorm1d(2)
    state_dict = {k: v for k, v in saved(module).items() if k != "num_batches_tracked"}
    return module.to("meta"), state_dict


@case
def batch_norm_whose_count_is_none(log: Log) -> Any:
    module = nn.BatchNorm1d(2)
    module.num_batches_tracked = None
    return module, dict(saved(module))


@case
def instance_norm_of_torch_0_3(log: Log) -> Any:
    module = nn.Sequential(nn.InstanceNorm1d(2, affine=True))
    names = ("0.running_mean", "0.running_var")
    return module, {**dict(saved(module)), **{name: torch.ones(2) for name in names}}


@case
def metadata_of_an_odd_type(log: Log) -> Any:
    module, state_dict = fits(nested())
    state_dict._metadata["1.0"] = None
    return module, state_dict


@case
def assignment_asked_for_by_metadata(log: Log) -> Any:
    module, state_dict = fits(nested())
    state_dict._metadata["1.0"]["assign_to_params_buffers"] = True
    return module, state_dict


class Migrating(nn.Module):
    """Fills in what older versions did not save, and renames what they called otherwise."""

    _version = 3

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.scale = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.log.append((prefix, list(state_dict), dict(local_metadata), rest[0]))
        if local_metadata.get("version", 1) < 3:
            state_dict[prefix + "scale"] = torch.full((2,), 7.0)
            for key in [key for key in state_dict if key.startswith(prefix + "old.")]:
                state_dict[key.replace("old.", "inner.")] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@case
def migrations(log: Log) -> Any:
    module = nn.Sequential(Migrating(log), nn.Sequential(Migrating(log)))
    state_dict = saved(module)
    state_dict._metadata["1.0"]["version"] = 2  # type: ignore[attr-defined]
    for name in ("weight", "bias"):
        state_dict[f"1.0.old.{name}"] = state_dict.pop(f"1.0.inner.{name}")
    del state_dict["1.0.scale"]
    return module, state_dict


# ------------------------------------------------------------------------------------ extra state


class WithExtraState(nn.Module):
    def __init__(self, log: Log, value: Any) -> None:
        super().__init__()
        self.log, self.value = log, value
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.log.append((state, self.weight.tolist()))


@case
def extra_state_of_every_type(log: Log) -> Any:
    values = (None, 3, {"a": 1}, "text", [1, 2])
    return fits(nn.Sequential(*(WithExtraState(log, value) for value in values)))


@case
def extra_state_that_is_a_tensor(log: Log) -> Any:
    class Set(WithExtraState):
        def set_extra_state(self, state: Any) -> None:
            self.log.append(state.tolist())

    return fits(nn.Sequential(Set(log, torch.rand(2))))


@case
def extra_state_is_missing(log: Log) -> Any:
    module, state_dict = fits(nn.Sequential(WithExtraState(log, 1), WithExtraState(log, 2)))
    del state_dict["1._extra_state"]
    state_dict["junk"] = 1
    return module, state_dict


@case
def extra_state_that_is_refused(log: Log) -> Any:
    class Refuse(WithExtraState):
        def set_extra_state(self, state: Any) -> None:
            raise ValueError("not this one")

    return fits(nn.Sequential(nn.Linear(2, 2), Refuse(log, 1), nn.Linear(2, 2)))


@case
def extra_state_repaired_by_a_hook(log: Log) -> Any:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), WithExtraState(log, 5)))

    def repair(state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict.setdefault(prefix + "_extra_state", {"repaired": prefix})

    module[0][1]._register_load_state_dict_pre_hook(repair)  # type: ignore[index]
    state_dict = saved(module)
    del state_dict["0.1._extra_state"]
    return module, state_dict


@case
def a_parameter_called_extra_state(log: Log) -> Any:
    module = nn.Module()
    module.register_parameter("_extra_state", nn.Parameter(torch.ones(1)))
    return module, {"_extra_state": torch.zeros(1), "junk": 1}


# ------------------------------------------------------------------------------------------ hooks


@case
def every_kind_of_hook(log: Log) -> Any:
    module = nested()

    def private(state_dict: Any, prefix: str, *rest: Any) -> None:
        log.append(("private", list(state_dict), prefix, *map(repr, rest)))

    def public(owner: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        log.append(("public", type(owner), type(state_dict), prefix, *map(repr, rest)))

    def after(owner: nn.Module, keys: Any) -> None:
        log.append(("post", type(owner), repr(keys)))

    for each in module.modules():
        each._register_load_state_dict_pre_hook(private)
        each._register_load_state_dict_pre_hook(public, with_module=True)
        each.register_load_state_dict_pre_hook(public)
        each.register_load_state_dict_post_hook(after)
    state_dict = saved(module)
    del state_dict["0.weight"]
    return module, {**state_dict, "junk": 1}


def edit(function: Any, where: str = "1") -> Case:
    """Make a case of a pre-hook on one module: by default a child that has children itself."""

    def build(log: Log) -> Any:
        module = nested()

        def hook(state_dict: Any, *rest: Any) -> None:
            has_metadata = getattr(state_dict, "_metadata", None) is not None
            log.append((type(state_dict), list(state_dict), has_metadata))
            function(state_dict, *rest)

        module.get_submodule(where)._register_load_state_dict_pre_hook(hook)
        state_dict = saved(module)
        if where:
            state_dict["1.old.0.weight"] = state_dict["1.1.0.weight"]
        return module, state_dict

    return build


def rename(state_dict: Any, prefix: str, *_: Any) -> None:
    for key in list(state_dict):
        if key.startswith(prefix + "old."):
            state_dict[key.replace("old.", "1.")] = state_dict.pop(key) * 2


def drop(state_dict: Any, prefix: str, *_: Any) -> None:
    state_dict.clear()


def add(state_dict: Any, prefix: str, *_: Any) -> None:
    state_dict[prefix + "1.0.bias"] = torch.ones(3)
    state_dict["elsewhere"] = state_dict["1.1"] = 1
    state_dict["1.1.1.weight"] = state_dict["0.1.weight"] = torch.ones(1)


def add_a_number(state_dict: Any, prefix: str, *_: Any) -> None:
    state_dict[1] = 2


def transform(state_dict: Any, prefix: str, *_: Any) -> None:
    for key, value in state_dict.items():
        state_dict[key] = value * 3


def report(state_dict: Any, prefix: str, metadata: Any, strict: Any, *lists: Any) -> None:
    for each, name in zip(lists, ("missing", "unexpected", "error"), strict=True):
        each.append(f"{name} says the hook")


EDITS: dict[str, Case] = {
    function.__name__: edit(function)
    for function in (rename, drop, add, add_a_number, transform, report)
}


def rename_everything(state_dict: Any, *_: Any) -> None:
    for key in list(state_dict):
        state_dict[key.replace("weight", "other")] = state_dict.pop(key)


ROOT_EDITS: dict[str, Case] = {
    "renames": edit(rename_everything, ""),
    "drops": edit(drop, ""),
    "drops metadata": edit(lambda state_dict, *_: state_dict.__dict__.clear(), ""),
    "raises": edit(lambda state_dict, *_: state_dict["not there"], ""),
}


@case
def a_post_hook_that_edits(log: Log) -> Any:
    module = nested()

    def edit_keys(owner: nn.Module, keys: Any) -> None:
        log.append((type(owner), list(keys.missing_keys), list(keys.unexpected_keys)))
        keys.missing_keys.clear()
        keys.unexpected_keys.append(f"by {type(owner).__name__}")

    module[1].register_load_state_dict_post_hook(edit_keys)
    module[2].register_load_state_dict_post_hook(lambda owner, keys: keys.unexpected_keys.clear())
    state_dict = saved(module)
    del state_dict["0.weight"], state_dict["2.b.weight"]
    return module, {**state_dict, "junk": 1}


@case
def a_post_hook_that_returns(log: Log) -> Any:
    module = nested()
    module[1].register_load_state_dict_post_hook(lambda owner, keys: keys)
    return fits(module)


def changing_children(where: str, change: Callable[[Any], object], *more: str) -> Case:
    """Make a case of a pre-hook that changes the model; `more` are entries for new children."""

    def build(log: Log) -> Any:
        module = nested()
        hooked = module.get_submodule(where)
        hooked._register_load_state_dict_pre_hook(lambda *_: change(module))
        return and_more(module, dict.fromkeys(more, torch.ones(1, 1)))

    return build


CASES |= {
    "a_hook_that_removes_a_child": changing_children("1.0", lambda m: m[1]._modules.pop("1")),
    "a_hook_that_adds_a_child": changing_children(
        "1", lambda m: m[1].append(nn.Linear(1, 1)), "1.2.weight"
    ),
    "a_hook_that_replaces_a_child": changing_children(
        "0", lambda m: m._modules.update({"2": nn.Linear(1, 1)}), "2.weight"
    ),
}


@case
def a_hook_that_edits_its_parents_dict_later(log: Log) -> Any:
    module = nested()
    kept: list[Any] = []
    module._register_load_state_dict_pre_hook(lambda state_dict, *_: kept.append(state_dict))

    def edit_later(*_: Any) -> None:
        kept[0]["2.b.bias"] = torch.full((3,), 9.0)
        kept[0]["2.unexpected"] = 1
        del kept[0]["2.a.weight"]

    module[1]._register_load_state_dict_pre_hook(edit_later)
    return fits(module)


@case
def a_hook_that_edits_a_view_of_its_parents_dict(log: Log) -> Any:
    module = nested()
    kept: list[Any] = []
    module._register_load_state_dict_pre_hook(lambda state, *_: kept.append(weakref.ref(state)))

    def edit_later(owner: nn.Module, keys: Any) -> None:
        kept[0]().pop("2.b.bias")

    module[1][0].register_load_state_dict_post_hook(edit_later)  # type: ignore[index]
    return fits(module)


@case
def hooks_on_siblings(log: Log) -> Any:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for each in module.modules():
        each._register_load_state_dict_pre_hook(lambda state, prefix, *_: log.append(list(state)))
    return fits(module)


# ------------------------------------------------------------------------------- unusual modules


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


@case
def a_parametrization(log: Log) -> Any:
    module = nn.Sequential(nn.Linear(3, 3))
    nn.utils.parametrize.register_parametrization(module[0], "weight", Symmetric())
    return fits(module)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def compiled() -> Any:
    return torch.compile(nested())


CASES |= {
    "lazy_modules": lambda log: (
        nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
        saved(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))),
    ),
    "lazy_modules_from_lazy_modules": lambda log: (lazy(), lazy().state_dict()),
    "usual_modules_from_lazy_modules": lambda log: (
        nn.Sequential(nn.Linear(2, 3)),
        lazy().state_dict(),
    ),
    "weight_norm": lambda log: fits(nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))),
    "weight_norm_of_old": lambda log: (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))),
        {"0.bias": torch.ones(2), "0.weight_g": torch.ones(2, 1), "0.weight_v": torch.eye(2)},
    ),
    "compiled": lambda log: (compiled(), saved(compiled())),
    "compiled_without_prefix": lambda log: (compiled(), saved(nested())),
    "data_parallel": lambda log: fits(nn.DataParallel(nested())),
    "recurrent": lambda log: fits(nn.Sequential(nn.LSTM(2, 3, bidirectional=True), nn.GRU(2, 2))),
    "a_transformer": lambda log: fits(nn.TransformerEncoderLayer(4, 2, 4)),
    "synchronized_batch_norm": lambda log: ((m := nn.SyncBatchNorm(2)), dict(saved(m))),
}


@case
def observers(log: Log) -> Any:
    from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

    module = nn.Sequential(MinMaxObserver(), PerChannelMinMaxObserver())
    state_dict = saved(module)
    state_dict["1.min_val"] = torch.ones(3)
    return module, state_dict


@case
def names_with_dots(log: Log) -> Any:
    module = nested()
    module._modules["0.weight"] = nn.Linear(1, 1)
    module._modules["a.b"] = nn.Linear(1, 1)
    module._modules["a"] = nn.ModuleDict({"b": nn.Linear(1, 1)})
    module._modules[""] = nn.Linear(1, 1)
    return fits(module)


@case
def names_that_are_numbers(log: Log) -> Any:
    module = nested()
    module._modules[3] = nn.Linear(1, 1)  # type: ignore[index]
    return module, {}


class Override(nn.Module):
    """Loads without asking its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.child = nn.Linear(2, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.weight.data += state_dict[prefix + "weight"]
        for name in ("weight", "bias"):
            state_dict[f"{prefix}child.{name}"] = torch.full_like(getattr(self.child, name), 4)


@case
def an_override_on_the_instance(log: Log) -> Any:
    module = nested()
    module[1]._load_from_state_dict = lambda *args: log.append(args[1])  # type: ignore[method-assign]
    return fits(module)


class CountingNorm(nn.BatchNorm1d):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 5
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Mixin(nn.Module):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "bias"] = state_dict[prefix + "bias"] * 5
        super()._load_from_state_dict(state_dict, prefix, *rest)


class MixedNorm(nn.BatchNorm1d, Mixin):
    """Whose norm's super() is somebody else's."""


class Watching(nn.Module):
    """Notes what is set."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.weight = nn.Parameter(torch.ones(1))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "log" in vars(self):
            self.log.append((name, value.tolist()))
        super().__setattr__(name, value)


class OwnLoading(nn.Linear):
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Any, strict: bool = True, **options: Any
    ) -> Any:
        return ("own", list(state_dict), strict, options)


CASES |= {
    "an_override_without_super": lambda log: fits(nn.Sequential(Override(), nn.Linear(2, 2))),
    "overridden_norms": lambda log: (
        (m := nn.Sequential(CountingNorm(2), MixedNorm(2))),
        dict(saved(m)),
    ),
    "attributes_that_are_watched": lambda log: fits(nn.Sequential(Watching(log))),
    "an_overridden_load_state_dict": lambda log: (OwnLoading(1, 1), {"a": 1}),
    "an_overridden_load_state_dict_below": lambda log: fits(nn.Sequential(OwnLoading(1, 1))),
}


@case
def a_load_state_dict_on_the_instance(log: Log) -> Any:
    module = nested()
    module.load_state_dict = lambda *args, **options: args[0]  # type: ignore[method-assign]
    return module, {"a": 1}


@case
def a_module_in_itself(log: Log) -> Any:
    module = nn.Linear(1, 1)
    module._modules["self"] = module
    return module, {"weight": torch.ones(1, 1), "bias": torch.ones(1)}


@case
def deep_nesting(log: Log) -> Any:
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(200):
        module = nn.Sequential(module)
    return fits(module)


# --------------------------------------------------------------------------------------- the tests

ALL_CASES = {
    f"{kind}{name}": build
    for kind, cases in [
        ("", CASES),
        ("tensors: ", TENSORS),
        ("hook: ", EDITS),
        ("root: ", ROOT_EDITS),
    ]
    for name, build in cases.items()
}


@pytest.fixture(autouse=True)
def _every_warning_is_given() -> Iterator[None]:
    """As torch gives some once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.parametrize(("strict", "assign"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", ALL_CASES)
def test_as_torch_loads(name: str, strict: bool, assign: bool) -> None:
    assert_same_load(ALL_CASES[name], strict=strict, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ALL_CASES)
def test_as_torch_swaps(name: str, assign: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert torch.__future__.get_swap_module_params_on_conversion()
    assert_same_load(ALL_CASES[name], assign=assign)


class Recorder(TorchFunctionMode):
    """Sees every call of torch."""

    calls: Log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class DispatchRecorder(TorchDispatchMode):
    """Sees every operator."""

    calls: Log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Recorder, DispatchRecorder])
@pytest.mark.parametrize("name", ["everything_fits", "several_errors", "compiled", "weight_norm"])
def test_modes_see_what_they_see_in_torch(name: str, mode: Any) -> None:
    seen = []
    for load in (stock_load_state_dict, ptsave.load_state_dict):
        module, state_dict = built(ALL_CASES[name], [])
        with mode() as active:
            active.calls = []
            with contextlib.suppress(RuntimeError):
                load(module, state_dict)
        seen.append(active.calls)
    assert seen[0] == seen[1]
    assert seen[0]


def test_grad_mode_is_as_it_was() -> None:
    module = nested()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            ptsave.load_state_dict(module, saved(module))
            assert torch.is_grad_enabled() is enabled


def test_registration_hooks_see_what_is_assigned() -> None:
    logs: list[Log] = []
    for load in (stock_load_state_dict, ptsave.load_state_dict):
        log: Log = []
        module, state_dict = built(CASES["everything_fits"], [])
        handle = register_module_parameter_registration_hook(
            lambda owner, name, value, log=log: log.append((type(owner), name, value.tolist()))
        )
        try:
            load(module, state_dict, assign=True)
        finally:
            handle.remove()
        logs.append(log)
    assert logs[0] == logs[1]
    assert logs[0]


def test_methods_that_are_replaced_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Log = []
    monkeypatch.setattr(
        nn.Module, "_load_from_state_dict", lambda *args: calls.append((type(args[0]), args[2]))
    )
    module, state_dict = CASES["everything_fits"]([])
    ptsave.load_state_dict(module, state_dict)
    assert len(calls) == len([*module.modules()])
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *args: "replaced")
    result: Any = ptsave.load_state_dict(module, state_dict)
    assert result == "replaced"


def test_methods_that_were_replaced_before() -> None:
    """In a fresh process, before ptsave is imported."""
    script = """
import functools
from torch import nn
calls = []
def replace(name):
    function = getattr(nn.Module, name)
    @functools.wraps(function)
    def replacement(*args):
        calls.append(name)
        return function(*args)
    setattr(nn.Module, name, replacement)
replace("_load_from_state_dict")
import ptsave
module = nn.Linear(1, 1)
ptsave.load_state_dict(module, module.state_dict())
assert calls == ["_load_from_state_dict"]
replace("load_state_dict")
ptsave.load_state_dict(module, module.state_dict())
assert calls == ["_load_from_state_dict", "load_state_dict", "_load_from_state_dict"]
"""
    run_python(script)


def test_a_scripted_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [
            torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) for _ in "12"
        ]
        state_dict = saved(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        assert ptsave.load_state_dict(modules[0], state_dict) == ([], [])
        modules[1].load_state_dict(state_dict)
        assert_same_object(dict(modules[0].state_dict()), dict(modules[1].state_dict()))
    with pytest.raises(RuntimeError, match="Missing key"):
        ptsave.load_state_dict(modules[0], {})


def test_time_is_linear() -> None:
    """Counted, not measured: a state dict whose keys count how often they are looked at."""
    counts = []
    for n_layers in (50, 500):
        module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(n_layers)))
        state_dict = module.state_dict()
        profile = cProfile.Profile()
        profile.runcall(ptsave.load_state_dict, module, state_dict)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] < 10.5 * counts[0]


# ------------------------------------------------------------------------------- random state dicts

LEAVES: list[Callable[[], Any]] = [
    lambda: nn.Linear(1, 2),
    lambda: nn.Linear(2, 1, bias=False),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.InstanceNorm1d(2),
    nn.ReLU,
    lambda: nn.ParameterList([torch.ones(1), torch.ones(2)]),
    nn.PReLU,
    lambda: Migrating([]),
    lambda: WithExtraState([], 1),
    lambda: parametrizations.weight_norm(nn.Linear(1, 1)),
]
TREES = st.recursive(
    st.integers(0, len(LEAVES) - 1),
    lambda trees: st.dictionaries(st.sampled_from(["a", "b", "weight", "0"]), trees, max_size=3),
    max_leaves=6,
)
MUTATION = st.tuples(
    st.sampled_from(["drop", "add", "rename", "reshape", "spoil"]),
    st.integers(0, 30),
    st.sampled_from(["a", "a.b", "weight", "b.bias", "0.weight", ".", "_extra_state", "a..b"]),
)


def grow(tree: Any) -> Any:
    if isinstance(tree, int):
        return LEAVES[tree]()
    return nn.ModuleDict({name: grow(branch) for name, branch in tree.items()})


def mutate(state_dict: dict[str, Any], kind: str, position: int, name: str) -> None:
    keys = list(state_dict)
    key = keys[position % len(keys)] if keys else name
    if kind == "add":
        state_dict[name] = torch.ones(1)
    elif kind == "drop":
        state_dict.pop(key, None)
    elif kind == "rename" and keys:
        state_dict[f"{key.rpartition('.')[0]}.{name}"] = state_dict.pop(key)
    elif kind == "reshape":
        state_dict[key] = torch.ones(1)
    elif kind == "spoil":
        state_dict[key] = "no tensor"


HOOK = st.tuples(
    st.integers(0, 8),
    st.sampled_from(["log", "add", "drop", "keep", "edit what was kept", "post", "remove child"]),
    st.sampled_from(["a", "a.b", "weight", "b.bias", "a.weight", "0.weight"]),
)


def add_hook(module: nn.Module, kind: str, name: str, kept: list[Any], log: Log) -> None:
    def pre(state_dict: Any, prefix: str, *rest: Any) -> None:
        log.append((kind, prefix, list(state_dict)))
        if kind == "add":
            state_dict[prefix + name] = torch.ones(1)
        elif kind == "drop" and state_dict:
            del state_dict[list(state_dict)[len(name) % len(state_dict)]]
        elif kind == "keep":
            kept.append((state_dict, prefix))
        elif kind == "edit what was kept":
            for each, its_prefix in kept:
                each.pop(its_prefix + name, None)
                each[its_prefix + "b." + name] = torch.ones(1)
        elif kind == "remove child":
            module._modules.pop(name, None)

    if kind == "post":
        module.register_load_state_dict_post_hook(lambda _, keys: log.append(repr(keys)))
    else:
        module._register_load_state_dict_pre_hook(pre)


@given(
    tree=TREES,
    hooks=st.lists(HOOK, max_size=4),
    mutations=st.lists(MUTATION, max_size=4),
    keep_metadata=st.booleans(),
    strict=st.booleans(),
    assign=st.booleans(),
)
def test_random_trees(
    *, tree: Any, hooks: Any, mutations: Any, keep_metadata: bool, strict: bool, assign: bool
) -> None:
    def build(log: Log) -> Any:
        module = nn.ModuleDict({"root": grow(tree)})
        state_dict = saved(module)
        for mutation in mutations:
            mutate(state_dict, *mutation)
        modules, kept = [*module.modules()], []  # type: ignore[var-annotated]
        for position, kind, name in hooks:
            add_hook(modules[position % len(modules)], kind, name, kept, log)
        return module, state_dict if keep_metadata else dict(state_dict)

    assert_same_load(build, strict=strict, assign=assign)
