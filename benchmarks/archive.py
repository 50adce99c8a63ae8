"""Looking into checkpoints: one tensor of a large file, verifying it, listing many tensors.

    python -m benchmarks.archive                    2 GiB, 5 rounds
    python -m benchmarks.archive --mib 256 --rounds 3
    python -m benchmarks.archive --output benchmarks/results/archive.md

Every figure comes from a fresh process that has imported torch and ptsave; that of the listing
includes importing ptsave.  "Read" is what the process has had read from the disk
(/proc/self/io), page cache and readahead included.  The limit of verifying is reading the same
file with the number of threads that is fastest: from the page cache, or past it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks import _limits
from ptsave.bench.system import MIB, describe_machine, make_cold, make_warm

TENSOR_NBYTES = 4 * MIB
N_LISTED = 100_000

_PREPARE = """
import json, sys, time, torch
def read_bytes():
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])
"""
_PROGRAMS = {
    "tensor": """
import ptsave
with ptsave.open(sys.argv[2]) as archive:  # so that all code is loaded
    archive.get_tensor("0")
before, begin = read_bytes(), time.perf_counter()
with ptsave.open(sys.argv[1]) as archive:
    archive.get_tensor("7")
""",
    "verify": """
import ptsave
before, begin = read_bytes(), time.perf_counter()
with ptsave.open(sys.argv[1]) as archive:
    archive.verify()
""",
    "listing": """
before, begin = read_bytes(), time.perf_counter()
import ptsave
with ptsave.open(sys.argv[1]) as archive:
    archive.infos()
""",
}
_REPORT = """
seconds = time.perf_counter() - begin
print(json.dumps([seconds, read_bytes() - before]))
"""


def run(program: str, *paths: Path) -> tuple[float, int]:
    """Return seconds and bytes read from the disk."""
    code = _PREPARE + _PROGRAMS[program] + _REPORT
    command = [sys.executable, "-c", code, *map(str, paths)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, nbytes = json.loads(output)
    return seconds, nbytes


def limit_of(mode: str, path: Path) -> float:
    """Return the seconds in which the file can be read."""
    _, seconds = _limits.measure(mode, path, 0)
    return min(seconds.values())


def measure(large: Path, small: Path, listed: Path, n_rounds: int) -> Iterator[str]:
    """Yield the rows of a table."""
    single = []
    for _ in range(n_rounds):
        make_cold(large)
        single.append(run("tensor", large, small))
    seconds, nbytes = (median(column) for column in zip(*single, strict=True))
    yield f"| one tensor of 4 MiB, cold | {seconds * 1e3:.1f} ms | {nbytes / MIB:.2f} MiB read |"
    for mode, prepare in (("cached-read", make_warm), ("direct-read", make_cold)):
        figures = []
        for _ in range(n_rounds):
            prepare(large)
            limit = limit_of(mode, large)
            prepare(large)
            figures.append((run("verify", large)[0], limit))
        seconds, limit = (median(column) for column in zip(*figures, strict=True))
        kind = "warm" if mode == "cached-read" else "cold"
        yield f"| verify, {kind} | {seconds * 1e3:.0f} ms | {limit / seconds:.2f} of the limit |"
    make_warm(listed)
    seconds = median(run("listing", listed)[0] for _ in range(n_rounds))
    yield f"| list {N_LISTED} tensors, import of ptsave included | {seconds * 1e3:.0f} ms | |"


@contextmanager
def files(folder: Path, nbytes: int) -> Iterator[tuple[Path, Path, Path]]:
    """Yield a large file, a small one, and one of many tensors."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        paths = (Path(name, "large.pt"), Path(name, "small.pt"), Path(name, "listed.pt"))
        n_tensors = max(nbytes // TENSOR_NBYTES, 8)
        numel = TENSOR_NBYTES // 4
        torch.save({str(i): torch.full((numel,), float(i)) for i in range(n_tensors)}, paths[0])
        torch.save({"0": torch.ones(10)}, paths[1])
        torch.save({f"layer.{i}.weight": torch.ones(4) for i in range(N_LISTED)}, paths[2])
        yield paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048, help="size of the large file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with files(arguments.folder, arguments.mib * MIB) as paths:
        rows = list(measure(*paths, arguments.rounds))
    header = ["| | median | |", "|---|---|---|"]
    report = "\n".join([describe_machine(arguments.folder, sys.argv), "", *header, *rows, ""])
    print(report)
    if arguments.output is not None:
        arguments.output.write_text(report)


if __name__ == "__main__":
    main()
