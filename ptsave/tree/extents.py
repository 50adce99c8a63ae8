"""Computes how many bytes tensors take: in full, in their storages, and as byte ranges.

A tensor can be far larger than its storage: one number, expanded to 2**36 elements, takes 1 KiB in
a .pt file, and 256 GiB in a safetensors file. In the same way, 1,000 views of one storage can
become 1,000 copies of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ptsave.support.calls import parse_size
from ptsave.support.torch_names import storage_id

Index: TypeAlias = int | slice | EllipsisType | None

_MIN_LIMIT_NBYTES = 1 << 30
_MAX_FACTOR = 8

# Advice in errors of operations that have no `max_size`.
ADVICE = "to do it anyway, first write the file in full with `ptsave convert --max-size`"


def nbytes_of(tensor: Tensor) -> int:
    """Return how many bytes a tensor's elements take when every element is written."""
    return math.prod(tensor.shape) * tensor.itemsize


def stored_nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; each storage counts once."""
    storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
    return sum(storages.values())


def default_limit(stored_nbytes: int) -> int:
    """Return how many bytes tensors may take in full if their storages take `stored_nbytes`."""
    return max(_MIN_LIMIT_NBYTES, _MAX_FACTOR * stored_nbytes)


def check_expansion(
    tensors: Iterable[Tensor],
    path: str,
    *,
    max_size: int | str | None = None,
    advice: str = "if you want this, pass --max-size (max_size=)",
) -> None:
    """Raise ValueError if tensors, each written in full, take much more than their storages.

    The limit is `max_size`, such as ``"300GB"``.  By default it is 8 times the bytes of the
    storages, and at least 1 GiB.  The check reads no values.
    """
    tensors = list(tensors)
    if max_size is None:
        limit = default_limit(stored_nbytes_of(tensors))
    else:
        limit = parse_size(max_size, "max_size")
    nbytes = sum(map(nbytes_of, tensors))
    if nbytes > limit:
        raise ValueError(
            f"{path}: its tensors take {nbytes:,} bytes when each is written in full, more than "
            f"{limit:,}, because they are expanded or share memory: {advice}"
        )


class Blocks(NamedTuple):
    """Byte ranges of equal size in a storage, and a tensor's stride after the ranges are joined."""

    begins: list[int]
    nbytes: int
    stride: tuple[int, ...]


def check_index(index: Any) -> None:
    """Raise TypeError if indexing a tensor with `index` would not return a view."""
    for part in index if isinstance(index, tuple) else (index,):
        is_number = isinstance(part, int) and not isinstance(part, bool)
        if not (part is None or part is ... or is_number or isinstance(part, slice)):
            raise TypeError(
                "an index may contain only integers, slices, ... and None, not "
                f"{type(part).__name__}: read the whole tensor, and index the result"
            )


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes that a tensor needs in its storage: begin and end."""
    if tensor.numel() == 0:
        return 0, 0
    begin = int(tensor.storage_offset())
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (last + 1) * tensor.itemsize


def blocks_of(tensor: Tensor, max_gap: int) -> Blocks:
    """Return the byte ranges that a tensor needs; a range may bridge gaps up to `max_gap` bytes."""
    itemsize = tensor.itemsize
    if tensor.numel() == 0:
        return Blocks([], 0, tensor.stride())
    nbytes = itemsize
    apart: list[int] = []  # dimensions that step from block to block
    strides = [s * itemsize for s in tensor.stride()]
    for dim in sorted(range(tensor.dim()), key=strides.__getitem__):
        n, stride = tensor.shape[dim], strides[dim]
        if n == 1 or stride == 0:
            continue
        if not apart and stride - nbytes <= max_gap:
            nbytes += (n - 1) * stride
        else:
            apart.append(dim)
    return _apart(tensor, strides, apart, nbytes)


def _apart(tensor: Tensor, strides: Sequence[int], apart: list[int], nbytes: int) -> Blocks:
    begin, end = span_of(tensor)
    if nbytes * math.prod(tensor.shape[dim] for dim in apart) >= end - begin:
        return Blocks([begin], end - begin, tensor.stride())  # the blocks overlap
    apart = apart[::-1]  # the largest stride first
    steps = [range(0, tensor.shape[dim] * strides[dim], strides[dim]) for dim in apart]
    begins = [begin + sum(step) for step in itertools.product(*steps)]
    packed = list(tensor.stride())
    n_below = 1
    for dim in reversed(apart):
        packed[dim] = n_below * nbytes // tensor.itemsize
        n_below *= tensor.shape[dim]
    return Blocks(begins, nbytes, tuple(packed))
