"""Arguments, environment variables and torch's options: the same effects, errors and warnings."""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import inspect
import io
import itertools
import linecache
import os
import pickle
import shutil
import struct
import sys
import tarfile
import warnings
import zipfile
import zoneinfo
from collections.abc import Callable, Iterator
from functools import partial
from mmap import MAP_PRIVATE, MAP_SHARED
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from _corruption import flip
from _system import run_python
from stock_comparison import (
    TORCH_CHECKS_RECORD_SIZES,
    Calls,
    assert_interchangeable,
    assert_same_bytes,
    assert_same_failure,
    assert_same_load,
    assert_same_load_failure,
    assert_same_object,
    assert_same_outcome,
    failure_of,
    saved_bytes,
    stock_load,
    stock_save,
    typed_storage,
    zip_records,
    zipped,
)
from torch import nn
from torch.serialization import safe_globals, skip_data
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

import ptsave


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with a tie, a view, an empty tensor and something of some size."""
    weight = torch.arange(600_000.0)
    obj = {
        "weight": weight,
        "tied": weight,
        "view": weight[5:25].view(4, 5),
        "bias": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "epoch": 3,
    }
    target = tmp_path / "file.pt"
    stock_save(obj, target)
    return target


def warnings_of(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return what a call warns about; what it raises does not matter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):
            call()
    return caught


def assert_same_warnings(
    ours: Callable[[], object], stock: Callable[[], object], *, at_caller: bool
) -> list[str]:
    """Compare categories and texts; with `at_caller`, ours must point at the caller's line."""
    expected, actual = warnings_of(stock), warnings_of(ours)
    texts = [(each.category, str(each.message)) for each in expected]
    assert [(each.category, str(each.message)) for each in actual] == texts
    for mine, theirs in zip(actual, expected, strict=True):
        if at_caller and theirs.filename == __file__:
            assert mine.filename == __file__, f"points at {mine.filename}: {mine.message}"
    return [text for _, text in texts]


# ------------------------------------------------------------------------- which unpickler, and why


class Unknown:
    """A class that is in no list of safe globals."""


@pytest.fixture
def unsafe_path(tmp_path: Path) -> Path:
    target = tmp_path / "unsafe.pt"
    stock_save({"unknown": Unknown(), "tensor": torch.ones(2)}, target)
    return target


FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.mark.parametrize(
    ("weights_only", "module"), list(itertools.product([None, True, False], [None, pickle]))
)
@pytest.mark.parametrize(
    "environment",
    [
        {},
        *(
            {name: value}
            for name in (FORCE, FORCE_NOT)
            for value in ("1", "YES", "true", "0", "on")
        ),
        {FORCE: "1", FORCE_NOT: "y"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_weights_only(
    weights_only: bool | None,
    module: Any,
    environment: dict[str, str],
    unsafe_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    safe_path = unsafe_path.with_name("safe.pt")
    stock_save({"tensor": torch.ones(2)}, safe_path)
    for source in (unsafe_path, safe_path):

        def load(engine: Callable[..., Any], source: Path = source) -> Any:
            return engine(source, pickle_module=module, weights_only=weights_only)

        ours, stock = partial(load, ptsave.load), partial(load, stock_load)
        assert_same_outcome(ours, stock)
        assert_same_warnings(ours, stock, at_caller=True)


def test_environment_variable_warns_at_the_callers_line(
    unsafe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE_NOT, "1")
    with ptsave.installed():
        for call in (
            lambda: ptsave.load(unsafe_path),
            lambda: ptsave.load(io.BytesIO(b"garbage")),
            lambda: torch.load(unsafe_path),
        ):
            (warning,) = warnings_of(call)
            assert "forcing weights_only=False" in str(warning.message)
            assert warning.filename == __file__


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "bytes", "ascii"])
@pytest.mark.filterwarnings("ignore:pickle_load_args only works")
def test_arguments_of_the_unpickler(weights_only: bool, encoding: str, path: Path) -> None:
    options: dict[str, Any] = {"weights_only": weights_only, "encoding": encoding}
    assert_same_object(ptsave.load(path, **options), stock_load(path, **options))
    assert_same_warnings(
        lambda: ptsave.load(path, **options), lambda: stock_load(path, **options), at_caller=False
    )
    options = {"weights_only": weights_only, "errors": "ignore"}
    try:
        stock_load(path, **options)
    except TypeError:
        with pytest.raises(TypeError):
            ptsave.load(path, **options)
    else:
        ptsave.load(path, **options)
    with pytest.raises(TypeError):
        ptsave.load(path, weights_only=weights_only, no_such_argument=1)


# ---------------------------------------------------------------------------------- safe globals


def _same_refusal(obj: Any, **options: Any) -> str:
    data = saved_bytes(stock_save, obj, **options)
    expected = failure_of(lambda: stock_load(io.BytesIO(data), weights_only=True))
    actual = failure_of(lambda: ptsave.load(io.BytesIO(data), weights_only=True))
    assert type(actual) is type(expected) is pickle.UnpicklingError
    assert str(actual) == str(expected)
    assert actual.__suppress_context__  # as from torch: one error, not a chain of two
    return str(actual)


def test_refusals_have_torchs_words() -> None:
    assert "GLOBAL print was not an allowed" in _same_refusal(Calls(print, "Hello"))
    assert "Unknown" in _same_refusal({"u": Unknown()})
    assert "posix is blocked" in _same_refusal(os.execv)
    assert "TwoTensor" in _same_refusal(TwoTensor(torch.ones(1), torch.ones(1)))
    with safe_globals([os.execv, Calls]):
        assert "posix is blocked" in _same_refusal(os.execv)
    zone = zoneinfo.ZoneInfo("UTC")
    unpickle = zoneinfo.ZoneInfo._unpickle  # type: ignore[attr-defined]
    with safe_globals([getattr, zoneinfo.ZoneInfo]):
        assert "Trying to call reduce" in _same_refusal(zone)
    with safe_globals([getattr, zoneinfo.ZoneInfo, unpickle]):
        assert ptsave.load(io.BytesIO(saved_bytes(ptsave.save, zone))) is zone


def test_protocols_that_the_restricted_unpickler_does_not_know() -> None:
    for protocol in (3, 4, 5):
        data = saved_bytes(stock_save, {"t": torch.ones(2), 3: b"3"}, pickle_protocol=protocol)

        def load(engine: Callable[..., Any], data: bytes = data) -> Any:
            return engine(io.BytesIO(data), weights_only=True)

        ours, stock = partial(load, ptsave.load), partial(load, stock_load)
        texts = assert_same_warnings(ours, stock, at_caller=False)
        assert f"Detected pickle protocol {protocol}" in texts[0]
        with pytest.warns(UserWarning, match="Detected pickle protocol"):
            assert_same_failure(ours, stock)


def test_names_of_safe_globals() -> None:
    """A global may be allowed under the name that a file has for it."""
    data = saved_bytes(stock_save, [Unknown()]).replace(b"Unknown", b"Renamed")
    renamed = (Unknown, f"{__name__}.Renamed")
    for load in (stock_load, ptsave.load):
        with safe_globals([renamed]):
            assert type(load(io.BytesIO(_resealed(data)))[0]) is Unknown
    for bad in [(Unknown,), (Unknown, 3)]:
        with safe_globals([bad]):  # type: ignore[list-item]
            assert_same_load_failure(_resealed(data))


def test_adding_and_clearing_safe_globals(unsafe_path: Path) -> None:
    """The list is looked at by every load, not once."""
    serialization = torch.serialization
    for _ in range(2):
        with pytest.raises(pickle.UnpicklingError):
            ptsave.load(unsafe_path)
        serialization.add_safe_globals([Unknown])
        assert type(ptsave.load(unsafe_path)["unknown"]) is Unknown
        assert Unknown in serialization.get_safe_globals()
        serialization.clear_safe_globals()
    with safe_globals([Unknown]):
        ptsave.load(unsafe_path)
    with pytest.raises(pickle.UnpicklingError):
        ptsave.load(unsafe_path)


class Built:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Built, (self.number,), {"more": "state"}


def test_state_of_safe_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved_bytes(ptsave.save, Built(2))
    states: list[Any] = []
    with safe_globals([Built]):
        loaded = ptsave.load(io.BytesIO(data))
        assert vars(loaded) == {"number": 2, "more": "state"}
        with monkeypatch.context() as patch:
            patch.setattr(
                Built, "__setstate__", lambda self, state: states.append(state), raising=False
            )
            assert vars(ptsave.load(io.BytesIO(data))) == {"number": 2}
        assert states == [{"more": "state"}]
        with monkeypatch.context() as patch:
            patch.setattr(Built, "__setstate__", None, raising=False)
            assert_same_load_failure(data)


def test_replaced_list_of_allowed_globals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's list can be patched, and is asked for in every load."""
    ptsave.load(path)
    monkeypatch.setattr(torch._weights_only_unpickler, "_get_allowed_globals", dict)
    assert_same_load_failure(path)


def test_globals_of_a_file(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3)
    data = assert_same_bytes(TwoTensor(tensor, tensor), tmp_path)
    found = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    assert found == ["torch.testing._internal.two_tensor.TwoTensor"]


def test_extension_registry(tmp_path: Path) -> None:
    copyreg.add_extension(__name__, "Unknown", 77)
    try:
        assert_interchangeable([Unknown(), torch.ones(2)], tmp_path, weights_only=[False])
    finally:
        copyreg.remove_extension(__name__, "Unknown", 77)


@pytest.mark.skipif(
    "``torch._dynamo`` must be" not in inspect.getsource(torch._weights_only_unpickler),
    reason="this torch has no such classes",
)
def test_classes_that_must_be_imported(tmp_path: Path) -> None:
    """In a process that has not: torch says what to import."""
    jagged = torch.nested.nested_tensor([[1, 2, 3], [4, 5]], layout=torch.jagged)
    ptsave.save(jagged, tmp_path / "jagged.pt")
    script = "import sys, torch, ptsave; ptsave.load(sys.argv[1], weights_only=True)"
    result = run_python(script, tmp_path / "jagged.pt", status=1)
    wanted = (
        "_pickle.UnpicklingError: Weights only load failed. ``torch.nested`` and ``torch._dynamo``"
        " must be imported to load nested jagged tensors (NJTs)"
    )
    assert wanted in result.stderr


# ----------------------------------------------------------------------------------- map_location


def _resealed(data: bytes) -> bytes:
    """Write the records of a changed archive again, so that their checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        content = {}
        for name in names:
            with archive.open(name) as record:
                record._expected_crc = None  # type: ignore[attr-defined]
                content[name.partition("/")[2]] = record.read()
    return zipped(content)


MAP_LOCATIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "cpu": lambda: "cpu",
    "cpu device": lambda: torch.device("cpu"),
    "cpu device with index": lambda: torch.device("cpu:0"),
    "meta": lambda: "meta",
    "meta device": lambda: torch.device("meta"),
    "meta device with index": lambda: torch.device("meta:0"),
    "dict": lambda: {"cpu": "cpu"},
    "dict to meta": lambda: {"cpu": "meta"},
    "dict without the location": lambda: {"cuda:0": "cuda:1"},
    "dict of devices": lambda: {"cpu": torch.device("cpu")},
    "dict to nonsense": lambda: {"cpu": "nonsense"},
    "dict to a number": lambda: {"cpu": 5},
    "empty dict": dict,
    "function": lambda: lambda storage, location: storage,
    "function that leaves it": lambda: lambda storage, location: None,
    "function that copies": lambda: lambda storage, location: storage.clone(),
    "function to meta": lambda: (
        lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta")
    ),
    "function with a wrong result": lambda: lambda storage, location: 5,
    "function that makes a tensor": lambda: lambda storage, location: torch.ones(6),
    "function with wrong arguments": lambda: lambda storage: storage,
    "function that raises": lambda: lambda storage, location: {}[location],
    "bytes": lambda: b"cpu",
    "unknown device": lambda: "nowhere",
    "cuda": lambda: "cuda",
    "cuda with index": lambda: "cuda:99",
    "xpu device": lambda: torch.device("xpu:0"),
    "number": lambda: 3,
    "list": list,
    "true": lambda: True,
    "empty": lambda: "",
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", MAP_LOCATIONS)
def test_map_location(name: str, mmap: bool, weights_only: bool, path: Path) -> None:
    assert_same_load(
        path,
        map_location=MAP_LOCATIONS[name](),
        weights_only=weights_only,
        mmap=mmap,
        ignore="0x[0-9a-f]+",
    )


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [False, True])
def test_calls_of_a_map_location_function(mmap: bool, weights_only: bool, path: Path) -> None:
    """Once for each storage, in the file's order, with the bytes in place."""

    def calls(engine: Callable[..., Any]) -> list[Any]:
        seen: list[Any] = []

        def map_location(storage: Any, location: str) -> Any:
            values = torch.empty(0, dtype=torch.uint8).set_(storage)
            seen.append((type(storage), storage.nbytes(), location, int(values.long().sum())))
            return storage

        engine(path, map_location=map_location, weights_only=weights_only, mmap=mmap)
        return seen

    expected = calls(stock_load)
    assert len(expected) >= 3
    assert calls(ptsave.load) == expected


def test_map_location_is_known_to_what_is_called_while_loading(tmp_path: Path) -> None:
    """Wrapper subclasses and device tensors rebuild themselves with it."""
    path = tmp_path / "file.pt"
    seen: list[Any] = []

    def note() -> None:
        seen.append(torch.serialization._serialization_tls.map_location)

    globals()["_note"] = _note = note
    _note.__module__, _note.__qualname__, _note.__name__ = __name__, "_note", "_note"
    ptsave.save([Calls(_note), torch.ones(2)], path)
    for map_location in ("meta", None, {"cpu": "cpu"}):
        ptsave.load(path, map_location=map_location, weights_only=False)
    assert seen == ["meta", None, {"cpu": "cpu"}]
    assert torch.serialization._serialization_tls.map_location is None


def test_map_location_is_forgotten_after_an_error(path: Path) -> None:
    """Or else copies of wrapper subclasses made later in this thread would be mapped too."""
    for weights_only in (True, False):
        with pytest.raises(RuntimeError, match="nowhere"):
            ptsave.load(path, map_location="nowhere", weights_only=weights_only)
        assert torch.serialization._serialization_tls.map_location is None


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta")], ids=str)
@pytest.mark.parametrize("as_path", [True, False])
def test_meta_needs_no_bytes(map_location: Any, as_path: bool, path: Path) -> None:
    """Only shapes are wanted, so the data may even be damaged."""
    data = bytearray(path.read_bytes())
    expected = stock_load(path, map_location=map_location)
    reader: Any = torch._C.PyTorchFileReader(str(path))  # the annotations of torch lack the method
    begin = reader.get_record_offset("data/0")
    data[begin : begin + 1000] = b"\xff" * 1000
    path.write_bytes(data)
    source: Any = path if as_path else io.BytesIO(data)
    loaded = ptsave.load(source, map_location=map_location)
    assert_same_object(loaded, expected)
    assert loaded["view"].shape == (4, 5)


def test_wrapper_subclass_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    ptsave.save({"t": TwoTensor(torch.randn(2, 3), torch.randn(2, 3))}, path)
    with safe_globals([TwoTensor]):
        for map_location in ("cpu", None):
            assert_same_load(path, map_location=map_location)


# ------------------------------------------------------------------------------------------- mmap


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("calculate", [True, False])
def test_mmap(kind: Callable[[Path], Any], weights_only: bool, calculate: bool, path: Path) -> None:
    config.load.calculate_storage_offsets = calculate
    options: dict[str, Any] = {"mmap": True, "weights_only": weights_only}
    loaded = ptsave.load(kind(path), **options)
    expected = stock_load(kind(path), **options)
    path.unlink()
    assert_same_object(loaded, expected)
    loaded["weight"][0] = 99  # private: in memory only
    assert loaded["tied"][0] == 99


def test_mmap_by_default(path: Path) -> None:
    config.load.mmap = True
    loaded = ptsave.load(path)
    assert_same_object(loaded, stock_load(path))
    assert not loaded["weight"].untyped_storage().resizable() or _is_mapped(path)
    assert _is_mapped(path)
    assert_same_load_failure(path.read_bytes())


def _is_mapped(path: Path) -> bool:
    return str(path.resolve()) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_private_and_shared_mappings(path: Path) -> None:
    before = path.read_bytes()
    ptsave.load(path, mmap=True)["weight"][0] = 5
    assert path.read_bytes() == before
    with torch.serialization.set_default_mmap_options(MAP_SHARED):
        ptsave.load(path, mmap=True)["weight"][0] = 6
        assert ptsave.load(path, mmap=True)["weight"][0] == 6
    assert path.read_bytes() != before
    assert torch.serialization.get_default_mmap_options() == MAP_PRIVATE
    assert stock_load(path)["tied"][0] == 6
    torch.serialization.set_default_mmap_options(MAP_SHARED)
    ptsave.load(path, mmap=True)["weight"][0] = 7
    torch.serialization.set_default_mmap_options(MAP_PRIVATE)
    assert stock_load(path)["tied"][0] == 7


def test_mmap_of_an_open_named_file(path: Path) -> None:
    """The file was written through an object whose buffer must have reached the disk."""
    import tempfile

    with tempfile.NamedTemporaryFile() as stream:
        ptsave.save({"t": torch.arange(100)}, stream)
        assert torch.equal(ptsave.load(stream.name, mmap=True)["t"], torch.arange(100))


def test_mmap_with_assign(path: Path, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    ptsave.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        other = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    other.load_state_dict(ptsave.load(tmp_path / "model.pt", mmap=True), assign=True)
    inputs = torch.randn(4, 4)
    assert torch.equal(other(inputs), model(inputs))


def test_wrong_uses_of_mmap(path: Path, tmp_path: Path) -> None:
    legacy, garbage = tmp_path / "legacy.pt", tmp_path / "garbage.pt"
    stock_save([1], legacy, _use_new_zipfile_serialization=False)
    garbage.write_bytes(b"garbage")
    sources = (path.read_bytes(), str(legacy), legacy, str(garbage), tmp_path / "none.pt")
    for source in sources:
        assert_same_load_failure(source, mmap=True)
    with path.open("rb") as stream, pytest.raises(ValueError, match="f must be a file path"):
        ptsave.load(stream, mmap=True)


def test_mmap_verifies_nothing(path: Path) -> None:
    """Nothing is read ahead, so nothing can be: documented."""
    _damage(path)
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load(path)
    assert_same_object(ptsave.load(path, mmap=True), stock_load(path))
    assert_same_object(ptsave.load(path, verify=False), stock_load(path))


def _damage(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


# ------------------------------------------------------------------- options of what is written


@pytest.mark.parametrize("alignment", [1, 2, 3, 8, 16, 63, 64, 128, 512, 4096, 16384, 65536])
def test_storage_alignment(alignment: int, tmp_path: Path) -> None:
    config.save.storage_alignment = alignment
    obj = [torch.arange(n) for n in (0, 1, 7, 8, 9, 100, 5000)]
    assert_interchangeable(obj, tmp_path)
    records = zip_records((tmp_path / "ptsave" / "file.pt").read_bytes())
    assert records[".storage_alignment"] == str(alignment).encode()


@pytest.mark.parametrize("compute", [True, False])
def test_checksums(compute: bool, tmp_path: Path) -> None:
    """Without them other zip readers complain, and ptsave says that it cannot verify."""
    torch.serialization.set_crc32_options(compute)
    obj = {"t": torch.arange(1000), "s": "text"}
    data = assert_same_bytes(obj, tmp_path)
    assert torch.serialization.get_crc32_options() is compute
    path = tmp_path / "ptsave" / "file.pt"
    if compute:
        assert zipfile.ZipFile(path).testzip() is None
        assert_same_object(ptsave.load(path), obj)
        return
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        zipfile.ZipFile(path).extractall(tmp_path / "out")
    for source in (path, io.BytesIO(data)):
        with pytest.warns(ptsave.CheckpointWarning) as caught:
            assert_same_object(ptsave.load(source), obj)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    assert_same_object(ptsave.load(path, verify=False), obj)
    assert_same_object(ptsave.load(path, mmap=True), obj)


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_byte_order_record(disable: bool, protocol: int, tmp_path: Path) -> None:
    assert_interchangeable(
        {"t": torch.arange(5)},
        tmp_path,
        weights_only=[protocol != 2 and False],
        _disable_byteorder_record=disable,
        pickle_protocol=protocol,
    )


def test_positional_arguments(tmp_path: Path) -> None:
    obj = {"t": torch.arange(5)}
    arguments = (pickle, 2, True, True)
    ours, theirs = io.BytesIO(), io.BytesIO()
    ptsave.save(obj, ours, *arguments)
    stock_save(obj, theirs, *arguments)
    assert ours.getvalue() == theirs.getvalue()
    ours.seek(0)
    assert_same_object(ptsave.load(ours, "cpu", None), obj)


def test_pinned_memory_option_without_an_accelerator(tmp_path: Path) -> None:
    config.save.use_pinned_memory_for_d2h = True
    assert_interchangeable([torch.arange(5)], tmp_path)


# ------------------------------------------------------------------------- files of other writers


def _text_of_python_2(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


PYTHON_2_TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n("
    b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x03tQ"
    b"K\x00K\x03\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
)


@pytest.mark.parametrize("encoding", [None, "utf-8", "latin1", "bytes", "ascii"])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("text", [b"plain", b"\xc5\xbc\xc3\xb3", b"\xff\xfe"])
@pytest.mark.filterwarnings("ignore:pickle_load_args only works")
def test_archives_of_python_2(encoding: str | None, weights_only: bool, text: bytes) -> None:
    """Texts are bytes in such pickles, even the words that torch itself looks at."""
    pickled = b"\x80\x02](" + _text_of_python_2(text) + PYTHON_2_TENSOR + b"e."
    data = zipped({"data.pkl": pickled, "data/0": struct.pack("<3f", 1, 2, 3), "version": b"3\n"})
    options: dict[str, Any] = {"weights_only": weights_only}
    if encoding is not None:
        options["encoding"] = encoding
    assert_same_load(data, **options)


def test_archive_of_another_zip_writer(path: Path, tmp_path: Path) -> None:
    """No padding, no format version, records in another order, compressed or not."""
    records = zip_records(path.read_bytes())
    expected = stock_load(path)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        for order in (list(records), sorted(records), sorted(records, reverse=True)):
            data = zipped({name: records[name] for name in order}, compression)
            other = tmp_path / "other.pt"
            other.write_bytes(data)
            assert_same_object(ptsave.load(io.BytesIO(data)), expected)
            assert_same_object(ptsave.load(other), expected)


def test_archive_with_more_records_than_torch_writes(path: Path) -> None:
    records = zip_records(path.read_bytes())
    more = {**records, "extra/notes.txt": b"text", "data/nine": b"9", "data/99": b"unused"}
    assert_same_object(ptsave.load(io.BytesIO(zipped(more))), stock_load(path))


@pytest.mark.parametrize(
    "missing", ["byteorder", ".format_version", ".storage_alignment", "version"]
)
def test_archive_without_a_record(missing: str, path: Path) -> None:
    records = zip_records(path.read_bytes())
    del records[missing]
    assert_same_load(zipped(records))


@pytest.mark.parametrize("missing", ["data.pkl", "data/0"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_archive_without_a_needed_record(missing: str, weights_only: bool, path: Path) -> None:
    records = zip_records(path.read_bytes())
    del records[missing]
    assert_same_load_failure(zipped(records), weights_only=weights_only)


@pytest.mark.parametrize("nbytes", [0, 11, 13, 4000])
def test_record_of_another_size_than_its_storage(nbytes: int) -> None:
    """Reading past it, or trusting the pickle's size, were vulnerabilities of torch."""
    records = zip_records(saved_bytes(stock_save, torch.arange(3, dtype=torch.float32)))
    data = zipped({**records, "data/0": b"\x01" * nbytes})
    with pytest.raises(RuntimeError, match=f"record size \\({nbytes} bytes\\) does not match"):
        ptsave.load(io.BytesIO(data))
    if not TORCH_CHECKS_RECORD_SIZES:  # torch reads past the record, or leaves memory unfilled
        return
    assert_same_load_failure(data, ignore=r"record (name|size).*")


def test_files_of_the_writer_class(tmp_path: Path) -> None:
    """Other programs use torch's archive writer directly."""
    expected = [torch.arange(100), torch.ones(3)]
    records = zip_records(saved_bytes(stock_save, expected))
    path = tmp_path / "file.pt"
    with torch.serialization._open_zipfile_writer(str(path)) as writer:
        for name in ("data/1", "data/0", "data.pkl"):
            writer.write_record(name, records[name], len(records[name]))
    assert_same_object(ptsave.load(path), expected)


def test_files_with_reserved_space(tmp_path: Path) -> None:
    """``write_record_metadata`` leaves room for bytes that come later."""
    obj = nn.Linear(3, 5).state_dict()
    records = zip_records(saved_bytes(stock_save, obj))
    targets: list[Any] = [str(tmp_path / "file.pt"), io.BytesIO()]
    for target in targets:
        with torch.serialization._open_zipfile_writer(target) as writer:
            writer.write_record("data.pkl", records["data.pkl"], len(records["data.pkl"]))
            writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for name in ("data/0", "data/1"):
                writer.write_record_metadata(name, len(records[name]))
        if isinstance(target, io.BytesIO):
            target.seek(0)
        loaded = ptsave.load(target)
        assert not loaded["weight"].any()
        assert not loaded["bias"].any()


def test_torchs_reader_reads_our_files(path: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.pt"
    ptsave.save(stock_load(path), ours)
    for source in (str(ours), io.BytesIO(ours.read_bytes())):
        with torch.serialization._open_zipfile_reader(source) as reader:
            assert reader.get_record(".format_version") == b"1"
            assert reader.has_record("byteorder")
            assert len(reader.get_record("data/0")) == 2_400_000
            begin = reader.get_record_offset("data/1")
    assert ours.read_bytes()[begin : begin + 6] == b"\x80\x3f" * 3


# ----------------------------------------------------------------------- formats before the archive


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_legacy_format(weights_only: bool, kind: str, tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    obj = {"w": weight, "v": weight[3:9], "s": typed_storage(weight), "n": 1}
    data = assert_same_bytes(obj, tmp_path, _use_new_zipfile_serialization=False)
    path = tmp_path / "ptsave" / "file.pt"
    with path.open("rb") as stream:
        sources = {"path": path, "file": stream, "memory": io.BytesIO(data)}
        loaded = ptsave.load(sources[kind], weights_only=weights_only)
    assert_same_object(loaded, stock_load(io.BytesIO(data)))


@pytest.mark.parametrize("in_memory", [True, False])
def test_sequence_of_legacy_checkpoints(in_memory: bool, tmp_path: Path) -> None:
    """The position afterwards is where the next one begins."""
    objects = [torch.randn(5, 5), {"t": torch.arange(3)}, "text"]
    with io.BytesIO() if in_memory else (tmp_path / "file").open("w+b") as stream:
        for obj in objects:
            pickle.dump(41, stream)
            ptsave.save(obj, stream, _use_new_zipfile_serialization=False)
        stream.seek(0)
        for obj in objects:
            assert pickle.load(stream) == 41
            assert_same_object(ptsave.load(stream), obj)


def test_tensor_that_looks_like_an_archive(tmp_path: Path) -> None:
    """The end mark of a zip file inside of a legacy file."""
    tensor = torch.tensor([*b"PK\x05\x06", *bytes(100)], dtype=torch.uint8)
    path = tmp_path / "file.pt"
    ptsave.save(tensor, path, _use_new_zipfile_serialization=False)
    assert zipfile.is_zipfile(path)
    assert torch.equal(ptsave.load(path), tensor)


def test_legacy_file_of_a_cuda_tensor() -> None:
    with pytest.MonkeyPatch.context() as patch:
        registry = [(0, lambda storage: "cuda:0", lambda storage, location: None)]
        patch.setattr(torch.serialization, "_package_registry", registry)
        data = saved_bytes(stock_save, torch.ones(2), _use_new_zipfile_serialization=False)
    if not torch.cuda.is_available():
        assert_same_load_failure(data)
    for map_location in ("cpu", {"cuda:0": "cpu"}, torch.device("cpu"), lambda storage, _: storage):
        loaded = ptsave.load(io.BytesIO(data), map_location=map_location)
        assert_same_object(loaded, torch.ones(2))


def _tar_file(path: Path) -> torch.Tensor:
    """Write one tensor as torch 0.1 did."""
    tensor = torch.arange(6.0).view(2, 3)

    def description(key: int, other: bytes, kind: bytes) -> bytes:
        return b"\x80\x02K" + bytes([key]) + other + b"ctorch\n" + kind + b"\n\x87."

    storages = pickle.dumps(1, 2) + description(1, b"U\x03cpu", b"FloatStorage")
    storages += struct.pack("<q", 6) + tensor.numpy().tobytes() + pickle.dumps([], 2)
    tensors = pickle.dumps(1, 2) + description(2, b"K\x01", b"FloatTensor")
    tensors += struct.pack("<iiqqqqq", 2, 0, 2, 3, 3, 1, 0)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        contents = {"storages": storages, "tensors": tensors, "pickle": b"\x80\x02]K\x02Qa."}
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return tensor


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")  # about torch's own code
def test_tar_format(tmp_path: Path) -> None:
    path = tmp_path / "file.tar"
    tensor = _tar_file(path)
    assert torch.equal(ptsave.load(path, weights_only=False)[0], tensor)
    error = assert_same_load_failure(path)
    assert "legacy .tar format" in str(error)


def test_source_change_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legacy format keeps the source of modules, and compares it."""
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "changing_module.py"
    head = "import torch\nclass Net(torch.nn.Module):\n    "
    source.write_text(head + "pass\n")
    module = importlib.import_module("changing_module")
    data = saved_bytes(ptsave.save, module.Net(), _use_new_zipfile_serialization=False)
    ptsave.load(io.BytesIO(data), weights_only=False)
    source.write_text(head + "pass  # changed\n")
    linecache.clearcache()
    with pytest.warns(torch.serialization.SourceChangeWarning) as caught:
        ptsave.load(io.BytesIO(data), weights_only=False)
    assert len(caught) == 1
    del sys.modules["changing_module"]


# --------------------------------------------------------------------- other kinds of file


@pytest.fixture
def script_path(tmp_path: Path) -> Path:
    target = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(3, 4)), target)
    return target


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_torchscript(weights_only: bool, as_path: bool, script_path: Path) -> None:
    def load(engine: Callable[..., Any]) -> Any:
        source: Any = script_path if as_path else io.BytesIO(script_path.read_bytes())
        return engine(source, weights_only=weights_only)

    texts = assert_same_warnings(
        lambda: load(ptsave.load), lambda: load(stock_load), at_caller=True
    )
    assert "looks like a TorchScript archive" in texts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if weights_only:
            assert_same_failure(lambda: load(ptsave.load), lambda: load(stock_load))
        else:
            assert isinstance(load(ptsave.load), torch.jit.ScriptModule)


_needs_torch_that_reads_safetensors = pytest.mark.skipif(
    "safetensors.torch" not in stock_load.__code__.co_names, reason="this torch does not read them"
)


@_needs_torch_that_reads_safetensors
def test_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obj = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}
    path = tmp_path / "file.safetensors"
    safetensors.torch.save_file(obj, path)
    for kind, map_location in itertools.product((str, Path), (None, "cpu", torch.device("cpu"))):
        loaded = ptsave.load(kind(path), map_location=map_location)
        assert sorted(loaded) == ["a", "b"]
        assert all(torch.equal(loaded[name], obj[name]) for name in obj)
    assert_same_load_failure(tmp_path / "none.safetensors")
    for module in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, module, None)
    assert_same_load_failure(path)


@_needs_torch_that_reads_safetensors
def test_checkpoint_under_a_safetensors_name(tmp_path: Path) -> None:
    """Torch saves it, and does not load it by its name; here its content decides."""
    path = tmp_path / "file.safetensors"
    with ptsave.installed():
        torch.save([torch.ones(2)], path)
    mine = path.read_bytes()
    stock_save([torch.ones(2)], path)
    assert path.read_bytes() == mine
    with path.open("rb") as stream:
        expected = stock_load(stream)
        stream.seek(0)
        assert_same_object(ptsave.load(stream), expected)
    assert_same_object(ptsave.load(path), expected)


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "meta"}], ids=str)
@pytest.mark.parametrize("calculate", [True, False])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_calculated_offsets(
    options: dict[str, Any],
    calculate: bool,
    debug: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch can compute where storages are, from the layout that it writes, and not read it."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", debug)
    config.load.calculate_storage_offsets = calculate
    ours = path.with_name("ours.pt")
    ptsave.save(stock_load(path), ours)
    expected = stock_load(path, **options)
    assert_same_object(stock_load(ours, **options), expected)
    assert_same_object(ptsave.load(ours, **options), expected)
    assert_same_object(ptsave.load(path, **options), expected)


def test_offsets_that_are_not_where_torch_would_put_them(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's debugging variable that is an error, without it is not."""
    records = zip_records(path.read_bytes())
    other = tmp_path / "other.pt"
    other.write_bytes(zipped(records))
    assert_same_object(ptsave.load(other), stock_load(path))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    assert_same_load_failure(other)


def test_dotted_namespace_as_pickle_module(path: Path) -> None:
    """Only what torch looks at is needed of a pickle module; torch needs its name."""
    module = SimpleNamespace(Unpickler=pickle.Unpickler, load=pickle.load)
    assert_same_load_failure(path, pickle_module=module, weights_only=False)
    module.__name__ = "module"
    loaded = ptsave.load(path, pickle_module=module, weights_only=False)
    assert_same_object(loaded, stock_load(path))


# --------------------------------------------------------------------------------- large files


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest keeps those of several runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def _gib(n: float, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(int(n * 2**30) // dtype.itemsize, dtype=dtype)


def _assert_equal_files(first: Path, second: Path) -> None:
    """Compare without reading holes."""
    assert first.stat().st_size == second.stat().st_size
    with first.open("rb", buffering=0) as a, second.open("rb", buffering=0) as b:
        for stream in (a, b):
            for begin, end in _data_extents(stream.fileno()):
                for offset in range(begin, end, 1 << 24):
                    nbytes = min(1 << 24, end - offset)
                    pieces = [os.pread(each.fileno(), nbytes, offset) for each in (a, b)]
                    assert pieces[0] == pieces[1], f"differ in {nbytes} bytes from {offset}"


def _data_extents(fd: int) -> list[tuple[int, int]]:
    extents, end = [], 0
    size = os.fstat(fd).st_size
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # only a hole is left
            break
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        extents.append((begin, end))
    return extents


def _saved_as_stock_does(obj: object, folder: Path) -> Path:
    """Return a file of ours, of the same bytes as torch's."""
    for name, save in (("stock", stock_save), ("ptsave", ptsave.save)):
        (folder / name).mkdir()
        save(obj, folder / name / "file.pt")
    ours = folder / "ptsave" / "file.pt"
    _assert_equal_files(ours, folder / "stock" / "file.pt")
    (folder / "stock" / "file.pt").unlink()
    return ours


def _wide() -> list[torch.Tensor]:
    """One storage wider than 4 GiB, then small ones at places that need 64 bits."""
    wide = torch.zeros(2**30 + 12, dtype=torch.float32)
    wide[-3:] = torch.arange(3)
    return [wide, torch.ones(1).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn)]


@pytest.mark.large
def test_file_of_more_than_2_gib(folder: Path) -> None:
    """Offsets that a signed 32-bit number cannot hold."""
    tensor = _gib(2.2, torch.float32)
    tensor[:: 1 << 20] = 1.5
    obj = {"large": tensor, "small": torch.arange(10), "view": tensor[-5:]}
    ours = _saved_as_stock_does(obj, folder)
    assert_same_object(ptsave.load(ours), obj)
    assert_same_object(ptsave.load(ours, mmap=True), obj)


@pytest.mark.large
def test_file_with_a_storage_of_more_than_4_gib(folder: Path) -> None:
    """Sizes and offsets in 64 bits: longer data descriptors, and extra fields."""
    obj = _wide()
    ours = _saved_as_stock_does(obj, folder)
    config.load.calculate_storage_offsets = True
    loaded = stock_load(ours, mmap=True)
    assert_same_object(loaded[1:], obj[1:])
    del loaded
    loaded = ptsave.load(ours)
    assert torch.equal(loaded[0][-3:], torch.arange(3.0))
    assert_same_object(loaded[1:], obj[1:])


@pytest.mark.large
def test_more_than_4_gib_in_memory() -> None:
    obj = _wide()
    stream = io.BytesIO()
    ptsave.save(obj, stream)
    stream.seek(0)
    loaded = ptsave.load(stream)
    assert torch.equal(loaded[0][-3:], torch.arange(3.0))
    assert_same_object(loaded[1:], obj[1:])


@pytest.mark.large
@pytest.mark.parametrize("delta", [-200, -64, -1, 0, 1, 64, 4000])
def test_edges_at_4_gib(delta: int, folder: Path) -> None:
    """Records around the offset 2^32, sparsely: space is left for the bytes."""
    sizes = (2**32 + delta - 4096, 1500, 1, 64, 1000, 0, 7)
    with skip_data():
        _saved_as_stock_does([torch.empty(n, dtype=torch.uint8) for n in sizes], folder)


@pytest.mark.large
@pytest.mark.parametrize("delta", [-2, -1, 0, 1])
def test_storage_of_almost_4_gib(delta: int, folder: Path) -> None:
    obj = [torch.empty(2**32 + delta, dtype=torch.uint8), torch.empty(5)]
    with skip_data():
        ours = _saved_as_stock_does(obj, folder)
    loaded = ptsave.load(ours, mmap=True)
    assert loaded[0].numel() == 2**32 + delta


@pytest.mark.slow
@pytest.mark.parametrize("n_tensors", [65_528, 65_529, 65_530])
def test_number_of_records_that_needs_more_than_16_bits(n_tensors: int, folder: Path) -> None:
    obj = [torch.tensor([i % 250], dtype=torch.uint8) for i in range(n_tensors)]
    data = assert_same_bytes(obj, folder)
    assert len(zipfile.ZipFile(io.BytesIO(data)).namelist()) == n_tensors + 6
    loaded = ptsave.load(io.BytesIO(data))
    assert all(torch.equal(a, b) for a, b in zip(loaded, obj, strict=True))


@pytest.mark.large
def test_legacy_sequence_of_more_than_2_gib(folder: Path) -> None:
    large = _gib(2.1, torch.float32)
    large[-1] = 3
    with (folder / "file").open("w+b") as stream:
        for obj in (torch.ones(5), large, torch.arange(4)):
            pickle.dump(41, stream)
            ptsave.save(obj, stream, _use_new_zipfile_serialization=False)
        assert stream.tell() > 2**31
        stream.seek(0)
        for obj in (torch.ones(5), large, torch.arange(4)):
            assert pickle.load(stream) == 41
            assert torch.equal(ptsave.load(stream), obj)
