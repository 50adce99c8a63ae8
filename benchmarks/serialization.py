"""Saving and loading a language model's tensors: torch, safetensors, ptsave, the hardware.

    python -m benchmarks                                all workloads, 1 GiB, 3 rounds
    python -m benchmarks load-warm --gib 2              one workload, with 2 GiB of tensors
    python -m benchmarks --output benchmarks/results/serialization.md

In each round every workload runs once with every contender, in a shuffled order and with the
hardware's limit among them, because what a disk can do drifts.  Every figure comes from a fresh
process.  "As found" is its first call, after a rest in which a virtual machine's host may take free
memory back; "warmed up" is a later call, for which that memory has been fetched, as it is for the
limit in every state; "cold" is as found, with free memory put together for the host.  Ratios are
medians of the ratios within a round; the other figures are plain medians.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import _limits
from benchmarks._program import (
    add_report_options,
    add_state_options,
    check_options,
    compile_modules,
    state_options,
    states_of,
    write_report,
)
from benchmarks._tables import by_state
from ptsave.bench.rounds import (
    CONTENDERS,
    LIMIT,
    PTSAVE,
    SPEED_HEADER,
    STOCK,
    TIMES_STOCK,
    Bench,
    Results,
    Workload,
    is_available,
    run_rounds,
    speed_rows,
    table,
)
from ptsave.bench.system import describe_machine

GIB = 1 << 30

NOTES = """\
Each figure is from a fresh process; the contenders and the limit take turns, in a shuffled order.
As found: its first call, after a rest in which a virtual machine's host may take free memory back.
Warmed up: a later call, for which that memory has been fetched, as it is for the limit in every
state.  Cold: as found, with free memory put together before the rest, as on a machine that has just
started.
s and GB/s are medians over the rounds, and ratios are medians of the ratios within a round.
A load ends when one byte of every page of every tensor has been read.  safetensors always maps the
file, checks nothing and copies nothing before a page is touched: compare it with `mmap=True`.
ptsave checks every CRC, except with `mmap=True`.  A limit is that of 1, 2 or 4 threads,
whichever has the best median over the rounds."""


@dataclass(frozen=True, kw_only=True)
class Goals(Workload):
    """One thing that users do, and how fast it ought to be."""

    ratio_goal: float  # against stock
    limit_goal: float | None = None
    peak_goal_mib: float | None = 64


WORKLOADS = {
    "save-durable": Goals(
        title="save durable (fsync), disk",
        action="save",
        limit_mode="direct-write",
        limit_title="direct write + fdatasync",
        ratio_goal=3,
        limit_goal=0.9,
        fsync=True,
    ),
    "save-over": Goals(
        title="save durable over an older file, disk",
        action="save",
        limit_mode="direct-write",
        limit_title="direct write + fdatasync",
        ratio_goal=3,
        limit_goal=0.85,
        fsync=True,
        replaces=True,
    ),
    "save-disk": Goals(
        title="save, disk",
        action="save",
        limit_mode="buffered-write",
        limit_title="parallel write to the page cache",
        ratio_goal=2.5,
    ),
    "save-tmpfs": Goals(
        title="save, tmpfs",
        action="save",
        limit_mode="tmpfs-write",
        limit_title="parallel write to tmpfs",
        ratio_goal=1.5,
        on_tmpfs=True,
    ),
    "load-cold": Goals(
        title="load cold, disk",
        action="load",
        limit_mode="direct-read",
        limit_title="direct read",
        ratio_goal=2.5,
        limit_goal=0.9,
        page_cache="cold",
    ),
    "load-warm": Goals(
        title="load warm, disk",
        action="load",
        limit_mode="cached-read",
        limit_title="parallel read into fresh huge pages",
        ratio_goal=5,
        limit_goal=0.8,
    ),
    "mmap-warm": Goals(
        title="load mmap=True, warm",
        action="load",
        limit_mode="mapped-read",
        limit_title="bare mmap",
        ratio_goal=1,
        mmap=True,
        peak_goal_mib=None,
    ),
    "mmap-cold": Goals(
        title="load mmap=True, cold",
        action="load",
        limit_mode="direct-read",
        limit_title="direct read",
        ratio_goal=1,
        page_cache="cold",
        mmap=True,
        peak_goal_mib=None,
    ),
}


# ---------------------------------------------------------------------------------------- reporting


def peak_rows(workload: Goals, results: Results) -> Iterator[list[str]]:
    for contender in CONTENDERS:
        if contender in results.figures and workload.peak_goal_mib is not None:
            peaks = results.peaks_mib(contender)
            yield [workload.title, contender, f"{median(peaks):.1f}", f"{max(peaks):.1f}"]


def goal_rows(workload: Goals, results: Results) -> Iterator[list[str]]:
    """Yield how ptsave compares with each goal."""
    ratio = results.ratio(PTSAVE, STOCK)
    yield goal_row(
        workload, TIMES_STOCK, ratio, workload.ratio_goal, met=ratio >= workload.ratio_goal
    )
    if workload.limit_goal is not None:
        fraction = results.ratio(PTSAVE, LIMIT)
        met = fraction >= workload.limit_goal
        yield goal_row(workload, "of the limit", fraction, workload.limit_goal, met=met)
    if workload.peak_goal_mib is not None:
        peak = max(results.peaks_mib(PTSAVE))
        met = peak <= workload.peak_goal_mib
        yield goal_row(workload, "MiB above the tensors", peak, workload.peak_goal_mib, met=met)


def goal_row(workload: Goals, unit: str, value: float, goal: float, *, met: bool) -> list[str]:
    sign = "≤" if "MiB" in unit else "≥"
    return [workload.title, f"{sign} {goal:g} {unit}", f"{value:.2f}", "yes" if met else "**no**"]


def report(all_results: dict[str, Results]) -> str:
    """Return the tables in markdown."""

    def rows_of(rows: Callable[[Goals, Results], Iterator[list[str]]]) -> list[list[str]]:
        return [
            row for name, results in all_results.items() for row in rows(WORKLOADS[name], results)
        ]

    parts = [table(SPEED_HEADER, rows_of(speed_rows), 2)]
    if peaks := rows_of(peak_rows):
        parts.append(table(["workload", "contender", "peak MiB above tensors", "max"], peaks, 2))
    if all(PTSAVE in results.figures for results in all_results.values()):
        parts.append(table(["workload", "goal", "ptsave", "met"], rows_of(goal_rows), 2))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------- main


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"default: all of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--gib", type=float, default=1.0, help="tensors to move (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    add_state_options(parser)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    check_options(options)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")
    return options


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command without what names places on this machine."""
    command = ["python", "-m", "benchmarks", *options.workloads]
    if list(options.contenders) != list(CONTENDERS):
        command += ["--contenders", *options.contenders]
    command += ["--gib", f"{options.gib:g}", "--rounds", str(options.rounds)]
    return [*command, *state_options(options)]


def available_contenders(wanted: Iterable[str]) -> list[str]:
    """Return the contenders that can be imported; stock is always among them."""
    contenders = [STOCK]
    for contender in wanted:
        if contender == STOCK:
            continue
        if is_available(contender):
            contenders.append(contender)
        else:
            print(f"{contender} cannot be imported: left out", file=sys.stderr)
    return contenders


@contextmanager
def scratch_directories(options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yield one folder on disk and one on tmpfs that are gone afterwards, SIGTERM included."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    prefix = "ptsave-benchmark-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.dir) as disk,
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.tmpfs) as tmpfs,
    ):
        yield Path(disk).resolve(), Path(tmpfs).resolve()


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    names = options.workloads or list(WORKLOADS)
    _limits.build()
    contenders = available_contenders(options.contenders)
    compile_modules()
    found = {}
    with scratch_directories(options) as (disk, tmpfs):
        machine = describe_machine(disk, command_of(options))
        for state in states_of(options):
            bench = Bench(
                disk,
                tmpfs,
                int(options.gib * GIB),
                contenders,
                _limits.measure,
                drop_all=True,
                state=state,
                rest=options.rest,
            )
            bench.prepare()
            chosen = {name: WORKLOADS[name] for name in names}
            found[state] = report(run_rounds(bench, chosen, contenders, options.rounds))
    tables = f"{by_state(found)}\n\n{NOTES}"
    print(tables)
    if options.output is not None:
        text = f"# Serialization benchmark\n\n{machine}\n\n{tables}\n"
        write_report(text, options.output, options.plots)


if __name__ == "__main__":
    main()
