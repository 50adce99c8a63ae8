"""How much numbers differ: against exact arithmetic, and against torch.testing.assert_close."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ptsave.comparison.tensors import NumberDifference, Tolerance, number_difference

INTEGERS = {
    torch.uint8: (0, 2**8 - 1),
    torch.int8: (-(2**7), 2**7 - 1),
    torch.uint16: (0, 2**16 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.uint32: (0, 2**32 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
    torch.uint64: (0, 2**64 - 1),
}


def integers_of(dtype: torch.dtype) -> st.SearchStrategy[int]:
    low, high = INTEGERS[dtype]
    return st.integers(low, high) | st.sampled_from([low, high, 0, 1])


@given(st.data())
def test_whole_numbers_are_exact(data: st.DataObject) -> None:
    dtypes = [data.draw(st.sampled_from(sorted(INTEGERS, key=str))) for _ in "ab"]
    n = data.draw(st.integers(1, 5))
    a, b = (data.draw(st.lists(integers_of(d), min_size=n, max_size=n)) for d in dtypes)
    found = number_difference(
        torch.tensor(a, dtype=dtypes[0]), torch.tensor(b, dtype=dtypes[1]), Tolerance(0, 0)
    )
    pairs = list(zip(a, b, strict=True))
    assert found.max_abs == max(abs(x - y) for x, y in pairs)
    assert type(found.max_abs) is int
    assert found.n_different == found.n_outside == sum(x != y for x, y in pairs)
    ratios = [float(Fraction(abs(x - y), abs(y))) if y else math.inf for x, y in pairs if x != y]
    assert found.max_rel == pytest.approx(max(ratios, default=0.0))


def floats_of(data: st.DataObject, n: int) -> Tensor:
    numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0])
    values = data.draw(st.lists(numbers, min_size=n, max_size=n))
    return torch.tensor(values, dtype=torch.float32)


def is_close(a: Tensor, b: Tensor, tolerance: Tolerance) -> bool:
    try:
        torch.testing.assert_close(
            a, b, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True, check_dtype=False
        )
    except AssertionError:
        return False
    return True


@given(st.data(), st.sampled_from([0.0, 1e-3, 0.5, 10.0]), st.sampled_from([0.0, 1e-6, 3.0]))
def test_tolerance_is_that_of_assert_close(data: st.DataObject, rtol: float, atol: float) -> None:
    tolerance = Tolerance(rtol, atol)
    # In float64, as ptsave computes; torch rounds to the dtype of the tensors first.
    a, b = (floats_of(data, 1).double() for _ in "ab")
    found = number_difference(a, b, tolerance)
    assert (found.n_outside == 0) == is_close(a, b, tolerance)


@given(st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 8))
    a, b = floats_of(data, n), floats_of(data, n)
    cut = data.draw(st.integers(1, n - 1))
    tolerance = Tolerance(1e-3, 1e-3)
    parts = number_difference(a[:cut], b[:cut], tolerance)
    parts += number_difference(a[cut:], b[cut:], tolerance)
    assert parts == number_difference(a, b, tolerance)


@pytest.mark.parametrize("rtol", [0.3, 1e-3])
def test_numbers_as_far_apart_as_is_allowed(rtol: float) -> None:
    """The product is rounded before it is added, as torch does, so that no count is off by one."""
    b = torch.randn(10_007, dtype=torch.float64)
    tolerance = Tolerance(rtol, 1e-5)
    allowed = tolerance.atol + tolerance.rtol * b.abs()
    a = b + allowed
    n_outside = int(((a - b).abs() > allowed).sum())
    assert 0 < n_outside < 10_007
    assert number_difference(a, b, tolerance).n_outside == n_outside


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_complex_numbers(dtype: torch.dtype) -> None:
    def row(*numbers: complex) -> Tensor:
        parts = torch.tensor([[z.real, z.imag] for z in map(complex, numbers)])
        halves = {torch.complex64: torch.float32, torch.complex128: torch.float64}
        return torch.view_as_complex(parts.to(halves.get(dtype, torch.float16)))

    infinite = complex(math.inf, 1)
    found = number_difference(row(0, 3, infinite, complex(math.nan, 0)), row(0, 4j, infinite, 1))
    assert (found.n_different, found.n_nan_a, found.max_abs, found.max_rel) == (2, 1, 5.0, 1.25)
    found = number_difference(row(infinite), row(complex(math.inf, 3)), Tolerance(0, 2))
    assert (found.n_outside, found.max_abs) == (1, 2.0)  # infinity is near itself alone
    found = number_difference(row(infinite), row(complex(math.inf, 2)), Tolerance(0.1, 0))
    assert (found.n_outside, found.max_abs) == (1, 1.0)  # so it is for torch.isclose
    found = number_difference(row(complex(math.inf, math.inf)), row(complex(-math.inf, math.nan)))
    assert (found.n_different, found.n_nan_a, found.n_nan_b) == (1, 0, 1)


def test_what_only_bits_tell_apart() -> None:
    a, b = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([-0.0, math.nan, 1.0])
    b.view(torch.int32)[1] += 1  # another NaN
    assert number_difference(a, b) == NumberDifference(3, 2, 2)
    assert number_difference(a, b, Tolerance(0, 0)).n_outside == 0
    assert number_difference(a, a.clone()) == NumberDifference(3)


def test_dtypes_that_are_only_names() -> None:
    a = torch.arange(4, dtype=torch.uint8)
    b = torch.tensor([0, 1, 7, 3], dtype=torch.uint8)
    for dtype in (torch.float4_e2m1fn_x2, torch.bits8):
        found = number_difference(a.view(dtype), b.view(dtype), Tolerance(1, 1))
        assert found == NumberDifference(4, 1, 1, 0, 0, None, None)
        with pytest.raises(TypeError, match="cannot convert"):
            number_difference(a.view(dtype), b)
