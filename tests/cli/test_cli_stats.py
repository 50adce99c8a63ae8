"""`ptsave ls --stats`: statistics of captures by modules, and of other files by reading them."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.shell_completion import ShellComplete
from command_line import fail, json_of, run, succeed
from safetensors.torch import save_file
from torch import Tensor, nn

import ptsave
from ptsave.cli.commands import commands


def output_of(*arguments: object, width: int | None = None) -> str:
    columns = None if width is None else str(width)
    return succeed("ls", "--stats", *arguments, COLUMNS=columns).stdout


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 3), twice=Twice()))


@pytest.fixture
def captured(model: nn.Module, tmp_path: Path) -> Path:
    with ptsave.capture(model, tmp_path / "run.pt") as capture:
        for step in range(2):
            model(torch.full((2, 4), float(step))).sum().backward()
            capture.step()
    return tmp_path / "run.pt"


def modules_of(*arguments: object) -> dict[str, Any]:
    found = json_of("ls", "--stats", *arguments)
    return {module["path"]: module for module in found["modules"]}


def test_modules_and_their_values(captured: Path, model: nn.Module) -> None:
    modules = modules_of(captured)
    assert [*modules] == [path for path, _ in model.named_modules()]
    assert [each["calls"] for each in modules.values()] == [2, 2, 2, 4]
    values = {value["name"]: value for value in modules["twice.inner"]["values"]}
    assert [*values][:2] == ["inputs/0", "outputs"]
    assert {"outputs.grad", "weight", "bias", "weight.grad", "bias.grad"} <= {*values}
    assert values["outputs"]["tensors"] == 4
    assert values["outputs"]["shapes"] == [[2, 3]]
    with ptsave.open(captured) as opened:
        names = [v.name for v in opened.captured_values("forward") if "inner#" in v.name]
        outputs = [opened.tensor(name) for name in names if name.endswith("/outputs")]
    together = torch.cat(outputs).double()
    statistics = values["outputs"]["statistics"]
    assert statistics["numel"] == together.numel()
    assert statistics["mean"] == pytest.approx(together.mean().item())
    assert statistics["std"] == pytest.approx(together.std().item())
    assert statistics["norm"] == pytest.approx(together.norm().item())


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--step", "1"), ("--depth", "2", "twice")])
def test_a_capture_has_them_by_default(captured: Path, arguments: tuple[str, ...]) -> None:
    shown = run("ls", captured, *arguments)
    assert (shown.exit_code, shown.stdout) == (0, output_of(captured, *arguments))
    for entries in (["--no-stats"], ["--sort", "size"], ["-l"]):
        assert "0/records/0" in run("ls", captured, "--no-stats").stdout
        assert run("ls", captured, *entries).stdout != shown.stdout


def test_one_step_and_some_modules(captured: Path) -> None:
    modules = modules_of(captured, "--step", 1, "twice")
    assert [*modules] == ["twice", "twice.inner"]
    assert modules["twice.inner"]["calls"] == 2
    inputs = modules_of(captured, "--step", 1)["first"]["values"][0]
    assert (inputs["name"], inputs["statistics"]["min"], inputs["tensors"]) == ("inputs/0", 1, 1)
    assert [*modules_of(captured, "*.inner")] == ["twice.inner"]


def test_the_table(captured: Path) -> None:
    lines = output_of(captured).splitlines()
    assert lines[0].split() == ["dtype", "shape", "mean", "std", "min", "max", "norm"]
    assert lines[1].split() == ["Sequential", "2", "calls"]
    assert any(line.split()[:4] == ["inner", "Linear,", "4", "calls"] for line in lines)
    inputs = next(line for line in lines if "inputs/0" in line)
    assert inputs.split() == ["inputs/0", "float32", "[2,", "4]", "0.5", "0.516", "0", "1", "2.83"]
    assert lines[-1].startswith("3 steps" if "3 steps" in lines[-1] else "2 steps")
    assert not any("inner" in line for line in output_of(captured, "--depth", 2).splitlines())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_fit_the_terminal(captured: Path, width: int) -> None:
    lines = output_of(captured, width=width).splitlines()
    assert max(map(len, lines)) <= width
    columns = lines[0].split()
    assert {"mean", "min", "max"} <= {*columns} or width < 60
    assert ("norm" in columns) == (width >= 80)


def test_nan_and_infinity_are_remarked(tmp_path: Path) -> None:
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    path = tmp_path / "x.pt"
    tensors = {"bad": bad, "good": torch.arange(4), "none": torch.ones(0)}
    torch.save({"model": tensors, "n": 1}, path)
    lines = output_of(path).splitlines()
    assert lines[2].split()[0] == "bad"
    assert lines[2].endswith("  1 NaN, 2 Inf")
    assert lines[3].split() == ["good", "int64", "[4]", "1.5", "1.29", "0", "3", "3.74"]
    assert lines[4].split() == ["none", "float32", "[0]", "nan", "nan", "nan", "nan", "0"]
    assert not any(line.startswith("n ") for line in lines)
    found = {each["name"]: each for each in json_of("ls", "--stats", path)["tensors"]}
    assert found["model.bad"]["statistics"]["n_inf"] == 2
    assert found["model.none"]["statistics"]["mean"] is None
    assert found["model.good"]["statistics"]["max"] == 3


def test_other_kinds_of_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(3) * 2}, tmp_path / "b.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = json_of("ls", "--stats", tmp_path)
    means = [file["tensors"][0]["statistics"]["mean"] for file in found["files"]]
    assert means == [1, 2]
    lines = output_of(tmp_path).splitlines()
    assert lines[0] == "a.safetensors:"
    assert lines[2].split()[:4] == ["a", "float32", "[3]", "1"]
    sparse = torch.eye(3).to_sparse()
    torch.save([sparse, torch.ones(2, dtype=torch.complex64) * 1j], tmp_path / "sparse.pt")
    text = output_of(tmp_path / "sparse.pt")
    assert "sparse: statistics of the stored values" in text
    assert "0+1j" in text


def test_captures_without_tensors_or_statistics(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for options in ({"tensors": False}, {"statistics": False}):
        with ptsave.capture(model, path, what=["outputs"], **options):  # type: ignore[arg-type]
            model(torch.ones(2, 4))
        (output,) = modules_of(path, "first")["first"]["values"]
        assert (output["statistics"] is None) == ("statistics" in options)
        assert ("statistics=False" in output_of(path)) == ("statistics" in options)


def test_what_makes_no_sense(captured: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, plain := tmp_path / "plain.pt")
    for arguments, message in (
        ((captured, "--step", 7), "no records of step 7: its steps are 0, 1"),
        ((captured, "nothing"), "no entry 'nothing'"),
        ((captured, "--sort", "size"), "leave --sort, --long and"),
        ((plain, "--step", 1), "is not a capture, and has no steps"),
        ((plain, "nothing"), "no entry 'nothing'"),
    ):
        assert message in fail("ls", "--stats", *arguments)
    assert "--step needs --stats" in fail("ls", "--no-stats", "--step", "1", captured)


def test_names_that_are_not_printable(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict({"a/b#\x1b[31m": nn.Identity()}))
    with ptsave.capture(model, tmp_path / "run.pt"):
        model({"key\n": torch.ones(2)})
    lines = output_of(tmp_path / "run.pt").splitlines()
    assert all(line.isprintable() for line in lines)
    assert any("a/b#\\x1b[31m" in line for line in lines)


def test_names_of_modules_complete(captured: Path) -> None:
    complete = ShellComplete(commands, {}, "ptsave", "_PTSAVE_COMPLETE")
    for options in ([], ["--stats"]):
        found = complete.get_completions(["ls", *options, str(captured)], "tw")
        assert [item.value for item in found] == ["twice", "twice.inner"]
    found = complete.get_completions(["ls", "--no-stats", str(captured)], "0/rec")
    assert found[0].value == "0/records/0"
    # What is no name may be another FILE.
    (file,) = complete.get_completions(["ls", str(captured)], "other.p")
    assert file.type == "file"


def test_records_are_listed_in_one_line(captured: Path) -> None:
    result = run("ls", "--no-stats", captured)
    assert result.exit_code == 0
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("0/records/0"))
    with ptsave.open(captured) as opened:
        calls = [call for call in opened.calls() if call.step == 0]
        values = opened.captured_values(step=0)
        n_tensors = len(opened.keys())
    assert line.split("  ")[-1] == f"{len(calls)} calls, {len(values)} values"
    listed = json_of("ls", "--no-stats", captured)
    assert len(listed["tensors"]) == n_tensors


def test_records_that_are_damaged_are_listed_whole(tmp_path: Path) -> None:
    header = {"format": "ptsave.capture", "version": 1}
    torch.save({"capture": header, "0/records/0": {"calls": [torch.ones(2)]}}, tmp_path / "x.pt")
    listed = json_of("ls", "--no-stats", tmp_path / "x.pt")
    assert [each["name"] for each in listed["tensors"]] == ["0/records/0.calls.0"]
    assert "the capture is damaged: '0/records/0' has no list of calls" in fail(
        "ls", "--stats", tmp_path / "x.pt"
    )
