"""Runs rounds in which contenders and the hardware take turns, and formats the figures.

Each figure comes from a fresh process.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeAlias

from ptsave.bench.system import AS_FOUND, MIB, REST_SECONDS, Figure, Task, answer_of, make_warm

STOCK, SAFETENSORS, PTSAVE, LIMIT = "torch", "safetensors", "ptsave", "limit"
CONTENDERS = (STOCK, SAFETENSORS, PTSAVE)
TIMES_STOCK = "\N{MULTIPLICATION SIGN} torch"
SPEED_HEADER = ("workload", "contender", "s", "min - max", "GB/s", TIMES_STOCK, "of limit")

# Takes a mode, a path and a number of bytes; returns the bytes moved, and seconds by thread count.
MeasureLimit: TypeAlias = Callable[[str, Path, int], tuple[int, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task that users have, such as a durable save, and the hardware's limit for it."""

    title: str
    action: str  # "save" or "load"
    limit_mode: str
    limit_title: str
    fsync: bool = False
    page_cache: str = "warm"  # or "cold", for a load
    mmap: bool = False
    on_tmpfs: bool = False
    replaces: bool = False  # a save replaces an older file of the same size


@dataclass
class Results:
    """All figures of one workload, by contender, one per round.

    The limit has the figures of the thread count with the best median.  The best of each round
    would be the luckiest of several draws, while a contender has only one.
    """

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    limits: dict[str, list[Figure]] = field(default_factory=dict)  # by number of threads

    def add(self, contender: str, figure: Figure) -> None:
        self.figures.setdefault(contender, []).append(figure)

    def add_limit(self, nbytes: int, seconds: Mapping[str, float]) -> None:
        """Keep a round's seconds by thread count."""
        for n_threads, figure in seconds.items():
            self.limits.setdefault(n_threads, []).append(Figure(figure, nbytes, 0, 0))
        self.figures[LIMIT] = self.limits[self.best_threads()]

    def best_threads(self) -> str:
        """Return the thread count with the best median."""
        return min(self.limits, key=lambda n: median(f.seconds for f in self.limits[n]))

    def speeds(self, contender: str) -> list[float]:
        """Return the GB/s of every round."""
        return [figure.nbytes / figure.seconds / 1e9 for figure in self.figures[contender]]

    def ratio(self, contender: str, reference: str) -> float:
        """Return how many times faster the contender is: the median of the rounds' ratios."""
        pairs = zip(self.speeds(contender), self.speeds(reference), strict=True)
        return median(speed / reference_speed for speed, reference_speed in pairs)

    def peaks_mib(self, contender: str) -> list[float]:
        return [figure.peak_nbytes / MIB for figure in self.figures[contender]]


def _run_worker(task: Task) -> Figure:
    """Run one task in a fresh process."""
    name = f"{task.action} with {task.contender}"
    return Figure(**answer_of(name, "ptsave.bench.worker", json.dumps(asdict(task))))


def is_available(contender: str) -> bool:
    """Return whether a contender can be imported."""
    try:
        _run_worker(Task("probe", contender))
    except RuntimeError:
        return False
    return True


@dataclass(eq=False)
class Bench:
    """Runs workloads on files in two empty folders, one on disk and one on tmpfs.

    With `drop_all` the page cache may drop all files if it cannot drop one alone.  `state` is one
    of `ptsave.bench.system.STATES`, and free memory rests for `rest` seconds in the states that are
    not warmed up.  The limit's memory is always fetched ahead.
    """

    disk: Path
    tmpfs: Path
    nbytes: int
    contenders: Sequence[str]
    measure_limit: MeasureLimit
    _: KW_ONLY
    drop_all: bool = False
    state: str = AS_FOUND
    rest: float = REST_SECONDS
    _checksum: int = field(default=0, init=False)

    def prepare(self) -> None:
        """Write the files to load, which saved files are also compared with."""
        for contender in {STOCK, *self.contenders} - {PTSAVE}:
            path = self.loaded_file(contender)
            path.parent.mkdir(exist_ok=True)
            figure = _run_worker(Task("save", contender, str(path), self.nbytes, fsync=True))
            self._checksum = figure.checksum

    def run(self, workload: Workload, contender: str, results: Results) -> None:
        """Run a workload once with one contender or the limit, and keep the figure."""
        os.sync()  # finishes earlier writes to the disk
        if contender == LIMIT:
            self._run_limit(workload, results)
        elif workload.action == "save":
            self._run_save(workload, contender, results)
        else:
            self._run_load(workload, contender, results)

    def loaded_file(self, contender: str) -> Path:
        """Return the file that a contender loads."""
        # Saved files have the same name in another folder, because the name is in a file's bytes.
        name = "model.safetensors" if contender == SAFETENSORS else "model.pt"
        return self.disk / "loaded" / name

    def _saved_file(self, workload: Workload, contender: str) -> Path:
        folder = (self.tmpfs if workload.on_tmpfs else self.disk) / "saved"
        folder.mkdir(exist_ok=True)
        return folder / self.loaded_file(contender).name

    def _run_limit(self, workload: Workload, results: Results) -> None:
        path, nbytes = self.loaded_file(STOCK), self.nbytes
        if workload.action == "save":
            nbytes = path.stat().st_size
            path = self._saved_file(workload, STOCK)
        if workload.page_cache == "warm" and workload.action == "load":
            make_warm(path)
        moved_nbytes, seconds = self.measure_limit(workload.limit_mode, path, nbytes)
        results.add_limit(moved_nbytes, seconds)

    def _run_save(self, workload: Workload, contender: str, results: Results) -> None:
        path = self._saved_file(workload, contender)
        if workload.replaces:
            shutil.copyfile(self.loaded_file(contender), path)
            os.sync()
        task = Task(
            "save",
            contender,
            str(path),
            self.nbytes,
            workload.fsync,
            state=self.state,
            rest=self.rest,
        )
        results.add(contender, _run_worker(task))
        is_first = len(results.figures[contender]) == 1
        if is_first and not filecmp.cmp(path, self.loaded_file(contender), shallow=False):
            raise RuntimeError(f"{contender} wrote a file that differs from stock's: {workload}")
        path.unlink()

    def _run_load(self, workload: Workload, contender: str, results: Results) -> None:
        task = Task(
            "load",
            contender,
            str(self.loaded_file(contender)),
            page_cache=workload.page_cache,
            mmap=workload.mmap,
            drop_all=self.drop_all,
            state=self.state,
            rest=self.rest,
        )
        figure = _run_worker(task)
        if figure.checksum != self._checksum:
            raise RuntimeError(f"{contender} loaded other values: {workload}")
        results.add(contender, figure)


def run_rounds(
    bench: Bench,
    workloads: Mapping[str, Workload],
    contenders: Sequence[str],
    rounds: int,
    *,
    progress: bool | None = None,
) -> dict[str, Results]:
    """Run every workload once per round, on a prepared bench, contenders in a shuffled order."""
    from tqdm import tqdm

    order = [*contenders, LIMIT]
    results = {name: Results() for name in workloads}
    total = rounds * len(workloads) * len(order)
    hidden = None if progress is None else not progress
    with tqdm(total=total, leave=False, disable=hidden, delay=1) as bar:
        for _, name in itertools.product(range(rounds), workloads):
            random.shuffle(order)
            for contender in order:
                bar.set_description(f"{name} {contender}")
                bench.run(workloads[name], contender, results[name])
                bar.update()
    return results


def table(header: Sequence[str], rows: Iterable[Sequence[str]], n_texts: int = 1) -> str:
    """Return a markdown table; columns after the first `n_texts` are numbers."""
    rule = ["---"] * n_texts + ["---:"] * (len(header) - n_texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], n_texts: int = 1) -> str:
    """Return a table for a terminal; columns after the first `n_texts` are numbers.

    >>> print(aligned(["call", "s"], [["save", "1.25"], ["load", "12.50"]]))
    call      s
    save   1.25
    load  12.50
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < n_texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def speed_rows(workload: Workload, results: Results) -> Iterator[list[str]]:
    """Yield a row of `SPEED_HEADER` for each contender, and for the limit."""
    for contender in (*CONTENDERS, LIMIT):
        if contender not in results.figures:
            continue
        seconds = [figure.seconds for figure in results.figures[contender]]
        label = contender
        if contender == LIMIT:
            label = f"limit: {workload.limit_title}, {results.best_threads()} threads"
        yield [
            workload.title,
            label,
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{median(results.speeds(contender)):.2f}",
            f"{results.ratio(contender, STOCK):.2f}",
            f"{results.ratio(contender, LIMIT):.2f}",
        ]
