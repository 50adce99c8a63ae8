"""Reads the header of a safetensors file, which its library checks, and makes new headers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave.contents.safetensors_fields import (
    DTYPES,
    LENGTH_NBYTES,
    SafetensorsFields,
    read_fields,
)
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.ranges import RangeSource
from ptsave.support.calls import pausing_garbage_collection

_HEADER_ALIGNMENT = 8

# Numbers in an element of torch's packed dtypes; the format's shapes count the numbers.
_N_PACKED = {torch.float4_e2m1fn_x2: 2}


class StoredTensor(NamedTuple):
    """A tensor of the file; a tuple, because there may be 100,000."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # of its first byte in the file
    nbytes: int


class SafetensorsHeader(NamedTuple):
    """The tensors and the metadata of a safetensors file."""

    tensors: list[StoredTensor]  # in the order of their bytes
    metadata: dict[str, str]  # the writer's __metadata__


def read_header(source: RangeSource) -> SafetensorsHeader:
    """Read a header; its tensors lie within the file and do not overlap."""
    with pausing_garbage_collection():
        stored = read_fields(source)
        tensors = list(_stored_tensors(source, stored))
    return SafetensorsHeader(tensors, stored.metadata)


def stored_shape(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """Return the format's shape for a tensor of torch, which counts packed numbers one by one.

    A packed dtype without dimensions has no shape in the format, which is a ValueError.

    >>> stored_shape(torch.float32, [3, 2]), stored_shape(torch.float4_e2m1fn_x2, [3, 2])
    ([3, 2], [3, 4])
    """
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return list(shape)
    if not shape:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"safetensors files hold no {name} without dimensions: reshape it to [1]")
    return [*shape[:-1], shape[-1] * n_packed]


def _shape_in_torch(dtype: torch.dtype, shape: Sequence[int]) -> torch.Size | None:
    """Return torch's shape for a tensor of the format, or None if torch has no such shape."""
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return torch.Size(shape)
    if not shape or shape[-1] % n_packed:
        return None
    return torch.Size([*shape[:-1], shape[-1] // n_packed])


@functools.cache
def _dtype_of(name: str) -> torch.dtype | None:
    """Return torch's dtype for a name of the format, or None if torch lacks it."""
    dtype: torch.dtype | None = getattr(torch, DTYPES.get(name, ""), None)
    return dtype


def _stored_tensors(source: RangeSource, stored: SafetensorsFields) -> Iterator[StoredTensor]:
    first, max_end = stored.nbytes, source.nbytes
    kinds: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype, int]] = {}  # many tensors are alike
    for name, entry in stored.tensors:
        key = (entry["dtype"], *entry["shape"])
        if key not in kinds:
            kinds[key] = _kind_of(source, name, entry)
        shape, dtype, nbytes = kinds[key]
        begin, end = entry["data_offsets"]
        begin, end = first + begin, first + end
        if end - begin != nbytes or not first <= begin <= end <= max_end:
            raise CorruptCheckpointError(
                f"{source.name}: the header puts tensor {name} where its bytes cannot be",
                path=source.name,
                offset=begin,
            )
        # StoredTensor(...) takes twice as long.
        yield tuple.__new__(StoredTensor, (name, shape, dtype, begin, nbytes))


def _kind_of(
    source: RangeSource, name: str, entry: Mapping[str, Any]
) -> tuple[torch.Size, torch.dtype, int]:
    dtype = _dtype_of(entry["dtype"])
    shape = None if dtype is None else _shape_in_torch(dtype, entry["shape"])
    if dtype is None or shape is None:
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} is of a type that torch has not: {entry['dtype']} of "
            f"shape {entry['shape']}",
            path=source.name,
        )
    return shape, dtype, prod(shape) * dtype.itemsize


# ----------------------------------------------------------------------------------- new files


@functools.cache
def safetensors_dtypes() -> dict[torch.dtype, str]:
    """Return the dtypes that the library writes, in its order, and its names for them."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError(
            "safetensors files are written with the help of: pip install safetensors"
        ) from None
    found = {name: getattr(torch, text, None) for name, text in DTYPES.items()}
    dtypes: dict[str, torch.dtype] = {name: dtype for name, dtype in found.items() if dtype}
    known = {name: dtype for name, dtype in dtypes.items() if _can_write(save, dtype)}
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype in known.items()})
    header = json.loads(data[8:])
    return {known[name]: fields["dtype"] for name, fields in header.items()}


def _can_write(save: Callable[[dict[str, Tensor]], bytes], dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # the library raises errors of many types
        return False
    return True


def names_in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the order in which a file stores them."""
    ranks = {dtype: rank for rank, dtype in enumerate(safetensors_dtypes())}
    return sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name.encode()))


def header_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[list[Tensor], bytes]:
    """Return tensors in the order of a file, and the header that the library writes for them."""
    dtypes = safetensors_dtypes()
    names = names_in_order(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        shape = stored_shape(tensor.dtype, tensor.shape)
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return [tensors[name] for name in names], len(text).to_bytes(LENGTH_NBYTES, "little") + text
