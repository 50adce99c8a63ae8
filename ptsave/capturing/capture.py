"""`capture`: records every layer's inputs, outputs, gradients and statistics in one file."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ptsave.appending.archive_writer import MeasuringWriter
from ptsave.background import saves
from ptsave.capturing.blocks import Blocks, Options
from ptsave.capturing.hooks import Hooks, OptimizerSteps
from ptsave.capturing.recorder import Recorder, Site, class_name
from ptsave.capturing.schema import SUMMARY
from ptsave.capturing.schema import VERSION as SCHEMA_VERSION
from ptsave.capturing.torch_names import WRAPPED_ATTRIBUTE
from ptsave.contents.captures import FORMAT, HEADER
from ptsave.errors import CheckpointWarning, SaveError
from ptsave.sources.locations import rivals_of
from ptsave.support import config, torch_names
from ptsave.support.calls import check_flags, parse_size, warn_user
from ptsave.support.ranks import check_rank_of_file, checked_rank
from ptsave.support.text import count_text

WHAT = ("inputs", "outputs", "grads", "params")
# The limit for page-locked copies from accelerators, unless max_memory_bytes is given.
_MAX_STAGED_NBYTES = 1 << 30
_MAX_STEPS_TEXT = 1000
# Attributes in which torch.compile, FSDP and activation checkpointing keep the wrapped module.
_WRAPPING_NAMES = {WRAPPED_ATTRIBUTE, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_running: WeakSet[Capture] = WeakSet()


class Capture:
    """Records a model's calls from `start` to `stop`, or in a ``with`` block; made by `capture`.

    Attributes
    ----------
    step_number : int
        The current step, counted from 0.
    stored_nbytes : int
        Bytes of the tensors that the capture has added to the file so far.
    dropped : int
        Number of tensors that were left out of the file: memory had no room for them, they would
        have exceeded `max_bytes`, or torch cannot save them.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str], options: Options) -> None:
        self._model = model
        self._path = path
        self._options = options
        self._marks = OptimizerSteps(model, options.optimizer, self.step)
        self._running = False
        self._done = False
        self._n_sites = 0
        self._n_recorded_steps = 0
        self.step_number = 0

    @property
    def stored_nbytes(self) -> int:
        return self._blocks.stored_nbytes if self._running or self._done else 0

    @property
    def dropped(self) -> int:
        return self._blocks.n_dropped if self._running or self._done else 0

    def start(self) -> Capture:
        """Install hooks on the model's modules, and begin the file.

        Raises
        ------
        RuntimeError
            If the capture was started before, or another capture or process is writing the file.
            Also if the job has several ranks (according to torch.distributed or the variable
            ``WORLD_SIZE``), and the capture's `rank` is not this process's rank.
        ValueError
            If no module is selected, or the optimizer has none of the model's parameters.
        SaveError
            If the file cannot be written.
        """
        if self._running or self._done:
            raise RuntimeError("a capture can start only once: create a new one with another path")
        if isinstance(self._path, (str, os.PathLike)):
            check_rank_of_file(os.fsdecode(self._path), self._options.rank, "capture(model, ")
        self._marks.check()
        sites, skipped = self._sites()
        self._writer = MeasuringWriter(
            self._path,
            fsync=self._options.fsync,
            max_memory_bytes=self._options.max_memory_bytes,
            when_full=self._options.when_full,
        )
        try:
            self._refuse_rivals()
            self._begin(sites, skipped)
        except BaseException:
            self._writer.abort()
            raise
        return self

    def _refuse_rivals(self) -> None:
        if rivals := rivals_of(os.path.realpath(self._writer.temporary_path)):
            files = {os.path.realpath(each._writer.temporary_path): each for each in _running}
            first = next((files[rival] for rival in rivals if rival in files), None)
            who = "another process, or a save in this process," if first is None else repr(first)
            raise RuntimeError(
                f"{os.fspath(self._path)}: {who} is writing this file (as {rivals[0]}), and each "
                "of the two would replace the other's file: give this capture another path, or "
                "stop the other one first"
            )

    def _begin(self, sites: list[Site], skipped: dict[str, str]) -> None:
        n_threads = min(config.current().n_threads, torch.get_num_threads())
        max_staged_bytes = self._options.max_memory_bytes or _default_staged_nbytes()
        self._blocks = Blocks(self._writer, self._options, max_staged_bytes)
        self._recorder = Recorder(self._blocks, self._options, n_threads)
        self._hooks = Hooks(self._recorder, sites, self._options.what)
        self._n_sites = len(sites)
        self._write_header(sites, skipped)
        self._begin_step()
        self._hooks.install()
        try:
            self._marks.install()
        except BaseException:
            self._hooks.remove()
            raise
        self._running = True
        _running.add(self)

    def step(self) -> None:
        """End a step: later calls belong to the next step.

        If the capture has an `optimizer`, each step of the optimizer calls this method.  A
        parameter's gradient belongs to the step in which it arrives.  The gradient of an input or
        output belongs to the step of its call, even if it arrives later.  But if a later step uses
        the same leaf tensor before the gradient arrives, the gradient belongs to the later step.
        """
        if not self._running:
            raise RuntimeError("the capture is not running: call start(), or use a with block")
        self._recorder.end_step()
        self.step_number += 1
        self._begin_step()

    def _begin_step(self) -> None:
        steps, number = self._options.steps, self.step_number
        wanted = steps is None or bool(steps(number) if callable(steps) else number in steps)
        self._n_recorded_steps += wanted
        self._recorder.begin_step(self.step_number, recording=wanted)

    def stop(self) -> None:
        """Remove all hooks, and complete the file; do nothing if the capture is not running.

        Raises
        ------
        SaveError
            If the file could not be written, for example because the disk is full.
        """
        if not self._running:
            return
        self._complete()
        self._warn()

    def _warn(self) -> None:
        n_unmarked = self._marks.n_unmarked
        if self.step_number == 0 and n_unmarked > 1:
            reason = (
                f"an optimizer of the model took {n_unmarked} steps, but the capture recorded all "
                "of them as step 0: call capture.step() at the end of each step, or pass the "
                "optimizer to capture()"
            )
        elif self._recorder.n_calls == 0:
            reason = f"no call was captured: {self._why_nothing()}"
        else:
            return
        warn_user(f"{os.fspath(self._path)}: {reason}", CheckpointWarning)

    def _complete(self) -> None:
        """Remove all hooks, and write the end of the file."""
        self._running = False
        self._done = True
        self._recorder.recording = False
        self._hooks.remove()
        self._marks.remove()
        _running.discard(self)
        try:
            self._recorder.end()
            self._blocks.close()
            self._blocks.add(SUMMARY, self._summary())
            self._writer.close()
        except BaseException:
            self._blocks.cancel()
            with suppress(SaveError):
                self._writer.close()  # keeps the records that were written so far
            raise

    def __enter__(self) -> Capture:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            self._complete()  # the values that led to the error are the interesting ones
        except Exception as second:
            if second is not error:
                second.__context__ = None
                warnings.warn(
                    f"the capture could not be completed: {second}", CheckpointWarning, stacklevel=2
                )

    def __repr__(self) -> str:
        state = "ended" if self._done else "not started"
        if self._running:
            state = f"in step {self.step_number}"
        model = type(self._model).__name__
        return f"<ptsave.Capture of {model} to {str(self._path)!r}, {state}>"

    # --------------------------------------------------------------------------------- parts

    def _why_nothing(self) -> str:
        if not self._n_sites:
            return "all selected modules are TorchScript, whose calls run no hooks"
        if not self._n_recorded_steps:
            n_steps = count_text(self.step_number + 1, "step")
            return f"`steps` includes none of the {n_steps} of this run"
        return (
            "the selected modules were not called in the recorded steps, or only by code that runs "
            "no hooks, such as a CUDA graph or an exported program"
        )

    def _sites(self) -> tuple[list[Site], dict[str, str]]:
        include, exclude = self._options.include, self._options.exclude
        modules = _modules_by_path(self._model)
        paths = [
            path for path in modules if _matches(path, include) and not _matches(path, exclude)
        ]
        if not paths:
            raise ValueError(
                f"include={include!r} and exclude={exclude!r} select no module: the modules are "
                f"{', '.join(map(repr, list(modules)[:8]))}, ..."
            )
        missed = [each for each in include if not any(fnmatchcase(path, each) for path in modules)]
        if missed:
            warn_user(
                f"{os.fspath(self._path)}: include: no module of the model matches "
                f"{', '.join(map(repr, missed))}",
                CheckpointWarning,
            )
        skipped = {
            path: "TorchScript: its calls run no hooks"
            for path in paths
            if isinstance(modules[path], torch.jit.ScriptModule)
        }
        return [Site(path, modules[path]) for path in paths if path not in skipped], skipped

    def _write_header(self, sites: list[Site], skipped: dict[str, str]) -> None:
        options = self._options
        header = {
            "format": FORMAT,
            "version": SCHEMA_VERSION,
            "model": class_name(self._model),
            "modules": {site.path: site.class_name for site in sites},
            "skipped": skipped,
            "what": options.what,
            "include": options.include,
            "exclude": options.exclude,
            "steps": _steps_text(options.steps),
            "tensors": options.tensors,
            "statistics": options.statistics,
            "call_stacks": options.call_stacks,
            "torch": str(torch.__version__),
            "ptsave": torch_names.VERSION,
            "started": time.time(),
        }
        # Not `add_of_any_size`: if the budget is too small for the header, `start` must fail.
        self._writer.add(HEADER, header, copy=False, when_full="wait")

    def _summary(self) -> dict[str, Any]:
        return {
            "steps": max(self.step_number, self._recorder.n_steps),
            "calls": self._recorder.n_calls,
            "values": self._recorder.n_values,
            "stored_nbytes": self.stored_nbytes,
            "dropped": self.dropped,
            "finished": time.time(),
        }


def capture(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    what: Iterable[Literal["inputs", "outputs", "grads", "params"]] = WHAT,  # type: ignore[assignment]
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    steps: Container[int] | Callable[[int], bool] | None = None,
    statistics: bool = True,
    tensors: bool = True,
    call_stacks: bool = False,
    optimizer: Optimizer | None = None,
    max_bytes: int | str | None = None,
    max_memory_bytes: int | str | None = None,
    when_full: Literal["wait", "drop", "raise"] = "wait",
    fsync: bool = False,
    rank: int | None = None,
) -> Capture:
    """Record the inputs, outputs, gradients and parameters of a model's modules in one file.

    Hooks copy the values, and other threads write the copies.  The model's outputs and gradients
    are the same as without a capture.  :func:`torch.load` loads the file as a dict with keys like
    ``"3/forward/layers.0.mlp#0/inputs/0"``; docs/format.md describes the keys.

    Parameters
    ----------
    model : torch.nn.Module
        The model.  The paths of its modules do not mention wrappers (DDP, FSDP, ...).
    path : str or os.PathLike
        The file, which exists only after the capture has stopped.
    what : iterable of {"inputs", "outputs", "grads", "params"}
        Values to record.  "grads" are the gradients with respect to inputs and outputs; each is the
        tensor's total gradient, also from its uses outside the module.  "grads" also includes
        the gradients of parameters, recorded whenever a backward pass has changed them.  "params"
        are the parameters at the beginning of each step.
    include, exclude : str or iterable of str
        Patterns of modules' paths, such as ``"layers.*.mlp"``.  A module is captured if a pattern
        of `include` matches its path, and no pattern of `exclude` does.  ``""`` is the path of the
        model itself.  A pattern of `include` that matches no module causes a warning.  If no module
        is selected, `start` raises an error.
    steps : container of int, callable or None
        Steps to record, such as ``range(100, 103)``, or a function that takes a step's number and
        returns whether to record the step.  None records all steps.  The first step is 0.
    statistics : bool
        Whether to compute count, mean, standard deviation, minimum, maximum, norm and checksum of
        each tensor.
    tensors : bool
        Whether to write the tensors themselves to the file.
    call_stacks : bool
        Whether to record the Python call stack of each module call.
    optimizer : torch.optim.Optimizer or None
        Each step of this optimizer ends a step of the capture.  Without an optimizer, the program
        must call :meth:`Capture.step` after each step.  If the program never calls it, but an
        optimizer of the model takes more than one step, `stop` warns.
    max_bytes : int, str or None
        Limit of the tensors' bytes in the file, for example ``"8GB"``.  Tensors beyond the limit
        are left out, with a note in their records.
    max_memory_bytes : int, str or None
        Limit of the bytes of tensors that wait to be written.  The default is the default limit of
        :func:`ptsave.async_save`, but at most 1 GiB for copies from accelerators.  Records of calls
        and values are written even if they exceed the limit.
    when_full : {"wait", "drop", "raise"}
        What a hook does if `max_memory_bytes` leaves no room for a tensor: it waits, leaves the
        tensor out with a note, or raises StagingFullError.  If a single tensor is larger than the
        limit, "wait" raises the error, too.
    fsync : bool
        Whether the file survives power loss once the capture has stopped.
    rank : int or None
        This process's rank in a job with several ranks; the file contains only this rank's calls.

    Returns
    -------
    Capture
        Use it in a ``with`` block, or call `start` and `stop`.  The file is completed even if the
        block raises an exception.

    Raises
    ------
    ValueError, TypeError
        If an argument is not valid.

    Notes
    -----
    Modules that ``torch.compile`` has compiled are captured, too.  When the capture begins, all
    compiled code of the process is compiled again, with a graph break at each selected module.
    When the capture has ended, the code is compiled once more.  ``fullgraph=True`` does not allow
    graph breaks, so dynamo raises an error.  Graph breaks may change the order in which gradients
    are added, so weights may differ in their last bits.  Any hook that dynamo does not compile has
    the same effect.  If a model is not compiled, a capture does not change any bit of its results.

    If the file can no longer be written, for example because the disk is full, the next hook or
    step raises SaveError.  The message names the temporary file, which keeps the earlier records.
    A killed process leaves such a file, too.  ``ptsave.open(..., recover=True)`` reads the file.

    An expanded tensor, such as ``x.expand(10**10)``, is written without its repeated elements, as
    :func:`torch.save` does.  If a tensor uses a part of its storage, only that part is written.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.pt")
    ...     with ptsave.capture(model, path, what=["outputs"], include="1") as capture:
    ...         for step in range(2):
    ...             _ = model(torch.ones(2, 4))
    ...             capture.step()
    ...     run = torch.load(path)
    >>> [name for name in run if "forward" in name]
    ['0/forward/1#0/outputs', '1/forward/1#0/outputs']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
    check_flags(statistics=statistics, tensors=tensors, call_stacks=call_stacks, fsync=fsync)
    options = Options(
        _checked_what(what),
        _texts(include, "include"),
        _texts(exclude, "exclude"),
        _checked_steps(steps),
        statistics,
        tensors,
        call_stacks,
        optimizer,
        None if max_bytes is None else parse_size(max_bytes, "max_bytes"),
        None if max_memory_bytes is None else parse_size(max_memory_bytes, "max_memory_bytes"),
        when_full,
        fsync,
        checked_rank(rank),
    )
    return Capture(model, path, options)


def _default_staged_nbytes() -> int:
    limit = config.current().max_staged_nbytes or saves.default_limit_nbytes()
    return min(_MAX_STAGED_NBYTES, limit)


def _texts(texts: Any, option: str) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    found = list(texts) if isinstance(texts, Iterable) else [texts]
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{option} must be one or more strings, not {texts!r}")
    return found


def _checked_what(what: str | Iterable[str]) -> list[str]:
    wanted = _texts(what, "what")
    unknown = set(wanted) - set(WHAT)
    if unknown or not wanted:
        raise ValueError(f"what must be one or more of {', '.join(WHAT)}, not {wanted!r}")
    return wanted


def _steps_text(steps: Any) -> str | None:
    """Return the option `steps` as text, so that the options of captures can be compared."""
    if callable(steps):
        return f"{getattr(steps, '__module__', '')}.{getattr(steps, '__qualname__', 'function')}"
    return None if steps is None else repr(steps)[:_MAX_STEPS_TEXT]


def _checked_steps(steps: Any) -> Any:
    is_container = isinstance(steps, Container) and not isinstance(steps, (str, bytes))
    if steps is not None and not is_container and not callable(steps):
        raise TypeError(
            "steps must be a container of numbers, such as range(100, 103), or a function that "
            f"takes a number, not {steps!r}"
        )
    return steps


def _modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by path, without parts for wrappers: not ``module.fc``, but ``fc``."""
    found: dict[str, nn.Module] = {}
    n_outer = int(isinstance(model, _WRAPPERS))
    for path, module in model.named_modules():  # a wrapped module comes after its wrapper
        parts = path.split(".")[n_outer:]
        found[".".join(part for part in parts if part not in _WRAPPING_NAMES)] = module
    return found


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)
