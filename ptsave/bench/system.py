"""Linux interfaces for benchmarks: the page cache, memory, and facts about the machine."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MIB = 1 << 20

# States of process and memory in which a call is measured.
AS_FOUND = "as found"  # the first call of a process, with nothing imported in advance
WARMED_UP = "warmed up"  # a later call, or a call whose memory was fetched in advance
COLD = "cold"  # as found, but free memory is compacted, so a VM's host takes it back
STATES = (AS_FOUND, WARMED_UP, COLD)
REST_SECONDS = 4.0
_COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")
# The package can be imported from this directory, even if it is not installed.
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Task:
    """A measurement to make, sent to a worker process."""

    action: str  # "probe", "save" or "load"
    contender: str  # "torch", "ptsave" or "safetensors"
    path: str = ""
    nbytes: int = 0  # for a save: the least bytes that the tensors have
    fsync: bool = False
    page_cache: str = "warm"  # or "cold", for a load
    mmap: bool = False
    drop_all: bool = False  # drop all files from the page cache if one cannot be dropped
    state: str = WARMED_UP  # of the process and of free memory
    rest: float = REST_SECONDS  # seconds to wait before the call, unless `state` is WARMED_UP


@dataclass(frozen=True)
class Figure:
    """The result of one measurement, sent back by the worker process."""

    seconds: float
    nbytes: int  # of tensors
    peak_nbytes: int  # peak of resident memory beyond the tensors
    checksum: int  # the sum of one byte of every page of every tensor
    touch_seconds: float = 0.0  # the part of `seconds` spent on touching every page, for a load


def answer_of(name: str, module: str, *arguments: str) -> Any:
    """Run a module in a fresh process; return the JSON that it prints, or raise RuntimeError."""
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=_ROOT, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise RuntimeError(f"{name} has failed: {said}")
    return json.loads(result.stdout.splitlines()[-1])


def cached_fraction(path: Path) -> float:
    """Return the fraction of a file that is in the page cache, from 0 to 1 (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        resident = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        first_byte = ctypes.c_char.from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(first_byte))
        failed = libc.mincore(address, ctypes.c_size_t(len(mapping)), resident)
        del first_byte  # it would keep the mapping open
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return sum(page & 1 for page in resident) / len(resident)


def make_cold(path: Path, *, drop_all: bool = True) -> None:
    """Drop a file from the page cache, or raise; with `drop_all`, root can drop all files."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if drop_all and cached_fraction(path) > 0 and os.geteuid() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    if (left := cached_fraction(path)) > 0:
        raise RuntimeError(f"{left:.1%} of {path} stay in the page cache: not a cold start")


def make_warm(path: Path) -> None:
    """Read a whole file into the page cache; raise if it does not stay there."""
    buffer = bytearray(8 * MIB)
    for _ in range(10):  # the kernel may drop a few of the first pages
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        if (there := cached_fraction(path)) == 1:
            return
    raise RuntimeError(f"only {there:.4%} of {path} stay in the page cache: not a warm start")


def _status_nbytes(field: str) -> int:
    """Return a size in bytes from this process's /proc status."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) * 1024


def fetch_free_memory(nbytes: int) -> None:
    """Touch and free `nbytes` of memory, so that the next measurement does not wait for the host.

    A virtual machine's free memory may have gone back to its host.  To get it back may take ten
    times as long as the measurement.  The kernel first hands out the memory that was freed last.
    """
    # Private, because only private memory has huge pages, which the host takes back.
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))


def settle(state: str, nbytes: int = 0, *, rest: float = REST_SECONDS) -> None:
    """Bring free memory into one of `STATES`, right before the clock starts.

    For WARMED_UP, fetch `nbytes` of memory.  For the other states, wait for `rest` seconds, because
    a virtual machine's host takes memory back some time after it is free.
    """
    os.sync()  # finishes earlier writes to the disk
    if state == WARMED_UP:
        if nbytes:
            fetch_free_memory(nbytes)
        return
    if state == COLD:
        _COMPACT_MEMORY.write_text("1")
    time.sleep(rest)


def available_states(states: Iterable[str]) -> list[str]:
    """Return the states that this process can set; COLD needs root."""
    can_compact = os.access(_COMPACT_MEMORY, os.W_OK)
    return [state for state in states if state != COLD or can_compact]


class PeakMemory:
    """The peak of this process's resident memory since construction."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._baseline_nbytes = _status_nbytes("VmRSS")

    def above_baseline(self) -> int:
        """Return the bytes by which the peak exceeds the resident memory at construction."""
        return _status_nbytes("VmHWM") - self._baseline_nbytes


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def filesystem_of(directory: Path) -> str:
    """Return the type and device of the filesystem that holds the directory."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return "{} on {}".format(*source.split()[:2])
    return "unknown"


def describe_machine(directory: Path, command: list[str]) -> str:
    """Return facts that affect speeds, as a markdown list without host names and paths."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    cpuinfo = Path("/proc/cpuinfo").read_text()
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory_gib:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "transparent huge pages": huge_pages.read_text().strip() if huge_pages.exists() else "no",
        "disk": filesystem_of(directory),
        "load average before the first round": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        **{name: _version_of(name) for name in ("torch", "safetensors", "ptsave")},
        "command": f"`{shlex.join(command)}`",
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())
