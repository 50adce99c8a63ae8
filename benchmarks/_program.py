"""What all benchmark programs have in common: options, states, fresh processes, a report.

A program measures each workload in all of its states.  A task runs in a process whose environment
names the state and the seconds of rest (`_STATE`, `_REST`); it calls `settle_memory` right before
its clock starts, and warms up only if `is_warmed_up`.  Tables of a state are put together by
`by_state`, so that a workload has its rows for each.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._tables import by_state
from benchmarks.plots import draw_report
from ptsave.bench.rounds import TIMES_STOCK, require_matplotlib, table
from ptsave.bench.system import (
    AS_FOUND,
    REST_SECONDS,
    STATES,
    WARMED_UP,
    available_states,
    describe_machine,
    settle,
)

__all__ = [
    "TIMES_STOCK",
    "WITHOUT_COLD",
    "Program",
    "Task",
    "add_report_options",
    "add_state_options",
    "check_options",
    "compile_modules",
    "is_warmed_up",
    "settle_memory",
    "state_options",
    "states_of",
    "table",
    "write_report",
]

ROOT = Path(__file__).resolve().parent.parent
_STATE, _REST = "PTSAVE_BENCHMARK_STATE", "PTSAVE_BENCHMARK_REST"
WITHOUT_COLD = (AS_FOUND, WARMED_UP)  # states of programs that hardly write or allocate


def is_warmed_up() -> bool:
    """Whether a call is measured behind another one of this process."""
    return os.environ.get(_STATE, WARMED_UP) == WARMED_UP


def settle_memory(nbytes: int, *, is_limit: bool = False) -> None:
    """Bring free memory into the state that is measured, right before the clock starts.

    Parameters
    ----------
    nbytes : int
        Memory to fetch where it is warmed up.
    is_limit : bool
        Whether the hardware's limit is measured, whose memory is always there.
    """
    gc.collect()
    state = WARMED_UP if is_limit else os.environ.get(_STATE, WARMED_UP)
    settle(state, nbytes, rest=float(os.environ.get(_REST, REST_SECONDS)))


def add_state_options(
    parser: argparse.ArgumentParser,
    states: Sequence[str] = STATES,
    rest: float = REST_SECONDS,
) -> None:
    """Add the options that `states_of` and `state_options` take."""
    names = [state.replace(" ", "-") for state in STATES]
    default = [state.replace(" ", "-") for state in states]
    parser.add_argument("--states", nargs="+", choices=names, default=default)
    parser.add_argument(
        "--rest", type=float, default=rest, help=f"seconds before a call, default: {rest:g}"
    )


def states_of(options: argparse.Namespace, states: Iterable[str] = STATES) -> list[str]:
    """Return the chosen ones of some states that can be had here, and say which cannot."""
    chosen = [state for state in states if state.replace(" ", "-") in options.states]
    found = available_states(chosen)
    if lacking := [state for state in chosen if state not in found]:
        print(f"not measured, as this needs root: {', '.join(lacking)}", file=sys.stderr)
    return found


def state_options(options: argparse.Namespace) -> list[str]:
    """Return the options as they stand on a command line."""
    return ["--states", *options.states, "--rest", f"{options.rest:g}"]


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check_options` checks and `write_report` takes."""
    parser.add_argument("--output", type=Path, help="write a report with the machine's data too")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw the tables of the report (SVG) there"
    )


def check_options(options: argparse.Namespace) -> None:
    """Refuse plots that cannot be drawn, before anything is measured."""
    if options.plots is None:
        return
    if options.output is None:
        sys.exit("--plots draws the tables of a report: name one with --output report.md, too")
    try:
        require_matplotlib()
    except ImportError as error:
        sys.exit(str(error))


def compile_modules() -> None:
    """Write the bytecode that an installed package has, or first calls would compile modules."""
    compileall.compile_dir(ROOT / "ptsave", quiet=1)


def write_report(text: str, output: Path, plots: Path | None) -> None:
    """Write a report, and a plot for each of its tables."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    if plots is not None:
        draw_report(output, plots)


@dataclass(frozen=True)
class Task:
    """A figure that one process measures, or the files that it makes."""

    workload: str
    contender: str
    folder: str


@dataclass(frozen=True)
class Program:
    """A benchmark that measures every figure in a fresh process.

    Attributes
    ----------
    name : str
        The module, without the package.
    title : str
        Of the report.
    doc : str
        The module's docstring: for ``--help``, and from "In each round" on for the report.
    measure : callable
        What the fresh process does: its arguments are the fields of a task, it returns what JSON
        can hold.
    report : callable
        Measures workloads in a number of rounds, in a scratch folder, in one state, and returns
        tables: a text, or several.
    workloads : sequence of str
        What can be chosen from.
    folder : Path
        Where scratch folders are made, unless ``--dir`` says another place.
    states : sequence of str
        Those that are measured, unless ``--states`` says fewer.
    """

    name: str
    title: str
    doc: str
    measure: Callable[..., Any]
    report: Callable[[list[str], int, Path], str | Iterable[str]]
    workloads: Sequence[str] = ()
    folder: Path = Path()
    states: Sequence[str] = STATES

    def run_task(self, task: Any) -> Any:
        """Measure a task, a dataclass, in a fresh process."""
        command = [sys.executable, "-m", f"benchmarks.{self.name}", "--task"]
        command.append(json.dumps(asdict(task)))
        result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(result.stdout.splitlines()[-1])

    def measured(
        self, contenders: Mapping[str, Sequence[str]], names: list[str], rounds: int, folder: Path
    ) -> dict[tuple[str, str], list[Any]]:
        """Measure workloads with each of their contenders, which begin in turn."""
        figures: dict[tuple[str, str], list[Any]] = {}
        for turn in range(rounds):
            for name in names:
                n = len(contenders[name])
                for i in range(n):
                    contender = contenders[name][(turn + i) % n]
                    found = self.run_task(Task(name, contender, str(folder)))
                    figures.setdefault((name, contender), []).append(found)
        return figures

    def main(self) -> None:
        options = self._parser().parse_args()
        check_options(options)
        if options.task:
            print(json.dumps(self.measure(**json.loads(options.task))))
            return
        compile_modules()
        chosen = [*getattr(options, "workloads", [])]
        command = ["python", "-m", f"benchmarks.{self.name}", *chosen]
        command += ["--rounds", str(options.rounds), *state_options(options)]
        with tempfile.TemporaryDirectory(prefix="ptsave-benchmark-", dir=options.dir) as scratch:
            machine = describe_machine(Path(scratch), command)
        found = {}
        # One after another: cold memory would be that of the next figure as found.
        for state in states_of(options, self.states):
            print(f"{state}:", file=sys.stderr)
            os.environ |= {_STATE: state, _REST: str(options.rest)}
            with tempfile.TemporaryDirectory(
                prefix="ptsave-benchmark-", dir=options.dir
            ) as scratch:
                folder = Path(scratch).resolve()
                parts = self.report(chosen or [*self.workloads], options.rounds, folder)
                found[state] = parts if isinstance(parts, str) else "\n\n".join(parts)
        if not found:
            return
        _, start, notes = self.doc.partition("In each round")
        parts = [by_state(found), start + notes.rstrip()]
        print("\n\n".join(parts))
        if options.output is not None:
            text = "\n\n".join([f"# {self.title}", machine, *parts]) + "\n"
            write_report(text, options.output, options.plots)

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if self.workloads:
            choices = [*self.workloads, []]
            parser.add_argument("workloads", nargs="*", choices=choices, metavar="workload")
        parser.add_argument("--rounds", type=int, default=3, help="default: 3")
        parser.add_argument(
            "--dir", type=Path, default=self.folder, help="where files are written and read"
        )
        add_state_options(parser, self.states)
        add_report_options(parser)
        parser.add_argument("--task", help=argparse.SUPPRESS)
        return parser
