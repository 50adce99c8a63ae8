"""Reads the environment variables that tune ptsave, and this process's memory limits."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MIB = 1 << 20
_MAX_N_DIGITS = 100  # including leading zeros; int() raises another error for thousands of digits
_MAX_SHOWN = 40


class Config(NamedTuple):
    """Limits for the resources that a save or load may use."""

    n_threads: int  # for copies and checksums
    n_direct_writers: int  # several per core: one waits for the disk while another copies
    n_readers: int  # half of them may wait for the disk; the ranks on a machine share its cores
    max_staged_nbytes: int | None  # of all background saves together; None: half the memory
    max_pinned_nbytes: int = 64 * MIB  # page-locked memory of one save or load
    write_chunk_nbytes: int = 4 * MIB  # the memory of each of `n_direct_writers`
    direct_io: bool = True  # whether saves and loads may bypass the page cache
    direct_reads: bool = True  # the same for loads; False if this machine has several ranks
    verify: bool = True  # whether loads compare checksums at all
    n_local_ranks: int = 1  # processes of one job on this machine


def current() -> Config:
    """Return the configuration that the environment variables set.

    The variables and their defaults are in docs/reference/environment.md.  An empty variable counts
    as not set.  A wrong value raises a ValueError that names the variable.
    """
    cores = len(os.sched_getaffinity(0))
    n_threads = read_integer("PTSAVE_NUM_THREADS", min(cores, 16))
    n_local_ranks = local_world_size()
    pinned_nbytes = max(1, min(64 * MIB, share_nbytes(n_local_ranks) // 8))
    direct_io = _switch("PTSAVE_DIRECT_IO", default=True)
    return Config(
        n_threads=n_threads,
        n_direct_writers=min(4 * n_threads, 12),
        n_readers=max(4, min(6 * n_threads // n_local_ranks, 24)),
        max_pinned_nbytes=read_integer("PTSAVE_MAX_PINNED_BYTES", pinned_nbytes),
        max_staged_nbytes=read_integer("PTSAVE_MAX_STAGED_BYTES", 0) or None,
        direct_io=direct_io,
        direct_reads=direct_io and n_local_ranks == 1,
        verify=_switch("PTSAVE_VERIFY", default=True),
        n_local_ranks=n_local_ranks,
    )


def verdicts_folder() -> str | None:
    """Return the directory for verdicts about whole files; None if none are remembered.

    ``PTSAVE_VERDICTS`` is the directory, or ``0``.
    """
    text = os.environ.get("PTSAVE_VERDICTS")
    if text == "0":
        return None
    if text:
        if not os.path.isabs(text):
            raise ValueError(
                f"PTSAVE_VERDICTS must be 0 or an absolute path, not {text[:_MAX_SHOWN]!r}"
            )
        return text
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return os.path.join(base, "ptsave", "verdicts") if os.path.isabs(base) else None


_INSTALL = "PTSAVE_INSTALL"
_INSTALL_OPTIONS = (
    "safetensors",
    "fsync",
    "atomic",
    "verify",
    "distributed",
    "weights-only-check",
    "checksums",
)


def install_options() -> dict[str, bool]:
    """Return the arguments for :func:`ptsave.install` that ``PTSAVE_INSTALL`` lists.

    ``ptsave run`` sets the variable for the program and its child processes.  The value is ``1``
    (no arguments), or options separated by commas, such as ``safetensors,fsync,no-verify``.
    """
    text = os.environ.get(_INSTALL, "")
    options = {}
    for word in text.split(",") if text not in ("", "1") else []:
        name = word.strip().removeprefix("no-")
        if name not in _INSTALL_OPTIONS:
            known = ", ".join(_INSTALL_OPTIONS)
            raise ValueError(
                f"{_INSTALL} must be 1, or some of {known} (or no-<word>), separated by commas, "
                f"not {text[:_MAX_SHOWN]!r}"
            )
        options[name.replace("-", "_")] = name == word.strip()
    return options


def local_world_size() -> int:
    """Return ``LOCAL_WORLD_SIZE``, the number of ranks on this machine; 1 if it is not a number."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if re.fullmatch("[0-9]{1,6}", text) else 1


def failure_domain() -> str:
    """Return ``PTSAVE_FAILURE_DOMAIN``, or else a text that is the same only on this machine.

    Containers of one machine fail together, so they are one domain.
    """
    given = os.environ.get("PTSAVE_FAILURE_DOMAIN", "")
    if "://" in given or os.path.isabs(given):  # `ptsave ls` would take it for the slow place
        raise ValueError(f"PTSAVE_FAILURE_DOMAIN must not be a path or URL: {given[:_MAX_SHOWN]!r}")
    return given or boot_id() or os.uname().nodename


def boot_id() -> str:
    """Return a text that is the same in all containers of a machine until it restarts, or ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_integer(variable: str, default: int, *, minimum: int = 1) -> int:
    """Return the integer in an environment variable; the smallest allowed one is `minimum`, 0 or 1.

    Returns `default` if the variable is empty or not set.  Raises a ValueError for any other text,
    and for numbers above ``sys.maxsize``.
    """
    text = os.environ.get(variable)
    if not text:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_N_DIGITS
    if not is_number or not minimum <= int(text) <= sys.maxsize:
        kind = "a positive integer" if minimum else "an integer of at least 0"
        raise ValueError(f"{variable} must be {kind}, not {text[:_MAX_SHOWN]!r}")
    return int(text)


def _switch(variable: str, *, default: bool) -> bool:
    text = os.environ.get(variable)
    if not text:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {text[:_MAX_SHOWN]!r}")
    return text == "1"


# ------------------------------------------------------------------------------------ memory limits

# A container's limit is the limit of a control group (cgroup).  Both versions of cgroups are read,
# because both may be mounted.  A group's limit also holds for every group in it, so the limits of
# all visible ancestors are read, too.  A missing or malformed number means no limit.

_ROOT = Path("/")
_MAX_FILE_NBYTES = 1 << 20  # of /proc/self/mountinfo, which grows with the number of mounts


class _Version(NamedTuple):
    """The names of the kernel's files for one version of control groups (cgroup v1 or v2)."""

    filesystem: str
    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]  # lines of memory.stat: pages that are freed before a process is killed


_V1 = _Version(
    "cgroup",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
# Above memory.high, no process is killed, but all processes become very slow.
_V2 = _Version(
    "cgroup2", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


class _Group(NamedTuple):
    """A control group that this process is in, directly or through a group below it."""

    folder: Path
    version: _Version
    is_own: bool

    def limit_nbytes(self) -> int:
        limits = [_number(self.folder / name) for name in self.version.limits]
        if self.is_own and self.version is _V1:  # the limits of ancestors that no mount shows
            limits.append(self._statistics().get("hierarchical_memory_limit"))
        return min((limit for limit in limits if limit), default=sys.maxsize)

    def available_nbytes(self) -> int:
        """Return how many bytes the limit leaves free; cached file pages count as free."""
        limit = self.limit_nbytes()
        if limit >= _physical_nbytes():
            return limit
        used = _number(self.folder / self.version.usage)
        if used is None:
            return limit
        statistics = self._statistics()
        cached = sum(statistics.get(name, 0) for name in self.version.cached)
        return max(0, limit - max(0, used - cached))

    def _statistics(self) -> dict[str, int]:
        text = _text(self.folder / "memory.stat")
        return {name: int(value) for name, value in re.findall(r"^(\w+) (\d{1,19})$", text, re.M)}


def limit_nbytes(root: Path = _ROOT) -> int:
    """Return the machine's memory in bytes, or this process's lowest cgroup limit if that is less.

    `root` is the directory that contains ``proc`` and the mount points; tests use their own files.
    """
    groups = [group.limit_nbytes() for group in _groups(root)]
    return min([_physical_nbytes(), *groups])


def available_nbytes(root: Path = _ROOT) -> int:
    """Return how many bytes this process can still use; memory that caches files counts as free."""
    free = _meminfo(root).get("MemAvailable", _physical_nbytes())
    return min([free, *(group.available_nbytes() for group in _groups(root))])


def dirty_nbytes(root: Path = _ROOT) -> int:
    """Return how many bytes in the page cache the machine has not written to its disks yet."""
    lines = _meminfo(root)
    return lines.get("Dirty", 0) + lines.get("Writeback", 0)


def share_nbytes(n_ranks: int, root: Path = _ROOT) -> int:
    """Return `limit_nbytes` divided by `n_ranks`, or the process's own ulimit if that is less."""
    limit = _limit_of_machine() if root == _ROOT else limit_nbytes(root)
    return max(1, min(limit // n_ranks, _own_limit_nbytes()))


@cache
def _limit_of_machine() -> int:
    # Cached, because each save and load needs it.
    return limit_nbytes()


os.register_at_fork(after_in_child=_limit_of_machine.cache_clear)


def _meminfo(root: Path) -> dict[str, int]:
    """Return the lines of ``/proc/meminfo`` that are sizes, in bytes."""
    found = re.findall(r"^(\w+): +(\d{1,16}) kB$", _text(root / "proc/meminfo"), re.M)
    return {name: int(value) * 1024 for name, value in found}


def _physical_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_limit_nbytes() -> int:
    """Return the lower of this process's own limits ``ulimit -v`` and ``ulimit -d``."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=sys.maxsize)


# --------------------------------------------------------------------------------- control groups


def _groups(root: Path) -> Iterator[_Group]:
    """Yield this process's control groups that limit memory, and their ancestors."""
    paths = dict(_own_paths(_text(root / "proc/self/cgroup")))
    mounts = list(_mounts(_text(root / "proc/self/mountinfo")))
    for version, path in paths.items():
        own = [(source, target) for kind, source, target in mounts if kind is version]
        # In a container, the path and the mount may name the group differently, because one name
        # is the host's and the other is the container's.
        inside = [
            (path.relative_to(source), target)
            for source, target in own
            if path.is_relative_to(source) and ".." not in path.parts
        ]
        for below, target in inside or [(PurePosixPath(), target) for _, target in own]:
            mount = root / target.relative_to("/")
            for part in (below, *below.parents):
                yield _Group(mount / part, version, is_own=part == below)


def _own_paths(text: str) -> Iterator[tuple[_Version, PurePosixPath]]:
    """Yield (version, path) of lines ``number:controllers:path`` in ``/proc/self/cgroup``."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if number == "0" and not controllers:
            yield _V2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)


def _mounts(text: str) -> Iterator[tuple[_Version, PurePosixPath, PurePosixPath]]:
    """Yield (version, root, mount point) of each cgroup mount in ``/proc/self/mountinfo``."""
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        if not kind.startswith(_V1.filesystem):
            continue
        fields, types = place.split(" "), kind.split(" ")
        if len(fields) < 5 or len(types) < 3:
            continue
        source, target = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
        if not (source.is_absolute() and target.is_absolute()):
            continue
        if types[0] == _V2.filesystem:
            yield _V2, source, target
        elif types[0] == _V1.filesystem and "memory" in types[2].split(","):
            yield _V1, source, target


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), field)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for "max", for other text and for a missing file."""
    text = _text(path).strip()
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return os.fsdecode(file.read(_MAX_FILE_NBYTES))
    except (OSError, ValueError):  # ValueError: a null character in a path
        return ""
