"""Filling a model from shards, and saving it in shards: the usual loop, ptsave, the hardware.

    python -m benchmarks.weights                        all workloads, 3 rounds
    python -m benchmarks.weights warm --rounds 9
    python -m benchmarks.weights --output benchmarks/results/weights.md

In each round every workload runs once with every contender and with the hardware's limit, in a
shuffled order.  Every figure comes from a fresh process in which the model is in memory already,
and which has filled one small model before if it is warmed up.  The loop is that of inference
engines: safe_open for each shard, get_tensor for each name, and the parameter's weight_loader or
copy_.  The limit is reading the same bytes: from the page cache, once, in a fresh process like any
other and into the same tensors, with the number of threads (1, 2 or 4, a process for each) that has
the best median; from a cold disk, past the page cache, from one file of the same size, with
whichever of them is fastest; its memory is fetched in every state.  Where the model is saved, the
loop is the safetensors library's save_file for each shard, and the limit is writing the same bytes
to as many files through the page cache; files are written to a new directory, after all that was
dirty has been written to the disk.  Values are compared outside the clock, in the first round.

The tiny workloads are of 20,000 parameters of 16 floats: their time is Python's, for each name.
They have no limit.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks import _limits
from benchmarks._program import Program, is_warmed_up, settle_memory, table
from benchmarks.restore import (
    LIMIT,
    LIMIT_THREADS,
    PTSAVE,
    Figure,
    Figures,
    choose_limits,
    make_decoder,
    measure_cold_limit,
    ratio,
    speed_rows,
)
from ptsave.bench.system import MIB, PeakMemory, make_cold, make_warm

LOOP = "loop"
N_SHARDS = 8
ONE_FILE = "one-file.bin"  # all bytes of the shards, for the limit of the disk


@dataclass(frozen=True)
class Workload:
    """One way to fill a model, and what is asked of it."""

    title: str
    ratio_goal: float | None
    cold: bool = False
    loaders: bool = False
    saves: bool = False
    tiny: bool = False
    packed: bool = False
    limit_goal: float | None = None
    peak_goal_mib: float = 256


WORKLOADS = {
    "warm": Workload("8 shards, 1 GiB, warm", 1.3, limit_goal=0.8),
    "cold": Workload("8 shards, 1 GiB, cold", 2, cold=True, limit_goal=0.8),
    "loaders-warm": Workload("the same with weight_loaders, warm", None, loaders=True),
    "loaders-cold": Workload("the same with weight_loaders, cold", None, cold=True, loaders=True),
    "save": Workload("8 shards, 1 GiB, saved", 1, saves=True),
    "tiny": Workload("20,000 tiny tensors, warm", 1, tiny=True),
    "tiny-loaders": Workload("the same with weight_loaders", 1, tiny=True, loaders=True),
    "tiny-packed": Workload("the same, packed", 1, tiny=True, packed=True),
    "tiny-packed-loaders": Workload(
        "the same, packed, with weight_loaders", 1, tiny=True, packed=True, loaders=True
    ),
    "tiny-save": Workload("20,000 tiny tensors, saved", 1, tiny=True, saves=True),
}
N_TINY_LAYERS = 5_000
N_TINY_FLOATS = 16
PARTS = ("q_proj", "k_proj", "v_proj")


# -------------------------------------------------------------------------------- the model's files


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def make_tiny(seed: int, *, packed: bool = False) -> nn.Module:
    """Return a model of many small parameters."""
    torch.manual_seed(seed)
    sizes = (
        {"qkv_proj": len(PARTS), "o_proj": 1} if packed else dict.fromkeys((*PARTS, "o_proj"), 1)
    )
    model = nn.Module()
    layers = [nn.Module() for _ in range(N_TINY_LAYERS)]
    for layer, (name, size) in itertools.product(layers, sizes.items()):
        layer.add_module(name, nn.Module())
        weight = nn.Parameter(torch.randn(size * N_TINY_FLOATS))
        layer.get_submodule(name).register_parameter("weight", weight)
    model.layers = nn.ModuleList(layers)
    model.packed_modules_mapping = {"qkv_proj": list(PARTS)} if packed else {}  # type: ignore[assignment]
    return model


def save_shards(folder: Path, *, tiny: bool) -> None:
    """Write the files, and all of their bytes as one."""
    folder.mkdir()
    model = make_tiny(0) if tiny else make_decoder(0)
    save_with_library(folder, model.state_dict())
    with (folder / ONE_FILE).open("wb") as one_file:
        for path in shard_paths(folder):
            one_file.write(path.read_bytes())


def shards_of(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return what goes into which file; they are of about the same size."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(N_SHARDS)]
    nbytes = [0] * N_SHARDS
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        number = nbytes.index(min(nbytes))
        shards[number][name] = tensor
        nbytes[number] += tensor.nbytes
    return {
        f"model-{number:05}-of-{N_SHARDS:05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def save_with_library(folder: Path, tensors: dict[str, Tensor]) -> None:
    weight_map = {}
    for file_name, shard in shards_of(tensors).items():
        save_file(shard, folder / file_name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_with_ptsave(folder: Path, tensors: dict[str, Tensor]) -> None:
    import ptsave

    total = sum(tensor.nbytes for tensor in tensors.values())
    ptsave.save_model(tensors, folder, max_shard_size=max(total // N_SHARDS, 1))


def write_only(folder: Path, tensors: dict[str, Tensor], n_threads: int) -> None:
    """Write the bytes of the shards with nothing but write calls."""
    shards = [(folder / name, list(shard.values())) for name, shard in shards_of(tensors).items()]
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(write_shard, shards))


def write_shard(shard: tuple[Path, list[Tensor]]) -> None:
    path, tensors = shard
    with path.open("wb", buffering=0) as stream:
        os.posix_fallocate(stream.fileno(), 0, sum(tensor.nbytes for tensor in tensors) or 1)
        for tensor in tensors:
            rest = tensor.view(-1).view(torch.uint8).numpy().data
            while rest.nbytes:
                rest = rest[stream.write(rest) :]


def load(parameter: Tensor, tensor: Tensor, shard_id: int | None = None) -> None:
    """Be a parameter's weight_loader."""
    if shard_id is None:
        parameter.data.copy_(tensor)
    else:
        parameter.data[shard_id * len(tensor) : (shard_id + 1) * len(tensor)].copy_(tensor)


def load_packed(parameters: dict[str, nn.Parameter], name: str, tensor: Tensor) -> None:
    """Put a tensor into its place as engines do that have packed parameters."""
    for number, part in enumerate(PARTS):
        if part in name:
            parameter = parameters[name.replace(part, "qkv_proj")]
            getattr(parameter, "weight_loader", load)(parameter, tensor, number)
            return
    getattr(parameters[name], "weight_loader", load)(parameters[name], tensor)


# ------------------------------------------------------------------------- one figure, one process


@dataclass(frozen=True)
class Task:
    """What one process measures, or the files it writes."""

    contender: str
    folder: str
    save: bool = False
    cold: bool = False
    loaders: bool = False
    saves: bool = False
    tiny: bool = False
    packed: bool = False
    compare: bool = False


def model_of(task: Task, seed: int) -> nn.Module:
    return make_tiny(seed, packed=task.packed) if task.tiny else make_decoder(seed)


def fill(contender: str, folder: Path, model: nn.Module) -> None:
    if contender == PTSAVE:
        import ptsave

        ptsave.load_model(model, folder)
        return
    is_packed = bool(getattr(model, "packed_modules_mapping", None))
    parameters = dict(model.named_parameters())
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                if is_packed:
                    load_packed(parameters, name, file.get_tensor(name))
                    continue
                parameter = parameters[name]
                getattr(parameter, "weight_loader", load)(parameter, file.get_tensor(name))


def filler(task: Task, model: nn.Module) -> Callable[[], None]:
    """Return what is measured."""
    folder = Path(task.folder)
    if task.contender not in LIMIT_THREADS:
        return lambda: fill(task.contender, folder, model)
    parameters = dict(model.named_parameters())
    files: list[tuple[Path, list[Tensor]]] = []
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            files.append((path, [parameters[name] for name in file.keys()]))  # noqa: SIM118
    return _limits.PageCacheRead(files, LIMIT_THREADS[task.contender]).run


def warm_up(contender: str, folder: Path) -> None:
    """Fill something small, so that no imports are measured."""
    if contender in LIMIT_THREADS or not is_warmed_up():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = nn.Linear(2, 2)
        save_file(dict(model.state_dict()), Path(scratch) / "model.safetensors")
        fill(contender, Path(scratch), model)


def check_values(folder: Path, model: nn.Module) -> None:
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if ".qkv_proj." in name]:
        parts = tensors.pop(name).chunk(len(PARTS))
        names = [name.replace("qkv_proj", part) for part in PARTS]
        tensors.update(zip(names, parts, strict=True))
    for path in shard_paths(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not torch.equal(tensors.pop(name), file.get_tensor(name)):
                    raise RuntimeError(f"{name} has other values")
    if tensors:
        raise RuntimeError(f"not in any file: {list(tensors)}")


def measure_save(task: Task) -> Figure:
    tensors = {name: tensor.detach() for name, tensor in model_of(task, 1).state_dict().items()}

    def write(target: str, what: dict[str, Tensor]) -> None:
        if task.contender in LIMIT_THREADS:
            write_only(Path(target), what, LIMIT_THREADS[task.contender])
        elif task.contender == PTSAVE:
            save_with_ptsave(Path(target), what)
        else:
            save_with_library(Path(target), what)

    if is_warmed_up():
        with tempfile.TemporaryDirectory(dir=task.folder) as scratch:
            write(scratch, {"small": torch.ones(3)})
    with tempfile.TemporaryDirectory(dir=task.folder) as scratch:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        settle_memory(nbytes, is_limit=task.contender in LIMIT_THREADS)
        memory = PeakMemory()
        start = time.perf_counter()
        write(scratch, tensors)
        figure = Figure(time.perf_counter() - start, memory.above_baseline())
        if task.compare:
            check_values(Path(scratch), model_of(task, 1))
    return figure


def measure(task: Task) -> Figure:
    folder = Path(task.folder)
    if task.save:
        save_shards(folder, tiny=task.tiny)
        return Figure(0.0)
    if task.saves:
        return measure_save(task)
    warm_up(task.contender, folder)
    model = model_of(task, 1)
    if task.loaders:
        for parameter in model.parameters():
            parameter.weight_loader = load  # type: ignore[attr-defined]
    action = filler(task, model)
    for path in shard_paths(folder):
        make_cold(path) if task.cold else make_warm(path)
    nbytes = sum(path.stat().st_size for path in shard_paths(folder))
    settle_memory(nbytes, is_limit=task.contender in LIMIT_THREADS)
    memory = PeakMemory()
    start = time.perf_counter()
    action()
    figure = Figure(time.perf_counter() - start, memory.above_baseline())
    if task.compare:
        check_values(folder, model)
    return figure


def run_task(task: Task) -> Figure:
    return Figure(**PROGRAM.run_task(task))


# --------------------------------------------------------------------------------------- the rounds


def run_rounds(names: list[str], rounds: int, folder: Path) -> Figures:
    folders = {tiny: folder / ("tiny" if tiny else "model") for tiny in (False, True)}
    for tiny in {WORKLOADS[name].tiny for name in names}:
        run_task(Task(LOOP, str(folders[tiny]), save=True, tiny=tiny))
    figures: Figures = {}
    for number, name in tqdm(
        list(itertools.product(range(rounds), names)), leave=False, disable=None
    ):
        workload = WORKLOADS[name]
        limits: list[str] = [LIMIT] if workload.cold else [*LIMIT_THREADS]
        contenders = [LOOP, PTSAVE, *([] if workload.tiny else limits)]
        for contender in random.sample(contenders, len(contenders)):
            if contender == LIMIT:
                measured = measure_cold_limit(folders[False] / ONE_FILE)
            else:
                task = Task(
                    contender,
                    str(folders[workload.tiny]),
                    tiny=workload.tiny,
                    packed=workload.packed,
                    cold=workload.cold,
                    loaders=workload.loaders,
                    saves=workload.saves,
                    compare=number == 0 and contender in (LOOP, PTSAVE),
                )
                measured = {contender: run_task(task)}
            for measured_contender, figure in measured.items():
                figures.setdefault((name, measured_contender), []).append(figure)
    choose_limits([name for name in names if not WORKLOADS[name].tiny], figures)
    return figures


# ---------------------------------------------------------------------------------------- reporting

TIMES_LOOP = "\N{MULTIPLICATION SIGN} loop"


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name in names:
        workload, ours = WORKLOADS[name], figures[name, PTSAVE]
        peak = max(figure.peak_nbytes for figure in ours) / MIB
        goals: list[tuple[str, float, bool]] = []
        if workload.ratio_goal is not None:
            times = ratio(ours, figures[name, LOOP])
            goal = workload.ratio_goal
            goals.append((f"≥ {goal:g} {TIMES_LOOP}", times, times >= goal))
        if workload.limit_goal is not None:
            part = ratio(ours, figures[name, LIMIT])
            goal = workload.limit_goal
            goals.append((f"≥ {goal:g} of the limit", part, part >= goal))
        goal = workload.peak_goal_mib
        goals.append((f"≤ {goal:g} MiB above the model", peak, peak <= goal))
        for goal_text, value, met in goals:
            yield [workload.title, goal_text, f"{value:.2f}", "yes" if met else "**no**"]


def report(names: list[str], rounds: int, folder: Path) -> str:
    titles = {name: WORKLOADS[name].title for name in names}
    figures = run_rounds(names, rounds, folder)
    header = ["workload", "", "s", "min - max", TIMES_LOOP, "of limit", "MiB above the model"]
    speeds = table(header, speed_rows(titles, LOOP, figures), n_texts=2)
    goals = table(["workload", "goal", "ptsave", "met"], goal_rows(names, figures), n_texts=2)
    return "\n\n".join([speeds, goals])


def run(**task: Any) -> dict[str, Any]:
    return asdict(measure(Task(**task)))


PROGRAM = Program("weights", "Weights benchmark", __doc__ or "", run, report, [*WORKLOADS])

if __name__ == "__main__":
    PROGRAM.main()
