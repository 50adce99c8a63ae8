"""Plans and measures saves and loads in a directory."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ptsave.bench import limits
from ptsave.bench.rounds import PTSAVE, SAFETENSORS, STOCK, Bench, Results, Workload, run_rounds
from ptsave.bench.system import AS_FOUND, MIB, available_states, filesystem_of, make_cold
from ptsave.sources.locations import refuse_url_target
from ptsave.support.config import available_nbytes

MIN_NBYTES = 32 * MIB  # the smallest model that the worker makes
_DEFAULT_NBYTES = 1 << 30
_MARGIN_NBYTES = 64 * MIB
# A worker's tensors, its other pages, and the file.
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
    """Measurements to make with `nbytes` of tensors in each file.

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
        """Number of files that exist at once: the loaded ones, and the saved one."""
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
    """The measured workloads, their figures, and remarks on measurements that were left out."""

    workloads: dict[str, Workload]
    results: dict[str, Results]
    remarks: list[str]


def plan_disk(
    directory: str, nbytes: int | None = None, rounds: int = 3, state: str = AS_FOUND
) -> Plan:
    """Plan the measurements that a directory allows, and raise errors before any data is written.

    The default of `nbytes` is 1 GiB, but at most a quarter of the free memory, and of the free
    space in the directory.
    """
    refuse_url_target(directory)
    if not available_states([state]):
        raise PermissionError(errno.EPERM, f"only root can make memory {state}")
    folder = Path(directory)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:  # which names a temporary file
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
        remarks.append(f"{directory} is in memory ({kind}): nothing there is durable, or cold")
    plan = Plan(folder.resolve(), nbytes, rounds, contenders, dict(workloads), remarks, state)
    _require_room(plan, directory, free, memory, in_memory=in_memory)
    return plan


def _require_room(plan: Plan, directory: str, free: int, memory: int, *, in_memory: bool) -> None:
    needed = plan.nbytes_on_disk + _MARGIN_NBYTES
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{plan.n_files} files of {plan.nbytes >> 20} MiB need {needed >> 20} MiB, and "
            f"{free >> 20} MiB are free: choose a smaller size",
            directory,
        )
    needed = _MEMORY_FACTOR * plan.nbytes + (plan.nbytes_on_disk if in_memory else 0)
    if needed > memory:
        raise MemoryError(
            f"measuring {plan.nbytes >> 20} MiB of tensors needs {needed >> 20} MiB of memory, and "
            f"{memory >> 20} MiB are free: choose a smaller size"
        )


def measure_disk(plan: Plan, *, progress: bool = False) -> Measurement:
    """Carry out a plan, and always remove the files; a failed worker is a RuntimeError."""
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
