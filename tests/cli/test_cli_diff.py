"""``ptsave diff``, also of captures: what it prints and draws, and its exit codes."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from command_line import fail, json_of, run
from safetensors.torch import save_file
from stock_comparison import stock_save
from torch import nn

import ptsave

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def diff(a: Any, b: Any, *options: str) -> Result:
    """Compare two objects, or files."""
    for obj, name in ((a, "a.pt"), (b, "b.pt")):
        if not isinstance(obj, str):
            stock_save(obj, name)
    names = [obj if isinstance(obj, str) else name for obj, name in ((a, "a.pt"), (b, "b.pt"))]
    return run("diff", *names, *options)


def test_equal() -> None:
    result = diff({"w": torch.ones(2)}, {"w": torch.ones(2)})
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "equal: 1 tensor compared (8 B)\n"


def test_different() -> None:
    a = {"w": torch.ones(2), "v": torch.ones(3), "step": 1, "t": (), "z": torch.zeros(2)}
    a["opt"] = {"state": {0: torch.ones(4)}, "lr": 0.1}
    b = {"w": torch.ones(3), "v": torch.tensor([1.0, 1.5, math.nan]), "step": 2, "t": []}
    b["z"] = -torch.zeros(2)
    result = diff(a, b)
    assert result.exit_code == 1
    *lines, summary = result.stdout.splitlines()
    assert summary == (
        "different: 2 only in a.pt, 1 of another type, 1 of another shape, 1 with another value, "
        "2 with other numbers; 2 tensors compared (20 B)"
    )
    assert lines == [
        "- opt  only in a.pt: 1 tensor (16 B), 1 value",
        "~ w  shape: [2] / [3]",
        "~ step  value: 1 / 2",
        "~ t  type: tuple / list",
        "~ v  float32 [3]: 2 of 3 differ, max abs 0.5, max rel 0.333, 1 NaN only in B",
        "~ z  float32 [2]: 2 of 2 differ, in their bits only: the values are equal",
    ]


def test_moved() -> None:
    state = nn.Linear(3, 4).state_dict()
    result = diff(dict(state), {f"module.{name}": value for name, value in state.items()})
    assert result.stdout.splitlines()[0] == (
        "> 2 tensors called * in a.pt may be module.* in b.pt: weight / module.weight"
    )
    assert result.exit_code == 1


def test_top() -> None:
    zeros = {name: torch.zeros(1) for name in "abc"}
    result = diff(zeros, {name: torch.ones(1) * i for i, name in enumerate("abc")}, "--top", "1")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("~ c ")
    assert lines[1] == "  and 1 more tensors whose values differ less"
    assert len(lines) == 3


def test_json() -> None:
    a, b = {"w": torch.zeros(2), "x": 1}, {"w": torch.tensor([0.0, math.inf])}
    result = diff(a, b, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["n_differences"] == len(found["differences"]) == 2
    assert found["differences"][0] == {"kind": "only in a", "name": "x", "a": "1"}
    assert found["differences"][1]["max_abs"] == "inf"
    assert found["differences"][1]["a"] == {"dtype": "float32", "shape": [2]}
    assert not found["equal"]
    assert json.loads(diff(a, a, "--json").stdout)["equal"]


def test_options() -> None:
    a, b = {"w": torch.ones(2)}, {"w": torch.ones(2).half() * 1.001}
    assert diff(a, b).exit_code == 1
    assert diff(a, b, "--ignore-dtype").exit_code == 1
    within = diff(a, b, "--ignore-dtype", "--rtol", "1e-2")
    assert (within.exit_code, within.stdout) == (
        0,
        "equal: 1 tensor compared (8 B), 1 of them equal within the tolerance\n",
    )
    assert diff(a, b, "--shapes").exit_code == 1
    assert diff(a, b, "--names-only").exit_code == 0
    assert "~ w  dtype: float32 / float16" in diff(a, b, "--only", "w").stdout


def test_remarks() -> None:
    state = {"w": torch.ones(2)}
    save_file(state, "a.safetensors")
    result = diff("a.safetensors", {**state, "step": 1})
    assert (result.exit_code, "b.pt holds more than tensors" in result.stderr) == (0, True)
    assert diff("a.safetensors", "b.pt", "--quiet").stderr == ""


def test_names_that_would_move_the_cursor() -> None:
    result = diff({"\x1b[2J\n": torch.ones(2)}, {"\x1b[2J\n": torch.zeros(2)})
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 2


def test_errors_say_what_to_do() -> None:
    result = diff({"model": torch.ones(2)}, {"model": torch.ones(2)}, "--only", "modle")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "did you mean 'model'?" in result.stderr
    Path("nothing").mkdir()
    assert "no *.safetensors" in diff("nothing", "a.pt").stderr
    assert diff("a.pt", "b.pt", "--atol", "-1").exit_code == 2


# ------------------------------------------------------------------------------------ diff captures


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with captured runs of one model, and a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
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
        with ptsave.capture(model, folder / name, what=["outputs", "params"], tensors=tensors):
            model(torch.ones(2, 4))
    ptsave.save(model.state_dict(), folder / "model.pt")
    return folder


@pytest.fixture
def diff_runs(runs: Path) -> Run:
    shutil.copytree(runs, ".", dirs_exist_ok=True)
    return lambda *arguments: run("diff", *arguments, "--capture")


def test_equal_runs(diff_runs: Run) -> None:
    result = diff_runs("a.pt", "a.pt")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("equal within the tolerance: 91 values compared (")


def test_runs_that_differ(diff_runs: Run) -> None:
    result = diff_runs("a.pt", "b.pt")
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
    shorter = diff_runs("a.pt", "b.pt", "--top", "3")
    assert "and 26 more modules" in shorter.stdout
    assert diff_runs("a.pt", "b.pt", "--atol", "1000").exit_code == 0
    assert diff_runs("a.pt", "b.pt", "--rtol", "0.01").exit_code == 1
    assert diff_runs("a.pt", "b.pt", "--step", "0", "--exact").exit_code == 1


def test_nan_and_statistics(diff_runs: Run) -> None:
    lines = diff_runs("a.pt", "nan.pt").stdout.splitlines()
    assert "    NaN 0 / 4, Inf 0 / 0" in lines
    assert all(len(line) <= 80 for line in lines)
    lines = diff_runs("a.pt", "statistics.pt").stdout.splitlines()
    assert lines[2] == "    float32 [4]: the statistics differ (one run has no tensors)"
    assert lines[3].startswith("    mean ")


def test_json_of_runs(diff_runs: Run) -> None:
    found = json_of("diff", "a.pt", "nan.pt", "--capture", code=1)
    assert (found["equal"], found["n_compared"]) == (False, 91)
    assert found["first"] == "0/params/2#0/bias"
    entry = found["differences"][0]
    assert (entry["n_nan_b"], entry["relative_error"], entry["ulps"]) == (4, "inf", {"more": 4})
    assert json_of("diff", "a.pt", "a.pt", "--capture")["first"] is None


def test_a_checkpoint(diff_runs: Run) -> None:
    assert diff_runs("b.pt", "model.pt").exit_code == 0
    result = diff_runs("model.pt", "a.pt")
    assert result.exit_code == 1
    assert "~ step 0, params, 2, call 0: bias" in result.stdout


def test_plot(diff_runs: Run) -> None:
    pytest.importorskip("matplotlib")
    for other in ("b.pt", "nan.pt", "a.pt", "statistics.pt"):
        diff_runs("a.pt", other, "--plot", "error.png")
        assert Path("error.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_plot_without_matplotlib(diff_runs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = diff_runs("a.pt", "b.pt", "--plot", "error.png")
    assert result.exit_code == 2
    assert "pip install 'ptsave[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a.pt", "missing.pt"), "No such file"),
        (("model.pt", "model.pt"), "neither model.pt nor model.pt is a capture"),
        (("a.pt", "b.pt", "--step", "3"), "no step 3 in common"),
        (("a.pt", "b.pt", "--rtol", "-1"), "must be 0 or more"),
        (("a.pt", "b.pt", "--exact", "--rtol", "1"), "cannot be combined"),
        (("a.pt", "b.pt", "--only", "x"), "cannot be used with --capture"),
        (("missing.pt", "b.pt", "--plot", "no/folder.png"), "no/folder.png: No such file"),
        (("missing.pt", "b.pt", "--plot", "x.xyz"), "matplotlib cannot write .xyz"),
    ],
)
def test_errors(diff_runs: Run, arguments: tuple[str, ...], words: str) -> None:
    result = diff_runs(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_link_stays_where_no_plot_is_drawn(diff_runs: Run) -> None:
    pytest.importorskip("matplotlib")
    Path("link.png").symlink_to("not-there-yet.png")
    assert diff_runs("missing.pt", "b.pt", "--plot", "link.png").exit_code == 2
    assert os.readlink("link.png") == "not-there-yet.png"
    assert not Path("not-there-yet.png").exists()


def test_options_that_need_it(diff_runs: Run) -> None:
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


def test_the_table_has_maxima_of_each_column() -> None:
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


def test_hint(diff_runs: Run) -> None:
    """It says that it could do more with captures."""
    result = run("diff", "a.pt", "a.pt")
    assert (result.exit_code, "--capture" in result.stderr) == (0, True)


def test_totals_of_what_is_listed(diff_runs: Run) -> None:
    def last(*arguments: str) -> str:
        result = run("ls", "a.pt", "--stats", *arguments)
        return result.stdout.splitlines()[-1]

    assert last() == "1 step, 31 calls, 91 values"
    assert last("3") == "1 module, 1 call, 3 tensors"
    assert last("3", "--step", "0") == "1 module, 1 call, 3 tensors in step 0"


def test_a_header_that_is_none(diff_runs: Run) -> None:
    torch.save({"capture": {"format": "ptsave.capture", "version": 1}}, "bare.pt")
    result = diff_runs("bare.pt", "bare.pt")
    assert result.exit_code == 2
    assert "there are no records, and the header lists no modules" in result.stderr
