"""Tuning: the only reader of ptsave's environment variables."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from ptsave.support import memory_limits

__all__ = ["Config", "current", "install_options", "local_world_size", "read_integer"]

MIB = 1 << 20
_MAX_N_DIGITS = 100  # with leading zeros; int() raises another error for thousands of them
_MAX_SHOWN = 40


class Config(NamedTuple):
    """Bounds of the machine's resources that a save or load may use.

    Attributes
    ----------
    n_threads : int
        Threads that copy and checksum.
    n_direct_writers : int
        Threads of a direct write; several for each core, so that one waits for the disk while
        another copies and checksums.
    n_readers : int
        Threads of a read, half of which may wait for the disk at a time; the ranks of a machine
        share its cores.
    max_pinned_nbytes : int
        Page-locked host memory, in bytes, through which one save or load moves the tensors of
        accelerators.
    write_chunk_nbytes : int
        Unit of writing, in bytes; times `n_direct_writers` it is the memory a direct save needs.
    direct_io : bool
        Whether reads and writes may go past the page cache.
    direct_reads : bool
        Whether reads may: not if ranks of one machine load the same files.
    n_local_ranks : int
        Processes of one job on this machine.
    verify : bool
        Whether loads compare checksums at all.
    max_staged_nbytes : int or None
        Bytes that all saves in the background together may hold.  None derives it from the memory
        that this process may use.
    """

    n_threads: int
    n_direct_writers: int
    n_readers: int
    max_staged_nbytes: int | None
    max_pinned_nbytes: int = 64 * MIB
    write_chunk_nbytes: int = 4 * MIB
    direct_io: bool = True
    direct_reads: bool = True
    verify: bool = True
    n_local_ranks: int = 1


def current() -> Config:
    """Return the configuration that the environment asks for.

    ``PTSAVE_NUM_THREADS`` sets the number of threads (default: the cores this process may use, at
    most 16).  ``PTSAVE_MAX_PINNED_BYTES`` bounds the page-locked memory of one save or load of
    tensors on accelerators (default: 64 MiB, or an eighth of the memory that this process may
    use; one buffer of 4 MiB is taken in any case).  ``PTSAVE_MAX_STAGED_BYTES`` bounds the copies
    of saves in the background (default: half of that memory).  ``PTSAVE_DIRECT_IO=0`` turns direct
    I/O off; so does, for reads, a ``LOCAL_WORLD_SIZE`` above 1, because ranks of one machine load
    the same files.  ``PTSAVE_VERIFY=0`` turns verification off, for storages that are edited in
    place by code that calls ``torch.load``.  A variable that is set to nothing counts as not set.

    Raises
    ------
    ValueError
        A variable has another value than a positive integer, or than 0 or 1; the message names it.

    Examples
    --------
    >>> from ptsave.support import config
    >>> config.current().n_threads >= 1
    True
    """
    cores = len(os.sched_getaffinity(0))
    n_threads = _positive("PTSAVE_NUM_THREADS", min(cores, 16))
    n_local_ranks = local_world_size()
    direct_io = _switch("PTSAVE_DIRECT_IO", default=True)
    return Config(
        n_threads=n_threads,
        n_direct_writers=min(4 * n_threads, 12),
        n_readers=max(4, min(6 * n_threads // n_local_ranks, 24)),
        max_pinned_nbytes=_positive(
            "PTSAVE_MAX_PINNED_BYTES", _default_pinned_nbytes(n_local_ranks)
        ),
        max_staged_nbytes=_positive("PTSAVE_MAX_STAGED_BYTES", 0) or None,
        direct_io=direct_io,
        direct_reads=direct_io and n_local_ranks == 1,
        verify=_switch("PTSAVE_VERIFY", default=True),
        n_local_ranks=n_local_ranks,
    )


_INSTALL = "PTSAVE_INSTALL"
_INSTALL_OPTIONS = (
    "safetensors",
    "fsync",
    "atomic",
    "verify",
    "distributed",
    "weights-only-check",
)


def install_options() -> dict[str, bool]:
    """Return the arguments for :func:`ptsave.install` that ``PTSAVE_INSTALL`` asks for.

    ``ptsave run`` sets it for the program and its child processes: to ``1``, or to words between
    commas, such as ``safetensors,fsync,no-verify``.

    Raises
    ------
    ValueError
        If it has other words.
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
    """Return how many ranks of a job are on this machine, as ``LOCAL_WORLD_SIZE`` says; else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if re.fullmatch("[0-9]{1,6}", text) else 1


def _default_pinned_nbytes(n_local_ranks: int) -> int:
    return max(1, min(64 * MIB, memory_limits.share_nbytes(n_local_ranks) // 8))


def read_integer(variable: str, default: int, *, minimum: int) -> int:
    """Read an environment variable that holds an integer.

    Parameters
    ----------
    variable : str
        Its name.
    default : int
        The value if it is not set, or set to nothing.
    minimum : {0, 1}
        The least that it may be.

    Raises
    ------
    ValueError
        If it holds anything else, or a number that no 64-bit machine can use.
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
