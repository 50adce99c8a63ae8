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

from ptsave.bench.report import TIMES_STOCK, table
from ptsave.bench.system import describe_machine

__all__ = ["TIMES_STOCK", "Program", "table"]

ROOT = Path(__file__).resolve().parent.parent


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
            options.output.write_text("\n\n".join([f"# {self.title}", machine, *parts]) + "\n")

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
        parser.add_argument(
            "--output", type=Path, help="write a report with the machine's data too"
        )
        parser.add_argument("--task", help=argparse.SUPPRESS)
        return parser
