"""`ptsave ls`: every tensor that torch loads is listed as it is, and nothing else is said."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from command_line import fail, json_of, run, run_process
from safetensors.torch import save_file
from stock_comparison import stock_load, typed_storage

import ptsave
from ptsave.tree.containers import MAX_DEPTH
from ptsave.tree.tree import EntryTree

BIG = torch.arange(10_000.0).view(100, 100)
WEIGHT = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))


def checkpoint() -> dict[str, Any]:
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]
    return {
        "model": {"a.weight": WEIGHT, "a.bias": torch.zeros(3), "tied": WEIGHT},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": groups},
        "view": BIG[:2, :5],
        "turned": BIG.t(),
        "losses": [i / 2 for i in range(1000)],
        "epoch": 3,
        "nan": math.nan,
        "name": "run \x1b[31m",
        "groups again": groups,
    }


ls = partial(run, "ls")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(checkpoint(), tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def rows_of(result: Result) -> dict[str, list[str]]:
    """Return columns by name; a name is that of the line, without what it is in."""
    assert result.exit_code == 0, result.output
    table = result.stdout.split("\n\n")[0].splitlines()
    split = [[part.strip() for part in line.split("  ") if part.strip()] for line in table]
    return {parts[0]: parts[1:] for parts in split}


def follow(obj: Any, path: list[Any]) -> Any:
    for key in path:
        obj = obj[key]
    return obj


def test_text(path: Path) -> None:
    rows = rows_of(ls(path))
    assert rows["model"] == ["dict of 3", "60 B"]
    assert rows["a.weight"] == ["bfloat16", "[3, 4]", "24 B", "shared with model.tied"]
    assert rows["tied"][-1] == "shared with model.a.weight"
    assert rows["step"] == ["float32", "[]", "4 B"]
    assert rows["betas"] == ["tuple of 2", "(0.9, 0.999)"]
    assert rows["view"] == ["float32", "[2, 5]", "40 B", "stride [100, 1]", "shared with turned"]
    assert rows["losses"] == ["list of 1000", "[0.0, 0.5, 1.0, ..., 498.5, 499.0, 499.5]"]
    assert rows["epoch"] == ["int", "3"]
    assert rows["groups again"] == ["list of 1", "the same as optimizer.param_groups"]
    assert "\x1b" not in ls(path).stdout


def test_columns_are_aligned(path: Path) -> None:
    lines = ls(path, "model", "view", "epoch").stdout.split("\n\n")[0].splitlines()
    kinds = ("dict of", "bfloat16", "float32", "int")
    assert len({line.index(kind) for line in lines for kind in kinds if f"  {kind}" in line}) == 1


def test_totals(path: Path) -> None:
    summary = ls(path).stdout.split("\n\n")[1].splitlines()
    tensors = [WEIGHT, WEIGHT, torch.zeros(3), torch.tensor(3.0), BIG[:2, :5], BIG]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert summary[0].startswith(f"6 tensors, {nbytes / 1024:.1f} KiB; 4 storages, 39.1 KiB; file:")
    assert len(summary) == 1  # every storage is used
    torch.save({"a": BIG[:1], "b": BIG[0], "c": BIG[1:3]}, path)
    assert "37.9 KiB of the storages belong to no tensor" in ls(path).stdout


def test_json_says_what_torch_loads(path: Path) -> None:
    listed = json_of("ls", path)
    loaded = stock_load(path)
    with ptsave.open(path) as archive:
        infos = {info.name: info for info in archive.infos()}
    assert [tensor["name"] for tensor in listed["tensors"]] == [*infos]
    storages: dict[int, set[int]] = {}
    for tensor in listed["tensors"]:
        found, info = follow(loaded, tensor["path"]), infos[tensor["name"]]
        assert tensor["shape"] == [*found.shape]
        assert tensor["stride"] == [*found.stride()]
        assert f"torch.{tensor['dtype']}" == str(found.dtype)
        assert tensor["storage_nbytes"] == found.untyped_storage().nbytes()
        storages.setdefault(tensor["storage"], set()).add(found.untyped_storage()._cdata)
        assert (tensor["nbytes"], tensor["offset"]) == (info.nbytes, info.offset)
        assert (tensor["record"], tensor["location"]) == (info.record, info.location)
    assert all(len(group) == 1 for group in storages.values())
    values = {value["name"]: value for value in listed["values"]}
    assert values["epoch"] == {"name": "epoch", "path": ["epoch"], "type": "int", "value": 3}
    assert values["losses"]["value"] == checkpoint()["losses"]
    assert "value" not in values["nan"]
    assert listed["totals"]["file_nbytes"] == path.stat().st_size
    assert listed["format"] == "pt"


def test_json_path_of_keys_that_are_no_text(path: Path) -> None:
    torch.save({0: torch.ones(1), (1, 2): torch.ones(1), "": torch.ones(1)}, path)
    listed = json_of("ls", path)
    assert [tensor["path"] for tensor in listed["tensors"]] == [[0], ["(1, 2)"], [""]]


def test_object_that_is_no_container(path: Path) -> None:
    torch.save(torch.ones(2, 3), path)
    assert ls(path).stdout.startswith("  float32  [2, 3]  24 B\n")
    assert json_of("ls", path)["tensors"][0]["path"] == []


def test_selection(path: Path) -> None:
    assert [*rows_of(ls(path, "model"))] == ["model", "a.weight", "a.bias", "tied"]
    assert [*rows_of(ls(path, "*.weight", "epoch"))] == ["model", "a.weight", "epoch"]
    assert [*rows_of(ls(path, "--depth", 1, "model", "view"))] == ["model", "view"]
    by_size = rows_of(ls(path, "--sort", "size"))
    assert [*by_size][:2] == ["turned", "view"]
    assert "epoch" not in by_size
    assert fail("ls", path, "modle") == f"ptsave: {path}: no entry 'modle'; did you mean 'model'?\n"


def test_directory_of_shards(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    ptsave.save_model(model, tmp_path, max_shard_size="5KB")
    listed = json_of("ls", tmp_path)
    names = [tensor["name"] for file in listed["files"] for tensor in file["tensors"]]
    assert sorted(names) == sorted(model.state_dict())
    assert listed["totals"]["tensors"] == 4
    assert listed["index"] == str(tmp_path / "model.safetensors.index.json")
    text = ls(tmp_path, "1.bias").stdout
    assert "model-00001-of-00002.safetensors:" in text
    assert "1.bias" in text
    assert "0.bias" not in text
    assert ls(tmp_path, "2.bias").exit_code == 2


def test_several_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a": BIG, "epoch": torch.ones(1)}, "b.safetensors")
    Path("broken.pt").write_text("<html>")
    both = ls(path, "b.safetensors")
    assert (both.exit_code, both.stderr) == (0, "")
    one, other = both.stdout.split("\n\n==> b.safetensors <==\n")
    assert one == f"==> {path} <==\n{ls(path).stdout.rstrip()}"
    assert other == ls("b.safetensors").stdout
    result = ls("missing.pt", path, "broken.pt", tmp_path / "none.ckpt", "b.safetensors")
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        "missing.pt",
        "broken.pt is not a checkpoint",
        str(tmp_path / "none.ckpt"),
    ]
    assert result.stdout.lstrip() == both.stdout
    lines = ls(path, "b.safetensors", "broken.pt", "--json").stdout.splitlines()
    assert [json.loads(line)["path"] for line in lines] == [str(path), "b.safetensors"]
    assert lines[0] == ls(path, "--json").stdout.rstrip()


def test_names_and_files(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the first file is a name, though there may be a file that is called so."""
    monkeypatch.chdir(tmp_path)
    save_file({"epoch": torch.ones(1), "model.pt": torch.ones(2)}, "b.safetensors")
    Path("model").mkdir()
    assert [*rows_of(ls(path, "model"))] == ["model", "a.weight", "a.bias", "tied"]
    assert [*rows_of(ls("b.safetensors", "model.pt"))] == ["model.pt"]
    for arguments in (["b.safetensors", "epoch"], ["epoch", "b.safetensors"]):
        text = ls(path, *arguments).stdout
        assert text.count("epoch  ") == text.count("==>") == 2
    result = ls(path, "b.safetensors", "model.*")  # the names are looked for in each
    assert (result.exit_code, result.stderr) == (0, "")
    result = ls(path, "b.safetensors", "turned")
    assert result.exit_code == 2
    assert result.stderr == "ptsave: b.safetensors: no entry 'turned'\n"
    assert "turned" in result.stdout


def test_long(path: Path) -> None:
    rows = rows_of(ls("-l", path))
    for each in json_of("ls", path)["tensors"]:
        place = f"{each['nbytes']} B at {each['offset']} in {each['record']}"
        if each["storage_nbytes"] > each["nbytes"]:
            place += f", a part of {each['storage_nbytes']} B"
        assert place in rows[str(each["path"][-1])]
    assert rows["epoch"] == ["int", "3"]
    assert rows_of(ls("-l", "--sort", "size", path))["turned"] == rows["turned"]
    with path.open("rb") as stream:
        stream.seek(int(rows["a.weight"][3].split()[3]))
        assert stream.read(24) == WEIGHT.detach().view(torch.uint8).numpy().tobytes()


def test_storages(path: Path) -> None:
    torch.save(
        {"untyped": torch.UntypedStorage(1200), "typed": typed_storage(torch.ones(300))}, path
    )
    rows = rows_of(ls(path))
    kinds = {name: type(value).__name__ for name, value in stock_load(path).items()}
    assert rows == {name: [kind, "1.17 KiB"] for name, kind in kinds.items()}


def test_tensors_that_are_loaded_as_a_whole(path: Path) -> None:
    torch.save({"sparse": torch.eye(3).to_sparse(), "dense": torch.ones(2)}, path)
    assert rows_of(ls(path))["sparse"][:2] == ["float32", "[3, 3]"]
    torch.save({"dense": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert rows_of(ls(path)) == {"dense": ["float32", "[2]", "8 B"]}


def test_closed_pipe_is_quiet(path: Path) -> None:
    torch.save({f"layer.{i}": torch.ones(1) for i in range(5000)}, path)
    command = f"{sys.executable} -m ptsave ls {path} | head -n 1"
    result = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.startswith("layer.0 ")


def test_names_that_the_terminal_cannot_show(path: Path) -> None:
    torch.save({"\u5c42": torch.ones(1)}, path)
    result = run_process("ls", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.stdout.startswith("\\u5c42 ")


def test_tree_of_what_contains_itself() -> None:
    loop: dict[str, Any] = {"t": torch.ones(1)}
    loop["self"] = loop
    deep: Any = []
    for _ in range(MAX_DEPTH + 100):
        deep = [deep, None, torch.ones(1)]
    assert [node.again for node in EntryTree(loop).nodes] == [None, "the whole object"]
    assert max(node.depth for node in EntryTree({"deep": deep}).nodes) == MAX_DEPTH
