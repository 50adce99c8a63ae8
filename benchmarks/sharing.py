"""Saves that share unchanged bytes with an older file: their time, and the bytes that they write.

    python -m benchmarks.sharing                     all workloads, 3 rounds
    python -m benchmarks.sharing frozen --rounds 9
    python -m benchmarks.sharing --output benchmarks/results/sharing.md

In each round every workload runs once with each contender, in turn, each in a fresh process.  The
object is 1 GiB of bf16 in 80 tensors.  Each save goes to a new path, with fsync.

frozen: 72 tensors, 90 % of the bytes, are as in the older file.  The disk is XFS in an image, which
is a file on the disk named above, behind a loop device without a page cache.

changed: all tensors differ from the older file, on the same XFS.

elsewhere: as "frozen", on the disk named above, whose files cannot share blocks.

The goals: "frozen" writes at most 12 % of the file, in a quarter of the time of a save without a
base.  The two others take at most 1.05 times as long.

"no base" is `ptsave.save(fsync=True)`, to which the times of the other rows are compared.  "torch"
is `torch.save` and fsync.  "limit" writes as many bytes past the page cache, with the number of
threads that is fastest.  With "hashes known", the process itself has written the older file with a
base.  With "hashes unknown" and "base", another process has written it.  The older file is written
with fsync, so "hashes unknown" reads it from the disk.

As found, a save is the first of its process, except with "hashes known": there, two saves came
before, as the process has to write the older file.  Warmed up, the process has saved 16 MiB in the
same way before.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks import _limits
from benchmarks._program import (
    ROOT,
    WITHOUT_COLD,
    Program,
    is_warmed_up,
    settle_memory,
    table,
)
from benchmarks.archive import yes_or_no
from benchmarks.works import sync
from ptsave.bench.system import MIB

sys.path.insert(0, str(ROOT / "tests" / "common"))

FULL, TORCH, LIMIT = "no base", "torch", "limit"
KNOWN, UNKNOWN, BASE = "hashes known", "hashes unknown", "base"
# Workload -> contenders; the first is the save that the others are compared to.
CONTENDERS = {
    "frozen": (FULL, TORCH, LIMIT, KNOWN, UNKNOWN),
    "changed": (FULL, KNOWN, UNKNOWN),
    "elsewhere": (FULL, BASE),
}
ON_XFS = ("frozen", "changed")
N_TENSORS, TENSOR_NBYTES = 80, 13 * MIB
NBYTES = N_TENSORS * TENSOR_NBYTES
N_CHANGED = {"frozen": N_TENSORS // 10, "changed": N_TENSORS, "elsewhere": N_TENSORS // 10}
IMAGE_NBYTES = 3 * NBYTES  # two files at a time, and the journal of XFS
MAX_TIMES = {"frozen": 0.25, "changed": 1.05, "elsewhere": 1.05}  # of a save without a base
MAX_WRITTEN = {"frozen": 0.12, "changed": 1.0, "elsewhere": 1.0}  # of the file


def measure(workload: str, contender: str, folder: str) -> tuple[float, float]:
    """Return the seconds of one save, and the part of the file that it wrote."""
    torch.set_num_threads(1)  # a pool waits for processors
    disk = Path(folder) / "xfs" if workload in ON_XFS else Path(folder)
    with tempfile.TemporaryDirectory(dir=disk) as scratch:
        if contender == LIMIT:
            settle_memory(0, is_limit=True)
            seconds = _limits.measure("direct-write", Path(scratch) / "limit", NBYTES)[1]
            return min(seconds.values()), 1.0
        return _save(contender, N_CHANGED[workload], Path(scratch))


def _save(contender: str, n_changed: int, folder: Path) -> tuple[float, float]:
    from _system import in_child

    import ptsave

    def save(obj: dict[str, Tensor], path: Path, base: Path) -> ptsave.SavedBytes | None:
        if contender == TORCH:
            torch.save(obj, path)
            sync(path)
            return None
        return ptsave.save(obj, path, fsync=True, base=None if contender == FULL else base)

    def write_base(obj: dict[str, Tensor], path: Path) -> None:
        if contender in (UNKNOWN, BASE):
            in_child(lambda: ptsave.save(obj, path, fsync=True))
        elif contender == KNOWN:
            ptsave.save(obj, path)
            ptsave.save(obj, path, fsync=True, base=path)

    if is_warmed_up():
        small = {"layer": torch.zeros(4 * MIB)}
        write_base(small, folder / "small-0.pt")
        save(small, folder / "small-1.pt", folder / "small-0.pt")
    values = torch.randn(TENSOR_NBYTES // 2).bfloat16()
    weights = {f"layers.{i}": values.roll(i) for i in range(N_TENSORS)}
    write_base(weights, folder / "step-0.pt")
    for tensor in [*weights.values()][-n_changed:]:
        tensor.view(torch.int16).add_(1)
    settle_memory(NBYTES)
    begin = time.perf_counter()
    saved = save(weights, folder / "step-1.pt", folder / "step-0.pt")
    seconds = time.perf_counter() - begin
    return seconds, saved.written / sum(saved) if saved else 1.0


# ------------------------------------------------------------------------------------- the rounds


@contextmanager
def _xfs(folder: Path) -> Iterator[None]:
    """Mount an image of XFS at ``folder / "xfs"``."""
    from sharing_disks import sharing_disk

    with sharing_disk(folder, "xfs", IMAGE_NBYTES):
        image = folder / "xfs.image"
        # Without this, the machine's page cache would hold each byte a second time.
        find = ["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)]
        device = subprocess.run(find, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        subprocess.run(["losetup", "--direct-io=on", device], check=True)
        yield


def report(names: list[str], rounds: int, folder: Path) -> str:
    import pytest
    from sharing_disks import can_share

    if "elsewhere" in names and can_share(folder):
        print("not measured, as this disk's files can share blocks: elsewhere", file=sys.stderr)
        names = [name for name in names if name != "elsewhere"]
    with ExitStack() as stack:
        if on_xfs := [name for name in names if name in ON_XFS]:
            try:
                stack.enter_context(_xfs(folder))
            except (pytest.skip.Exception, subprocess.CalledProcessError) as error:
                print(f"not measured, as {error}: {', '.join(on_xfs)}", file=sys.stderr)
                names = [name for name in names if name not in on_xfs]
        figures = PROGRAM.measured(CONTENDERS, names, rounds, folder)

    def rows() -> Iterator[list[str]]:
        for name in names:
            full = [seconds for seconds, _ in figures[name, FULL]]
            for contender in CONTENDERS[name]:
                found = [seconds for seconds, _ in figures[name, contender]]
                written = max(part for _, part in figures[name, contender])
                ratio = median(mine / other for mine, other in zip(found, full, strict=True))
                is_met = ratio <= MAX_TIMES[name] and written <= MAX_WRITTEN[name]
                yield [
                    name,
                    contender,
                    f"{median(found):.3f}",
                    f"{min(found):.3f} - {max(found):.3f}",
                    f"{100 * written:.1f} %",
                    "" if contender == FULL else f"{ratio:.2f} of the time",
                    yes_or_no(is_met) if contender in (KNOWN, UNKNOWN, BASE) else "",
                ]

    header = ["", "", "seconds", "min - max", "written", "of a save without base", "goal met"]
    return table(header, rows())


PROGRAM = Program(
    "sharing",
    "Saves that share unchanged bytes",
    __doc__ or "",
    measure,
    report,
    [*CONTENDERS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
