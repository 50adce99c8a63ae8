"""Loading an optimizer's state: AdamW with many small parameters, torch beside ptsave.

    python -m benchmarks.optimizer_state               3 rounds
    python -m benchmarks.optimizer_state --rounds 9
    python -m benchmarks.optimizer_state --output benchmarks/results/optimizer_state.md

In each round every contender runs once, in a shuffled order.  Every figure comes from a fresh
process, which has loaded the state of one parameter before if it is warmed up, so that no imports
are measured.
The optimizer is new, the state dict is in memory, and both have parameters of 16 float32.  "by
name" finds the parameters, saved in the opposite order, by their names.  What was loaded is
compared with the saved state outside the clock.  Stock torch is not asked for 200,000 parameters:
ten times as many take it a hundred times as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import ptsave
from benchmarks._program import (
    TIMES_STOCK,
    WITHOUT_COLD,
    Program,
    is_warmed_up,
    settle_memory,
    table,
)

STOCK, PTSAVE, BY_NAME = "torch", "ptsave", "ptsave, by name"
FETCHED_NBYTES = 512 << 20
NUMEL = 16
GOAL = 20.0  # times stock, at FEW
FEW, MANY = 20_000, 200_000


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    contender: str
    n_parameters: int


TASKS = [
    *(Task(contender, FEW) for contender in (STOCK, PTSAVE, BY_NAME)),
    *(Task(contender, MANY) for contender in (PTSAVE, BY_NAME)),
]


def make_optimizer(n_parameters: int, *, opposite: bool = False) -> torch.optim.AdamW:
    order = reversed(range(n_parameters)) if opposite else range(n_parameters)
    parameters = [(f"layers.{i}.weight", torch.nn.Parameter(torch.zeros(NUMEL))) for i in order]
    return torch.optim.AdamW(parameters)


def make_state_dict(n_parameters: int, *, opposite: bool = False) -> dict[str, Any]:
    """Return the state after one step; every parameter's own differs from the others'."""
    optimizer = make_optimizer(n_parameters, opposite=opposite)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            parameter.grad = torch.full_like(parameter, float(name.split(".")[1]))
    optimizer.step()
    return optimizer.state_dict()


def load(contender: str, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Call what the contender's user would call."""
    if contender == STOCK:
        optimizer.load_state_dict(state_dict)
    elif contender == PTSAVE:
        ptsave.load_optimizer_state_dict(optimizer, state_dict)
    else:
        ptsave.load_optimizer_state_dict(optimizer, state_dict, match="name")


def measure(task: Task) -> float:
    """Return the seconds of one call."""
    if is_warmed_up():
        load(task.contender, make_optimizer(1), make_state_dict(1))
    state_dict = make_state_dict(task.n_parameters, opposite=task.contender == BY_NAME)
    optimizer = make_optimizer(task.n_parameters)
    settle_memory(FETCHED_NBYTES)
    start = time.perf_counter()
    load(task.contender, optimizer, state_dict)
    seconds = time.perf_counter() - start
    check_loaded(optimizer)
    return seconds


def check_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Compare with the state that one step gives to parameters in the optimizer's order."""
    params = optimizer.param_groups[0]["params"]
    expected = make_state_dict(len(params))["state"]
    for i, parameter in enumerate(params):
        for key, value in expected[i].items():
            if not torch.equal(optimizer.state[parameter][key], value):
                raise RuntimeError(f"another {key} was loaded for parameter {i} than was saved")


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[Task, list[float]]


def run_task(task: Task) -> float:
    return float(PROGRAM.run_task(task))


def run_rounds(rounds: int) -> Figures:
    figures: Figures = {task: [] for task in TASKS}
    order = [task for _ in range(rounds) for task in random.sample(TASKS, len(TASKS))]
    for task in tqdm(order, leave=False, disable=None):
        figures[task].append(run_task(task))
    return figures


# ---------------------------------------------------------------------------------------- reporting

HEADER = ["parameters", "", "seconds", "min - max", "us / parameter", TIMES_STOCK, "goal", "met"]


def rows(figures: Figures) -> Iterator[list[str]]:
    for task, seconds in figures.items():
        ratio, goal, met = "", "", ""
        if task.n_parameters == FEW and task.contender != STOCK:
            pairs = zip(figures[Task(STOCK, FEW)], seconds, strict=True)
            times = median(stock / mine for stock, mine in pairs)
            ratio, goal = f"{times:.1f}", f"≥ {GOAL:g}"
            met = "yes" if times >= GOAL else "**no**"
        yield [
            f"{task.n_parameters:,}",
            task.contender,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{median(seconds) / task.n_parameters * 1e6:.1f}",
            *(ratio, goal, met),
        ]


def report(_names: list[str], rounds: int, _folder: Path) -> str:
    return table(HEADER, rows(run_rounds(rounds)), n_texts=2)


def run(**task: Any) -> float:
    return measure(Task(**task))


PROGRAM = Program(
    "optimizer_state",
    "Optimizer state benchmark",
    __doc__ or "",
    run,
    report,
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
