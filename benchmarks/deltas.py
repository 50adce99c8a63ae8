"""Weights as patches: making a version, its size, and applying it.

    python -m benchmarks.deltas                     all workloads, 3 rounds
    python -m benchmarks.deltas "encode 1 %" --rounds 9
    python -m benchmarks.deltas --output benchmarks/results/deltas.md

In each round every workload runs once with each contender, in turn, each in a fresh process.  The
weights are 2 GiB of bf16 in 64 tensors; in a version, 1 % or 0.1 % of the elements change by one
unit in the last place.

encode: from the new weights in memory to compressed patches in memory, with checksums (XXH3-128).
"reference" does this with numpy and zstd level 1 as slime does, with a thread for each core; see
tests/common/delta_reference.py.  "limit" reads the old and the new weights once, with XXH3 and a
thread for each core.  The rate counts the bytes of the new weights.

publish: encode, and write the files of the version.

size: the bytes of all files of the version.

apply: from the files of a version to a model's changed file, in place, whose bytes are in the page
cache.  "cached read" reads the model's file into memory that exists, with a thread for each core:
the limit.  "reference" maps the file and applies the patches with numpy, as SGLang does.
"memory" is `apply` to a state dict.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks._program import (
    ROOT,
    WITHOUT_COLD,
    Program,
    is_warmed_up,
    settle_memory,
    table,
)
from benchmarks.archive import yes_or_no
from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.bench.system import MIB

sys.path.insert(0, str(ROOT / "tests" / "common"))
import delta_reference as reference

# Workload -> contenders; the first is the reference or the limit.
CONTENDERS = {
    "encode 1 %": ("reference", "limit", "ptsave"),
    "encode 0.1 %": ("reference", "limit", "ptsave"),
    "publish 1 %": ("reference", "ptsave"),
    "size 1 %": ("reference", "ptsave"),
    "apply 1 %": ("cached read", "reference", "memory", "ptsave"),
}
N_TENSORS, TENSOR_NBYTES = 64, 32 * MIB
NBYTES = N_TENSORS * TENSOR_NBYTES
MIN_RATE = 8.0  # GB/s of new weights
MIN_FACTOR = 10  # times the reference's rate
MIN_READ = 0.8  # of the rate of a cached read
PIECE_NBYTES = 4 * MIB


def measure(workload: str, contender: str, folder: str) -> float:
    """Return the seconds of one figure, or the bytes of a version."""
    torch.set_num_threads(1)  # a pool waits for processors
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kind, percent, _ = workload.split(" ")
        if kind == "apply":
            return _apply(contender, Path(scratch))
        seconds = _publish(
            contender, float(percent) / 100, Path(scratch), only_encode=kind == "encode"
        )
        files = (Path(scratch) / "weight_v000001").iterdir()
        return sum(path.stat().st_size for path in files) if kind == "size" else seconds


def _weights() -> dict[str, Tensor]:
    values = torch.randn(TENSOR_NBYTES // 2).mul_(0.02).bfloat16()
    return {f"layers.{i}": values.roll(i) for i in range(N_TENSORS)}


def _change(weights: dict[str, Tensor], fraction: float) -> None:
    """Move a part of the elements by one unit in the last place, up or down."""
    for tensor in weights.values():
        bits = tensor.view(torch.int16)
        chosen = torch.randint(0, len(bits), (int(len(bits) * fraction),))
        bits[chosen] += torch.randint(0, 2, chosen.shape, dtype=torch.int16) * 2 - 1


def _publish(contender: str, fraction: float, folder: Path, *, only_encode: bool) -> float:
    """Return the seconds of a version."""
    from ptsave.deltas import Publisher

    weights = _weights()
    publisher = Publisher(folder, weights) if contender == "ptsave" else None
    old = {} if publisher else {name: tensor.clone() for name, tensor in weights.items()}
    calls: dict[str, Callable[[], object]] = {
        "ptsave": lambda: publisher and publisher._encode(weights),
        "reference": lambda: _encode_as_slime(old, weights),
        "limit": lambda: _read_memory([*old.values(), *weights.values()]),
    }
    for version in range(1, 2 + is_warmed_up()):
        _change(weights, fraction)
        settle_memory(0)
        begin = time.perf_counter()
        if only_encode and version == 1 + is_warmed_up():
            _ = calls[contender]()
        elif publisher:
            publisher.publish(weights)
        else:
            found = _encode_as_slime(old, weights)
            checksums = {name: digest for name, _, digest in found}
            blobs = {name: blob for name, blob, _ in found}
            reference.write_version(folder, version, blobs, checksums)
        seconds = time.perf_counter() - begin
        for name, tensor in old.items():
            tensor.copy_(weights[name])
    return seconds


def _read_memory(tensors: list[Tensor]) -> None:
    def read(tensor: Tensor) -> None:
        _C.Xxh3().update(memory_of(tensor.view(torch.uint8)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, tensors))


def _encode_as_slime(
    old: dict[str, Tensor], new: dict[str, Tensor]
) -> list[tuple[str, bytes, str]]:
    import zstandard

    def encode(name: str) -> tuple[str, bytes, str]:
        before, after = reference.bytes_of(old[name]), reference.bytes_of(new[name])
        patch = reference.encoded(before, after, "overwrite")
        digest = reference.DIGESTS["xxh3-128"](after)
        return name, zstandard.ZstdCompressor(level=1).compress(patch), digest

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(encode, new))


def _apply(contender: str, folder: Path) -> float:
    import ptsave
    from ptsave.deltas import Publisher, apply

    weights = _weights()
    served, file = folder / "served", folder / "served" / "model.safetensors"
    ptsave.save_model(weights, served, checksums=False)
    held = {name: tensor.clone() for name, tensor in weights.items()}
    publisher = Publisher(folder / "versions", served)
    calls: dict[str, Callable[[int], object]] = {
        "cached read": lambda _: _read(file, memory),
        "reference": lambda version: _pull_as_sglang(folder / "versions", version, file),
        "memory": lambda version: apply(folder / "versions", held, base_version=version - 1),
        "ptsave": lambda _: apply(folder / "versions", served),
    }
    memory = torch.zeros(file.stat().st_size, dtype=torch.uint8)
    _read(file, memory)  # a save may bypass the page cache
    for version in range(1, 2 + is_warmed_up()):
        _change(weights, 0.01)
        publisher.publish(weights)
        os.sync()
        settle_memory(0)
        begin = time.perf_counter()
        calls[contender](version)
        seconds = time.perf_counter() - begin
    return seconds


def _read(path: Path, memory: Tensor) -> None:
    target = memory_of(memory)
    file = os.open(path, os.O_RDONLY)

    def read(begin: int) -> None:
        os.preadv(file, [target[begin : begin + PIECE_NBYTES]], begin)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, range(0, len(target), PIECE_NBYTES)))
    os.close(file)


def _pull_as_sglang(root: Path, version: int, path: Path) -> None:
    import numpy as np
    import zstandard
    from safetensors import safe_open

    data = np.memmap(path, np.uint8, "r+")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    blobs, digests = reference.contents_of(root / f"weight_v{version:06d}")
    with safe_open(path, framework="np") as shard:
        names = sorted(shard.keys())  # all have one dtype, so this is their order in the file

    def patch(item: tuple[int, str]) -> None:
        number, name = item
        at = begin + number * TENSOR_NBYTES
        frame = zstandard.ZstdDecompressor().decompress(blobs[name])
        count = int.from_bytes(frame[:4], "little")
        region = data[at : at + TENSOR_NBYTES]
        positions = np.frombuffer(frame, "<u4", count, 4)
        region[positions] = np.frombuffer(frame, np.uint8, count, 4 + 4 * count)
        assert reference.DIGESTS["xxh3-128"](region) == digests[name]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(patch, enumerate(names)))


# ------------------------------------------------------------------------------------- the rounds


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = PROGRAM.measured(CONTENDERS, names, rounds, folder)

    def rows(names: list[str], cells: Callable[[list[float]], list[str]]) -> Iterator[list[str]]:
        for name in names:
            first, own = (figures[name, each] for each in (CONTENDERS[name][0], "ptsave"))
            ratio = median(other / mine for other, mine in zip(first, own, strict=True))
            for contender in CONTENDERS[name]:
                goal = _goal(name, ratio, median(own)) if contender == "ptsave" else ["", ""]
                yield [name, contender, *cells(figures[name, contender]), *goal]

    def time_of(found: list[float]) -> list[str]:
        spread = f"{min(found):.3f} - {max(found):.3f}"
        return [f"{median(found):.3f}", spread, f"{NBYTES / median(found) / 1e9:.1f}"]

    def size_of(found: list[float]) -> list[str]:
        return [f"{median(found) / MIB:.2f}"]

    sizes = [name for name in names if name.startswith("size")]
    times = [name for name in names if name not in sizes]
    ends = ["of the first row", "goal met"]
    tables = {
        table(["", "", "seconds", "min - max", "GB/s", *ends], rows(times, time_of)): times,
        table(["", "", "MiB", *ends], rows(sizes, size_of)): sizes,
    }
    return "\n\n".join(text for text, measured in tables.items() if measured)


def _goal(name: str, ratio: float, own: float) -> list[str]:
    """Return the last two cells; `ratio` is the first contender's figure by that of ptsave."""
    if name.startswith("size"):
        return [f"{1 / ratio:.3f} of the size", yes_or_no(ratio >= 1)]
    is_met = ""
    if name.startswith("encode"):
        is_met = yes_or_no(NBYTES / own / 1e9 >= MIN_RATE and ratio >= MIN_FACTOR)
    elif name.startswith("apply"):
        is_met = yes_or_no(ratio >= MIN_READ)
    return [f"{ratio:.2f} times the rate", is_met]


PROGRAM = Program(
    "deltas",
    "Weights as patches",
    __doc__ or "",
    measure,
    report,
    [*CONTENDERS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
