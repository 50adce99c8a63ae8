"""Draws the tables of reports as SVG: bars with the spread of the rounds, the limit as a line.

    python -m benchmarks.plots                     all of benchmarks/results, into build/plots
    python -m benchmarks.plots report.md --output pictures

Each table of figures has a picture in two versions, `restore-1.svg` for light pages and
`restore-1-dark.svg`. Of a table with several states the first one, as found, is drawn. Tables of
goals repeat figures of other tables, and have none. A table that cannot be drawn is an error.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

from benchmarks._tables import Table, groups_of, tables_of
from ptsave.bench.rounds import draw_bars

__all__ = ["RESULTS", "draw_report"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Black and its greys on a page that is dark.
_DARK = {"#000000": "#d5d9de", "#262626": "#d5d9de", "#555555": "#e8eaed", "#c0392b": "#ff7b6b"}


def draw_report(report: Path, folder: Path) -> dict[int, Path]:
    """Draw the tables of a report, and return the pictures by the tables' numbers.

    Raises
    ------
    ValueError
        If a table cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for table in tables_of(report.read_text()):
        if table.is_of_goals():
            continue
        try:
            svg = _svg(_draw(table.of_one_state()))
        except ValueError as error:
            raise ValueError(f"{report}, table {table.number}: {error}") from error
        pictures[table.number] = folder / f"{report.stem}-{table.number}.svg"
        pictures[table.number].write_text(svg)
        dark = re.sub("|".join(_DARK), lambda match: _DARK[match[0]], svg)
        pictures[table.number].with_stem(f"{report.stem}-{table.number}-dark").write_text(dark)
    return pictures


def _draw(table: Table) -> Any:
    found = groups_of(table)
    units = {unit for unit, _ in found}
    unit = units.pop() if len(units) == 1 else ""
    is_less_better = unit in ("", "s", "ms", "us", "µs", "MiB")
    better = " (less is better)" if is_less_better else " (more is better)" * (unit == "GB/s")
    return draw_bars(
        [group for _, group in found], (unit or "time, memory") + better, mixed=bool(units)
    )


def _svg(figure: Any) -> str:
    """Return a picture that is the same for the same table: no date, no random names."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "ptsave", "svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    # Text has no color of its own, which is black on any page, and a list of fonts in each place.
    svg = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "sans-serif", text.getvalue())
    svg = svg.replace('<text style="', '<text style="fill: #262626; ')
    return re.sub(r"(\.\d\d)\d{3,}", r"\1", svg)  # places, to a hundredth of a point


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--output", type=Path, default=Path("build/plots"), help="a folder")
    options = parser.parse_args()
    for report in options.reports or sorted(RESULTS.glob("*.md")):
        for picture in draw_report(report, options.output).values():
            print(picture)


if __name__ == "__main__":
    main()
