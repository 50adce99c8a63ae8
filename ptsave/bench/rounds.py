"""Plans and runs benchmark rounds of the libraries and the hardware, and draws plots.

Each measurement is made in a fresh process.
"""

from __future__ import annotations

import errno
import filecmp
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from ptsave.bench import limits
from ptsave.bench.system import (
    AS_FOUND,
    MIB,
    REST_SECONDS,
    Figure,
    Task,
    answer_of,
    available_states,
    filesystem_of,
    make_cold,
    make_warm,
)
from ptsave.sources.locations import refuse_url_target
from ptsave.support.config import available_nbytes

STOCK, SAFETENSORS, PTSAVE, LIMIT = "torch", "safetensors", "ptsave", "limit"
CONTENDERS = (STOCK, SAFETENSORS, PTSAVE)
TIMES_STOCK = "\N{MULTIPLICATION SIGN} torch"
SPEED_HEADER = ("workload", "contender", "s", "min - max", "GB/s", TIMES_STOCK, "of limit")

# Takes a mode, a path and a number of bytes; returns the bytes moved, and seconds by thread count.
MeasureLimit: TypeAlias = Callable[[str, Path, int], tuple[int, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task to measure, such as a durable save, and the hardware limit to compare it with."""

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
    """The measurements of one workload: for each contender (a library or the limit), one per round.

    A round measures each library once, but the limit with several thread counts.  `figures` has the
    limit's measurements with the thread count whose median is best; to choose the best thread count
    in each round would make the limit look too fast.
    """

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    limits: dict[str, list[Figure]] = field(default_factory=dict)  # by number of threads

    def add(self, contender: str, figure: Figure) -> None:
        self.figures.setdefault(contender, []).append(figure)

    def add_limit(self, nbytes: int, seconds: Mapping[str, float]) -> None:
        """Add one round of the limit: the seconds for each thread count."""
        for n_threads, figure in seconds.items():
            self.limits.setdefault(n_threads, []).append(Figure(figure, nbytes, 0, 0))
        self.figures[LIMIT] = self.limits[self.best_threads()]

    def best_threads(self) -> str:
        """Return the thread count with the shortest median time."""
        return min(self.limits, key=lambda n: median(f.seconds for f in self.limits[n]))

    def speeds(self, contender: str) -> list[float]:
        """Return the speed of each round in GB/s."""
        return [figure.nbytes / figure.seconds / 1e9 for figure in self.figures[contender]]

    def ratio(self, contender: str, reference: str) -> float:
        """Return the median over all rounds of the contender's speed divided by the reference's."""
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
    """Runs workloads on files in two folders, `disk` and `tmpfs`, which may be the same.

    With `drop_all`, all files may be dropped from the page cache if one file cannot be dropped
    alone.  `state` is one of `ptsave.bench.system.STATES`; unless `state` is WARMED_UP, each
    measurement first waits for `rest` seconds.  The limit always calls `fetch_free_memory` first.
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
        """Write the files to load; files that are saved later are compared with them."""
        for contender in {STOCK, *self.contenders} - {PTSAVE}:
            path = self.loaded_file(contender)
            path.parent.mkdir(exist_ok=True)
            figure = _run_worker(Task("save", contender, str(path), self.nbytes, fsync=True))
            self._checksum = figure.checksum

    def run(self, workload: Workload, contender: str, results: Results) -> None:
        """Run a workload once with one contender, and add the measurement to `results`."""
        os.sync()  # finishes earlier writes to the disk
        if contender == LIMIT:
            self._run_limit(workload, results)
        elif workload.action == "save":
            self._run_save(workload, contender, results)
        else:
            self._run_load(workload, contender, results)

    def loaded_file(self, contender: str) -> Path:
        """Return the file that a contender loads."""
        # Saved files are in another folder, but have the same names: a file contains its own name.
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
            raise RuntimeError(f"{contender} wrote a file that differs from torch's: {workload}")
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
    """Run every workload once per round on a prepared bench; shuffle the contenders each time."""
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
    """Yield a row with the columns of `SPEED_HEADER` for each contender, and for the limit."""
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


# -------------------------------------------------------------------------------------------- disk

MIN_NBYTES = 32 * MIB  # the smallest model that the worker makes
_DEFAULT_NBYTES = 1 << 30
_MARGIN_NBYTES = 64 * MIB
# Memory holds a worker's tensors, its other pages, and the file.
_MEMORY_FACTOR = 3

WORKLOADS = {
    "save-durable": Workload(
        title="save, durable",
        action="save",
        limit_mode="direct-write",
        limit_title="direct write + fdatasync",
        fsync=True,
    ),
    "save": Workload(
        title="save",
        action="save",
        limit_mode="buffered-write",
        limit_title="parallel write to the page cache",
    ),
    "load-cold": Workload(
        title="load, cold",
        action="load",
        limit_mode="direct-read",
        limit_title="direct read",
        page_cache="cold",
    ),
    "load-warm": Workload(
        title="load, warm",
        action="load",
        limit_mode="cached-read",
        limit_title="parallel read into fresh memory",
    ),
}
_IN_MEMORY = {
    "save": replace(
        WORKLOADS["save"], limit_mode="tmpfs-write", limit_title="parallel write to memory"
    ),
    "load-warm": WORKLOADS["load-warm"],
}


@dataclass(frozen=True)
class Plan:
    """Measurements to make, with tensors of `nbytes` in each file.

    `remarks` say which measurements are left out, and why.  `state` is one of
    `ptsave.bench.system.STATES`.
    """

    directory: Path
    nbytes: int
    rounds: int
    contenders: list[str]
    workloads: dict[str, Workload]
    remarks: list[str]
    state: str = AS_FOUND

    @property
    def n_files(self) -> int:
        """Number of files that exist at once: the files to load, and the saved file."""
        return 2 + (SAFETENSORS in self.contenders)

    @property
    def nbytes_on_disk(self) -> int:
        return self.n_files * self.nbytes

    @property
    def nbytes_written(self) -> int:
        """Bytes that all rounds together write."""
        n_saves = sum(workload.action == "save" for workload in self.workloads.values())
        each_round = n_saves * (len(self.contenders) + len(limits.THREAD_COUNTS))
        return (self.n_files - 1 + self.rounds * each_round) * self.nbytes


@dataclass(frozen=True)
class Measurement:
    """The measured workloads, their results, and remarks on measurements that were left out."""

    workloads: dict[str, Workload]
    results: dict[str, Results]
    remarks: list[str]


def plan_disk(
    directory: str, nbytes: int | None = None, rounds: int = 3, state: str = AS_FOUND
) -> Plan:
    """Plan the measurements that a directory allows, and raise errors before any data is written.

    The default of `nbytes` is 1 GiB, but at most a quarter of the free memory, and at most a
    quarter of the free space in the directory.
    """
    refuse_url_target(directory)
    if not available_states([state]):
        raise PermissionError(errno.EPERM, f"only root can make memory {state}")
    folder = Path(directory)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:  # the error names a temporary file
        raise OSError(error.errno, error.strerror, str(folder)) from error
    free, memory = shutil.disk_usage(folder).free, available_nbytes()
    if nbytes is None:
        nbytes = max(MIN_NBYTES, min(_DEFAULT_NBYTES, free // 4, memory // 4))
    elif nbytes < MIN_NBYTES:
        raise ValueError(f"the size must be at least {MIN_NBYTES >> 20} MiB, not {nbytes} bytes")
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    contenders = [STOCK, *([SAFETENSORS] if has_safetensors else []), PTSAVE]
    remarks = [] if has_safetensors else ["safetensors is not installed: left out"]
    kind = filesystem_of(folder).split(" ")[0]
    workloads = WORKLOADS
    if in_memory := kind in ("tmpfs", "ramfs"):
        workloads = _IN_MEMORY
        remarks.append(f"{directory} is in memory ({kind}): nothing there is durable or cold")
    plan = Plan(folder.resolve(), nbytes, rounds, contenders, dict(workloads), remarks, state)
    _require_room(plan, directory, free, memory, in_memory=in_memory)
    return plan


def _require_room(plan: Plan, directory: str, free: int, memory: int, *, in_memory: bool) -> None:
    needed = plan.nbytes_on_disk + _MARGIN_NBYTES
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{plan.n_files} files of {plan.nbytes >> 20} MiB need {needed >> 20} MiB, but only "
            f"{free >> 20} MiB are free: choose a smaller size",
            directory,
        )
    needed = _MEMORY_FACTOR * plan.nbytes + (plan.nbytes_on_disk if in_memory else 0)
    if needed > memory:
        raise MemoryError(
            f"measuring {plan.nbytes >> 20} MiB of tensors needs {needed >> 20} MiB of memory, but "
            f"only {memory >> 20} MiB are free: choose a smaller size"
        )


def measure_disk(plan: Plan, *, progress: bool = False) -> Measurement:
    """Carry out a plan, and always remove the files; if a worker fails, raise RuntimeError."""
    workloads, remarks = dict(plan.workloads), [*plan.remarks]
    with _scratch_folder(plan.directory) as folder:
        bench = Bench(
            folder, folder, plan.nbytes, plan.contenders, limits.measure, state=plan.state
        )
        bench.prepare()
        try:
            make_cold(bench.loaded_file(STOCK), drop_all=False)
        except RuntimeError as error:
            if workloads.pop("load-cold", None):
                remarks.append(f"cold loads are left out: {error}")
        results = run_rounds(bench, workloads, plan.contenders, plan.rounds, progress=progress)
    return Measurement(workloads, results, remarks)


@contextmanager
def _scratch_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder that is removed afterwards, also after SIGTERM."""

    def terminate(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = None
    with suppress(ValueError):  # not in the main thread
        before = signal.signal(signal.SIGTERM, terminate)
    try:
        with tempfile.TemporaryDirectory(prefix=".ptsave-bench-", dir=directory) as scratch:
            yield Path(scratch)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------- plots

_OURS, _SAFETENSORS, _OTHERS, _LINE = "#3d86bd", "#e0a458", "#9aa5b1", "#c0392b"
_OTHER_NAMES = ("torch", "torch.save", "loop", "nothing", "empty", "clones", "references")
_ROW_INCHES = 0.21
# If the groups' longest bars differ by a larger factor, each group has its own scale.
_COMPARABLE = 10
_TEXT = 0.15  # the width of a figure's text, as a fraction of the longest bar


@dataclass(frozen=True)
class Bar:
    """A bar of a plot: a median, its spread from `low` to `high`, and a text; a limit is a line."""

    label: str
    value: float
    low: float
    high: float
    text: str
    is_limit: bool = False


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other, such as the bars of one workload."""

    title: str
    bars: Sequence[Bar]

    def longest(self) -> float:
        """Return the value of the longest bar; the limit counts only if there are no other bars."""
        values = [bar.value for bar in self.bars if not bar.is_limit]
        return max(values or [bar.value for bar in self.bars]) or 1.0


def require_matplotlib() -> Any:
    """Return matplotlib's Figure class, or raise an ImportError with advice."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install 'ptsave[plot]', or pip install matplotlib"
        ) from error
    return Figure


def check_plot(path: str) -> None:
    """Raise the errors that writing a plot to `path` would raise after minutes of measuring."""
    refuse_url_target(path)
    formats = require_matplotlib()().canvas.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise ValueError(
            f"{path}: matplotlib cannot write .{suffix}, only {', '.join(sorted(formats))}"
        )
    path = path if suffix else f"{path}.png"  # as matplotlib names the file
    folder = os.path.dirname(path) or "."
    for wrong, code in (
        (os.path.isdir(path), errno.EISDIR),
        (not os.path.isdir(folder), errno.ENOENT),
        (not os.access(path if os.path.exists(path) else folder, os.W_OK), errno.EACCES),
    ):
        if wrong:
            raise OSError(code, os.strerror(code), path)


def draw_bars(groups: Sequence[Group], axis: str, title: str = "", *, mixed: bool = False) -> Any:
    """Return a matplotlib figure of the groups, from top to bottom.

    `axis` is the name and unit of the bars' values.  With `mixed`, or if the groups' values differ
    much, each group has its own scale, so only bars of the same group can be compared.
    """
    longest = [group.longest() for group in groups]
    mixed = mixed or max(longest) > _COMPARABLE * min(longest)
    ends = [
        max(bar.high / each for bar in group.bars)
        for group, each in zip(groups, longest, strict=True)
    ]
    width = max(ends) if mixed else max(bar.high for group in groups for bar in group.bars)
    n_rows = sum(len(group.bars) + 1 for group in groups)
    height = _ROW_INCHES * n_rows + (1.0 if title else 0.7)
    figure = require_matplotlib()(figsize=(6.5, height), layout="constrained")
    axes = figure.add_subplot()
    ticks: dict[float, str] = {}
    row = 0.0
    for group, scale in zip(groups, longest, strict=True):
        axes.text(0, row, f" {group.title}", fontsize=9, weight="bold", va="center")
        top, unit = row + 0.5, scale if mixed else 1.0
        lines = [bar.value / unit for bar in group.bars if bar.is_limit]
        for bar in group.bars:
            row += 1
            ticks[row] = bar.label
            end = _draw(axes, bar, row, top, unit)
            near = [line for line in lines if end <= line < end + _TEXT * width]
            place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points"}
            at = (max([end, *near]), row)
            axes.annotate(bar.text, at, **place, va="center", fontsize=8, parse_math=False)
        row += 1.2
    axes.set_yticks([*ticks], [*ticks.values()], fontsize=9, parse_math=False)
    axes.set_ylim(row - 0.5, -0.7)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{axis}, of the longest bar in each group" if mixed else axis, fontsize=9)
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _draw(axes: Any, bar: Bar, row: float, top: float, unit: float) -> float:
    """Draw a bar and its spread, or the limit's line from `top` on; return its right end."""
    value, low, high = (each / unit for each in (bar.value, bar.low, bar.high))
    if bar.is_limit:
        axes.plot([value, value], [top, row + 0.4], color=_LINE, linewidth=1.3, zorder=3)
    else:
        others = _OTHERS if bar.label in _OTHER_NAMES else _OURS
        color = _SAFETENSORS if bar.label == SAFETENSORS else others
        axes.barh(row, value, 0.78, color=color)
    if low < high:
        axes.plot([low, high], [row, row], color="#555555", linewidth=0.9, zorder=4)
    return max(high, value)


def plot_speeds(
    path: str, workloads: Mapping[str, Workload], results: Mapping[str, Results], title: str
) -> None:
    """Draw the median speeds with their spread to a file, whose suffix chooses the format."""
    groups = [Group(each.title, _speeds(results[name])) for name, each in workloads.items()]
    draw_bars(groups, "GB/s (more is better)", title).savefig(Path(path), dpi=150)


def _speeds(results: Results) -> list[Bar]:
    bars = []
    for contender in (*CONTENDERS, LIMIT):
        if contender in results.figures:
            speeds = results.speeds(contender)
            spread = (median(speeds), min(speeds), max(speeds))
            bars.append(Bar(contender, *spread, f"{spread[0]:.2f}", contender == LIMIT))
    return bars
