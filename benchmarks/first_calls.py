"""How much longer the first call of a process takes than the second: imports, mostly.

    python -m benchmarks.first_calls                     all calls, 11 rounds
    python -m benchmarks.first_calls save load --rounds 3
    python -m benchmarks.first_calls --base HEAD~3       beside another commit

In each round every call is made by torch, by ptsave, and by ptsave of the commit --base, in a
shuffled order, each in a fresh process that has imported torch and ptsave only.  A figure is the
first call's time less the second's, on the same model of two tensors.  Modules have been compiled,
and files are in the page cache.  torch makes the same change: for load_into and load_model it
loads, and calls load_state_dict; it has nothing like the two asynchronous saves.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from benchmarks._program import (
    ROOT,
    add_report_options,
    add_state_options,
    check_options,
    compile_modules,
    states_of,
    table,
    write_report,
)
from benchmarks.archive import yes_or_no
from benchmarks.as_found import BASE, HERE, TORCH, build_commit
from ptsave.bench.system import AS_FOUND, describe_machine

_LOAD_STATE_DICT = "model.load_state_dict(torch.load('a.pt'))"
# The call, torch's way to the same, and the goal in milliseconds.
CALLS: dict[str, tuple[str, str, int]] = {
    "save": ("ptsave.save(state, 'b.pt')", "torch.save(state, 'b.pt')", 15),
    "load": ("ptsave.load('a.pt')", "torch.load('a.pt')", 15),
    "open": ("ptsave.open('a.pt')['weight']", "torch.load('a.pt', mmap=True)", 25),
    "load_into": ("ptsave.load_into('a.pt', model)", _LOAD_STATE_DICT, 25),
    "load_model": ("ptsave.load_model(model, 'a.pt')", _LOAD_STATE_DICT, 25),
    "async_save": ("ptsave.async_save(state, 'b.pt').result()", "", 25),
    "AsyncCheckpointer": ("ptsave.AsyncCheckpointer('c').save(1, model=model).result()", "", 25),
}
_PROCESS = """
import time, torch, {package}
model = torch.nn.Linear(3, 2)
state = model.state_dict()
seconds = []
for _ in range(2):
    begin = time.perf_counter()
    {call}
    seconds.append(time.perf_counter() - begin)
print(seconds[0] - seconds[1])
"""

Milliseconds = dict[tuple[str, str], list[float]]  # by call and contender, one per round


def excess_ms(name: str, who: str, build: Path, folder: Path) -> float:
    """Return how many milliseconds longer the first call of a process takes than the second."""
    ours, stock, _ = CALLS[name]
    package, call = ("torch", stock) if who == TORCH else ("ptsave", ours)
    environment = os.environ | {"PYTHONPATH": str(build)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
    command = [sys.executable, "-c", _PROCESS.format(package=package, call=call)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=folder, env=environment)
    return 1e3 * float(done.stdout)


def measured(
    names: Iterable[str], builds: Mapping[str, Path], rounds: int, folder: Path
) -> Milliseconds:
    """Return the figures of all rounds."""
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "a.pt")
    tasks = [(name, who) for name in names for who in builds if who != TORCH or CALLS[name][1]]
    found: Milliseconds = {task: [] for task in tasks}
    for _ in tqdm(range(rounds), leave=False, disable=None):
        for name, who in random.sample(tasks, len(tasks)):
            found[name, who].append(excess_ms(name, who, builds[who], folder))
    return found


def tabulated(found: Milliseconds, names: Iterable[str], whos: Iterable[str]) -> str:
    rows = []
    for name in names:
        row = [name]
        for who in whos:
            each = found.get((name, who))
            row += (
                [f"{median(each):.1f}", f"{min(each):.1f} - {max(each):.1f}"] if each else ["", ""]
            )
        goal = CALLS[name][2]
        rows.append([*row, f"{goal}", yes_or_no(median(found[name, HERE]) <= goal)])
    figures = [column for who in whos for column in (f"{who} ms", "min - max")]
    return table(["first call", *figures, "goal", "met"], rows)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("calls", nargs="*", choices=[*CALLS, []], metavar="call")
    parser.add_argument("--base", metavar="COMMIT", help="build and measure that commit, too")
    parser.add_argument("--rounds", type=int, default=11, help="default: 11")
    parser.add_argument("--dir", type=Path, default=Path(), help="where files are written and read")
    add_state_options(parser, [AS_FOUND])
    add_report_options(parser)
    options = parser.parse_args(arguments)
    check_options(options)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if not states_of(options, [AS_FOUND]):
        return
    builds = {TORCH: ROOT, HERE: ROOT}
    if options.base:
        builds = {TORCH: ROOT, BASE: build_commit(options.base), HERE: ROOT}
    names = options.calls or [*CALLS]
    command = ["python", "-m", "benchmarks.first_calls", *options.calls]
    command += ["--base", options.base] if options.base else []
    command += ["--rounds", str(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="ptsave-benchmark-", dir=options.dir) as scratch:
        folder = Path(scratch).resolve()
        facts = describe_machine(folder, command)
        compile_modules()
        text = tabulated(measured(names, builds, options.rounds, folder), names, builds)
    print(text)
    if options.output is not None:
        notes = "".join((__doc__ or "").partition("In each round")[1:]).rstrip()
        report = "\n\n".join(["# The first call of a process", facts, text, notes]) + "\n"
        write_report(report, options.output, options.plots)


if __name__ == "__main__":
    main()
