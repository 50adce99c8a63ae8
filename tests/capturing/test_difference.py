"""`difference_of_rows`, compared with expressions of torch in float64."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ptsave import _C
from ptsave.capturing.comparison import TensorDifference, difference_of_rows
from ptsave.comparison.tensors import Tolerance, number_difference

# Of torch: a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOT_NEAR = 65  # the bucket of ULPs of two signs


def difference(a: Tensor, b: Tensor, rtol: float = 0, atol: float = 0) -> TensorDifference:
    found = difference_of_rows(a, b, Tolerance(rtol, atol), 2)
    assert found is not None
    return found


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return (data % 2).bool() if dtype == torch.bool else data.view(dtype)


def wide(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.complex32:
        return torch.complex(tensor.real.double(), tensor.imag.double())
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def assert_like_torch(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    found = difference(a, b, rtol, atol)
    x, y = wide(a), wide(b)
    if x.is_complex() or y.is_complex():
        x, y = x.to(torch.complex128), y.to(torch.complex128)
    nan_x, nan_y = x.isnan(), y.isnan()
    inf_x, inf_y = x.isinf() & ~nan_x, y.isinf() & ~nan_y
    finite = x.isfinite() & y.isfinite()
    assert found.numel == a.numel()
    assert (found.n_nan_a, found.n_nan_b) == (int(nan_x.sum()), int(nan_y.sum()))
    assert (found.n_inf_a, found.n_inf_b) == (int(inf_x.sum()), int(inf_y.sum()))
    assert found.n_nan_only_a == int((nan_x & ~nan_y).sum())
    assert found.n_nan_only_b == int((nan_y & ~nan_x).sum())
    mismatch = (inf_x | inf_y) & ~nan_x & ~nan_y & (x != y)
    assert found.n_inf_mismatch == int(mismatch.sum())
    same = (x == y) | (nan_x & nan_y)
    if a.dtype != b.dtype:
        assert found.n_different == int((~same).sum())
    distance = (x - y)[finite].abs()
    allowed = atol + rtol * y[finite].abs()
    n_far = int((distance > allowed).sum()) + int((~finite & ~same).sum())
    assert found.n_outside == n_far
    if mismatch.any():
        assert found.max_abs == found.max_rel == math.inf
    elif len(distance):
        assert float(found.max_abs) == pytest.approx(distance.max().item(), rel=1e-14)
        ratio = torch.where(distance > 0, distance / y[finite].abs(), 0.0).max().item()
        assert found.max_rel == pytest.approx(ratio, rel=1e-14)
    for sum_found, scale, left, right in (
        (found.product, found.scale_a + found.scale_b, x, y),
        (found.squares_a, 2 * found.scale_a, x, x),
        (found.squares_b, 2 * found.scale_b, y, y),
    ):
        expected = (left[finite].conj() * right[finite]).real
        size = expected.abs().sum().item()
        if math.isfinite(size):
            plain = math.ldexp(sum_found, scale)
            assert plain == pytest.approx(expected.sum().item(), abs=1e-11 * size)
    assert sum(found.ulps) == found.numel
    # What comparisons of checkpoints tell is of the same engine.
    row_a, row_b = (each.resolve_conj().contiguous().view(-1) for each in (a, b))
    numbers = number_difference(row_a, row_b, Tolerance(rtol, atol))
    assert (numbers.numel, numbers.n_different) == (found.numel, found.n_different)
    assert (numbers.n_nan_a, numbers.n_nan_b) == (found.n_nan_only_a, found.n_nan_only_b)
    assert (numbers.n_outside, numbers.max_abs, numbers.max_rel) == (
        *(found.n_outside, found.max_abs, found.max_rel),
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_random_bits(dtype: torch.dtype) -> None:
    """Among them NaNs of all payloads, infinities, denormal numbers, extremes."""
    a, b = (random_bytes(dtype, (7, 901), seed) for seed in (1, 2))
    assert_like_torch(a, b)
    assert_like_torch(a, a)
    assert_like_torch(a, b, 0.5, 1e-3)
    bits = INTEGER_OF.get(dtype.itemsize, torch.int64)
    differ = a.view(bits) != b.view(bits)
    if dtype.itemsize == 16:
        differ = differ.view(7, 901, 2).any(2)
    found = difference(a, b)
    assert found.n_different == int(differ.sum())
    assert found.first == tuple(differ.nonzero()[0].tolist())
    assert difference(a, a).first is None


def test_two_dtypes() -> None:
    dtypes = [*FLOATS, torch.int8, torch.int64, torch.complex64]
    for one, other in itertools.permutations(dtypes, 2):
        a, b = random_bytes(one, (3001,), 3), random_bytes(other, (3001,), 4)
        assert_like_torch(a, b, 0.5, 1e-3)


@pytest.mark.parametrize("n", [1, 7, 2047, 2048, 2049, 262_144, 262_147, 1_100_000])
def test_sizes_around_those_of_blocks(n: int) -> None:
    a = torch.randn(n)
    b = a.clone()
    b.view(torch.int32)[n // 2 :: 3] ^= torch.randint(0, 256, (n,), dtype=torch.int32)[n // 2 :: 3]
    assert_like_torch(a, b, 1e-6)
    differ = (a != b).nonzero()
    assert difference(a, b).first == (tuple(differ[0].tolist()) if len(differ) else None)


def ordered(tensor: Tensor) -> Tensor:
    """Return floats as integers, of which neighbours are one unit in the last place apart."""
    bits = tensor.view(INTEGER_OF[tensor.itemsize])
    bits = bits.to(torch.int64)
    return torch.where(bits < 0, -(bits & (2 ** (8 * tensor.itemsize - 1) - 1)), bits)


def bucket(ulps: int) -> int:
    return 0 if ulps == 0 else (ulps - 1).bit_length() + 1


@pytest.mark.parametrize("dtype", FLOATS[1:4], ids=str)
def test_ulps(dtype: torch.dtype) -> None:
    a = torch.randn(4000).to(dtype)
    step = torch.randint(0, 300, (4000,)).to(INTEGER_OF[dtype.itemsize])
    b = (a.view(step.dtype) + step).view(dtype)
    distances = (ordered(a) - ordered(b)).abs().tolist()
    signs = ((a < 0) != (b < 0)).tolist()
    expected = [0] * 66
    for distance, differs in zip(distances, signs, strict=True):
        expected[NOT_NEAR if differs else bucket(distance)] += 1
    found = difference(a, b).ulps
    assert list(found) == expected[: len(found)]
    assert difference(b, a).ulps == found


@pytest.mark.parametrize("dtype", FLOATS[2:8], ids=str)
def test_ulps_are_of_the_coarser_dtype(dtype: torch.dtype) -> None:
    """A rounded number is no unit away from the one it was."""
    a = torch.cat([torch.randn(1000), torch.randn(1000) * 1e-3, torch.randn(1000) * 1e-5])
    assert difference(a, a.to(dtype)).ulps == (3000,)
    assert difference(a.to(dtype).double(), a.to(dtype)).n_different == 0


def test_ulps_of_special_numbers() -> None:
    a = torch.tensor([0.0, 0.0, 1.0, math.inf, math.inf, math.nan, math.nan, 1e-45])
    b = torch.tensor([-0.0, 1e-45, -1.0, math.inf, -math.inf, math.nan, 1.0, -1e-45])
    found = difference(a, b)
    assert found.ulps[:2] == (3, 1)
    assert found.ulps[NOT_NEAR] == 4
    assert found.n_outside == 5
    assert difference(a, b, 0, 10).n_outside == 2  # that of signs of infinity, and of a NaN


def test_zeros_and_nans_of_other_bits() -> None:
    a = torch.tensor([0.0, math.nan])
    b = torch.tensor([0x80000000 - 2**32, 0x7FC12345], dtype=torch.int32).view(torch.float32)
    found = difference(a, b)
    assert (found.n_different, found.n_outside, found.max_abs) == (2, 0, 0)
    assert (found.cosine, found.relative_error) == (1, 0)


def test_whole_numbers_are_exact() -> None:
    extremes = torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1])
    found = difference(extremes, extremes.flip(0))
    assert found.max_abs == 2**63 + 2**53 + 1
    found = difference(torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([0]))
    assert (found.max_abs, type(found.max_abs)) == (2**64 - 1, int)
    most = difference(torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([-(2**63)]))
    assert most.max_abs == 2**64 - 1 + 2**63
    assert difference(torch.tensor([True]), torch.tensor([3])).max_abs == 2
    found = difference(torch.tensor([5, 2**62 + 1, -3]), torch.tensor([5, 2**62, -5]))
    assert (found.n_different, found.ulps) == (2, (1, 1, 1))
    a, b = torch.tensor([-1], dtype=torch.int8), torch.tensor([255], dtype=torch.uint8)
    assert difference(a, b).max_abs == 256


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=30))
def test_any_numbers(pairs: list[tuple[float, float]]) -> None:
    a = torch.tensor([x for x, _ in pairs])
    b = torch.tensor([y for _, y in pairs])
    assert_like_torch(a, b)
    assert_like_torch(a.double(), b, 0.25, 1e-30)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    a = torch.ones(shape)
    assert_like_torch(a, 2 * a)
    found = difference(a, 2 * a)
    assert found.first == ((0,) * len(shape) if a.numel() else None)
    assert found.cosine == pytest.approx(1)


def test_strides() -> None:
    base = torch.randn(8, 6, 4)
    for a in (base.transpose(0, 2), base[:, ::2], base[1:, 1:], base.flip(0), base[0, 0, 0]):
        b = a.contiguous().clone()
        assert difference(a, b).n_different == 0
        b.view(-1)[-1] += 1
        found = difference(a, b)
        assert found.first == tuple(n - 1 for n in a.shape)
        assert_like_torch(a, b)
        assert_like_torch(b, a)
    assert_like_torch(base.expand(3, 8, 6, 4), torch.randn(3, 8, 6, 4))
    z = torch.randn(4, dtype=torch.complex64)
    assert difference(z.conj(), z.conj().resolve_conj()).n_different == 0


def test_float4() -> None:
    a, b = (
        torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        for bits in ([0x71, 0x22], [0x71, 0x32])
    )
    found = difference(a, b)
    assert (found.numel, found.n_different, found.max_abs, found.first) == (4, 1, 0.5, (1,))
    with pytest.raises(ValueError, match="two numbers"):
        difference(a, torch.zeros(2))


def test_large_tensors_and_parts() -> None:
    a = torch.randn(3000, 1000)
    b = a + 1e-6 * torch.randn(3000, 1000)
    assert_like_torch(a, b, 1e-6)
    found = difference(a, b, 1e-6)
    halves = difference(a[:1500], b[:1500], 1e-6) + difference(a[1500:], b[1500:], 1e-6)
    assert found.cosine == pytest.approx(halves.cosine, rel=1e-12)
    assert (found.ulps, found.first, found.n_outside) == (
        halves.ulps,
        halves.first,
        halves.n_outside,
    )
    assert found.times(2).n_outside == 2 * found.n_outside


def test_cosine() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert difference(a, b).cosine == 0
    assert difference(a, -a).cosine == -1
    assert math.isnan(difference(a, 0 * a).cosine)
    assert difference(0 * a, -0.0 * a).cosine == 1


def test_cosine_where_there_is_no_angle() -> None:
    zeros = torch.zeros(3)
    nan, infinity = (torch.tensor([0.0, x, 0.0]) for x in (math.nan, math.inf))
    assert difference(nan, nan.clone()).cosine == 1
    for a, b in itertools.permutations((zeros, nan, infinity), 2):
        assert math.isnan(difference(a, b).cosine)
    for size in (1e-200, 1e200):  # whose squares float64 does not have
        a = torch.tensor([size], dtype=torch.float64)
        assert difference(a, -a).cosine == -1


def exact_norm(numbers: list[Fraction]) -> float:
    """Return the root of the sum of squares, which no float may hold."""
    squares = sum((x * x for x in numbers), Fraction(0))
    digits = 10**40
    return float(Fraction(math.isqrt(int(squares * digits**2 * 10**700)), digits * 10**350))


any_size = st.floats(-1e300, 1e300) | st.sampled_from([0.0, 1e-200, -3e-170, 5e-310, 2e250, 1e154])


@given(st.lists(st.tuples(any_size, any_size), min_size=1, max_size=6), st.booleans())
def test_sizes_of_float64(pairs: list[tuple[float, float]], is_complex: bool) -> None:
    """Also where squares of the numbers are infinite or zero."""
    a, b = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    if is_complex:
        a, b = torch.complex(a, -a), torch.complex(b, -b)
    found = difference(a, b)
    x = [Fraction(x) for pair in pairs for x in (pair[0], 0)]
    y = [Fraction(y) for pair in pairs for y in (pair[1], 0)]
    n_parts = 2 if is_complex else 1
    norms = exact_norm(x), exact_norm(y)
    for norm, squares, scale in (
        (norms[0], found.squares_a, found.scale_a),
        (norms[1], found.squares_b, found.scale_b),
    ):
        assert math.ldexp(math.sqrt(squares), scale) == pytest.approx(
            norm * math.sqrt(n_parts), rel=1e-12, abs=1e-320
        )
    if min(norms) > 1e-290 and found.n_different:
        dot = sum((u * v for u, v in zip(x, y, strict=True)), Fraction(0))
        expected = float(dot / (Fraction(norms[0]) * Fraction(norms[1])))
        assert found.cosine == pytest.approx(expected, abs=1e-12)
    if norms[1] > 1e-290 and math.isfinite(found.max_abs):
        rms = norms[1] * math.sqrt(n_parts) / math.sqrt(len(pairs))
        assert found.relative_error == pytest.approx(found.max_abs / rms, rel=1e-12)


def test_blocks_of_several_sizes() -> None:
    """The largest decide, and zeros nothing."""
    sizes = [0, 1e-200, 0, 1, 1e300, 1e-200, 0]
    for n in range(1, len(sizes) + 1):
        data = torch.cat([torch.full((2048,), x, dtype=torch.float64) for x in sizes[:n]])
        found = difference(data, torch.ones_like(data))
        norm = data.max().item() * math.sqrt(int((data == data.max()).sum()))
        assert math.ldexp(math.sqrt(found.squares_a), found.scale_a) == pytest.approx(norm)
        assert found.squares_b == len(data)


def test_numbers_at_the_ends_of_float64() -> None:
    a = torch.tensor([-1.5e308, 1, 2], dtype=torch.float64)
    b = torch.tensor([1.5e308, 1, 2.5], dtype=torch.float64)
    found = difference(a, b, 1.5)
    assert (found.max_abs, found.max_rel, found.n_outside) == (math.inf, 2, 1)
    a, b = (torch.tensor(x, dtype=torch.float64) * 5e-324 for x in ([7, 3], [5, 2]))
    found = difference(a, b)
    assert (found.max_rel, found.max_abs) == (0.5, 2 * 5e-324)


def test_parts_of_several_sizes() -> None:
    parts = [torch.full((n,), x, dtype=torch.float64) for n, x in ((3, 0.0), (4, 1e-200), (5, 1.0))]
    found = sum((difference(part, 2 * part) for part in parts), TensorDifference())
    assert (found.squares_a, found.squares_b, found.scale_b) == (5, 20, 0)
    assert found.cosine == pytest.approx(1)
    tiny = difference(parts[1], 2 * parts[1])
    assert tiny.cosine == pytest.approx(1)
    assert tiny.relative_error == pytest.approx(0.5)
    huge = tiny + difference(parts[2] * 1e300, parts[2] * -1e300)
    assert huge.cosine == pytest.approx(-1)
    assert huge.times(2).cosine == pytest.approx(-1)
    assert huge.relative_error == pytest.approx(2e300 / (1e300 * math.sqrt(5 / 9)))


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(2), 3, "expected a tensor"),
        (torch.ones(2, 2).t(), torch.ones(2, 2), "contiguous"),
        (torch.ones(2, device="meta"), torch.ones(2), "CPU memory"),
        (torch.ones(2), torch.ones(3), "different shapes"),
        (torch.ones(2).to_sparse(), torch.ones(2), "contiguous"),
    ],
)
def test_refused(a: Any, b: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        _C.tensor_difference(a, b)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"\[2\] and \[3\]"):
        difference(torch.ones(2), torch.ones(3))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"no memory|out of bounds"):
        difference(torch.ones(4), freed)
    bits = torch.ones(2, dtype=torch.uint8).view(torch.bits8)
    assert difference_of_rows(bits, bits, Tolerance(0, 0)) is None
