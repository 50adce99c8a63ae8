"""`ptsave show`: one entry, as torch and Python print it, and nothing else is read."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _corruption import flip
from command_line import fail, json_of, run
from stock_comparison import typed_storage

import ptsave

BIG = torch.arange(20_000.0).view(100, 200)
STATE: dict[str, Any] = {
    "model": {"a.b": BIG, "bad": torch.tensor([1.0, math.nan, math.inf])},
    "groups": [{"lr": 0.1, "betas": (0.9, 0.999)}],
    "epoch": 3,
    "name": "run \x1b[31m",
    "nan": math.nan,
    "none": {},
    "flags": torch.tensor([[True, False]]),
    "complex": torch.tensor([1 + 2j]),
    "storage": typed_storage(torch.ones(3)),
}


show = partial(run, "show")


def lines_of(*arguments: object) -> list[str]:
    result = show(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "file.pt")
    return tmp_path / "file.pt"


@pytest.mark.parametrize("name", ["groups", "groups.0.betas", "epoch", "name", "nan", "none"])
def test_values(path: Path, name: str) -> None:
    value: Any = STATE
    for key in name.split("."):
        value = value[int(key) if key.isdecimal() else key]
    assert lines_of(path, name) == [repr(value)]
    found = json_of("show", path, name)
    facts = {"path": str(path), "name": name, "type": type(value).__name__}
    if name == "nan":  # which JSON does not have
        assert found == {**facts, "value": None, "text": "nan"}
    else:
        assert found == {**facts, "value": json.loads(json.dumps(value))}


def test_tensors(path: Path) -> None:
    lines = lines_of(path, "model.a.b")
    assert lines[0] == "float32 [100, 200], 78.1 KiB, saved from cpu"
    assert "\n".join(lines[1:-1]) == str(BIG)
    assert lines[-1] == (
        "mean 1e+04, std 5.77e+03, min 0, max 2e+04, norm 1.63e+06; 20,000 elements, 0 NaN, 0 Inf"
    )
    assert lines_of(path, "('model', 'a.b')") == lines
    assert lines_of(path, "model.bad")[-1].endswith("3 elements, 1 NaN, 1 Inf")
    found = json_of("show", path, "model.bad")
    assert (found["dtype"], found["shape"], found["nbytes"]) == ("float32", [3], 12)
    assert found["value"] == [1.0, None, None]
    assert (found["statistics"]["n_nan"], found["statistics"]["max"]) == (1, 1.0)
    found = json_of("show", path, "model.a.b")
    assert found["value"] is None  # too many
    assert found["statistics"]["mean"] == BIG.mean().item()


def test_tensors_of_other_kinds(path: Path) -> None:
    assert json_of("show", path, "flags")["value"] == [[True, False]]
    assert json_of("show", path, "complex")["value"] == [[1.0, 2.0]]
    assert lines_of(path, "storage")[0].startswith("float32 [3], 12 B")
    torch.save({"sparse": torch.eye(3).to_sparse()}, path)  # a file that is read as a whole
    assert json_of("show", path, "sparse")["value"] is None
    assert "stored values" in lines_of(path, "sparse")[-1]
    torch.save(torch.empty(2, dtype=torch.bits8), path)
    lines = lines_of(path)
    assert lines[0].startswith("bits8 [2], 2 B")
    assert "no numbers" in lines[1]
    assert lines[-1] == "torch.bits8: no statistics"


def test_containers_of_tensors_are_listed(path: Path) -> None:
    listed = run("ls", path, "model").stdout.split("\n\n")[0]
    flip(path, path.read_bytes().index(BIG.numpy().tobytes()))  # which is not read
    assert lines_of(path, "model") == listed.splitlines()
    names = [tensor["name"] for tensor in json_of("show", path, "model")["tensors"]]
    assert names == ["model.a.b", "model.bad"]
    assert len(lines_of(path)) > 10
    assert lines_of(path, "model.bad")  # beside the damage
    assert "is damaged" in fail("show", path, "model.a.b")


def test_objects_that_are_not_built(path: Path) -> None:
    torch.save({"args": argparse.Namespace(a=1, t=torch.ones(2))}, path)
    for name in ("args", ""):
        result = show(path, name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "argparse.Namespace, which is not allowed" in result.stderr
        assert "--trust argparse.Namespace" in result.stderr
    trusted = lines_of(path, "args", "--trust", "argparse.Namespace")
    assert trusted == ["Namespace(a=1, t=tensor([1., 1.]))"]


def test_the_whole_object(path: Path) -> None:
    torch.save(torch.ones(2), path)
    assert lines_of(path)[1] == "tensor([1., 1.])"
    torch.save([1, 2], path)
    assert lines_of(path) == ["[1, 2]"]


def test_long_values_are_cut_into_lines(path: Path) -> None:
    torch.save({"losses": [{"loss": i / 7} for i in range(30)]}, path)
    lines = lines_of(path, "losses")
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80


def test_other_sources(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    ptsave.save_model(model, tmp_path / "shards", max_shard_size="5KB")
    torch.save({"w": torch.ones(3), "n": 7}, tmp_path / "plain.pt")
    ptsave.convert(tmp_path / "plain.pt", tmp_path / "dcp", format="dcp")
    fsspec.filesystem("memory").pipe("/show/x.pt", (tmp_path / "plain.pt").read_bytes())
    assert lines_of("memory://show/x.pt", "w")[1] == "tensor([1., 1., 1.])"
    assert lines_of(tmp_path / "shards", "1.bias")[0].startswith("float32 [4], 16 B")
    assert len(lines_of(tmp_path / "shards")) == 4
    assert lines_of(tmp_path / "dcp", "w")[1] == "tensor([1., 1., 1.])"
    assert lines_of(tmp_path / "dcp", "n") == ["7"]


def test_names_that_are_not_there(path: Path) -> None:
    assert (
        fail("show", path, "epohc") == f"ptsave: {path}: no entry 'epohc'; did you mean 'epoch'?\n"
    )


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype
def test_a_nested_tensor(tmp_path: Path, layout: torch.layout) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    torch.save({"w": torch.ones(2), "n": nested}, tmp_path / "a.pt")
    found = json_of("show", tmp_path / "a.pt", "n")
    assert (found["shape"], found["statistics"]["numel"]) == ([2, -1], 5)
    assert "[2, -1]" in lines_of(tmp_path / "a.pt", "n")[0]
    listed = run("ls", "--stats", tmp_path / "a.pt")
    assert (listed.exit_code, listed.stderr) == (0, "")
    with ptsave.open(tmp_path / "a.pt") as archive:
        assert all(map(torch.equal, archive["n"].unbind(), parts))
