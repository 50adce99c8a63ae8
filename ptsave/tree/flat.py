"""Flattens an object to a dict of tensors, as safetensors files hold it, and lists the losses."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave.support.text import some_of
from ptsave.tree.containers import (
    MAX_DEPTH,
    Path,
    attributes_of,
    is_container,
    nested_too_deep,
    walk_entries,
)
from ptsave.tree.opaque import type_name_of

_N_NAMED = 5


@dataclass
class Flattened:
    """The tensors of an object by dotted name, in the order of the object.

    `losses` are entries that the format cannot hold, each with the reason. `remarks` are about
    entries that are kept, but changed.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def flatten(
    obj: Any, dtypes: Collection[torch.dtype] | None, *, keeps_ties: bool = False
) -> Flattened:
    """Return the tensors of an object by dotted name.

    `dtypes` are those of the format, or None for all. With `keeps_ties`, contiguous tensors with
    the same memory and shape stay tied. Two entries with one dotted name raise ValueError, and so
    do containers that are nested too deep.
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
            reason = "it has no name: save a dict of it"
        if reason is not None:
            result.losses.append(f"{name or 'the object itself'} ({reason})")
            continue
        if name in result.tensors:
            raise ValueError(f"{paths[name]!r} and {path!r} are both called {name!r} when flat")
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
    """Yield leaves with their paths and dotted names, looking into each container once."""
    if not is_container(obj):
        yield (), "", obj
        return
    _remark_on_metadata(obj, "the state dict", result)
    for path, prefix, key, value, is_inner, again in walk_entries(obj, whole="the whole"):
        name = f"{prefix}{key}"
        if not is_inner:
            yield (*path, key), name, value
            continue
        if again is not None:
            result.losses.append(f"{name} (it is {again} again)")
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
