"""Statistics of one tensor, compared with torch's functions in float64, and of several together."""

from __future__ import annotations

import math
import zlib
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ptsave.capturing.run import PooledStatistics
from ptsave.capturing.schema import Statistics
from ptsave.capturing.tensors import local_values, statistics_of

# Of torch: prototypes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]


def found(tensor: Tensor) -> Statistics:
    fields = statistics_of(tensor, 2)
    assert fields is not None
    return Statistics(*fields)


def random_bytes(dtype: torch.dtype, n: int) -> Tensor:
    data = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8)
    return (data % 2).bool() if dtype == torch.bool else data.view(dtype)


def assert_like_torch(tensor: Tensor) -> None:
    """Compare with torch, of the finite elements."""
    statistics = found(tensor)
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).flatten()
    finite = wide[torch.isfinite(wide)]
    assert statistics.numel == tensor.numel()
    assert statistics.n_nan == int(torch.isnan(wide).sum())
    assert statistics.n_inf == int((torch.isinf(wide) & ~torch.isnan(wide)).sum())
    assert statistics.n_zero == int((wide == 0).sum())
    checked = tensor.detach().contiguous().flatten()
    assert statistics.checksum == zlib.crc32(bytes(checked.view(torch.uint8).numpy()))
    if not len(finite):
        assert math.isnan(statistics.min)
        return
    sizes = finite.abs() if tensor.is_complex() else finite
    largest = sizes.abs().max().item()
    assert statistics.mean == pytest.approx(finite.mean().item(), rel=1e-9, abs=1e-12 * largest)
    assert statistics.norm == pytest.approx(finite.abs().square().sum().sqrt().item(), rel=1e-9)
    assert float(statistics.min) == pytest.approx(sizes.min().item(), rel=1e-14)
    assert float(statistics.max) == pytest.approx(sizes.max().item(), rel=1e-14)
    if len(finite) > 1:
        assert statistics.std == pytest.approx(finite.std().item(), rel=1e-9)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 17, 4095, 4096, 4097, 100_000])
def test_floats(dtype: torch.dtype, n: int) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert_like_torch((3 + 2 * torch.randn(n, dtype=wide)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *SMALL_FLOATS], ids=str)
def test_every_bit_pattern(dtype: torch.dtype) -> None:
    integer = torch.int16 if dtype.itemsize == 2 else torch.uint8
    patterns = torch.arange(256**dtype.itemsize).to(integer).view(dtype)
    assert_like_torch(patterns)
    for pattern in patterns[:: 1 if dtype.itemsize == 1 else 251]:
        assert_like_torch(pattern)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: torch.dtype) -> None:
    tensor = random_bytes(dtype, 5000)
    assert_like_torch(tensor)
    statistics = found(tensor)
    assert (statistics.min, statistics.max) == (int(tensor.min()), int(tensor.max()))
    assert isinstance(statistics.min, int)


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers(dtype: torch.dtype) -> None:
    values = [0, 1, 256**dtype.itemsize - 1]
    statistics = found(torch.tensor(values, dtype=dtype))
    assert (statistics.min, statistics.max, statistics.n_zero) == (0, values[-1], 1)
    assert statistics.mean == pytest.approx(sum(values) / 3)


def test_float4() -> None:
    statistics = found(torch.tensor([0x71, 0xF0], dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    # 0.5, 6, 0 and -6: the format of two bits of exponent and one of mantissa.
    assert (statistics.numel, statistics.min, statistics.max) == (4, -6, 6)
    assert statistics.mean == pytest.approx(0.125)


@pytest.mark.parametrize("name", ["uint4", "int4", "uint1"])
def test_elements_of_few_bits_are_taken_for_bytes(name: str) -> None:
    tensor = torch.tensor([1, 3], dtype=torch.uint8).view(getattr(torch, name))
    assert found(tensor).mean == 2


@given(st.lists(st.floats(width=32), max_size=40))
def test_any_numbers(values: list[float]) -> None:
    assert_like_torch(torch.tensor(values, dtype=torch.float32))


def test_strides() -> None:
    base = torch.randn(8, 6, 4)
    for tensor in (base.transpose(0, 2), base[:, ::2], base[1:, 1:], base.flip(0), base[0, 0, 0]):
        assert_like_torch(tensor)
    assert_like_torch(base.expand(3, 8, 6, 4))
    assert found(torch.randn(4, dtype=torch.complex64).conj()).numel == 4
    assert found(torch.view_as_complex(torch.randn(4, 2)).conj().imag).numel == 4


def test_an_image_in_another_memory_format_has_the_same_checksum() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert found(images) == found(images.to(memory_format=torch.channels_last))


def test_large_tensors() -> None:
    assert_like_torch(1e4 + torch.randn(3_000_001))


def test_blocks_of_several_sizes() -> None:
    sizes = [0, 1e-200, 0, 1, 1e300, 1e-200, 0]
    for n in range(1, len(sizes) + 1):
        data = torch.cat([torch.full((4096,), x, dtype=torch.float64) for x in sizes[:n]])
        largest, size = data.max().item(), len(data)
        share = int((data == largest).sum()) / size
        statistics = found(data)
        assert statistics.mean == pytest.approx(largest * share)
        std = largest * math.sqrt(share * (1 - share) * size / (size - 1))
        assert statistics.std == pytest.approx(std, abs=1e-12 * largest)
        assert statistics.norm == pytest.approx(largest * math.sqrt(share * size))


def test_tensors_without_plain_values() -> None:
    assert local_values(torch.ones(2, device="meta")) == (None, "meta: no values")
    values, note = local_values(torch.eye(3).to_sparse())
    assert values is not None
    assert (values.numel(), note) == (3, "sparse: statistics of the stored values")
    values, _ = local_values(torch.eye(3).to_sparse_csr())
    assert values is not None
    values, note = local_values(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert values is not None
    assert note.startswith("nested")


def test_freed_memory_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        statistics_of(tensor, 1)


# --------------------------------------------------------------------------- of several tensors

floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
lists = st.lists(st.lists(floats, max_size=5), min_size=1, max_size=4)


@given(lists, st.sampled_from([torch.float64, torch.complex128]))
def test_parts_and_the_whole(parts: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [
        torch.tensor(part, dtype=dtype) * (1 + 1j if dtype.is_complex else 1) for part in parts
    ]
    pooled = PooledStatistics()
    for tensor in tensors:
        pooled.add(found(tensor))
    whole = found(torch.cat(tensors))
    assert (pooled.numel, pooled.n_nan, pooled.n_inf, pooled.n_zero) == whole[:4]
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
        pooled.add(found(torch.complex(tensor, tensor) if is_complex else tensor))
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
    statistics = found(torch.tensor([1e300, 1e300], dtype=torch.float64))
    assert (statistics.mean, statistics.std) == (1e300, 0)
    assert statistics.norm == pytest.approx(math.sqrt(2) * 1e300)
    largest = 0.99 * torch.finfo(torch.float64).max
    pooled = PooledStatistics()
    for sign in (1, -1, 1, -1):
        pooled.add(found(torch.full((8,), sign * largest, dtype=torch.float64)))
    assert pooled.mean == 0
    assert pooled.std == math.inf  # larger by sqrt(32 / 31)
    pooled.add(found(torch.zeros(8, dtype=torch.float64)))
    assert pooled.std == pytest.approx(largest * math.sqrt(32 / 39))
