"""Plans reads of stored tensors: which bytes of a rank's file go to which memory.

`RankFiles` lets the engine execute a plan.  `FetchedFiles` first fetches the bytes from a URL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave.dcp.metadata import BLOCK_NBYTES
from ptsave.errors import CorruptCheckpointError

_PLAIN_TYPES = (Tensor, Parameter)
# The most bytes that are held in temporary memory before they are copied to targets.
_STAGED_NBYTES = 256 << 20
# The most runs (contiguous ranges of bytes) that are read at once, because each takes memory.
_MAX_RUNS = 1 << 18
# Columns are parts whose runs have at least the first size, with gaps above the second size.
_MIN_RUN_NBYTES = 4 << 10
MAX_GAP_OF_COLUMNS = 8 << 10


@dataclass(slots=True)
class Box:
    """A part of a stored tensor, and the memory to read this part into."""

    file: str
    name: str  # of the tensor or object, for errors
    offset: int  # of the part's first element in the file, in bytes
    strides: tuple[int, ...]  # in the file, in bytes
    target: Tensor  # CPU memory for the part
    crc: int | None = None  # of the target's elements in contiguous order, if known
    packed_nbytes: int = -1  # the size if contiguous in the file and in memory; otherwise -1

    @property
    def end(self) -> int:
        """Offset in the file directly after the part's last byte."""
        if self.packed_nbytes >= 0:
            return self.offset + self.packed_nbytes
        if self.target.numel() == 0:
            return self.offset
        steps = zip(self.target.shape, self.strides, strict=True)
        return self.offset + sum((n - 1) * step for n, step in steps) + self.target.itemsize

    @property
    def has_gaps(self) -> bool:
        """Whether the part has long runs with long gaps between them, as a range of columns has."""
        if len(self.strides) < 2 or self.packed_nbytes >= 0:
            return False
        run = self.target.itemsize
        for n, step in reversed(list(zip(self.target.shape, self.strides, strict=True))):
            if n == 1:
                continue
            if step != run:
                return run >= _MIN_RUN_NBYTES and step - run > MAX_GAP_OF_COLUMNS
            run *= n
        return False

    @property
    def n_runs(self) -> int:
        """Number of ranges of bytes that are contiguous both in the file and in memory."""
        if self.packed_nbytes >= 0:
            return 1
        n_runs, run = 1, self.target.itemsize
        steps = [*zip(self.target.shape, self.strides, self.target.stride(), strict=True)]
        for n, step, step_in_target in reversed(steps):
            if n_runs == 1 and step == step_in_target * self.target.itemsize == run:
                run *= n
            else:
                n_runs *= n
        return n_runs

    def pieces(self, max_nbytes: int) -> Iterator[Box]:
        """Split the part into pieces of at most `max_nbytes` bytes and `_MAX_RUNS` runs."""
        target = self.target
        n_pieces = max(-(-target.nbytes // max_nbytes), -(-self.n_runs // _MAX_RUNS))
        if n_pieces <= 1:
            yield self
            return
        dim = next(dim for dim, n in enumerate(target.shape) if n > 1)
        n, stride = target.shape[dim], self.strides[dim]
        step = max(n // n_pieces, 1)
        for begin in range(0, n, step):
            part = target.narrow(dim, begin, min(step, n - begin))
            box = Box(self.file, self.name, self.offset + begin * stride, self.strides, part)
            yield from box.pieces(max_nbytes)


def batches(boxes: Iterable[Box], max_nbytes: int = sys.maxsize) -> Iterator[list[Box]]:
    """Yield lists of boxes to read at once: at most `max_nbytes` bytes and `_MAX_RUNS` runs."""
    batch: list[Box] = []
    nbytes = n_runs = 0
    for box in boxes:
        is_packed = 0 <= box.packed_nbytes <= max_nbytes
        for piece in (box,) if is_packed else box.pieces(max_nbytes):
            more = box.packed_nbytes if is_packed else piece.target.nbytes
            runs = 1 if is_packed else piece.n_runs
            if batch and (nbytes + more > max_nbytes or n_runs + runs > _MAX_RUNS):
                yield batch
                batch, nbytes, n_runs = [], 0, 0
            batch.append(piece)
            nbytes += more
            n_runs += runs
    if batch:
        yield batch


# A box, the tensor that finally gets its values (None: the box's own target), and a key.
_Line: TypeAlias = tuple[Box, Tensor | None, Any]


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file, and its layout there."""

    file: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]  # in bytes
    offset: int  # of the first element in the file, in bytes
    crc: int | None = None  # of all bytes, if they are contiguous

    @classmethod
    def of(
        cls, tensor: Tensor, file: str, name: str, offset: int, crc: int | None = None
    ) -> StoredTensor:
        """Return the place of a tensor whose storage begins at `offset` in the file."""
        strides = tuple(step * tensor.itemsize for step in tensor.stride())
        begin = offset + int(tensor.storage_offset()) * tensor.itemsize
        return cls(file, name, tensor.dtype, tensor.shape, strides, begin, crc)

    @property
    def nbytes(self) -> int:
        """The size of the tensor's elements, in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset in the file directly after the tensor's last byte, if the tensor is packed."""
        return self.offset + self.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether the tensor's elements lie in contiguous order, without gaps."""
        packed = packed_strides(self.shape, self.dtype.itemsize)
        pairs = zip(self.shape, self.strides, packed, strict=True)
        return all(n == 1 or stride == wanted for n, stride, wanted in pairs)

    @property
    def whole_blocks(self) -> int:
        """Number of blocks that the tensor fills completely; 0 if it begins inside a block."""
        return 0 if self.offset % BLOCK_NBYTES else self.nbytes // BLOCK_NBYTES

    def box(self, begins: Sequence[int], target: Tensor, steps: Sequence[int] = ()) -> Box:
        """Return a box to read the part at index `begins` into `target`; raise if it does not fit.

        In each dimension, `steps` has the distance between neighboring elements (default: 1).
        """
        shape, steps = target.shape, steps or (1,) * target.dim()
        fits = len(begins) == len(shape) == len(self.shape) and all(
            0 <= begin <= begin + (n and (n - 1) * step + 1) <= size
            for begin, n, step, size in zip(begins, shape, steps, self.shape, strict=True)
        )
        if not fits:
            raise CorruptCheckpointError(
                f"{self.file}: {self.name} is stored with shape {list(self.shape)}, which has no "
                f"part of shape {list(shape)} at index {list(begins)}",
                path=self.file,
                entries=[self.name],
            )
        begin = sum(b * stride for b, stride in zip(begins, self.strides, strict=True))
        strides = tuple(a * b for a, b in zip(self.strides, steps, strict=True))
        crc = self.crc if shape == self.shape else None
        return Box(self.file, self.name, self.offset + begin, strides, target, crc)


@lru_cache(maxsize=1024)
def packed_strides(shape: torch.Size, itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in bytes."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def is_strided(tensor: Any) -> bool:
    """Return whether a tensor is plain and strided, not quantized, and has no conj or neg bit."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout == torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    """Return whether values of `dtype` can be read from a file directly into `target`."""
    return (
        is_strided(target)
        and target.is_cpu
        and target.dtype == dtype
        and (target.is_contiguous() or target.dim() == 0 or target.stride(-1) == 1)
    )


class ReadPlan:
    """Collects parts of stored tensors and their targets, and then reads all of them together.

    The argument `read` fills boxes, as `RankFiles.read` does.  If `takes_bytes` is true for a
    target, bytes are read directly into it.  For other targets, about `max_staged` bytes at a time
    are read into temporary memory and copied.  `done` gets each part's key and filled target.
    """

    def __init__(
        self,
        read: Callable[[Sequence[Box]], object],
        done: Callable[[Any, Tensor], object] | None = None,
        *,
        max_staged: int = _STAGED_NBYTES,
    ) -> None:
        self._read = read
        self._done = done
        self._max_staged = max_staged
        self._direct: list[_Line] = []
        self._staged: list[tuple[_Line, torch.dtype]] = []

    def add(
        self,
        stored: StoredTensor,
        begins: Sequence[int],
        target: Tensor | None,
        key: Any = None,
        *,
        steps: Sequence[int] = (),
    ) -> None:
        """Add the part of a tensor that begins at the index `begins` and has the target's shape.

        Without a target, the whole tensor is read into new memory, which `done` gets.
        """
        if target is None:
            shape = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self._staged.append(((stored.box(begins, shape), None, key), stored.dtype))
            return
        line = stored.box(begins, target, steps), target, key
        if takes_bytes(target, stored.dtype):
            self._direct.append(line)
        else:
            self._staged.append((line, stored.dtype))

    def add_boxes(self, boxes: Iterable[Box], targets: Iterable[Tensor], keys: list[Any]) -> None:
        """Add boxes with targets for which `takes_bytes` is true."""
        self._direct += zip(boxes, targets, keys, strict=True)

    def read(self) -> None:
        """Read the parts that were added."""
        lines, self._direct = self._direct, []
        staged, self._staged = self._staged[::-1], []
        while lines or staged:
            nbytes = 0
            while staged and nbytes < self._max_staged:
                line, dtype = staged.pop()
                line[0].target = torch.empty(line[0].target.shape, dtype=dtype)
                nbytes += line[0].target.nbytes
                lines.append(line)
            self._read([box for box, _, _ in lines])
            lines.reverse()
            while lines:  # frees each line's memory when the line is done
                box, target, key = lines.pop()
                if target is None:
                    target = box.target
                elif target is not box.target:
                    target.copy_(box.target)
                if self._done is not None:
                    self._done(key, target)
