"""Plots figures: groups of contenders' bars, and the hardware's limit as a line."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ptsave.bench.rounds import CONTENDERS, LIMIT, SAFETENSORS, Results, Workload
from ptsave.sources.locations import refuse_url_target

_OURS, _SAFETENSORS, _OTHERS, _LINE = "#3d86bd", "#e0a458", "#9aa5b1", "#c0392b"
_OTHER_NAMES = ("torch", "torch.save", "loop", "nothing", "empty", "clones", "references")
_ROW_INCHES = 0.21
# If the groups' longest bars differ by a larger factor, each group has its own scale.
_COMPARABLE = 10
_TEXT = 0.15  # the width of a figure's text, as a fraction of the longest bar


@dataclass(frozen=True)
class Bar:
    """One contender's median, its `low` to `high` spread, and a text; a limit is a line."""

    label: str
    value: float
    low: float
    high: float
    text: str
    is_limit: bool = False


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other, such as the bars of one workload."""

    title: str
    bars: Sequence[Bar]

    def longest(self) -> float:
        """Return the value of the longest bar; the limit counts only if it is alone."""
        values = [bar.value for bar in self.bars if not bar.is_limit]
        return max(values or [bar.value for bar in self.bars]) or 1.0


def require_matplotlib() -> Any:
    """Return matplotlib's Figure class, or raise an ImportError with advice."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install 'ptsave[plot]', or pip install matplotlib"
        ) from error
    return Figure


def check_plot(path: str) -> None:
    """Raise the errors of plotting to a file now, before minutes of measuring or reading."""
    refuse_url_target(path)
    formats = require_matplotlib()().canvas.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise ValueError(
            f"{path}: matplotlib writes no .{suffix}, but {', '.join(sorted(formats))}"
        )
    path = path if suffix else f"{path}.png"  # as matplotlib calls it
    folder = os.path.dirname(path) or "."
    for wrong, code in (
        (os.path.isdir(path), errno.EISDIR),
        (not os.path.isdir(folder), errno.ENOENT),
        (not os.access(path if os.path.exists(path) else folder, os.W_OK), errno.EACCES),
    ):
        if wrong:
            raise OSError(code, os.strerror(code), path)


def draw_bars(groups: Sequence[Group], axis: str, title: str = "", *, mixed: bool = False) -> Any:
    """Return a matplotlib figure of the groups, from top to bottom.

    `axis` is the name and unit of the figures.  With `mixed` each group has its own scale, so that
    only bars of one group compare.
    """
    longest = [group.longest() for group in groups]
    mixed = mixed or max(longest) > _COMPARABLE * min(longest)
    ends = [
        max(bar.high / each for bar in group.bars)
        for group, each in zip(groups, longest, strict=True)
    ]
    width = max(ends) if mixed else max(bar.high for group in groups for bar in group.bars)
    n_rows = sum(len(group.bars) + 1 for group in groups)
    height = _ROW_INCHES * n_rows + (1.0 if title else 0.7)
    figure = require_matplotlib()(figsize=(6.5, height), layout="constrained")
    axes = figure.add_subplot()
    ticks: dict[float, str] = {}
    row = 0.0
    for group, scale in zip(groups, longest, strict=True):
        axes.text(0, row, f" {group.title}", fontsize=9, weight="bold", va="center")
        top, unit = row + 0.5, scale if mixed else 1.0
        lines = [bar.value / unit for bar in group.bars if bar.is_limit]
        for bar in group.bars:
            row += 1
            ticks[row] = bar.label
            end = _draw(axes, bar, row, top, unit)
            near = [line for line in lines if end <= line < end + _TEXT * width]
            place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
            at = (max([end, *near]), row)
            axes.annotate(bar.text, at, **place, va="center", fontsize=8, parse_math=False)
        row += 1.2
    axes.set_yticks([*ticks], [*ticks.values()], fontsize=9, parse_math=False)
    axes.set_ylim(row - 0.5, -0.7)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{axis}, of the longest bar in each group" if mixed else axis, fontsize=9)
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _draw(axes: Any, bar: Bar, row: float, top: float, unit: float) -> float:
    """Draw a bar and its spread, or the limit's line from the group's `top`; return its end."""
    value, low, high = (each / unit for each in (bar.value, bar.low, bar.high))
    if bar.is_limit:
        axes.plot([value, value], [top, row + 0.4], color=_LINE, linewidth=1.3, zorder=3)
    else:
        others = _OTHERS if bar.label in _OTHER_NAMES else _OURS
        color = _SAFETENSORS if bar.label == SAFETENSORS else others
        axes.barh(row, value, 0.78, color=color)
    if low < high:
        axes.plot([low, high], [row, row], color="#555555", linewidth=0.9, zorder=4)
    return max(high, value)


def plot_speeds(
    path: str, workloads: Mapping[str, Workload], results: Mapping[str, Results], title: str
) -> None:
    """Draw the median speeds with their spread to a file, whose suffix chooses the format."""
    groups = [Group(each.title, _speeds(results[name])) for name, each in workloads.items()]
    draw_bars(groups, "GB/s (more is better)", title).savefig(Path(path), dpi=150)


def _speeds(results: Results) -> list[Bar]:
    bars = []
    for contender in (*CONTENDERS, LIMIT):
        if contender in results.figures:
            speeds = results.speeds(contender)
            spread = (median(speeds), min(speeds), max(speeds))
            bars.append(Bar(contender, *spread, f"{spread[0]:.2f}", contender == LIMIT))
    return bars
