"""``ptsave diff``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from command_line import run
from safetensors.torch import save_file
from stock_comparison import stock_save
from torch import nn

Run = Callable[..., Result]


@pytest.fixture
def diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def compare(a: Any, b: Any, *options: str) -> Result:
        names = []
        for obj, name in ((a, "a.pt"), (b, "b.pt")):
            if not isinstance(obj, str):
                stock_save(obj, name)
            names.append(obj if isinstance(obj, str) else name)
        return run("diff", *names, *options)

    return compare


def test_equal(diff: Run) -> None:
    result = diff({"w": torch.ones(2)}, {"w": torch.ones(2)})
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "equal: 1 tensor compared (8 B)\n"


def test_different(diff: Run) -> None:
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


def test_moved(diff: Run) -> None:
    state = nn.Linear(3, 4).state_dict()
    result = diff(dict(state), {f"module.{name}": value for name, value in state.items()})
    assert result.stdout.splitlines()[0] == (
        "> 2 tensors called * in a.pt may be module.* in b.pt: weight / module.weight"
    )
    assert result.exit_code == 1


def test_top(diff: Run) -> None:
    zeros = {name: torch.zeros(1) for name in "abc"}
    result = diff(zeros, {name: torch.ones(1) * i for i, name in enumerate("abc")}, "--top", "1")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("~ c ")
    assert lines[1] == "  and 1 more tensors whose values differ less"
    assert len(lines) == 3


def test_json(diff: Run) -> None:
    a, b = {"w": torch.zeros(2), "x": 1}, {"w": torch.tensor([0.0, math.inf])}
    result = diff(a, b, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["differences"][0] == {"kind": "only in a", "name": "x", "a": "1"}
    assert found["differences"][1]["max_abs"] == "inf"
    assert found["differences"][1]["a"] == {"dtype": "float32", "shape": [2]}
    assert not found["equal"]


def test_options(diff: Run) -> None:
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


def test_remarks(diff: Run) -> None:
    state = {"w": torch.ones(2)}
    save_file(state, "a.safetensors")
    result = diff("a.safetensors", {**state, "step": 1})
    assert (result.exit_code, "b.pt holds more than tensors" in result.stderr) == (0, True)
    assert diff("a.safetensors", "b.pt", "--quiet").stderr == ""


def test_names_that_would_move_the_cursor(diff: Run) -> None:
    result = diff({"\x1b[2J\n": torch.ones(2)}, {"\x1b[2J\n": torch.zeros(2)})
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 2


def test_errors_say_what_to_do(diff: Run) -> None:
    result = diff({"model": torch.ones(2)}, {"model": torch.ones(2)}, "--only", "modle")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "did you mean 'model'?" in result.stderr
    Path("nothing").mkdir()
    assert "no *.safetensors" in diff("nothing", "a.pt").stderr
    assert diff("a.pt", "b.pt", "--atol", "-1").exit_code == 2
