"""Checkpoints of torch.distributed.checkpoint, with its storage and with ptsave's.

    python -m benchmarks.distributed              all workloads, 3 rounds
    python -m benchmarks.distributed save rows --rounds 9
    python -m benchmarks.distributed --output benchmarks/results/distributed.md

save, save-2     dcp.save of 1 GiB in 64 tensors, durable, by 1 rank, by 2 with half of it each
warm, cold       dcp.load of it by 1 rank, from the page cache, from the disk
rows, columns    1/8 of the rows, of the columns, of 8 cold matrices of 32 MiB (1,024 x 8,192)
small            20,000 tensors of 64 bytes: microseconds for each, saved and loaded
async            dcp.async_save of 256 MiB: how long training is blocked, by the first call of a
                 process, by the third one if it is warmed up
convert          a cold checkpoint of 4 GiB (PTSAVE_BENCHMARK_MIB) to one .pt file: torch's
                 dcp_to_torch_save and ptsave.convert, and the memory above what there was

In each round every workload runs once with torch's storage and once with ptsave's, in turn, each in
a fresh process, which has done it once before to smaller tensors if it is warmed up; the limit is
measured in the same round, its memory is fetched in every state: one direct write or read of as
many bytes, with the number of threads that is fastest (async: memcpy by all threads into memory
that is there; columns: direct reads of 4 KiB each, by up to 32 threads).  "limit" is that beside
torch: nobody has more.  torch's writer is asked to sync its file (its default); it does not sync
the directory.  "Read" is what /proc/self/io says, as a multiple of what was wanted.  Both of
"small" also pay for DCP's own planning, which no storage can make faster: "of them planning" is a
save and a load with a storage that does nothing.  ptsave saves and loads with its planners, which
make the same plans, and which any storage may have.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import _limits
from benchmarks._program import Program, Task, is_warmed_up, settle_memory, table
from ptsave.bench.system import MIB, PeakMemory, make_cold, make_warm

CONTENDERS = ("torch", "ptsave")
N_TENSORS = 64
TENSOR_NBYTES = 16 * MIB
N_MATRICES, N_ROWS, N_COLUMNS = 8, 1024, 8192
SHARE = 8
N_SMALL = 20_000
ASYNC_NBYTES = 256 * MIB
WARMUP_NBYTES = 32 * MIB
N_CONVERTED_MIB = int(os.environ.get("PTSAVE_BENCHMARK_MIB", "4096"))

Figures = dict[str, float]


# ----------------------------------------------------------------------------------- the contenders


def storage(contender: str, folder: Path) -> tuple[Any, Any]:
    """Return a writer and a reader."""
    dcp: Any = import_module("torch.distributed.checkpoint")

    if contender == "torch":
        return dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)
    from ptsave.distributed import StorageReader, StorageWriter

    return StorageWriter(folder), StorageReader(folder)


def save(state: dict[str, Any], contender: str, folder: Path, **options: Any) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")

    writer, planner = storage(contender, folder)[0], planners(contender)[0]()
    dcp.save(state, storage_writer=writer, planner=planner, **options)


def load(state: dict[str, Any], contender: str, folder: Path, **options: Any) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")

    reader, planner = storage(contender, folder)[1], planners(contender)[1]()
    dcp.load(state, storage_reader=reader, planner=planner, **options)


# ------------------------------------------------------------------------------------ the workloads


def tensors(n: int, nbytes: int) -> dict[str, Any]:
    return {str(i): torch.full((nbytes // 4,), float(i)) for i in range(n)}


def timed(call: Callable[[], Any], nbytes: int = 2 * N_TENSORS * TENSOR_NBYTES) -> float:
    """Return the seconds of a call for which as much memory is brought into its state."""
    settle_memory(nbytes)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def run(workload: str, contender: str, folder: str) -> Figures:
    """Return the figures of one workload with one storage."""
    warnings.simplefilter("ignore")
    import_libraries(contender)
    root = Path(folder)
    if is_warmed_up():
        warm_up(contender, root / "warm-up")
    return WORKLOADS[workload](contender, root / f"{workload}-{contender}")


def import_libraries(contender: str) -> None:
    """Import the modules that a user's program names."""
    import_module("torch.distributed.checkpoint")
    if contender == "ptsave":
        import_module("ptsave.distributed")


def warm_up(contender: str, folder: Path) -> None:
    state = tensors(2, WARMUP_NBYTES // 2)
    save(state, contender, folder)
    load(state, contender, folder)
    shutil.rmtree(folder)


def run_save(contender: str, folder: Path) -> Figures:
    state = tensors(N_TENSORS, TENSOR_NBYTES)
    return {"seconds": timed(lambda: save(state, contender, folder))}


def run_save_2(contender: str, folder: Path) -> Figures:
    mp: Any = import_module("torch.multiprocessing")

    queue = mp.get_context("spawn").SimpleQueue()
    folder.mkdir()
    mp.spawn(_rank_of_2, (contender, str(folder), queue), nprocs=2)
    return {"seconds": max(queue.get() for _ in range(2))}


def _rank_of_2(rank: int, contender: str, folder: str, queue: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def part(n: int, nbytes: int) -> dict[str, Any]:
        whole = tensors(n, nbytes).items()
        return {k: DTensor.from_local(v, mesh, [Shard(0)], run_check=False) for k, v in whole}

    state = part(N_TENSORS, TENSOR_NBYTES // 2)
    import_libraries(contender)
    if is_warmed_up():
        save(part(2, WARMUP_NBYTES // 2), contender, Path(folder) / "first")
    dist.barrier()
    if rank == 0:
        settle_memory(2 * N_TENSORS * TENSOR_NBYTES)
    dist.barrier()
    begin = time.perf_counter()
    save(state, contender, Path(folder) / "checkpoint")
    queue.put(time.perf_counter() - begin)
    dist.barrier()
    dist.destroy_process_group()


def run_load(contender: str, folder: Path, *, cold: bool) -> Figures:
    state = tensors(N_TENSORS, TENSOR_NBYTES)
    save(state, contender, folder)
    for file in folder.glob("*.distcp"):
        make_cold(file) if cold else make_warm(file)
    return {"seconds": timed(lambda: load(state, contender, folder))}


def run_part(contender: str, folder: Path, *, rows: bool) -> Figures:
    """One rank's share, as DCP asks for it of a checkpoint that one rank has saved."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    whole = {str(i): torch.full((N_ROWS, N_COLUMNS), float(i)) for i in range(N_MATRICES)}
    save(whole, contender, folder)
    shape = (N_ROWS // SHARE, N_COLUMNS) if rows else (N_ROWS, N_COLUMNS // SHARE)
    begin = (3 * shape[0], 0) if rows else (0, 3 * shape[1])
    parts = {name: torch.zeros(shape) for name in whole}
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name),
            torch.Size((0, 0)),
            MetadataIndex(name, (0, 0), 0),
            torch.Size(begin),
            torch.Size(shape),
        )
        for name in parts
    ]

    class Planner:
        def resolve_tensor(self, item: Any) -> torch.Tensor:
            return parts[item.dest_index.fqn]

        def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
            pass

    reader: Any = storage(contender, folder)[1]

    def read() -> None:
        reader.set_up_storage_reader(reader.read_metadata(), True, rank=0)
        reader.read_data(LoadPlan(items), Planner()).wait()

    for file in folder.glob("*.distcp"):
        make_cold(file)
    before = read_nbytes()
    seconds = timed(read)
    nbytes = read_nbytes() - before
    if not all(bool((part == float(name)).all()) for name, part in parts.items()):
        raise RuntimeError(f"{contender} has read other values")
    wanted = sum(part.nbytes for part in parts.values())
    return {"seconds": seconds, "times_wanted": nbytes / wanted}


def run_small(contender: str, folder: Path) -> Figures:
    state = {"model": {f"layer.{i}": torch.full((16,), float(i)) for i in range(N_SMALL)}}
    saved = timed(lambda: save(state, contender, folder))
    loaded = timed(lambda: load(state, contender, folder))
    saver, loader = planners(contender)
    planned, replanned = plan(state, saver(), loader())
    figures = {"save": saved, "of them planning a save": planned}
    figures |= {"load": loaded, "of them planning a load": replanned}
    return {f"{name}, us": seconds / N_SMALL * 1e6 for name, seconds in figures.items()}


def planners(contender: str) -> tuple[Any, Any]:
    """Return the classes of a planner for saves and one for loads."""
    dcp: Any = import_module("torch.distributed.checkpoint")

    if contender == "torch":
        return dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner
    from ptsave.distributed import LoadPlanner, SavePlanner

    return SavePlanner, LoadPlanner


def plan(state: dict[str, Any], saver: Any, loader: Any) -> tuple[float, float]:
    """Return the seconds of a save and a load with a storage that does nothing."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
    from torch.futures import Future

    def done(value: Any) -> Any:
        future: Any = Future()
        future.set_result(value)
        return future

    kept: list[Any] = []

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def same(self: Any, plan: Any) -> Any:
        return plan

    common = {
        "reset": nothing,
        "prepare_local_plan": same,
        "prepare_global_plan": same,
        "validate_checkpoint_id": classmethod(lambda cls, name: True),
    }
    writer: Any = type(
        "Writer",
        (StorageWriter,),
        common
        | {
            "set_up_storage_writer": nothing,
            "write_data": lambda self, plan, planner: done([]),
            "finish": lambda self, metadata, results: kept.append(metadata),
        },
    )
    reader: Any = type(
        "Reader",
        (StorageReader,),
        common
        | {
            "read_metadata": lambda self, *args, **kwargs: kept[0],
            "set_up_storage_reader": nothing,
            "read_data": lambda self, plan, planner: done(None),
        },
    )
    return (
        timed(lambda: dcp.save(state, storage_writer=writer(), planner=saver)),
        timed(lambda: dcp.load(state, storage_reader=reader(), planner=loader)),
    )


def run_async(contender: str, folder: Path) -> Figures:
    dcp: Any = import_module("torch.distributed.checkpoint")

    state = tensors(16, ASYNC_NBYTES // 16)
    writer = storage(contender, folder)[0]
    blocked = []
    settle_memory(3 * ASYNC_NBYTES)
    for _ in range(3 if is_warmed_up() else 1):  # the first one maps the memory
        begin = time.perf_counter()
        future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
        blocked.append(time.perf_counter() - begin)
        getattr(future, "upload_completion", future).result()
    return {"seconds": blocked[-1]}


def run_convert(contender: str, folder: Path) -> Figures:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    import ptsave

    checkpoint, target = folder / "checkpoint", folder / "all.pt"
    one = torch.full((TENSOR_NBYTES // 4,), 1.0)  # saved under many names
    save({str(i): one for i in range(N_CONVERTED_MIB * MIB // TENSOR_NBYTES)}, "ptsave", checkpoint)
    for file in checkpoint.glob("*.distcp"):
        make_cold(file)
    settle_memory(N_CONVERTED_MIB * MIB)
    memory = PeakMemory()
    begin = time.perf_counter()
    if contender == "torch":
        dcp_to_torch_save(checkpoint, target)
    else:
        ptsave.convert(checkpoint, target)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "MiB of memory": memory.above_baseline() / MIB}


WORKLOADS: dict[str, Callable[[str, Path], Figures]] = {
    "save": run_save,
    "save-2": run_save_2,
    "warm": lambda contender, folder: run_load(contender, folder, cold=False),
    "cold": lambda contender, folder: run_load(contender, folder, cold=True),
    "rows": lambda contender, folder: run_part(contender, folder, rows=True),
    "columns": lambda contender, folder: run_part(contender, folder, rows=False),
    "small": run_small,
    "async": run_async,
    "convert": run_convert,
}
GOALS = {
    ("save", "seconds"): "3 x, 0.8 of the limit",
    ("save-2", "seconds"): "3 x, 0.8 of the limit",
    ("warm", "seconds"): "3 x",
    ("cold", "seconds"): "1.5 x, 0.8 of the limit",
    ("rows", "seconds"): "4 x, 1.1 x wanted",
    ("columns", "seconds"): "4 x, 1.3 x wanted",
    ("small", "save, us"): "10",
    ("small", "load, us"): "10",
    ("async", "seconds"): "1.3 x memcpy: 0.77 of the limit",
    ("convert", "seconds"): "1.5 x",
    ("convert", "MiB of memory"): "128",
}
_LIMITS = {
    "save": "direct-write",
    "save-2": "direct-write",
    "warm": "cached-read",
    "cold": "direct-read",
    "columns": "columns-read",
    "async": "copy",
}
_MATRICES_NBYTES = N_MATRICES * N_ROWS * N_COLUMNS * 4
_LIMIT_NBYTES = {
    "async": ASYNC_NBYTES,
    "columns": _MATRICES_NBYTES,
}


# --------------------------------------------------------------------------------------- the rounds


def limit_of(workload: str, folder: Path) -> float | None:
    """Return the seconds of the hardware's limit."""
    mode = _LIMITS.get(workload)
    if mode is None:
        return None
    nbytes = _LIMIT_NBYTES.get(workload, N_TENSORS * TENSOR_NBYTES)
    path = folder / "limit"
    if mode.endswith("read"):
        with path.open("wb") as file:
            for _ in range(nbytes // TENSOR_NBYTES):
                file.write(os.urandom(1) * TENSOR_NBYTES)
        (make_warm if mode == "cached-read" else make_cold)(path)
    counts = (16, 32) if mode == "columns-read" else _limits.THREAD_COUNTS
    seconds = min(_limits.measure(mode, path, nbytes, counts)[1].values())
    path.unlink(missing_ok=True)
    return seconds


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures: dict[tuple[str, str], list[Figures]] = {}
    limits: dict[str, list[float]] = {}
    for turn in range(rounds):
        for name in names:
            limit = limit_of(name, folder)
            if limit is not None:
                limits.setdefault(name, []).append(limit)
            first = turn % len(CONTENDERS)
            for contender in CONTENDERS[first:] + CONTENDERS[:first]:
                found = PROGRAM.run_task(Task(name, contender, str(folder)))
                figures.setdefault((name, contender), []).append(found)
                shutil.rmtree(folder / f"{name}-{contender}")
                os.sync()

    def rows() -> Iterator[list[str]]:
        for name in names:
            for unit in figures[name, "torch"][0]:
                if unit != "times_wanted":
                    yield row(name, unit, figures, limits.get(name))

    header = [
        "workload",
        "",
        "torch",
        "ptsave",
        "min - max",
        "faster",
        "limit",
        "of the limit",
        "read",
        "goal",
    ]
    return table(header, rows())


def row(
    name: str,
    unit: str,
    figures: dict[tuple[str, str], list[Figures]],
    limits: list[float] | None,
) -> list[str]:
    stock = [each[unit] for each in figures[name, "torch"]]
    ours = [each[unit] for each in figures[name, "ptsave"]]
    faster = median(a / b for a, b in zip(stock, ours, strict=True))
    limit = of_limit = ""
    if limits is not None:
        limit = f"{median(a / b for a, b in zip(stock, limits, strict=True)):.1f} x"
        of_limit = f"{median(a / b for a, b in zip(limits, ours, strict=True)):.2f}"
    times = [each.get("times_wanted") for each in figures[name, "ptsave"]]
    read = f"{median(t for t in times if t is not None):.2f} x wanted" if times[0] else ""
    spread = f"{min(ours):.3g} - {max(ours):.3g}"
    return [
        name,
        unit,
        f"{median(stock):.3g}",
        f"{median(ours):.3g}",
        spread,
        f"{faster:.1f} x",
        limit,
        of_limit,
        read,
        GOALS.get((name, unit), ""),
    ]


PROGRAM = Program(
    "distributed", "Checkpoints of many ranks", __doc__ or "", run, report, list(WORKLOADS)
)

if __name__ == "__main__":
    PROGRAM.main()
