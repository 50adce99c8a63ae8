"""Reads tables of reports, and says which of their cells are bars of a plot.

A heading says what its column is: a contender, a unit or both. The column before "min - max" is
drawn, or else the first that has a unit. Contenders are rows or columns; labels are in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ptsave.bench.rounds import Bar, Group

__all__ = ["Table", "by_state", "groups_of", "tables_of"]

_SPREAD, _MET = "min - max", "met"
_LIMITS = ("limit", "floor", "memcpy")
_COLUMNS = ("torch", "ptsave", *_LIMITS)
_NAMES = ("torch", "loop", "ptsave")
_STATE = "state"
_GENERAL = ("contender", "process", _STATE, "")
_UNIT = re.compile(
    r"(?:(?P<before>[^≤≥]*?),? )?(?P<unit>s|seconds|ms|us|µs|GB/s|MiB)(?: (?P<after>.*))?"
)
_NUMBER = re.compile(r"([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: (ms|s|%))?")


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes
    ----------
    number : int
        Counted from 1 in its report.
    header : list of str
        The headings.
    rows : list of list of str
        The cells.
    end : int
        Where the text behind it begins in the report.
    """

    number: int
    header: list[str]
    rows: list[list[str]]
    end: int

    def is_of_goals(self) -> bool:
        """Return whether it says whether goals are met, of figures in the tables above it."""
        return _MET in self.header and _SPREAD not in self.header

    def of_one_state(self) -> Table:
        """Return the rows of the first state, as found, which is what a picture has room for."""
        if _STATE not in self.header or not self.rows:
            return self
        place = self.header.index(_STATE)
        rows = [row for row in self.rows if row[place] == self.rows[0][place]]
        return replace(self, rows=rows)

    def column(self, number: int) -> list[str]:
        """Return the cells of a column."""
        return [row[number] for row in self.rows]


def tables_of(report: str) -> list[Table]:
    """Return the tables of a report in markdown."""
    found = []
    for number, match in enumerate(re.finditer(r"(?:^\|.*\|\n)+", report, re.MULTILINE), 1):
        header, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in match[0].splitlines()
        )
        found.append(Table(number, header, rows, match.end()))
    return found


def by_state(reports: Mapping[str, str]) -> str:
    """Put reports together that are the same but for the figures, one for each state.

    A table gets a column with the state, in front of the last one of its texts; rows that have the
    same cells before that column stay together.  Other text is said once, or of each state.
    """
    if len(reports) < 2:
        return "\n\n".join(reports.values())
    parts = []
    for paragraphs in zip(*(report.split("\n\n") for report in reports.values()), strict=True):
        if paragraphs[0].startswith("|"):
            parts.append(_table_by_state(dict(zip(reports, paragraphs, strict=True))))
        elif len(set(paragraphs)) == 1:
            parts.append(paragraphs[0])
        else:
            each = zip(reports, paragraphs, strict=True)
            parts.append("\n".join(f"- {state}: {text}" for state, text in each))
    return "\n\n".join(parts)


def _table_by_state(tables: Mapping[str, str]) -> str:
    rows = {
        state: [line[2:-2].split(" | ") for line in text.splitlines()]
        for state, text in tables.items()
    }
    header, rule = next(iter(rows.values()))[:2]
    if any(own[:2] != [header, rule] for own in rows.values()):
        raise ValueError(f"tables with other headings: {[own[0] for own in rows.values()]}")
    place = max(sum(cell == "---" for cell in rule) - 1, 0)
    found = [[*header[:place], _STATE, *header[place:]], [*rule[:place], "---", *rule[place:]]]
    # The order of the first state's rows, and behind them rows that it does not have.
    labels = dict.fromkeys(tuple(row[:place]) for own in rows.values() for row in own[2:])
    for label in labels:
        for state, own in rows.items():
            mine = (row for row in own[2:] if tuple(row[:place]) == label)
            found += [[*row[:place], state, *row[place:]] for row in mine]
    return "\n".join(f"| {' | '.join(row)} |" for row in found)


@dataclass(frozen=True)
class _Figures:
    """A column of figures: its heading, taken apart."""

    column: int
    label: str
    unit: str


def groups_of(table: Table) -> list[tuple[str, Group]]:
    """Return a unit and the bars of each workload.

    Raises
    ------
    ValueError
        If the table has no figures, or a cell among them that is none.
    """
    n_labels, columns = _columns(table)
    if len(columns) > 1 or n_labels == 0:
        return list(_groups_by_row(table, n_labels, columns))
    return list(_groups_by_label(table, n_labels, columns[0]))


def _columns(table: Table) -> tuple[int, list[_Figures]]:
    """Return the number of columns that are labels, and the columns that are drawn.

    One column, if the contenders are rows; several, if they are columns.
    """
    headings = [_taken_apart(number, heading) for number, heading in enumerate(table.header)]
    spread = table.header.index(_SPREAD) - 1 if _SPREAD in table.header else None
    numbers = [all(_NUMBER.fullmatch(cell) or not cell for cell in row) for row in _cells(table)]
    n_labels = next(
        (
            number
            for number, each in enumerate(headings)
            if number == spread or (numbers[number] and (each.unit or each.label in _COLUMNS))
        ),
        len(headings),
    )
    figures = headings[n_labels:]
    named = [
        each
        for each in figures
        if each.label in _COLUMNS and each.column != spread and not _is_ratio(table, each.column)
    ]
    if spread is not None:
        drawn = [headings[spread], *named] if headings[spread].label in _COLUMNS else []
        return n_labels, sorted(drawn, key=lambda each: each.column) or [headings[spread]]
    if not figures:
        raise ValueError(
            f"no figures in | {' | '.join(table.header)} |: a heading names a unit, such as "
            f"'ptsave s', or {_SPREAD!r} stands behind it"
        )
    same = [each for each in figures if each.unit == figures[0].unit]
    if n_labels == 0:
        return 0, same
    return n_labels, [figures[0], *(each for each in named if each is not figures[0])]


def _is_ratio(table: Table, column: int) -> bool:
    """Whether a column says how many times faster something is: "2.7 x"."""
    cells = [cell for cell in table.column(column) if cell]
    return bool(cells) and all(cell.endswith(" x") for cell in cells)


def _cells(table: Table) -> Iterator[list[str]]:
    return (table.column(number) for number in range(len(table.header)))


def _taken_apart(column: int, heading: str) -> _Figures:
    if match := _UNIT.fullmatch(heading):
        label = match["before"] or match["after"] or ""
        return _Figures(column, label, {"seconds": "s"}.get(match["unit"], match["unit"]))
    return _Figures(column, heading, "")


def _groups_by_row(
    table: Table, n_labels: int, columns: Sequence[_Figures]
) -> Iterator[tuple[str, Group]]:
    """Yield a unit and a group for each row; its bars are columns."""
    for row in table.rows:
        labels = [cell for cell in row[:n_labels] if cell]
        unit = columns[0].unit or _unit_of(row[columns[0].column])
        if not unit and labels:  # of each row: "small", "save, us"
            unit = _taken_apart(0, labels[-1]).unit
        names = zip(table.header[:n_labels], row, strict=False)
        alone = next((cell for heading, cell in names if cell and heading != _STATE), "ptsave")
        figures = [each for each in columns if row[each.column]]
        bars = [_bar(table, row, each, each.label or alone, unit) for each in figures]
        title = ": ".join(label for label in labels if label != "seconds")
        yield unit, Group(title, [*bars, *_limit_of(table, row, bars, unit)])


def _limit_of(table: Table, row: list[str], bars: list[Bar], unit: str) -> list[Bar]:
    """Return the limit, if the row says only how near it ptsave is."""
    part = row[table.header.index("of the limit")] if "of the limit" in table.header else ""
    if not part or any(bar.is_limit for bar in bars):
        return []
    value = bars[-1].value * _number(part)
    return [Bar("limit", value, value, value, f"{value:.3g} {unit}", is_limit=True)]


def _groups_by_label(table: Table, n_labels: int, figures: _Figures) -> Iterator[tuple[str, Group]]:
    """Yield a unit and a group for each workload; its bars are rows."""
    names = [number for number in range(n_labels) if _has_names(table.column(number))]
    name = names[0] if names else n_labels - 1
    groups: dict[str, list[Bar]] = {}
    about = "" if table.header[name] in _GENERAL else table.header[name]
    for row in table.rows:
        others = [_of(table, number, row) for number in range(n_labels) if number != name]
        bar = _bar(table, row, figures, _named(row[name]), figures.unit)
        groups.setdefault(", ".join(filter(None, [about, *others])), []).append(bar)
    unit = figures.unit or _unit_of(table.rows[0][figures.column]) or table.header[figures.column]
    for title, bars in groups.items():
        yield unit, Group(title, bars)


def _has_names(cells: Sequence[str]) -> bool:
    return any(cell in _NAMES for cell in cells)


def _of(table: Table, column: int, row: list[str]) -> str:
    """Return a label, with its heading where it is a number: "ranks: 2"."""
    is_number = _NUMBER.fullmatch(row[column])
    return f"{table.header[column]}: {row[column]}" if is_number else row[column]


def _named(cell: str) -> str:
    """Return the name of a contender; that of a limit without its particulars."""
    return "limit" if cell.startswith("limit:") else cell.replace("`", "")


def _unit_of(cell: str) -> str:
    """Return the unit that stands in the cell itself: "12.5 ms"."""
    match = _NUMBER.fullmatch(cell)
    return match[2] or "" if match else ""


def _bar(table: Table, row: list[str], figures: _Figures, label: str, unit: str) -> Bar:
    cell = row[figures.column]
    value = low = high = _number(cell)
    behind = table.header[figures.column + 1 : figures.column + 2]
    if behind in ([_SPREAD], ["max"]) and row[figures.column + 1]:
        ends = [_number(each) for each in row[figures.column + 1].split(" - ")]
        low, high = min(value, *ends), max(value, *ends)
    is_limit = label.split(" ", maxsplit=1)[0] in _LIMITS
    text = cell if _unit_of(cell) else f"{cell} {unit}".strip()
    return Bar(label, value, low, high, text, is_limit)


def _number(cell: str) -> float:
    if match := _NUMBER.fullmatch(cell):
        return float(match[1].replace(",", ""))
    raise ValueError(f"{cell!r} is no figure, such as 0.25, 1,200 or '12.5 ms'")
