"""`TensorDifference`: all that one pass over two tensors of one shape finds."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ptsave import _C
from ptsave.comparison.tensors import Tolerance, rows_in_order


@dataclass(frozen=True)
class TensorDifference:
    """Counts and sizes of the differences between two tensors; the results of parts add up.

    Attributes
    ----------
    numel : int
        Count of numbers on each side.
    n_different : int
        Count of numbers with other bits or, between two dtypes, another value.
    n_outside : int
        Count of numbers outside the tolerance.
    n_nan_a, n_nan_b, n_inf_a, n_inf_b : int
        Counts of NaN and of infinities of each side.
    n_nan_only_a, n_nan_only_b : int
        Counts of NaN where the other side is not NaN.
    n_inf_mismatch : int
        Infinities that meet a finite number, or one of another sign.
    max_abs : int or float
        The largest distance of two numbers that are not NaN; exact for whole numbers.
    max_rel : float
        The largest distance divided by the absolute value in b; inf where that is 0.
    product, squares_a, squares_b : float
        Sums of a * b, a * a and b * b, where both are finite, of a / 2**scale_a and b / 2**scale_b.
    scale_a, scale_b : int
        0, unless squares of float64 would be infinite or 0.
    ulps : tuple of int
        Counts of numbers that are 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, ... units in the last place
        apart, in the coarser dtype.  The 66th counts numbers of two signs, and NaN and infinities
        that the other side has not.  Counts behind the last one that is not 0 are left out.
    first : tuple of int or None
        The index of the first number that differs, in a's order of memory.  For nested tensors it
        begins with the index of the component.
    problem : str
        Why the numbers could not be compared; empty if they were.
    """

    numel: int = 0
    n_different: int = 0
    n_outside: int = 0
    n_nan_a: int = 0
    n_nan_b: int = 0
    n_inf_a: int = 0
    n_inf_b: int = 0
    n_nan_only_a: int = 0
    n_nan_only_b: int = 0
    n_inf_mismatch: int = 0
    max_abs: int | float = 0
    max_rel: float = 0.0
    product: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    scale_a: int = 0
    scale_b: int = 0
    ulps: tuple[int, ...] = ()
    first: tuple[int, ...] | None = None
    problem: str = ""

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both, as vectors of the numbers that are finite in both.

        1.0 if both are 0 everywhere.  NaN if there is no angle: only one of them is 0, or there are
        only zeros and numbers that are NaN or infinite on one side.
        """
        if not self.n_different:
            return 1.0
        if self.squares_a == 0 == self.squares_b:
            is_zero = not (self.max_abs or self.n_nan_only_a or self.n_nan_only_b)
            return 1.0 if is_zero else math.nan
        norms = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        return max(-1.0, min(1.0, self.product / norms)) if 0 < norms < math.inf else math.nan

    @property
    def relative_error(self) -> float:
        """The largest distance, divided by the root mean square of b.

        Numbers near zero do not decide it, unlike `max_rel`.
        """
        if not self.max_abs:
            return 0.0
        rms = math.ldexp(math.sqrt(self.squares_b / max(1, self.numel)), self.scale_b)
        return self.max_abs / rms if rms else math.inf

    def __add__(self, other: TensorDifference) -> TensorDifference:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        scale_a = _common_scale(self.squares_a, self.scale_a, other.squares_a, other.scale_a)
        scale_b = _common_scale(self.squares_b, self.scale_b, other.squares_b, other.scale_b)
        products = map(
            operator.add, self._products(scale_a, scale_b), other._products(scale_a, scale_b)
        )
        product, squares_a, squares_b = products
        longer, shorter = sorted((self.ulps, other.ulps), key=len, reverse=True)
        rest = (*shorter, *[0] * (len(longer) - len(shorter)))
        return TensorDifference(
            **sums,
            product=product,
            squares_a=squares_a,
            squares_b=squares_b,
            scale_a=scale_a,
            scale_b=scale_b,
            max_abs=max(self.max_abs, other.max_abs),
            max_rel=max(self.max_rel, other.max_rel),
            ulps=tuple(map(sum, zip(longer, rest, strict=True))),
            first=self.first if self.first is not None else other.first,
            problem=self.problem or other.problem,
        )

    def _products(self, scale_a: int, scale_b: int) -> tuple[float, float, float]:
        """Return the sums of products in the units of other scales."""
        down_a, down_b = self.scale_a - scale_a, self.scale_b - scale_b
        return (
            math.ldexp(self.product, down_a + down_b),
            math.ldexp(self.squares_a, 2 * down_a),
            math.ldexp(self.squares_b, 2 * down_b),
        )

    def times(self, n: int) -> TensorDifference:
        """Return the difference of n such parts."""
        sums = {name: getattr(self, name) * n for name in (*_SUMS, *_PRODUCTS)}
        return replace(self, **sums, ulps=tuple(n * count for count in self.ulps))

    def moved(self, begin: Sequence[int]) -> TensorDifference:
        """Return the difference of a part that begins at an index."""
        if self.first is None:
            return self
        first = tuple(x + y for x, y in zip(begin, self.first, strict=True))
        return replace(self, first=first)


_PRODUCTS = ("product", "squares_a", "squares_b")
_OTHERS = {*_PRODUCTS, "scale_a", "scale_b", "max_abs", "max_rel", "ulps", "first", "problem"}
_SUMS = [field.name for field in fields(TensorDifference) if field.name not in _OTHERS]


def _common_scale(squares: float, scale: int, other_squares: float, other_scale: int) -> int:
    """Return a scale for two sums of squares together; a sum of zero fits any scale."""
    if squares == 0:
        return other_scale
    return max(scale, other_scale) if other_squares else scale


def difference_of_rows(
    a: Tensor, b: Tensor, tolerance: Tolerance, n_threads: int = 1
) -> TensorDifference | None:
    """Compare two strided CPU tensors of one shape in one pass, whatever their dtypes.

    NaN is near any NaN.  None if the elements of one are no numbers (bits, quantized ones).  Raises
    ValueError if their shapes differ, or only one is of torch.float4_e2m1fn_x2.
    """
    if a.shape != b.shape:
        raise ValueError(f"tensors of {list(a.shape)} and {list(b.shape)} cannot be compared")
    x, y, dims = rows_in_order(a.detach(), b.detach())
    found = _C.tensor_difference(x, y, tolerance.rtol, tolerance.atol, n_threads)
    if found is None:
        return None
    first = found.pop("first_different")
    ulps = found.pop("ulps")
    n_used = max((i + 1 for i, count in enumerate(ulps) if count), default=0)
    return TensorDifference(
        **found, ulps=ulps[:n_used], first=_index(first, a, dims) if found["n_different"] else None
    )


def _index(flat: int, a: Tensor, dims: list[int]) -> tuple[int, ...]:
    """Return the index in a tensor of a number in its row."""
    if a.dtype == torch.float4_e2m1fn_x2:  # two numbers in an element
        flat //= 2
    index = [0] * len(dims)
    for dim in reversed(dims):
        flat, index[dim] = divmod(flat, a.shape[dim])
    return tuple(index)
