"""Replaces ``torch.save`` and ``torch.load`` by ptsave's, for code that you cannot edit."""

from __future__ import annotations

import functools
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ptsave import serialization
from ptsave.contents import loading
from ptsave.streaming import safetensors_functions
from ptsave.support import torch_names as stock


@dataclass(frozen=True, eq=False)  # equal calls are different ones
class _Options:
    """The arguments of :func:`install`; None means the default of ptsave's function."""

    safetensors: bool | None = None
    fsync: bool | None = None
    atomic: bool | None = None
    verify: bool | None = None
    distributed: bool | None = None
    weights_only_check: bool | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value is None or isinstance(value, bool)):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")


# Imported only for distributed=True, because it imports torch.distributed.checkpoint.
_DISTRIBUTED = "ptsave.distributed.stock_names"

_lock = threading.Lock()
_calls: list[_Options] = []  # calls that are not undone
_STOCK: dict[str, Callable[..., Any]] = {"save": stock.save, "load": stock.load}
# The functions that have the names of torch's and safetensors' functions now.
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
    """Replace ``torch.save`` and ``torch.load`` by ptsave's functions.

    Both ``torch`` and ``torch.serialization`` are changed, so code inside torch and in libraries
    uses ptsave, too.  TorchScript still takes the functions for torch's operators, and scripted
    code calls torch's own.  Calls nest: each needs its own :func:`uninstall`.  Any thread may call
    it, and all threads see the change.

    Parameters
    ----------
    safetensors : bool, optional
        Whether ptsave also replaces ``save_file`` and ``load_file`` of ``safetensors.torch``, which
        ``save_model`` and ``load_model`` call: the same bytes, checks and errors.  Modules that
        have imported the functions by name get ptsave's, too.
    fsync, atomic, verify, weights_only_check : bool, optional
        Defaults for callers that do not pass these arguments of :func:`ptsave.save` and
        :func:`ptsave.load`: ``install(fsync=True)`` makes every ``torch.save`` to a path durable.
    distributed : bool, optional
        Whether ptsave's storage also replaces ``FileSystemWriter`` and ``FileSystemReader`` of
        ``torch.distributed.checkpoint``, and serves the ``checkpoint_id`` of its functions
        (:class:`ptsave.distributed.StorageWriter`).  This imports that module, in about a second.

    Raises
    ------
    ImportError
        If ``safetensors=True`` and the library is not installed, or too old.
    TypeError
        If an option is not a bool or None.

    Notes
    -----
    If calls are nested, the latest value of each option counts.

    Code that already has torch's own functions keeps them: a name from an earlier ``from torch
    import save``, a default argument, a `functools.partial`.  So install before such modules are
    imported, or run the program with ``python -m ptsave run``.  Likewise a name that was bound to
    ptsave's function keeps it after :func:`uninstall`.

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
    """Install on this thread while it imports torch; another thread would wait for the import."""
    asked = _Options(**options)
    _import_for(asked)
    _begin(asked)


def uninstall() -> None:
    """Undo the latest :func:`install`; undoing the last one restores torch's own functions.

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
    """Undo one call, which need not be the latest; do nothing if it is already undone."""
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
    """Install for a ``with`` block, with the arguments of :func:`install`.

    The end of the block uninstalls ptsave, even after an exception of a signal handler.

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
    """Run a step outside the main thread, so that no signal handler interrupts it.

    An exception of a handler is raised when the step is done.
    """
    if threading.current_thread() is not threading.main_thread():
        step(*args)
        return
    job: Future[None] = Future()
    try:
        try:
            start_new_thread(_run, (job, step, args, _Watch(job)))
        except (RuntimeError, MemoryError):  # no thread can be started, as when Python exits
            job = Future()
            _run(job, step, args)
        while not job.done():
            with suppress(CancelledError):
                job.exception()  # waits
        if job.cancelled():  # the thread had no memory to begin the job
            job = Future()
            _run(job, step, args)
    except BaseException:
        if job.cancel():  # no thread has begun the job
            step(*args)
        else:
            job.exception()
        raise
    job.result()


class _Watch:
    """Ends a job if its thread died for lack of memory before it did the job.

    Only the thread holds this object, which is deleted when the thread ends.
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
    """Set the functions that the calls in force ask for."""
    said = (pair for call in _calls for pair in vars(call).items() if pair[1] is not None)
    options = _Options(**dict(said))  # of each option the latest value
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
    if _DISTRIBUTED in sys.modules:
        sys.modules[_DISTRIBUTED].exchange(installed=bool(options.distributed))


@functools.cache
def _with_defaults(function: Callable[..., Any], **defaults: Any) -> Callable[..., Any]:
    """Return `function` with other defaults, or itself without any; equal calls share a result."""
    said = {name: value for name, value in defaults.items() if value is not None}
    if not said:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**said, **kwargs})

    return call


def _exchange(name: str, new: Callable[..., Any]) -> None:
    """Replace one of torch's functions, and tell TorchScript that it is the same operator."""
    old = _current[name]
    if new is old:
        return
    if new is not _STOCK[name]:
        stock.register_builtin(new, stock.find_builtin(_STOCK[name]))
    modules: list[ModuleType] = [torch, torch.serialization]
    for module in modules:
        # Another patch that came later stays.
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
