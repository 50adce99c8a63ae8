"""Attributes that a pickle gives to its containers hide nothing from what looks into them."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from stock_comparison import assert_same_object, stock_load
from torch import nn

import ptsave
from ptsave.cli.commands import commands
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.verification import verify_file

_METHODS = ("items", "keys", "values", "get", "__iter__", "__len__", "__class__", "_metadata")


class _Shadowing:
    """A dict as an attacker's pickler writes it: its attributes are named like its methods."""

    def __init__(self, entries: dict[str, Any], attributes: dict[str, Any], kind: type) -> None:
        self.state = kind, (entries,), attributes

    def __reduce__(self) -> Any:
        return self.state


def _saved(path: Path, value: float, attributes: dict[str, Any], kind: type = OrderedDict) -> Path:
    inner = {"bias": torch.full((2,), value)}
    entries = {"weight": torch.full((4,), value), "inner": _Shadowing(inner, attributes, kind)}
    torch.save(_Shadowing(entries, attributes, kind), path)
    return path


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "callable": dict.fromkeys(_METHODS[:-1], OrderedDict),
    "number": dict.fromkeys(_METHODS[:-2], 3),
    "an entry's name": {"weight": 1, "inner": 2},
}


@pytest.fixture(params=_ATTRIBUTES)
def attributes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _ATTRIBUTES[request.param]


def _run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(commands, [*map(str, arguments)])
    return result.exit_code, result.output


def test_tools(tmp_path: Path, attributes: dict[str, Any]) -> None:
    path = _saved(tmp_path / "a.pt", 1.0, attributes)
    names = ["weight", "inner.bias"]
    with ptsave.open(path) as archive:
        assert archive.keys() == names
        assert torch.equal(archive["inner.bias"], torch.ones(2))
        whole = archive[()]
        assert type(whole) is OrderedDict
        assert [*OrderedDict.keys(whole)] == ["weight", "inner"]
        assert vars(whole) == vars(stock_load(path)) == attributes
    assert verify_file(path).whole == names
    code, listing = _run("ls", path)
    assert code == 0
    assert "2 tensors" in listing
    assert "bias" in listing
    assert torch.equal(read_entries(str(path), ["inner.bias"])["inner.bias"], torch.ones(2))
    convert(path, tmp_path / "a.safetensors")
    assert ptsave.open(tmp_path / "a.safetensors").keys() == sorted(names)
    other = _saved(tmp_path / "b.pt", 2.0, attributes)
    assert [found.name for found in compare(str(path), str(other)).differences] == names


def test_damage_is_told(tmp_path: Path, attributes: dict[str, Any]) -> None:
    path = _saved(tmp_path / "a.pt", 1.0, attributes)
    data = bytearray(path.read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 4)] ^= 1
    with pytest.raises(ptsave.CorruptCheckpointError) as caught:
        ptsave.load(io.BytesIO(data))
    assert caught.value.entries == ["weight"]


def test_restores(path: Path, attributes: dict[str, Any]) -> None:
    state = _Shadowing({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, attributes, OrderedDict)
    torch.save(state, path)
    expected = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    module, tensors = nn.Linear(2, 3), {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    ptsave.load_into(path, module)
    assert_same_object({**module.state_dict()}, expected)
    ptsave.load_into(path, tensors)
    assert_same_object(tensors, expected)
    module = nn.Linear(2, 3)
    ptsave.load_model(module, path)
    assert_same_object({**module.state_dict()}, expected)
    torch.save(_Shadowing({"model": state, "rest": torch.ones(1)}, attributes, OrderedDict), path)
    module = nn.Linear(2, 3)
    assert_same_object(dict(ptsave.load_checkpoint(path, model=module)), {"rest": torch.ones(1)})
    assert_same_object({**module.state_dict()}, expected)


def test_compacting_is_refused_where_it_would_lose_entries(tmp_path: Path) -> None:
    """What pickles an OrderedDict asks for its ``items``, in Python as in torch.save."""
    path = _saved(tmp_path / "a.pt", 1.0, {"items": OrderedDict})
    with pytest.raises(ValueError, match=r"a\.pt: .* has an attribute 'items'"):
        compact(path, tmp_path / "b.pt")
    code, output = _run("extract", path, "inner", "-o", tmp_path / "b.pt")
    assert (code, "has an attribute 'items'" in output) == (2, True)
    assert not (tmp_path / "b.pt").exists()


def test_counters(path: Path) -> None:
    """A Counter's attribute of the name of a method was a TypeError that said nothing."""
    torch.save({"n": _Shadowing({"a": 1, "b": 2}, {"items": 3}, Counter)}, path)
    try:
        stock_load(path)
    except Exception as error:
        pytest.skip(f"this torch does not load it ({error})")
    assert _run("ls", path)[0] == 0
    assert _run("verify", path)[0] == 0
    assert compare(str(path), str(path)).equal
    with ptsave.open(path) as archive:
        assert archive["n"] == stock_load(path)["n"]


def test_missing_entry_of_a_counter(path: Path) -> None:
    torch.save({"n": Counter("aab")}, path)
    with ptsave.open(path) as archive:
        assert archive[("n", "a")] == 2
        with pytest.raises(KeyError, match="no entry"):
            archive[("n", "c")]


def test_advice_on_the_part_that_was_meant(tmp_path: Path, attributes: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint.pt"
    part = nn.Linear(2, 2).state_dict()
    torch.save(_Shadowing({"model": part}, attributes, OrderedDict), path)
    with pytest.raises(RuntimeError, match=r"ptsave\.load_checkpoint\(path, model=model\)"):
        ptsave.load_into(path, nn.Linear(2, 2))
