"""To and from an accelerator: torch, ptsave, safetensors, and the bus.

    python -m benchmarks.accelerator                     all workloads, 3 rounds
    python -m benchmarks.accelerator save load --rounds 9
    python -m benchmarks.accelerator --output benchmarks/results/accelerator.md

In each round every workload runs once with every contender, in a shuffled order, each in a fresh
process, which has saved and loaded something small before if it is warmed up.  Files lie on a
memory-backed file system.  Every load is followed by a synchronization, and by a sum over all bytes
that is not measured but compared.

save, load: 2 GiB in tensors of 16 MiB.  The limits are copies between the device and pinned memory
that is there (512 MiB, several times), and for a save also a parallel write of a file of zeros.
blocked: the call of ptsave.async_save, the second and third of a process, beside the copy to pinned
memory.  Stock is torch.save.
small: 20,000 tensors of 1 KiB.  Pinned memory is the peak that torch's host allocator knows of.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
from ptsave.bench.system import MIB

STOCK, PTSAVE, SAFETENSORS, FAST = "torch", "ptsave", "safetensors", "fastsafetensors"
D2H, H2D, WRITE = "pinned d2h", "pinned h2d", "parallel write"
HAS_FAST = importlib.util.find_spec("fastsafetensors") is not None
GIB = 1 << 30
LARGE_NBYTES = 16 * MIB
PINNED_GOAL_MIB = 64  # what ptsave is configured to take
CONTENDERS = {
    "save": (STOCK, PTSAVE, D2H, WRITE),
    "load": (STOCK, PTSAVE, SAFETENSORS, *((FAST,) if HAS_FAST else ()), H2D),
    "blocked": (STOCK, PTSAVE, D2H),
    "small-save": (STOCK, PTSAVE),
    "small-load": (STOCK, PTSAVE),
}


@dataclass(frozen=True)
class Goal:
    """What ptsave should be: so many times as fast as stock, so much of the limits."""

    times_stock: float | None
    of_limit: float | None = None
    limits: tuple[str, ...] = ()


GOALS = {
    "save": Goal(5, 0.7, (D2H, WRITE)),
    "load": Goal(5, None, (H2D,)),
    "blocked": Goal(None, 0.8, (D2H,)),
    "small-save": Goal(15),
    "small-load": Goal(15),
}


@dataclass(frozen=True)
class Task:
    """What one process measures, or the file it prepares."""

    workload: str
    contender: str
    folder: str
    nbytes: int
    prepare: bool = False


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: list[float]
    nbytes: int
    pinned_nbytes: int = 0


# ------------------------------------------------------------------------- one figure, one process


def accelerator() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise SystemExit("torch finds no accelerator on this machine")
    return found.type


def make_tensors(workload: str, nbytes: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if workload.startswith("small"):
        return {f"layer.{i}": torch.full((256,), float(i)).to(accelerator()) for i in range(20_000)}
    pattern = torch.randint(0, 1 << 30, (LARGE_NBYTES // 4,), dtype=torch.int32).to(accelerator())
    return {f"layer.{i}": pattern + i for i in range(nbytes // LARGE_NBYTES)}


def sum_of(tensors: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.cpu().double().sum()) for tensor in tensors.values())


def pinned_nbytes() -> int:
    """Return the peak of pinned memory, 0 where torch does not tell."""
    module = getattr(torch, accelerator())
    statistics = getattr(module, "host_memory_stats", None)
    return int(statistics().get("allocated_bytes.peak", 0)) if statistics is not None else 0


def save(contender: str, tensors: dict[str, torch.Tensor], path: Path) -> None:
    if contender == STOCK:
        torch.save(tensors, path)
        return
    import ptsave

    ptsave.save(tensors, path)


def load(contender: str, path: Path) -> Any:
    if contender == STOCK:
        return torch.load(path, map_location=accelerator())
    if contender == SAFETENSORS:
        from safetensors.torch import load_file

        return load_file(path.with_suffix(".safetensors"), device=accelerator())
    if contender == FAST:
        return load_with_fastsafetensors(path.with_suffix(".safetensors"))
    import ptsave

    return ptsave.load(path, map_location=accelerator())


def load_with_fastsafetensors(path: Path) -> dict[str, torch.Tensor]:
    from fastsafetensors import fastsafe_open  # type: ignore[import-not-found,unused-ignore]

    with fastsafe_open(filenames=[str(path)], nogds=True, device=f"{accelerator()}:0") as file:
        return {key: file.get_tensor(key).clone().detach() for key in file.keys()}  # noqa: SIM118


def synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def seconds_of(action: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds


def measure_copy(contender: str, nbytes: int) -> Figure:
    """Measure the bus, in one direction."""
    part = min(nbytes, GIB // 2)
    host = torch.ones(part, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(part, dtype=torch.uint8, device=accelerator())
    source, target = (device, host) if contender == D2H else (host, device)
    copy = lambda: [target.copy_(source, non_blocking=True) for _ in range(nbytes // part)]  # noqa: E731
    copy()  # type: ignore[no-untyped-call,unused-ignore]
    return Figure([seconds_of(copy) for _ in range(3)], nbytes // part * part)


def measure_write(folder: Path, nbytes: int) -> Figure:
    """Measure writing a new file with several threads."""
    import os

    path, piece = folder / "zeros", bytes(4 * MIB)
    n_threads = min(len(os.sched_getaffinity(0)), 16)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    offsets = iter(range(0, nbytes, len(piece)))
    lock = threading.Lock()

    def write() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.pwrite(fd, piece, offset)

    threads = [threading.Thread(target=write) for _ in range(n_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    os.close(fd)
    path.unlink()
    return Figure([seconds], nbytes)


def measure_blocked(contender: str, tensors: dict[str, torch.Tensor], path: Path) -> list[float]:
    import ptsave

    futures: list[ptsave.SaveFuture] = []

    def call() -> None:
        if contender == STOCK:
            torch.save(tensors, path)
        else:
            futures.append(ptsave.async_save(tensors, path))

    seconds = []
    for _ in range(3):
        path.unlink(missing_ok=True)
        seconds.append(seconds_of(call))
        for future in futures:
            future.result()
    path.unlink()
    return seconds[1:]


def measure_saves_and_loads(task: Task, path: Path) -> Figure:
    nbytes = 20_000 * 1024 if task.workload.startswith("small") else task.nbytes
    if task.workload.endswith("load"):
        expected = json.loads(path.with_suffix(".json").read_text())
        loaded: list[Any] = []
        seconds = seconds_of(lambda: loaded.append(load(task.contender, path)))
        if sum_of(loaded[0]) != expected:
            raise RuntimeError(f"{task.contender} has loaded other values")
        return Figure([seconds], nbytes, pinned_nbytes())
    tensors = make_tensors(task.workload, task.nbytes)
    if task.workload == "blocked":
        seconds_each = measure_blocked(task.contender, tensors, path)
        return Figure(seconds_each, nbytes, pinned_nbytes())
    path = path.with_name(f"{task.contender}.pt")
    seconds = seconds_of(lambda: save(task.contender, tensors, path))
    if sum_of(torch.load(path, map_location="cpu")) != sum_of(tensors):
        raise RuntimeError(f"{task.contender} has saved other values")
    path.unlink()
    return Figure([seconds], nbytes, pinned_nbytes())


def prepare(task: Task, path: Path) -> None:
    """Write what is loaded, and the sum that tells whether it was."""
    from safetensors.torch import save_file

    tensors = make_tensors(task.workload, task.nbytes)
    torch.save(tensors, path)
    save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps(sum_of(tensors)))


def measure(task: Task) -> Figure:
    folder = Path(task.folder)
    path = folder / f"{task.workload}.pt"
    if task.prepare:
        prepare(task, path)
        return Figure([], 0)
    if task.contender in (D2H, H2D):
        return measure_copy(task.contender, task.nbytes)
    if task.contender == WRITE:
        return measure_write(folder, task.nbytes)
    if task.contender in (STOCK, PTSAVE) and is_warmed_up():
        warm_up = folder / f"warm-up-{task.contender}.pt"
        save(task.contender, {"ones": torch.ones(3, device=accelerator())}, warm_up)
        load(task.contender, warm_up)
    settle_memory(0)
    return measure_saves_and_loads(task, path)


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    nbytes = 2 * GIB
    for name in names:
        if name.endswith("load"):
            PROGRAM.run_task(Task(name, STOCK, str(folder), nbytes, prepare=True))
    figures: Figures = {}
    for _, name in tqdm([*itertools.product(range(rounds), names)], leave=False, disable=None):
        for contender in random.sample(CONTENDERS[name], len(CONTENDERS[name])):
            task = Task(name, contender, str(folder), nbytes)
            figure = Figure(**PROGRAM.run_task(task))
            figures.setdefault((name, contender), []).append(figure)
    return figures


def speed(figure: Figure) -> float:
    """Return GB/s."""
    return figure.nbytes / median(figure.seconds) / 1e9


def speed_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name in names:
        for contender in CONTENDERS[name]:
            ours = figures[name, contender]
            seconds = [median(figure.seconds) for figure in ours]
            peak = max(figure.pinned_nbytes for figure in ours) / MIB
            yield [
                name,
                contender,
                f"{median(seconds):.4f}",
                f"{min(seconds):.4f} - {max(seconds):.4f}",
                f"{median(map(speed, ours)):.2f}",
                f"{median(map(speed, ours)) / median(map(speed, figures[name, STOCK])):.2f}",
                f"{peak:.0f}" if peak else "",
            ]


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name in names:
        goal = GOALS[name]
        ours = median(map(speed, figures[name, PTSAVE]))
        if goal.times_stock is not None:
            times = ours / median(map(speed, figures[name, STOCK]))
            met = "yes" if times >= goal.times_stock else "**no**"
            yield [name, f"≥ {goal.times_stock:g} {TIMES_STOCK}", f"{times:.2f}", met]
        if goal.of_limit is not None:
            limit = min(median(map(speed, figures[name, each])) for each in goal.limits)
            met = "yes" if ours / limit >= goal.of_limit else "**no**"
            limits = " and ".join(goal.limits)
            yield [name, f"≥ {goal.of_limit:g} of {limits}", f"{ours / limit:.2f}", met]
        peak = max(figure.pinned_nbytes for figure in figures[name, PTSAVE]) / MIB
        if peak and name != "blocked":
            met = "yes" if peak <= PINNED_GOAL_MIB else "**no**"
            yield [name, f"≤ {PINNED_GOAL_MIB} MiB pinned", f"{peak:.0f}", met]


def describe_device() -> str:
    module = getattr(torch, accelerator())
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else accelerator()
    return f"Device: {name}, {torch.accelerator.device_count()} there."


def report(names: list[str], rounds: int, folder: Path) -> str:
    device = describe_device()
    figures = run_rounds(names, rounds, folder)
    header = ["workload", "", "s", "min - max", "GB/s", TIMES_STOCK, "MiB pinned"]
    speeds = table(header, speed_rows(names, figures), n_texts=2)
    goals = table(["workload", "goal", "ptsave", "met"], goal_rows(names, figures), n_texts=2)
    return "\n\n".join([device, speeds, goals])


def run(**task: Any) -> dict[str, Any]:
    return asdict(measure(Task(**task)))


PROGRAM = Program(
    "accelerator",
    "Benchmark of accelerators",
    __doc__ or "",
    run,
    report,
    [*CONTENDERS],
    folder=Path("/dev/shm"),
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
