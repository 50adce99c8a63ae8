"""Statistics of several tensors together: those of one tensor of all their elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptsave import _C
from ptsave.tree.pooled_statistics import PooledStatistics

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
