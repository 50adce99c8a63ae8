"""What all benchmark programs have in common: options, fresh processes, a report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.plots import draw_report
from ptsave.bench.plot import require_matplotlib
from ptsave.bench.report import TIMES_STOCK, table
from ptsave.bench.system import describe_machine

__all__ = [
    "TIMES_STOCK",
    "Program",
    "add_report_options",
    "check_options",
    "table",
    "write_report",
]

ROOT = Path(__file__).resolve().parent.parent


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


def write_report(text: str, output: Path, plots: Path | None) -> None:
    """Write a report, and a plot for each of its tables."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    if plots is not None:
        draw_report(output, plots)


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
        Measures workloads in a number of rounds, in a scratch folder, and returns tables: a text,
        or several, each of which is printed when it is there.
    workloads : sequence of str
        What can be chosen from.
    folder : Path
        Where scratch folders are made, unless ``--dir`` says another place.
    """

    name: str
    title: str
    doc: str
    measure: Callable[..., Any]
    report: Callable[[list[str], int, Path], str | Iterable[str]]
    workloads: Sequence[str] = ()
    folder: Path = Path()

    def run_task(self, task: Any) -> Any:
        """Measure a task, a dataclass, in a fresh process."""
        command = [sys.executable, "-m", f"benchmarks.{self.name}", "--task"]
        command.append(json.dumps(asdict(task)))
        result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(result.stdout.splitlines()[-1])

    def main(self) -> None:
        options = self._parser().parse_args()
        check_options(options)
        if options.task:
            print(json.dumps(self.measure(**json.loads(options.task))))
            return
        chosen = [*getattr(options, "workloads", [])]
        with tempfile.TemporaryDirectory(prefix="ptsave-benchmark-", dir=options.dir) as scratch:
            folder = Path(scratch).resolve()
            command = ["python", "-m", f"benchmarks.{self.name}", *chosen]
            machine = describe_machine(folder, [*command, "--rounds", str(options.rounds)])
            found = self.report(chosen or [*self.workloads], options.rounds, folder)
            parts = []
            for part in [found] if isinstance(found, str) else found:
                print(part, end="\n\n", flush=True)
                parts.append(part)
        _, start, notes = self.doc.partition("In each round")
        parts.append(start + notes.rstrip())
        print(parts[-1])
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
        parser.add_argument("--rounds", type=int, default=5, help="default: 5")
        parser.add_argument(
            "--dir", type=Path, default=self.folder, help="where files are written and read"
        )
        add_report_options(parser)
        parser.add_argument("--task", help=argparse.SUPPRESS)
        return parser
