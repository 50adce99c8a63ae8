"""Maps tensors of a checkpoint to the packed parameters of a model that they are parts of.

Inference engines compute several linear layers as one, so that `q_proj`, `k_proj` and `v_proj` of a
checkpoint are shards of the model's `qkv_proj`.  Only names here; nothing touches a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["PackedModules", "PackedModulesMapping", "Route", "ShardId"]

ShardId: TypeAlias = "str | int"
# {"q_proj": ("qkv_proj", "q"), ...} or {"qkv_proj": ["q_proj", ...], ...}, also mixed.
PackedModulesMapping: TypeAlias = Mapping[str, "tuple[str, ShardId] | Sequence[str]"]


@dataclass(frozen=True)
class Route:
    """The destination of a packed tensor.

    Attributes
    ----------
    target : str
        The model's parameter.
    shard_id : str or int
        The part of it.
    packed : str
        The name in the mapping that `target` owes itself to.
    """

    target: str
    shard_id: ShardId
    packed: str


class PackedModules:
    """A mapping from names of modules to the packed modules that hold their parameters.

    Parameters
    ----------
    mapping : mapping
        ``{"q_proj": ("qkv_proj", "q")}``: a name, and a tuple of the packed name and the shard id;
        or ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``: a packed name, and a list of names
        whose shard ids are their positions.  Names are one or more components of a path.

    Raises
    ------
    TypeError
        For a value that is neither, and for an argument that is no mapping.
    ValueError
        For an empty name, and for a name that the mapping sends to two places.

    Examples
    --------
    >>> packed = PackedModules({"gate_up_proj": ["gate_proj", "up_proj"]})
    >>> packed.route("layers.0.mlp.up_proj.weight")
    Route(target='layers.0.mlp.gate_up_proj.weight', shard_id=1, packed='gate_up_proj')
    >>> packed.route("layers.0.mlp.group_proj.weight") is None
    True
    """

    def __init__(self, mapping: PackedModulesMapping) -> None:
        if not isinstance(mapping, Mapping):
            raise TypeError(
                f"packed_modules_mapping must be a mapping, not {type(mapping).__name__}"
            )
        self._routes: dict[tuple[str, ...], tuple[str, ShardId]] = {}
        self._shard_ids: dict[str, dict[ShardId, None]] = {}  # in the mapping's order
        for name, value in mapping.items():
            if isinstance(value, tuple):
                self._add(name, *_checked_pair(name, value))
            else:
                for shard_id, shard_name in enumerate(_checked_names(name, value)):
                    self._add(shard_name, name, shard_id)

    def _add(self, name: str, packed: str, shard_id: ShardId) -> None:
        if not all(name.split(".")) or not all(packed.split(".")):
            raise ValueError(f"packed_modules_mapping: {name!r} -> {packed!r}: a name is empty")
        if name == packed:
            return  # not packed: the checkpoint has it as the model does
        parts = tuple(name.split("."))
        known = self._routes.setdefault(parts, (packed, shard_id))
        if known != (packed, shard_id):
            raise ValueError(
                f"packed_modules_mapping: {name!r} is both {known} and {(packed, shard_id)}"
            )
        self._shard_ids.setdefault(packed, {})[shard_id] = None

    def shard_ids(self, packed: str) -> list[ShardId]:
        """Return the parts that a packed module has."""
        return list(self._shard_ids[packed])

    def routes(self, names: Sequence[str]) -> list[Route | None]:
        """Return the `route` of each name."""
        return [self.route(name) for name in names] if self._routes else [None] * len(names)

    def route(self, name: str) -> Route | None:
        """Return where a checkpoint's tensor goes, or None if it is not packed.

        Names match whole components of the path.  Of several that do the longest wins, in
        components; among these the one nearest to the end.
        """
        parts = tuple(name.split("."))
        longest = max(map(len, self._routes), default=0)
        for n_parts in range(min(longest, len(parts)), 0, -1):
            for begin in range(len(parts) - n_parts, -1, -1):
                end = begin + n_parts
                found = self._routes.get(parts[begin:end])
                if found is not None:
                    packed, shard_id = found
                    target = ".".join((*parts[:begin], packed, *parts[end:]))
                    return Route(target, shard_id, packed)
        return None


def _checked_pair(name: str, value: tuple[object, ...]) -> tuple[str, ShardId]:
    match value:
        case (str(packed), (str() | int()) as shard_id):
            return packed, shard_id
    raise TypeError(
        f"packed_modules_mapping[{name!r}] must be a tuple (packed name, shard id) or a list of "
        f"names, not {value!r}"
    )


def _checked_names(name: str, value: object) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise TypeError(
        f"packed_modules_mapping[{name!r}] must be a tuple (packed name, shard id) or a list of "
        f"names, not {value!r}"
    )
