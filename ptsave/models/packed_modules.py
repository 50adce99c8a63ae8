"""Maps the tensors of a checkpoint to the packed parameters that they are parts of, and back.

Inference engines compute several linear layers as one, so a checkpoint's `q_proj`, `k_proj` and
`v_proj` are shards of the model's `qkv_proj`.
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
# {"qkv_proj": ["q_proj", ...], ...}, also mixed; or [("qkv_proj", "q_proj", "q"), ...], also with
# (..., expert, "w1") at the end.
PackedModulesMapping: TypeAlias = (
    "Mapping[str, tuple[str, ShardId | None] | Sequence[str] | Sequence[tuple[str, ShardId | None]]"
    "] | Sequence[tuple[Any, ...]]"
)
_FORMS = "a tuple (packed name, shard id), a list of such tuples, or a list of names"


class Route(NamedTuple):
    """The destination of a tensor: a parameter, or the part of it that `shard_id` names."""

    target: str
    shard_id: ShardId | None
    packed: str | None  # the name in the mapping that led to `target`


class _Place(NamedTuple):
    packed: str
    shard_id: ShardId | None


class PackedModules:
    """A mapping from names of modules to the packed modules that hold their parameters.

    The forms of `mapping` are those of :func:`ptsave.load_model`. A tuple in a list has the packed
    name, the checkpoint's name and the shard id: ``("qkv_proj", "q_proj", "q")``. A tuple of four
    has the number of an expert before the part: ``("experts.w13_", "experts.3.gate_proj.", 3,
    "w1")``. Its shard id is ``("w1", 3)``. A dot at an end of a name belongs to the text that the
    packed name replaces. A mapping of another form raises TypeError. An empty name, and a name for
    two parts of one module, raise ValueError.

    >>> packed = PackedModules({"gate_up_proj": ["gate_proj", "up_proj"]})
    >>> [*packed.candidates("layers.0.mlp.up_proj.weight")]
    [[Route(target='layers.0.mlp.gate_up_proj.weight', shard_id=1, packed='gate_up_proj')]]
    >>> [*packed.candidates("layers.0.mlp.group_proj.weight")]
    []
    """

    def __init__(self, mapping: PackedModulesMapping) -> None:
        self.places: dict[str, list[_Place]] = {}  # packed names and ids by a checkpoint's name
        self._names: dict[str, dict[ShardId, str]] = {}  # of shards, in the mapping's order
        for name, places in _items_of(mapping):
            for place in places:
                self._check(name, place)
            self._add(name, places)
        self._patterns = NamePatterns(self.places)

    def _check(self, name: str, place: _Place) -> None:
        if not all(_components(name)) or not all(_components(place.packed)):
            raise ValueError(
                f"packed_modules_mapping: {name!r} -> {place.packed!r}: a name is empty"
            )
        for packed, shard_id in self.places.get(name, ()):
            if packed == place.packed and shard_id != place.shard_id:
                known = (packed, shard_id)
                raise ValueError(
                    f"packed_modules_mapping: {name!r} is both {known} and {tuple(place)}"
                )

    def _add(self, name: str, places: Sequence[_Place]) -> None:
        for place in places:
            if name == place.packed and len(places) == 1:
                continue  # not packed: the checkpoint has it as the model does
            if place not in self.places.setdefault(name, []):
                self.places[name].append(place)
            if place.shard_id is not None:
                self._names.setdefault(place.packed, {}).setdefault(place.shard_id, name)

    def shard_ids(self, packed: str) -> list[ShardId]:
        """Return the parts of a packed module, in the mapping's order."""
        return list(self._names[packed])

    def shards_of(self, name: str) -> list[tuple[str, ShardId]]:
        """Return a checkpoint's names of a parameter's parts, in order; none if it is not packed.

        >>> PackedModules({"gate_up": ["gate", "up"]}).shards_of("mlp.gate_up.weight")
        [('mlp.gate.weight', 0), ('mlp.up.weight', 1)]
        """
        match = next(NamePatterns(self._names).matches(name), None)
        if match is None:
            return []
        return [(match.replaced_by(n), i) for i, n in self._names[match.pattern].items()]

    def candidates(self, name: str) -> Iterator[list[Route]]:
        """Yield the destinations that each matching name gives, the best match first.

        Names match whole components of the path. The match with most components is the best, and
        then the one nearest to the end.
        """
        return map(self._routes, self._patterns.matches(name))

    def loose_candidates(self, name: str) -> Iterator[list[Route]]:
        """Yield the destinations of names found within components, the longest name first."""
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
            # Engines put the number of the expert in front of the part.
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
    """Remove the dots that both names have at the same end; whole components match without them."""
    if name.startswith(".") and packed.startswith("."):
        name, packed = name[1:], packed[1:]
    if name.endswith(".") and packed.endswith("."):
        name, packed = name[:-1], packed[:-1]
    return name, packed


# -------------------------------------------------------------------------------------- unpacking

# The shapes of the parts that parameters were filled from, by shard id.  They are no attributes of
# the parameters, because modules that are saved whole would contain them.
_shapes: Any = WeakTensorKeyDictionary()


def note_parts(parts: Iterable[tuple[Tensor, ShardId, torch.Size]]) -> None:
    """Remember the shapes of the parts that a model's packed parameters were filled from."""
    for parameter, shard_id, shape in parts:
        _shapes.setdefault(parameter, {})[shard_id] = shape


def unpacked(
    tensors: Mapping[str, Tensor], packed: PackedModules, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return tensors, with packed ones replaced by their parts, which share their memory.

    If the shapes do not tell the sizes of the parts, the `model` may. If neither does, or if two
    parts have one name, it raises ValueError.
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
