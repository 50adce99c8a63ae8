"""`PooledStatistics`: statistics of several tensors, as if they were one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ptsave.tree.capture_schema import Statistics


class PooledStatistics:
    """The `Statistics` of several tensors, as if they were one.

    The variance is that of all elements, by the parallel algorithm of Chan et al.

    >>> pooled = PooledStatistics()
    >>> pooled.add((2, 0, 0, 0, 1.0, 0.0, 1.0, 1.0, 2.0**0.5, 0))  # two ones
    >>> pooled.add((2, 0, 0, 0, 3.0, 0.0, 3.0, 3.0, 18.0**0.5, 0))  # two threes
    >>> pooled.mean, round(pooled.std, 6), pooled.max, round(pooled.norm, 6)
    (2.0, 1.154701, 3.0, 4.472136)
    """

    def __init__(self) -> None:
        self.numel = 0
        self.n_nan = 0
        self.n_inf = 0
        self.n_zero = 0
        self.mean: complex = math.nan
        self.min: float = math.nan
        self.max: float = math.nan
        self.norm = 0.0
        self._n_finite = 0
        self._deviation = 0.0  # the root of the mean square of the distances to the mean

    @property
    def std(self) -> float:
        """The square root of the unbiased variance; NaN for fewer than two finite elements."""
        n = self._n_finite
        return self._deviation * math.sqrt(n / (n - 1)) if n > 1 else math.nan

    def add(self, statistics: Sequence[Any]) -> None:
        """Add the fields of a tensor's `Statistics`."""
        found = Statistics(*statistics[: len(Statistics._fields)])
        self.numel += found.numel
        self.n_nan += found.n_nan
        self.n_inf += found.n_inf
        self.n_zero += found.n_zero
        n_finite = found.numel - found.n_nan - found.n_inf
        if n_finite <= 0:
            return
        self.min = found.min if self._n_finite == 0 else min(self.min, found.min)
        self.max = found.max if self._n_finite == 0 else max(self.max, found.max)
        self.norm = math.hypot(self.norm, found.norm)
        self._add_moments(n_finite, found.mean, found.std)

    def _add_moments(self, n: int, mean: complex, std: float) -> None:
        # No sum of squares, which may be infinite or zero in doubles where its root is neither.
        deviation = std * math.sqrt((n - 1) / n) if n > 1 else 0.0
        if self._n_finite == 0:
            self._n_finite, self.mean, self._deviation = n, mean, deviation
            return
        before, total = self._n_finite, self._n_finite + n
        half = mean / 2 - self.mean / 2  # the whole distance may exceed any float
        spread = math.hypot(half.real, half.imag) * (2 * math.sqrt(before) * math.sqrt(n) / total)
        self._deviation = math.hypot(
            self._deviation * math.sqrt(before / total), deviation * math.sqrt(n / total), spread
        )
        step = half * (n / total)
        self.mean = self.mean + step + step
        self._n_finite = total
