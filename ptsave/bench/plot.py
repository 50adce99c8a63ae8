"""Plots speeds as bars, by contender."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ptsave.bench.rounds import CONTENDERS, LIMIT, Results, Workload

__all__ = ["plot_speeds", "require_matplotlib"]

_COLORS = {"stock": "#9aa5b1", "safetensors": "#e0a458", "ptsave": "#2f6f9f", LIMIT: "#dfe3e8"}
_BAR = 0.2  # of the space of a workload, which is 1


def require_matplotlib() -> Any:
    """Return the Figure class of matplotlib.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install 'ptsave[plot]', or pip install matplotlib"
        ) from error
    return Figure


def plot_speeds(
    path: str, workloads: Mapping[str, Workload], results: Mapping[str, Results], title: str
) -> None:
    """Write a picture of the median speeds, with lines from the slowest to the fastest round.

    Parameters
    ----------
    path : str
        A file; its ending chooses the format: ``.png``, ``.svg``, ``.pdf``.
    workloads : mapping of str to Workload
        By short names.
    results : mapping of str to Results
        Figures of each of them.
    title : str
        Title of the plot.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    OSError
        If the file cannot be written.
    ValueError
        If the format is none that matplotlib writes.
    """
    figure = require_matplotlib()(figsize=(8, 1.2 + 1.3 * len(workloads)), layout="constrained")
    axes = figure.add_subplot()
    for number, contender in enumerate((*CONTENDERS, LIMIT)):
        names = [name for name in workloads if contender in results[name].figures]
        if not names:
            continue
        rows = [[*workloads].index(name) + (number - 1.5) * _BAR for name in names]
        speeds = [results[name].speeds(contender) for name in names]
        middle = [median(speed) for speed in speeds]
        spread = [
            [m - min(speed) for m, speed in zip(middle, speeds, strict=True)],
            [max(speed) - m for m, speed in zip(middle, speeds, strict=True)],
        ]
        label = "torch" if contender == "stock" else contender
        bars = axes.barh(
            rows, middle, _BAR * 0.9, xerr=spread, label=label, color=_COLORS[contender], capsize=2
        )
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
    axes.set_yticks(range(len(workloads)), [each.title for each in workloads.values()])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s (more is better)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="best", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(path), dpi=150)
