"""Control of the stand-in for CUDA's runtime: what ``fake_device`` has for the fake accelerator.

The stand-in is the library that ``make accelerator-standin`` builds and ``LD_PRELOAD`` brings into
the process. It has two devices. ``test_fake.py`` shows what it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

# What tests of the accelerator have to know of it.
TYPE = "cuda"
FIRST, LAST = "cuda:0", "cuda:1"
FAILURE = "OS call failed"  # of a copy
IN_A_CHILD = "initialization error"
EVENTS_RETURN_LAZILY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
POISONS_PINNED = False  # torch's allocator does not say when it frees pinned memory

OUT_OF_MEMORY = 2
OPERATING_SYSTEM = 304  # after which calls go on
ILLEGAL_ADDRESS = 700  # after which no call succeeds

_EXTENTS = ("once", "always", "sticky")

_library = ctypes.CDLL(None)
_kernels: Any = None


def is_there() -> bool:
    """Return whether the stand-in is in this process."""
    return hasattr(_library, "standin_report")


def load() -> ModuleType:
    """Let torch use CUDA, prepare its kernels and its allocator, and return this module."""
    global _kernels
    if _kernels is None:
        _library.standin_report.restype = ctypes.c_char_p
        _library.standin_in_flight.restype = ctypes.c_int64
        _library.standin_n_captured.restype = ctypes.c_int64
        torch.cuda.init()
        preloaded = Path(os.environ["LD_PRELOAD"].split(":")[0])
        _kernels = ctypes.CDLL(str(preloaded.with_name("libstandin_kernels.so")))
        _kernels.standin_install()
    return sys.modules[__name__]


def _of(stream: torch.Stream) -> tuple[ctypes.c_void_p, int]:
    there = torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )
    return ctypes.c_void_p(there.cuda_stream), stream.device_index


def set_delay(min_us: int, max_us: int, stream: torch.Stream | None = None) -> None:
    """Let streams wait a random time of ``min_us`` to ``max_us`` before each operation.

    With ``stream`` that one alone, from then on whatever the others do. The default is 0 to 300.
    """
    limits = (ctypes.c_int64(min_us), ctypes.c_int64(max_us))
    if stream is None:
        _library.standin_set_default_delay(*limits)
    else:
        _library.standin_set_delay(*_of(stream), *limits)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let ``stream`` begin nothing inside the context; queued work runs afterwards."""
    _library.standin_set_held(*_of(stream), 1)
    try:
        yield
    finally:
        _library.standin_set_held(*_of(stream), 0)


@contextlib.contextmanager
def capturing(stream: torch.Stream) -> Iterator[None]:
    """Let ``stream`` capture a graph inside the context, which must give it nothing."""
    _library.standin_set_capturing(*_of(stream), 1)
    try:
        yield
        n_captured = _library.standin_n_captured(*_of(stream))
        assert n_captured == 0, "work was given to a stream that captures"
    finally:
        _library.standin_set_capturing(*_of(stream), 0)


def fail(
    call: str,
    after: int = 0,
    *,
    error: int = OPERATING_SYSTEM,
    extent: Literal["once", "always", "sticky"] = "once",
    late: bool = False,
) -> None:
    """Let ``after`` calls of this name succeed, and the next one fail with ``error``.

    Parameters
    ----------
    call
        A name such as ``"cudaHostAlloc"``.
    extent
        ``"once"`` fails one call, ``"always"`` all calls of this name from then on. ``"sticky"``
        fails all calls from then on.
    late
        The call succeeds, its work is lost, and a later call that waits for the device fails.
    """
    _library.standin_fail(
        call.encode(), ctypes.c_int64(after), error, _EXTENTS.index(extent), int(late)
    )


def fail_copy(after: int, *, asynchronous: bool = False) -> None:
    """Let ``after`` copies succeed and the next one fail, once."""
    fail("cudaMemcpyAsync", after, late=asynchronous)


def refuse_pinned(after: int = 0) -> None:
    """Let ``after`` more blocks of pinned memory be allocated, and refuse all others."""
    fail("cudaHostAlloc", after, error=OUT_OF_MEMORY, extent="always")


def report() -> dict[str, list[int]]:
    """Return the numbers of the stand-in: ``calls.cudaMalloc: [3], h2d: [100, 4096]``."""
    numbers: dict[str, list[int]] = {}
    for line in _library.standin_report().decode().splitlines():
        name, _, number = line.rpartition(" ")
        numbers.setdefault(name, []).append(int(number))
    return numbers


def calls() -> Counter[str]:
    """Return how often each call of the runtime was made: ``cudaMalloc: 3``."""
    return Counter(
        {
            name.removeprefix("calls."): values[0]
            for name, values in report().items()
            if name.startswith("calls.")
        }
    )


def stats() -> dict[str, Any]:
    """Return what has happened since the last ``reset``, as ``fake_device.stats`` does.

    ``pinned_bytes``, ``pinned_peak`` and ``pinned_reserved`` are those of torch's allocator.
    """
    numbers = report()
    counts = Counter({name: values[0] for name, values in numbers.items()})
    memory = torch.cuda.host_memory_stats()
    return {
        **{kind: numbers.get(kind, []) for kind in ("h2d", "d2h", "d2d")},
        **{name: counts[name] for name in ("cat", "foreach_copy", "busy_waits")},
        "events": counts["calls.cudaEventCreateWithFlags"],
        "streams": counts["calls.cudaStreamCreateWithPriority"],
        "pinned_bytes": memory["active_bytes.current"],
        "pinned_peak": memory["active_bytes.peak"],
        "pinned_reserved": memory["allocated_bytes.current"],
    }


def contexts() -> dict[int, set[int]]:
    """Return the devices that have a context, each with the threads that have used it."""
    numbers = report()
    devices = range(torch.cuda.device_count())
    found = {device: set(numbers.get(f"context.{device}", [])) for device in devices}
    return {device: threads for device, threads in found.items() if threads}


def missing_kernels() -> list[str]:
    """Return the names of launched kernels that are not emulated."""
    return [name.removeprefix("missing.") for name in report() if name.startswith("missing.")]


def forget_contexts() -> None:
    """Count contexts and their threads from now on."""
    _library.standin_forget_contexts()


def operations_in_flight() -> int:
    """Return how many copies and kernels are queued or running."""
    return int(_library.standin_in_flight())


def reset() -> None:
    """Release and drain all streams; forget delays, planned failures, errors, counts and peaks."""
    _library.standin_reset()
    torch.empty(1, pin_memory=True)  # the allocator looks at its events: now all blocks are free
    torch.cuda.reset_peak_host_memory_stats()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
