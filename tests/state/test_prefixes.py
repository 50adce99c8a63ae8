"""`strip_prefix` and `add_prefix`: order, metadata and collisions."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import ptsave


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def metadata_of(state_dict: Any) -> Any:
    return getattr(state_dict, "_metadata", None)


def test_what_data_parallel_saves_is_stripped_as_torch_strips_it() -> None:
    wrapped: Any = nn.DataParallel(model()).state_dict()
    expected = copy.deepcopy(wrapped)
    consume_prefix_in_state_dict_if_present(expected, "module.")
    before = (list(wrapped), list(wrapped._metadata))
    stripped = ptsave.strip_prefix(wrapped, "module.")
    assert list(stripped) == list(expected) == list(model().state_dict())
    assert metadata_of(stripped) == metadata_of(expected)
    assert type(stripped) is OrderedDict
    assert all(stripped[key] is wrapped[f"module.{key}"] for key in stripped)
    assert (list(wrapped), list(wrapped._metadata)) == before
    assert ptsave.load_state_dict(model(), stripped) == ([], [])


def test_there_and_back_again() -> None:
    state_dict = model().state_dict()
    added = ptsave.add_prefix(state_dict, "module.")
    wrapped = nn.DataParallel(model())
    assert list(added) == list(wrapped.state_dict())
    assert ptsave.load_state_dict(wrapped, added) == ([], [])
    back = ptsave.strip_prefix(added, "module.")
    assert list(back.items()) == list(state_dict.items())
    assert list(metadata_of(back).items()) == list(metadata_of(state_dict).items())


def test_metadata_is_not_shared() -> None:
    state_dict = model().state_dict()
    ptsave.load_state_dict(model(), ptsave.strip_prefix(state_dict, "module."), assign=True)
    assert "assign_to_params_buffers" not in metadata_of(state_dict)[""]


def test_modules_that_are_compiled_one_by_one() -> None:
    module = nn.Sequential(OrderedDict(encoder=model(), _orig_mod=nn.Linear(1, 1)))
    plain = module.state_dict()
    compiled: OrderedDict[str, Any] = OrderedDict()
    compiled._metadata = OrderedDict()  # type: ignore[attr-defined]
    for key, entry in plain.items():
        compiled["_orig_mod." + key.replace("encoder.", "encoder._orig_mod._orig_mod.")] = entry
    for key, entry in metadata_of(plain).items():
        metadata_of(compiled)[key] = {"version": "the wrapper's"}
        name = key.replace("encoder", "encoder._orig_mod")
        metadata_of(compiled)[f"_orig_mod.{name}".removesuffix(".")] = entry
    compiled["_orig_mod.0._orig_mod"] = compiled["weight_orig_mod.x"] = torch.ones(1)
    stripped = ptsave.strip_prefix(compiled, "_orig_mod.", anywhere=True)
    assert list(stripped)[:2] == ["encoder.0.weight", "encoder.0.bias"]
    # The last part of a key is no module; a part that only ends like the prefix is another one.
    assert list(stripped)[-2:] == ["0._orig_mod", "weight_orig_mod.x"]
    assert metadata_of(stripped)["encoder.0"] == metadata_of(plain)["encoder.0"]
    assert metadata_of(stripped)[""] == metadata_of(plain)[""]


def test_only_the_first_prefix_is_stripped() -> None:
    values = {"module.module.a": 1, "b.module.c": 2, "modules.d": 3, "module": 4}
    stripped = ptsave.strip_prefix(values, "module.")
    assert list(stripped) == ["module.a", "b.module.c", "modules.d", "module"]
    assert metadata_of(stripped) is None


@pytest.mark.parametrize("values", [{"module.a": 1, "a": 2}, {"a": 1, "module.a": 2}])
def test_colliding_keys(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'a'.* would both become 'a'") as info:
        ptsave.strip_prefix(values, "module.")
    assert "'module.a'" in str(info.value)


@pytest.mark.parametrize("function", [ptsave.strip_prefix, ptsave.add_prefix])
def test_a_prefix_without_a_dot(function: Any) -> None:
    with pytest.raises(ValueError, match=r"use 'module\.'"):
        function({}, "module")
