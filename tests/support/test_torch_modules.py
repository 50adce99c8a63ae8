"""Walks over modules, which are those of torch's generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ptsave.support.torch_modules import modules_in, tensors_in


def shared() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    model.append(model[0])
    model.register_module("none", None)
    model.register_buffer("own", torch.ones(1), persistent=False)
    model[2].weight = model[0].weight
    return model


class Renaming(nn.Sequential):
    """Has names of its own, as FSDP has."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"p.{name}", each) for name, each in super().named_parameters(*args, **options))

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"b.{name}", each) for name, each in super().named_buffers(*args, **options))


class Hiding(nn.Sequential):
    """Has modules that it names by another name."""

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield name.replace("_orig_mod.", ""), module


MODELS = {
    "one": nn.Linear(2, 2),
    "shared": shared(),
    "renaming": Renaming(*shared()),
    "hiding": nn.Sequential(Hiding(nn.ModuleDict({"_orig_mod": shared()}), nn.Linear(1, 1))),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_modules_and_tensors_are_those_of_torch(model: nn.Module) -> None:
    assert modules_in(model) == list(model.named_modules(remove_duplicate=False))
    expected: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    expected.update(model.named_buffers(remove_duplicate=False))
    for found in (tensors_in(model), tensors_in(model, modules_in(model))):
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)
