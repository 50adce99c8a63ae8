"""Steps of training while everything that goes through the layers is recorded.

    python -m benchmarks.capture                       all networks, 3 rounds
    python -m benchmarks.capture large --rounds 9
    python -m benchmarks.capture --output benchmarks/results/capture.md

In each round every network is trained once with every contender, in a shuffled order, each in a
fresh process: 2 steps that are not counted if it is warmed up, then pairs of a step without and a
step with the contender's hooks; otherwise one such pair, the first.  The figure is the median of
the pairs' ratios, "more" the median of their differences.  What is recorded goes to a file on a
disk; between two pairs it is written, so that the next one has the cores for itself.

large: 33 modules (4 blocks of transformers) whose outputs are 98 MiB in a step.
many: 501 modules whose outputs are 1 KiB each: the hooks, and nothing else.

empty: hooks that do nothing, before and after each module.
clones: a clone of each output, kept until the step ends.
references: references to the outputs, and one `ptsave.async_save` of them as the step ends.
torch.save: one file for each output, in its hook.
capture: `ptsave.capture(model, path, what=("outputs",))`.
budget: the same with `max_memory_bytes` of 32 MiB, so that training waits for the disk.
statistics: the same as capture with `tensors=False`.

Memory is the peak of resident memory, beyond that of steps without hooks in the same process.
"""

from __future__ import annotations

import copy
import itertools
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import ptsave
from benchmarks._program import Program, is_warmed_up, settle_memory, table
from ptsave.bench.system import MIB, PeakMemory

EMPTY, CLONES, REFERENCES, SAVES = "empty", "clones", "references", "torch.save"
CAPTURE, BUDGET, STATISTICS = "capture", "budget", "statistics"
CONTENDERS = (EMPTY, CLONES, REFERENCES, SAVES, CAPTURE, BUDGET, STATISTICS)
CAPTURES = (CAPTURE, BUDGET, STATISTICS)
GOALS = {CAPTURE: 1.15, STATISTICS: 1.1}  # times the step, at most
HOOK_GOAL = 20.0  # microseconds a module beyond the empty hooks, at most
BUDGET_NBYTES = 32 * MIB  # memory of BUDGET beyond the model's own, at most
N_PAIRS = {"large": 5, "many": 15}
N_UNCOUNTED = 2
N_BLOCKS, WIDTH, N_TOKENS = 4, 256, 1536
N_SMALL = 500


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    network: str
    contender: str
    folder: str


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: float  # of a step
    ratio: float  # to a step without hooks
    more_seconds: float  # than that
    n_modules: int
    nbytes: int  # of the outputs of a step
    peak_nbytes: int  # of memory, beyond that of the training


class Block(nn.Module):
    """A block of a transformer, of 8 modules, itself included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(-1, 256, 3, 8, WIDTH // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        down: Tensor = self.down(self.act(self.up(self.norm_mlp(x))))
        return x + down


def make_network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "large":
        return nn.Sequential(*[Block() for _ in range(N_BLOCKS)]), torch.randn(N_TOKENS, WIDTH)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(N_SMALL)]), torch.randn(16, 16)


def train(model: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    model(x).square().mean().backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


@contextmanager
def hooked(
    model: nn.Module, after: Callable[[str, Tensor], None], end: Callable[[], object]
) -> Iterator[None]:
    """Install plain hooks; `end` is called when the step ends."""
    handles = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda _, args: None),
            module.register_forward_hook(lambda _, args, out, name=name: after(name, out)),
        )
    ]
    try:
        yield
        end()
    finally:
        for handle in handles:
            handle.remove()


def plain_hooks(contender: str, model: nn.Module, folder: Path) -> AbstractContextManager[None]:
    kept: dict[str, Tensor] = {}
    if contender == EMPTY:
        return hooked(model, lambda name, out: None, lambda: None)
    if contender == CLONES:
        return hooked(
            model, lambda name, out: kept.update({name: out.detach().clone()}), kept.clear
        )
    if contender == REFERENCES:
        return hooked(
            model,
            lambda name, out: kept.update({name: out.detach()}),
            lambda: PENDING.append(ptsave.async_save(kept, folder / "references.pt")),
        )
    return hooked(
        model, lambda name, out: torch.save(out.detach(), folder / f"out-{name}.pt"), lambda: None
    )


PENDING: list[ptsave.SaveFuture] = []


def timed_with_hooks(contender: str, model: nn.Module, x: Tensor, folder: Path) -> float:
    """Return the seconds of a step, without installing and removing the hooks."""
    with plain_hooks(contender, model, folder):
        start = time.perf_counter()
        model(x).square().mean().backward()
        seconds = time.perf_counter() - start
        start = time.perf_counter()
    if contender == REFERENCES:
        seconds += time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    while PENDING:
        PENDING.pop().result()
    return seconds


def captured_pairs(
    task: Task, model: nn.Module, bare: nn.Module, x: Tensor
) -> list[tuple[float, float]]:
    """Train a copy without hooks, and the model inside of one capture, in turns."""
    pairs = []
    capture = ptsave.capture(
        model,
        Path(task.folder) / "capture.pt",
        what=("outputs",),
        tensors=task.contender != STATISTICS,
        max_memory_bytes=BUDGET_NBYTES if task.contender == BUDGET else None,
    )
    with capture:
        for _ in range(n_pairs(task.network)):
            without = train(bare, x)
            start = time.perf_counter()
            model(x).square().mean().backward()
            capture.step()
            seconds = time.perf_counter() - start
            model.zero_grad(set_to_none=True)
            pairs.append((without, seconds))
            pause()
    return pairs


def n_pairs(network: str) -> int:
    return N_UNCOUNTED + N_PAIRS[network] if is_warmed_up() else 1


def pause() -> None:
    """Wait as long as a captured step takes to be written, with whatever contender."""
    time.sleep(0.3)


def run(**fields: Any) -> dict[str, Any]:
    task = Task(**fields)
    folder = Path(task.folder) / "run"
    folder.mkdir()
    model, x = make_network(task.network)
    nbytes = 0

    def count(_: str, out: Tensor) -> None:
        nonlocal nbytes
        nbytes += out.nbytes

    with hooked(model, count, lambda: None):
        model(x)
    settle_memory(1024 * MIB)
    bare = copy.deepcopy(model)
    peak = PeakMemory()
    for each in (bare, model) * 4:  # malloc's memory grows for some steps
        train(each, x)
    peak_of_training = peak.above_baseline()
    if task.contender in CAPTURES:
        pairs = captured_pairs(task, model, bare, x)
    else:
        pairs = []
        for _ in range(n_pairs(task.network)):
            pairs.append((train(model, x), timed_with_hooks(task.contender, model, x, folder)))
            pause()
    shutil.rmtree(folder)
    counted = pairs[N_UNCOUNTED:] if is_warmed_up() else pairs
    return asdict(
        Figure(
            median(seconds for _, seconds in counted),
            median(seconds / without for without, seconds in counted),
            median(seconds - without for without, seconds in counted),
            sum(1 for _ in model.modules()),
            nbytes,
            peak.above_baseline() - peak_of_training,
        )
    )


# ---------------------------------------------------------------------------------------- reporting

Figures = dict[str, list[Figure]]  # by contender


def run_rounds(names: list[str], rounds: int, folder: Path) -> dict[str, Figures]:
    figures: dict[str, Figures] = {name: {} for name in names}
    for _, name in tqdm([*itertools.product(range(rounds), names)], leave=False, disable=None):
        for contender in random.sample(CONTENDERS, len(CONTENDERS)):
            figure = Figure(**PROGRAM.run_task(Task(name, contender, str(folder))))
            figures[name].setdefault(contender, []).append(figure)
    return figures


def rows_of(network: str, figures: Figures) -> Iterator[list[str]]:
    empty = figures[EMPTY]
    for contender in CONTENDERS:
        ours = figures[contender]
        ratios = [figure.ratio for figure in ours]
        more = median(figure.more_seconds for figure in ours)
        hook = median(
            (mine.more_seconds - other.more_seconds) / mine.n_modules
            for mine, other in zip(ours, empty, strict=True)
        )
        peak_nbytes = median(figure.peak_nbytes for figure in ours)
        met = ""
        if network == "many" and contender in GOALS:
            met = "yes" if 1e6 * hook <= HOOK_GOAL else "**no**"
        elif contender == BUDGET:
            met = "yes" if peak_nbytes <= BUDGET_NBYTES else "**no**"
        elif contender in GOALS:
            met = "yes" if median(ratios) <= GOALS[contender] else "**no**"
        yield [
            contender,
            f"{1e3 * median(figure.seconds for figure in ours):.1f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
            f"{1e3 * more:+.1f}",
            f"{1e6 * hook:.1f}",
            f"{peak_nbytes / MIB:.0f}",
            met,
        ]


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = run_rounds(names, rounds, folder)
    tables = []
    for name in names:
        one = figures[name][EMPTY][0]
        goals = {
            "large": ", ".join(f"{each} ≤ {goal} x" for each, goal in GOALS.items())
            + f"; {BUDGET} ≤ {BUDGET_NBYTES // MIB} MiB",
            "many": f"≤ {HOOK_GOAL:g} µs a module",
        }
        header = [
            f"{name}: {one.n_modules} modules, {one.nbytes / MIB:.0f} MiB",
            "a step, ms",
            "x the step without",
            "min - max",
            "more, ms",
            "µs a module beyond empty",
            "memory, MiB",
            goals[name],
        ]
        tables.append(table(header, rows_of(name, figures[name])))
    return "\n\n".join(tables)


PROGRAM = Program(
    "capture",
    "Recording everything that goes through a network",
    __doc__ or "",
    run,
    report,
    [*N_PAIRS],
)

if __name__ == "__main__":
    PROGRAM.main()
