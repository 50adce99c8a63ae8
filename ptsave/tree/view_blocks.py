"""Computes the blocks of a storage that a view needs, from its offset, shape and strides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Index: TypeAlias = int | slice | EllipsisType | None


class Blocks(NamedTuple):
    """Blocks of a storage, all of one size, and the view over them when they are packed together.

    `begins` and `nbytes` are in bytes; `stride`, of the view over the packed blocks, is in
    elements.
    """

    begins: list[int]
    nbytes: int
    stride: tuple[int, ...]


def check_index(index: Any) -> None:
    """Raise TypeError for an index that does not make a view."""
    for part in index if isinstance(index, tuple) else (index,):
        is_number = isinstance(part, int) and not isinstance(part, bool)
        if not (part is None or part is ... or is_number or isinstance(part, slice)):
            raise TypeError(
                "a slice is made of numbers, slices, ... and None, not "
                f"{type(part).__name__}: read the tensor and index that"
            )


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes that a tensor needs in its storage: begin and end."""
    if tensor.numel() == 0:
        return 0, 0
    begin = int(tensor.storage_offset())
    last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (last + 1) * tensor.itemsize


def blocks_of(tensor: Tensor, max_gap: int) -> Blocks:
    """Return the blocks of its storage that a strided view needs; no values are looked at.

    `max_gap` is the largest gap, in bytes, that a block may span.
    """
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
        return Blocks([begin], end - begin, tensor.stride())  # they overlap
    apart = apart[::-1]  # the largest stride first
    steps = [range(0, tensor.shape[dim] * strides[dim], strides[dim]) for dim in apart]
    begins = [begin + sum(step) for step in itertools.product(*steps)]
    packed = list(tensor.stride())
    n_below = 1
    for dim in reversed(apart):
        packed[dim] = n_below * nbytes // tensor.itemsize
        n_below *= tensor.shape[dim]
    return Blocks(begins, nbytes, tuple(packed))
