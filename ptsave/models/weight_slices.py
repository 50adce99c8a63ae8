"""`WeightSlice`: a tensor in a file, from which a ``weight_loader`` reads the part it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ptsave.archive.spans import unfilled_tensors
from ptsave.models.shards import Entry, Read
from ptsave.tree.extents import check_index


class _Reader(Protocol):
    def read(self, reads: Sequence[Read]) -> None: ...


class WeightSlice:
    """A tensor in a file; an index reads only the elements that it selects, into CPU memory.

    :func:`ptsave.load_model` passes it to a ``weight_loader`` that has the attribute
    ``takes_slices = True``.  The loader may use it until it returns.

    Attributes
    ----------
    shape : torch.Size
        Shape in elements.
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
        """Read nothing more: a later read raises ValueError."""
        self._reader = None

    def __repr__(self) -> str:
        return f"WeightSlice({self._entry.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __eq__(self, other: object) -> bool:
        """Raise TypeError: elements, which a tensor would compare, are still in the file."""
        raise TypeError("a WeightSlice is not compared: read it, weight[...], and compare that")

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
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Read a part of one dimension, as :meth:`torch.Tensor.narrow` selects it.

        Raises
        ------
        IndexError
            If there is no such part.
        """
        n = self.shape[dim] if -self.ndim <= dim < self.ndim else -1  # no such dimension
        start = start + n if start < 0 else start
        if not 0 <= start <= start + length <= n:
            raise IndexError(f"narrow({dim}, {start}, {length}) of {self!r}")
        before = (slice(None),) * (dim % self.ndim)
        return self[(*before, slice(start, start + length))]

    def __getitem__(self, index: Any) -> Tensor:
        """Read the part that numbers, slices, ``...`` and None select; others raise TypeError."""
        check_index(index)
        if self._reader is None:
            raise ValueError(f"{self!r} was read after its weight_loader had returned")
        (whole,) = unfilled_tensors([(self.dtype, self.shape)])
        shape = whole[index].shape
        target = torch.empty(shape, dtype=self.dtype, device="cpu")
        self._reader.read([Read(self._entry, target, index=index)])
        return target
