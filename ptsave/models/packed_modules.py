"""Finds the packed parameter that contains a checkpoint's tensor, and divides packed parameters.

Inference engines compute several linear layers as one.  So a checkpoint's `q_proj`, `k_proj` and
`v_proj` are parts (shards) of the model's `qkv_proj`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ptsave.models.weight_parts import parts_along
from ptsave.state.renaming import Match, NamePatterns
from ptsave.support.torch_modules import tensors_in

ShardId: TypeAlias = "str | int | tuple[str | int, ...]"
# {"q_proj": ("qkv_proj", "q"), ...}, {"q_proj": [("qkv_proj", "q"), ...], ...} or
# {"qkv_proj": ["q_proj", ...], ...}, or a mix of these; or [("qkv_proj", "q_proj", "q"), ...].
# Such a tuple may instead end with an expert's number and a part of it: (..., 3, "w1").
PackedModulesMapping: TypeAlias = (
    "Mapping[str, tuple[str, ShardId | None] | Sequence[str] | Sequence[tuple[str, ShardId | None]]"
    "] | Sequence[tuple[Any, ...]]"
)
_FORMS = "a tuple (packed name, shard id), a list of such tuples, or a list of names"


class Route(NamedTuple):
    """What a tensor fills: the parameter `target`, or only its part `shard_id`."""

    target: str
    shard_id: ShardId | None
    packed: str | None  # the packed name in the mapping


class _Place(NamedTuple):
    packed: str
    shard_id: ShardId | None


class PackedModules:
    """Maps modules of a checkpoint to the packed modules that contain their parameters.

    `mapping` has one of the forms that :func:`ptsave.load_model` accepts. A tuple in a list has the
    packed name, the checkpoint's name and the shard id: ``("qkv_proj", "q_proj", "q")``. A tuple of
    four items ends with an expert's number and a part: ``("experts.w13_", "experts.3.gate_proj.",
    3, "w1")`` has the shard id ``("w1", 3)``. If a name begins or ends with a dot, the packed name
    replaces this dot as well. Another form of mapping raises TypeError. An empty name raises
    ValueError, and so does one name for two parts of a module.

    >>> packed = PackedModules({"gate_up_proj": ["gate_proj", "up_proj"]})
    >>> [*packed.candidates("layers.0.mlp.up_proj.weight")]
    [[Route(target='layers.0.mlp.gate_up_proj.weight', shard_id=1, packed='gate_up_proj')]]
    >>> [*packed.candidates("layers.0.mlp.group_proj.weight")]
    []
    """

    def __init__(self, mapping: PackedModulesMapping) -> None:
        self.places: dict[str, list[_Place]] = {}  # by a module's name in the checkpoint
        self._names: dict[str, dict[ShardId, str]] = {}  # by packed name: names of parts
        for name, places in _items_of(mapping):
            for place in places:
                self._check(name, place)
            self._add(name, places)
        self._patterns = NamePatterns(self.places)

    def _check(self, name: str, place: _Place) -> None:
        if not all(_components(name)) or not all(_components(place.packed)):
            raise ValueError(
                f"packed_modules_mapping: {name!r} -> {place.packed!r} has an empty name"
            )
        for packed, shard_id in self.places.get(name, ()):
            if packed == place.packed and shard_id != place.shard_id:
                known = (packed, shard_id)
                raise ValueError(
                    f"packed_modules_mapping: {name!r} is mapped to both {known} and {tuple(place)}"
                )

    def _add(self, name: str, places: Sequence[_Place]) -> None:
        for place in places:
            if name == place.packed and len(places) == 1:
                continue  # not packed: the checkpoint and the model use the same name
            if place not in self.places.setdefault(name, []):
                self.places[name].append(place)
            if place.shard_id is not None:
                self._names.setdefault(place.packed, {}).setdefault(place.shard_id, name)

    def shard_ids(self, packed: str) -> list[ShardId]:
        """Return the shard ids of a packed module, in the mapping's order."""
        return list(self._names[packed])

    def shards_of(self, name: str) -> list[tuple[str, ShardId]]:
        """Return the checkpoint's name and the shard id of each part; [] if `name` is not packed.

        >>> PackedModules({"gate_up": ["gate", "up"]}).shards_of("mlp.gate_up.weight")
        [('mlp.gate.weight', 0), ('mlp.up.weight', 1)]
        """
        match = next(NamePatterns(self._names).matches(name), None)
        if match is None:
            return []
        return [(match.replaced_by(n), i) for i, n in self._names[match.pattern].items()]

    def candidates(self, name: str) -> Iterator[list[Route]]:
        """Yield what the tensor `name` may fill: one list for each match, the best match first.

        A name in the mapping matches complete components of `name`. The best match has the most
        components; if two have equally many, the one nearer to the end of `name` is better.
        """
        return map(self._routes, self._patterns.matches(name))

    def loose_candidates(self, name: str) -> Iterator[list[Route]]:
        """Do the same as `candidates`, but match any part of `name`; the longest match is first."""
        return map(self._routes, self._patterns.loose_matches(name))

    def _routes(self, match: Match) -> list[Route]:
        return [
            Route(match.replaced_by(packed), shard_id, packed)
            for packed, shard_id in self.places[match.pattern]
        ]


def _components(name: str) -> list[str]:
    return name.removeprefix(".").removesuffix(".").split(".")


def _items_of(mapping: Any) -> Iterator[tuple[str, list[_Place]]]:
    if isinstance(mapping, Mapping):
        for name, value in mapping.items():
            yield from _checked(name, value)
    elif isinstance(mapping, (list, tuple)) and mapping and all(map(_is_line, mapping)):
        for packed, name, *ids in mapping:
            # In such tuples of inference engines, the expert's number is before the part.
            shard_id = ids[0] if len(ids) == 1 else (ids[1], ids[0])
            yield from _checked(name, (packed, shard_id))
    elif mapping or not isinstance(mapping, (list, tuple)):
        raise TypeError(
            "packed_modules_mapping must be a mapping, or a list of tuples (packed name, name, "
            f"shard id), not {mapping!r}"
        )


def _is_line(line: Any) -> bool:
    match line:
        case (str(), str(), shard_id):
            return shard_id is None or _is_shard_id(shard_id)
        case (str(), str(), int(), str() | int()):
            return True
    return False


def _is_shard_id(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(each, (str, int)) for each in value)
    return isinstance(value, (str, int))


def _is_place(value: Any) -> bool:
    match value:
        case (str(), shard_id) if isinstance(value, tuple):
            return shard_id is None or _is_shard_id(shard_id)
    return False


def _checked(name: str, value: Any) -> Iterable[tuple[str, list[_Place]]]:
    if _is_place(value):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [
            (own, [_Place(packed, number)])
            for number, (own, packed) in enumerate(_without_dots(shard, name) for shard in value)
        ]
    if isinstance(value, list) and all(map(_is_place, value)):
        found: dict[str, list[_Place]] = {}
        for packed, shard_id in value:
            own, packed_name = _without_dots(name, packed)
            found.setdefault(own, []).append(_Place(packed_name, shard_id))
        return found.items()
    raise TypeError(f"packed_modules_mapping[{name!r}] must be {_FORMS}, not {value!r}")


def _without_dots(name: str, packed: str) -> tuple[str, str]:
    """Remove a dot that both names begin with, and one that both end with."""
    if name.startswith(".") and packed.startswith("."):
        name, packed = name[1:], packed[1:]
    if name.endswith(".") and packed.endswith("."):
        name, packed = name[:-1], packed[:-1]
    return name, packed


# -------------------------------------------------------------------------------------- unpacking

# Parameter -> shard id -> shape of the tensor that filled this part.  The shapes are not attributes
# of the parameters, because torch.save of a module would save such attributes.
_shapes: Any = WeakTensorKeyDictionary()


def note_parts(parts: Iterable[tuple[Tensor, ShardId, torch.Size]]) -> None:
    """Remember each part's shape, so that `unpacked` can divide its packed parameter."""
    for parameter, shard_id, shape in parts:
        _shapes.setdefault(parameter, {})[shard_id] = shape


def unpacked(
    tensors: Mapping[str, Tensor], packed: PackedModules, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return `tensors` with each packed tensor replaced by its parts, which share its memory.

    Without a model that tells the sizes of the parts, all parts have the same size. Raises a
    ValueError if a tensor cannot be divided, or if two tensors would get the same name.
    """
    result: dict[str, Tensor] = {}
    own = {} if model is None else tensors_in(model)
    for name, tensor in tensors.items():
        shards = packed.shards_of(name)
        ids = [shard_id for _, shard_id in shards]
        parts = _parts(name, tensor, ids, own.get(name), model) if shards else [tensor]
        for new_name, part in zip([each for each, _ in shards] or [name], parts, strict=True):
            if new_name in result:
                raise ValueError(f"packed_modules_mapping: two tensors get the name {new_name!r}")
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
        f"{name!r} of shape {tuple(tensor.shape)} cannot be divided, because the sizes of its "
        f"shards {', '.join(map(repr, ids))} are unknown: give the parameter a weight_saver"
        "(parameter, shard_id) that returns one shard, or give its module a list output_sizes"
    )


def _sizes_of(name: str, model: nn.Module | None) -> list[int] | None:
    if model is None:
        return None
    sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "output_sizes", None)
    return list(sizes) if isinstance(sizes, (list, tuple)) else None
