"""State dicts into modules: what loading costs beside copying, torch beside ptsave.

    python -m benchmarks.state_dicts                    all workloads, 3 rounds
    python -m benchmarks.state_dicts layers --rounds 9
    python -m benchmarks.state_dicts --output benchmarks/results/state_dicts.md

In each round every workload runs once with every contender, in a shuffled order.  Every figure
comes from a fresh process, which has loaded one small state dict before if it is warmed up, so that
no imports are measured.  The floor is copying every tensor in a loop, which every library has to
do.  Whether the values have arrived is checked outside the clock.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks._program import (
    TIMES_STOCK,
    WITHOUT_COLD,
    Program,
    is_warmed_up,
    settle_memory,
    table,
)

STOCK, PTSAVE, FLOOR = "torch", "ptsave", "floor"
CONTENDERS = (STOCK, PTSAVE, FLOOR)
FETCHED_NBYTES = 64 << 20

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
    if is_warmed_up():
        warm_up, _ = load_module(partial(small_layers, 1), task.contender)
        warm_up()
    action, has_arrived = WORKLOADS[task.workload].prepare(task.contender)
    settle_memory(FETCHED_NBYTES, is_limit=task.contender == FLOOR)
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    if not has_arrived():
        raise RuntimeError(f"{task.contender} has not loaded {task.workload}")
    return seconds


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[float]]  # by workload and contender


def run_task(task: Task) -> float:
    return float(PROGRAM.run_task(task))


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

HEADER = ["workload", "torch s", "ptsave s", "min - max", "floor s", TIMES_STOCK, "goal", "met"]
GROWTH_HEADER = ["workload", "ptsave s", "times as long", "goal", "met"]


def rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
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
        yield [workload.title, *seconds[:2], spread, seconds[2], ratio, goal, met]


def growth_rows(figures: Figures) -> Iterator[list[str]]:
    for growth in GROWTHS:
        small, large = (figures.get((name, PTSAVE)) for name in (growth.small, growth.large))
        if small and large:
            factor = median(b / a for a, b in zip(small, large, strict=True))
            met = "yes" if factor <= growth.goal else "**no**"
            goal = f"≤ {growth.goal:g}"
            yield [growth.title, f"{median(large):.4f}", f"{factor:.1f}", goal, met]


def report(names: list[str], rounds: int, _folder: Path) -> str:
    figures = run_rounds(names, rounds)
    tables = [table(HEADER, rows(names, figures))]
    if growths := [*growth_rows(figures)]:
        tables.append(table(GROWTH_HEADER, growths))
    return "\n\n".join(tables)


def run(**task: Any) -> float:
    return measure(Task(**task))


PROGRAM = Program(
    "state_dicts",
    "State dict benchmark",
    __doc__ or "",
    run,
    report,
    [*WORKLOADS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
