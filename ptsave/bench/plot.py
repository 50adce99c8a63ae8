"""Plots of figures: bars of contenders in groups, and the hardware's limit as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ptsave.bench.rounds import CONTENDERS, LIMIT, STOCK, Results, Workload

__all__ = ["Bar", "Group", "draw_bars", "plot_speeds", "require_matplotlib"]

_OURS, _SAFETENSORS, _OTHERS, _LINE = "#3d86bd", "#e0a458", "#9aa5b1", "#c0392b"
_OTHER_NAMES = ("torch", "torch.save", "loop", "nothing", "empty", "clones", "references")
_ROW_INCHES = 0.21
# Groups whose longest bars differ by more are drawn in proportion to the longest bar of each.
_COMPARABLE = 10
_TEXT = 0.15  # of the longest bar: the room that a figure's text takes


@dataclass(frozen=True)
class Bar:
    """The figure of one contender.

    Attributes
    ----------
    label : str
        The contender, or the operation.
    value, low, high : float
        The median, and the least and the largest figure.
    text : str
        What stands beside the bar: the figure with its unit.
    is_limit : bool
        Whether it is the hardware's: a line across its group.
    """

    label: str
    value: float
    low: float
    high: float
    text: str
    is_limit: bool = False


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other, such as those of one workload."""

    title: str
    bars: Sequence[Bar]

    def longest(self) -> float:
        """Return the value of the longest bar; the limit's only where there is no other."""
        values = [bar.value for bar in self.bars if not bar.is_limit]
        return max(values or [bar.value for bar in self.bars]) or 1.0


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


def draw_bars(groups: Sequence[Group], axis: str, title: str = "", *, mixed: bool = False) -> Any:
    """Return a figure of matplotlib with a bar for each figure.

    Parameters
    ----------
    groups : sequence of Group
        From top to bottom.
    axis : str
        Name and unit of the figures.
    title : str
        Title of the plot.
    mixed : bool
        Whether the groups have units of their own, so that only bars of one group compare.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
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
            _write(axes, bar.text, max([end, *near]), row)
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
    """Draw a bar and its spread, or the limit's line from the group's `top`; return the end."""
    value, low, high = (each / unit for each in (bar.value, bar.low, bar.high))
    if bar.is_limit:
        axes.plot([value, value], [top, row + 0.4], color=_LINE, linewidth=1.3, zorder=3)
    else:
        axes.barh(row, value, 0.78, color=_color(bar.label))
    if low < high:
        axes.plot([low, high], [row, row], color="#555555", linewidth=0.9, zorder=4)
    return max(high, value)


def _write(axes: Any, text: str, end: float, row: float) -> None:
    """Write a figure behind its bar, and behind a limit's line that would cross it."""
    offset: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(text, (end, row), **offset, va="center", fontsize=8, parse_math=False)


def _color(label: str) -> str:
    if label == "safetensors":
        return _SAFETENSORS
    return _OTHERS if label in _OTHER_NAMES else _OURS


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
    groups = [Group(each.title, _speeds(results[name])) for name, each in workloads.items()]
    draw_bars(groups, "GB/s (more is better)", title).savefig(Path(path), dpi=150)


def _speeds(results: Results) -> list[Bar]:
    bars = []
    for contender in (*CONTENDERS, LIMIT):
        if contender in results.figures:
            speeds = results.speeds(contender)
            label = "torch" if contender == STOCK else contender
            spread = (median(speeds), min(speeds), max(speeds))
            bars.append(Bar(label, *spread, f"{spread[0]:.2f}", contender == LIMIT))
    return bars
