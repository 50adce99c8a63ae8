"""Models and files for the tests of load_model and save_model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Call = tuple[str, Any]


class PackedLinear(nn.Module):
    """Linear layers in one, loaded part by part."""

    def __init__(self, shard_ids: list[Any], width: int, rows: int) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.kept: list[Tensor] = []
        self.rows = {shard_id: number * rows for number, shard_id in enumerate(shard_ids)}
        self.n_rows = rows
        self.weight = nn.Parameter(torch.zeros(len(shard_ids) * rows, width))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Tensor, tensor: Tensor, shard_id: Any = None) -> None:
        self.calls.append(("weight", shard_id))
        self.kept.append(tensor)
        begin = 0 if shard_id is None else self.rows[shard_id]
        parameter[begin : begin + tensor.shape[0]].copy_(tensor)


class Block(nn.Module):
    """A layer as an inference engine has it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv_proj = PackedLinear(["q", "k", "v"], width, width)
        self.o_proj = nn.Linear(width, width, bias=False)


class Engine(nn.Module):
    """A model whose checkpoint has q_proj, k_proj and v_proj."""

    packed_modules_mapping = {  # noqa: RUF012 (as inference engines write it)
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
    }

    def __init__(self, n_blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))


def engine_checkpoint(n_blocks: int = 2, width: int = 8) -> dict[str, Tensor]:
    """Return random tensors for an `Engine`, by a checkpoint's names."""
    tensors = {"embed.weight": torch.randn(10, width)}
    for number in range(n_blocks):
        prefix = f"blocks.{number}"
        for name in ("norm.weight", "norm.bias"):
            tensors[f"{prefix}.{name}"] = torch.randn(width)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.{name}.weight"] = torch.randn(width, width)
    return tensors


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what an `Engine` has when it is filled with these."""
    result = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [
                tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            result[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            result[name] = tensor
    return result


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless both hold the same names and values."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def write_shards(
    folder: Path, tensors: Mapping[str, Tensor], n_shards: int, suffix: str, *, index: bool
) -> list[Path]:
    """Write a set by hand, with stock torch or the safetensors library."""
    stem = "pytorch_model" if suffix == ".bin" else "model"
    items = list(tensors.items())
    weight_map = {}
    paths = []
    for number in range(n_shards):
        part = dict(items[number::n_shards])
        path = folder / f"{stem}-{number + 1:05}-of-{n_shards:05}{suffix}"
        write_file(path, part)
        weight_map.update(dict.fromkeys(part, path.name))
        paths.append(path)
    if index:
        contents = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(contents))
    return paths


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path)
    else:
        torch.save(dict(tensors), path)


def module_of(
    tensors: Mapping[str, Tensor],
    *,
    requires_grad: bool,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a module with parameters of zeros under these names."""
    module = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        zeros = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device)
        owner.register_parameter(last, nn.Parameter(zeros, requires_grad))
    return module


def tied_model() -> nn.Module:
    """Return a model of which two parameters and two buffers are one."""
    model = nn.Module()
    model.first = nn.Linear(4, 4, bias=False)
    model.second = nn.Linear(4, 4, bias=False)
    model.second.weight = model.first.weight
    buffer = torch.randn(3)
    model.register_buffer("one", buffer)
    model.register_buffer("two", buffer)
    return model
