"""Looking into checkpoints: one tensor of a large file, verifying it, listing many tensors.

    python -m benchmarks.archive                    all workloads, 3 rounds
    python -m benchmarks.archive ls --rounds 9
    python -m benchmarks.archive --output benchmarks/results/archive.md

In each round every workload runs once, in turn.  Every figure comes from a fresh process that has
imported torch, and ptsave but for the listing, and has read a small file before if it is warmed up.
"Read" is what the process has had read from the disk (/proc/self/io), page cache and readahead
included.  The limit of verifying is reading the same file with the number of threads that is
fastest: from the page cache into memory that is in use already, or past it.  `ptsave ls` is the
time of the whole process, beside that of one that only imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks import _limits
from benchmarks._program import WITHOUT_COLD, Program, is_warmed_up, settle_memory, table
from ptsave.bench.system import MIB, make_cold, make_warm

LARGE_NBYTES = 2048 * MIB
TENSOR_NBYTES = 4 * MIB
N_LISTED = 100_000
LARGE, SMALL, LISTED = "large.pt", "small.pt", "listed.pt"

Figure = tuple[float, float]  # seconds, and what the workload compares with


@dataclass(frozen=True)
class Task:
    """What a fresh process does with the files in a folder."""

    action: str  # "tensor", "verify", "listing", "ls" or "import"
    folder: str


def run(action: str, folder: str) -> Figure:
    """Return seconds, and the bytes that were read from the disk meanwhile."""
    return _ACTIONS[action](Path(folder))


def _timed(action: Callable[[], object]) -> Figure:
    settle_memory(0)
    before, begin = _read_nbytes(), time.perf_counter()
    action()
    return time.perf_counter() - begin, float(_read_nbytes() - before)


def _read_nbytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def _read_tensor(folder: Path) -> Figure:
    import ptsave

    def read(path: Path, name: str) -> None:
        with ptsave.open(path) as archive:
            archive.get_tensor(name)

    if is_warmed_up():
        read(folder / SMALL, "0")
    return _timed(lambda: read(folder / LARGE, "7"))


def _verify(folder: Path) -> Figure:
    import ptsave

    def verify() -> None:
        with ptsave.open(folder / LARGE) as archive:
            archive.verify()

    return _timed(verify)


def _list(folder: Path) -> Figure:
    def listing() -> None:
        import ptsave

        with ptsave.open(folder / LISTED) as archive:
            archive.infos()

    return _timed(listing)


def _run_python(*arguments: str) -> Figure:
    command = [sys.executable, *arguments]
    return _timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


_ACTIONS: dict[str, Callable[[Path], Figure]] = {
    "tensor": _read_tensor,
    "verify": _verify,
    "listing": _list,
    "ls": lambda folder: _run_python("-m", "ptsave", "ls", str(folder / LISTED)),
    "import": lambda folder: _run_python("-c", "import torch"),
}


# --------------------------------------------------------------------------------------- the rounds


def _run(action: str, folder: Path) -> Figure:
    seconds, nbytes = PROGRAM.run_task(Task(action, str(folder)))
    return seconds, nbytes


def measure_tensor(folder: Path) -> Figure:
    make_cold(folder / LARGE)
    return _run("tensor", folder)


def measure_verify(folder: Path, mode: str, prepare: Callable[[Path], None]) -> Figure:
    """Return seconds, and those in which the file can be read."""
    prepare(folder / LARGE)
    _, seconds = _limits.measure(mode, folder / LARGE, 0)
    prepare(folder / LARGE)
    return _run("verify", folder)[0], min(seconds.values())


def measure_ls(folder: Path) -> Figure:
    """Return seconds, and those of importing torch."""
    limit, _ = _run("import", folder)
    return _run("ls", folder)[0], limit


_WORKLOADS: dict[str, Callable[[Path], Figure]] = {
    "tensor": measure_tensor,
    "verify-warm": lambda folder: measure_verify(folder, "resident-read", make_warm),
    "verify-cold": lambda folder: measure_verify(folder, "direct-read", make_cold),
    "listing": lambda folder: _run("listing", folder),
    "ls": measure_ls,
}


def row(name: str, figures: list[Figure]) -> list[str]:
    seconds, others = (list(column) for column in zip(*figures, strict=True))
    times = [f"{milliseconds(f(seconds))}" for f in (median, min, max)]
    what, goal, result, met = judge(name, seconds, others)
    return [what, times[0], f"{times[1]} - {times[2]}", result, goal, met]


def judge(name: str, seconds: list[float], others: list[float]) -> tuple[str, str, str, str]:
    """Return what was measured, the goal, what has come of it, and whether it is met."""
    if name == "tensor":
        nbytes = median(others)
        met = nbytes <= 6 * MIB and median(seconds) <= 0.02
        result = f"{nbytes / MIB:.2f} MiB read"
        return "one tensor of 4 MiB, cold", "6 MiB, 20 ms", result, yes_or_no(met)
    if name.startswith("verify"):
        share = median(limit / mine for mine, limit in zip(seconds, others, strict=True))
        what, result = name.replace("-", " 2 GiB, "), f"{share:.2f} of the limit"
        return what, "0.8 of the limit", result, yes_or_no(share >= 0.8)
    if name == "listing":
        return f"list {N_LISTED} tensors, import of ptsave included", "", "", ""
    beyond = median(mine - imported for mine, imported in zip(seconds, others, strict=True))
    met = median(seconds) <= 1.5 and beyond <= 0.5
    result = f"{milliseconds(beyond)} beyond `import torch` ({milliseconds(median(others))})"
    what = f"`ptsave ls` of {N_LISTED} tensors, whole process"
    return what, "1,500 ms, 500 beyond", result, yes_or_no(met)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def yes_or_no(met: bool) -> str:
    return "yes" if met else "**no**"


def make_files(folder: Path, names: list[str]) -> None:
    """Write a large file, a small one, and one of many tensors, as far as they are needed."""
    if any(name.startswith(("tensor", "verify")) for name in names):
        numel = TENSOR_NBYTES // 4
        n_tensors = LARGE_NBYTES // TENSOR_NBYTES
        torch.save(
            {str(i): torch.full((numel,), float(i)) for i in range(n_tensors)}, folder / LARGE
        )
        torch.save({"0": torch.ones(10)}, folder / SMALL)
    if {"listing", "ls"} & set(names):
        torch.save({f"layer.{i}.weight": torch.ones(4) for i in range(N_LISTED)}, folder / LISTED)
        make_warm(folder / LISTED)
    os.sync()  # what is still being written would be waited for


def report(names: list[str], rounds: int, folder: Path) -> str:
    make_files(folder, names)
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            figures[name].append(_WORKLOADS[name](folder))

    def rows() -> Iterator[list[str]]:
        for name in names:
            yield row(name, figures[name])

    header = ["", "median", "min - max", "", "goal", "met"]
    return table(header, rows())


PROGRAM = Program(
    "archive",
    "Looking into checkpoints",
    __doc__ or "",
    run,
    report,
    [*_WORKLOADS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
