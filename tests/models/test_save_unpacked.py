"""save_model(packed_modules_mapping=...): packed parameters under their published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _weights import Engine, assert_equal, engine_checkpoint, packed
from safetensors.torch import save_file
from torch import Tensor, nn

import ptsave

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

LISTS = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate", "up"]}
TUPLES = {
    ".q_proj": (".qkv", "q"),
    ".k_proj": (".qkv", "k"),
    ".v_proj": (".qkv", "v"),
    ".gate": (".gate_up", 0),
    ".up": (".gate_up", 1),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16)
        self.gate_up = nn.Linear(8, 12, bias=False)
        self.norm = nn.LayerNorm(8)


def published() -> dict[str, Tensor]:
    """Return what others have: queries of 8 rows, keys and values of 4."""
    tensors = {}
    for name, n in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
        tensors[f"0.{name}.weight"] = torch.randn(n, 8)
        tensors[f"0.{name}.bias"] = torch.randn(n)
    for name in ("gate", "up"):
        tensors[f"0.{name}.weight"] = torch.randn(6, 8)
    tensors["0.norm.weight"], tensors["0.norm.bias"] = torch.randn(8), torch.randn(8)
    return tensors


def read(folder: Path) -> dict[str, Tensor]:
    return dict(ptsave.iter_weights(folder))


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("mapping", [LISTS, TUPLES])
def test_a_round_trip_is_bit_equal(tmp_path: Path, kind: Any, mapping: Any) -> None:
    (tmp_path / "published").mkdir()
    tensors = published()
    save_file(tensors, tmp_path / "published" / "model.safetensors")
    model = nn.Sequential(Layer())
    ptsave.load_model(model, tmp_path / "published", packed_modules_mapping=mapping)
    saved = tmp_path / "saved"
    ptsave.save_model(model, saved, packed_modules_mapping=mapping, format=kind, max_shard_size=300)
    assert_equal(read(saved), tensors)
    again = nn.Sequential(Layer())
    ptsave.load_model(again, saved, packed_modules_mapping=mapping)
    assert_equal(again.state_dict(), model.state_dict())


def test_engines_with_loaders(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    tensors = engine_checkpoint()
    save_file(tensors, tmp_path / "published" / "model.safetensors")
    model = Engine()
    ptsave.load_model(model, tmp_path / "published")
    mapping = Engine.packed_modules_mapping
    ptsave.save_model(model, tmp_path / "saved", packed_modules_mapping=mapping)
    assert_equal(read(tmp_path / "saved"), tensors)
    ptsave.save_model(model, tmp_path / "packed")
    assert_equal(read(tmp_path / "packed"), packed(tensors))


def test_sizes_of_a_model_that_was_not_loaded(tmp_path: Path) -> None:
    model: Any = nn.Sequential(Layer())
    mapping = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate", "up"]}
    with pytest.raises(ValueError, match=r"'0\.qkv\.weight'.*output_sizes"):  # 16 rows, three parts
        ptsave.save_model(model, tmp_path, packed_modules_mapping=mapping)
    assert not list(tmp_path.iterdir())
    model[0].qkv.output_sizes = [8, 4, 4]
    ptsave.save_model(model, tmp_path, packed_modules_mapping=mapping)
    found = read(tmp_path)
    assert torch.equal(found["0.k_proj.weight"], model[0].qkv.weight[8:12])
    assert torch.equal(found["0.v_proj.bias"], model[0].qkv.bias[12:])
    assert torch.equal(found["0.up.weight"], model[0].gate_up.weight[6:])
    again: Any = nn.Sequential(Layer())
    ptsave.load_model(again, tmp_path, packed_modules_mapping=mapping)
    assert_equal(again.state_dict(), model.state_dict())


def test_a_parameter_may_say_what_its_parts_are(tmp_path: Path) -> None:
    class Interleaved(nn.Module):
        """Rows of queries and keys in turn, of two experts."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 3))
            parameter: Any = self.weight
            parameter.weight_saver = self.save
            parameter.weight_loader = self.load

        @staticmethod
        def save(parameter: Tensor, shard_id: tuple[int, int]) -> Tensor:
            return parameter[shard_id[1], shard_id[0] :: 2]

        def load(self, parameter: Tensor, tensor: Tensor, shard_id: tuple[int, int]) -> None:
            self.save(parameter, shard_id).copy_(tensor)

    model = nn.ModuleDict({"moe": Interleaved()})
    mapping: Any = {
        f"experts.{e}.{name}": ("moe", (i, e)) for e in range(2) for i, name in enumerate("qk")
    }
    ptsave.save_model(model, tmp_path, packed_modules_mapping=mapping)
    assert sorted(read(tmp_path)) == [
        f"experts.{e}.{name}.weight" for e in range(2) for name in "kq"
    ]
    again = nn.ModuleDict({"moe": Interleaved()})
    ptsave.load_model(again, tmp_path, packed_modules_mapping=mapping)
    assert_equal(again.state_dict(), model.state_dict())
    del again["moe"].weight.weight_saver  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="weight_saver"):
        ptsave.save_model(again, tmp_path, packed_modules_mapping=mapping)


def test_state_dicts_have_equal_parts(tmp_path: Path) -> None:
    weight = torch.randn(6, 2)
    ptsave.save_model({"gate_up.weight": weight}, tmp_path, packed_modules_mapping=LISTS)
    first, second = weight.split(3)
    assert_equal(read(tmp_path), {"gate.weight": first, "up.weight": second})


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    tensors = {"gate_up.weight": torch.randn(6, 2), "up.weight": torch.randn(3, 2)}
    with pytest.raises(ValueError, match=r"up\.weight"):
        ptsave.save_model(tensors, tmp_path, packed_modules_mapping=LISTS)
