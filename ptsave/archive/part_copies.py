"""Copies tensors from parts of their storages' bytes, as these arrive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PART_ALIGNMENT", "StorageView", "is_viewable"]

PART_ALIGNMENT = 64  # in bytes: parts begin at multiples of every element's size


def is_viewable(tensor: Tensor) -> bool:
    """Whether a tensor's values are its bytes and its dtype: not so of a quantized one."""
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
    """Where the elements of a tensor lie in a storage, without the storage.

    Attributes
    ----------
    dtype : torch.dtype
        The elements'.
    offset : int
        Of the first element, in elements.
    shape, stride : sequence of int
        As the tensor's.
    is_conj, is_neg : bool
        Whether the tensor's values are the conjugates, or the negatives, of what is stored.
    """

    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the view that a tensor is, which `is_viewable`."""
        offset = int(tensor.storage_offset())
        bits = (tensor.is_conj(), tensor.is_neg())
        return cls(tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), *bits)

    def copy_part(self, target: Tensor, part: Tensor, begin: int) -> None:
        """Copy the elements that lie in a part of the storage.

        Parameters
        ----------
        target : torch.Tensor
            Of the view's shape; of any strides, dtype and device.
        part : torch.Tensor
            uint8: bytes of the storage.
        begin : int
            Offset of the part in the storage, in bytes: a multiple of `PART_ALIGNMENT`.

        Examples
        --------
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
        """Copy a box of the tensor whose first element is number `at` of the part's, or before.

        A box that lies in the part only in part is cut across its longest strides.
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
        # The steps that lie in the part at all, and those that do as a whole.
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
