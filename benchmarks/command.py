"""How long the ``ptsave`` command takes as a whole process, from its start to its end.

    python -m benchmarks.command                     3 rounds
    python -m benchmarks.command --rounds 15
    python -m benchmarks.command --output benchmarks/results/command.md

In each round every command runs once, in a shuffled order, in a fresh process with its output in a
pipe: as found, but that files are in the page cache.  "python" is ``python -c pass``,
"python -I -S" the same without site-packages: the floor of all others.  "import ptsave" is the
statement behind ``import torch``, "and its save, load" also the first use of these two, timed
within a process.  Seconds are medians.
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
from ptsave.bench.system import AS_FOUND
from ptsave.cli.completion import LINE

N_TENSORS = 100_000
START = "import sys; sys.argv[0] = 'ptsave'; from ptsave.__main__ import main; main()"
PTSAVE = [sys.executable, "-c", START]
# Prints how long a statement takes in a process that has torch.
TIMED = "import time, torch; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
IMPORTS = {
    "import ptsave": "import ptsave",
    "import ptsave, and its save, load": "import ptsave; ptsave.save, ptsave.load",
}
COMPLETE = {"_PTSAVE_COMPLETE": "bash_complete"}

# Name, command, variables, and the seconds it may take.
Case = tuple[list[str], dict[str, str], float | None]


def cases(folder: Path) -> dict[str, Case]:
    """Return what is measured, by name."""
    many, few = str(folder / "many.pt"), str(folder / "few.pt")
    return {
        "python -I -S": ([sys.executable, "-I", "-S", "-c", "pass"], {}, None),
        "python": ([sys.executable, "-c", "pass"], {}, None),
        "import torch": ([sys.executable, "-c", "import torch"], {}, None),
        **{
            name: ([sys.executable, "-c", TIMED.format(statement)], {}, limit)
            for (name, statement), limit in zip(IMPORTS.items(), (0.025, None), strict=True)
        },
        "--version": ([*PTSAVE, "--version"], {}, 0.15),
        "--help": ([*PTSAVE, "--help"], {}, 0.15),
        "Tab: commands": (PTSAVE, {**COMPLETE, LINE: "ptsave "}, 0.15),
        "Tab: entries": (PTSAVE, {**COMPLETE, LINE: f"ptsave ls {few} "}, 0.2),
        "ls, 2 tensors": ([*PTSAVE, "ls", few], {}, None),
        "verify, 2 tensors": ([*PTSAVE, "verify", few], {}, None),
        "globals, 2 tensors": ([*PTSAVE, "globals", few], {}, None),
        f"ls, {N_TENSORS:,} tensors": ([*PTSAVE, "ls", many], {}, 0.6),
        f"verify, {N_TENSORS:,} tensors": ([*PTSAVE, "verify", many], {}, None),
    }


def seconds_of(name: str, case: Case) -> float:
    """Run a command, and return how long that took, or how long it says."""
    command, variables, _ = case
    environment = {**os.environ, **variables}
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return float(done.stdout) if name in IMPORTS else time.perf_counter() - begin


def report(_: list[str], rounds: int, folder: Path) -> str:
    torch.save({"a": torch.ones(2, 3), "b": torch.ones(3)}, folder / "few.pt")
    many = {f"layers.{i}.weight": torch.ones(2, 3) for i in range(N_TENSORS)}
    torch.save(many, folder / "many.pt")
    found = cases(folder)
    figures: dict[str, list[float]] = {name: [] for name in found}
    for name, case in found.items():
        seconds_of(name, case)  # files are read
    for _round in tqdm(range(rounds), leave=False, disable=None):
        for name in random.sample([*found], len(found)):
            figures[name].append(seconds_of(name, found[name]))
    rows = []
    for name, case in found.items():
        goal = case[2]
        seconds = median(figures[name])
        spread = f"{min(figures[name]):.4f} - {max(figures[name]):.4f}"
        met = "" if goal is None else yes_or_no(seconds <= goal)
        limit = "" if goal is None else f"{goal:.3f}"
        rows.append([name, f"{seconds:.4f}", spread, limit, met])
    return table(["process", "seconds", "min - max", "goal", "met"], rows)


def run(**_: object) -> None:
    """Measure nothing: the processes are the command's own."""


PROGRAM = Program(
    "command", "The command as a whole process", __doc__ or "", run, report, states=[AS_FOUND]
)

if __name__ == "__main__":
    PROGRAM.main()
