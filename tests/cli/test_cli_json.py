"""`--json` of every command that answers: what a program reads is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fail, run
from stock_comparison import stock_load

from ptsave.cli.commands import commands


def answer(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    big = torch.arange(10_000.0)
    torch.save({"model": {"a": big[:10], "b": torch.ones(3)}, "epoch": 3}, "a.pt")
    return tmp_path / "a.pt"


def test_every_command_that_answers_has_it() -> None:
    for name in set(commands.list_commands(None)) - {"run", "completion"}:  # type: ignore[arg-type]
        text = run(name, "--help").stdout
        assert "--json" in text, name


def test_ls_has_totals_of_the_list(path: Path) -> None:
    found = answer("ls", path, "model.b")
    sums = {"tensors": 1, "tensor_nbytes": 12, "storages": 1, "storage_nbytes": 12}
    assert found["listed"] == sums
    assert found["totals"]["tensors"] == 2
    whole = answer("ls", path)
    assert whole["listed"].items() <= whole["totals"].items()
    folder = path.with_name("folder")
    answer("convert", path, folder, "--drop")
    assert answer("ls", folder, "model.b")["listed"] == sums


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ls_of_nested_tensors(path: Path) -> None:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    layouts = (torch.strided, torch.jagged)
    torch.save([torch.nested.nested_tensor(parts, layout=each) for each in layouts], path)
    for tensor in answer("ls", path)["tensors"]:
        assert (tensor["shape"], tensor["stride"], tensor["nbytes"]) == ([2, -1, 3], None, 72)


def test_verify(path: Path) -> None:
    assert answer("verify", path) == {
        "whole": True,
        "arguments": [
            {
                "path": str(path),
                "files": [
                    {
                        "path": str(path),
                        "state": "whole",
                        "unfinished": False,
                        "nbytes": path.stat().st_size,
                        "records": 8,
                        "tensors": 2,
                        "readable": None,
                        "problems": [],
                        "remarks": [],
                        "error": None,
                    }
                ],
                "problems": [],
                "not_looked_at": [],
                "error": None,
            }
        ],
    }


def test_verify_of_damage_and_of_nothing(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(3).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    found = answer("verify", path, code=1)
    assert not found["whole"]
    (file,) = found["arguments"][0]["files"]
    assert (file["state"], file["readable"]) == ("damaged", ["model.a"])
    (problem,) = file["problems"]
    assert (problem["record"], problem["entries"]) == ("data/1", ["model.b"])
    both = answer("verify", "none.pt", path, code=2)
    assert [each["path"] for each in both["arguments"]] == ["none.pt", str(path)]
    assert both["arguments"][0]["error"] == "none.pt: No such file or directory"
    (path.parent / "notes.txt").write_text("text")
    folder = answer("verify", path.parent, code=1)["arguments"][0]
    assert folder["not_looked_at"] == ["notes.txt"]


def test_globals(path: Path) -> None:
    found = answer("globals", path)
    assert {each["state"] for each in found["globals"]} == {"allowed"}
    torch.save({"where": path}, path)
    found = answer("globals", path, code=1)
    states = {each["name"]: each["state"] for each in found["globals"]}
    assert next(state for name, state in states.items() if "Path" in name) == "not allowed"


def test_extract(path: Path) -> None:
    found = answer("extract", path, "model", "epoch", "-o", "some.pt")
    assert found.pop("entries") == ["model", "epoch"]
    assert found == {"path": "some.pt", "tensors": 2, "values": 1, "nbytes": 52}
    assert [*stock_load("some.pt")] == ["model", "epoch"]
    assert "cannot both" in fail("extract", path, "model", "-o", "-", "--json")


def test_convert_and_compact(path: Path) -> None:
    found = answer("convert", path, "b.safetensors", "--drop")
    assert (found["path"], found["tensors"]) == ("b.safetensors", 2)
    assert found["nbytes"] == Path("b.safetensors").stat().st_size
    assert any("epoch" in remark for remark in found["remarks"])
    found = answer("compact", path, "--dry-run")
    assert (found["tensors"], found["storages"], found["written"]) == (2, 1, False)
    found = answer("compact", path, "-o", "small.pt")
    assert found["written"]
    assert found["nbytes"] == Path("small.pt").stat().st_size < found["nbytes_before"]


def test_diff(path: Path) -> None:
    torch.save({"model": {"a": torch.ones(10)}}, "b.pt")
    found = answer("diff", path, "b.pt", code=1)
    assert found["n_differences"] == len(found["differences"]) == 3
    assert answer("diff", path, path)["equal"]
