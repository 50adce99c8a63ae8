"""Archives of machines with the other byte order: every operation gives the values torch gives."""

from __future__ import annotations

import io
import mmap
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip
from _system import run_python
from command_line import succeed
from stock_comparison import (
    assert_same_object,
    saved_bytes,
    stock_load,
    stock_save,
    zip_records,
    zipped,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import LoadEndianness, set_default_load_endianness, skip_data

import ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.pickle_globals import required_globals
from ptsave.inspection.verification import verify_file

# Of torch's own code, about quantized tensors.
pytestmark = pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage is deprecated)")

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
        "import sys, ptsave\nfrom ptsave.cli.main import main\n"
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
