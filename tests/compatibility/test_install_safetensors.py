"""install(safetensors=True): the library's functions by the engine, with its bytes and words."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from stock_comparison import saved_bytes, stock_save
from torch import nn

import ptsave
from ptsave.streaming import safetensors_functions

st = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
SafetensorError = pytest.importorskip("safetensors").SafetensorError
STOCK = {"save": st.save_file, "load": st.load_file}  # no names of a module, which are exchanged


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which calls the engine has taken."""
    seen: list[str] = []
    for name in ("write_safetensors", "load_safetensors"):
        function = getattr(safetensors_functions, name)

        def noting(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            seen.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(safetensors_functions, name, noting)
    return seen


@pytest.fixture
def _installed() -> Iterator[None]:
    with ptsave.installed(safetensors=True):
        yield


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    return model


ORDINARY: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "one": lambda: {"a": torch.arange(3.0)},
    "dtypes": lambda: {
        str(dtype): torch.ones(3, 5).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    },
    "fp8": lambda: {"q": torch.ones(4, 4).to(torch.float8_e4m3fn), "w": torch.ones(3)},
    "scalars and empty": lambda: {"s": torch.tensor(3), "e": torch.empty(0, 4), "z": torch.ones(1)},
    "names": lambda: {"ä.ö": torch.ones(2), 'q"uote\\': torch.zeros(2), "z": torch.ones(1)},
    "parameters": lambda: dict(nn.Linear(3, 3).named_parameters()),
    "large": lambda: {f"w{i}": torch.randn(700, 700) for i in range(3)},
    "views": lambda: {"a": torch.arange(10.0)[2:5], "b": torch.arange(6).view(2, 3)},
}
STOCKS: dict[str, Callable[[], Any]] = {
    "none": dict,
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "strided": lambda: {"a": torch.ones(3, 2).t()},
    "shared": lambda: dict.fromkeys("ab", torch.ones(3)),
    "parts": lambda: dict(zip("ab", torch.ones(6).view(2, 3), strict=True)),
    "dtype": lambda: {"a": torch.ones(2, dtype=torch.complex128)},
    "value": lambda: {"a": 1},
    "list": lambda: [torch.ones(1)],
    "name": lambda: {1: torch.ones(1)},
    "meta": lambda: {"a": torch.ones(2, device="meta")},
    "surrogate": lambda: {"\ud800": torch.ones(2)},
    "control": lambda: {"\n\x7f": torch.ones(2)},
    "conj": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
}


def outcome(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "succeeds"


def assert_saved_alike(folder: Path, tensors: Any, *args: Any) -> str:
    """Both must write the same file, or fail alike and write none; returns what happened."""
    ours = outcome(st.save_file, tensors, folder / "ours", *args)
    assert ours == outcome(STOCK["save"], tensors, folder / "stock", *args)
    if ours == "succeeds":
        assert (folder / "ours").read_bytes() == (folder / "stock").read_bytes()
    else:
        assert os.listdir(folder) == []
    return ours


def assert_refused_alike(path: Path) -> None:
    assert outcome(st.load_file, path) == outcome(STOCK["load"], path) != "succeeds"


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["bare", "metadata"])
@pytest.mark.parametrize("case", ORDINARY)
def test_same_bytes(
    case: str, metadata: dict[str, str] | None, tmp_path: Path, engine_calls: list[str]
) -> None:
    assert assert_saved_alike(tmp_path, ORDINARY[case](), metadata) == "succeeds"
    assert_same_tensors(st.load_file(f"{tmp_path}/ours"), STOCK["load"](tmp_path / "stock"))
    assert engine_calls == ["write_safetensors", "load_safetensors"]


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].requires_grad == tensor.requires_grad
        bits, expected_bits = found[name].view(-1), tensor.view(-1)
        assert torch.equal(bits.view(torch.uint8), expected_bits.view(torch.uint8))


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("case", STOCKS)
def test_everything_else_is_the_librarys(case: str, tmp_path: Path) -> None:
    assert_saved_alike(tmp_path, STOCKS[case]())


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("metadata", [{}, {"a": 1}, [], {"a": "\ud800"}], ids=repr)
def test_metadata(metadata: Any, tmp_path: Path) -> None:
    assert_saved_alike(tmp_path, {"a": torch.ones(2)}, metadata)


@pytest.mark.usefixtures("_installed")
def test_texts_of_metadata(tmp_path: Path, engine_calls: list[str]) -> None:
    """Of any letters: peft's configuration is there as JSON of many lines."""
    letters = "".join(map(chr, [*range(256), 0x2028, 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0x1F600]))
    for metadata in ({"a": letters}, {letters: "{\n  }"}):
        assert assert_saved_alike(tmp_path, {"a": torch.ones(2)}, metadata) == "succeeds"
    assert engine_calls == ["write_safetensors"] * 2


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("path", [b"x", 1, None, "", "no/such/folder/x"], ids=repr)
def test_paths(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = {"a": torch.ones(2)}
    ours, stock = (outcome(save, tensors, path) for save in (st.save_file, STOCK["save"]))
    assert ours.partition(" at path")[0] == stock.partition(" at path")[0]
    assert outcome(st.load_file, path) == outcome(STOCK["load"], path)


@pytest.mark.usefixtures("_installed")
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ptsave.SaveError(28, "No space left on device", "x")

    path = tmp_path / "x"
    st.save_file({"a": torch.ones(2)}, path)
    monkeypatch.setattr(safetensors_functions, "write_safetensors", fail)
    with pytest.raises(SafetensorError, match=r"No space left on device \(os error 28\)"):
        st.save_file({"a": torch.zeros(2)}, path)
    assert STOCK["load"](path)["a"].tolist() == [1, 1]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("end", ["", "/"])
def test_a_directory_is_no_file(end: str, tmp_path: Path) -> None:
    tensors, path = {"a": torch.ones(2)}, f"{tmp_path}{end}"
    ours, stock = (outcome(save, tensors, path) for save in (st.save_file, STOCK["save"]))
    assert ours == stock
    assert ours.startswith("SafetensorError: ")
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "damage",
    [
        *(lambda d: b"", lambda d: b"abc", lambda d: d[:-1], lambda d: d + b"x"),
        lambda d: b"\xff" * 90,
        lambda d: saved_bytes(stock_save, {"a": torch.ones(2)}),  # a pickle is not run here
    ],
)
def test_damaged_files(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    st.save_file({"a": torch.ones(20)}, path)
    path.write_bytes(damage(path.read_bytes()))
    assert_refused_alike(path)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "options", [{"device": "meta"}, {"device": "x"}, {"backend": "x"}, {"other": 1}], ids=repr
)
def test_options_of_loading(options: dict[str, Any], tmp_path: Path) -> None:
    st.save_file({"a": torch.ones(2)}, tmp_path / "x")
    ours, stock = (
        outcome(load, tmp_path / "x", **options) for load in (st.load_file, STOCK["load"])
    )
    assert ours == stock


@pytest.mark.usefixtures("_installed")
def test_order_of_a_foreign_file(tmp_path: Path) -> None:
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [begin, begin + 1]}
        for name, begin in (("b", 1), ("a", 2), ("c", 0))
    }
    text = json.dumps(header).encode()
    path = tmp_path / "x"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2\3")
    assert_same_tensors(st.load_file(path), STOCK["load"](path))


@pytest.mark.usefixtures("_installed")
def test_models(tmp_path: Path, engine_calls: list[str]) -> None:
    model, other = tied(), tied()
    st.save_model(model, str(tmp_path / "ours"))
    assert st.load_model(other, tmp_path / "ours") == (set(), [])
    assert engine_calls == ["write_safetensors", "load_safetensors"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        st.load_model(nn.Linear(2, 2), tmp_path / "ours")


def test_names_in_other_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Libraries import the functions by name, often before anybody can install."""
    library: Any = ModuleType("a_library")
    library.safe_save_file, library.load = STOCK["save"], STOCK["load"]
    monkeypatch.setitem(sys.modules, "a_library", library)
    ptsave.install()
    assert (st.save_file, st.load_file) == (STOCK["save"], STOCK["load"])
    ptsave.install(safetensors=True)
    assert library.safe_save_file is st.save_file is not STOCK["save"]
    assert library.load is st.load_file is not STOCK["load"]
    with ptsave.installed(safetensors=False):
        assert library.load is st.load_file is STOCK["load"]
    assert library.load is st.load_file is not STOCK["load"]
    ptsave.uninstall()
    assert library.safe_save_file is st.save_file is STOCK["save"]
    assert library.load is st.load_file is STOCK["load"]
    ptsave.uninstall()


def test_fsync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        safetensors_functions, "write_safetensors", lambda *_, fsync, checksums: seen.append(fsync)
    )
    with ptsave.installed(safetensors=True):
        st.save_file({"a": torch.ones(1)}, tmp_path / "x")
        with ptsave.installed(fsync=True):
            st.save_file({"a": torch.ones(1)}, tmp_path / "x")
    assert seen == [False, True]


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors_functions.require_library.cache_clear()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        ptsave.install(safetensors=True)
    with pytest.raises(RuntimeError, match="not installed"):
        ptsave.uninstall()


@pytest.mark.parametrize("names", [{}, {"load_file": None, "save_file": None}], ids=repr)
def test_names_that_are_bound_later(monkeypatch: pytest.MonkeyPatch, names: Any) -> None:
    """A module that had none of the functions is looked at again when a name has got a value."""
    library: Any = ModuleType("a_late_library")
    vars(library).update(names)
    monkeypatch.setitem(sys.modules, "a_late_library", library)
    with ptsave.installed(safetensors=True):
        pass
    library.load_file = STOCK["load"]
    with ptsave.installed(safetensors=True):
        assert library.load_file is st.load_file is not STOCK["load"]
        library.save_file = st.save_file
    assert library.load_file is STOCK["load"]
    assert library.save_file is STOCK["save"]
