"""Reads and compares the values of two checkpoints' tensors, in pieces of bounded size.

The C++ engine computes differences of integers exactly, and all other differences in float64.  So
it counts the same elements as different that ``torch.testing.assert_close`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.archive.spans import Allocator, RecycledMemory, view_as
from ptsave.contents.contents import Contents, ShardedContents, UnreadContents, as_saved
from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.support import config
from ptsave.support.calls import ProgressCallback
from ptsave.support.threads import ThreadPool
from ptsave.support.torch_names import n_values_of_sparse
from ptsave.tree.containers import dotted
from ptsave.tree.extents import ADVICE, default_limit, stored_nbytes_of
from ptsave.tree.tree import EntryNames

# The most bytes of a piece in one checkpoint.  While a piece is compared, the next ones are read.
_PIECE_NBYTES = 16 << 20
_N_PIECES = 3
_SMALL_NUMEL = 1 << 12
_MAX_IDLE_NBYTES = 64 << 20  # kept for reuse: new pages take longer than comparing
_WORD_NBYTES = 8  # no dtype in _PLAIN_BITS has larger elements
_PLAIN_BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.int64: torch.int64,
    torch.float64: torch.int64,
    torch.int32: torch.int32,
}


@dataclass(frozen=True, eq=False)
class TensorPair:
    """Two tensors with the same name whose values can be compared."""

    name: str
    a: Tensor
    b: Tensor


class ComparedCheckpoint:
    """One side of a comparison: an open checkpoint, which several threads may use at once.

    If `is_flat` is true, the checkpoint can hold only a dict of tensors.  `allocate` gives memory
    that is reused after the values in it were compared.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.path = contents.path
        self.obj = contents.obj
        is_set = isinstance(contents, ShardedContents) and contents.is_flat
        self.is_flat = is_set or isinstance(contents, SafetensorsContents)
        self.allocate: Allocator = RecycledMemory(_MAX_IDLE_NBYTES).storage

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Read all values of the tensors."""
        return self._contents.read(tensors, None, self.allocate)

    def packs(self, tensors: list[Tensor]) -> UnreadContents | None:
        """Return the open file if it can read all `tensors` into one row of bytes, or None."""
        found = self._contents.by_part(tensors)
        contents = found[0][0] if len(found) == 1 else None
        if not isinstance(contents, UnreadContents) or not contents.can_read_packed(tensors):
            return None
        return contents

    def read_slice(self, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
        """Read the values at `index` of a tensor."""
        return self._contents.read_slice(tensor, index, None, allocate=self.allocate)

    def places_of(self, tensors: list[Tensor]) -> list[object]:
        """Return, for each tensor, a key that only tensors with the same storage share."""
        return [place[0] for place in self._contents.places_of(tensors)]


@dataclass(frozen=True)
class _Piece:
    """What is read at once: pairs of complete tensors, or the part `index` of one pair."""

    pairs: list[TensorPair]  # one pair if `index` is set
    index: tuple[slice, ...] | None = None
    times: int = 1  # how often expansion of both tensors repeats the part
    is_last: bool = True  # whether the piece is the last one of its tensors

    @property
    def begin(self) -> list[int]:
        """The index of the piece's first element in its tensors."""
        return [] if self.index is None else [int(part.start) for part in self.index]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the piece in checkpoint a."""
        if self.index is None:
            return sum(int(pair.a.numel() * pair.a.itemsize) for pair in self.pairs)
        numel = prod(int(part.stop - part.start) for part in self.index)
        return numel * self.times * self.pairs[0].a.itemsize


def are_empty(pair: TensorPair) -> bool:
    """Whether two tensors have no numbers that could differ."""
    a, b = pair.a, pair.b
    return a.numel() == 0 and a.dtype == b.dtype and a.layout == b.layout == torch.strided


class _Summable(Protocol):
    def __add__(self: _Difference, other: _Difference, /) -> _Difference: ...
    def times(self: _Difference, n: int, /) -> _Difference: ...


_Difference = TypeVar("_Difference", bound=_Summable)
_Found_co = TypeVar("_Found_co", bound=_Summable, covariant=True)


class Measure(Protocol[_Found_co]):
    """Finds the difference of two tensors, or of parts of them."""

    def same(self, pair: TensorPair) -> _Found_co | None:
        """Return the result for a pair with equal bytes; None if `difference` must find it."""

    def difference(self, pair: TensorPair, a: Tensor, b: Tensor, begin: Sequence[int]) -> _Found_co:
        """Return the difference of the pair's parts `a` and `b`, which begin at index `begin`."""


def compare_tensors(
    a: ComparedCheckpoint,
    b: ComparedCheckpoint,
    pairs: Iterable[TensorPair],
    measure: Measure[_Difference],
    progress: ProgressCallback | None,
) -> Iterator[tuple[TensorPair, _Difference]]:
    """Yield each pair with its difference; the two tensors must have the same shape and layout.

    `progress` is called with the number of bytes of `a` that were compared so far.
    """
    total: _Difference | None = None
    n_done = 0
    with ThreadPool(2) as readers:
        for piece, values in _read_ahead(_pieces(pairs), a, b, readers, measure):
            for pair, read in zip(piece.pairs, values, strict=True):
                if read is None:
                    same = measure.same(pair)
                    assert same is not None
                    yield pair, same
                    continue
                found = measure.difference(pair, *read, piece.begin)
                if piece.index is None:
                    yield pair, found
                    continue
                found = found.times(piece.times)
                total = found if total is None else total + found
                if piece.is_last:
                    yield pair, total
                    total = None
            n_done += piece.nbytes
            if progress is not None:
                progress(n_done)


class _Packing:
    """The small tensors of a piece; both sides read them into rows of bytes, at equal offsets.

    `numbers` are their positions in the piece; there are none if a side cannot read rows.
    """

    def __init__(self, piece: _Piece, a: ComparedCheckpoint, b: ComparedCheckpoint) -> None:
        pairs = piece.pairs
        numbers = [i for i, pair in enumerate(pairs) if _is_small_and_whole(pair)]
        sides = [(a, [pairs[i].a for i in numbers]), (b, [pairs[i].b for i in numbers])]
        self._sides = {id(source): (source.packs(few), few) for source, few in sides}
        can_pack = piece.index is None and all(found for found, _ in self._sides.values())
        self.numbers = numbers if can_pack else []
        sizes = (-(-pairs[i].a.nbytes // _WORD_NBYTES) * _WORD_NBYTES for i in self.numbers)
        *self.begins, self.nbytes = accumulate(sizes, initial=0)

    def read(self, source: ComparedCheckpoint) -> Tensor | None:
        """Return the row of bytes of one side, or None if `numbers` is empty."""
        contents, tensors = self._sides[id(source)]
        if not self.numbers or contents is None:
            return None
        return contents.read_packed(tensors, self.begins, self.nbytes, source.allocate)

    def differing(self, x: Tensor, y: Tensor) -> set[int]:
        """Return the positions in the piece of the tensors whose bytes in `x` and `y` differ."""
        x, y = x.view(torch.int64), y.view(torch.int64)
        if torch.equal(x, y):
            return set()
        places = (x != y).nonzero().flatten() * _WORD_NBYTES
        found = torch.searchsorted(torch.tensor(self.begins), places, right=True) - 1
        return {self.numbers[i] for i in found.unique().tolist()}


@dataclass(frozen=True)
class _Side:
    """Values of one side of a piece: the row of its packed tensors, and the other tensors."""

    row: Tensor | None
    others: list[Tensor]


_Values = Iterator[tuple[Tensor, Tensor] | None]


def _read_ahead(
    pieces: Iterator[_Piece],
    a: ComparedCheckpoint,
    b: ComparedCheckpoint,
    readers: ThreadPool,
    measure: Measure[_Difference],
) -> Iterator[tuple[_Piece, _Values]]:
    """Yield pieces with their values, while the next pieces are being read."""
    queue: deque[tuple[_Piece, _Packing, Future[_Side], Future[_Side]]] = deque()

    def read_next() -> None:
        for piece in pieces:
            packing = _Packing(piece, a, b)
            of_a = readers.submit(_read, a, [pair.a for pair in piece.pairs], piece.index, packing)
            of_b = readers.submit(_read, b, [pair.b for pair in piece.pairs], piece.index, packing)
            queue.append((piece, packing, of_a, of_b))
            return

    try:
        for _ in range(_N_PIECES):
            read_next()
        while queue:
            piece, packing, of_a, of_b = queue.popleft()
            yield piece, _values(piece, packing, of_a.result(), of_b.result(), measure)
            read_next()
    finally:
        for _, _, *futures in queue:
            for future in futures:
                future.cancel()


def _read(
    source: ComparedCheckpoint,
    tensors: list[Tensor],
    index: tuple[slice, ...] | None,
    packing: _Packing,
) -> _Side:
    if index is not None:
        return _Side(None, [source.read_slice(tensors[0], index)])
    packed = set(packing.numbers)
    others = [tensor for i, tensor in enumerate(tensors) if i not in packed]
    return _Side(packing.read(source), source.read(others))


def _values(
    piece: _Piece, packing: _Packing, a: _Side, b: _Side, measure: Measure[_Difference]
) -> _Values:
    """Yield the two tensors of each pair, or None if equal bytes already give the result."""
    others = zip(a.others, b.others, strict=True)
    if a.row is None or b.row is None:
        yield from others
        return
    differing = packing.differing(a.row, b.row)
    begins = dict(zip(packing.numbers, packing.begins, strict=True))
    for i, pair in enumerate(piece.pairs):
        if i not in begins:
            yield next(others)
        elif i in differing or measure.same(pair) is None:
            yield _unpacked(a.row, begins[i], pair.a), _unpacked(b.row, begins[i], pair.b)
        else:
            yield None


def _unpacked(row: Tensor, begin: int, like: Tensor) -> Tensor:
    offset = begin // like.itemsize
    return as_saved(like, view_as(row.untyped_storage(), like, offset, like.stride()))


# ------------------------------------------------------------------------------------------ pieces


def _pieces(pairs: Iterable[TensorPair]) -> Iterator[_Piece]:
    batch: list[TensorPair] = []
    nbytes = 0
    for pair in pairs:
        size = max(_nbytes_read(pair.a), _nbytes_read(pair.b))
        if batch and nbytes + size > _PIECE_NBYTES:
            yield _Piece(batch)
            batch, nbytes = [], 0
        if size <= _PIECE_NBYTES or not (_is_strided(pair.a) and _is_strided(pair.b)):
            batch.append(pair)
            nbytes += size
        else:
            if batch:  # so that results are in the order of the pairs
                yield _Piece(batch)
                batch, nbytes = [], 0
            yield from _parts(pair)
    if batch:
        yield _Piece(batch)


def _is_small_and_whole(pair: TensorPair) -> bool:
    """Whether both tensors are small, have the same plain dtype, and fill their storages."""
    a, b = pair.a, pair.b
    if a.dtype != b.dtype or a.dtype not in _PLAIN_BITS or not 0 < a.numel() <= _SMALL_NUMEL:
        return False
    return _is_whole(a) and _is_whole(b)


def _is_whole(tensor: Tensor) -> bool:
    if tensor.is_meta or type(tensor) not in (Tensor, Parameter) or not _is_strided(tensor):
        return False
    if tensor.is_neg() or not tensor.is_contiguous():
        return False
    return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _nbytes_read(tensor: Tensor) -> int:
    """Return how many bytes of memory the reading of a tensor takes at most.

    The complete storage may be read, with the bytes between its tensors.  A copy of an expanded
    tensor is larger than the storage.
    """
    nbytes = int(tensor.numel() * tensor.itemsize)
    if not _is_strided(tensor) or tensor.is_meta:  # meta: from a safetensors file, and dense
        return nbytes
    return max(nbytes, tensor.untyped_storage().nbytes())


def _parts(pair: TensorPair) -> Iterator[_Piece]:
    """Cut a pair along the dimensions with the largest strides, so that parts are contiguous."""
    strides = pair.a.stride(), pair.b.stride()
    repeated = [x == 0 == y for x, y in zip(*strides, strict=True)]
    shape = [1 if same else n for n, same in zip(pair.a.shape, repeated, strict=True)]
    times = pair.a.numel() // max(1, prod(shape))
    itemsize = max(pair.a.itemsize, pair.b.itemsize)
    nbytes = prod(shape) * itemsize
    if nbytes > default_limit(stored_nbytes_of([pair.a, pair.b])):
        raise ValueError(
            f"{pair.name} is too large to compare: its elements share memory in the file, but to "
            f"compare them takes {nbytes:,} bytes for each of the two files; {ADVICE}"
        )
    dims = sorted(range(len(shape)), key=strides[0].__getitem__, reverse=True)
    previous: tuple[slice, ...] | None = None
    for index in _boxes(shape, dims, max(1, _PIECE_NBYTES // itemsize)):
        if previous is not None:
            yield _Piece([pair], previous, times, is_last=False)
        previous = index
    yield _Piece([pair], previous, times)


def _boxes(shape: list[int], dims: list[int], max_numel: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of parts with at most `max_numel` elements, cut along `dims` in order."""
    box = [slice(0, n) for n in shape]
    if not dims:
        yield tuple(box)
        return
    dim, *inner = dims
    inner_numel = prod(shape[d] for d in inner)
    step = max(1, max_numel // max(1, inner_numel))
    for begin in range(0, shape[dim], step):
        end = min(begin + step, shape[dim])
        if inner_numel <= max_numel:
            box[dim] = slice(begin, end)
            yield tuple(box)
            continue
        for part in _boxes([1 if d == dim else n for d, n in enumerate(shape)], inner, max_numel):
            yield (*part[:dim], slice(begin, end), *part[dim + 1 :])


# ------------------------------------------------------------------------------------------ values


def quantizer_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the parameters that turn the integers of a quantized tensor into numbers."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return tensor.qscheme(), tuple(scales.tolist()), tuple(zero_points.tolist()), axis


def threads_of_measure() -> int:
    """Return how many threads compare numbers: half of the threads; the others read."""
    return max(1, config.current().n_threads // 2)


class NumberMeasure:
    """Finds the `NumberDifference` of two tensors."""

    def __init__(self, tolerance: Tolerance | None) -> None:
        self._tolerance = tolerance
        self._n_threads = threads_of_measure()

    def same(self, pair: TensorPair) -> NumberDifference:
        return NumberDifference(pair.a.numel())

    def difference(
        self, pair: TensorPair, a: Tensor, b: Tensor, begin: Sequence[int]
    ) -> NumberDifference:
        try:
            if _are_small_and_same(a, b):
                return NumberDifference(a.numel())
            same_integers = a.is_quantized and torch.equal(a.int_repr(), b.int_repr())
            if same_integers and quantizer_of(a) == quantizer_of(b):
                return NumberDifference(a.numel())
            x, y, _ = rows_in_order(*dense_values(a, b))
            if x.dtype == y.dtype and _same_bytes(x, y):
                return NumberDifference(x.numel())
            return number_difference(x, y, self._tolerance, self._n_threads)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise cannot_compare(pair, a, b, error) from error


def cannot_compare(pair: TensorPair, a: Tensor, b: Tensor, error: Exception) -> TypeError:
    """Return the error for values that torch cannot compare."""
    return TypeError(
        f"{pair.name}: values of {type(a).__name__} of {a.dtype} and {type(b).__name__} of "
        f"{b.dtype} cannot be compared ({error})"
    )


def dense_values(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return strided tensors of numbers; for sparse tensors, see `_of_same_pattern`."""
    a, b = a.detach(), b.detach()
    if a.layout != torch.strided:
        return _of_same_pattern(a, b)
    return (a.dequantize(), b.dequantize()) if a.is_quantized else (a, b)


def _are_small_and_same(a: Tensor, b: Tensor) -> bool:
    """Whether both are small plain tensors with the same bits.

    This function makes few calls, because a call takes longer than comparing a small tensor.
    """
    if a.numel() > _SMALL_NUMEL or a.dtype != b.dtype or a.dtype not in _PLAIN_BITS:
        return False
    if a.layout != torch.strided or a.is_neg() or b.is_neg():
        return False
    bits = _PLAIN_BITS[a.dtype]
    return torch.equal(a.view(bits), b.view(bits))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two rows have the same bytes; compares words of 8 bytes where it can."""
    nbytes = a.nbytes
    words = nbytes // 8 * 8
    x, y = a.view(torch.uint8), b.view(torch.uint8)
    aligned = x.storage_offset() % 8 == y.storage_offset() % 8 == 0
    if not aligned or words == 0:
        return torch.equal(x, y)
    if not torch.equal(x[:words].view(torch.int64), y[:words].view(torch.int64)):
        return False
    return torch.equal(x[words:], y[words:])


def _of_same_pattern(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of two sparse tensors at all indices at which `a` or `b` has one."""
    a, b = (x.to_sparse_coo().coalesce() for x in (a, b))
    if a.sparse_dim() != b.sparse_dim():
        return a.to_dense(), b.to_dense()
    both = torch.cat([a.indices(), b.indices()], dim=1)
    if both.numel() == 0:
        return a.values(), b.values()
    places, numbers = torch.unique(both, dim=1, return_inverse=True)
    rows = []
    for x, its_numbers in (
        (a, numbers[: n_values_of_sparse(a)]),
        (b, numbers[n_values_of_sparse(a) :]),
    ):
        row = torch.zeros((places.shape[1], *x.values().shape[1:]), dtype=x.dtype)
        row[its_numbers] = x.values()
        rows.append(row)
    return rows[0], rows[1]


def opened_sides(
    a: Any,
    b: Any,
    a_storage_options: Mapping[str, Any] | None,
    b_storage_options: Mapping[str, Any] | None,
    *,
    recover: bool = False,
) -> tuple[Contents, Contents]:
    """Open both sides; if both are the same file object, open it once and use it for both."""
    first = open_checkpoint(a, OpenOptions(a_storage_options, recover=recover))
    if b is a and b_storage_options == a_storage_options:
        return first, first
    return first, open_checkpoint(b, OpenOptions(b_storage_options, recover=recover))


def flat(obj: Any, path: str) -> dict[str, Tensor]:
    """Return an object's tensors by dotted name; raise ValueError if two names are equal."""
    names = EntryNames(obj, path)
    result: dict[str, Tensor] = {}
    for name, tensor in zip(names.names, names.tensors, strict=True):
        text = name if isinstance(name, str) else dotted(name)
        if text in result:
            raise ValueError(f"{path}: two tensors would get the dotted name {text!r}")
        result[text] = tensor
    return result


# ----------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Tolerance:
    """Two numbers are equal if ``abs(a - b) <= atol + rtol * abs(b)``, as for assert_close."""

    rtol: float
    atol: float


def checked_tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    """Return the `Tolerance`, where a missing value is 0; None if both are missing."""
    if rtol is None and atol is None:
        return None
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, not {value}")
    return Tolerance(rtol or 0.0, atol or 0.0)


@dataclass(frozen=True)
class NumberDifference:
    """Counts and sizes of the differences between two tensors; ``+`` combines parts of tensors.

    `max_abs` is an exact int if both tensors have integers.  For two zeros or two NaNs, the
    difference is 0.  `max_abs` and `max_rel` are None for dtypes that torch cannot compute with.
    """

    numel: int = 0  # of each tensor
    n_different: int = 0  # numbers whose bits differ, or with two dtypes, whose values do
    n_outside: int = 0  # numbers outside the tolerance; without a tolerance, `n_different`
    n_nan_a: int = 0  # NaN only in a; `n_different` counts them, but `max_abs` does not
    n_nan_b: int = 0
    max_abs: int | float | None = 0
    max_rel: float | None = 0.0  # relative to abs(b); inf where b is 0

    def __add__(self, other: NumberDifference) -> NumberDifference:
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            max_abs=_larger(self.max_abs, other.max_abs),
            max_rel=_larger(self.max_rel, other.max_rel),
        )

    def times(self, n: int) -> NumberDifference:
        """Return the sum for `n` parts if each has this difference."""
        return replace(self, **{name: n * getattr(self, name) for name in _COUNTS})


_COUNTS = ("numel", "n_different", "n_outside", "n_nan_a", "n_nan_b")


def _larger(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)


def number_difference(
    a: Tensor, b: Tensor, tolerance: Tolerance | None = None, n_threads: int = 1
) -> NumberDifference:
    """Return the counts and sizes of the differences between two rows of numbers.

    Both rows are contiguous CPU tensors of shape (N,), without the conjugate bit.  Without a
    tolerance, numbers are equal if they have the same bits or, with two dtypes, the same value.
    Raises TypeError if the dtypes differ and torch cannot compute with one of them.
    """
    found = None
    if torch.float4_e2m1fn_x2 not in (a.dtype, b.dtype):  # an element of this dtype is two numbers
        rtol, atol = (0.0, 0.0) if tolerance is None else (tolerance.rtol, tolerance.atol)
        found = _C.tensor_difference(a, b, rtol, atol, n_threads)
    if found is not None:
        n_different = found["n_different"]
        return NumberDifference(
            a.numel(),
            n_different,
            n_different if tolerance is None else found["n_outside"],
            found["n_nan_only_a"],
            found["n_nan_only_b"],
            found["max_abs"],
            found["max_rel"],
        )
    if a.dtype != b.dtype:
        raise TypeError(f"torch cannot convert {a.dtype} and {b.dtype} to compare their values")
    bits = torch.uint8 if a.itemsize == 1 else torch.int16  # dtypes that torch cannot compare
    n_different = number_difference(a.view(bits), b.view(bits)).n_different
    if not n_different:
        return NumberDifference(a.numel())
    return NumberDifference(a.numel(), n_different, n_different, 0, 0, None, None)


def rows_in_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return both tensors as rows in the order of a's memory, and the order of dimensions."""
    dims = sorted(range(a.dim()), key=a.stride().__getitem__, reverse=True)
    return _row(a.permute(dims)), _row(b.permute(dims)), dims


def _row(tensor: Tensor) -> Tensor:
    row = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A row of at most one number may have any stride, but a view as another dtype requires 1.
    return row.as_strided(row.shape, (1,)) if row.numel() <= 1 else row
