"""Saving and loading a language model's tensors: stock torch, safetensors, ptsave, the hardware.

    python -m benchmarks                                all workloads, 1 GiB, 5 rounds
    python -m benchmarks load-warm --gib 2              one workload, with 2 GiB of tensors
    python -m benchmarks --output benchmarks/results/serialization.md

In each round every workload runs once with every contender, in a shuffled order and with the
hardware's limit among them, because what a disk can do drifts.  Every figure comes from a fresh
process.  Memory that a virtual machine's host may have taken back is fetched before the clock
starts.  Ratios are medians of the ratios within a round; the other figures are plain medians.
"""

from __future__ import annotations

import argparse
import filecmp
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks import _limits
from benchmarks._system import MIB, describe_machine, make_warm
from benchmarks._task import Figure, Task

GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent
TIMES_STOCK = "\N{MULTIPLICATION SIGN} stock"
STOCK, SAFETENSORS, PTSAVE, LIMIT = "stock", "safetensors", "ptsave", "limit"
CONTENDERS = (STOCK, SAFETENSORS, PTSAVE)


NOTES = """\
Each figure is from a fresh process; the contenders and the limit take turns, in a shuffled order.
Memory that a virtual machine's host may have taken back is fetched before the clock starts.
s and GB/s are medians over the rounds, and ratios are medians of the ratios within a round.
A load ends when one byte of every page of every tensor has been read.  safetensors always maps the
file, checks nothing and copies nothing before a page is touched: compare it with `mmap=True`.
ptsave checks every CRC, except with `mmap=True`.  A limit is the best of 1, 2 and 4 threads."""


@dataclass(frozen=True)
class Workload:
    """One thing that users do, and what issue 2 asks of it."""

    title: str
    action: str  # "save" or "load"
    limit_mode: str  # of io_limits
    limit_title: str
    ratio_goal: float  # against stock
    limit_goal: float | None = None
    fsync: bool = False
    page_cache: str = "warm"
    mmap: bool = False
    on_tmpfs: bool = False
    peak_goal_mib: float | None = 64

    def limit_label(self) -> str:
        return f"limit: {self.limit_title}"


WORKLOADS = {
    "save-durable": Workload(
        "save durable (fsync), disk",
        "save",
        "direct-write",
        "direct write + fdatasync",
        ratio_goal=3,
        limit_goal=0.9,
        fsync=True,
    ),
    "save-disk": Workload(
        "save, disk", "save", "buffered-write", "parallel write to the page cache", ratio_goal=2.5
    ),
    "save-tmpfs": Workload(
        "save, tmpfs",
        "save",
        "tmpfs-write",
        "parallel write to tmpfs",
        ratio_goal=1.5,
        on_tmpfs=True,
    ),
    "load-cold": Workload(
        "load cold, disk",
        "load",
        "direct-read",
        "direct read",
        ratio_goal=2.5,
        limit_goal=0.9,
        page_cache="cold",
    ),
    "load-warm": Workload(
        "load warm, disk",
        "load",
        "cached-read",
        "parallel read into fresh huge pages",
        ratio_goal=5,
        limit_goal=0.8,
    ),
    "mmap-warm": Workload(
        "load mmap=True, warm",
        "load",
        "mapped-read",
        "bare mmap",
        ratio_goal=1,
        mmap=True,
        peak_goal_mib=None,
    ),
    "mmap-cold": Workload(
        "load mmap=True, cold",
        "load",
        "direct-read",
        "direct read",
        ratio_goal=1,
        page_cache="cold",
        mmap=True,
        peak_goal_mib=None,
    ),
}


@dataclass
class Results:
    """All figures of one workload, by contender, one per round."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    best_threads: Counter[str] = field(default_factory=Counter)

    def add(self, contender: str, figure: Figure) -> None:
        self.figures.setdefault(contender, []).append(figure)

    def speeds(self, contender: str) -> list[float]:
        """Return GB/s of every round."""
        return [figure.nbytes / figure.seconds / 1e9 for figure in self.figures[contender]]

    def ratio(self, contender: str, reference: str) -> float:
        """Return the median over the rounds of how many times faster the contender is."""
        pairs = zip(self.speeds(contender), self.speeds(reference), strict=True)
        return median(speed / reference_speed for speed, reference_speed in pairs)

    def peaks_mib(self, contender: str) -> list[float]:
        return [figure.peak_nbytes / MIB for figure in self.figures[contender]]


# ------------------------------------------------------------------------------------------ running


def run_worker(task: Task, *, quiet: bool = False) -> Figure:
    """Run one task in a fresh process."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks._worker", json.dumps(asdict(task))],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
    )
    return Figure(**json.loads(result.stdout.splitlines()[-1]))


def is_available(contender: str) -> bool:
    try:
        run_worker(Task("probe", contender), quiet=True)
    except subprocess.CalledProcessError:
        return False
    return True


class Bench:
    """Runs workloads on files in a directory on disk and one on tmpfs."""

    def __init__(self, disk: Path, tmpfs: Path, nbytes: int, contenders: list[str]) -> None:
        self._disk = disk
        self._tmpfs = tmpfs
        self._nbytes = nbytes
        self._contenders = contenders
        self._checksum = 0

    def prepare(self) -> None:
        """Write the files that loads read, and the one that saves are compared with."""
        for contender in {STOCK, *self._contenders} - {PTSAVE}:
            path = self._loaded_file(contender)
            path.parent.mkdir(exist_ok=True)
            figure = run_worker(Task("save", contender, str(path), self._nbytes, fsync=True))
            self._checksum = figure.checksum

    def run(self, workload: Workload, contender: str, results: Results) -> None:
        os.sync()  # nothing that ran before may still be on its way to the disk
        if contender == LIMIT:
            self._run_limit(workload, results)
        elif workload.action == "save":
            self._run_save(workload, contender, results)
        else:
            self._run_load(workload, contender, results)

    def _loaded_file(self, contender: str) -> Path:
        # One name in several folders: a file's name is part of its bytes.
        name = "model.safetensors" if contender == SAFETENSORS else "model.pt"
        return self._disk / "loaded" / name

    def _saved_file(self, workload: Workload, contender: str) -> Path:
        folder = (self._tmpfs if workload.on_tmpfs else self._disk) / "saved"
        folder.mkdir(exist_ok=True)
        return folder / self._loaded_file(contender).name

    def _run_limit(self, workload: Workload, results: Results) -> None:
        path, nbytes = self._loaded_file(STOCK), self._nbytes
        if workload.action == "save":
            nbytes = path.stat().st_size
            path = self._saved_file(workload, STOCK)
        if workload.page_cache == "warm" and workload.action == "load":
            make_warm(path)
        moved_nbytes, seconds = _limits.measure(workload.limit_mode, path, nbytes)
        threads = min(seconds, key=lambda count: seconds[count])
        results.best_threads[threads] += 1
        results.add(LIMIT, Figure(seconds[threads], moved_nbytes, 0, 0))

    def _run_save(self, workload: Workload, contender: str, results: Results) -> None:
        path = self._saved_file(workload, contender)
        task = Task("save", contender, str(path), self._nbytes, workload.fsync)
        results.add(contender, run_worker(task))
        is_first = len(results.figures[contender]) == 1
        if is_first and not filecmp.cmp(path, self._loaded_file(contender), shallow=False):
            raise RuntimeError(f"{contender} wrote a file that differs from stock's: {workload}")
        path.unlink()

    def _run_load(self, workload: Workload, contender: str, results: Results) -> None:
        task = Task(
            "load",
            contender,
            str(self._loaded_file(contender)),
            page_cache=workload.page_cache,
            mmap=workload.mmap,
        )
        figure = run_worker(task)
        if figure.checksum != self._checksum:
            raise RuntimeError(f"{contender} loaded other values: {workload}")
        results.add(contender, figure)


def run_rounds(
    bench: Bench, names: list[str], contenders: list[str], rounds: int
) -> dict[str, Results]:
    """Run every workload once per round, its contenders and its limit in a shuffled order."""
    order = [*contenders, LIMIT]
    results = {name: Results() for name in names}
    with tqdm(total=rounds * len(names) * len(order), leave=False, disable=None) as progress:
        for _, name in itertools.product(range(rounds), names):
            random.shuffle(order)
            for contender in order:
                progress.set_description(f"{name} {contender}")
                bench.run(WORKLOADS[name], contender, results[name])
                progress.update()
    return results


# ---------------------------------------------------------------------------------------- reporting


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Return a markdown table, its first two columns text and the others numbers."""
    rule = ["---", "---"] + ["---:"] * (len(header) - 2)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def speed_rows(workload: Workload, results: Results) -> Iterator[list[str]]:
    for contender in (*CONTENDERS, LIMIT):
        if contender not in results.figures:
            continue
        seconds = [figure.seconds for figure in results.figures[contender]]
        label = contender
        if contender == LIMIT:
            threads = results.best_threads.most_common(1)[0][0]
            label = f"{workload.limit_label()}, {threads} threads"
        yield [
            workload.title,
            label,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{median(results.speeds(contender)):.2f}",
            f"{results.ratio(contender, STOCK):.2f}",
            f"{results.ratio(contender, LIMIT):.2f}",
        ]


def peak_rows(workload: Workload, results: Results) -> Iterator[list[str]]:
    for contender in CONTENDERS:
        if contender in results.figures and workload.peak_goal_mib is not None:
            peaks = results.peaks_mib(contender)
            yield [workload.title, contender, f"{median(peaks):.1f}", f"{max(peaks):.1f}"]


def goal_rows(workload: Workload, results: Results) -> Iterator[list[str]]:
    """Yield how ptsave compares with each goal of issue 2."""
    ratio = results.ratio(PTSAVE, STOCK)
    yield goal_row(
        workload, TIMES_STOCK, ratio, workload.ratio_goal, met=ratio >= workload.ratio_goal
    )
    if workload.limit_goal is not None:
        fraction = results.ratio(PTSAVE, LIMIT)
        met = fraction >= workload.limit_goal
        yield goal_row(workload, "of the limit", fraction, workload.limit_goal, met=met)
    if workload.peak_goal_mib is not None:
        peak = max(results.peaks_mib(PTSAVE))
        met = peak <= workload.peak_goal_mib
        yield goal_row(workload, "MiB above the tensors", peak, workload.peak_goal_mib, met=met)


def goal_row(workload: Workload, unit: str, value: float, goal: float, *, met: bool) -> list[str]:
    sign = "≤" if "MiB" in unit else "≥"
    return [workload.title, f"{sign} {goal:g} {unit}", f"{value:.2f}", "yes" if met else "**no**"]


def report(all_results: dict[str, Results]) -> str:
    """Return the tables in markdown."""

    def rows_of(rows: Callable[[Workload, Results], Iterator[list[str]]]) -> list[list[str]]:
        return [
            row for name, results in all_results.items() for row in rows(WORKLOADS[name], results)
        ]

    header = ["workload", "contender", "s", "min - max", "GB/s", TIMES_STOCK, "of limit"]
    parts = [table(header, rows_of(speed_rows))]
    if peaks := rows_of(peak_rows):
        parts.append(table(["workload", "contender", "peak MiB above tensors", "max"], peaks))
    if all(PTSAVE in results.figures for results in all_results.values()):
        parts.append(table(["workload", "goal", "ptsave", "met"], rows_of(goal_rows)))
    return "\n\n".join([*parts, NOTES])


# --------------------------------------------------------------------------------------------- main


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"default: all of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--gib", type=float, default=1.0, help="tensors to move (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--output", type=Path, help="write a report with the machine's data too")
    options = parser.parse_args(arguments)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")
    return options


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command without what names places on this machine."""
    command = ["python", "-m", "benchmarks", *options.workloads]
    if list(options.contenders) != list(CONTENDERS):
        command += ["--contenders", *options.contenders]
    return [*command, "--gib", f"{options.gib:g}", "--rounds", str(options.rounds)]


def available_contenders(wanted: Iterable[str]) -> list[str]:
    """Return the contenders that can be imported; stock is always among them."""
    contenders = [STOCK]
    for contender in wanted:
        if contender == STOCK:
            continue
        if is_available(contender):
            contenders.append(contender)
        else:
            print(f"{contender} cannot be imported: left out", file=sys.stderr)
    return contenders


@contextmanager
def scratch_directories(options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yield one folder on disk and one on tmpfs that are gone afterwards, SIGTERM included."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    prefix = "ptsave-benchmark-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.dir) as disk,
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.tmpfs) as tmpfs,
    ):
        yield Path(disk).resolve(), Path(tmpfs).resolve()


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    names = options.workloads or list(WORKLOADS)
    _limits.build()
    contenders = available_contenders(options.contenders)
    with scratch_directories(options) as (disk, tmpfs):
        machine = describe_machine(disk, command_of(options))
        bench = Bench(disk, tmpfs, int(options.gib * GIB), contenders)
        bench.prepare()
        results = run_rounds(bench, names, contenders, options.rounds)
    tables = report(results)
    print(tables)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(f"# Serialization benchmark\n\n{machine}\n\n{tables}\n")


if __name__ == "__main__":
    main()
