"""Converting checkpoints: the libraries' load and save, ptsave, the hardware.

    python -m benchmarks.convert                        all workloads, 3 rounds
    python -m benchmarks.convert warm --rounds 9
    python -m benchmarks.convert --output benchmarks/results/convert.md
    PTSAVE_BENCHMARK_MIB=256 python -m benchmarks.convert

In each round every workload runs once with every contender and with the hardware's limit, in a
shuffled order.  Every figure comes from a fresh process, which has converted one small checkpoint
before if it is warmed up, and is the time of both ways: from .pt to safetensors, and of the result
back to .pt.  The libraries' way is torch.load and safetensors' save_file, load_file and torch.save.
The limit is copying the .pt file twice with read and write calls through the page cache, in pieces
of 1 MiB, with the number of threads (1, 2 or 4, a process for each) that has the best median, and
memory that is fetched in every state.  Before each figure all that is dirty has been written to the
disk, and targets are not there.  ptsave compares all checksums of the .pt file, the libraries and
the limit none.  Files are compared outside the clock, in the first round.
"""

from __future__ import annotations

import filecmp
import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from benchmarks._program import TIMES_STOCK, Program, is_warmed_up, settle_memory, table
from benchmarks.restore import (
    LIMIT_THREADS,
    PTSAVE,
    STOCK,
    Figure,
    Figures,
    choose_limits,
    ratio,
    speed_rows,
)
from ptsave.bench.system import MIB, PeakMemory, make_cold, make_warm

N_MIB = int(os.environ.get("PTSAVE_BENCHMARK_MIB", "1024"))
TENSOR_NBYTES = 16 * MIB
PIECE_NBYTES = 1 * MIB
RATIO_GOAL = 1.5
PEAK_GOAL_MIB = 256
TITLES = {
    "warm": f"{N_MIB} MiB there and back, warm",
    "cold": f"{N_MIB} MiB there and back, cold",
}


# --------------------------------------------------------------------------------- the contenders


def convert_with_libraries(source: Path, middle: Path, target: Path) -> None:
    save_file(torch.load(source), middle, {"format": "pt"})
    torch.save(load_file(middle), target)


def convert_with_ptsave(source: Path, middle: Path, target: Path) -> None:
    from ptsave.conversion.converting import convert

    convert(source, middle)
    convert(middle, target)


class FileCopy:
    """Copying a file with nothing but read and write calls."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads

    def run(self, source: Path, middle: Path, target: Path) -> None:
        self._copy(source, middle)
        self._copy(middle, target)

    def _copy(self, source: Path, target: Path) -> None:
        nbytes = source.stat().st_size
        offsets = iter(range(0, nbytes, PIECE_NBYTES))
        with source.open("rb", buffering=0) as old, target.open("wb", buffering=0) as new:
            os.posix_fallocate(new.fileno(), 0, nbytes)
            files = (old.fileno(), new.fileno())
            threads = [
                threading.Thread(target=self._copy_pieces, args=(*files, offsets))
                for _ in range(self._n_threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    @staticmethod
    def _copy_pieces(old: int, new: int, offsets: Iterator[int]) -> None:
        buffer = memoryview(bytearray(PIECE_NBYTES))
        for offset in offsets:
            n = os.preadv(old, [buffer], offset)
            if os.pwrite(new, buffer[:n], offset) != n:
                raise RuntimeError("a short write")


def action_of(contender: str) -> Callable[[Path, Path, Path], None]:
    if contender in LIMIT_THREADS:
        return FileCopy(LIMIT_THREADS[contender]).run
    return convert_with_ptsave if contender == PTSAVE else convert_with_libraries


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures, or the file it writes."""

    contender: str
    folder: str
    save: bool = False
    cold: bool = False


def paths_in(folder: Path, contender: str) -> tuple[Path, Path, Path]:
    return folder / "model.pt", folder / f"{contender}.safetensors", folder / contender / "model.pt"


def measure(task: Task) -> Figure:
    folder = Path(task.folder)
    source, middle, target = paths_in(folder, task.contender)
    if task.save:
        n_tensors = max(N_MIB * MIB // TENSOR_NBYTES, 1)
        names = [f"layer.{i:03}.weight" for i in range(n_tensors)]
        torch.save({name: torch.randn(TENSOR_NBYTES // 4) for name in names}, source)
        return Figure(0.0)
    action = action_of(task.contender)
    if is_warmed_up():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            small = paths_in(Path(scratch), task.contender)
            small[2].parent.mkdir()
            torch.save({"layer": torch.ones(3)}, small[0])
            action(*small)
    middle.unlink(missing_ok=True)
    target.unlink(missing_ok=True)
    target.parent.mkdir(exist_ok=True)
    make_cold(source) if task.cold else make_warm(source)
    settle_memory(2 * source.stat().st_size, is_limit=task.contender in LIMIT_THREADS)
    memory = PeakMemory()
    start = time.perf_counter()
    action(source, middle, target)
    return Figure(time.perf_counter() - start, memory.above_baseline())


# --------------------------------------------------------------------------------------- the rounds


def check_files(folder: Path) -> None:
    ours, others = paths_in(folder, PTSAVE), paths_in(folder, STOCK)
    if not filecmp.cmp(ours[1], others[1], shallow=False):
        raise RuntimeError("the safetensors files differ")
    # Of the library, all tensors of a file that it has loaded may be in one storage.
    found, expected = torch.load(ours[2]), torch.load(others[2])
    if found.keys() != expected.keys():
        raise RuntimeError("other names")
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            raise RuntimeError(f"{name} has other values")


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    PROGRAM.run_task(Task(STOCK, str(folder), save=True))
    figures: Figures = {}
    for number, name in tqdm(
        list(itertools.product(range(rounds), names)), leave=False, disable=None
    ):
        contenders = [STOCK, PTSAVE, *LIMIT_THREADS]
        for contender in random.sample(contenders, len(contenders)):
            task = Task(contender, str(folder), cold=name == "cold")
            figures.setdefault((name, contender), []).append(Figure(**PROGRAM.run_task(task)))
        if number == 0:
            check_files(folder)
    choose_limits(names, figures)
    return figures


# ---------------------------------------------------------------------------------------- reporting


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name in names:
        ours = figures[name, PTSAVE]
        times = ratio(ours, figures[name, STOCK])
        peak = max(figure.peak_nbytes for figure in ours) / MIB
        for text, value, met in (
            (f"≥ {RATIO_GOAL:g} {TIMES_STOCK}", times, times >= RATIO_GOAL),
            (f"≤ {PEAK_GOAL_MIB} MiB above the process", peak, peak <= PEAK_GOAL_MIB),
        ):
            yield [TITLES[name], text, f"{value:.2f}", "yes" if met else "**no**"]


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = run_rounds(names, rounds, folder)
    titles = {name: TITLES[name] for name in names}
    header = ["workload", "", "s", "min - max", TIMES_STOCK, "of limit", "MiB above the process"]
    speeds = table(header, speed_rows(titles, STOCK, figures), n_texts=2)
    goals = table(["workload", "goal", "ptsave", "met"], goal_rows(names, figures), n_texts=2)
    return "\n\n".join([speeds, goals])


def run(**task: Any) -> dict[str, Any]:
    return asdict(measure(Task(**task)))


PROGRAM = Program("convert", "Conversion benchmark", __doc__ or "", run, report, [*TITLES])

if __name__ == "__main__":
    PROGRAM.main()
