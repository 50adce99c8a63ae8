"""``ptsave diff --capture``: what it prints and draws, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from command_line import fail, run
from torch import nn

import ptsave

Run = Callable[..., Result]


@pytest.fixture
def diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    for name, shift, tensors in (
        ("a.pt", 0.0, True),
        ("b.pt", 1.0, True),
        ("nan.pt", torch.nan, True),
        ("statistics.pt", 1.0, False),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
        for layer in model:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]
        with torch.no_grad():
            model[2].bias.add_(shift)  # type: ignore[operator]
        with ptsave.capture(model, name, what=["outputs", "params"], tensors=tensors):
            model(torch.ones(2, 4))
    ptsave.save(model.state_dict(), "model.pt")

    def compare(*arguments: str) -> Result:
        return run("diff", *arguments, "--capture")

    return compare


def test_equal(diff: Run) -> None:
    result = diff("a.pt", "a.pt")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("equal within the tolerance: 91 values compared (")


def test_different(diff: Run) -> None:
    result = diff("a.pt", "b.pt")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "first difference, in A's order of execution:",
        "~ step 0, params, 2, call 0: bias",
        "    float32 [4]: 4 of 4 differ",
    ]
    assert lines[6].split() == ["module", "differ", "max", "abs", "max", "rel", "error", "cosine"]
    assert lines[7].split()[:2] == ["2", "2"]
    assert lines[-2] == "and 9 more modules"
    assert lines[-1].startswith("different: 30 differ; 91 values compared (")
    assert all(len(line) <= 80 for line in lines)
    shorter = diff("a.pt", "b.pt", "--top", "3")
    assert "and 26 more modules" in shorter.stdout
    assert diff("a.pt", "b.pt", "--atol", "1000").exit_code == 0
    assert diff("a.pt", "b.pt", "--rtol", "0.01").exit_code == 1
    assert diff("a.pt", "b.pt", "--step", "0", "--exact").exit_code == 1


def test_nan_and_statistics(diff: Run) -> None:
    lines = diff("a.pt", "nan.pt").stdout.splitlines()
    assert "    NaN 0 / 4, Inf 0 / 0" in lines
    assert all(len(line) <= 80 for line in lines)
    lines = diff("a.pt", "statistics.pt").stdout.splitlines()
    assert lines[2] == "    float32 [4]: other statistics, as one run has no tensors"
    assert lines[3].startswith("    mean ")


def test_json(diff: Run) -> None:
    result = diff("a.pt", "nan.pt", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["equal"], found["n_compared"]) == (1, False, 91)
    assert found["first"] == "0/params/2#0/bias"
    entry = found["differences"][0]
    assert (entry["n_nan_b"], entry["relative_error"], entry["ulps"]) == (4, "inf", {"more": 4})
    assert json.loads(diff("a.pt", "a.pt", "--json").stdout)["first"] is None


def test_a_checkpoint(diff: Run) -> None:
    assert diff("b.pt", "model.pt").exit_code == 0
    result = diff("model.pt", "a.pt")
    assert result.exit_code == 1
    assert "~ step 0, params, 2, call 0: bias" in result.stdout


def test_plot(diff: Run) -> None:
    pytest.importorskip("matplotlib")
    for other in ("b.pt", "nan.pt", "a.pt", "statistics.pt"):
        diff("a.pt", other, "--plot", "error.png")
        assert Path("error.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_plot_without_matplotlib(diff: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = diff("a.pt", "b.pt", "--plot", "error.png")
    assert result.exit_code == 2
    assert "pip install 'ptsave[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a.pt", "missing.pt"), "No such file"),
        (("model.pt", "model.pt"), "neither model.pt nor model.pt is a capture"),
        (("a.pt", "b.pt", "--step", "3"), "no step 3 in common"),
        (("a.pt", "b.pt", "--rtol", "-1"), "must be 0 or more"),
        (("a.pt", "b.pt", "--exact", "--rtol", "1"), "exclude each other"),
        (("a.pt", "b.pt", "--only", "x"), "not for --capture"),
        (("missing.pt", "b.pt", "--plot", "no/folder.png"), "no/folder.png: No such file"),
        (("missing.pt", "b.pt", "--plot", "x.xyz"), "matplotlib writes no .xyz"),
    ],
)
def test_errors(diff: Run, arguments: tuple[str, ...], words: str) -> None:
    result = diff(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_link_stays_where_no_plot_is_drawn(diff: Run) -> None:
    pytest.importorskip("matplotlib")
    Path("link.png").symlink_to("not-there-yet.png")
    assert diff("missing.pt", "b.pt", "--plot", "link.png").exit_code == 2
    assert os.readlink("link.png") == "not-there-yet.png"
    assert not Path("not-there-yet.png").exists()


def test_options_that_need_it(diff: Run) -> None:
    assert "need --capture" in fail("diff", "a.pt", "b.pt", "--step", "0")


class Two(nn.Module):
    """Returns constants: a row of the table is of two values."""

    def __init__(self, *outputs: list[float]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tensor(output) for output in self.outputs]


def two_runs(a: nn.Module, b: nn.Module) -> list[str]:
    for name, model in (("a.pt", a), ("b.pt", b)):
        with ptsave.capture(model, name, what=["outputs"]):
            model(torch.ones(1))
    result = run("diff", "a.pt", "b.pt", "--capture")
    assert result.exit_code == 1
    return result.stdout.splitlines()


def test_the_table_has_maxima_of_each_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The first has the larger error, the second the larger distance and the smaller cosine.
    lines = two_runs(Two([2.0, 0.0], [0.0, 100.0]), Two([1.0, 0.0], [100.0, 100.0]))
    assert lines[-2].split() == ["(the", "model)", "2", "100", "1", "1.41", "0.70711"]
    # Neither zeros on one side nor a shape has an angle, and neither hides the other columns.
    lines = two_runs(Two([0.0, 0.0], [1.0, 1.0]), Two([3.0, 4.0], [1.0, 2.0]))
    assert lines[-2].split()[2:] == ["2", "4", "1", "1.13", "0.94868"]
    lines = two_runs(Two([0.0, 0.0]), Two([3.0, 4.0]))
    assert lines[-2].split()[2:] == ["1", "4", "1", "1.13", "-"]
    lines = two_runs(Two([0.0, 0.0]), Two([3.0, 4.0, 5.0]))
    assert lines[-2].split()[2:] == ["1", "shape", "inf", "-"]
    lines = two_runs(Two([0.0, 0.0], [1.0]), Two([3.0, 4.0, 5.0], [2.0]))
    assert lines[-2].split()[2:] == ["2", "1", "0.5", "inf", "1.00000"]


def test_hint(diff: Run) -> None:
    """It says that it could do more with captures."""
    result = run("diff", "a.pt", "a.pt")
    assert (result.exit_code, "--capture" in result.stderr) == (0, True)


def test_totals_of_what_is_listed(diff: Run) -> None:
    def last(*arguments: str) -> str:
        result = run("ls", "a.pt", "--stats", *arguments)
        return result.stdout.splitlines()[-1]

    assert last() == "1 step, 31 calls, 91 values"
    assert last("3") == "1 module, 1 call, 3 tensors"
    assert last("3", "--step", "0") == "1 module, 1 call, 3 tensors in step 0"


def test_a_header_that_is_none(diff: Run) -> None:
    torch.save({"capture": {"format": "ptsave.capture", "version": 1}}, "bare.pt")
    result = diff("bare.pt", "bare.pt")
    assert result.exit_code == 2
    assert "it has no records, and its header no modules" in result.stderr
