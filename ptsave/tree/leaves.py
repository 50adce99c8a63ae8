"""Copies entries after reading their tensors' values, and flattens objects to dicts of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave.support.text import some_of
from ptsave.support.torch_names import untyped_of
from ptsave.tree.containers import (
    MAX_DEPTH,
    Path,
    attributes_of,
    is_container,
    items_of,
    nested_too_deep,
    set_attributes,
    walk,
    walk_entries,
)
from ptsave.tree.tree import refuse_opaque, type_name_of

_CONTAINERS = (dict, OrderedDict, list, tuple)


def read_entry(entry: Any, read: Callable[[Sequence[Tensor]], list[Tensor]], name: str) -> Any:
    """Return a copy of an entry of an archive, with the values of its tensors.

    `read` gets the entry's tensors, which may have no values, and a tensor of bytes for each
    storage; it returns them with values. An object that occurs twice is shared in the copy,
    too. Raises UnpicklingError about `name` for an `Opaque`, an object that was not built.
    """
    refuse_opaque(entry, name)
    leaves = {id(leaf): leaf for leaf in leaves_of(entry)}
    found = read([*map(_tensor_over, leaves.values())])
    made: dict[int, Any] = {
        key: _back(leaf, values) for (key, leaf), values in zip(leaves.items(), found, strict=True)
    }
    return _copy(entry, made)


def leaves_of(entry: Any) -> list[Any]:
    """Return the tensors and storages of an entry."""
    leaves = (Tensor, torch.UntypedStorage, torch.TypedStorage)
    return [value for value in walk(entry, _CONTAINERS, exactly=True) if isinstance(value, leaves)]


def tensors_over(entry: Any) -> list[Tensor]:
    """Return the tensors of an entry, and for each storage a tensor of all its bytes."""
    return [*map(_tensor_over, leaves_of(entry))]


def require_picklable(entry: Any, path: str) -> None:
    """Raise ValueError if a container in an entry has an attribute with the name of a method.

    Pickling an ``OrderedDict`` calls its ``items``. An attribute of that name would be called
    instead, and the entries would be lost.
    """
    for container in _containers_in(entry):
        for name in attributes_of(container):
            if hasattr(type(container), name):
                raise ValueError(
                    f"{path}: a {type(container).__name__} has an attribute {name!r} in place of a "
                    "method, and would lose its entries when it is written: load the file, "
                    "and save its entries in a plain dict"
                )


def _tensor_over(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    untyped = leaf if isinstance(leaf, torch.UntypedStorage) else untyped_of(leaf)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def _back(leaf: Any, values: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return values
    untyped = values.untyped_storage()
    if isinstance(leaf, torch.UntypedStorage):
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=leaf.dtype, _internal=True)


def _copy(entry: Any, made: dict[int, Any]) -> Any:
    """Return a copy of an entry; `made` has new tensors and storages, by the ``id`` of the old."""
    containers = _containers_in(entry)
    for container in containers:
        if type(container) is not tuple:
            made[id(container)] = type(container)()
    for container in containers:
        if type(container) is tuple:
            _make_tuple(container, made)
    for container in containers:
        copy = made[id(container)]
        if type(container) is list:
            copy += (_made(part, made) for part in container)
        elif type(container) is not tuple:
            for key, part in items_of(container):
                copy[key] = _made(part, made)
            attributes = attributes_of(container).items()  # `_metadata` of state dicts
            set_attributes(copy, {name: _made(part, made) for name, part in attributes})
    return _made(entry, made)


def _made(part: Any, made: dict[int, Any]) -> Any:
    return made.get(id(part), part)


def _make_tuple(value: tuple[Any, ...], made: dict[int, Any]) -> None:
    """Add copies of a tuple and of the tuples in it to `made`, the inner ones first."""
    pending = [value]
    while pending:
        last = pending[-1]
        inner = [part for part in last if type(part) is tuple and id(part) not in made]
        if inner:
            pending += inner
            continue
        pending.pop()
        made.setdefault(id(last), tuple([_made(part, made) for part in last]))


def _containers_in(entry: Any) -> list[Any]:
    """Return every container of an entry once."""
    values = walk(entry, _CONTAINERS, exactly=True)
    return [value for value in values if type(value) in _CONTAINERS]


_N_NAMED = 5


@dataclass
class Flattened:
    """The tensors of an object by dotted name, in the order of the object.

    `losses` names the entries that the file format cannot store, each with the reason. `remarks`
    says how the stored entries change.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def flatten(
    obj: Any, dtypes: Collection[torch.dtype] | None, *, keeps_ties: bool = False
) -> Flattened:
    """Return the tensors of an object by dotted name.

    `dtypes` are the dtypes that the file format can store; None allows all. `keeps_ties` says that
    contiguous tensors with equal memory, shape and dtype are stored once. Raises ValueError if two
    entries have the same dotted name, or if containers are nested too deep.
    """
    result = Flattened()
    paths: dict[str, Path] = {}
    n_nested = n_with_gradients = n_not_contiguous = 0
    storages: dict[int, str] = {}
    sharing: list[str] = []
    tied: set[tuple[Any, ...]] = set()
    for path, name, value in _leaves(obj, result):
        reason = _reason_against(value, dtypes)
        if reason is None and not path:
            reason = "it has no name: save it in a dict"
        if reason is not None:
            result.losses.append(f"{name or 'the object itself'} ({reason})")
            continue
        if name in result.tensors:
            raise ValueError(f"{paths[name]!r} and {path!r} would both get the name {name!r}")
        paths[name] = path
        result.tensors[name] = value
        n_nested += len(path) > 1 or not isinstance(path[0], str)
        n_with_gradients += isinstance(value, Parameter) or value.requires_grad
        n_not_contiguous += not value.is_contiguous()
        if value.numel() == 0:
            continue
        storage = value.untyped_storage().data_ptr()
        place = (storage, value.storage_offset(), value.shape, value.dtype)
        if storages.setdefault(storage, name) != name and place not in tied:
            sharing.append(name)
        if keeps_ties and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
            tied.add(place)
    _remark(result, n_nested, "from within containers: their names are the paths, with dots")
    _remark(result, n_with_gradients, "parameters or with requires_grad, which is not kept")
    _remark(result, n_not_contiguous, "not contiguous: written contiguously")
    if sharing:
        share = "shares" if len(sharing) == 1 else "share"
        result.remarks.append(
            f"{some_of(sharing, _N_NAMED)} {share} memory with others: "
            "written in full for every name"
        )
    return result


def _remark(result: Flattened, n: int, what: str) -> None:
    if n:
        result.remarks.append(f"{n} tensor{' is' if n == 1 else 's are'} {what}")


def _leaves(obj: Any, result: Flattened) -> Iterator[tuple[Path, str, Any]]:
    """Yield the path, dotted name and value of each leaf; add losses and remarks to `result`."""
    if not is_container(obj):
        yield (), "", obj
        return
    _remark_on_metadata(obj, "the state dict", result)
    for path, prefix, key, value, is_inner, again in walk_entries(obj, whole="the whole object"):
        name = f"{prefix}{key}"
        if not is_inner:
            yield (*path, key), name, value
            continue
        if again is not None:
            result.losses.append(f"{name} (the same as {again})")
            continue
        if len(path) >= MAX_DEPTH:
            raise nested_too_deep()
        _remark_on_metadata(value, name, result)
        if not len(value):
            result.losses.append(f"{name} (an empty {type(value).__name__})")


def _remark_on_metadata(container: Any, name: str, result: Flattened) -> None:
    if attributes_of(container).get("_metadata"):
        result.remarks.append(f"_metadata of {name} is not kept")


def _reason_against(value: Any, dtypes: Collection[torch.dtype] | None) -> str | None:
    """Return why a format of plain tensors cannot hold a value; None if it can."""
    if not isinstance(value, Tensor):
        return type_name_of(value)
    if value.layout != torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if value.is_quantized:
        return "a quantized tensor"
    if value.is_meta and value.numel():
        return "a tensor on the meta device, without values"
    if type(value) not in (Tensor, Parameter):
        return f"a tensor of type {type(value).__name__}"
    if dtypes is not None and value.dtype not in dtypes:
        return f"dtype {str(value.dtype).removeprefix('torch.')}"
    return None
