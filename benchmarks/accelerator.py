"""To and from an accelerator: torch, ptsave, safetensors, and the bus.

    python -m benchmarks.accelerator                     all workloads, 3 rounds
    python -m benchmarks.accelerator save load --rounds 9
    python -m benchmarks.accelerator --output benchmarks/results/accelerator.md

In each round every workload runs once with every contender, in a shuffled order, each in a fresh
process.  A process makes four calls: the first one is as found, the three others are warmed up.
Before the first one, the packages are imported, and the device has its context.  Files lie in
/dev/shm if it has room for them.  The clock stops when the device has finished.  The values of
every call are compared, outside the clock.

save, load: 1 GiB in tensors of 16 MiB.  async_save blocks its caller for this long; what it writes
in the background is not measured.  load_model fills a model of these tensors from a safetensors
file: torch has load_state_dict(torch.load()), and safetensors' users call copy_ for each tensor.
restore fills the model from torch's file, with load_into.  prefetch is that of safetensors 0.9;
fastsafetensors 0.5 takes part where it is installed.
small: 20,000 tensors of 1 KiB.  The limits are copies between the device and pinned memory that is
there (512 MiB, several times), and for a save also a parallel write of a file of zeros.  Pinned
memory is the peak that torch's host allocator knows of.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from benchmarks._program import TIMES_STOCK, Program, settle_memory, table
from ptsave.bench.system import AS_FOUND, MIB, WARMED_UP

STOCK, PTSAVE, SAFETENSORS, FAST = "torch", "ptsave", "safetensors", "fastsafetensors"
ASYNC, PREFETCH = "async_save", "prefetch"
D2H, H2D, WRITE = "pinned d2h", "pinned h2d", "parallel write"
LIMITS = "limits"
GIB = 1 << 30
LARGE_NBYTES, SMALL_NBYTES = 16 * MIB, 1024
NBYTES = {"large": GIB, "small": 20_000 * SMALL_NBYTES}
CALLS = 4  # of a process
PINNED_GOAL_MIB = 64  # what ptsave is configured to take
READERS = (
    SAFETENSORS,
    *([PREFETCH] if hasattr(safe_open, "prefetch") else []),
    *([FAST] if importlib.util.find_spec(FAST) is not None else []),
)
CONTENDERS = {
    "save": (STOCK, PTSAVE, ASYNC, SAFETENSORS),
    "load": (STOCK, PTSAVE, *READERS),
    "load_model": (STOCK, PTSAVE, *READERS),
    "restore": (STOCK, PTSAVE),
    "small-save": (STOCK, PTSAVE, SAFETENSORS),
    "small-load": (STOCK, PTSAVE, *READERS),
    LIMITS: (D2H, H2D, WRITE),
}


@dataclass(frozen=True)
class Goal:
    """What ptsave should be: so many times as fast as stock, so much of the limits."""

    times_stock: float | None
    of_limit: float | None = None


GOALS = {
    ("save", PTSAVE): Goal(5, 0.7),
    ("save", ASYNC): Goal(None, 0.8),
    ("load", PTSAVE): Goal(5),
    ("small-save", PTSAVE): Goal(15),
    ("small-load", PTSAVE): Goal(15),
}


@dataclass(frozen=True)
class Task:
    """What one process measures, or the files it prepares."""

    workload: str
    contender: str
    folder: str
    nbytes: int

    @property
    def path(self) -> Path:
        """The file that is loaded; beside it, one of safetensors and one with the values."""
        return Path(self.folder, f"{size_of(self.workload)}.pt")


@dataclass(frozen=True)
class Figure:
    """What was measured, call by call."""

    seconds: list[float]
    nbytes: int
    pinned_nbytes: int = 0


# ------------------------------------------------------------------------- one figure, one process

Tensors = dict[str, Tensor]
Call = Callable[[], Any]  # what is measured
Values = Callable[[Any], Tensors]  # the values that the result of a call has


def size_of(workload: str) -> str:
    return "small" if workload.startswith("small") else "large"


def accelerator() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise SystemExit("torch finds no accelerator on this machine")
    return f"{found.type}:0"


def make_tensors(workload: str, nbytes: int) -> Tensors:
    torch.manual_seed(0)
    if size_of(workload) == "small":
        numbers = range(nbytes // SMALL_NBYTES)
        tensors = [torch.full((256,), float(number)).to(accelerator()) for number in numbers]
    else:
        pattern = torch.randint(0, 1 << 30, (LARGE_NBYTES // 4,), dtype=torch.int32)
        pattern = pattern.to(accelerator())
        tensors = [pattern + number for number in range(nbytes // LARGE_NBYTES)]
    return {f"layers.{number}": tensor for number, tensor in enumerate(tensors)}


def sums_of(tensors: Tensors) -> dict[str, int]:
    """Return a number for each tensor that changes with any of its bits."""
    return {name: int(each.cpu().view(torch.int64).sum()) for name, each in tensors.items()}


def prepare(task: Task) -> Figure:
    tensors = make_tensors(task.workload, task.nbytes)
    torch.save(tensors, task.path)
    save_file(tensors, task.path.with_suffix(".safetensors"))
    task.path.with_suffix(".json").write_text(json.dumps(sums_of(tensors)))
    return Figure([], 0)


def pinned_nbytes() -> int:
    """Return the peak of pinned memory, 0 where torch does not tell."""
    module = getattr(torch, torch.device(accelerator()).type)
    statistics = getattr(module, "host_memory_stats", None)
    return int(statistics().get("allocated_bytes.peak", 0)) if statistics is not None else 0


def save_call(contender: str, tensors: Tensors, path: Path) -> tuple[Call, Values]:
    """Return a save, and what loads and removes its file."""
    saves: dict[str, Callable[[Tensors, Path], Any]] = {
        STOCK: torch.save,
        PTSAVE: ptsave.save,
        ASYNC: ptsave.async_save,
        SAFETENSORS: save_file,
    }

    def values(result: Any) -> Tensors:
        loaded: Tensors
        if contender == ASYNC:
            result.result()
        if contender == SAFETENSORS:
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu")
        path.unlink()
        return loaded

    return lambda: saves[contender](tensors, path), values


def read(contender: str, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file, on the device."""
    file: Any
    if contender == FAST:
        from fastsafetensors import fastsafe_open  # type: ignore[import-not-found,unused-ignore]

        with fastsafe_open([str(path)], nogds=True, device=accelerator()) as file:
            for name in list(file.keys()):
                yield name, file.get_tensor(name)
    elif contender == PREFETCH:
        with safe_open(path, framework="pt") as file, file.prefetch(device=accelerator()) as loader:
            yield from loader
    else:
        with safe_open(path, framework="pt", device=accelerator()) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


def load(contender: str, path: Path) -> Any:
    if contender == STOCK:
        return torch.load(path, map_location=accelerator())
    if contender == PTSAVE:
        return ptsave.load(path, map_location=accelerator())
    path = path.with_suffix(".safetensors")
    if contender == SAFETENSORS:
        return load_file(path, device=accelerator())
    return dict(read(contender, path))


def make_model(tensors: Tensors) -> nn.Module:
    parameters = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors.values()]
    return nn.ModuleDict({"layers": nn.ParameterList(parameters)})


def fill(task: Task, model: nn.Module) -> None:
    if task.contender == STOCK:
        model.load_state_dict(torch.load(task.path, map_location=accelerator()))
    elif task.workload == "restore":
        ptsave.load_into(task.path, model)
    elif task.contender == PTSAVE:
        ptsave.load_model(model, task.path.with_suffix(".safetensors"))
    else:
        parameters = dict(model.named_parameters())
        for name, tensor in read(task.contender, task.path.with_suffix(".safetensors")):
            parameters[name].copy_(tensor)


def fill_call(task: Task) -> tuple[Call, Values]:
    """Return a call that fills a model, and what returns and then forgets its values."""
    model = make_model(make_tensors(task.workload, task.nbytes))

    def clear() -> None:
        for parameter in model.parameters():
            parameter.zero_()

    def values(_: Any) -> Tensors:
        found = {name: parameter.cpu() for name, parameter in model.named_parameters()}
        clear()
        return found

    clear()
    return lambda: fill(task, model), values


def timed(action: Call) -> tuple[float, Any]:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    result = action()
    torch.accelerator.synchronize()
    return time.perf_counter() - start, result


def copy_call(contender: str, nbytes: int) -> Call:
    part = min(nbytes, GIB // 2)
    host = torch.ones(part, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(part, dtype=torch.uint8, device=accelerator())
    source, target = (device, host) if contender == D2H else (host, device)
    return lambda: [target.copy_(source, non_blocking=True) for _ in range(nbytes // part)]


def write_zeros(path: Path, nbytes: int) -> None:
    """Write a new file with several threads."""
    piece = bytes(4 * MIB)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    offsets = iter(range(0, nbytes, len(piece)))
    lock = threading.Lock()

    def write() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.pwrite(fd, piece, offset)

    n_threads = min(len(os.sched_getaffinity(0)), 16)
    threads = [threading.Thread(target=write) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)


def measure_limit(task: Task) -> Figure:
    path = Path(task.folder, "zeros")

    def write() -> None:
        write_zeros(path, task.nbytes)

    call = write if task.contender == WRITE else copy_call(task.contender, task.nbytes)
    seconds = []
    for _ in range(CALLS):
        seconds.append(timed(call)[0])
        path.unlink(missing_ok=True)
    return Figure(seconds, task.nbytes)


def measure(task: Task) -> Figure:
    if task.contender == "":
        return prepare(task)
    if task.workload == LIMITS:
        return measure_limit(task)
    if task.contender == FAST:
        importlib.import_module(FAST)
    expected = json.loads(task.path.with_suffix(".json").read_text())
    call: Call
    values: Values
    if task.workload.endswith("save"):
        tensors = make_tensors(task.workload, task.nbytes)
        call, values = save_call(task.contender, tensors, Path(task.folder, "saved"))
    elif task.workload.endswith("load"):
        call, values = (lambda: load(task.contender, task.path)), dict
    else:
        call, values = fill_call(task)
    torch.accelerator.synchronize()
    settle_memory(0)
    figure = []
    for _ in range(CALLS):
        seconds, result = timed(call)
        if sums_of(values(result)) != expected:
            raise RuntimeError(f"{task.workload}: {task.contender} has other values")
        del result
        gc.collect()
        figure.append(seconds)
    return Figure(figure, task.nbytes, pinned_nbytes())


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    """Measure; a contender that fails has no figures."""
    for size in dict.fromkeys(size_of(name) for name in names):
        PROGRAM.run_task(Task(size, "", str(folder), NBYTES[size]))
    figures: Figures = {(name, each): [] for name in names for each in CONTENDERS[name]}
    for _ in range(rounds):
        for name in names:
            for contender in random.sample(CONTENDERS[name], len(CONTENDERS[name])):
                task = Task(name, contender, str(folder), NBYTES[size_of(name)])
                try:
                    figure = Figure(**PROGRAM.run_task(task))
                except subprocess.CalledProcessError as error:
                    print(f"{name}, {contender}: {error}", file=sys.stderr, flush=True)
                    continue
                # If the time of a borrowed machine ends, these lines are what is left.
                seconds = ", ".join(f"{each:.4f}" for each in figure.seconds)
                print(f"{name}, {contender}: {seconds} s", file=sys.stderr, flush=True)
                figures[name, contender].append(figure)
    return figures


def seconds_in(state: str, figures: list[Figure]) -> list[float]:
    calls = slice(1) if state == AS_FOUND else slice(1, None)
    return [seconds for figure in figures for seconds in figure.seconds[calls]]


def speed(state: str, figures: list[Figure]) -> float:
    """Return GB/s, 0 without figures."""
    return figures[0].nbytes / median(seconds_in(state, figures)) / 1e9 if figures else 0.0


def limits_of(name: str, contender: str) -> tuple[str, ...]:
    if size_of(name) == "small" or name == LIMITS:
        return ()
    if name == "save":
        return (D2H,) if contender == ASYNC else (D2H, WRITE)
    return (H2D,)


def limit_of(name: str, contender: str, figures: Figures) -> float:
    """Return GB/s of the slowest limit, 0 without one."""
    limits = limits_of(name, contender)
    return min((speed(WARMED_UP, figures[LIMITS, each]) for each in limits), default=0.0)


def peak_mib(figures: list[Figure]) -> float:
    return max((figure.pinned_nbytes for figure in figures), default=0) / MIB


def ratio(ours: float, other: float) -> str:
    return f"{ours / other:.2f}" if other else ""


def speed_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name, contender in [(each, who) for each in names for who in CONTENDERS[each]]:
        own = figures[name, contender]
        if not own:
            yield [name, f"{contender} (failed)", *[""] * 7]
            continue
        for state in (WARMED_UP,) if name == LIMITS else (AS_FOUND, WARMED_UP):
            seconds = seconds_in(state, own)
            stock = speed(state, figures.get((name, STOCK), []))
            peak = peak_mib(own)
            yield [
                name,
                contender,
                state,
                f"{median(seconds):.4f}",
                f"{min(seconds):.4f} - {max(seconds):.4f}",
                f"{speed(state, own):.2f}",
                ratio(speed(state, own), stock),
                ratio(speed(state, own), limit_of(name, contender, figures)),
                f"{peak:.0f}" if peak else "",
            ]


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for (name, contender), goal in GOALS.items():
        own = figures.get((name, contender), [])
        for state in (AS_FOUND, WARMED_UP) if own else ():
            stock = speed(state, figures[name, STOCK])
            for least, what, other in (
                (goal.times_stock, TIMES_STOCK, stock),
                (goal.of_limit, "of the limit", limit_of(name, contender, figures)),
            ):
                if least is not None and other:
                    reached = speed(state, own) / other
                    met = "yes" if reached >= least else "**no**"
                    yield [name, contender, state, f"≥ {least:g} {what}", f"{reached:.2f}", met]
    for name in names:
        if peak := peak_mib(figures.get((name, PTSAVE), [])):
            met = "yes" if peak <= PINNED_GOAL_MIB else "**no**"
            goal_text = f"≤ {PINNED_GOAL_MIB} MiB pinned"
            yield [name, PTSAVE, "", goal_text, f"{peak:.0f}", met]


def describe_device() -> str:
    module = getattr(torch, torch.device(accelerator()).type)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else accelerator()
    return f"Device: {name}, {torch.accelerator.device_count()} there."


def scratch_folder() -> Path:
    shared = Path("/dev/shm")
    nbytes = 4 * NBYTES["large"]  # two files that are loaded, and one that is saved
    has_room = shared.is_dir() and shutil.disk_usage(shared).free >= nbytes
    return shared if has_room else Path(tempfile.gettempdir())


def report(names: list[str], rounds: int, folder: Path) -> str:
    device = describe_device()
    names = list(dict.fromkeys([*names, LIMITS]))
    figures = run_rounds(names, rounds, folder)
    speed_header = ["s", "min - max", "GB/s", TIMES_STOCK, "of the limit", "MiB pinned"]
    header = ["workload", "contender", "state", *speed_header]
    speeds = table(header, speed_rows(names, figures), n_texts=3)
    goal_header = ["workload", "contender", "state", "goal", "ptsave", "met"]
    goals = table(goal_header, goal_rows(names, figures), n_texts=4)
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
    folder=scratch_folder(),
    states=[AS_FOUND],  # a process also measures the calls behind its first one
)

if __name__ == "__main__":
    PROGRAM.main()
