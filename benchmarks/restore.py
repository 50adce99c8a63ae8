"""Restoring a model and its optimizer in place: torch, ptsave, the hardware.

    python -m benchmarks.restore                        all workloads, 3 rounds
    python -m benchmarks.restore into-warm --rounds 9
    python -m benchmarks.restore --output benchmarks/results/restore.md

In each round every workload runs once with every contender and with the hardware's limit, in a
shuffled order.  Every figure comes from a fresh process in which the model (and its optimizer's
state, except for a fresh optimizer) is in memory already, and which has restored one small model
before if it is warmed up.  Stock is torch.load followed by load_state_dict.  flashpack takes part
where it is installed: the tensors of its own file, which it maps, are copied into the parameters,
without checksums.  The limit is reading the same bytes, with memory fetched in every state: from
the page cache, once, in a fresh process like any other and into the same tensors, with the number
of threads (1, 2 or 4, a process for each) that has the best median; from a cold disk, past the page
cache, with whichever of them is fastest.  Restored values are compared outside the clock, in the
first round.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks import _limits
from benchmarks._program import TIMES_STOCK, Program, is_warmed_up, settle_memory, table
from benchmarks.demo import Decoder, equal
from ptsave.bench.system import MIB, PeakMemory, make_cold, make_warm

STOCK, PTSAVE, FLASHPACK, LIMIT = "torch", "ptsave", "flashpack", "limit"
HAS_FLASHPACK = importlib.util.find_spec("flashpack") is not None
LIMIT_THREADS = {f"limit with {n} threads": n for n in _limits.THREAD_COUNTS}
WIDTH = 2048
LAYERS = 6


@dataclass(frozen=True)
class Workload:
    """One restore, and what is asked of it."""

    title: str
    checkpoint: str  # the file: "decoder" or "training"
    ratio_goal: float
    cold: bool = False
    fresh_optimizer: bool = False
    limit_goal: float | None = None
    peak_goal_mib: float | None = 64


WORKLOADS = {
    "into-warm": Workload("load_into, 1 GiB decoder, warm", "decoder", 8, limit_goal=0.8),
    "into-cold": Workload("load_into, 1 GiB decoder, cold", "decoder", 3.5, cold=True),
    "checkpoint-warm": Workload("load_checkpoint, GPT-2 small + AdamW, warm", "training", 8),
    "checkpoint-fresh": Workload(
        "the same into a fresh optimizer",
        "training",
        8,
        fresh_optimizer=True,
        peak_goal_mib=None,
    ),
}


# --------------------------------------------------------------------------------------- the models


class Layer(nn.Module):
    """The parameters of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q", "k", "v", "o")}
        )
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)


def make_decoder(seed: int) -> nn.Module:
    """Return 1.1 GiB of parameters."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"wte": nn.Embedding(4096, WIDTH), "h": nn.ModuleList(Layer() for _ in range(LAYERS))}
    )


def make_training(seed: int, *, fresh: bool) -> dict[str, Any]:
    """Return a model with GPT-2 small's shapes and its optimizer."""
    torch.manual_seed(seed)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if not fresh:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def save_checkpoint(checkpoint: str, path: str) -> None:
    if checkpoint == "decoder":
        model = make_decoder(0)
        torch.save(model.state_dict(), path)
        if HAS_FLASHPACK:
            pack(model, path)
    else:
        objects = make_training(0, fresh=False)
        torch.save({name: obj.state_dict() for name, obj in objects.items()}, path)


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures, or the file it writes."""

    checkpoint: str
    contender: str
    path: str
    save: bool = False
    cold: bool = False
    fresh_optimizer: bool = False
    compare: bool = False


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: float
    peak_nbytes: int = 0  # resident memory above what there was before


def pack(model: nn.Module, path: str) -> None:
    """Write the file that flashpack reads in the place of `path`."""
    from flashpack.serialization import pack_to_file

    pack_to_file(model.state_dict(), str(packed(path)), target_dtype=torch.float32)


def packed(path: str | Path) -> Path:
    return Path(f"{path}.flashpack")


def restore_module(contender: str, path: str, model: nn.Module) -> None:
    if contender == STOCK:
        model.load_state_dict(torch.load(path))
        return
    if contender == FLASHPACK:
        from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

        # Its own functions replace parameters by views of the file, which they map.
        tensors, file = model.state_dict(), read_flashpack_file(str(packed(path)))
        for name, tensor in iterate_from_flash_tensor(*file):
            tensors[name].copy_(tensor)
        return
    import ptsave

    ptsave.load_into(path, model)


def restore_training(contender: str, path: str, objects: dict[str, Any]) -> None:
    if contender == STOCK:
        checkpoint = torch.load(path)
        for name, obj in objects.items():
            obj.load_state_dict(checkpoint[name])
        return
    import ptsave

    ptsave.load_checkpoint(path, **objects)


def restorer(task: Task, objects: dict[str, Any]) -> Callable[[], None]:
    """Return what is measured."""
    if task.contender in LIMIT_THREADS:
        found = [tensor for obj in objects.values() for tensor in tensors_in(obj.state_dict())]
        tensors = {tensor.data_ptr(): tensor for tensor in found}.values()  # tied ones once
        read = _limits.PageCacheRead([(Path(task.path), tensors)], LIMIT_THREADS[task.contender])
        return read.run
    if task.checkpoint == "decoder":
        return lambda: restore_module(task.contender, task.path, objects["model"])
    return lambda: restore_training(task.contender, task.path, objects)


def tensors_in(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors_in(value)]


def warm_up(contender: str, path: Path) -> None:
    """Restore something small, so that no imports are measured."""
    if contender in LIMIT_THREADS or not is_warmed_up():
        return
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), path)
    if contender == FLASHPACK:
        pack(model, str(path))
    restore_module(contender, str(path), model)


def state_of(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: obj.state_dict() for name, obj in objects.items()}


def measure(task: Task) -> Figure:
    path = Path(task.path)
    if task.save:
        save_checkpoint(task.checkpoint, task.path)
        return Figure(0.0)
    warm_up(task.contender, path.with_name(f"warm-up-{task.contender}.pt"))
    if task.checkpoint == "decoder":
        objects: dict[str, Any] = {"model": make_decoder(1)}
    else:
        objects = make_training(1, fresh=task.fresh_optimizer)
    action = restorer(task, objects)
    file = packed(path) if task.contender == FLASHPACK else path
    make_cold(file) if task.cold else make_warm(file)
    settle_memory(2 * path.stat().st_size, is_limit=task.contender in LIMIT_THREADS)
    memory = PeakMemory()
    start = time.perf_counter()
    action()
    figure = Figure(time.perf_counter() - start, memory.above_baseline())
    if task.compare:
        saved = torch.load(task.path, mmap=True)
        restored = state_of(objects)
        if not equal(saved, restored["model"] if task.checkpoint == "decoder" else restored):
            raise RuntimeError(f"{task.contender} restored other values: {task}")
    return figure


def run_task(task: Task) -> Figure:
    return Figure(**PROGRAM.run_task(task))


def measure_cold_limit(path: Path) -> dict[str, Figure]:
    """Return the figures of `LIMIT_THREADS`."""
    _, seconds = _limits.measure("direct-read", path, path.stat().st_size)
    return {name: Figure(seconds[str(n_threads)]) for name, n_threads in LIMIT_THREADS.items()}


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    paths = {
        WORKLOADS[name].checkpoint: folder / f"{WORKLOADS[name].checkpoint}.pt" for name in names
    }
    for checkpoint, path in paths.items():
        run_task(Task(checkpoint, STOCK, str(path), save=True))
    figures: Figures = {}
    for number, name in tqdm(
        list(itertools.product(range(rounds), names)), leave=False, disable=None
    ):
        workload = WORKLOADS[name]
        path = paths[workload.checkpoint]
        contenders = [STOCK, PTSAVE, *([LIMIT] if workload.cold else LIMIT_THREADS)]
        if HAS_FLASHPACK and workload.checkpoint == "decoder":
            contenders.append(FLASHPACK)
        for contender in random.sample(contenders, len(contenders)):
            if contender == LIMIT:
                measured = measure_cold_limit(path)
            else:
                task = Task(
                    workload.checkpoint,
                    contender,
                    str(path),
                    cold=workload.cold,
                    fresh_optimizer=workload.fresh_optimizer and contender in (STOCK, PTSAVE),
                    compare=number == 0 and contender in (STOCK, PTSAVE, FLASHPACK),
                )
                measured = {contender: run_task(task)}
            for measured_contender, figure in measured.items():
                figures.setdefault((name, measured_contender), []).append(figure)
    choose_limits(names, figures)
    return figures


def choose_limits(names: list[str], figures: Figures) -> None:
    """Let the number of threads that has the best median be the limit."""
    for name in names:
        figures[name, LIMIT] = min(
            (figures[name, contender] for contender in LIMIT_THREADS),
            key=lambda ours: median(figure.seconds for figure in ours),
        )


# ---------------------------------------------------------------------------------------- reporting


def ratio(mine: list[Figure], other: list[Figure]) -> float:
    return median(o.seconds / m.seconds for m, o in zip(mine, other, strict=True))


def speed_rows(titles: dict[str, str], other: str, figures: Figures) -> Iterator[list[str]]:
    """Compare with `other` and the limit; `titles` are those of the workloads, by name."""
    for name, contender in itertools.product(titles, (other, PTSAVE, FLASHPACK, LIMIT)):
        if (name, contender) not in figures:  # workloads that it does not take, or have no limit
            continue
        ours, limit = figures[name, contender], figures.get((name, LIMIT))
        seconds = [figure.seconds for figure in ours]
        peak = max(figure.peak_nbytes for figure in ours) / MIB
        yield [
            titles[name],
            contender,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{ratio(ours, figures[name, other]):.2f}",
            "" if limit is None else f"{ratio(ours, limit):.2f}",
            "" if contender == LIMIT else f"{peak:.0f}",
        ]


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name in names:
        workload, ours = WORKLOADS[name], figures[name, PTSAVE]
        peak = max(figure.peak_nbytes for figure in ours) / MIB
        times = ratio(ours, figures[name, STOCK])
        goals = [(f"≥ {workload.ratio_goal:g} {TIMES_STOCK}", times, times >= workload.ratio_goal)]
        if workload.limit_goal is not None:
            part = ratio(ours, figures[name, LIMIT])
            goals.append(
                (f"≥ {workload.limit_goal:g} of the limit", part, part >= workload.limit_goal)
            )
        if workload.peak_goal_mib is not None:
            goal = workload.peak_goal_mib
            goals.append((f"≤ {goal:g} MiB above the model", peak, peak <= goal))
        for goal_text, value, met in goals:
            yield [workload.title, goal_text, f"{value:.2f}", "yes" if met else "**no**"]


def report(names: list[str], rounds: int, folder: Path) -> str:
    titles = {name: WORKLOADS[name].title for name in names}
    figures = run_rounds(names, rounds, folder)
    header = ["workload", "", "s", "min - max", TIMES_STOCK, "of limit", "MiB above the model"]
    goals = table(["workload", "goal", "ptsave", "met"], goal_rows(names, figures), n_texts=2)
    return "\n\n".join([table(header, speed_rows(titles, STOCK, figures), n_texts=2), goals])


def run(**task: Any) -> dict[str, Any]:
    return asdict(measure(Task(**task)))


PROGRAM = Program("restore", "Restore benchmark", __doc__ or "", run, report, [*WORKLOADS])

if __name__ == "__main__":
    PROGRAM.main()
