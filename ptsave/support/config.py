"""Tuning: the only reader of ptsave's environment variables."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from ptsave.support import memory_limits

MIB = 1 << 20
_MAX_N_DIGITS = 100  # with leading zeros; int() raises another error for thousands of digits
_MAX_SHOWN = 40


class Config(NamedTuple):
    """Bounds of the machine's resources that a save or load may use."""

    n_threads: int  # copy and checksum
    n_direct_writers: int  # several per core: one waits for the disk while another copies
    n_readers: int  # half of them may wait for the disk; the ranks of a machine share its cores
    max_staged_nbytes: int | None  # of all background saves; None: derived from the memory
    max_pinned_nbytes: int = 64 * MIB  # page-locked memory of one save or load of accelerators
    write_chunk_nbytes: int = 4 * MIB  # times `n_direct_writers`: the memory of a direct save
    direct_io: bool = True  # past the page cache
    direct_reads: bool = True  # False if ranks of one machine load the same files
    verify: bool = True  # whether loads compare checksums at all
    n_local_ranks: int = 1  # processes of one job on this machine


def current() -> Config:
    """Return the configuration that the environment asks for.

    The variables and their defaults are in docs/reference/environment.md.  An empty variable counts
    as not set.  A wrong value is a ValueError that names the variable.
    """
    cores = len(os.sched_getaffinity(0))
    n_threads = _positive("PTSAVE_NUM_THREADS", min(cores, 16))
    n_local_ranks = local_world_size()
    pinned_nbytes = max(1, min(64 * MIB, memory_limits.share_nbytes(n_local_ranks) // 8))
    direct_io = _switch("PTSAVE_DIRECT_IO", default=True)
    return Config(
        n_threads=n_threads,
        n_direct_writers=min(4 * n_threads, 12),
        n_readers=max(4, min(6 * n_threads // n_local_ranks, 24)),
        max_pinned_nbytes=_positive("PTSAVE_MAX_PINNED_BYTES", pinned_nbytes),
        max_staged_nbytes=_positive("PTSAVE_MAX_STAGED_BYTES", 0) or None,
        direct_io=direct_io,
        direct_reads=direct_io and n_local_ranks == 1,
        verify=_switch("PTSAVE_VERIFY", default=True),
        n_local_ranks=n_local_ranks,
    )


_INSTALL = "PTSAVE_INSTALL"
_INSTALL_OPTIONS = ("safetensors", "fsync", "atomic", "verify", "distributed", "weights-only-check")


def install_options() -> dict[str, bool]:
    """Return the arguments for :func:`ptsave.install` that ``PTSAVE_INSTALL`` asks for.

    ``ptsave run`` sets it for the program and its child processes: to ``1``, or to words between
    commas, such as ``safetensors,fsync,no-verify``.
    """
    text = os.environ.get(_INSTALL, "")
    options = {}
    for word in text.split(",") if text not in ("", "1") else []:
        name = word.strip().removeprefix("no-")
        if name not in _INSTALL_OPTIONS:
            known = ", ".join(_INSTALL_OPTIONS)
            raise ValueError(
                f"{_INSTALL} must be 1, or some of {known} (or no-...), with commas between them, "
                f"not {text[:_MAX_SHOWN]!r}"
            )
        options[name.replace("-", "_")] = name == word.strip()
    return options


def local_world_size() -> int:
    """Return the number of ranks on this machine by ``LOCAL_WORLD_SIZE``, or 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if re.fullmatch("[0-9]{1,6}", text) else 1


def read_integer(variable: str, default: int, *, minimum: int) -> int:
    """Read an environment variable that holds an integer of at least `minimum` (0 or 1).

    An empty variable counts as not set.  Raises a ValueError for other values, and for numbers that
    no 64-bit machine can use.
    """
    text = os.environ.get(variable)
    if not text:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_N_DIGITS
    if not is_number or not minimum <= int(text) <= sys.maxsize:
        kind = "a positive integer" if minimum else "an integer from 0 on"
        raise ValueError(f"{variable} must be {kind}, not {text[:_MAX_SHOWN]!r}")
    return int(text)


def _positive(variable: str, default: int) -> int:
    return read_integer(variable, default, minimum=1)


def _switch(variable: str, *, default: bool) -> bool:
    text = os.environ.get(variable)
    if not text:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {text[:_MAX_SHOWN]!r}")
    return text == "1"
