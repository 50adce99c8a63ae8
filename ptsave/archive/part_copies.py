"""Copies tensors from parts of their storages' bytes, as the parts arrive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PART_ALIGNMENT = 64  # in bytes: a multiple of every element's size


def is_viewable(tensor: Tensor) -> bool:
    """Whether a tensor's values are only its bytes and its dtype; a quantized tensor's are not."""
    return not tensor.is_quantized and _can_view(tensor.dtype)


@functools.cache
def _can_view(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return False
    return PART_ALIGNMENT % dtype.itemsize == 0


@dataclass(frozen=True)
class StorageView:
    """The layout of a tensor in a storage, without the storage, counted in elements.

    `is_conj` and `is_neg` say that the values are the conjugates, or the negatives, of the stored
    ones.
    """

    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the view of a tensor that `is_viewable`."""
        offset = int(tensor.storage_offset())
        bits = (tensor.is_conj(), tensor.is_neg())
        return cls(tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), *bits)

    def copy_part(self, target: Tensor, part: Tensor, begin: int) -> None:
        """Copy the elements that lie in a part of the storage.

        `target` has the view's shape, and any strides, dtype and device.  `part` is uint8.  `begin`
        is the offset of `part` in the storage, in bytes: a multiple of `PART_ALIGNMENT`.

        >>> view, target = StorageView.of(torch.empty(100, 2).t()), torch.zeros(2, 100)
        >>> view.copy_part(target, torch.ones(16, dtype=torch.float32).view(torch.uint8), 64)
        >>> target.sum(1), target[0].nonzero().flatten()
        (tensor([8., 8.]), tensor([ 8,  9, 10, 11, 12, 13, 14, 15]))
        """
        if target.numel() == 0:
            return
        itemsize = self.dtype.itemsize
        elements = part[: len(part) // itemsize * itemsize].view(self.dtype)
        first = begin // itemsize
        self._copy(target.detach(), elements, self.offset - first, self.shape, self.stride)

    def _copy(
        self, target: Tensor, elements: Tensor, at: int, shape: Sequence[int], stride: Sequence[int]
    ) -> None:
        """Copy a box of the tensor whose first element has index `at` in the part, or before it.

        A box that lies only partly in the part is cut across its longest stride.
        """
        ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
        last = at + sum(ends)
        if last < 0 or at >= len(elements):
            return
        if at >= 0 and last < len(elements):
            where = elements.storage_offset() + at
            target.copy_(self._values(elements.as_strided(shape, stride, where)))
            return
        dim = max(range(len(shape)), key=lambda i: stride[i] if shape[i] > 1 else -1)
        step, extent = stride[dim], last - at - ends[dim]
        # The steps that overlap the part, and (`begin` to `end`) the steps that lie inside it.
        touched = range(_up(-at - extent, step), (len(elements) - 1 - at) // step + 1)
        touched = range(max(touched.start, 0), min(touched.stop, shape[dim]))
        begin = max(_up(-at, step), touched.start)
        end = min((len(elements) - 1 - at - extent) // step + 1, touched.stop)
        rest = [*shape[:dim], *shape[dim + 1 :]], [*stride[:dim], *stride[dim + 1 :]]
        for i in touched:
            if begin <= i < end:
                continue
            self._copy(target.select(dim, i), elements, at + i * step, *rest)
        if begin < end:
            box = [*shape[:dim], end - begin, *shape[dim + 1 :]]
            there = target.narrow(dim, begin, end - begin)
            self._copy(there, elements, at + begin * step, box, stride)

    def _values(self, stored: Tensor) -> Tensor:
        values = stored.conj() if self.is_conj else stored
        return values.neg() if self.is_neg else values


def _up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
