"""Formats figures as tables for terminals and markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from ptsave.bench.rounds import CONTENDERS, LIMIT, STOCK, Results, Workload

TIMES_STOCK = "\N{MULTIPLICATION SIGN} torch"
SPEED_HEADER = ("workload", "contender", "s", "min - max", "GB/s", TIMES_STOCK, "of limit")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], n_texts: int = 1) -> str:
    """Return a markdown table; columns after the first `n_texts` are numbers."""
    rule = ["---"] * n_texts + ["---:"] * (len(header) - n_texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], n_texts: int = 1) -> str:
    """Return a table for a terminal; columns after the first `n_texts` are numbers.

    >>> print(aligned(["call", "s"], [["save", "1.25"], ["load", "12.50"]]))
    call      s
    save   1.25
    load  12.50
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < n_texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def speed_rows(workload: Workload, results: Results) -> Iterator[list[str]]:
    """Yield a row of `SPEED_HEADER` for each contender, and for the limit."""
    for contender in (*CONTENDERS, LIMIT):
        if contender not in results.figures:
            continue
        seconds = [figure.seconds for figure in results.figures[contender]]
        label = contender
        if contender == LIMIT:
            threads = results.best_threads()
            label = f"{workload.limit_label()}, {threads} threads"
        yield [
            workload.title,
            label,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{median(results.speeds(contender)):.2f}",
            f"{results.ratio(contender, STOCK):.2f}",
            f"{results.ratio(contender, LIMIT):.2f}",
        ]
