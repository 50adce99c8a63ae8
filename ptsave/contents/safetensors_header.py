"""Reads the header of a safetensors file, which its library has judged sound, and makes one."""

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
from ptsave.support.garbage import pausing_garbage_collection

__all__ = [
    "SafetensorsHeader",
    "StoredTensor",
    "header_of",
    "names_in_order",
    "read_header",
    "safetensors_dtypes",
    "stored_shape",
]

_HEADER_ALIGNMENT = 8

# Of a dtype of torch that packs several numbers into an element: how many, which the format counts.
_N_PACKED = {torch.float4_e2m1fn_x2: 2}


class StoredTensor(NamedTuple):
    """A tensor of the file; a tuple, because there may be 100,000.

    Attributes
    ----------
    name : str
        Its name.
    shape : torch.Size
        Shape in elements.
    dtype : torch.dtype
        Dtype of its elements.
    offset : int
        Position of its first byte in the file.
    nbytes : int
        Size in bytes.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    nbytes: int


class SafetensorsHeader(NamedTuple):
    """The tensors and the metadata of a safetensors file.

    Attributes
    ----------
    tensors : list of StoredTensor
        In the order of their bytes.
    metadata : dict of str to str
        The writer's ``__metadata__``.
    """

    tensors: list[StoredTensor]
    metadata: dict[str, str]


def read_header(source: RangeSource) -> SafetensorsHeader:
    """Read a header.

    Parameters
    ----------
    source : RangeSource
        The file.  Only its header is read.

    Returns
    -------
    SafetensorsHeader
        All its tensors lie within the file, and none on another.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    CorruptCheckpointError
        If the library refuses the file, or torch has no such dtype.
    """
    with pausing_garbage_collection():
        stored = read_fields(source)
        tensors = list(_stored_tensors(source, stored))
    return SafetensorsHeader(tensors, stored.metadata)


def stored_shape(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """Return the shape that the format has for a tensor of torch's.

    Raises
    ------
    ValueError
        If it has none: numbers that are packed in pairs need a dimension to be pairs in.

    Examples
    --------
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
    """Return the shape that torch has for a tensor of the format; None if it has none."""
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return torch.Size(shape)
    if not shape or shape[-1] % n_packed:
        return None
    return torch.Size([*shape[:-1], shape[-1] // n_packed])


@functools.cache
def _dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype that the format has a name for; None if torch has not got it."""
    dtype: torch.dtype | None = getattr(torch, DTYPES.get(name, ""), None)
    return dtype


def _stored_tensors(source: RangeSource, stored: SafetensorsFields) -> Iterator[StoredTensor]:
    first, max_end = stored.nbytes, source.nbytes
    kinds: dict[tuple[Any, ...], tuple[torch.Size, torch.dtype, int]] = {}  # layers are alike
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
        # As StoredTensor(...), whose own code takes twice as long.
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


# ----------------------------------------------------------------------------------- made anew


@functools.cache
def safetensors_dtypes() -> dict[torch.dtype, str]:
    """Return the dtypes that the library writes, in its order, with its names for them."""
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
    except Exception:  # it says so in many ways
        return False
    return True


def names_in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the order of a file."""
    ranks = {dtype: rank for rank, dtype in enumerate(safetensors_dtypes())}
    return sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name.encode()))


def header_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[list[Tensor], bytes]:
    """Return tensors in the order of a file, and its header, as the library writes it.

    Raises
    ------
    ValueError
        If the format has not got the shape of one.
    """
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
