"""Finds the part of a stored tensor that fills a tensor of the model; defines `WeightSlice`.

A stored tensor fills a box (one range per dimension) of the model's tensor. The local part of a
DTensor is another box. Only the elements in both boxes are read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ptsave.archive.spans import unfilled_tensors
from ptsave.models.shards import Entry, Read
from ptsave.support.torch_names import is_distributed_tensor, local_part_of
from ptsave.tree.extents import check_index

_ONE_ELEMENT = (torch.Size([]), torch.Size([1]))


@dataclass(eq=False, repr=False, slots=True)
class Part:
    """Which elements of a stored tensor to read: from number `begin` on, or those at `index`."""

    shape: torch.Size
    begin: int = 0
    index: tuple[slice, ...] | None = None  # only if the elements are not contiguous in the file


class _Box(NamedTuple):
    begins: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: _Box) -> _Box:
        begins = tuple(map(max, self.begins, other.begins))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.begins, self.shape, other.begins, other.shape, strict=True)
        )
        return _Box(begins, tuple(max(0, e - b) for b, e in zip(begins, ends, strict=True)))

    def within(self, other: _Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that has the elements of the box `other`."""
        return tuple(
            slice(begin - origin, begin - origin + n)
            for begin, n, origin in zip(self.begins, self.shape, other.begins, strict=True)
        )


def target_of(tensor: Tensor, shape: torch.Size, place: tuple[int, int] | None) -> Tensor | None:
    """Return the part of `tensor` that a stored tensor fills on this rank; None if it is empty.

    `shape` is the stored tensor's shape. If it fills only a part of `tensor`, `place` is the
    dimension and the index at which this part begins. Of a DTensor, the local part is filled.
    """
    if not is_distributed_tensor(tensor):
        if place is None:
            return tensor
        dim, begin = place
        return tensor.detach().narrow(dim, begin, shape[dim])
    local, begins = local_part_of(tensor)
    here = _Box(begins, tuple(local.shape))
    overlap = here.overlap(_box_of(tensor, shape, place))
    return None if 0 in overlap.shape else local.detach()[overlap.within(here)]


def part_of(
    tensor: Tensor, shape: torch.Size, place: tuple[int, int] | None, *, is_packed: bool
) -> Part:
    """Return the elements of a stored tensor that fill the tensor returned by `target_of`.

    `is_packed` means that the stored tensor's elements are contiguous in its file.
    """
    if not is_distributed_tensor(tensor) or tensor.dim() != len(shape):
        return Part(shape)
    local, begins = local_part_of(tensor)
    stored = _box_of(tensor, shape, place)
    overlap = stored.overlap(_Box(begins, tuple(local.shape)))
    index = overlap.within(stored)
    begin = _begin_of_block(shape, overlap.shape, index) if is_packed else None
    if begin is None:
        return Part(torch.Size(overlap.shape), 0, index)
    return Part(torch.Size(overlap.shape), begin)


def _box_of(tensor: Tensor, shape: Sequence[int], place: tuple[int, int] | None) -> _Box:
    begins = [0] * tensor.dim()
    if place is not None:
        begins[place[0]] = place[1]
    is_one_element = len(shape) != tensor.dim()
    return _Box(tuple(begins), tuple(tensor.shape if is_one_element else shape))


def _begin_of_block(
    shape: Sequence[int], wanted: Sequence[int], index: Sequence[slice]
) -> int | None:
    """Return the first element's number, or None if there are gaps between the elements."""
    begin, stride, is_whole = 0, 1, True
    for n, m, each in zip(reversed(shape), reversed(wanted), reversed(index), strict=True):
        if not is_whole and m != 1:
            return None
        is_whole = is_whole and n == m
        begin += each.start * stride
        stride *= n
    return begin


@functools.lru_cache(1024)  # many layers have the same shapes
def parts_along(
    target: torch.Size, shapes: tuple[torch.Size, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Return the dimension and index at which each of several tensors begins in `target`.

    The tensors fill `target` one after another, along one dimension. Returns None if there is no
    dimension along which they fit.

    >>> parts_along(torch.Size([6, 4]), (torch.Size([4, 4]), torch.Size([2, 4])))
    ((0, 0), (0, 4))
    """
    for dim in range(len(target)):
        others = [[*shape[:dim], *shape[dim + 1 :]] for shape in shapes if len(shape) > dim]
        if others != [[*target[:dim], *target[dim + 1 :]]] * len(shapes):
            continue
        lengths = [shape[dim] for shape in shapes]
        if sum(lengths) == target[dim]:
            return tuple((dim, sum(lengths[:number])) for number in range(len(lengths)))
    return None


def fits(target: torch.Size, source: torch.Size) -> bool:
    """Return whether the shapes are equal, where () and (1,) count as equal."""
    return target == source or (target in _ONE_ELEMENT and source in _ONE_ELEMENT)


def default_weight_loader(param: Tensor, loaded_weight: Any) -> None:
    """Fill a parameter with a tensor of the same shape.

    For parameters without a ``weight_loader``, :func:`ptsave.load_model` does the same.  Your own
    ``weight_loader`` can select a part of a tensor, and call this function with that part.

    Parameters
    ----------
    param : torch.Tensor
        The parameter.
    loaded_weight : torch.Tensor or WeightSlice
        The values, of any dtype and on any device.  The shapes ``()`` and ``(1,)`` count as equal.

    Raises
    ------
    RuntimeError
        If the shapes differ.

    Examples
    --------
    >>> import torch, ptsave
    >>> bias = torch.nn.Parameter(torch.zeros(2))
    >>> ptsave.default_weight_loader(bias, torch.arange(4.0)[2:])
    >>> bias.tolist()
    [2.0, 3.0]
    """
    if not fits(param.shape, loaded_weight.shape):
        raise RuntimeError(
            f"size mismatch: a weight of shape {loaded_weight.shape} does not fit a parameter of "
            f"shape {param.shape}"
        )
    with torch.no_grad():
        param.copy_(loaded_weight[...].reshape(param.shape))


class _Reader(Protocol):
    def read(self, reads: Sequence[Read]) -> None: ...


class WeightSlice:
    """A tensor in a file; indexing it reads only the selected elements, into CPU memory.

    :func:`ptsave.load_model` passes this object to each ``weight_loader`` that has the attribute
    ``takes_slices = True``.  After the loader has returned, the object cannot be read any more.

    Attributes
    ----------
    shape : torch.Size
        The tensor's shape.
    dtype : torch.dtype
        Dtype of its elements.
    ndim : int
        The number of dimensions.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> rank, n_ranks = 1, 2
    >>> def load_rows(parameter, weight):
    ...     n_rows = weight.shape[0] // n_ranks
    ...     parameter.copy_(weight[rank * n_rows : (rank + 1) * n_rows])
    >>> load_rows.takes_slices = True
    >>> half = torch.nn.Linear(2, 2, bias=False)
    >>> half.weight.weight_loader = load_rows
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     ptsave.save({"weight": torch.arange(8.0).reshape(4, 2)}, path)
    ...     ptsave.load_model(half, path)
    <All weights loaded>
    >>> half.weight.tolist()
    [[4.0, 5.0], [6.0, 7.0]]
    """

    def __init__(self, entry: Entry, reader: _Reader) -> None:
        self.shape = entry.shape
        self.dtype = entry.dtype
        self.ndim = len(entry.shape)
        self._entry = entry
        self._reader: _Reader | None = reader

    def close(self) -> None:
        """Make every later read raise ValueError."""
        self._reader = None

    def __repr__(self) -> str:
        return f"WeightSlice({self._entry.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __eq__(self, other: object) -> bool:
        """Raise TypeError, because the elements are in the file and cannot be compared."""
        raise TypeError("a WeightSlice cannot be compared: compare the tensor weight[...]")

    __hash__ = object.__hash__

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or the size of one dimension, as :meth:`torch.Tensor.size` does."""
        return self.shape if dim is None else self.shape[dim]

    def get_shape(self) -> list[int]:
        """Return the shape as a list, like ``get_shape`` of a slice of safetensors."""
        return list(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Read the elements that :meth:`torch.Tensor.narrow` would select with these arguments.

        Raises
        ------
        IndexError
            If the dimension does not exist, or has too few elements.
        """
        n = self.shape[dim] if -self.ndim <= dim < self.ndim else -1  # no such dimension
        start = start + n if start < 0 else start
        if not 0 <= start <= start + length <= n:
            raise IndexError(f"narrow({dim}, {start}, {length}) is outside of {self!r}")
        before = (slice(None),) * (dim % self.ndim)
        return self[(*before, slice(start, start + length))]

    def __getitem__(self, index: Any) -> Tensor:
        """Read the elements at `index`, made of integers, slices, ``...`` and None."""
        check_index(index)
        if self._reader is None:
            raise ValueError(f"{self!r} was read after its weight_loader had returned")
        (whole,) = unfilled_tensors([(self.dtype, self.shape)])
        shape = whole[index].shape
        target = torch.empty(shape, dtype=self.dtype, device="cpu")
        self._reader.read([Read(self._entry, target, index=index)])
        return target
