"""Checksums of safetensors files, and mapped files that are verified.

    python -m benchmarks.checks                     all workloads, 3 rounds
    python -m benchmarks.checks map --rounds 9
    python -m benchmarks.checks --output benchmarks/results/checks.md

In each round every workload runs once with each contender, in turn, each in a fresh process.  Files
have 64 tensors of 16 MiB and lie in the page cache.

save_model, load_model: with checksums, and without; no fsync.  The loaded model exists.

map: the call of load(mmap=True, verify="background"), and torch.load(mmap=True).  verdict: from
this call until verified() returns.  touch: all tensors of open(map=True) are handed out for the
first time, and compared.  share: ptsave.share if a verdict is remembered.  Verdicts are forgotten
before each other call.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._program import WITHOUT_COLD, Program, Task, is_warmed_up, settle_memory, table
from benchmarks.archive import yes_or_no
from ptsave.bench.system import MIB

N_TENSORS, TENSOR_NBYTES = 64, 16 * MIB
NBYTES = N_TENSORS * TENSOR_NBYTES
MAX_RATIO = 1.05  # of the time without checksums
PLAIN, CHECKED, PT, SAFETENSORS, STOCK = "plain", "checksums", ".pt", ".safetensors", "torch"
CONTENDERS = {
    "save_model": (PLAIN, CHECKED),
    "load_model": (PLAIN, CHECKED),
    "map": (STOCK, PT, SAFETENSORS),
    "verdict": (PT, SAFETENSORS),
    "touch": (PT, SAFETENSORS),
    "share": (PT, SAFETENSORS),
}
MAX_SECONDS = {"map": 0.005, "verdict": 0.1, "touch": NBYTES / 10e9, "share": NBYTES / 40e9}


def _state() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((TENSOR_NBYTES // 4,), float(i)) for i in range(N_TENSORS)}


def _file(folder: Path, contender: str) -> Path:
    return folder / ("model.pt" if contender in (STOCK, PT) else f"{contender}.safetensors")


def _prepare(folder: Path) -> None:
    import ptsave

    torch.save(_state(), folder / "model.pt")
    for name in (PLAIN, CHECKED, SAFETENSORS):
        ptsave.save_model(_state(), folder / f"{name}.safetensors", checksums=name != PLAIN)
    for path in folder.iterdir():
        path.read_bytes()  # into the page cache


def measure(workload: str, contender: str, folder: str) -> float:
    """Return the seconds of one figure."""
    import ptsave

    path = _file(Path(folder), contender)
    verdicts = Path(folder, "verdicts")
    os.environ["PTSAVE_VERDICTS"] = str(verdicts)
    if not workload:
        _prepare(Path(folder))
        return 0.0
    calls: dict[str, Callable[[], Any]] = {
        "map": lambda: ptsave.load(path, mmap=True, verify="background"),
        "verdict": lambda: ptsave.verified(ptsave.load(path, mmap=True, verify="background")),
        "share": lambda: ptsave.share(path),
    }
    if workload == "save_model":
        state = _state()
        with_checksums = contender == CHECKED
        target = Path(folder, "new.safetensors")
        call: Callable[[], Any] = lambda: ptsave.save_model(  # noqa: E731
            state, target, checksums=with_checksums
        )
    elif workload == "load_model":
        model = torch.nn.Module()
        for name, tensor in _state().items():
            model.register_buffer(name, tensor)
        call = lambda: ptsave.load_model(model, path)  # noqa: E731
    elif workload == "touch":
        call = lambda: _touch(path)  # noqa: E731
    else:
        call = calls[workload] if contender != STOCK else lambda: torch.load(path, mmap=True)
    if workload == "share" and os.fork() == 0:
        ptsave.share(path)
        os._exit(0)
    elif workload == "share":
        os.wait()
    for _ in range(1 + is_warmed_up()):
        if workload != "share":
            shutil.rmtree(verdicts, ignore_errors=True)
        settle_memory(NBYTES if workload.endswith("model") else 0)
        begin = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - begin
        if workload == "map" and contender != STOCK:
            ptsave.verified(result)
        del result
    return seconds


def _touch(path: Path) -> None:
    import ptsave

    with ptsave.open(path, map=True) as archive:
        for i in range(N_TENSORS):
            archive.get_tensor(f"w{i}")


# ------------------------------------------------------------------------------------- the rounds


def report(names: list[str], rounds: int, folder: Path) -> str:
    PROGRAM.run_task(Task("", "", str(folder)))
    figures = PROGRAM.measured(CONTENDERS, names, rounds, folder)

    def rows() -> Iterator[list[str]]:
        for name in names:
            for contender in CONTENDERS[name]:
                found = figures[name, contender]
                spread = f"{1e3 * min(found):.1f} - {1e3 * max(found):.1f}"
                row = [name, contender, f"{1e3 * median(found):.1f}", spread]
                if contender in (PLAIN, STOCK):
                    yield [*row, "", "", ""]
                elif name in MAX_SECONDS:
                    limit = MAX_SECONDS[name]
                    goal = f"{1e3 * limit:.1f} ms"
                    yield [*row, "", goal, yes_or_no(median(found) <= limit)]
                else:
                    pairs = zip(found, figures[name, PLAIN], strict=True)
                    ratio = median(mine / plain for mine, plain in pairs)
                    goal = f"{MAX_RATIO} of the time"
                    yield [*row, f"{ratio:.2f}", goal, yes_or_no(ratio <= MAX_RATIO)]

    heads = ["", "", "ms", "min - max", "of the time without", "goal", "met"]
    return table(heads, rows())


PROGRAM = Program(
    "checks",
    "Checksums and verified maps",
    __doc__ or "",
    measure,
    report,
    [*CONTENDERS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
