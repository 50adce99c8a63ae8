"""Files that hold objects of any class are looked into, and nothing of these is built."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import enum
import functools
import io
import json
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as _dcp
from command_line import run
from safetensors.torch import load_file
from stock_comparison import assert_same_object, saved_bytes, zip_records

import ptsave
from ptsave import _C
from ptsave.archive.plain_values import opaque_globals
from ptsave.archive.recovery import CutArchive
from ptsave.comparison.compare import compare
from ptsave.inspection.verification import verify_file
from ptsave.sources.ranges import Buffer

dcp: Any = _dcp
BUILT: list[str] = []


class Loud:
    """Says that it was built, with tensors in it."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        self.weight = torch.arange(3.0)
        self.me = self

    def __setstate__(self, state: Any) -> None:
        BUILT.append("state")

    def __reduce__(self) -> Any:
        return Loud, (self.lr,), self.__dict__


class Named(dict[str, Any]):
    """A dict of another class, whose items are set by the pickle."""


class Listed(list[Any]):
    pass


class Color(enum.Enum):
    RED = 1


class SubclassTensor(torch.Tensor):
    pass


OPAQUE: dict[str, Any] = {
    "loud": Loud(),
    "namespace": argparse.Namespace(lr=0.1, path=Path("runs"), tensor=torch.ones(2)),
    "named": Named(a=torch.ones(2), b=1),
    "listed": Listed([1, torch.ones(2)]),
    "color": Color.RED,
    "partial": functools.partial(print, 1),
    "function": torch.nn.functional.relu,
    "class": torch.optim.SGD,
    "module": torch.nn.Linear(2, 2),
    "array": np.array([1, "a", None], dtype=object),
    "subclass": torch.ones(3).as_subclass(SubclassTensor),
    "in_list": [torch.ones(2), argparse.Namespace(a=1)],
    "in_set": {Color.RED},
    "key": {Color.RED: 1},
}
MADE: dict[str, Any] = {
    "scalar": np.float64(3.5),
    "numbers": np.arange(6).reshape(2, 3),
    "state": np.random.RandomState(0).get_state(),
    "path": pathlib.PurePosixPath("a/b"),
    "day": datetime.date(2024, 2, 29),
    "delta": datetime.timedelta(seconds=3),
    "default": collections.defaultdict(list, {"a": [1]}),
    "deque": collections.deque([1, 2], 5),
    "range": range(3),
    "slice": slice(1, None),
}


@pytest.fixture(autouse=True)
def _nothing_is_built() -> Any:
    BUILT.clear()
    yield
    assert not BUILT


@pytest.mark.parametrize("name", OPAQUE)
def test_each_is_a_leaf_beside_tensors(path: Path, name: str) -> None:
    obj = {"model": {"w": torch.arange(6.0)}, name: OPAQUE[name], "epoch": 3}
    torch.save(obj, path)
    with ptsave.open(path) as archive:
        assert_same_object(archive["model"], obj["model"])
        assert archive["epoch"] == 3
        with pytest.raises(pickle.UnpicklingError, match="which is not allowed") as caught:
            archive[name]
    assert f"{path}: '{name}' needs " in str(caught.value)
    assert "add_safe_globals" in str(caught.value)
    assert "--trust" in str(caught.value)
    assert verify_file(path).problems == []
    listed = run("ls", path)
    assert listed.exit_code == 0
    assert "model" in listed.stdout
    assert compare(path, path).equal
    target = path.with_name("w.pt")
    assert run("extract", path, "model.w", "-o", target).exit_code == 0
    assert_same_object(torch.load(target), obj["model"]["w"])
    assert run("extract", path, name, "-o", path.with_name("no.pt")).exit_code == 2
    rest = run("extract", path, "--whole", "-o", path.with_name("rest.pt"), "--json")
    assert json.loads(rest.stdout)["left_out"]
    assert torch.load(path.with_name("rest.pt"))["epoch"] == 3


@pytest.mark.parametrize("name", MADE)
def test_harmless_values_are_made(path: Path, name: str) -> None:
    """By everything but load, which refuses what torch.load does; see docs/limits.md."""
    obj = {"w": torch.arange(6.0), name: MADE[name]}
    torch.save(obj, path)
    with ptsave.open(path) as archive:
        assert_same_object(archive[name], MADE[name])
    other = path.with_name("new.pt")
    for words in (["extract", path, name, "-o", other], ["convert", path, other, "--force"]):
        assert run(*words).exit_code == 0
    assert_same_object(torch.load(other, weights_only=False), obj)
    assert run("compact", path, "-o", path.with_name("compact.pt")).exit_code == 0
    assert compare(path, other).equal
    assert run("ls", path).exit_code == 0
    target = {"w": torch.zeros(6), name: None}
    ptsave.load_into(path, target)
    assert_same_object(target, obj)
    refusals = []
    for load in (torch.load, ptsave.load):
        try:
            load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            refusals.append(str(error))
    assert len(refusals) in (0, 2)


def test_both_in_one_file(path: Path) -> None:
    """An array of objects is not built; NumPy's other values are, as far as they need no array."""
    torch.save({**MADE, **OPAQUE}, path)
    with ptsave.open(path) as archive:
        for name in ("path", "day", "delta", "default", "deque", "range", "slice"):
            assert_same_object(archive[name], MADE[name])
        for name in OPAQUE:
            with pytest.raises(pickle.UnpicklingError):
                archive[name]


def test_tensors_stay_unread_beside_objects() -> None:
    """Of an object nothing is called, whatever tensors it holds; so nothing looks at values."""
    for name in ("loud", "namespace", "named", "listed", "color", "partial", "module"):
        obj = {"w": torch.ones(3), "o": OPAQUE[name]}
        data = zip_records(saved_bytes(torch.save, obj))["data.pkl"]
        dtypes = {"float32", "int64"}
        assert not _C.rebuilds_blindly(data, dtypes), name
        opaque = opaque_globals(data)
        assert _C.rebuilds_blindly(data, dtypes, opaque), name
        for needed in opaque:
            assert not _C.rebuilds_blindly(data, dtypes, opaque - {needed}), (name, needed)


def test_the_class_is_shown(path: Path) -> None:
    torch.save({"args": OPAQUE["namespace"], "w": torch.ones(1)}, path)
    assert "args  argparse.Namespace" in run("ls", path).stdout
    values = json.loads(run("ls", path, "--json").stdout)["values"]
    assert values == [{"name": "args", "path": ["args"], "type": "argparse.Namespace"}]
    torch.save(OPAQUE["namespace"], path)  # as a Trainer's training_args.bin
    assert "argparse.Namespace" in run("ls", path).stdout
    assert verify_file(path).problems == []


def test_convert(path: Path, tmp_path: Path) -> None:
    obj = {"model": {"w": torch.ones(2)}, "args": OPAQUE["namespace"], "epoch": 3}
    torch.save(obj, path)
    refused = run("convert", path, tmp_path / "new.safetensors")
    assert "args (argparse.Namespace)" in refused.stderr
    assert run("convert", path, tmp_path / "new.safetensors", "--drop").exit_code == 0
    assert_same_object(load_file(tmp_path / "new.safetensors"), {"model.w": torch.ones(2)})
    assert run("convert", path, tmp_path / "new.pt").exit_code == 2
    dropped = run("convert", path, tmp_path / "new.pt", "--drop")
    assert "left out: args" in dropped.stderr
    del obj["args"]
    assert_same_object(torch.load(tmp_path / "new.pt"), obj)
    for words in (["compact", path, "-o", tmp_path / "no.pt"], ["convert", path, tmp_path / "d/"]):
        assert "argparse.Namespace" in run(*words).stderr


def test_diff(path: Path) -> None:
    """What the files give to objects is compared, tensors by their values."""
    other = path.with_name("other.ckpt")
    for change, expected in (
        ({}, []),
        ({"lr": 0.2}, ["args"]),
        ({"lr": float("nan")}, ["args"]),
        ({"tensor": torch.zeros(2)}, ["args.<tensor 0>"]),
        ({"array": np.arange(4)}, ["args"]),
    ):
        arguments = {"lr": 0.1, "tensor": torch.ones(2), "array": np.arange(3), "set": {"a", "b"}}
        torch.save({"args": argparse.Namespace(**arguments)}, path)
        torch.save({"args": argparse.Namespace(**(arguments | change))}, other)
        assert [each.name for each in compare(path, other).differences] == expected
        assert compare(other, other).equal  # NaN, too
    torch.save({"args": Loud()}, other)
    assert [each.name for each in compare(path, other).differences] == ["args"]
    torch.save({"args": {"a": 1}}, other)
    assert not compare(path, other).equal


def test_trust(path: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(a=1)}, path)
    target = tmp_path / "args.pt"
    trust = ["--trust", "argparse.Namespace"]
    assert run("extract", path, "args", "-o", target, *trust).exit_code == 0
    assert torch.load(target, weights_only=False) == argparse.Namespace(a=1)
    assert run("convert", path, tmp_path / "new.pt", *trust).exit_code == 0
    with ptsave.open(path) as archive, pytest.raises(pickle.UnpicklingError):
        archive["args"]  # it was trusted for these commands
    with torch.serialization.safe_globals([argparse.Namespace]), ptsave.open(path) as archive:
        assert archive["args"] == argparse.Namespace(a=1)
    for name in ("argparse.None", "no_such_module.Class", "Namespace"):
        result = run("extract", path, "args", "-o", target, "-f", "--trust", name)
        assert result.exit_code == 2
        assert "--trust" in result.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_directory(tmp_path: Path) -> None:
    noted = [with_attribute(torch.ones(2), argparse.Namespace(a=1))]
    state = {"w": torch.ones(3), "delta": datetime.timedelta(1), "args": argparse.Namespace(a=1)}
    state["noted"] = noted
    dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    with ptsave.open(tmp_path / "step") as archive:
        assert archive["w"].tolist() == [1, 1, 1]
        assert archive["delta"] == datetime.timedelta(1)
        for name in archive:
            assert not hasattr(archive[name], "note")
        with pytest.raises(pickle.UnpicklingError, match=r"needs argparse\.Namespace"):
            archive["args"]
    assert run("ls", tmp_path / "step").exit_code == 0
    assert compare(tmp_path / "step", tmp_path / "step").equal


def test_damage_beside_objects_is_named(path: Path) -> None:
    torch.save({"w": torch.full((99,), 3.0), "args": OPAQUE["namespace"]}, path)
    content = path.read_bytes()
    at = content.index(torch.full((9,), 3.0).numpy().tobytes())
    path.write_bytes(content[: at + 20] + b"damage" + content[at + 26 :])
    (problem,) = verify_file(path).problems
    assert problem.entries == ["w"]


def with_attribute(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    tensor.note = value  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        collections.deque([argparse.Namespace(a=1)]),
        [collections.deque([argparse.Namespace(a=1)])],
        with_attribute(torch.nn.Parameter(torch.ones(2)), argparse.Namespace(a=1)),
        with_attribute(torch.ones(2), argparse.Namespace(a=1)),
    ],
)
def test_none_gets_into_another_file(path: Path, tmp_path: Path, value: Any) -> None:
    """An object that is not built is refused, wherever it lies; of a tensor it is left out."""
    torch.save({"x": value, "w": torch.ones(2)}, path)
    with ptsave.open(path) as archive, contextlib.suppress(pickle.UnpicklingError):
        assert not hasattr(archive["x"], "note")
    for words in (["extract", path, "x"], ["extract", path, "--whole"], ["convert", path],
                  ["compact", path]):  # fmt: skip
        target = tmp_path / f"{words[0]}.pt"
        output = [target] if words[0] == "convert" else ["-o", target]
        run(*words, *output)
        if target.exists():
            assert b"ptsave" not in target.read_bytes()
            target.unlink()


def test_names_of_classes_are_escaped(path: Path) -> None:
    torch.save({"args": argparse.Namespace(a=1)}, path)
    content = path.read_bytes()
    evil = content.replace(b"cargparse\nNamespace\n", b"cargparse\nName\x1b[31m\n")
    old, new = (
        archive.payload(archive.records[0])
        for archive in (CutArchive(Buffer(io.BytesIO(each), "")) for each in (content, evil))
    )
    crcs = (_C.crc32(old).to_bytes(4, "little"), _C.crc32(new).to_bytes(4, "little"))
    path.write_bytes(evil.replace(*crcs))
    listed = run("ls", path)
    assert listed.exit_code == 0
    assert "\x1b" not in listed.stdout
    assert r"argparse.Name\x1b[31m" in listed.stdout
    torch.save({"args": 1}, path.with_name("other.pt"))
    assert "\x1b" not in run("diff", path, path.with_name("other.pt")).stdout
