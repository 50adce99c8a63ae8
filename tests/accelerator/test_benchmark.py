"""The benchmark measures what it says, and notices other values."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import accelerator
from benchmarks._program import TIMES_STOCK

NBYTES = 2 * accelerator.LARGE_NBYTES


@pytest.mark.parametrize(
    ("workload", "contender"),
    [
        (workload, contender)
        for workload, contenders in accelerator.CONTENDERS.items()
        for contender in contenders
        if contender not in (accelerator.SAFETENSORS, accelerator.FAST)
        and not workload.startswith("small")
    ],
)
def test_figures(tmp_path: Path, workload: str, contender: str) -> None:
    if workload == "load":
        task = accelerator.Task(workload, contender, str(tmp_path), NBYTES, prepare=True)
        accelerator.measure(task)
    figure = accelerator.measure(accelerator.Task(workload, contender, str(tmp_path), NBYTES))
    assert figure.nbytes == NBYTES
    assert all(seconds > 0 for seconds in figure.seconds)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        (name, contender): [accelerator.Figure([2.0 if contender == "torch" else 0.5], 1 << 30)]
        for name, contenders in accelerator.CONTENDERS.items()
        for contender in contenders
    }
    monkeypatch.setattr(accelerator, "run_rounds", lambda *_: figures)
    text = accelerator.report([*accelerator.CONTENDERS], 1, tmp_path)
    assert f"| save | ≥ 5 {TIMES_STOCK} | 4.00 | **no** |" in text
    assert "| blocked | ≥ 0.8 of pinned d2h | 1.00 | yes |" in text
