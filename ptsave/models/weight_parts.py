"""Computes which part of a tensor in a file fills which part of a tensor of the model.

A part of a packed parameter, or a DTensor's part on this rank, is a box in a larger tensor; the
overlap of both boxes is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave.support.torch_names import is_distributed_tensor, local_part_of

_ONE_ELEMENT = (torch.Size([]), torch.Size([1]))


@dataclass(eq=False, repr=False, slots=True)
class Part:
    """The elements of a stored tensor that are read, from element `begin` of the tensor on.

    If they are not contiguous in the file, `index` selects them instead.
    """

    shape: torch.Size
    begin: int = 0
    index: tuple[slice, ...] | None = None


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
        """Return the index of this box in a tensor that occupies the other box."""
        return tuple(
            slice(begin - origin, begin - origin + n)
            for begin, n, origin in zip(self.begins, self.shape, other.begins, strict=True)
        )


def target_of(tensor: Tensor, shape: torch.Size, place: tuple[int, int] | None) -> Tensor | None:
    """Return the memory that a stored tensor of `shape` fills; None if it has none on this rank.

    If the stored tensor is a part, it begins at `place`: a dimension of `tensor`, and an index in
    it. Only the local part of a DTensor is filled.
    """
    if not is_distributed_tensor(tensor):
        return tensor if place is None else _narrowed(tensor, shape, place)
    local, begins = local_part_of(tensor)
    here = _Box(begins, tuple(local.shape))
    overlap = here.overlap(_box_of(tensor, shape, place))
    return None if 0 in overlap.shape else local.detach()[overlap.within(here)]


def _narrowed(tensor: Tensor, shape: torch.Size, place: tuple[int, int]) -> Tensor:
    dim, begin = place
    return tensor.detach().narrow(dim, begin, shape[dim])


def part_of(
    tensor: Tensor, shape: torch.Size, place: tuple[int, int] | None, *, is_packed: bool
) -> Part:
    """Return the part of a stored tensor that fills its target; arguments as for `target_of`.

    With `is_packed`, the elements of the stored tensor are contiguous in the file.
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
    if len(shape) != tensor.dim():  # one element
        return _Box(tuple(begins), tuple(tensor.shape))
    return _Box(tuple(begins), tuple(shape))


def _begin_of_block(
    shape: Sequence[int], wanted: Sequence[int], index: Sequence[slice]
) -> int | None:
    """Return the first element of a box whose elements are contiguous; None for other boxes."""
    begin, stride, is_whole = 0, 1, True
    for n, m, each in zip(reversed(shape), reversed(wanted), reversed(index), strict=True):
        if not is_whole and m != 1:
            return None
        is_whole = is_whole and n == m
        begin += each.start * stride
        stride *= n
    return begin


@functools.lru_cache(1024)  # layers have the same shapes
def parts_along(
    target: torch.Size, shapes: tuple[torch.Size, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Return the dimension and index at which each of several tensors begins in `target`.

    End to end they fill the target. None if the shapes do not tell how.

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
    """Return whether a tensor of one shape fills one of another: equal shapes, or one element each.

    >>> fits(torch.Size([1]), torch.Size([])), fits(torch.Size([2]), torch.Size([1]))
    (True, False)
    """
    return target == source or (target in _ONE_ELEMENT and source in _ONE_ELEMENT)


def default_weight_loader(param: Tensor, loaded_weight: Any) -> None:
    """Fill a parameter with a tensor of its shape, as :func:`ptsave.load_model` does by itself.

    A custom ``weight_loader`` can call it with the part of the tensor that it has selected.

    Parameters
    ----------
    param : torch.Tensor
        The parameter.
    loaded_weight : torch.Tensor or WeightSlice
        The values, of any dtype and on any device.  One element has the shape ``()`` or ``(1,)``.

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
