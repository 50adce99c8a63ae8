"""Checkpoints of other libraries: as they write them, under install(), and by ptsave's plug-ins.

    python -m benchmarks.integrations                     all workloads, 3 rounds
    python -m benchmarks.integrations lightning --rounds 7
    python -m benchmarks.integrations --output benchmarks/results/integrations.md
    PTSAVE_BENCHMARK_MIB=64 PTSAVE_BENCHMARK_MPARAMS=10 python -m benchmarks.integrations

In each round of a workload it runs once with every contender, in a shuffled order, each in a fresh
process, which has saved something small before if it is warmed up.  Files go to a disk, new names,
without fsync unless the workload says so; before each figure all that is dirty has been written.

lightning: save_checkpoint and load_checkpoint of a CheckpointIO, 1 GiB of tensors; torch is
Lightning's own, "installed" is that under ptsave.install().  The load is warm.  Memory is the peak
of resident memory during the save, above what there was.

trainer: one checkpoint of transformers' Trainer, with AdamW, of a GPT-2 of 300 M parameters: model,
optimizer, scheduler, random state.  The limit is writing as many bytes to one new file, as that
of save_file is, by the faster of both ways: into the page cache, or past it with fdatasync.
"background" is the time for which training stands still, of the second checkpoint of a process if
it is warmed up, of the first otherwise; its limit, "copied", is a memcpy of as many bytes by two
threads into memory that is there.

save_file: 1 GiB by safetensors.torch.save_file, into the page cache and with fsync (torch: of the
file and its directory after the call).  The limit is writing as many bytes to a new file with
nothing but write calls, into the page cache or past it with fdatasync, by 1, 2 or 4 threads, of
which the fastest counts; its memory is fetched in every state.

share: of the bytes of one checkpoint, those that the engine has written; tiny models.
"""

from __future__ import annotations

import filecmp
import importlib
import itertools
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import _limits
from benchmarks._program import TIMES_STOCK, Program, Task, is_warmed_up, settle_memory, table
from benchmarks.works import GPT2_WIDTH, PARAMETERS_OF_LAYER, make_trainer, save_trainer
from ptsave.bench.system import MIB, PeakMemory, make_warm
from ptsave.sources.locations import sync_path

N_MIB = int(os.environ.get("PTSAVE_BENCHMARK_MIB", "1024"))
N_MPARAMS = int(os.environ.get("PTSAVE_BENCHMARK_MPARAMS", "300"))
STOCK, INSTALLED, PTSAVE, BACKGROUND, LIMIT = "torch", "installed", "ptsave", "background", "limit"
CONTENDERS = {
    "lightning": (STOCK, INSTALLED, PTSAVE),
    "trainer": (STOCK, PTSAVE, BACKGROUND, LIMIT),
    "save_file": (STOCK, PTSAVE, LIMIT),
    "save_file_fsync": (STOCK, PTSAVE, LIMIT),
}
BUFFERED, DIRECT = "buffered-write", "direct-write"
LIMIT_MODES = {
    "trainer": (BUFFERED, DIRECT),
    "save_file": (BUFFERED,),
    "save_file_fsync": (DIRECT,),
}
CLIENTS = ("lightning", "trainer", "accelerate", "diffusers", "peft")
N_FLOATS_OF_TENSOR = 4 * MIB


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    seconds: dict[str, float] = field(default_factory=dict)  # by what was done
    peak_nbytes: int = 0
    nbytes: int = 0
    share: float = 0.0


def make_tensors() -> dict[str, torch.Tensor]:
    count = max(N_MIB // 16, 1)
    return {f"layer.{i:03}.weight": torch.randn(N_FLOATS_OF_TENSOR) for i in range(count)}


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------- Lightning


def checkpoint_io(contender: str) -> Any:
    if contender == PTSAVE:
        from ptsave.integrations.lightning import CheckpointIO

        return CheckpointIO()
    if contender == INSTALLED:
        import ptsave

        ptsave.install()
    return importlib.import_module("lightning.fabric.plugins.io.torch_io").TorchCheckpointIO()


def measure_lightning(task: Task) -> Figure:
    plugin, folder = checkpoint_io(task.contender), Path(task.folder)
    if is_warmed_up():
        plugin.save_checkpoint({"w": torch.ones(3)}, str(folder / "small.ckpt"))
        plugin.load_checkpoint(str(folder / "small.ckpt"))
    path = folder / f"{task.contender}.ckpt"
    path.unlink(missing_ok=True)
    checkpoint: dict[str, Any] = {"state_dict": make_tensors(), "epoch": 1}
    settle_memory(3 * N_MIB * MIB)
    memory = PeakMemory()
    save = timed(lambda: plugin.save_checkpoint(checkpoint, str(path)))
    peak_nbytes = memory.above_baseline()
    expected = {name: float(each.sum()) for name, each in checkpoint.pop("state_dict").items()}
    make_warm(path)
    found: dict[str, Any] = {}
    settle_memory(2 * N_MIB * MIB)
    load = timed(lambda: found.update(plugin.load_checkpoint(str(path), weights_only=True)))
    if {name: float(each.sum()) for name, each in found["state_dict"].items()} != expected:
        raise RuntimeError("other values")
    path.unlink()
    return Figure({"save": save, "load": load}, peak_nbytes)


# -------------------------------------------------------------------------------------- the Trainer


def trainer_of(contender: str, folder: Path, n_layers: int, width: int) -> Any:
    background = contender == BACKGROUND
    return make_trainer(folder, n_layers, width, stock=contender == STOCK, background=background)


def measure_trainer(task: Task) -> Figure:
    folder = Path(task.folder) / task.contender
    if is_warmed_up():
        save_trainer(trainer_of(task.contender, folder / "small", 1, 16), 1)
    n_layers = max(N_MPARAMS * 10**6 // PARAMETERS_OF_LAYER, 1)
    trainer = trainer_of(task.contender, folder, n_layers, GPT2_WIDTH)
    if task.contender == BACKGROUND and is_warmed_up():
        save_trainer(trainer, 1)
        trainer._saves.wait()
        shutil.rmtree(folder / "checkpoint-1")
    settle_memory(3 * N_MPARAMS * 10**6 * 4)
    memory = PeakMemory()
    seconds = {"save": timed(lambda: save_trainer(trainer, 2))}
    if task.contender == BACKGROUND:
        start = time.perf_counter()
        trainer._saves.wait()
        seconds["written"] = seconds["save"] + time.perf_counter() - start
    files = [*(folder / "checkpoint-2").iterdir()]
    nbytes = sum(path.stat().st_size for path in files)
    shutil.rmtree(folder)
    return Figure(seconds, memory.above_baseline(), nbytes)


# ---------------------------------------------------------------------------------------- save_file


def measure_save_file(task: Task) -> Figure:
    import safetensors.torch

    import ptsave

    durable = task.workload == "save_file_fsync"
    if task.contender == PTSAVE:
        ptsave.install(safetensors=True, fsync=durable)
    path = Path(task.folder) / f"{task.contender}.safetensors"
    tensors = make_tensors()

    def save() -> None:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        if durable and task.contender == STOCK:
            sync_path(path)
            sync_path(path.parent)

    if is_warmed_up():
        safetensors.torch.save_file({"w": torch.ones(3)}, path)
        path.unlink()
    settle_memory(2 * N_MIB * MIB)
    seconds = {"save": timed(save)}
    if task.contender == PTSAVE:
        ptsave.uninstall()
        stock = path.with_suffix(".stock")
        safetensors.torch.save_file(tensors, stock, metadata={"format": "pt"})
        if not filecmp.cmp(path, stock, shallow=False):
            raise RuntimeError("the files differ")
        stock.unlink()
    nbytes = path.stat().st_size
    path.unlink()
    return Figure(seconds, 0, nbytes)


# -------------------------------------------------------------------------------------------- share


def checkpoint_of(client: str, contender: str, folder: Path) -> Callable[[], object]:
    """Return what writes a checkpoint of a tiny model into a folder."""
    if client == "lightning":
        plugin = checkpoint_io(contender)
        tensors = {"state_dict": {"w": torch.randn(MIB)}}
        return lambda: plugin.save_checkpoint(tensors, str(folder / "x.ckpt"))
    if client == "trainer":
        trainer = trainer_of(contender, folder, 2, 64)
        return lambda: save_trainer(trainer, 1)
    if client in ("diffusers", "peft"):
        if contender == PTSAVE:
            import ptsave

            ptsave.install(safetensors=True)
        model = diffusers_model() if client == "diffusers" else peft_model()
        return lambda: model.save_pretrained(str(folder))
    from ptsave.integrations.accelerate import enable

    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = torch.nn.Linear(512, 512)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if contender == PTSAVE:
        enable(accelerator)
    return lambda: accelerator.save_state(str(folder / "state"))


def diffusers_model() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(64,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )


def peft_model() -> Any:
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=512, n_head=4, vocab_size=64, n_positions=16)
    adapter = peft.LoraConfig(r=64, target_modules=["c_attn"])
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapter)


def measure_share(task: Task) -> Figure:
    from ptsave.writing.targets import FileWriter

    _, _, client = task.workload.partition(" ")
    folder = Path(task.folder) / f"{client}-{task.contender}"
    written = []
    write = FileWriter.write_file

    def noting(writer: FileWriter, path: str) -> None:
        written.append(os.path.basename(path))
        write(writer, path)

    action = checkpoint_of(client, task.contender, folder)
    FileWriter.write_file = noting  # type: ignore[method-assign, assignment]
    action()
    files = [path for path in folder.rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    by_engine = sum(path.stat().st_size for path in files if path.name in written)
    shutil.rmtree(folder)
    return Figure({}, 0, nbytes, by_engine / nbytes)


def measure(task: Task) -> Figure:
    warnings.simplefilter("ignore")
    if task.workload.startswith("share"):
        return measure_share(task)
    measures = {"lightning": measure_lightning, "trainer": measure_trainer}
    return measures.get(task.workload, measure_save_file)(task)


# --------------------------------------------------------------------------------------- the rounds

Figures = dict[tuple[str, str], list[Figure]]  # by workload and contender


def run_limit(name: str, folder: Path, nbytes: int) -> Figure:
    by_mode = []
    for mode in LIMIT_MODES[name]:
        os.sync()
        _, by_threads = _limits.measure(mode, folder / "limit", nbytes)
        by_mode.append(min(by_threads.values()))
    seconds = {"save": min(by_mode)}
    if name == "trainer":
        _, by_threads = _limits.measure("copy", folder, nbytes)
        seconds["copied"] = by_threads["2"]
    return Figure(seconds, 0, nbytes)


def run_rounds(name: str, rounds: int, folder: Path) -> Figures:
    """Measure one workload."""
    figures: Figures = {}
    for _ in tqdm(range(rounds), name, leave=False, disable=None):
        # The limit needs to know how much the others have written.
        contenders = [each for each in CONTENDERS[name] if each != LIMIT]
        for contender in random.sample(contenders, len(contenders)):
            figure = Figure(**PROGRAM.run_task(Task(name, contender, str(folder))))
            figures.setdefault((name, contender), []).append(figure)
        if LIMIT in CONTENDERS[name]:
            nbytes = figures[name, STOCK][-1].nbytes
            figures.setdefault((name, LIMIT), []).append(run_limit(name, folder, nbytes))
    return figures


def run_shares(folder: Path) -> Figures:
    figures: Figures = {}
    for client, contender in itertools.product(CLIENTS, (STOCK, PTSAVE)):
        task = Task(f"share {client}", contender, str(folder))
        figures[task.workload, contender] = [Figure(**PROGRAM.run_task(task))]
    return figures


# ---------------------------------------------------------------------------------------- reporting


def ratio(mine: list[Figure], other: list[Figure], what: str) -> float:
    """Return how many times as long the other takes."""
    pairs = zip(mine, other, strict=True)
    return median(b.seconds[what] / a.seconds[what] for a, b in pairs)


def time_rows(name: str, figures: Figures) -> Iterator[list[str]]:
    for contender in CONTENDERS[name]:
        ours = figures[name, contender]
        for what in ours[0].seconds:
            seconds = [figure.seconds[what] for figure in ours]
            stock = figures[name, STOCK]
            times = f"{ratio(ours, stock, what):.2f}" if what in stock[0].seconds else ""
            peak = max(figure.peak_nbytes for figure in ours) / MIB
            yield [
                contender,
                what,
                f"{median(seconds):.3f}",
                f"{min(seconds):.3f} - {max(seconds):.3f}",
                times,
                f"{peak:.0f}" if peak and what == "save" else "",
            ]


def share_rows(figures: Figures) -> Iterator[list[str]]:
    for client in CLIENTS:
        shares = [figures[f"share {client}", each][0].share for each in (STOCK, PTSAVE)]
        yield [client, *(f"{100 * share:.1f} %" for share in shares)]


def goal_rows(names: list[str], figures: Figures) -> Iterator[list[str]]:
    for name, contender, what, goal in (
        ("lightning", PTSAVE, "save", 10),
        ("lightning", PTSAVE, "load", 2.5),
        ("trainer", PTSAVE, "save", 2.5),
        ("save_file", PTSAVE, "save", 2),
        ("save_file_fsync", PTSAVE, "save", 1.6),
    ):
        if name in names:
            times = ratio(figures[name, contender], figures[name, STOCK], what)
            yield [
                f"{name}, {what}",
                f"≥ {goal:g} {TIMES_STOCK}",
                f"{times:.2f}",
                met(times >= goal),
            ]
    if "lightning" in names:
        peak = max(figure.peak_nbytes for figure in figures["lightning", PTSAVE]) / MIB
        yield ["lightning, save", "≤ 64 MiB above the tensors", f"{peak:.0f}", met(peak <= 64)]
    if "trainer" in names:
        pairs = zip(figures["trainer", BACKGROUND], figures["trainer", LIMIT], strict=True)
        times = median(ours.seconds["save"] / limit.seconds["copied"] for ours, limit in pairs)
        yield ["trainer, background", "≤ 1.3 memcpy", f"{times:.2f}", met(times <= 1.3)]
    if "share" in names:
        share = min(figures[f"share {client}", PTSAVE][0].share for client in CLIENTS)
        yield ["share, the least", "≥ 99 %", f"{100 * share:.1f} %", met(share >= 0.99)]


def met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def report(names: list[str], rounds: int, folder: Path) -> Iterator[str]:
    """Yield a table for each workload when it is measured, and one of the goals."""
    figures: Figures = {}
    for name in names:
        if name == "share":
            figures.update(run_shares(folder))
            yield table(["share, client", STOCK, PTSAVE], share_rows(figures))
            continue
        figures.update(run_rounds(name, rounds, folder))
        header = [name, "", "s", "min - max", TIMES_STOCK, "MiB above what there was"]
        yield table(header, time_rows(name, figures), n_texts=2)
    yield table(["workload", "goal", PTSAVE, "met"], goal_rows(names, figures), n_texts=2)


def run(**task: Any) -> dict[str, Any]:
    return asdict(measure(Task(**task)))


PROGRAM = Program(
    "integrations",
    "Benchmark of other libraries' checkpoints",
    __doc__ or "",
    run,
    report,
    [*CONTENDERS, "share"],
)

if __name__ == "__main__":
    PROGRAM.main()
