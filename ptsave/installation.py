"""Puts ptsave behind ``torch.save`` and ``torch.load``, for code that one cannot edit."""

from __future__ import annotations

import functools
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ptsave import serialization
from ptsave.contents import loading
from ptsave.streaming import safetensors_functions
from ptsave.support import torch_serialization as stock

__all__ = ["install", "install_while_importing", "installed", "uninstall"]


@dataclass(frozen=True, eq=False)  # each call is one, whatever it says
class _Options:
    """The arguments of :func:`install`; None is what the function itself does by default."""

    safetensors: bool | None = None
    fsync: bool | None = None
    atomic: bool | None = None
    verify: bool | None = None
    distributed: bool | None = None
    weights_only_check: bool | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value is None or isinstance(value, bool)):
                raise TypeError(f"{field.name} must be True, False or None, not {value!r}")


# Imported only if it is asked for: it imports torch.distributed.checkpoint.
_DISTRIBUTED = "ptsave.distributed.stock_names"

_lock = threading.Lock()
_calls: list[_Options] = []  # those that are not undone
_STOCK: dict[str, Callable[..., Any]] = {"save": stock.save, "load": stock.load}
# What stands for torch's functions, and for those of safetensors, just now.
_current = dict(_STOCK)
_current_safetensors: dict[str, Callable[..., Any]] = {}


def install(
    *,
    safetensors: bool | None = None,
    fsync: bool | None = None,
    atomic: bool | None = None,
    verify: bool | None = None,
    distributed: bool | None = None,
    weights_only_check: bool | None = None,
) -> None:
    """Put ptsave behind ``torch.save`` and ``torch.load``.

    Both ``torch`` and ``torch.serialization`` are changed, so callers inside torch and in
    libraries use ptsave, too.  To TorchScript they stay the operators that torch's are: scripted
    code calls those.  Calls nest: each needs its own :func:`uninstall`.  Safe to call from any
    thread; the change is seen by all.

    Parameters
    ----------
    safetensors : bool, optional
        Whether ``save_file`` and ``load_file`` of ``safetensors.torch`` are ptsave's as well (and
        with them ``save_model`` and ``load_model``, which call them): the same bytes, checks and
        errors, for all modules that have them by name.
    fsync, atomic, verify, weights_only_check : bool, optional
        Defaults for callers that do not know these arguments of :func:`ptsave.save` and
        :func:`ptsave.load`: ``install(fsync=True)`` makes every ``torch.save`` to a path durable.
    distributed : bool, optional
        Whether ``FileSystemWriter`` and ``FileSystemReader`` of ``torch.distributed.checkpoint``,
        and a ``checkpoint_id`` of its functions, are ptsave's storage as well
        (:class:`ptsave.distributed.StorageWriter`).  Imports that module, which takes a second.

    Raises
    ------
    ImportError
        If ``safetensors=True`` and the library is not installed, or too old.
    TypeError
        If an option is something else.

    Notes
    -----
    Of nested calls the latest one that says something about an option counts.

    Code keeps torch's own functions if it has them already: a name that ``from torch import save``
    bound before, a default argument, a `functools.partial`.  So install before such modules are
    imported, or run the program with ``python -m ptsave run``.  Likewise a name that was bound
    meanwhile keeps ptsave's function after :func:`uninstall`.  (Names of modules for the functions
    of safetensors are found and exchanged, because everybody imports those by name.)

    Examples
    --------
    >>> import torch, ptsave
    >>> ptsave.install()
    >>> torch.save is ptsave.save
    True
    >>> ptsave.uninstall()
    >>> torch.save is ptsave.save
    False
    """
    options = _Options(safetensors, fsync, atomic, verify, distributed, weights_only_check)
    _import_for(options)
    _to_the_end(_begin, options)


def install_while_importing(options: Mapping[str, bool]) -> None:
    """Install as :func:`install` where torch is being imported: no other thread could import it."""
    asked = _Options(**options)
    _import_for(asked)
    _begin(asked)


def uninstall() -> None:
    """Undo one :func:`install`, the latest; the last one restores torch's own functions.

    Raises
    ------
    RuntimeError
        If ptsave is not installed.
    """
    _to_the_end(_end_latest)


def _end_latest() -> None:
    with _lock:
        if not _calls:
            raise RuntimeError("ptsave is not installed: call ptsave.install() first")
        _calls.pop()
        _apply()


def _end(options: _Options) -> None:
    """Undo one call, the latest or not; nothing if somebody has undone it."""
    with _lock:
        if options in _calls:
            _calls.remove(options)
            _apply()


@contextmanager
def installed(
    *,
    safetensors: bool | None = None,
    fsync: bool | None = None,
    atomic: bool | None = None,
    verify: bool | None = None,
    distributed: bool | None = None,
    weights_only_check: bool | None = None,
) -> Iterator[None]:
    """Install for the length of a ``with`` block; arguments as of :func:`install`.

    It is undone however the block ends, also by what a signal handler raises.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> with ptsave.installed():
    ...     torch.save(torch.ones(2), io.BytesIO())
    """
    options = _Options(safetensors, fsync, atomic, verify, distributed, weights_only_check)
    _import_for(options)
    try:
        _to_the_end(_begin, options)
        yield
    finally:
        _to_the_end(_end, options)


def _to_the_end(step: Callable[..., None], *args: object) -> None:
    """Call a function that no signal's handler interrupts: it runs where there are none.

    Handlers run in the main thread.  An exception of theirs is raised when the step is done.
    """
    if threading.current_thread() is not threading.main_thread():
        step(*args)
        return
    job: Future[None] = Future()
    try:
        try:
            start_new_thread(_run, (job, step, args, _Watch(job)))
        except (RuntimeError, MemoryError):  # out of threads, or at the end of the process
            job = Future()
            _run(job, step, args)
        while not job.done():
            with suppress(CancelledError):
                job.exception()  # waits
        if job.cancelled():  # the thread found no memory to begin it
            job = Future()
            _run(job, step, args)
    except BaseException:
        if job.cancel():  # no thread has begun it
            step(*args)
        else:
            job.exception()
        raise
    job.result()


class _Watch:
    """Ends a job whose thread has ended without it, as one does that finds no memory at its start.

    The thread holds it, and lets go of it in the end.
    """

    def __init__(self, job: Future[None]) -> None:
        self._job = job

    def __del__(self) -> None:
        if not self._job.cancel() and not self._job.done():
            self._job.set_exception(MemoryError("a thread ran out of memory"))


def _run(
    job: Future[None],
    step: Callable[..., None],
    args: tuple[object, ...],
    watch: _Watch | None = None,
) -> None:
    if not job.set_running_or_notify_cancel():
        return
    try:
        step(*args)
    except BaseException as error:
        job.set_exception(error)
    else:
        job.set_result(None)


def _import_for(options: _Options) -> None:
    if options.safetensors:
        safetensors_functions.require_library()
    if options.distributed:
        import_module(_DISTRIBUTED)  # without the lock: it takes a second


def _begin(options: _Options) -> None:
    with _lock:
        _calls.append(options)
        _apply()


def _apply() -> None:
    """Exchange the functions for those that the calls in force ask for."""
    options = _merged()
    wanted = _STOCK
    if _calls:
        wanted = {
            "save": _with_defaults(
                serialization.save,
                fsync=options.fsync,
                atomic=options.atomic,
                weights_only_check=options.weights_only_check,
            ),
            "load": _with_defaults(loading.load, verify=options.verify),
        }
    for name, new in wanted.items():
        _exchange(name, new)
    _exchange_safetensors(options)
    _exchange_distributed(options)


def _merged() -> _Options:
    names = [field.name for field in fields(_Options)]
    said = {
        name: getattr(call, name)
        for call in _calls
        for name in names
        if getattr(call, name) is not None
    }
    return _Options(**said)


@functools.cache
def _with_defaults(function: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    """Return a function with other defaults, the same one each time; itself if there are none."""
    said = {name: value for name, value in defaults.items() if value is not None}
    if not said:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**said, **kwargs})

    return call


def _exchange(name: str, new: Callable[..., Any]) -> None:
    """Put another function in the place of torch's, and tell TorchScript that it is the same."""
    old = _current[name]
    if new is old:
        return
    if new is not _STOCK[name]:
        stock.register_builtin(new, stock.find_builtin(_STOCK[name]))
    modules: list[ModuleType] = [torch, torch.serialization]
    for module in modules:
        # Whoever patched over it meanwhile keeps their patch.
        if getattr(module, name) is old:
            setattr(module, name, new)
    if old is not _STOCK[name]:
        stock.builtin_operators().pop(id(old), None)
    _current[name] = new


def _exchange_safetensors(options: _Options) -> None:
    if not options.safetensors and not _current_safetensors:
        return
    pairs = []
    for name, original in safetensors_functions.originals().items():
        new = original
        if options.safetensors:
            new = _with_defaults(
                getattr(safetensors_functions, name),
                **({"fsync": options.fsync} if name == "save_file" else {}),
            )
        old = _current_safetensors.get(name, original)
        if new is not old:
            pairs.append((old, new))
            _current_safetensors[name] = new
    if pairs:
        safetensors_functions.exchange(*pairs)


def _exchange_distributed(options: _Options) -> None:
    module = sys.modules.get(_DISTRIBUTED)
    if module is not None:
        module.exchange(installed=bool(options.distributed))
