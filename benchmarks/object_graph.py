"""Many tensors, few bytes: what the object graph costs, torch beside ptsave.

    python -m benchmarks.object_graph                   all workloads, 3 rounds
    python -m benchmarks.object_graph small --rounds 9
    python -m benchmarks.object_graph --output benchmarks/results/object_graph.md

In each round every workload runs once with every contender, in a shuffled order.  Every figure
comes from a fresh process, which has saved and loaded one tensor before if it is warmed up, so that
no imports are measured.  Files are on tmpfs and in the page cache.  The floor of a save is one
write() of the finished file's bytes, that of a load is making as many empty tensors in a loop:
every library has to do that and more.  Files are compared byte by byte, and loaded objects tensor
by tensor, outside the clock.  Loaded objects are freed outside it, too, which decides the ratio: to
load 100,000 tensors takes 0.21 s of CPU time beside torch's 5.9 (28 times; two cores of an AMD
EPYC), to free them 0.06 beside 0.10, so a clock that stops after that shows 23 times.  A forked
child takes the same time as a fresh process.
"""

from __future__ import annotations

import filecmp
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
FETCHED_NBYTES = 512 << 20


@dataclass(frozen=True)
class Workload:
    """An object, and what issue 3 asks of saving and loading it."""

    title: str
    make: Callable[[], Any]
    save_goal: float
    load_goal: float


def many_tensors(count: int, numel: int) -> dict[str, torch.Tensor]:
    """Return `count` tensors of `numel` float32 each, under names as modules give them."""
    return {f"layers.{i}.weight": torch.full((numel,), float(i)) for i in range(count)}


def adamw_state(n_parameters: int) -> dict[str, Any]:
    """Return an AdamW state dict after one step."""
    parameters = [torch.nn.Parameter(torch.full((16,), float(i))) for i in range(n_parameters)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


WORKLOADS = {
    "small": Workload("100,000 tensors of 16 floats", lambda: many_tensors(100_000, 16), 20, 30),
    "adamw": Workload("AdamW state of 20,000 parameters", lambda: adamw_state(20_000), 15, 25),
    "medium": Workload("1,000 tensors of 16 KiB", lambda: many_tensors(1_000, 4096), 8, 15),
}


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    workload: str
    action: str  # "save" or "load"
    contender: str
    path: str
    reference: str = ""  # a file by torch to compare with, or whose floor to measure


def calls(contender: str) -> tuple[Callable[..., object], Callable[..., Any]]:
    """Return what the contender's user would call."""
    if contender == STOCK:
        return torch.save, torch.load
    import ptsave

    return ptsave.save, ptsave.load


def measure(task: Task) -> float:
    """Return the seconds of one call."""
    if task.contender == FLOOR:
        return measure_floor(task)
    save, load = calls(task.contender)
    warm_up = Path(task.path).with_name(f"warm-up-{task.contender}.pt")
    if is_warmed_up():
        save([torch.zeros(1)], warm_up)
        load(warm_up, weights_only=True)
    saved = WORKLOADS[task.workload].make() if task.action == "save" else None
    settle_memory(FETCHED_NBYTES)
    start = time.perf_counter()
    if task.action == "save":
        save(saved, task.path)
    else:
        loaded = load(task.path, weights_only=True)
    seconds = time.perf_counter() - start
    if task.action == "load" and task.reference:
        check_equal(loaded, torch.load(task.reference, weights_only=True))
    return seconds


def measure_floor(task: Task) -> float:
    """Return the seconds of what every implementation has to do at least."""
    action: Callable[[], object]
    if task.action == "save":
        data = Path(task.reference).read_bytes()
        action = partial(Path(task.path).write_bytes, data)
    else:
        count = sum(1 for _ in tensors_of(torch.load(task.reference, weights_only=True)))
        action = partial(empty_tensors, count)
    settle_memory(FETCHED_NBYTES, is_limit=True)
    start = time.perf_counter()
    made = action()
    seconds = time.perf_counter() - start
    del made  # freed after the clock has stopped
    return seconds


def empty_tensors(count: int) -> list[torch.Tensor]:
    return [torch.empty(0) for _ in range(count)]


def tensors_of(obj: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of nested dicts and lists."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, (dict, list, tuple)):
        for child in obj.values() if isinstance(obj, dict) else obj:
            yield from tensors_of(child)


def check_equal(loaded: Any, expected: Any) -> None:
    pairs = itertools.zip_longest(tensors_of(loaded), tensors_of(expected))
    if any(mine is None or not torch.equal(mine, theirs) for mine, theirs in pairs):
        raise RuntimeError("other tensors were loaded than stock torch loads")


# --------------------------------------------------------------------------------------- the rounds

Step = tuple[str, str]  # workload, action
Figures = dict[tuple[str, str, str], list[float]]  # by step and contender


def run_task(task: Task) -> float:
    return float(PROGRAM.run_task(task))


def measure_in_turn(
    step: Step, contenders: list[str], folder: Path, figures: Figures, *, compare: bool
) -> None:
    """Measure one call of every contender, in a shuffled order."""
    name, action = step
    reference = folder / STOCK / f"{name}.pt"
    for contender in random.sample(contenders, len(contenders)):
        # One name in several folders: a file's name is part of its bytes.
        path = folder / contender / f"{name}.pt" if action == "save" else reference
        path.parent.mkdir(exist_ok=True)
        if action == "save":
            path.unlink(missing_ok=True)
        compared = str(reference) if compare or contender == FLOOR else ""
        seconds = run_task(Task(name, action, contender, str(path), compared))
        figures.setdefault((*step, contender), []).append(seconds)


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    """Measure everything, and compare what the contenders saved and loaded."""
    figures: Figures = {}
    for number, name in tqdm(
        list(itertools.product(range(rounds), names)), leave=False, disable=None
    ):
        saving: Step = (name, "save")
        measure_in_turn(saving, [STOCK, PTSAVE], folder, figures, compare=False)
        measure_in_turn(saving, [FLOOR], folder, figures, compare=False)
        files = [folder / contender / f"{name}.pt" for contender in (STOCK, PTSAVE)]
        if not filecmp.cmp(files[0], files[1], shallow=False):
            raise RuntimeError(f"ptsave wrote a file that differs from stock's: {name}")
        loading: Step = (name, "load")
        measure_in_turn(loading, [STOCK, PTSAVE, FLOOR], folder, figures, compare=number == 0)
    return figures


# ---------------------------------------------------------------------------------------- reporting

HEADER = ["workload", "", "torch s", "ptsave s", "min - max", "floor s", TIMES_STOCK, "goal", "met"]


def rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name, action in itertools.product(names, ("save", "load")):
        workload = WORKLOADS[name]
        stock, mine = (figures[name, action, contender] for contender in (STOCK, PTSAVE))
        goal = workload.save_goal if action == "save" else workload.load_goal
        ratio = median(s / m for s, m in zip(stock, mine, strict=True))
        yield [
            workload.title,
            action,
            f"{median(stock):.4f}",
            f"{median(mine):.4f}",
            f"{min(mine):.4f} - {max(mine):.4f}",
            f"{median(figures[name, action, FLOOR]):.4f}",
            f"{ratio:.1f}",
            f"≥ {goal:g}",
            "yes" if ratio >= goal else "**no**",
        ]


def report(names: list[str], rounds: int, folder: Path) -> str:
    return table(HEADER, rows(names, run_rounds(names, rounds, folder)), n_texts=2)


def run(**task: Any) -> float:
    return measure(Task(**task))


PROGRAM = Program(
    "object_graph",
    "Object graph benchmark",
    __doc__ or "",
    run,
    report,
    [*WORKLOADS],
    folder=Path("/dev/shm"),
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
