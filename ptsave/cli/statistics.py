"""Shows statistics of tensors as text and as JSON: ``ptsave ls --stats`` and ``ptsave show``.

docs/reference/command_line.md documents the JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from ptsave.capturing.run import (
    CapturedRun,
    ModuleStatistics,
    PooledStatistics,
    ValueStatistics,
    entry_statistics,
    module_statistics,
)
from ptsave.cli.listing import ListOptions, file_json, json_text, totals_lines
from ptsave.cli.terminal import Terminal, terminal
from ptsave.contents.captures import captured_run, is_capture
from ptsave.contents.contents import Contents
from ptsave.contents.files import ShardFiles
from ptsave.contents.opening import OpenOptions, open_each
from ptsave.inspection.reports import FileListing, listing_of, select
from ptsave.support.text import (
    count_text,
    cut,
    dtype_text,
    first_of,
    n_columns,
    padded,
    printable,
    shape_text,
    short_count_text,
)

_INDENT = "  "
_MIN_NAME_WIDTH = 16
_COLUMNS = ("dtype", "shape", "mean", "std", "min", "max", "norm")
_TEXTS = {"dtype", "shape"}  # aligned to the left
_DISPENSABLE = ("norm", "dtype", "shape", "std")  # if there is no room, left out in this order
_JSON_FIELDS = ("numel", "n_nan", "n_inf", "n_zero", "mean", "std", "min", "max", "norm")


def statistics_text(files: ShardFiles, asked: ListOptions) -> str:
    """Return the statistics of a checkpoint's tensors, or of a capture's modules, as text."""
    contents = list(open_each(files, OpenOptions(recover=asked.recover)))
    if len(contents) == 1 and is_capture(contents[0].obj):
        return _statistics_of_run(captured_run(contents[0].obj, contents[0].path), asked)
    if asked.step is not None:
        raise click.UsageError(f"{files.path} is not a capture, and has no steps: leave --step out")
    listings = [listing_of(each) for each in contents]
    chosen = select(listings, asked.names)
    if asked.as_json:
        objects = [
            _with_statistics(file_json(listing, numbers), entry_statistics(each, listing, numbers))
            for each, listing, numbers in zip(contents, listings, chosen, strict=True)
        ]
        return json_text(files.path, files, objects)
    return "\n".join(_statistics_of_files(contents, listings, chosen, asked.depth))


def _statistics_of_run(run: CapturedRun, asked: ListOptions) -> str:
    modules = module_statistics(run, step=asked.step, patterns=asked.names)
    if asked.as_json:
        return json.dumps(_run_json(run, modules))
    totals = (
        f"{count_text(len(run.steps), 'step')}, {count_text(len(run.call_rows), 'call')}, "
        f"{count_text(len(run.value_rows), 'value')}"
    )
    if asked.names or asked.step is not None:  # count only the listed modules and step
        where = "" if asked.step is None else f" in step {asked.step}"
        n_calls = sum(module.n_calls for module in modules)
        n_tensors = sum(value.n_tensors for module in modules for value in module.values)
        totals = (
            f"{count_text(len(modules), 'module')}, {count_text(n_calls, 'call')}, "
            f"{count_text(n_tensors, 'tensor')}{where}"
        )
    shown = [each for each in modules if asked.depth is None or each.depth < asked.depth]
    lines = [line for module in shown for line in _lines_of_module(module)]
    remarks = []
    if run.header.get("statistics") is False:
        remarks.append("captured with statistics=False")
    if run.totals is None:
        remarks.append("unfinished: the process was killed")
    return "\n".join([*_table(lines, terminal()), "", totals, *remarks])


def _statistics_of_files(
    contents: list[Contents],
    listings: list[FileListing],
    chosen: list[list[int]],
    depth: int | None,
) -> Iterator[str]:
    for each, listing, numbers in zip(contents, listings, chosen, strict=True):
        if len(contents) > 1:
            yield f"{printable(os.path.basename(listing.path))}:"
        nodes = listing.tree.nodes
        shown = [number for number in numbers if depth is None or nodes[number].depth < depth]
        found = entry_statistics(each, listing, shown)
        yield from _entry_lines(listing, shown, found, terminal())
        yield ""
    yield from totals_lines(listings, chosen, terminal())


# --------------------------------------------------------------------------------------------- text


class _Line(NamedTuple):
    name: str
    cells: Mapping[str, str]
    remark: str
    is_alarming: bool = False  # it has NaN or infinities


def _lines_of_module(module: ModuleStatistics) -> Iterator[_Line]:
    indent = _INDENT * module.depth
    class_name = module.class_name.rpartition(".")[2]
    words = [] if module.label == class_name else [printable(class_name)]
    if module.n_calls:
        words.append(count_text(module.n_calls, "call"))
    yield _Line(f"{indent}{printable(module.label)}", {}, ", ".join(filter(None, words)))
    for value in module.values:
        yield _line_of(f"{indent}{_INDENT}{printable(value.name)}", value)


def _entry_lines(
    listing: FileListing,
    numbers: Sequence[int],
    statistics: Mapping[int, ValueStatistics],
    terminal: Terminal,
) -> list[str]:
    """Return the lines of the nodes `numbers`: containers, and tensors with statistics."""
    lines = []
    for number in numbers:
        node = listing.tree.nodes[number]
        name = f"{_INDENT * node.depth}{printable(str(node.key))}"
        if number in statistics:
            dtype, shape = listing.facts[node.tensor][:2]
            cells = {"dtype": dtype_text(dtype), "shape": shape_text(shape)}
            line = _line_of(name, statistics[number])
            lines.append(line._replace(cells={**line.cells, **cells}))
        elif listing.tree.is_container(number) and node.again is None:
            lines.append(_Line(name, {}, ""))
    return list(_table(lines, terminal))


def _line_of(name: str, value: ValueStatistics) -> _Line:
    cells = {
        "dtype": first_of([dtype.removeprefix("torch.") for dtype in value.dtypes]),
        "shape": first_of([shape_text(shape) for shape in value.shapes]),
    }
    found = value.statistics
    note = [printable(value.note)] if value.note else []
    if found is None:
        return _Line(name, cells, "".join(note))
    numbers = {key: _number_text(getattr(found, key)) for key in _COLUMNS[2:]}
    counts = {"NaN": found.n_nan, "Inf": found.n_inf}
    remarks = [f"{short_count_text(n)} {name}" for name, n in counts.items() if n]
    return _Line(name, {**cells, **numbers}, ", ".join([*remarks, *note]), bool(remarks))


def statistics_line(value: ValueStatistics) -> str:
    """Return the statistics of one tensor, or the reason why it has none."""
    found = value.statistics
    if found is None:
        return printable(value.note)
    numbers = [f"{name} {_number_text(getattr(found, name))}" for name in _COLUMNS[2:]]
    counts = f"{found.numel:,} elements, {found.n_nan:,} NaN, {found.n_inf:,} Inf"
    return "; ".join([", ".join(numbers), counts, *([printable(value.note)] if value.note else [])])


def _number_text(number: complex) -> str:
    """Return a number as text with three significant digits; small integers are exact.

    >>> _number_text(12345), _number_text(0.1234567), _number_text(-1.5e-7)
    ('12345', '0.123', '-1.5e-07')
    """
    if isinstance(number, int) and abs(number) < 1_000_000:
        return str(int(number))
    return f"{number:.3g}"


# ----------------------------------------------------------------------------------------- table


def _table(lines: Sequence[_Line], terminal: Terminal) -> Iterator[str]:
    width = terminal.width
    head = _Line("", {name: name for name in _COLUMNS}, "")
    columns = [name for name in _COLUMNS if any(line.cells.get(name) for line in lines)]
    if not columns:
        yield from (f"{line.name}  {line.remark}".rstrip() for line in lines)
        return
    widths = {
        name: max(n_columns(line.cells.get(name, "")) for line in (head, *lines))
        for name in columns
    }
    name_width = max(n_columns(line.name) for line in lines)
    if width is not None:
        # A remark follows the columns, or the name of a line without columns.
        remarks = max((n_columns(line.remark) + 2 for line in lines if line.cells), default=2) - 2
        name_width = _fitted(widths, name_width, width - (remarks and remarks + 2))
    for line in (head, *lines):
        text = f"{padded(cut(line.name, name_width), name_width)}{_cells(line, widths)}"
        text = f"{text}  {line.remark}" if line.remark else text
        text = (text if width is None else cut(text.rstrip(), width)).rstrip()
        if line is head or not line.cells:
            text = terminal.paint(text, bold=True)
        elif line.is_alarming:
            text = terminal.paint(text, "red")
        yield text


def _fitted(widths: dict[str, int], name_width: int, width: int) -> int:
    """Remove columns from `widths` until the names fit; return the width of the names."""
    for name in _DISPENSABLE:
        free = width - sum(widths.values()) - 2 * len(widths)
        if free >= name_width:
            return name_width
        widths.pop(name, None)
    free = width - sum(widths.values()) - 2 * len(widths)
    return min(name_width, max(free, _MIN_NAME_WIDTH))


def _cells(line: _Line, widths: Mapping[str, int]) -> str:
    if not line.cells:
        return ""
    texts = ((line.cells.get(name, ""), name, width) for name, width in widths.items())
    return "".join(
        f"  {padded(text, width) if name in _TEXTS else text.rjust(width)}"
        for text, name, width in texts
    )


# --------------------------------------------------------------------------------------------- JSON


def _run_json(run: CapturedRun, modules: Iterable[ModuleStatistics]) -> dict[str, Any]:
    """Return the JSON object for the chosen `modules` of a capture."""
    return {
        "path": run.path,
        "format": "capture",
        "model": run.model,
        "steps": [*run.steps],
        "finished": run.totals is not None,
        "modules": [
            {
                "path": module.path,
                "class": module.class_name,
                "calls": module.n_calls,
                "values": [_value_json(value) for value in module.values],
            }
            for module in modules
        ],
    }


def _with_statistics(
    file: dict[str, Any], statistics: Mapping[int, ValueStatistics]
) -> dict[str, Any]:
    """Add statistics to the tensors in a file's JSON object; both are in the same order."""
    for tensor, value in zip(file["tensors"], statistics.values(), strict=True):
        tensor |= {"note": value.note, "statistics": statistics_json(value.statistics)}
    return file


def _value_json(value: ValueStatistics) -> dict[str, Any]:
    return {
        "name": value.name,
        "phase": value.phase,
        "tensors": value.n_tensors,
        "dtypes": [dtype.removeprefix("torch.") for dtype in value.dtypes],
        "shapes": [[*shape] for shape in value.shapes],
        "nbytes": value.nbytes,
        "note": value.note,
        "statistics": statistics_json(value.statistics),
    }


def statistics_json(found: PooledStatistics | None) -> dict[str, Any] | None:
    """Return the JSON object for statistics; None if there are no statistics."""
    if found is None:
        return None
    return {name: number_json(getattr(found, name)) for name in _JSON_FIELDS}


def number_json(number: Any) -> Any:
    """Return a number for JSON; NaN and infinities are None."""
    if isinstance(number, complex):
        return [number_json(number.real), number_json(number.imag)]
    return number if math.isfinite(number) else None
