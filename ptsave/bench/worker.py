"""Makes one measurement: ``python -m ptsave.bench.worker TASK`` prints the result as JSON.

Only the call and, for a load, touching all pages are timed.  The time does not include imports,
checks, making the tensors, preparing the page cache, and preparing or freeing memory.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ptsave.bench.system import WARMED_UP, Figure, PeakMemory, Task, make_cold, make_warm, settle
from ptsave.sources.locations import sync_path

StateDict = dict[str, torch.Tensor]
VOCABULARY = 50257
CONTEXT = 1024
PAGE = mmap.PAGESIZE
FREE_MEMORY_FACTOR = 2  # for a file in the page cache, and the tensors


def decoder_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes for a GPT-2-like float32 model of at least ``nbytes`` bytes."""
    width = 1024 if nbytes >= 1 << 29 else 128
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, width),
        "transformer.wpe.weight": (CONTEXT, width),
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }
    of_layer: dict[str, tuple[int, ...]] = {}
    for name, columns, rows in (
        ("attn.c_attn", width, 3 * width),
        ("attn.c_proj", width, width),
        ("mlp.c_fc", width, 4 * width),
        ("mlp.c_proj", 4 * width, width),
    ):
        of_layer |= {f"{name}.weight": (columns, rows), f"{name}.bias": (rows,)}
    for name in ("ln_1", "ln_2"):
        of_layer |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    missing = nbytes - _nbytes_of(shapes)
    for layer in range(max(1, -(-missing // _nbytes_of(of_layer)))):
        shapes |= {f"transformer.h.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _nbytes_of(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


def touch_every_page(tensors: StateDict) -> int:
    """Read one byte of every page of every tensor, and return their sum."""
    return sum(int(tensor.view(-1).view(torch.uint8)[::PAGE].sum()) for tensor in tensors.values())


def save_call(task: Task) -> Callable[[StateDict], object]:
    """Return the save call that a user of the contender would make."""
    path = Path(task.path)
    if task.contender == "ptsave":
        import ptsave

        return lambda tensors: ptsave.save(tensors, path, fsync=task.fsync)

    save: Callable[[StateDict, Path], Any] = torch.save
    if task.contender == "safetensors":
        from safetensors.torch import save_file as save

    def save_and_sync(tensors: StateDict) -> None:
        save(tensors, path)
        if task.fsync:
            sync_path(path)
            sync_path(path.parent)

    return save_and_sync


def load_call(task: Task) -> Callable[[], StateDict]:
    """Return the load call that a user of the contender would make, with its defaults."""
    path = Path(task.path)
    options: dict[str, Any] = {"mmap": True} if task.mmap else {}
    if task.contender == "ptsave":
        import ptsave

        return lambda: ptsave.load(path, **options)
    if task.contender == "safetensors":
        from safetensors.torch import load_file

        return lambda: load_file(path)
    return lambda: torch.load(path, **options)


def warm_up(task: Task) -> None:
    """In the state WARMED_UP, save and load a small tensor, so that no imports are measured."""
    if task.state == WARMED_UP:
        with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
            small = replace(task, path=f"{folder}/{Path(task.path).name}")
            save_call(small)({"": torch.zeros(1)})
            load_call(small)()


def measure_save(task: Task) -> Figure:
    """Make random tensors, and measure one save of them."""
    warm_up(task)
    generator = torch.Generator().manual_seed(0)  # each process has the same tensors
    tensors = {
        name: torch.empty(shape).uniform_(-1, 1, generator=generator)
        for name, shape in decoder_shapes(task.nbytes).items()
    }
    checksum = touch_every_page(tensors)
    save = save_call(task)
    gc.collect()
    settle(task.state, FREE_MEMORY_FACTOR * task.nbytes, rest=task.rest)
    memory = PeakMemory()
    start = time.perf_counter()
    save(tensors)
    seconds = time.perf_counter() - start
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Figure(seconds, nbytes, memory.above_baseline(), checksum)


def measure_load(task: Task) -> Figure:
    """Measure one load of a file, until every page of its tensors has been touched."""
    warm_up(task)
    load = load_call(task)
    touch_every_page({"": torch.zeros(PAGE)})  # the operator's first call initialises torch
    path = Path(task.path)
    if task.page_cache == "cold":
        make_cold(path, drop_all=task.drop_all)
    else:
        make_warm(path)
    gc.collect()
    settle(task.state, FREE_MEMORY_FACTOR * path.stat().st_size, rest=task.rest)
    memory = PeakMemory()
    start = time.perf_counter()
    tensors = load()
    loaded = time.perf_counter()
    checksum = touch_every_page(tensors)
    end = time.perf_counter()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    peak_nbytes = memory.above_baseline() - nbytes
    return Figure(end - start, nbytes, peak_nbytes, checksum, touch_seconds=end - loaded)


def probe(task: Task) -> Figure:
    """Raise an error if the contender cannot be imported."""
    save_call(task)
    load_call(task)
    return Figure(0.0, 0, 0, 0)


def main() -> None:
    """Measure the task that the command line gives as JSON."""
    task = Task(**json.loads(sys.argv[1]))
    measure = {"probe": probe, "save": measure_save, "load": measure_load}[task.action]
    print(json.dumps(asdict(measure(task))))


if __name__ == "__main__":
    main()
