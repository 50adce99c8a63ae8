"""Formats statistics of tensors as text: one line each, in columns that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ptsave.cli.terminal import Terminal
from ptsave.inspection.listing import FileListing
from ptsave.inspection.statistics import ModuleStatistics, ValueStatistics
from ptsave.support.text import (
    count_text,
    cut,
    dtype_text,
    n_columns,
    padded,
    printable,
    shape_text,
    short_count_text,
)
from ptsave.tree.pooled_statistics import PooledStatistics

_INDENT = "  "
_MIN_NAME_WIDTH = 16
_COLUMNS = ("dtype", "shape", "mean", "std", "min", "max", "norm")
_TEXTS = {"dtype", "shape"}  # aligned to the left
_DISPENSABLE = ("norm", "dtype", "shape", "std")  # left out in this order if there is no room


class _Line(NamedTuple):
    name: str
    cells: Mapping[str, str]
    remark: str
    is_alarming: bool = False  # it has NaN or infinities


def module_lines(
    modules: Sequence[ModuleStatistics], max_depth: int | None, terminal: Terminal
) -> list[str]:
    """Return the lines of modules and their values; each module comes before its children.

    If the terminal is too narrow, some statistics are left out.
    """
    lines: list[_Line] = []
    for module in modules:
        if max_depth is None or module.depth < max_depth:
            lines += _lines_of_module(module)
    return list(_table(lines, terminal))


def _lines_of_module(module: ModuleStatistics) -> Iterator[_Line]:
    indent = _INDENT * module.depth
    class_name = module.class_name.rpartition(".")[2]
    words = [] if module.label == class_name else [printable(class_name)]
    if module.n_calls:
        words.append(count_text(module.n_calls, "call"))
    yield _Line(f"{indent}{printable(module.label)}", {}, ", ".join(filter(None, words)))
    for value in module.values:
        yield _line_of(f"{indent}{_INDENT}{printable(value.name)}", value)


def entry_lines(
    listing: FileListing,
    numbers: Sequence[int],
    statistics: Mapping[int, ValueStatistics],
    terminal: Terminal,
) -> list[str]:
    """Return the lines of the numbered nodes: containers, and tensors with statistics."""
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
        "dtype": _first_of([dtype.removeprefix("torch.") for dtype in value.dtypes]),
        "shape": _first_of([shape_text(shape) for shape in value.shapes]),
    }
    found = value.statistics
    note = [printable(value.note)] if value.note else []
    if found is None:
        return _Line(name, cells, "".join(note))
    numbers = {key: _number_text(getattr(found, key)) for key in _COLUMNS[2:]}
    remarks = [*_remarks(found)]
    return _Line(name, {**cells, **numbers}, ", ".join([*remarks, *note]), bool(remarks))


def statistics_line(value: ValueStatistics) -> str:
    """Return the statistics of one tensor, or the reason why it has none."""
    found = value.statistics
    if found is None:
        return printable(value.note)
    numbers = [f"{name} {_number_text(getattr(found, name))}" for name in _COLUMNS[2:]]
    counts = f"{found.numel:,} elements, {found.n_nan:,} NaN, {found.n_inf:,} Inf"
    return "; ".join([", ".join(numbers), counts, *([printable(value.note)] if value.note else [])])


def _first_of(texts: Sequence[str]) -> str:
    more = f" +{len(texts) - 1}" if len(texts) > 1 else ""
    return f"{printable(texts[0])}{more}" if texts else ""


def _remarks(found: PooledStatistics) -> list[str]:
    counts = {"NaN": found.n_nan, "Inf": found.n_inf}
    return [f"{short_count_text(n)} {name}" for name, n in counts.items() if n]


def _number_text(number: complex) -> str:
    """Return a real number in up to nine characters, or a complex one in more.

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
    """Leave out columns until the names fit; return the width of the names."""
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
