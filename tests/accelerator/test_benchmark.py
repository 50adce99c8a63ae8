"""The benchmark measures what it says, and notices other values."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ptsave
from accelerator.standin import control as standin
from benchmarks import accelerator
from benchmarks._program import TIMES_STOCK
from ptsave.bench.system import AS_FOUND, WARMED_UP

NAMES = [*accelerator.CONTENDERS]


@pytest.fixture(autouse=True)
def _small_and_here(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    """Measure small files, in this process, at once, with libraries that know the device."""
    monkeypatch.setattr(accelerator, "LARGE_NBYTES", 1 << 20)
    sizes = {"large": 2 << 20, "small": 10 * accelerator.SMALL_NBYTES}
    monkeypatch.setattr(accelerator, "NBYTES", sizes)
    foreign: tuple[str, ...] = ()
    if device_type != "cuda":
        foreign = accelerator.READERS
    elif standin.is_there():
        foreign = (accelerator.PREFETCH, accelerator.FAST)  # which look for a GPU themselves
    for name in ("load", "load_model", "small-load"):
        others = tuple(each for each in accelerator.CONTENDERS[name] if each not in foreign)
        monkeypatch.setitem(accelerator.CONTENDERS, name, others)
    monkeypatch.setattr(accelerator, "PROGRAM", SimpleNamespace(run_task=measured_here))
    monkeypatch.setattr(accelerator, "settle_memory", lambda _: None)


def measured_here(task: accelerator.Task) -> dict[str, Any]:
    return accelerator.run(**vars(task))


def rows_of(text: str, number: int) -> list[list[str]]:
    """Return the rows of a table, without its heading."""
    table = text.split("\n\n")[number]
    return [line[2:-2].split(" | ") for line in table.splitlines()[2:]]


def test_every_line(tmp_path: Path) -> None:
    rows = rows_of(accelerator.report(NAMES, 1, tmp_path), 1)
    assert [tuple(row[:3]) for row in rows] == [
        (name, contender, state)
        for name in NAMES
        for contender in accelerator.CONTENDERS[name]
        for state in (AS_FOUND, WARMED_UP)
        if (name, state) != (accelerator.LIMITS, AS_FOUND)
    ]
    assert all(float(row[3]) > 0 for row in rows)
    assert all(row[7] for row in rows if row[0] in ("save", "load", "load_model", "restore"))


@pytest.mark.parametrize("name", ["load", "load_model", "save"])
def test_other_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    nbytes = accelerator.NBYTES["large"]
    task = accelerator.Task(name, accelerator.PTSAVE, str(tmp_path), nbytes)
    accelerator.prepare(task)
    tensors = accelerator.make_tensors(name, nbytes)
    tensors["layers.1"][-1] += 1
    if name == "load_model":
        monkeypatch.setattr(ptsave, "load_model", lambda *_: None)
    elif name == "save":
        monkeypatch.setattr(ptsave, "save", lambda _, path: torch.save(tensors, path))
    else:
        monkeypatch.setattr(ptsave, "load", lambda *_, **_options: tensors)
    with pytest.raises(RuntimeError, match=f"{name}: ptsave has other values"):
        accelerator.measure(task)


def test_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contender that fails costs its own figures, and no others."""

    def run_task(task: accelerator.Task) -> dict[str, Any]:
        if task.contender in (accelerator.STOCK, accelerator.H2D):
            raise subprocess.CalledProcessError(1, "benchmark")
        return measured_here(task)

    monkeypatch.setattr(accelerator, "PROGRAM", SimpleNamespace(run_task=run_task))
    text = accelerator.report(["load"], 1, tmp_path)
    [failed, as_found, *_] = rows_of(text, 1)
    assert failed == ["load", "torch (failed)", *[""] * 7]
    assert as_found[:3] == ["load", "ptsave", AS_FOUND]
    assert float(as_found[3]) > 0
    assert as_found[6:8] == ["", ""]  # times torch, of the limit
    assert "load, torch: Command 'benchmark' returned" in capsys.readouterr().err


def test_goals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = {"torch": [4.0, 2.0, 2.0], accelerator.H2D: [9.0, 0.25, 0.25]}
    figures = {
        (name, each): [accelerator.Figure(seconds.get(each, [0.5, 0.5, 0.5]), 1 << 30, 65 << 20)]
        for name in NAMES
        for each in accelerator.CONTENDERS[name]
    }
    monkeypatch.setattr(accelerator, "run_rounds", lambda *_: figures)
    text = accelerator.report(NAMES, 1, tmp_path)
    assert f"| save | ptsave | as found | ≥ 5 {TIMES_STOCK} | 8.00 | yes |" in text
    assert f"| save | ptsave | warmed up | ≥ 5 {TIMES_STOCK} | 4.00 | **no** |" in text
    assert "| save | async_save | warmed up | ≥ 0.8 of the limit | 1.00 | yes |" in text
    assert (
        "| load | ptsave | as found | 0.5000 | 0.5000 - 0.5000 | 2.15 | 8.00 | 0.50 | 65 |" in text
    )
    assert "| restore | ptsave |  | ≤ 64 MiB pinned | 65 | **no** |" in text
