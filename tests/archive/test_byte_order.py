"""Archives of machines with the other byte order: every operation gives the values torch gives."""

from __future__ import annotations

import copy
import io
import math
import mmap
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip
from _system import run_python
from command_line import succeed
from stock_comparison import (
    assert_interchangeable,
    assert_same_bytes,
    assert_same_object,
    saved_bytes,
    stock_load,
    stock_save,
    zip_records,
    zipped,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import LoadEndianness, set_default_load_endianness, skip_data

import ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.pickle_globals import required_globals
from ptsave.inspection.verification import verify_file

pytestmark = pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage is deprecated)")


# Of torch's own code, about quantized tensors.

_OTHER = b"big" if sys.byteorder == "little" else b"little"
_ORDERS = {"marked": _OTHER, "unmarked": None}


def _state() -> OrderedDict[str, Any]:
    """Tensors of every dtype whose storages torch swaps, and of some that it does not."""
    torch.manual_seed(0)
    state: OrderedDict[str, Any] = OrderedDict()
    dtypes = [getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")]
    dtypes += [torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint64, torch.float8_e5m2]
    for dtype in dtypes:
        values = torch.randint(0, 2 if dtype is torch.bool else 100, (4, 6))
        state[str(dtype)] = values.to(dtype)
    weight = torch.randn(6, 4)
    state["shared"] = weight.t()
    state["part"] = weight[2:4]
    state["parameter"] = nn.Parameter(torch.randn(3))
    return state


def _quantized() -> dict[str, Any]:
    values = torch.rand(4, 6)
    zeros = torch.zeros(4, dtype=torch.int64)
    quantized = {
        str(dtype): torch.quantize_per_tensor(values, 0.25, 3, dtype)
        for dtype in (torch.quint8, torch.qint8, torch.qint32)
    }
    scales = torch.full((4,), 0.5)
    return quantized | {
        "channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    }


def _written(
    obj: object, path: Path, order: bytes | None, method: int = zipfile.ZIP_STORED
) -> Path:
    """Write what a machine of the other byte order would have."""
    records = zip_records(saved_bytes(stock_save, obj))
    records.pop("byteorder")
    if order is not None:
        records["byteorder"] = order
    path.write_bytes(zipped(records, method))
    return path


@pytest.fixture(params=_ORDERS)
def order(request: pytest.FixtureRequest) -> Iterator[bytes | None]:
    """What the file says of its byte order; where it says nothing, torch's default does."""
    found = _ORDERS[request.param]
    set_default_load_endianness(LoadEndianness.BIG if found is None else None)
    yield found
    set_default_load_endianness(None)


@pytest.mark.parametrize("make", [_state, _quantized])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_load(
    tmp_path: Path, order: bytes | None, make: Callable[[], Any], weights_only: bool, method: int
) -> None:
    path = _written(make(), tmp_path / "a.pt", order, method)
    for location in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda s, _: s):
        options: dict[str, Any] = {"map_location": location, "weights_only": weights_only}
        expected = stock_load(path, **options)
        assert_same_object(ptsave.load(path, **options), expected)
        data = path.read_bytes()
        assert_same_object(ptsave.load(io.BytesIO(data), **options), expected)
    if method == zipfile.ZIP_STORED:
        options = {"mmap": True, "weights_only": weights_only}
        assert_same_object(ptsave.load(path, **options), stock_load(path, **options))


@pytest.mark.parametrize("default", [None, *LoadEndianness], ids=str)
@pytest.mark.parametrize("mark", [b"little", b"big", None], ids=str)
def test_what_the_mark_and_the_default_say(
    tmp_path: Path, mark: bytes | None, default: LoadEndianness | None
) -> None:
    set_default_load_endianness(default)
    try:
        path = _written(_state(), tmp_path / "a.pt", mark)
        expected = stock_load(path)
        for options in ({}, {"weights_only": False}, {"mmap": True}, {"map_location": "cpu"}):
            assert_same_object(ptsave.load(path, **options), expected)
        assert_same_object(ptsave.load(io.BytesIO(path.read_bytes())), expected)
    finally:
        set_default_load_endianness(None)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("location", ["meta", torch.device("meta")])
def test_load_onto_meta(
    tmp_path: Path, order: bytes | None, weights_only: bool, method: int, location: Any
) -> None:
    """Stock torch ends in a segmentation fault; it does not for files of this byte order."""
    state = _state()
    path = _written(state, tmp_path / "a.pt", order, method)
    native = _written(state, tmp_path / "b.pt", sys.byteorder.encode(), method)
    options: dict[str, Any] = {"map_location": location, "weights_only": weights_only}
    expected = stock_load(native, **options)
    assert_same_object(ptsave.load(path, **options), expected)
    assert_same_object(ptsave.load(io.BytesIO(path.read_bytes()), **options), expected)


def test_load_without_bytes(tmp_path: Path, order: bytes | None) -> None:
    path = _written(_state(), tmp_path / "a.pt", order)
    with skip_data():
        assert ptsave.load(path)["shared"].shape == (4, 6)
    with FakeTensorMode():
        assert ptsave.load(path)["shared"].shape == (4, 6)


def test_segmentation_fault_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = _written(_state(), tmp_path / "a.pt", _OTHER)
    code = (
        "import sys, ptsave\nfrom ptsave.__main__ import main\n"
        "ptsave.load(sys.argv[1], map_location='meta')\n"
        "sys.argv = ['ptsave', 'verify', sys.argv[1]]\nsys.exit(main())"
    )
    run_python(code, path, options=["-W", "ignore"])


def test_shared_mapping_is_refused(tmp_path: Path, order: bytes | None) -> None:
    """torch swaps the bytes in the file, so that the next load gives other values."""
    path = _written(_state(), tmp_path / "a.pt", order)
    before = path.read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        with pytest.raises(ValueError, match=r"a\.pt is in another byte order .* use MAP_PRIVATE"):
            ptsave.load(path, mmap=True)
        assert ptsave.load(path, mmap=True, map_location="meta")["shared"].is_meta
    assert path.read_bytes() == before


def test_unknown_byte_order(tmp_path: Path) -> None:
    path = _written(_state(), tmp_path / "a.pt", b"middle")
    choices: list[dict[str, Any]] = [{}, {"map_location": "meta"}]
    for options in choices:
        with pytest.raises(ValueError, match="Unknown endianness type: middle"):
            ptsave.load(path, **options)


def test_open(tmp_path: Path, order: bytes | None) -> None:
    path = _written(_state(), tmp_path / "a.pt", order)
    expected = stock_load(path)
    with ptsave.open(path) as archive:
        archive.verify()
        assert [*archive] == [*expected]
        for name, tensor in expected.items():
            assert_same_object(archive[name], tensor)
            assert_same_values({name: archive.get_tensor(name)}, {name: tensor})
            assert_same_values({name: archive.get_slice(name)[1:2]}, {name: tensor[1:2]})
            assert archive.info(name).shape == tensor.shape


def test_restores(tmp_path: Path, order: bytes | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    path = _written(model.state_dict(), tmp_path / "a.pt", order)
    expected = stock_load(path)
    for restore in (ptsave.load_into, ptsave.load_model):
        target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        if restore is ptsave.load_into:
            restore(path, target)
        else:
            restore(target, path)
        assert_same_object({**target.state_dict()}, {**expected})
    values = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    ptsave.load_into(path, values)
    assert_same_object(values, {**expected})
    path = _written({"model": model.state_dict(), "step": 3}, tmp_path / "b.pt", order)
    expected = stock_load(path)
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert ptsave.load_checkpoint(path, model=target)["step"] == 3
    assert_same_object({**target.state_dict()}, {**expected["model"]})


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_tools(tmp_path: Path, order: bytes | None, method: int) -> None:
    state = _state()
    path = _written(state, tmp_path / "a.pt", order, method)
    expected = stock_load(path)
    assert "torch._utils._rebuild_tensor_v2" in required_globals(path)
    assert not verify_file(path).problems
    assert "shared" in succeed("ls", path).output
    succeed("verify", path)
    assert_same_object(read_entries(str(path), ["shared"])["shared"], expected["shared"])
    convert(path, tmp_path / "b.safetensors", drop=True)
    held = {name: tensor for name, tensor in expected.items() if name != "torch.complex128"}
    assert_same_values(ptsave.open(tmp_path / "b.safetensors").tensors(), held)
    compact(path, tmp_path / "c.pt")
    assert zip_records((tmp_path / "c.pt").read_bytes())["byteorder"] == sys.byteorder.encode()
    assert_same_values(stock_load(tmp_path / "c.pt"), expected)
    assert compare(str(path), str(path)).equal
    assert compare(str(path), str(tmp_path / "c.pt")).equal


def assert_same_values(found: Any, expected: Any) -> None:
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(
            found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ), name


def test_entries_of_a_damaged_file(tmp_path: Path) -> None:
    """Which are found by making the object on the meta device."""
    path = _written({"a": torch.ones(300), "b": torch.zeros(300)}, tmp_path / "a.pt", _OTHER)
    flip(path, b"\x80\x3f\x00\x00" * 8)
    with pytest.raises(ptsave.CorruptCheckpointError) as caught:
        ptsave.load(path)
    assert caught.value.entries == ["a"]
    found = verify_file(path)
    assert [problem.entries for problem in found.problems] == [["a"]]
    assert found.whole == ["b"]


# --------------------------------------------------------------------- elements smaller than a byte


# Of torch's own code, about quantized tensors.

_QUANTIZED = [(torch.quint4x2, 2), (torch.quint2x4, 4)]
_OPAQUE = ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"]
_UNSAVED = [f"{kind}{n}" for kind in ("int", "uint") for n in range(1, 8)]


def _per_tensor(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    return torch.quantize_per_tensor(torch.rand(shape), 0.1, 3, dtype)


def _per_channel(dtype: torch.dtype, axis: int = 0) -> Tensor:
    values = torch.rand(3, 5)
    n = values.shape[axis]
    return torch.quantize_per_channel(values, torch.rand(n) + 0.1, torch.rand(n), axis, dtype)


def _opaque(name: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    storage = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, (4, 6), (6, 1))


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        f"{name}.{str(dtype).removeprefix('torch.')}": tensor
        for dtype, _ in _QUANTIZED
        for name, tensor in (("tensor", _per_tensor(dtype)), ("channel", _per_channel(dtype)))
    }


# -------------------------------------------------- torch's own tests, with ptsave in torch's place


@pytest.mark.parametrize(("dtype", "n_shared"), _QUANTIZED, ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (6, 4), (5, 7), (12, 1), (4,), (7,)], ids=str)
def test_qtensor_sub_byte(dtype: torch.dtype, n_shared: int, shape: tuple[int, ...]) -> None:
    """``_test_qtensor_sub_byte`` of test/quantization/core/test_quantized_tensor.py."""
    quantized = torch.quantize_per_tensor(torch.ones(shape), 1.0, 1, dtype)
    *rows, columns = shape
    nbytes = math.prod(rows) * math.ceil(columns / n_shared)
    assert quantized.untyped_storage().nbytes() == nbytes
    for weights_only in (True, False):
        with tempfile.NamedTemporaryFile() as file:
            ptsave.save(quantized, file)
            file.seek(0)
            loaded = ptsave.load(file, weights_only=weights_only)
            assert torch.equal(quantized.int_repr(), loaded.int_repr())
            assert loaded.dtype is dtype
            assert (loaded.q_scale(), loaded.q_zero_point()) == (1.0, 1)
    copied = copy.deepcopy({"weight": torch.ones(2)})
    assert torch.equal(copied["weight"], torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.quint4x2, torch.quint2x4])
def test_qtensor_per_channel_load_save(dtype: torch.dtype) -> None:
    """``test_qtensor_per_channel_load_save`` of the same file."""
    values = torch.rand(20, 10) * 4 - 2
    scales = torch.rand(10, dtype=torch.double) * 0.02 + 0.01
    zeros = torch.round(torch.rand(10) * 20 + 1).to(torch.long)
    if dtype in (torch.quint4x2, torch.quint2x4):
        zeros = torch.ones(10, dtype=torch.float)
    quantized = torch.quantize_per_channel(values, scales, zeros, 1, dtype)
    for weights_only in (True, False):
        with tempfile.NamedTemporaryFile() as file:
            ptsave.save(quantized, file)
            file.seek(0)
            assert_same_object(ptsave.load(file, weights_only=weights_only), quantized)


# ------------------------------------------------------------------------------- every operation


def test_save_and_load(state: dict[str, Tensor], tmp_path: Path) -> None:
    odd: dict[str, Any] = {"views": [], "0d": _per_tensor(torch.quint4x2, ())}
    for dtype, _ in _QUANTIZED:
        whole = _per_tensor(dtype, (4, 8))
        odd["views"] += [whole, whole.view(8, 4), whole[:1]]
        with suppress(RuntimeError):  # torch 2.9 takes a byte per element when it transposes
            odd["views"].append(whole.t())
        odd[f"empty {dtype}"] = _per_tensor(dtype, (0, 3))
        images = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        odd[f"last {dtype}"] = torch.quantize_per_tensor(images, 0.1, 0, dtype)
    assert_interchangeable(state, tmp_path)
    assert_interchangeable(odd, tmp_path / "odd")
    path = tmp_path / "ptsave" / "file.pt"
    assert_same_object(ptsave.load(path, mmap=True), stock_load(path, mmap=True))
    ptsave.async_save(state, tmp_path / "file.pt").result()
    assert (tmp_path / "file.pt").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", [dtype for dtype, _ in _QUANTIZED], ids=str)
def test_elements_beyond_the_storage(dtype: torch.dtype) -> None:
    """A shape of more elements than the storage has bits for is refused, as for whole bytes."""
    data, shape = saved_bytes(stock_save, {"t": _per_tensor(dtype)}), b"K\x03K\x05\x86"
    assert data.count(shape) == 1
    for rows, columns in ((3, 255), (255, 5), (6, 5)):
        other = data.replace(shape, bytes([0x4B, rows, 0x4B, columns, 0x86]))
        with pytest.raises(ptsave.CorruptCheckpointError, match="do not lie within its storage"):
            ptsave.load(io.BytesIO(other), verify=False)


def test_open_and_tools(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    stock_save(state, path)
    with ptsave.open(path) as archive:
        archive.verify()
        for name, tensor in state.items():
            assert_same_object(archive[name], tensor)
            assert_same_object(archive.get_tensor(name), tensor)
            assert archive.info(name).nbytes == tensor.untyped_storage().nbytes()
            with pytest.raises(TypeError, match="its elements share bytes: read all of it with"):
                archive.get_slice(name)[:1]
    found = verify_file(path)
    assert (found.problems, found.whole) == ([], [*state])
    succeed("verify", path)
    for name in state:
        assert name.rpartition(".")[2] in succeed("ls", path).output
    name = next(iter(state))
    assert_same_object(read_entries(str(path), [name])[name], state[name])
    succeed("extract", path, name, "-o", tmp_path / "b.pt")
    assert_same_object(stock_load(tmp_path / "b.pt"), state[name])
    compact(path, tmp_path / "c.pt")
    assert_same_object(stock_load(tmp_path / "c.pt"), state)
    assert compare(str(path), str(tmp_path / "c.pt")).equal
    other = {**state, name: _per_tensor(state[name].dtype)}
    stock_save(other, tmp_path / "d.pt")
    assert [each.name for each in compare(str(path), str(tmp_path / "d.pt")).differences] == [name]


def test_what_safetensors_cannot_hold(state: dict[str, Tensor], tmp_path: Path) -> None:
    path, target = tmp_path / "a.pt", tmp_path / "a.safetensors"
    stock_save(state | {"plain": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"cannot hold tensor\.quint4x2 \(a quantized tensor\)"):
        convert(path, target)
    assert not target.exists()
    convert(path, target, drop=True)
    assert ptsave.open(target).keys() == ["plain"]
    with pytest.raises(TypeError, match=r"'tensor\.quint4x2' is not a dense tensor"):
        ptsave.save_model(state, tmp_path / "model")


def _module() -> nn.Module:
    module = nn.Module()
    module.first = nn.Parameter(torch.rand(3))
    module.register_buffer("quantized", _per_tensor(torch.quint4x2))
    return module


def test_restores_are_refused_before_anything_is_changed(path: Path) -> None:
    """torch has no copy for these dtypes, and finds that out after it has copied the others."""
    saved = _module().state_dict()
    stock_save(saved, path)
    for target in (_module(), dict(_module().state_dict())):
        tensors = target.state_dict() if isinstance(target, nn.Module) else target
        before = tensors["first"].clone()
        with pytest.raises(RuntimeError, match=r"torch cannot copy torch\.quint4x2"):
            ptsave.load_into(path, target)
        assert torch.equal(tensors["first"], before)
    module = _module()
    ptsave.load_into(path, module, assign=True)
    assert_same_object(module.quantized, saved["quantized"])
    with pytest.raises(RuntimeError, match=r"torch cannot copy torch\.quint4x2"):
        ptsave.load_state_dict(_module(), saved)
    with pytest.raises(RuntimeError, match="copy_kernel"):
        _module().load_state_dict(saved)


# ------------------------------------------------------- dtypes that are saved as bytes, or not


@pytest.mark.parametrize("name", _OPAQUE)
def test_opaque_dtypes(name: str, tmp_path: Path) -> None:
    state = {"t": _opaque(name), "plain": torch.ones(2)}
    path = tmp_path / "ptsave" / "file.pt"
    assert_same_bytes(state, tmp_path)
    expected = _bytes(state["t"])
    every: list[dict[str, Any]] = [{}, {"weights_only": False}, {"mmap": True}]
    for options in every:
        found = ptsave.load(path, **options)["t"]
        assert (found.dtype, found.shape, _bytes(found)) == (state["t"].dtype, (4, 6), expected)
    assert ptsave.load(path, map_location="meta")["t"].dtype == state["t"].dtype
    target = {"t": _opaque(name), "plain": torch.zeros(2)}
    torch.empty(0, dtype=torch.uint8).set_(target["t"].untyped_storage()).zero_()
    ptsave.load_into(path, target)
    assert _bytes(target["t"]) == expected
    with ptsave.open(path) as archive:
        archive.verify()
        assert _bytes(archive["t"]) == expected
        row = len(expected) // 4
        assert _bytes(archive.get_slice("t")[1:2]) == expected[row : 2 * row]
    succeed("ls", path)
    succeed("verify", path)
    succeed("extract", path, "t", "-o", tmp_path / "b.pt")
    assert _bytes(stock_load(tmp_path / "b.pt")) == expected
    if name == "float4_e2m1fn_x2":
        convert(path, tmp_path / "c.safetensors")
        with ptsave.open(tmp_path / "c.safetensors") as archive:
            assert _bytes(archive["t"]) == expected
    else:
        with pytest.raises(ValueError, match=f"cannot hold t \\(dtype {name}\\)"):
            convert(path, tmp_path / "c.safetensors")
    compact(path, tmp_path / "d.pt")
    assert compare(str(path), str(tmp_path / "d.pt")).equal


@pytest.mark.parametrize("name", _UNSAVED)
def test_dtypes_that_torch_does_not_save(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    storage = torch.zeros(24, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, 0, (4, 6), (6, 1))
    with pytest.raises(KeyError, match=f"dtype torch.{name} is not recognized"):
        stock_save([tensor], io.BytesIO())
    with pytest.raises(KeyError, match=f"dtype torch.{name} is not recognized"):
        ptsave.save([tensor], tmp_path / "a.pt")
    assert not [*tmp_path.iterdir()]
