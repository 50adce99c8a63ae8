"""Tolerances by dtype: those of :func:`torch.testing.assert_close`, and some for small floats."""

from __future__ import annotations

import torch

from ptsave.comparison.numbers import Tolerance

_EXACT = Tolerance(0.0, 0.0)
_BY_DTYPE = {
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex32: Tolerance(1e-3, 1e-5),
    torch.complex64: Tolerance(1.3e-6, 1e-5),
    torch.complex128: Tolerance(1e-7, 1e-7),
    # torch has none for these: one unit in the last place, and the smallest number.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-10),
    torch.float8_e5m2: Tolerance(2**-2, 2**-16),
    torch.float8_e5m2fnuz: Tolerance(2**-2, 2**-17),
    torch.float8_e8m0fnu: Tolerance(1.0, 0.0),
    torch.float4_e2m1fn_x2: Tolerance(2**-1, 2**-1),
}


class Tolerances:
    """Chooses the tolerance of a pair of tensors.

    `rtol` and `atol` are for all dtypes; if only one is given, the other is 0.  With `exact`, only
    the same bits are equal.

    >>> Tolerances(None, None).of(torch.float32, torch.bfloat16)
    Tolerance(rtol=0.016, atol=1e-05)
    """

    def __init__(self, rtol: float | None, atol: float | None, *, exact: bool = False) -> None:
        self._given = checked_tolerance(rtol, atol)
        if exact and self._given is not None:
            raise ValueError("exact and a tolerance exclude each other: give one of them")
        self.exact = exact

    def of(self, a: torch.dtype, b: torch.dtype) -> Tolerance:
        """Return the larger tolerance of two dtypes."""
        if self.exact:
            return _EXACT
        if self._given is not None:
            return self._given
        of_a, of_b = _BY_DTYPE.get(a, _EXACT), _BY_DTYPE.get(b, _EXACT)
        return Tolerance(max(of_a.rtol, of_b.rtol), max(of_a.atol, of_b.atol))


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
