"""Replaces ``torch.save`` and ``torch.load`` with ptsave's functions, also in libraries."""

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


@dataclass(frozen=True, eq=False)  # equal options of two calls stay two objects
class _Options:
    """The arguments of :func:`install`; None means the default of ptsave's function."""

    safetensors: bool | None = None
    fsync: bool | None = None
    atomic: bool | None = None
    verify: bool | None = None
    distributed: bool | None = None
    weights_only_check: bool | None = None
    checksums: bool | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value is None or isinstance(value, bool)):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")


# Imported only for distributed=True, because it imports torch.distributed.checkpoint.
_DISTRIBUTED = "ptsave.distributed.stock_names"

_lock = threading.Lock()
_calls: list[_Options] = []  # of `install`, not undone yet
_STOCK: dict[str, Callable[..., Any]] = {"save": stock.save, "load": stock.load}
# The functions that torch's and safetensors' names refer to now.
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
    checksums: bool | None = None,
) -> None:
    """Replace ``torch.save`` and ``torch.load`` with ptsave's functions.

    Both ``torch`` and ``torch.serialization`` are changed, so code inside torch and in libraries
    uses ptsave, too.  TorchScript can still compile code that calls these functions; the compiled
    code calls torch's own functions.  Calls can be nested: each call needs its own
    :func:`uninstall`.  Any thread may call `install`, and all threads see the change.

    Parameters
    ----------
    safetensors : bool, optional
        Whether ptsave also replaces ``save_file`` and ``load_file`` of ``safetensors.torch``, which
        the library's ``save_model`` and ``load_model`` call.  Bytes, checks and errors stay the
        same.  Modules that have already imported the two functions by name get ptsave's, too.
    checksums : bool, optional
        Whether `save_file` adds checksums, as :func:`ptsave.save_model` does.
    fsync, atomic, verify, weights_only_check : bool, optional
        New defaults for these arguments of :func:`ptsave.save` and :func:`ptsave.load`.  For
        example, ``install(fsync=True)`` makes every file of ``torch.save`` survive power loss.
    distributed : bool, optional
        Whether ptsave also replaces ``FileSystemWriter`` and ``FileSystemReader`` of
        ``torch.distributed.checkpoint``, also in calls that pass only a ``checkpoint_id`` (see
        :class:`ptsave.distributed.StorageWriter`).  Importing that module takes about a second.

    Raises
    ------
    ImportError
        If ``safetensors=True`` and the safetensors library is missing or too old.
    TypeError
        If an option is not a bool or None.

    Notes
    -----
    If calls are nested, the latest call that sets an option decides its value.

    Code that already refers to torch's own functions keeps them, for example after ``from torch
    import save``, in a default argument or in a `functools.partial`.  So call `install` before such
    modules are imported, or run the program with ``python -m ptsave run``.  Likewise, a name that
    was bound to ptsave's function keeps this function after :func:`uninstall`.

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
    options = _Options(
        safetensors, fsync, atomic, verify, distributed, weights_only_check, checksums
    )
    _import_for(options)
    _to_the_end(_begin, options)


def install_while_importing(options: Mapping[str, bool]) -> None:
    """Install on the thread that is importing torch; another thread would wait for the import."""
    asked = _Options(**options)
    _import_for(asked)
    _begin(asked)


def uninstall() -> None:
    """Undo the latest :func:`install`; once all calls are undone, torch's own functions are back.

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
    """Undo one call of `install`, not always the latest; do nothing if it is already undone."""
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
    checksums: bool | None = None,
) -> Iterator[None]:
    """Install ptsave for a ``with`` block; the arguments are as for :func:`install`.

    The end of the block uninstalls ptsave, even if a signal handler raises an exception.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> with ptsave.installed():
    ...     torch.save(torch.ones(2), io.BytesIO())
    """
    options = _Options(
        safetensors, fsync, atomic, verify, distributed, weights_only_check, checksums
    )
    _import_for(options)
    try:
        _to_the_end(_begin, options)
        yield
    finally:
        _to_the_end(_end, options)


def _to_the_end(step: Callable[..., None], *args: object) -> None:
    """Run `step` outside the main thread, so that signal handlers cannot interrupt the step.

    If a handler raises an exception, this function raises the exception after the step.
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
    """Marks a job as failed if its thread ends, for lack of memory, before the job is done.

    Only the thread refers to this object, so the object is deleted when the thread ends.
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
    """Put in place the functions that the active calls of `install` ask for."""
    said = (pair for call in _calls for pair in vars(call).items() if pair[1] is not None)
    options = _Options(**dict(said))  # the latest value of each option
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
    """Return `function` with other default arguments; equal calls return the same object."""
    said = {name: value for name, value in defaults.items() if value is not None}
    if not said:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**said, **kwargs})

    return call


def _exchange(name: str, new: Callable[..., Any]) -> None:
    """Set ``torch.save`` or ``torch.load`` to `new`; TorchScript still calls torch's function."""
    old = _current[name]
    if new is old:
        return
    if new is not _STOCK[name]:
        stock.register_builtin(new, stock.find_builtin(_STOCK[name]))
    modules: list[ModuleType] = [torch, torch.serialization]
    for module in modules:
        # A function that other code has put there since stays.
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
                **(
                    {"fsync": options.fsync, "checksums": options.checksums}
                    if name == "save_file"
                    else {"verify": options.verify}
                ),
            )
        old = _current_safetensors.get(name, original)
        if new is not old:
            pairs.append((old, new))
            _current_safetensors[name] = new
    if pairs:
        safetensors_functions.exchange(*pairs)
