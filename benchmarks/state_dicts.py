"""State dicts into modules: what loading costs beside copying, stock torch beside ptsave.

    python -m benchmarks.state_dicts                    all workloads, 5 rounds
    python -m benchmarks.state_dicts layers --rounds 9
    python -m benchmarks.state_dicts --output benchmarks/results/state_dicts.md

In each round every workload runs once with every contender, in a shuffled order.  Every figure
comes from a fresh process that has loaded one small state dict before, so that nobody's imports are
measured.  The floor is copying every tensor in a loop, which every library has to do.  Whether the
values have arrived is checked outside the clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from benchmarks._system import describe_machine

ROOT = Path(__file__).resolve().parent.parent
STOCK, PTSAVE, FLOOR = "stock", "ptsave", "floor"
CONTENDERS = (STOCK, PTSAVE, FLOOR)

# What is measured, and what tells afterwards whether it has done its work.
Prepared = tuple[Callable[[], object], Callable[[], bool]]


@dataclass(frozen=True)
class Workload:
    """A load, and how many times as fast as stock's it should be."""

    title: str
    prepare: Callable[[str], Prepared]
    goal: float | None = None  # None: only measured to see how time grows
    contenders: tuple[str, ...] = CONTENDERS


@dataclass(frozen=True)
class Growth:
    """Two workloads of one kind, and how much longer the larger one may take."""

    title: str
    small: str
    large: str
    goal: float


# ----------------------------------------------------------------------------------------- modules


def small_layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def load_module(make: Callable[[], nn.Module], contender: str) -> Prepared:
    """Return the load of a module's state dict into another module."""
    state_dict, module = make().state_dict(), make()
    targets = module.state_dict()

    def has_arrived() -> bool:
        return all(torch.equal(targets[key], value) for key, value in state_dict.items())

    if contender == FLOOR:
        pairs = [(targets[key], value) for key, value in state_dict.items()]
        return partial(copy_all, pairs), has_arrived
    if contender == STOCK:
        return partial(module.load_state_dict, state_dict), has_arrived
    import ptsave

    return partial(ptsave.load_state_dict, module, state_dict), has_arrived


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


WORKLOADS = {
    "layers": Workload(
        "load_state_dict of 4,000 layers of 20 parameters",
        partial(load_module, partial(small_layers, 4_000)),
        goal=50,
    ),
    "more-layers": Workload(
        "load_state_dict of 40,000 layers",  # for which stock takes minutes
        partial(load_module, partial(small_layers, 40_000)),
        contenders=(PTSAVE, FLOOR),
    ),
}
GROWTHS = [Growth("40,000 layers beside 4,000", "layers", "more-layers", goal=12)]


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    workload: str
    contender: str


def measure(task: Task) -> float:
    """Return the seconds of one call."""
    warm_up, _ = load_module(partial(small_layers, 1), task.contender)
    warm_up()
    action, has_arrived = WORKLOADS[task.workload].prepare(task.contender)
    gc.collect()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    if not has_arrived():
        raise RuntimeError(f"{task.contender} has not loaded {task.workload}")
    return seconds


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[float]]  # by workload and contender


def run_task(task: Task) -> float:
    command = [sys.executable, "-m", "benchmarks.state_dicts", "--task", json.dumps(asdict(task))]
    result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(result.stdout.splitlines()[-1])


def run_rounds(names: list[str], rounds: int) -> Figures:
    """Measure every workload with every contender, in a shuffled order in each round."""
    figures: Figures = {}
    for _, name in tqdm(list(itertools.product(range(rounds), names)), leave=False, disable=None):
        contenders = WORKLOADS[name].contenders
        for contender in random.sample(contenders, len(contenders)):
            seconds = run_task(Task(name, contender))
            figures.setdefault((name, contender), []).append(seconds)
    return figures


# ---------------------------------------------------------------------------------------- reporting

TIMES_STOCK = "\N{MULTIPLICATION SIGN} stock"
HEADER = f"| workload | stock s | ptsave s | min - max | floor s | {TIMES_STOCK} | goal | met |"
RULE = "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
GROWTH_HEADER = "| workload | ptsave s | times as long | goal | met |"
GROWTH_RULE = "| --- | ---: | ---: | ---: | --- |"


def rows(names: list[str], figures: Figures) -> Iterator[str]:
    for name in names:
        workload = WORKLOADS[name]
        stock, mine, floor = (figures.get((name, contender), []) for contender in CONTENDERS)
        goal, ratio, met = "", "", ""
        if workload.goal is not None:
            factor = median(s / m for s, m in zip(stock, mine, strict=True))
            goal, ratio = f"≥ {workload.goal:g}", f"{factor:.1f}"
            met = "yes" if factor >= workload.goal else "**no**"
        spread = f"{min(mine):.4f} - {max(mine):.4f}"
        seconds = [f"{median(each):.4f}" if each else "" for each in (stock, mine, floor)]
        cells = [workload.title, *seconds[:2], spread, seconds[2], ratio, goal, met]
        yield f"| {' | '.join(cells)} |"


def growth_rows(figures: Figures) -> Iterator[str]:
    for growth in GROWTHS:
        small, large = (figures.get((name, PTSAVE)) for name in (growth.small, growth.large))
        if small and large:
            factor = median(b / a for a, b in zip(small, large, strict=True))
            met = "yes" if factor <= growth.goal else "**no**"
            cells = [growth.title, f"{median(large):.4f}", f"{factor:.1f}", f"≤ {growth.goal:g}"]
            yield f"| {' | '.join([*cells, met])} |"


def report(names: list[str], figures: Figures) -> str:
    notes = (__doc__ or "").rpartition("\n\n")[2].strip()
    growths = [*growth_rows(figures)]
    growth_table = ["", GROWTH_HEADER, GROWTH_RULE, *growths] if growths else []
    return "\n".join([HEADER, RULE, *rows(names, figures), *growth_table, "", notes])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state_dicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], metavar="workload")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--output", type=Path, help="write a report with the machine's data too")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(measure(Task(**json.loads(options.task))))
        return
    names = options.workloads or list(WORKLOADS)
    tables = report(names, run_rounds(names, options.rounds))
    print(tables)
    if options.output is not None:
        command = ["python", "-m", "benchmarks.state_dicts", *options.workloads]
        machine = describe_machine(ROOT, [*command, "--rounds", str(options.rounds)])
        options.output.write_text(f"# State dict benchmark\n\n{machine}\n\n{tables}\n")


if __name__ == "__main__":
    main()
