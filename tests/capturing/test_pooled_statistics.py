"""Statistics of several tensors together: those of one tensor of all their elements."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptsave import _C
from ptsave.capturing.run import PooledStatistics

floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
lists = st.lists(st.lists(floats, max_size=5), min_size=1, max_size=4)


@given(lists, st.sampled_from([torch.float64, torch.complex128]))
def test_parts_and_the_whole(parts: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [
        torch.tensor(part, dtype=dtype) * (1 + 1j if dtype.is_complex else 1) for part in parts
    ]
    pooled = PooledStatistics()
    for tensor in tensors:
        pooled.add(_C.tensor_statistics(tensor) or ())
    whole = _C.tensor_statistics(torch.cat(tensors))
    assert whole is not None
    found = (pooled.numel, pooled.n_nan, pooled.n_inf, pooled.n_zero)
    assert found == whole[:4]
    for one, other in zip(
        (pooled.mean, pooled.std, pooled.min, pooled.max, pooled.norm), whole[4:9], strict=True
    ):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-2, nan_ok=True)


def test_extremes_do_not_overflow() -> None:
    """Any numbers may be in a file."""
    pooled = PooledStatistics()
    for big in (1e308, -1e308, complex(1e308, 1e308)):
        pooled.add((3, 0, 0, 0, big, 1e308, -1e308, 1e308, 1e308, 0))
    pooled.add((1, 2, 3, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
    assert math.isinf(pooled.norm) or pooled.norm >= 1e308
    assert pooled.n_nan == 2
    assert not pooled.std < 1e300


def exact_root(x: Fraction) -> float:
    digits = 10**400
    return float(Fraction(math.isqrt(int(x * digits**2)), digits))


any_size = st.floats(-1e300, 1e300) | st.sampled_from([0.0, 1e-200, -3e-170, 2e250, 1e154])


@given(st.lists(st.lists(any_size, min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_numbers_of_any_size(parts: list[list[float]], is_complex: bool) -> None:
    """The exact mean, deviation and norm, of tensors alone and together."""
    pooled = PooledStatistics()
    for part in parts:
        tensor = torch.tensor(part, dtype=torch.float64)
        pooled.add(
            _C.tensor_statistics(torch.complex(tensor, tensor) if is_complex else tensor) or ()
        )
    numbers = [Fraction(x) for part in parts for x in part]
    n, n_parts = len(numbers), 2 if is_complex else 1
    mean = sum(numbers, Fraction(0)) / n
    squares = sum(((x - mean) ** 2 for x in numbers), Fraction(0)) * n_parts
    largest = max(map(abs, numbers))
    assert pooled.mean.real == pytest.approx(float(mean), abs=float(largest) * 1e-14)
    assert pooled.mean.imag == (pooled.mean.real if is_complex else 0)
    if n > 1:
        std = exact_root(squares / (n - 1))
        assert pooled.std == pytest.approx(std, rel=1e-12, abs=float(largest) * 1e-14)
    norm = exact_root(sum((x * x for x in numbers), Fraction(0)) * n_parts)
    assert pooled.norm == pytest.approx(norm, rel=1e-12, abs=1e-320)


def test_the_largest_numbers() -> None:
    found = _C.tensor_statistics(torch.tensor([1e300, 1e300], dtype=torch.float64))
    assert found is not None
    assert found[4:6] == (1e300, 0)
    assert found[8] == pytest.approx(math.sqrt(2) * 1e300)
    largest = 0.99 * torch.finfo(torch.float64).max
    pooled = PooledStatistics()
    for sign in (1, -1, 1, -1):
        pooled.add(
            _C.tensor_statistics(torch.full((8,), sign * largest, dtype=torch.float64)) or ()
        )
    assert pooled.mean == 0
    assert pooled.std == math.inf  # larger by sqrt(32 / 31)
    pooled.add(_C.tensor_statistics(torch.zeros(8, dtype=torch.float64)) or ())
    assert pooled.std == pytest.approx(largest * math.sqrt(32 / 39))
