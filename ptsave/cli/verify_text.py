"""Formats the findings of ``ptsave verify`` as text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ptsave.cli.terminal import Terminal
from ptsave.inspection.findings import Verification
from ptsave.support.text import count_text, printable, size_text

_N_SHOWN = 5


def file_lines(found: Verification, list_all: bool, terminal: Terminal) -> Iterator[str]:
    """Yield the lines about one file: its state, and all damage."""
    path = printable(found.path)
    records = [count_text(found.n_records, "record")] if found.n_records else []
    n_tensors = [] if found.tensors is None else [count_text(len(found.tensors), "tensor")]
    facts = ", ".join([*records, *n_tensors, size_text(found.nbytes)])
    if found.problems:
        yield f"{path}: {terminal.paint('DAMAGED', 'red', bold=True)} ({facts})"
        yield from _damages(found, list_all)
        return
    state, color = ("whole", "green") if found.has_checksums else ("no checksums", "yellow")
    begin = "unfinished, but " if found.is_unfinished else ""
    yield f"{path}: {begin}{terminal.paint(state, color)} ({facts})"


def damage_line(path: str, reason: str, terminal: Terminal) -> str:
    """Return the line about a damaged directory or set of shards."""
    damaged = terminal.paint("DAMAGED", "red", bold=True)
    return f"{printable(path)}: {damaged}: {printable(reason)}"


def rest_line(path: str, names: Sequence[str], list_all: bool) -> str:
    """Return the line about names that are not verified."""
    shown = names if list_all else names[:_N_SHOWN]
    more = f" and {len(names) - len(shown):,} more (--list shows all)" if names != shown else ""
    return f"{printable(path)}: not looked at: {', '.join(map(printable, shown))}{more}"


def _damages(found: Verification, list_all: bool) -> Iterator[str]:
    for problem in found.problems:
        where = "" if problem.record is None else f"record {problem.record}: "
        at = "" if problem.offset is None else f" (at offset {problem.offset})"
        yield f"  {printable(where + problem.reason)}{at}"
        yield from _names("damaged:", problem.entries, list_all)
    if found.whole is None or found.tensors is None:
        return
    yield f"  {len(found.whole):,} of {count_text(len(found.tensors), 'tensor')} can be read"
    if list_all:
        yield from _names("whole:", found.whole, list_all)
    if found.whole and (found.n_records or found.is_unfinished):
        path = shlex.quote(printable(found.path))
        yield f"  read them with: ptsave extract {path} --whole -o OUT"


def _names(label: str, names: Sequence[str], list_all: bool) -> Iterator[str]:
    shown = names if list_all else names[:_N_SHOWN]
    for name in shown:
        yield f"    {label} {printable(name)}"
    if len(names) > len(shown):
        yield f"    {label} and {len(names) - len(shown):,} more (--list shows all)"
