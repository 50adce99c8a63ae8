"""Divides packed parameters into the tensors that published checkpoints have for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ptsave.models.packed_modules import PackedModules, ShardId
from ptsave.models.weight_parts import parts_along
from ptsave.models.weight_plan import Delivery
from ptsave.support.torch_modules import tensors_in

# The shapes of the parts that parameters were filled from, by shard id.  They are no attributes of
# the parameters, because modules that are saved whole would contain them.
_shapes: Any = WeakTensorKeyDictionary()


def note_parts(tensors: Mapping[str, Tensor], deliveries: Iterable[Delivery]) -> None:
    """Remember the shapes of the parts that a model's packed parameters were filled from."""
    by_name: dict[str, dict[ShardId | None, torch.Size]] = {}
    for each in deliveries:
        by_name.setdefault(each.name, {})[each.shard_id] = each.entry.shape
    for name, shapes in by_name.items():
        _shapes.setdefault(tensors[name], {}).update(shapes)


def unpacked(
    tensors: Mapping[str, Tensor], packed: PackedModules, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return tensors, with packed ones replaced by their parts, which share their memory.

    The `model` may know sizes of parts that the shapes do not tell. If nothing tells how a
    parameter is divided, or two parts have one name, it raises ValueError.
    """
    result: dict[str, Tensor] = {}
    own = {} if model is None else tensors_in(model)
    for name, tensor in tensors.items():
        shards = packed.shards_of(name)
        ids = [shard_id for _, shard_id in shards]
        parts = _parts(name, tensor, ids, own.get(name), model) if shards else [tensor]
        for new_name, part in zip([each for each, _ in shards] or [name], parts, strict=True):
            if new_name in result:
                raise ValueError(f"packed_modules_mapping: two tensors would be {new_name!r}")
            result[new_name] = part
    return result


def _parts(
    name: str,
    tensor: Tensor,
    ids: Sequence[ShardId],
    parameter: Tensor | None,
    model: nn.Module | None,
) -> list[Tensor]:
    saver = getattr(parameter, "weight_saver", None)
    if callable(saver):
        with torch.no_grad():
            return [saver(parameter, shard_id).detach() for shard_id in ids]
    shapes = _shapes.get(parameter, {}) if parameter is not None else {}
    if shapes and all(shard_id in shapes for shard_id in ids):
        places = parts_along(tensor.shape, tuple(shapes[shard_id] for shard_id in ids))
        if places is not None:
            dim = places[0][0]
            return list(tensor.split([shapes[shard_id][dim] for shard_id in ids], dim))
    elif not any(isinstance(shard_id, tuple) for shard_id in ids) and tensor.dim() > 0:
        sizes = _sizes_of(name, model)
        if sizes is not None and len(sizes) == len(ids) and sum(sizes) == tensor.shape[0]:
            return list(tensor.split(sizes))
        if sizes is None and tensor.shape[0] % len(ids) == 0:
            return list(tensor.split(tensor.shape[0] // len(ids)))
    raise ValueError(
        f"nothing says how {name!r} of shape {tuple(tensor.shape)} is divided into the shards "
        f"{', '.join(map(repr, ids))}: give the parameter a weight_saver(parameter, shard_id) that "
        "returns one of them, or its module a list output_sizes"
    )


def _sizes_of(name: str, model: nn.Module | None) -> list[int] | None:
    if model is None:
        return None
    sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "output_sizes", None)
    return list(sizes) if isinstance(sizes, (list, tuple)) else None
