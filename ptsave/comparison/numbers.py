"""Differences of two equally long rows of numbers, whatever their dtypes; the engine finds them.

Differences of whole numbers are exact; all others are computed in float64, so that the counts are
those of ``torch.testing.assert_close``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ptsave import _C


@dataclass(frozen=True)
class Tolerance:
    """Bounds of equality: ``abs(a - b) <= atol + rtol * abs(b)``, as for assert_close."""

    rtol: float
    atol: float


def checked_tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    """Return a tolerance in which a missing value is 0; None if both are missing."""
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
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            max_abs=_larger(self.max_abs, other.max_abs),
            max_rel=_larger(self.max_rel, other.max_rel),
        )

    def times(self, n: int) -> NumberDifference:
        """Return the difference of n such rows."""
        return replace(self, **{name: n * getattr(self, name) for name in _COUNTS})


_COUNTS = ("numel", "n_different", "n_outside", "n_nan_a", "n_nan_b")


def _larger(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)


def number_difference(
    a: Tensor, b: Tensor, tolerance: Tolerance | None = None, n_threads: int = 1
) -> NumberDifference:
    """Return the counts and sizes of the differences between two rows of numbers.

    Both are contiguous, of shape (N,), on the CPU, and not conjugated lazily.  Without a tolerance,
    numbers are equal if they have the same bits; between two dtypes, the same value.  Raises
    TypeError if the dtypes differ, and torch cannot compute with one of them.
    """
    found = None
    if torch.float4_e2m1fn_x2 not in (a.dtype, b.dtype):  # numel counts its pairs
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
    bits = torch.uint8 if a.itemsize == 1 else torch.int16  # dtypes that are only names for bytes
    n_different = number_difference(a.view(bits), b.view(bits)).n_different
    if not n_different:
        return NumberDifference(a.numel())
    return NumberDifference(a.numel(), n_different, n_different, 0, 0, None, None)


def rows_in_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return the numbers of two tensors in the memory order of a, and its dimensions so ordered."""
    dims = sorted(range(a.dim()), key=a.stride().__getitem__, reverse=True)
    return _row(a.permute(dims)), _row(b.permute(dims)), dims


def _row(tensor: Tensor) -> Tensor:
    row = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A row of one number, or none, may have any stride; views of other dtypes require 1.
    return row.as_strided(row.shape, (1,)) if row.numel() <= 1 else row
