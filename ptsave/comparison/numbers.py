"""Differences of two equally long rows of numbers, whatever their dtypes: pure arithmetic.

Differences of whole numbers are exact; all others are computed in float64.  The engine has a loop,
too (`measures.difference_of_rows`), which may merge a multiplication with an addition.  This module
uses torch's own arithmetic, because the counts of `compare` must be those of
``torch.testing.assert_close`` to the last bit; a test compares both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_NUMEL = 1 << 15  # torch uses one thread: in short loops threads wait for each other
_WORD = 1 << 32
_HALF = 1 << 62
_INTEGERS = {
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16),
    *(torch.uint32, torch.int32, torch.uint64, torch.int64),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class Tolerance:
    """Bounds of equality: ``abs(a - b) <= atol + rtol * abs(b)``, as for assert_close."""

    rtol: float
    atol: float


def checked_tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    """Return a tolerance in which a missing value is 0; None if both are missing.

    Raises ValueError if one is negative or NaN.
    """
    if rtol is None and atol is None:
        return None
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, not {value}")
    return Tolerance(rtol or 0.0, atol or 0.0)


@dataclass(frozen=True)
class NumberDifference:
    """Counts and sizes of differences; the results of parts add up to that of the whole.

    `max_abs` is an exact int between whole numbers.  It is 0 where only bits differ: 0.0 and -0.0,
    or two NaNs.  `max_abs` and `max_rel` are None for dtypes that torch cannot compute with.
    """

    numel: int = 0  # on each side
    n_different: int = 0  # with other bits or, between two dtypes, another value
    n_outside: int = 0  # outside the tolerance; without one, as `n_different`
    n_nan_a: int = 0  # NaN on this side alone; only the counts include these numbers
    n_nan_b: int = 0
    max_abs: int | float | None = 0
    max_rel: float | None = 0.0  # relative to abs(b); inf where b is 0

    def __add__(self, other: NumberDifference) -> NumberDifference:
        return NumberDifference(
            self.numel + other.numel,
            self.n_different + other.n_different,
            self.n_outside + other.n_outside,
            self.n_nan_a + other.n_nan_a,
            self.n_nan_b + other.n_nan_b,
            _larger(self.max_abs, other.max_abs),
            _larger(self.max_rel, other.max_rel),
        )

    def times(self, n: int) -> NumberDifference:
        """Return the difference of n such rows."""
        return NumberDifference(
            self.numel * n,
            self.n_different * n,
            self.n_outside * n,
            self.n_nan_a * n,
            self.n_nan_b * n,
            self.max_abs,
            self.max_rel,
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)


def number_difference(a: Tensor, b: Tensor, tolerance: Tolerance | None = None) -> NumberDifference:
    """Return the counts and sizes of the differences between two rows of numbers.

    Both are contiguous, of shape (N,), on the CPU, and not conjugated lazily.  Without a tolerance,
    numbers are equal if they have the same bits; between two dtypes, the same value.  Raises
    TypeError if the dtypes differ, and torch cannot compute with one of them.

    >>> import torch
    >>> a, b = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 4.0])
    >>> found = number_difference(a, b)
    >>> found.n_different, found.max_abs, found.max_rel
    (1, 0.5, 0.2)
    """
    total = NumberDifference()
    for begin in range(0, a.numel(), _BLOCK_NUMEL):
        end = begin + _BLOCK_NUMEL
        total += _block_difference(a[begin:end], b[begin:end], tolerance)
    return total


@dataclass(frozen=True)
class _Distances:
    """Distances between numbers, in float64."""

    each: Tensor  # 0 for two NaNs, and for a NaN on one side
    largest: int | float  # an int is exact
    magnitudes: Tensor  # absolute values of b
    nan_a: Tensor | None = None  # mask of numbers that are NaN on this side alone
    nan_b: Tensor | None = None


def _block_difference(a: Tensor, b: Tensor, tolerance: Tolerance | None) -> NumberDifference:
    n_different = _count(_bits_differ(a, b)) if a.dtype == b.dtype else None
    if n_different == 0:
        return NumberDifference(a.numel())
    if {a.dtype, b.dtype} <= _INTEGERS:
        found = _integer_distances(a, b)
    elif (numbers := _as_floats(a, b)) is not None:
        found = _float_distances(*numbers)
    else:
        assert n_different is not None
        return NumberDifference(a.numel(), n_different, n_different, 0, 0, None, None)
    n_nan_a, n_nan_b = _count(found.nan_a), _count(found.nan_b)
    n_nan = n_nan_a + n_nan_b
    if n_different is None:
        n_different = n_nan + _count(found.each)
    n_outside = n_different
    if tolerance is not None:
        allowed = tolerance.atol + tolerance.rtol * found.magnitudes
        near = (found.each <= allowed) & found.each.isfinite()
        n_outside = n_nan + _count(~near & (found.each != 0))
    max_rel = _max_ratio(found.each, found.magnitudes)
    return NumberDifference(
        a.numel(), n_different, n_outside, n_nan_a, n_nan_b, found.largest, max_rel
    )


def _count(mask: Tensor | None) -> int:
    return 0 if mask is None else int(mask.count_nonzero())


def _bits_differ(a: Tensor, b: Tensor) -> Tensor:
    bits = _BITS[a.itemsize]
    differ = a.view(bits) != b.view(bits)
    return differ.view(-1, 2).any(1) if a.itemsize == 16 else differ


# ----------------------------------------------------------------------------------- whole numbers


def _integer_distances(a: Tensor, b: Tensor) -> _Distances:
    if _fits_int64(a) and _fits_int64(b):
        narrow = (a.to(torch.int64) - b.to(torch.int64)).abs_()
        largest, each = int(narrow.max()), narrow.double()
    else:
        largest, each = _wide_distances(a, b)
    return _Distances(each, largest, _magnitudes(b))


def _fits_int64(x: Tensor) -> bool:
    """Whether the difference of two such numbers fits into int64."""
    if x.dtype not in (torch.int64, torch.uint64):
        return True
    smallest, largest = x.view(torch.int64).aminmax()
    return int(smallest) >= -_HALF and int(largest) < _HALF and x.dtype == torch.int64


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as ``high * 2**32 + low``, where 0 <= low < 2**32."""
    if x.dtype != torch.uint64:
        x = x.to(torch.int64)
        return x >> 32, x & (_WORD - 1)
    x = x.view(torch.int64)
    return (x >> 32) & (_WORD - 1), x & (_WORD - 1)


def _wide_distances(a: Tensor, b: Tensor) -> tuple[int, Tensor]:
    """Return the largest absolute difference, which int64 may not hold, and all in float64."""
    (a_high, a_low), (b_high, b_low) = _words(a), _words(b)
    low = a_low - b_low
    high = a_high - b_high + (low >> 32)
    low &= _WORD - 1
    negative = high < 0
    borrow = (negative & (low != 0)).to(torch.int64)
    high = torch.where(negative, -high - borrow, high)
    low = torch.where(negative, (_WORD - low) & (_WORD - 1), low)
    highest = int(high.max())
    max_abs = highest * _WORD + int(low[high == highest].max())
    return max_abs, high.double() * _WORD + low.double()


def _magnitudes(x: Tensor) -> Tensor:
    if x.dtype != torch.uint64:
        return x.double().abs_()
    high, low = _words(x)
    return high.double() * _WORD + low.double()


# ------------------------------------------------------------------------------- all other numbers


def _as_floats(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return both as float64 or as complex128; None if torch cannot convert them."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    try:
        return _to(a, wide), _to(b, wide)
    except (NotImplementedError, RuntimeError):  # dtypes that are only names for bytes
        if a.dtype == b.dtype:
            return None
    raise TypeError(f"torch cannot convert {a.dtype} and {b.dtype} to compare their values")


def _to(x: Tensor, wide: torch.dtype) -> Tensor:
    if x.dtype == torch.complex32:  # torch warns that few operators know this dtype
        x = torch.view_as_real(x).float()
        return torch.view_as_complex(x).to(wide)
    return x.to(wide)


def _float_distances(a: Tensor, b: Tensor) -> _Distances:
    each, magnitudes = _distance(a, b), b.abs()
    largest = float(each.max())
    if not math.isnan(largest):
        return _Distances(each, largest, magnitudes)
    # One of two is NaN, or both are infinite.
    a_is_nan, b_is_nan = a.isnan(), b.isnan()
    each.masked_fill_(a_is_nan | b_is_nan | (a == b), 0.0).nan_to_num_(math.inf, math.inf)
    nan_a, nan_b = a_is_nan & ~b_is_nan, b_is_nan & ~a_is_nan
    return _Distances(each, float(each.max()), magnitudes, nan_a, nan_b)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_complex():
        return (a - b).abs_()
    parts = torch.view_as_real(a), torch.view_as_real(b)
    distances = (parts[0] - parts[1]).masked_fill_(parts[0] == parts[1], 0.0)
    return torch.hypot(distances[:, 0], distances[:, 1])  # infinite parts that agree do not matter


def _max_ratio(distance: Tensor, magnitude: Tensor) -> float:
    ratio = distance / magnitude
    largest = float(ratio.max())
    if not math.isnan(largest):
        return largest
    # 0 / 0, inf / inf, or NaN on one side, where the distance is 0.
    ratio.masked_fill_(distance == 0, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    return float(ratio.max())
