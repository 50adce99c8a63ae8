"""How long the ``ptsave`` command takes as a whole process, from its start to its end.

    python -m benchmarks.command                     15 rounds
    python -m benchmarks.command --rounds 5
    python -m benchmarks.command --output benchmarks/results/command.md

In each round every command runs once, in a shuffled order, in a fresh process with its output in a
pipe; files are in the page cache.  "python" is ``python -c pass``, "python -I -S" the same without
site-packages: the floor of all others.  Seconds are medians.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from benchmarks._program import Program, table
from benchmarks.archive import yes_or_no

N_TENSORS = 100_000
START = "import sys; sys.argv[0] = 'ptsave'; from ptsave.cli.main import main; main()"
PTSAVE = [sys.executable, "-c", START]
COMPLETE = {"_PTSAVE_COMPLETE": "bash_complete"}

# Name, command, variables, and the seconds it may take.
Case = tuple[list[str], dict[str, str], float | None]


def cases(folder: Path) -> dict[str, Case]:
    """Return what is measured, by name."""
    many, few = str(folder / "many.pt"), str(folder / "few.pt")
    words = {"COMP_WORDS": f"ptsave ls {few} ", "COMP_CWORD": "3"}
    return {
        "python -I -S": ([sys.executable, "-I", "-S", "-c", "pass"], {}, None),
        "python": ([sys.executable, "-c", "pass"], {}, None),
        "import torch": ([sys.executable, "-c", "import torch"], {}, None),
        "--version": ([*PTSAVE, "--version"], {}, 0.15),
        "--help": ([*PTSAVE, "--help"], {}, 0.15),
        "Tab: commands": (PTSAVE, {**COMPLETE, "COMP_WORDS": "ptsave ", "COMP_CWORD": "1"}, 0.15),
        "Tab: entries": (PTSAVE, {**COMPLETE, **words}, 0.2),
        "ls, 2 tensors": ([*PTSAVE, "ls", few], {}, None),
        "verify, 2 tensors": ([*PTSAVE, "verify", few], {}, None),
        "globals, 2 tensors": ([*PTSAVE, "globals", few], {}, None),
        f"ls, {N_TENSORS:,} tensors": ([*PTSAVE, "ls", many], {}, 0.6),
        f"verify, {N_TENSORS:,} tensors": ([*PTSAVE, "verify", many], {}, None),
    }


def seconds_of(case: Case) -> float:
    """Run a command, and return how long that took."""
    command, variables, _ = case
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **variables})
    return time.perf_counter() - begin


def report(_: list[str], rounds: int, folder: Path) -> str:
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(3)}, folder / "few.pt")
    many = {f"layers.{i}.weight": torch.ones(2, 3) for i in range(N_TENSORS)}
    torch.save(many, folder / "many.pt")
    found = cases(folder)
    figures: dict[str, list[float]] = {name: [] for name in found}
    for case in found.values():
        seconds_of(case)  # modules are compiled, and files read
    for _round in tqdm(range(rounds), leave=False, disable=None):
        for name in random.sample([*found], len(found)):
            figures[name].append(seconds_of(found[name]))
    rows = []
    for name, case in found.items():
        goal = case[2]
        seconds = median(figures[name])
        spread = f"{min(figures[name]):.3f} - {max(figures[name]):.3f}"
        met = "" if goal is None else yes_or_no(seconds <= goal)
        limit = "" if goal is None else f"{goal:.2f}"
        rows.append([name, f"{seconds:.3f}", spread, limit, met])
    return table(["process", "seconds", "min - max", "goal", "met"], rows)


def run(**_: object) -> None:
    """Measure nothing: the processes are the command's own."""


PROGRAM = Program("command", "The command as a whole process", __doc__ or "", run, report)

if __name__ == "__main__":
    PROGRAM.main()
