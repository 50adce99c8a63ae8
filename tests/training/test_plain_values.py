"""What `save` accepts a restore loads: harmless values that torch's restricted machine refuses."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import os
import pathlib
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stock_comparison import assert_same_object, stock_load, stock_save
from torch import nn
from torch.serialization import safe_globals

import ptsave
from ptsave import _C
from ptsave.training import restoring

SCALARS = [
    *(np.float64(1.5), np.float32(-0.0), np.float16(2), np.longdouble(1.25), np.float64("nan")),
    *(np.int8(-3), np.uint8(3), np.int16(4), np.int64(1 << 40), np.uint64(1 << 63), np.bool_(True)),
    *(np.complex64(1j), np.complex128(2), np.str_("äbc"), np.str_(""), np.bytes_(b"ab")),
    *(np.datetime64("2020-01-01", "ns"), np.datetime64("NaT"), np.timedelta64(5, ("s", 25))),
]
ARRAYS = [
    *(np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    *(np.arange(3, dtype=">i4"), np.zeros((0, 3)), np.array(5.0), np.array(["a", "bc"])),
    *(np.zeros(3, "M8[ms]"), np.arange(2000)[::2], np.random.get_state()),
]
DTYPES = [np.dtype(code) for code in ("f8", ">f4", "?", "U3", "S2", "M8[ns]", "m8[7D]", "c16")]
UTC = datetime.timezone.utc
OTHERS = [
    *(Path("/a/b"), pathlib.PurePosixPath("x"), pathlib.PureWindowsPath("c:\\x"), Path()),
    *(datetime.datetime(2026, 1, 2, 3, 4, 5, 6, UTC), datetime.date(2026, 1, 2)),
    *(datetime.time(1, 2, 3), datetime.timedelta(1, 2, 3), UTC),
    datetime.timezone(datetime.timedelta(hours=2), "CEST"),
    *(decimal.Decimal("1.50"), decimal.Decimal("NaN"), range(3, 9, 2), slice(1, None), b"", b"x"),
    *(frozenset(["a", 1]), collections.deque([1, 2, 3], 5), collections.deque(["x"])),
    collections.defaultdict(list, {1: [2], 3: []}),
    collections.defaultdict(None, {1: 2}),
    collections.defaultdict(float, {"loss": 0.5}),
    *(collections.Counter("aab"), collections.OrderedDict(a=1), {1, 2}, bytearray(b"xy")),
    *(torch.device("cpu"), torch.bfloat16, torch.Size([1, 2]), torch.strided, 1j, 1 << 200),
    *(int, str, random.getstate()),
]
VALUES = [*SCALARS, *ARRAYS, *DTYPES, *OTHERS]


def through_load_checkpoint(f: Any, value: Any, **options: Any) -> Any:
    ptsave.save_checkpoint(f, model=nn.Linear(2, 2), value=value)
    if isinstance(f, io.BytesIO):
        f.seek(0)
    return ptsave.load_checkpoint(f, model=nn.Linear(2, 2), **options)["value"]


def through_a_checkpointer(folder: Path, value: Any) -> Any:
    with ptsave.AsyncCheckpointer(folder / "steps") as checkpointer:
        checkpointer.save(1, model=nn.Linear(2, 2), value=value)
    return checkpointer.restore(model=nn.Linear(2, 2))["value"]


def through_load_into(folder: Path, value: Any) -> Any:
    ptsave.save({"value": value, "t": torch.ones(1)}, folder / "c.pt")
    target = {"value": None, "t": torch.zeros(1)}
    ptsave.load_into(folder / "c.pt", target)
    assert torch.equal(target["t"], torch.ones(1))  # type: ignore[arg-type]
    return target["value"]


WAYS: dict[str, Callable[[Path, Any], Any]] = {
    "a path": lambda folder, value: through_load_checkpoint(folder / "c.pt", value),
    "memory": lambda folder, value: through_load_checkpoint(io.BytesIO(), value),
    "a URL": lambda folder, value: through_load_checkpoint(f"memory://{folder.name}/c.pt", value),
    "assign": lambda folder, value: through_load_checkpoint(folder / "c.pt", value, assign=True),
    "a checkpointer": through_a_checkpointer,
    "load_into": through_load_into,
}


def assert_same_value(actual: Any, expected: Any) -> None:
    """Compare values of any type, NaN included, by what they are pickled to and by their words."""
    assert type(actual) is type(expected)
    assert repr(actual) == repr(expected)
    assert pickle.dumps(actual, 2) == pickle.dumps(expected, 2)


@pytest.mark.parametrize("way", WAYS)
def test_restores_load_what_saves_accept(tmp_path: Path, way: str) -> None:
    stock_save(VALUES, tmp_path / "stock.pt")
    expected = stock_load(tmp_path / "stock.pt", weights_only=False)
    if way == "a path":  # one by one, to name what is refused
        found = [WAYS[way](tmp_path, value) for value in VALUES]
    else:
        found = WAYS[way](tmp_path, VALUES)
    for mine, torchs in zip(found, expected, strict=True):
        assert_same_value(mine, torchs)


def test_many_of_them_together(tmp_path: Path) -> None:
    shared = np.arange(3)
    value = {"all": VALUES, "twice": [shared, shared], "history": [np.float64(i) for i in range(9)]}
    found = through_load_checkpoint(tmp_path / "c.pt", value)
    assert found["twice"][0] is found["twice"][1]
    assert_same_object(found["history"], value["history"])
    expected = stock_load(tmp_path / "c.pt", weights_only=False)["value"]
    assert list(map(repr, found["all"])) == list(map(repr, expected["all"]))


def test_arrays_can_be_written_to(tmp_path: Path) -> None:
    value = {"large": np.zeros(5000), "small": np.zeros(2)}
    found = through_load_checkpoint(tmp_path / "c.pt", value)
    for array in found.values():
        array[0] = 1
        assert array.max() == 1


def test_they_do_not_make_a_restore_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes still go straight into the parameters."""
    model = nn.Linear(2, 2)
    value = [np.float64(1), Path("x"), datetime.datetime(2026, 1, 1, tzinfo=UTC), np.arange(3)]
    value += [decimal.Decimal(1), range(3), slice(3), frozenset([1]), datetime.timedelta(1)]
    ptsave.save_checkpoint(tmp_path / "c.pt", model=model, value=value)
    monkeypatch.setattr(restoring, "load_source", None)
    fresh = nn.Linear(2, 2)
    ptsave.load_checkpoint(tmp_path / "c.pt", model=fresh)
    assert_same_object(fresh.state_dict(), model.state_dict())


def test_values_beside_tensors_of_another_device(tmp_path: Path) -> None:
    """The entries that are loaded a second time, where they belong, may have such values, too."""
    ptsave.save_checkpoint(
        tmp_path / "c.pt", model=nn.Linear(2, 2), lr=np.float64(2), t=torch.ones(1)
    )
    rest = ptsave.load_checkpoint(tmp_path / "c.pt", model=nn.Linear(2, 2), map_location="meta")
    assert rest["t"].is_meta
    assert_same_value(rest["lr"], np.float64(2))


def test_load_is_as_strict_as_torch(tmp_path: Path) -> None:
    ptsave.save({"lr": np.float64(1), "t": torch.ones(1)}, tmp_path / "c.pt")
    for load in (ptsave.load, stock_load):
        with pytest.raises(pickle.UnpicklingError, match=r"multiarray\.scalar"):
            load(tmp_path / "c.pt")
    with ptsave.open(tmp_path / "c.pt") as archive:  # as a restore does
        assert_same_value(archive["lr"], np.float64(1))


def test_what_the_user_allows_is_torchs(tmp_path: Path) -> None:
    ptsave.save_checkpoint(tmp_path / "c.pt", value=np.float64(1), args=argparse.Namespace(a=1))
    with safe_globals([argparse.Namespace]):
        rest = ptsave.load_checkpoint(tmp_path / "c.pt")
    assert rest == {"value": np.float64(1), "args": argparse.Namespace(a=1)}
    scalar: Any = np.float64(1).__reduce__()[0]
    with safe_globals([scalar, np.dtype, type(np.dtype("f8")), argparse.Namespace]):
        assert ptsave.load_checkpoint(tmp_path / "c.pt") == rest


# ---------------------------------------------------------------------------------- hostile pickles


def archive_of(data: bytes) -> io.BytesIO:
    """Return an archive with this pickle, and the storage of one float."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", struct.pack("<f", 1))
    stream.seek(0)
    return stream


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def encoded(value: str) -> bytes:
    return call(name("_codecs", "encode"), text(value), text("latin1"))


MULTIARRAY = "numpy._core.multiarray"
SCALAR, RECONSTRUCT = name(MULTIARRAY, "scalar"), name(MULTIARRAY, "_reconstruct")
DTYPE, NDARRAY = name("numpy", "dtype"), name("numpy", "ndarray")
F8 = call(DTYPE, text("f8"), b"\x89", b"\x88")
ARRAY = call(RECONSTRUCT, NDARRAY, number(0) + b"\x85", encoded("b"))
NONE3 = b"NNN"


def state_of_dtype(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tb"


def state_of_array(shape: bytes, dtype: bytes, data: bytes, version: int = 1) -> bytes:
    return b"(" + number(version) + shape + dtype + b"\x89" + data + b"tb"


HOSTILE = {
    "system": call(name("os", "system"), text("false")),
    "eval": call(name("builtins", "eval"), text("1")),
    "getattr": call(name("builtins", "getattr"), text("a"), text("upper")),
    "load of a pickle": call(name("numpy", "load"), text("x")),
    "objects": call(DTYPE, text("O"), b"\x89", b"\x88"),
    "objects by name": call(DTYPE, text("object"), b"\x89", b"\x88"),
    "fields": call(DTYPE, text("f4,f4"), b"\x89", b"\x88"),
    "void": call(DTYPE, text("V8"), b"\x89", b"\x88"),
    "dtype of a list": call(DTYPE, b"]", b"\x89", b"\x88"),
    "dtype of a dict": call(DTYPE, b"}", b"\x89", b"\x88"),
    "fields in a state": F8
    + state_of_dtype(
        *(number(3), text("<"), b"N", b"(" + text("a") + b"t"),
        *(b"}" + text("a") + F8 + number(0) + b"\x86s", number(-1), number(-1), number(0)),
    ),
    "another size in a state": call(DTYPE, text("U3"), b"\x89", b"\x88")
    + state_of_dtype(number(3), text("<"), NONE3, number(1 << 30), number(4), number(8)),
    "flags in a state": F8
    + state_of_dtype(number(3), text("<"), NONE3, number(-1), number(-1), number(63)),
    "a state of no dtype": F8 + b"}b",
    "a unit that is none": call(DTYPE, text("M8"), b"\x89", b"\x88")
    + state_of_dtype(
        *(number(4), text("<"), NONE3, number(-1), number(-1), number(0)),
        b"(N(" + encoded("xx") + number(1) + number(1) + number(1) + b"tt",
    ),
    "a scalar that is cut short": call(SCALAR, F8, encoded("abc")),
    "a scalar of text": call(SCALAR, F8, text("12345678")),
    "a scalar of no dtype": call(SCALAR, text("f8"), encoded("12345678")),
    "an array of a size": call(RECONSTRUCT, NDARRAY, number(1 << 30) + b"\x85", encoded("b")),
    "an array of objects": call(RECONSTRUCT, NDARRAY, number(0) + b"\x85", encoded("O")),
    "an array of a class": call(RECONSTRUCT, name("torch", "Tensor"), b")", encoded("b")),
    "a call of the class": call(NDARRAY, number(1 << 30)),
    "more elements than bytes": ARRAY
    + state_of_array(number(1000) + b"\x85", F8, encoded("12345678")),
    "fewer elements than bytes": ARRAY + state_of_array(number(1) + b"\x85", F8, encoded("x" * 16)),
    "a negative size": ARRAY + state_of_array(number(-1) + b"\x85", F8, encoded("12345678")),
    "a list as data": ARRAY + state_of_array(number(1) + b"\x85", F8, b"]" + number(1) + b"a"),
    "a second state": ARRAY
    + state_of_array(number(1) + b"\x85", F8, encoded("12345678"))
    + state_of_array(number(2) + b"\x85", F8, encoded("x" * 16)),
    "attributes of an array": ARRAY + b"}" + text("x") + number(1) + b"sb",
    "a path of a number": call(name("pathlib", "PosixPath"), number(1)),
    "a path of this machine's other kind": call(name("pathlib", "WindowsPath"), text("x")),
    "another function of pathlib": call(name("pathlib", "Path.home")),
    "bytes of a size": call(name("__builtin__", "bytes"), number(1 << 30)),
    "a date of a list": call(name("datetime", "date"), b"]"),
    "a date that is none": call(name("datetime", "date"), number(1), number(13), number(1)),
    "a decimal of a tuple": call(name("decimal", "Decimal"), b")"),
    "a decimal that is none": call(name("decimal", "Decimal"), text("x")),
    "a range of texts": call(name("__builtin__", "xrange"), text("x")),
    "a range of step 0": call(name("__builtin__", "xrange"), number(0), number(1), number(0)),
    "a factory that is a function": call(
        name("collections", "defaultdict"), name("datetime", "date")
    ),
    "a factory that is a storage": call(
        name("collections", "defaultdict"), name("torch", "FloatStorage")
    ),
    "a deque of items": call(name("collections", "deque"), b"]" + number(1) + b"a"),
    "a deque of a negative length": call(name("collections", "deque"), b")", number(-1)),
    "a call of a type": call(name("__builtin__", "list"), b")"),
    "a new object of a type": name("__builtin__", "int") + b")\x81",
    "a new array": NDARRAY + b")\x81",
    "a function as a value": DTYPE,
    "a function in a list": b"]" + SCALAR + b"a",
    "a function as a key": b"}" + RECONSTRUCT + number(1) + b"s",
    "attributes of a function": DTYPE + b"}b",
    "append to an array": ARRAY + number(1) + b"a",
    "set an item of an array": ARRAY + number(0) + number(1) + b"s",
    "append to a path": call(name("pathlib", "PosixPath"), text("x")) + number(1) + b"a",
    "through torch's function": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        *(DTYPE, NDARRAY, text("f8") + b"\x85", b"}"),
    ),
    "too many arguments": call(name("collections", "deque"), b")", b"N", b"N"),
    "no arguments": call(SCALAR),
    "arguments that are no tuple": SCALAR + b"]R",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickles_are_refused(kind: str) -> None:
    stream = archive_of(b"\x80\x02}" + text("value") + HOSTILE[kind] + b"s.")
    before = (np.dtype("f8"), np.dtype("f8").fields, np.arange(2).tolist())
    with pytest.raises(pickle.UnpicklingError):
        ptsave.load_checkpoint(stream)
    assert (np.dtype("f8"), np.dtype("f8").fields, np.arange(2).tolist()) == before


def test_a_tensor_over_an_array_keeps_its_memory() -> None:
    """The array that a tensor looks at cannot be given other memory."""
    array = ARRAY + b"q\1" + state_of_array(number(1) + b"\x85", F8, encoded("12345678"))
    rebuild = name("torch._utils", "_rebuild_device_tensor_from_numpy")
    tensor = call(rebuild, b"h\1", name("torch", "float64"), text("cpu"), b"\x89")
    again = b"h\1" + state_of_array(number(2) + b"\x85", F8, encoded("x" * 16))
    fine = archive_of(b"\x80\x02]" + array + b"a" + tensor + b"a.")
    target: list[Any] = []
    with pytest.raises(TypeError, match="not a dict"):  # so it was unpickled
        ptsave.load_checkpoint(fine, x=target)
    with pytest.raises(pickle.UnpicklingError):
        ptsave.load_checkpoint(
            archive_of(b"\x80\x02]" + array + b"a" + tensor + b"a" + again + b"a.")
        )


def test_a_dtype_of_a_file_is_its_own() -> None:
    """A state with another byte order changes no dtype of this process."""
    big = F8 + state_of_dtype(number(3), text(">"), NONE3, number(-1), number(-1), number(0))
    rest = ptsave.load_checkpoint(archive_of(b"\x80\x02}" + text("d") + big + b"s."))
    assert rest["d"] == np.dtype(">f8")
    assert np.dtype("f8").isnative


def test_random_steps_never_crash() -> None:
    """Pickles put together from such steps end in a value or in an error of unpickling."""
    draw = random.Random(0)
    parts = [*HOSTILE.values(), F8, ARRAY, encoded("12345678"), number(1), b"N", b"]", b"}", b")"]
    operators = [b"b", b"R", b"a", b"s", b"\x81", b"\x85", b"\x86", b"0", b"q\1", b"h\1"]
    for _ in range(600):
        steps = [draw.choice(parts + operators * 3) for _ in range(draw.randrange(1, 8))]
        data = b"\x80\x02" + b"".join(steps) + b"."
        try:
            ptsave.load_checkpoint(archive_of(data))
        except (pickle.UnpicklingError, RuntimeError, TypeError):
            continue


def test_the_engine_asks_torch_without_such_a_machine() -> None:
    persistent_load = partial(os.getenv, "x")
    data = pickle.dumps(np.float64(1), 2)
    with pytest.raises(pickle.UnpicklingError):
        _C.unpickle_weights_only(data, persistent_load, encoding="utf-8", storages=None)
