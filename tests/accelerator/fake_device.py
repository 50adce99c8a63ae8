"""``torch.fake``: an accelerator for tests, of two devices, whose every omission shows.

Device memory faults when the CPU touches it. Streams are threads that run operations late. Memory
that somebody still uses after it was freed holds other bytes. So the calls that drive real hardware
run on any machine, and a wait that is missing ends in wrong values.

``load()`` registers the backend, for the rest of the process. The other functions are the device
module that torch asks for, and what tests control.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "backend"
BUILD = ROOT / "build" / "fake-accelerator"

# What tests of the accelerator have to know of it.
TYPE = "fake"
FIRST, LAST = "fake:0", "fake:1"
FAILURE = "injected failure"  # of a copy
IN_A_CHILD = "forked child"
EVENTS_RETURN_LAZILY = False  # to the device that was current
POISONS_PINNED = True

_backend: Any = None


def load() -> ModuleType:
    """Build the backend if it is missing or stale, register it, and return this module."""
    global _backend
    if _backend is None:
        library = BUILD / f"_fake_accelerator{sysconfig.get_config_var('EXT_SUFFIX')}"
        if _is_stale(library):
            command = [sys.executable, "setup.py", "--quiet", "build_fake_accelerator"]
            subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": ""})
        spec = importlib.util.spec_from_file_location("_fake_accelerator", library)
        assert spec is not None
        assert spec.loader is not None
        _backend = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_backend)
        _register()
    return sys.modules[__name__]


def _is_stale(library: Path) -> bool:
    cache = BUILD / "CMakeCache.txt"
    if not library.exists() or not cache.exists():
        return True
    torch_folder = Path(torch.__file__).parent
    if f"={torch_folder / 'lib'}\n" not in cache.read_text():
        return True
    sources = [*SOURCES.iterdir(), ROOT / "CMakeLists.txt", torch_folder / "version.py"]
    built = library.stat().st_mtime
    return any(source.stat().st_mtime > built for source in sources)


def _register() -> None:
    backend_registration.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", sys.modules[__name__])
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    # Operations that are queued run while there still is everything that they use.
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    if not _is_in_bad_fork():
        reset()


# ------------------------------------------------------------------------ what torch asks for


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    _backend.initialize()  # before this, torch takes no memory for pinned


def _is_in_bad_fork() -> bool:
    return bool(_backend.is_in_bad_fork())


def device_count() -> int:
    return int(_backend.device_count())


def current_device() -> int:
    return int(_backend.current_device())


def set_device(device: int | str | torch.device) -> None:
    _backend.set_device(_index_of(device))


def _index_of(device: int | str | torch.device) -> int:
    index: Any = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


class device:
    """A context in which another device is the current one."""

    def __init__(self, device: int | str | torch.device) -> None:
        self.chosen = device

    def __enter__(self) -> None:
        self.previous = _backend.exchange_device(_index_of(self.chosen))

    def __exit__(self, *_: object) -> None:
        _backend.maybe_exchange_device(self.previous)  # lazily, as torch.cuda.device does


def current_stream(device: int | str | torch.device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def synchronize(device: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers come from the CPU's generator."""


def get_rng_state(device: int | str | torch.device = "fake") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device = "fake") -> None:
    torch.set_rng_state(new_state)


# -------------------------------------------------------------------------- what tests control


def set_delay(min_us: int, max_us: int, stream: torch.Stream | None = None) -> None:
    """Let streams wait a random time of ``min_us`` to ``max_us`` before each operation.

    With ``stream`` that one alone, from then on whatever the others do. The default is 0 to 300.
    """
    _backend.set_delay(min_us, max_us, None if stream is None else _ids(stream))


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let ``stream`` begin nothing inside the context; what is queued there runs afterwards.

    So nothing inside may wait for it.
    """
    _backend.set_held(_ids(stream), True)
    try:
        yield
    finally:
        _backend.set_held(_ids(stream), False)


@contextlib.contextmanager
def capturing(stream: torch.Stream) -> Iterator[None]:
    """Let ``stream`` capture a graph inside the context, which must give it nothing.

    Of the graphs of CUDA it is only that: nothing is captured.
    """
    _backend.set_capturing(_ids(stream), True)
    try:
        yield
        assert _backend.n_captured(_ids(stream)) == 0, "work was given to a stream that captures"
    finally:
        _backend.set_capturing(_ids(stream), False)


def _ids(stream: torch.Stream) -> tuple[int, int]:
    return stream.device_index, stream.stream_id


def fail_copy(after: int, *, asynchronous: bool = False) -> None:
    """Let ``after`` copies succeed and the next one fail, once.

    It raises where it is queued or, with ``asynchronous``, leaves its destination as it is and
    raises where something of its device is synchronized next.
    """
    _backend.fail_copy(after, asynchronous)


def refuse_pinned(after: int = 0) -> None:
    """Let ``after`` more blocks of pinned memory be allocated, and refuse all others."""
    _backend.refuse_pinned(after)


def stats() -> dict[str, Any]:
    """Return what has happened since the last ``reset``.

    Returns
    -------
    dict
        ``h2d``, ``d2h``, ``d2d``: lists of the sizes in bytes of copies, in order; ``cat``,
        ``foreach_copy``: numbers of kernels; ``events``, ``streams``: numbers of events made and
        of streams taken from the pool; ``busy_waits``: number of waits for streams and events that
        had not got there, for which CUDA keeps a core busy; ``pinned_bytes``, ``pinned_peak``,
        ``pinned_reserved``: bytes of pinned memory in use, at most in use, and in use or cached.
        ``torch.accelerator.memory_stats`` has those of device memory.
    """
    return dict(_backend.stats())


def contexts() -> dict[int, set[int]]:
    """Return the devices that have a context, each with the threads that have used it.

    Threads are those of ``threading.get_native_id()``. A context comes into being as torch's CUDA
    functions let it: where a thread makes a device its current one, and in the device that was
    current where an event takes a thread there and back.
    """
    return dict(_backend.contexts())


def forget_contexts() -> None:
    """Count contexts and their threads from now on."""
    _backend.forget_contexts()


def operations_in_flight() -> int:
    """Return how many copies and kernels are queued or running."""
    return int(_backend.operations_in_flight())


def reset() -> None:
    """Release and drain all streams; forget delays, planned failures, errors, counts and peaks."""
    _backend.reset()
