"""`unsaved_tensors`: what is lost when a state dict is saved, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ptsave


class Attributes(nn.Module):
    """A module with tensors in all places where people put them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("mean", torch.zeros(2))
        self.seen = torch.zeros(3)
        self.again = self.seen
        self.row = self.inner.weight[0]
        self.table = {"a": [torch.ones(1), 3], "b": (torch.eye(2).to_sparse(),)}
        self.heads = [nn.Linear(2, 1), self.inner]
        self.table["itself"] = self.table  # type: ignore[assignment]


def test_where_people_put_tensors() -> None:
    module = Attributes()
    found = ptsave.unsaved_tensors(nn.ModuleDict({"part": module}))
    names = ["mask", "seen", "table.a.0", "table.b.0", "heads.0.weight", "heads.0.bias"]
    assert list(found) == [f"part.{name}" for name in names]
    assert found["part.seen"] is module.seen
    assert not any(name in nn.ModuleDict({"part": module}).state_dict() for name in found)


def test_what_registers_everything_loses_nothing() -> None:
    tied = nn.Linear(3, 3)
    module = nn.Sequential(
        tied,
        nn.BatchNorm1d(3),
        nn.ModuleList([tied]),
        parametrizations.weight_norm(nn.Linear(3, 3)),
    )
    assert ptsave.unsaved_tensors(module) == {}


class Extra(nn.Module):
    """Saves an attribute by extra state, and takes a parameter out by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(2)
        self.lost = nn.Parameter(torch.ones(2))
        self.register_state_dict_post_hook(self._take_out)  # type: ignore[no-untyped-call]

    @staticmethod
    def _take_out(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        del state[f"{prefix}lost"]

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.kept = state["kept"]


def test_code_of_the_module_counts() -> None:
    assert list(ptsave.unsaved_tensors(Extra())) == ["lost"]


def test_meta_and_lazy_modules() -> None:
    module = Attributes()
    module.table = {}
    module.to("meta")
    module.seen = module.seen.to("meta")
    assert list(ptsave.unsaved_tensors(module))[:2] == ["mask", "seen"]
    assert ptsave.unsaved_tensors(nn.LazyLinear(2)) == {}


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not dict"):
        ptsave.unsaved_tensors({})  # type: ignore[arg-type]
