"""Saves the checkpoints of a training run in the background, and keeps some of them.

* After a thread has written a checkpoint, it removes old ones, in a callback of the save's future.
  With ``fsync``, the new file and its directory are synced before that.  A failed or cancelled
  save removes nothing.  So once `keep` checkpoints have been saved, at least `keep` exist.
* A save's error is stored in the save's future.  If the program has not read the error there,
  `wait` raises it, and ptsave warns of it at exit.
* A forked child may inherit locks held by threads that only the parent has.  The first call in the
  child makes new locks and forgets the parent's saves.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch.utils.serialization import config as torch_config

from ptsave.background.async_save import async_save_with
from ptsave.background.save_future import PendingSave, SaveFuture
from ptsave.background.saves import release_own, wait_before_executors_end
from ptsave.errors import CheckpointWarning, SaveError, add_note
from ptsave.support.calls import check_flags, checked_int, optional_int
from ptsave.support.ranks import check_rank_saves, group_of_job
from ptsave.training.directory import CheckpointDirectory, Retention, create_directory
from ptsave.training.options import RestoreOptions, check_named, entries_of
from ptsave.training.rank_parts import RankParts, check_ranks, rank_parts
from ptsave.writing.planning import SaveOptions
from ptsave.writing.sharing import Base
from ptsave.writing.targets import resolve

if TYPE_CHECKING:
    from ptsave.support.rank_groups import GroupRanks, Ranks
    from ptsave.training.checkpoint import RestoredEntries
    from ptsave.training.options import KeyMapping, Match
    from ptsave.training.tiers import Tiers


OnError: TypeAlias = Literal["raise", "warn"]


class AsyncCheckpointer:
    """Saves the checkpoints of a training run in the background and keeps the newest ones.

    The checkpoint of a step is the file ``step-<number>.pt`` in one directory, as
    :func:`ptsave.save_checkpoint` writes it.  A file with this name is always complete.  If the
    process is killed, the next process can continue from :meth:`latest`.

    Parameters
    ----------
    directory : str or os.PathLike
        Directory of the checkpoints, or a URL (``"s3://bucket/run"``).  A missing directory is
        created.
    keep : int, None or dict, default 3
        Number of checkpoints to keep.  If there are more after a save, the lowest steps are
        removed.  The step just saved, the highest step and a step that this object is restoring
        always stay.  With None, all checkpoints stay.  With `local`, it may be a dict with a number
        for each place, ``{"local": 2, "remote": 10}``; the other rules are for `directory` only.
    keep_every : int, optional
        Steps that are divisible by this number are kept as well.
    keep_best, metric, mode : int, str and {"min", "max"}, optional
        The `keep_best` checkpoints with the lowest metric (``mode="max"``: the highest) are kept as
        well.  `metric` is the name of a number among the saved objects, such as `val_loss` in
        ``save(step, model=model, val_loss=0.3)``.  A checkpoint without it is never one of
        the best.
    keep_marked : str, optional
        Name of a saved object.  Checkpoints in which it is true are kept as well:
        ``save(step, model=model, milestone=True)`` with ``keep_marked="milestone"``.
    rank : int, optional
        Without `world_size`: the only rank that saves, in a job of several ranks; all ranks may
        restore.  With `world_size`: the rank of this process.
    world_size : int, optional
        Number of ranks that each save a part of one checkpoint, without a process group.
    process_group : torch.distributed.ProcessGroup, optional
        Group in which each rank saves a part of every checkpoint.  The default is all ranks, if
        ``torch.distributed`` is initialized and no `rank` is given.
    fsync : bool, default True
        Whether older checkpoints are removed only after the new one is safe from power loss.  With
        False, a new checkpoint survives a crash of the process, but may not survive a crash of the
        machine.
    stop_signals : collection of int, optional
        Signals, such as SIGTERM, that make :meth:`stop_requested` true.  Until :meth:`close`, these
        signals do not end the process.  Only the main thread can make an object with stop signals.
        In a forked child, SIGTERM ends the child; the other stop signals do nothing there.
    staging, max_staged_bytes, when_full, storage_options, weights_only_check
        As for :func:`ptsave.async_save`.
    on_error : {"raise", "warn"}, default "raise"
        The effect of an :class:`OSError` of a save (disk full, directory gone, URL unreachable).
        With ``"raise"``, :meth:`wait` and :meth:`close` raise it, unless the program has read it
        from the save's future.  With ``"warn"``, the save warns once, and the run goes on; the
        future still has the error.  Other errors are always raised.  With `local`, each error of a
        copy is such a warning, too.
    local : str or os.PathLike, optional
        Fast local directory to which each step is saved first.  Threads copy the steps from there
        to `directory`, the slow place.
    every : dict, optional
        ``{"remote": 10, "peers": 2}`` copies the steps that are divisible by 10 to `directory`, and
        even steps to other hosts.  The default is each step.  A step that has no copies on other
        hosts is removed once a later step has them.
    peers : int, default 0
        Number of other hosts that store a copy of each rank's part in their `local` directory.
    incremental : bool, default False
        Whether a checkpoint may share unchanged bytes with the one before, as with the `base` of
        :func:`ptsave.save`.  A save's future tells how many bytes it has shared.

    Raises
    ------
    SaveError
        An :class:`OSError`: the directory cannot be made, is a file, is not writable, or is a URL
        that fsspec cannot write to.
    TypeError, ValueError
        `keep` is less than 1, or `rank` less than 0.  The options for keeping checkpoints
        contradict each other.  `process_group` is given together with `rank` or `world_size`.
        `world_size` is given without `rank`, or `rank` is not less than `world_size`.  Several
        ranks save to a URL without a process group.  The `stop_signals` cannot be handled, or this
        is not the main thread.
    RuntimeError
        The environment variable ``WORLD_SIZE`` is above 1, but there is neither a process group
        nor a `rank`.  Another process has the same rank.

    Notes
    -----
    Files with other names are left alone.  A killed process may leave a temporary file
    (``.step-<number>.pt.<16 hex digits>.ptsave``).  The constructor and each save remove such
    files, except those that a process is still writing and has locked.  Several processes may use
    one directory.  If they run on several hosts, ``flock`` must work between the hosts on this file
    system.  Otherwise one host can make a save on another host fail.

    At a URL no temporary file is removed, because ptsave cannot tell whether a process is writing
    it; object stores never have such files.  If another process removes a checkpoint at a URL while
    it is being restored, :meth:`restore` raises an :class:`OSError`.

    With DistributedDataParallel all ranks have the same values.  Each rank makes
    ``AsyncCheckpointer(directory, rank=0)`` and restores from it before the first save.  Only rank
    0 calls :meth:`save`.

    If each rank has values of its own (a sharded model), all ranks make the object with a process
    group, or with their `rank` and the `world_size`.  Each rank saves its part, the file
    ``step-<number>.<save>.rank-<rank>-of-<world size>.pt``.  A step is complete when the parts of
    all ranks exist.  In this mode, making the object, :meth:`latest`, :meth:`restore`,
    :meth:`remove`, :meth:`stop_requested`, :meth:`wait` and :meth:`close` are collective.  All
    ranks call them, and an error on one rank is raised on all.  Saving needs no communication:
    ranks call :meth:`save` independently.  The same number of ranks must save and restore; if the
    number may change, use ``torch.distributed.checkpoint``.

    With `local`, a save's future is done when the file is in that directory.  A manifest beside
    each file (``step-<number>.pt.json``) has its digest.  :meth:`wait` waits for the copies, too,
    and raises an error of a copy, unless ``on_error="warn"``.  If `directory` is slower than the
    run, at most `keep` steps wait for it.  The oldest of them are skipped, with a warning.
    :meth:`protected` returns the highest step that survives the loss of a host.  With `peers`, no
    host removes older steps until a newer one has all its copies.

    With `local`, :meth:`restore` verifies a file before it overwrites anything, so it reads the
    file twice.  It takes each rank's part from the nearest place that has it undamaged: the local
    directory, another host, `directory`.  It warns of each damaged copy.  In a job of several
    hosts, all ranks use the same `directory`, and the ranks of one host the same `local`.  Without
    a process group, processes with a `rank` alone restore only steps that are complete in
    `directory`.  So do ranks with a `world_size` if it is a URL; they cannot save.

    Hosts reach each other at the address of the interface that leads to ``MASTER_ADDR``, or at
    ``PTSAVE_PEER_ADDRESS``.  Processes of one machine fail together.  If several machines do (a
    rack), give them the same text in ``PTSAVE_FAILURE_DOMAIN``.

    The interpreter waits for pending saves before it exits, even without :meth:`close`.  A forked
    process has no pending saves.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> folder = tempfile.TemporaryDirectory()
    >>> with ptsave.AsyncCheckpointer(folder.name, keep=2) as checkpointer:
    ...     for step in range(1, 5):
    ...         _ = checkpointer.save(step, model=model, optimizer=optimizer, loss=0.5)
    >>> checkpointer.steps()
    [3, 4]
    >>> checkpointer.latest().name
    'step-00000004.pt'
    >>> checkpointer.restore(model=model, optimizer=optimizer)
    {'loss': 0.5}
    >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_marked: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        fsync: bool = True,
        stop_signals: Collection[int] = (),
        staging: Literal["blocking", "background"] = "blocking",
        max_staged_bytes: int | None = None,
        when_full: Literal["wait", "raise"] = "wait",
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
        on_error: OnError = "raise",
        local: str | os.PathLike[str] | None = None,
        every: Mapping[str, int] | None = None,
        peers: int = 0,
        incremental: bool = False,
    ) -> None:
        tiers = None
        if local is not None:
            from ptsave.training.tiers import TierOptions

            tiers = TierOptions.of(local, keep, every, peers)
            keep = tiers.keep
        elif every is not None or peers:
            raise TypeError("every and peers need local: a directory for the newest checkpoints")
        numbers = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
        checked = {name: optional_int(number, name, 1) for name, number in numbers.items()}
        self._retention = Retention(**checked, metric=metric, mode=mode, keep_marked=keep_marked)
        self._retention.check_rules()
        self._rank = optional_int(rank, "rank", 0)
        world_size = optional_int(world_size, "world_size", 1)
        self._is_only_rank = world_size == 1
        check_ranks(os.fsdecode(directory), self._rank, world_size, process_group)
        check_flags(fsync=fsync, weights_only_check=weights_only_check, incremental=incremental)
        self._is_incremental = incremental
        self._only_warns = _only_warns(on_error)
        self._options = SaveOptions.of(locals())
        self._closed = False
        self._job: GroupRanks | None = None
        self._last_step: int | None = None
        self._announced: int | None = None  # highest step in a warning so far
        self._place = create_directory(directory, storage_options, fsync=fsync)
        local_place = None if tiers is None else create_directory(tiers.folder, None, fsync=fsync)
        self._parts = rank_parts(self._place, self._rank, world_size, process_group, local_place)
        self._tier_options = tiers
        if tiers is not None and local_place is not None:
            if isinstance(self._place, Path) and self._place.samefile(local_place):
                raise ValueError(
                    f"{local_place}: local and directory must be different directories"
                )
            self._tier_options = tiers._replace(
                remote=self._place, retention=self._retention, storage_options=storage_options
            )
            self._options = replace(self._options, storage_options=None)  # only for the URL
            self._place = local_place
        self._start_afresh()
        self._directory.remove_leftovers()
        together = nullcontext() if self._parts is None else self._parts.together("handle signals")
        with together:
            self._stop_signals = StopSignals(stop_signals)

    # ------------------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        /,
        *,
        fsync: bool | None = None,
        atomic: bool = True,
        progress: bool = False,
        weights_only_check: bool | None = None,
        on_error: OnError | None = None,
        **objects: Any,
    ) -> SaveFuture:
        """Save named objects in the background, as the checkpoint of a step.

        An object that has a ``state_dict`` method is saved as its state dict.  When the call
        returns, the program may change the objects again (with ``staging="background"``: after the
        future's ``wait_staged()``).  A checkpoint of the same step is replaced atomically.

        Parameters
        ----------
        step : int
            The checkpoint's number, at least 0.  It is a positional argument, so that an object may
            have the name `step`.
        fsync : bool, optional
            Whether this checkpoint must survive power loss.  Default: the checkpointer's `fsync`.
        atomic : bool, default True
            As for :func:`ptsave.save`.  With False, :meth:`latest` may return an incomplete file,
            which is still being written, or which a killed process has left.
        progress : bool, default False
            Whether to show a progress bar.
        weights_only_check : bool, optional
            As for :func:`ptsave.save`.  Default: the checkpointer's `weights_only_check`.
        on_error : {"raise", "warn"}, optional
            The effect of an :class:`OSError` of this save.  Default: the checkpointer's `on_error`.
        **objects : object
            Models, optimizers, schedulers, and any other objects that can be saved.  An object
            cannot have the name of an option.

        Returns
        -------
        SaveFuture
            The pending save.  If writing fails (disk full, directory gone, ...), the future has
            the :class:`OSError`, and existing checkpoints are unchanged.  Old checkpoints are
            removed after the future is done; :meth:`wait` waits for their removal as well.

        Raises
        ------
        TypeError, ValueError
            The step is not an int, or is negative.  An object has the name of an option, or the
            call has an option that only other functions have (``staging="background"``).  The
            metric is not a number.
        RuntimeError
            The checkpointer is closed, or this process is not the rank that may save.
        Exception
            Any error that ``state_dict()`` or :func:`ptsave.async_save` raises during the call.

        Warns
        -----
        CheckpointWarning
            A higher step exists, because training went back to an earlier step; :meth:`latest`
            still returns the higher step.  The writing thread also warns if it cannot
            remove an old checkpoint, and with ``on_error="warn"`` if the save fails.
        """
        self._check_process()
        step = checked_int(step, "step", 0)
        if self._closed:
            raise RuntimeError("the checkpointer is closed: make another one to save more")
        if self._parts is None:
            check_rank_saves(os.fspath(self._directory.path), self._rank)
        else:
            self._parts.begin()
        given: dict[str, Any] = {"fsync": fsync, "weights_only_check": weights_only_check}
        given = {name: value for name, value in given.items() if value is not None}
        options = replace(self._options, atomic=atomic, progress=progress, **given)
        check_named("AsyncCheckpointer.save", options, objects)
        warns = self._only_warns if on_error is None else _only_warns(on_error)
        entries = entries_of(objects)
        self._retention.check(entries)
        if self._is_incremental:
            options = replace(options, base=self._last_saved())
        save = ""
        try:
            path, highest = self._directory.place(step)
            if self._tiers is not None:
                save = self._tiers.begin(os.path.basename(path))
        except OSError as error:  # the directory is gone: put the error in the future
            path, future = self._directory.path, _failed_save(str(self._directory.path), error)
        else:
            self._warn_if_lower(step, highest)
            future = self._begin(path, entries, options)
        with self._changed:
            self._pending[future] = step
            self._last_step = step
        # Do not call the method of the future itself, which marks the save's result as read.
        Future.add_done_callback(
            future,
            lambda _: self._finish(step, str(path), future, atomic=atomic, warns=warns, save=save),
        )
        return future

    def _last_saved(self) -> Base:
        """Return the base of the next save: the checkpoint whose write will end before it."""
        if self._base.target is None:
            with suppress(OSError):  # without a base, all bytes are written
                if (latest := self._directory.latest()) is not None:
                    self._base.target = resolve(latest, self._options.storage_options)
        return self._base

    def _begin(self, path: Path | Any, entries: dict[str, Any], options: SaveOptions) -> SaveFuture:
        if self._parts is not None:
            self._parts.note(str(path))
        try:
            return async_save_with(entries, os.fspath(path), options)
        except OSError as error:
            return _failed_save(str(self._directory.path), error)
        except Exception as error:
            if self._parts is not None:
                self._parts.fail(str(path), error, is_there=False)
            raise

    def _warn_if_lower(self, step: int, highest: int | None) -> None:
        with self._changed:
            highest = max([highest or 0, *self._pending.values()])
        if step < highest != self._announced:
            self._announced = highest
            message = (
                f"{self._directory.path}: a checkpoint of step {highest} is there already, so "
                f"latest() and restore() will not use step {step}, which is being saved. To "
                f"continue from step {step}, remove the checkpoints of higher steps"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=3)

    def _finish(
        self, step: int, path: str, future: SaveFuture, *, atomic: bool, warns: bool, save: str
    ) -> None:
        """Remove old checkpoints, or note the error, after a save; runs in the writing thread."""
        error = CancelledError() if future.cancelled() else Future.exception(future)
        warns_of_copies, warns = warns, warns and isinstance(error, OSError)
        try:
            if error is None and self._is_incremental:
                self._base.target = resolve(path, self._options.storage_options)
            if error is None and self._tiers is not None:
                self._tiers.saved(step, path, save, warns=warns_of_copies)
            elif error is None:
                self._tidy(step)
            elif self._parts is not None:
                is_there = atomic and self._directory.holds(os.path.basename(path))
                self._parts.fail(path, error, is_there=is_there, warns=warns)
            if warns:
                future.exception()  # marks it as read, so nothing else reports it
                message = f"{self._directory.path}: step {step} was not saved: {error}"
                warnings.warn(message, CheckpointWarning, stacklevel=2)
        finally:
            with self._changed:
                del self._pending[future]
                if not (error is None or future.cancelled() or warns):
                    self._failed.append(future)
                self._changed.notify_all()

    def _copy_failed(self, name: str, error: BaseException, warns: bool) -> None:
        """Note that a saved file could not be copied to another place; runs in a copying thread."""
        message = f"{self._directory.path}: {name} was saved, but a copy was not: {error}"
        if warns:
            warnings.warn(message, CheckpointWarning, stacklevel=2)
            return
        if self._parts is not None:
            self._parts.fail(name, error, is_there=True)
        number = (isinstance(error, OSError) and error.errno) or errno.EIO
        failure = SaveError(number, message, str(self._directory.path))
        failure.__cause__ = error
        with self._changed:
            self._failed.append(_failed_save(name, failure))

    def _tidy(self, step: int) -> None:
        if self._parts is not None and not self._parts.tidies:
            return
        try:
            self._directory.prune(self._retention, step)
            self._directory.remove_leftovers()
        except OSError as error:
            message = f"{self._directory.path}: old checkpoints cannot be removed: {error}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)

    def stop_requested(self) -> bool:
        """Return whether a rank has received a stop signal, so that training should save and end.

        Returns
        -------
        bool
            The same value on all ranks: true if any rank has received one of the `stop_signals`.

        Raises
        ------
        RuntimeError
            Another rank has ended, so it cannot take part in this call.

        Notes
        -----
        In a job of several ranks, all ranks must call this at the same steps.  In each call, the
        ranks communicate.  So if steps are short, call it only every few steps.

        Examples
        --------
        >>> import os, signal, tempfile, torch, ptsave
        >>> model = torch.nn.Linear(2, 2)
        >>> folder = tempfile.TemporaryDirectory()
        >>> with ptsave.AsyncCheckpointer(folder.name, stop_signals=[signal.SIGTERM]) as run:
        ...     for step in range(1000):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if run.stop_requested():
        ...             _ = run.save(step, model=model)
        ...             break
        >>> run.steps()
        [3]
        >>> folder.cleanup()
        """
        self._check_process()
        came = self._stop_signals.came
        ranks = self._ranks()
        return came if ranks is None else any(ranks.gather(came))

    def _ranks(self) -> Ranks | None:
        """Return the ranks of this job, also if only one of them saves; None if they cannot meet.

        The first call in a job where only one rank saves is collective.
        """
        if self._parts is not None:
            return self._parts.ranks
        if self._job is None and (group := group_of_job()) is not None:
            from ptsave.support.rank_groups import GroupRanks

            self._job = GroupRanks(group, str(self._directory.path))
        return self._job

    # ------------------------------------------------------------------------- saved checkpoints

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, lowest first.

        With `local` and several ranks, all ranks must call this.
        """
        if self._tiers is None:
            return self._directory.steps()
        self._check_process()
        return sorted({step for step, _ in self._tiers.keys(self._listings())})

    def protected(self) -> int | None:
        """Return the highest step that survives the loss of any host, or None.

        Each part of the step is complete in the slow place (`directory`), or in the local
        directories of two hosts.  With several ranks, all ranks must call this.

        Raises
        ------
        TypeError
            The checkpointer has no `local` directory.

        Examples
        --------
        >>> import tempfile, torch, ptsave
        >>> with tempfile.TemporaryDirectory() as slow, tempfile.TemporaryDirectory() as fast:
        ...     with ptsave.AsyncCheckpointer(slow, local=fast, every={"remote": 2}) as run:
        ...         for step in (1, 2, 3):
        ...             _ = run.save(step, model=torch.nn.Linear(2, 2))
        ...         run.wait()
        ...         print(run.steps(), run.protected())
        [1, 2, 3] 2
        """
        self._check_process()
        if self._tiers is None:
            raise TypeError("protected() needs local: without it, all checkpoints are in one place")
        return self._tiers.protected(self._listings())

    def _listings(self) -> list[Any]:
        """Return the checkpoints that each rank sees; a collective call."""
        assert self._tiers is not None
        ranks, own = self._ranks(), self._tiers.listing()
        return [own] if ranks is None else ranks.gather(own)

    def latest(self) -> Path | Any | None:  # callers know whether they gave a path or a URL
        """Return the complete checkpoint with the highest step, or None if no step is complete.

        The result is a :class:`pathlib.Path`, or a str if the directory is a URL.  Pending saves
        are ignored.  Another process that saves to the directory may remove the file at any
        time; :meth:`restore` then chooses again.

        With several ranks, rank 0 chooses the step, and each rank gets the path of its own part.
        """
        self._check_process()
        if self._tiers is not None:
            found = self._listings()
            with nullcontext() if self._parts is None else self._parts.together("fetch its part"):
                return self._tiers.latest(found)
        if self._parts is None:
            return self._directory.latest()
        try:
            name = self._parts.agreed(lambda: self._directory.choose(None)[1])
        except FileNotFoundError:
            return None
        return self._directory.place_of(name)

    def path(self, step: int, /) -> Path | Any:
        """Return the path (or the URL, a str) of a step's checkpoint, which need not exist.

        Raises
        ------
        TypeError, ValueError
            The step is not an int, or is negative.
        """
        return self._directory.path_of(checked_int(step, "step", 0))

    def restore(
        self,
        step: int | None = None,
        /,
        *,
        fallback: bool = False,
        strict: bool = True,
        assign: bool = False,
        map_location: Any = None,
        weights_only: bool | None = None,
        verify: bool = True,
        progress: bool = False,
        ignore_mismatched_sizes: bool = False,
        match: Match = None,
        key_mapping: KeyMapping | None = None,
        device: Any = None,
        rename: KeyMapping | None = None,
        **targets: Any,
    ) -> RestoredEntries:
        """Restore objects in place, and return the checkpoint's entries that have no target.

        Parameters
        ----------
        step : int or None
            Step of the checkpoint.  None: the highest complete step; call :meth:`wait` first if
            saves are pending.  If another process removes that step before it is opened, `restore`
            chooses again.  Not a keyword: ``restore(1000, model=model)``.
        fallback : bool, default False
            Whether to restore the highest step that is whole, if higher steps are damaged.  Each
            step's file is read and verified before anything is overwritten; see Notes.
        strict, assign, map_location, weights_only, verify, progress
        ignore_mismatched_sizes, match, key_mapping, device, rename
            As for :func:`ptsave.load_checkpoint`.
        **targets : object
            The objects to restore, under the names that they were saved with.

        Returns
        -------
        RestoredEntries
            The entries that have no target, and a `report`, as from :func:`ptsave.load_checkpoint`.

        Raises
        ------
        FileNotFoundError
            There is no checkpoint, or no checkpoint of this step.
        TypeError
            A target has the name of an option, or the call has an option that only other functions
            have.
        KeyError, RuntimeError, CorruptCheckpointError
            As from :func:`ptsave.load_checkpoint`.  With `fallback`, if no step is whole: the error
            of the highest step, with a note that names the damage of the others.
        ValueError
            The call has both a `step` and ``fallback=True``.

        Warns
        -----
        CheckpointWarning
            With `fallback`: which step is restored, and which files of higher steps are damaged,
            with their damaged entries.

        Notes
        -----
        With `fallback`, a step is verified as ``ptsave verify`` does: all checksums are compared,
        and the object is unpickled without its tensors.  If a file is damaged
        (:class:`CorruptCheckpointError`, :class:`NotCheckpointError`), is missing, or has a sector
        that the disk cannot read (``EIO`` of a local file), the next lower step is verified.  Other
        errors are raised: a missing key, a wrong shape, a missing permission, a server that does
        not answer.  (With `local`, a copy that cannot be read counts as damaged, for example if its
        server does not answer.)  So the targets get the values of one whole checkpoint or keep
        their own.  The restore reads the file again, and compares the checksums again (unless
        `verify` is False).  Damage that arises between the two reads raises as without `fallback`:
        then some entries may be overwritten.

        With `fallback`, all ranks must call `restore`, also if only one rank saves, and they
        restore the same step: the highest that is whole on each rank.  If only one rank saves, the
        ranks can agree only if ``torch.distributed`` is initialized.  Incomplete steps do not count
        as checkpoints, so nothing warns of them.

        Examples
        --------
        >>> import tempfile, torch, ptsave
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ptsave.AsyncCheckpointer(folder) as checkpointer:
        ...         _ = checkpointer.save(7, model=model, step=7)
        ...     checkpointer.restore(7, model=model)
        {'step': 7}
        """
        self._check_process()
        if isinstance(targets.get("step"), int):
            raise TypeError(
                "step=... names an object to restore: give the number of a checkpoint first, as in "
                f"restore({targets['step']}, ...)"
            )
        options = RestoreOptions.of(locals())
        check_named("AsyncCheckpointer.restore", options, targets)
        check_flags(fallback=fallback)
        step = optional_int(step, "step", 0)
        if fallback:
            if step is not None:
                raise ValueError("fallback=True chooses the step: leave the step out")
            return self._restored_whole(targets, options)
        if self._tiers is not None:
            return self._restored_whole(targets, options, step, fallback=False)
        if self._parts is None:
            return self._restored(self._directory.opened(step), targets, options)
        name = self._parts.agreed(lambda: self._directory.choose(step)[1])
        with self._parts.together("restore its part"):
            return self._restored(self._directory.open_file(name), targets, options)

    def remove(self, step: int, /) -> None:
        """Remove the checkpoint of a step, for example a damaged one.

        Parameters
        ----------
        step : int
            The step, as a positional argument.  A pending save of this step is awaited first.

        Raises
        ------
        FileNotFoundError
            There is no checkpoint of the step.
        OSError
            The checkpoint cannot be removed.
        TypeError, ValueError
            The step is not an int, or is negative.

        Notes
        -----
        With several ranks, all ranks must call this; the parts of all ranks are removed.

        Examples
        --------
        >>> import tempfile, torch, ptsave
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpointer = ptsave.AsyncCheckpointer(folder.name)
        >>> for step in (1, 2):
        ...     _ = checkpointer.save(step, model=torch.nn.Linear(2, 2)).result()
        >>> checkpointer.remove(2)
        >>> checkpointer.steps()
        [1]
        >>> checkpointer.close()
        >>> folder.cleanup()
        """
        self._check_process()
        step = checked_int(step, "step", 0)
        release_own()
        with self._changed:
            self._changed.wait_for(lambda: step not in self._pending.values())
        if self._tiers is not None:
            self._tiers.wait()
            found = [self._tiers.listing()] if self._parts is None else self._listings()
            self._tiers.require(step, found)
        if self._parts is None:
            self._remove_here(step)
            return
        self._parts.meet()  # after this, no rank is still writing its part
        with self._parts.together("remove a step"):
            if self._parts.is_first or self._tiers is not None:
                self._remove_here(step)

    def _remove_here(self, step: int) -> None:
        if self._tiers is None:
            self._directory.remove_step(step)
        else:
            self._tiers.remove_step(step)

    def _restored_whole(
        self,
        targets: dict[str, Any],
        options: RestoreOptions,
        step: int | None = None,
        *,
        fallback: bool = True,
    ) -> RestoredEntries:
        from ptsave.training.fallback import OneDirectory, newest_whole

        parts, places = self._parts, self._tiers or OneDirectory(self._directory)
        together = nullcontext() if parts is None else parts.together("restore its part")
        ranks = self._ranks()
        if ranks is not None:  # rank 0 chooses, as it does without a local directory
            step, fallback = ranks.gather([step, fallback])[0]
        whole = newest_whole(places, ranks, step, fallback=fallback)
        with whole as source, together:
            return self._restored(nullcontext(source), targets, options)

    def _restored(
        self, opened: AbstractContextManager[Any], targets: dict[str, Any], options: RestoreOptions
    ) -> RestoredEntries:
        from ptsave.training.checkpoint import restore_entries

        with opened as source:
            if isinstance(source, str):
                storage_options = (self._tier_options or self._options).storage_options
                options = replace(options, storage_options=storage_options)
            # If torch's config asks for mmap, torch needs the path, because it maps only by path.
            maps = torch_config.load.mmap and not isinstance(source, str)
            return restore_entries(source.name if maps else source, targets, options)

    # ---------------------------------------------------------------------------------- the end

    def wait(self) -> None:
        """Wait until all saves are done, and old checkpoints have been removed.

        Raises
        ------
        Exception
            A save has failed, and the program has not read the error from the save's future.  Each
            call raises one such error, the oldest first; not those of ``on_error="warn"``.
        """
        self._check_process()
        unknown = self._wait_here()
        elsewhere = None if self._parts is None else self._settle(self._parts)
        if unknown is not None:
            unknown.result()
        if elsewhere is not None:
            raise elsewhere

    def _settle(self, parts: RankParts) -> SaveError | None:
        """Wait for all ranks, remove parts of failed saves; return another rank's error or None."""
        lost, error = parts.settle()
        for name in lost:
            with suppress(OSError):  # it may not exist
                self._directory.folder.remove(name)
        if self._tiers is not None:
            self._tiers.settle()
        elif parts.is_first and self._last_step is not None:
            self._tidy(self._last_step)
        parts.meet()
        return error

    def _wait_here(self) -> SaveFuture | None:
        """Wait for this process's saves; return the first failed one with an unread error."""
        release_own()
        self._wait_for_copies()
        with self._changed:
            unknown = [future for future in self._failed if not future.observed()]
            self._failed[:] = unknown[1:]
        return unknown[0] if unknown else None

    def _wait_for_copies(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        if self._tiers is not None:
            self._tiers.wait()

    def close(self) -> None:
        """Refuse new saves, then call :meth:`wait`.  :meth:`restore` still works afterwards."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._stop_signals.release()
        self._leave()

    def _leave(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        if self._parts is not None:
            self._parts.release()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        # The error of the `with` block is raised; errors of saves become notes on it.  Do not wait
        # for the other ranks: without an error, they do not come here now.
        while (future := self._wait_here()) is not None:
            failure = future.exception()
            if failure is not error:
                add_note(error, f"a checkpoint was also not saved: {failure}")
        self._stop_signals.release()
        self._leave()

    # -------------------------------------------------------------------------------------- fork

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        naming = self._parts.naming if self._parts is not None else None
        # A forked process must open the directory again: connections do not survive a fork.
        self._directory = CheckpointDirectory(self._place, naming, self._options.storage_options)
        self._changed = threading.Condition()
        self._base = Base(None, is_required=False)
        self._pending: dict[SaveFuture, int] = {}
        self._failed: list[SaveFuture] = []
        self._tiers: Tiers | None = None
        if self._tier_options is not None:
            from ptsave.training.tiers import Tiers

            is_only = self._is_only_rank or self._rank is None
            sees_all = is_only or self._ranks() is not None
            self._tiers = Tiers(
                self._directory,
                self._parts,
                self._tier_options,
                self._copy_failed,
                sees_all=sees_all,
                pending=self._pending,
            )
            _with_copies.add(self)
            wait_before_executors_end(_wait_for_copies)

    def _check_process(self) -> None:
        """In a forked child, forget the saves and locks of the parent process.

        If the parent is one of several ranks, raise RuntimeError, because the child is not a rank.
        """
        if self._pid != os.getpid():
            if self._parts is not None:
                raise RuntimeError(
                    "this process was forked from a rank, but is not a rank: make another "
                    "AsyncCheckpointer"
                )
            self._start_afresh()


_with_copies: weakref.WeakSet[AsyncCheckpointer] = weakref.WeakSet()


@atexit.register  # other callbacks may have saved
def _wait_for_copies() -> None:
    for each in list(_with_copies):
        if each._pid == os.getpid():  # a forked child has no pending saves
            each._wait_for_copies()


def _failed_save(target: str, error: OSError) -> SaveFuture:
    """Return a finished future with the `error` of a save that could not begin."""
    future = PendingSave(target, 0, lambda: False)
    future.set_staged(error)
    future.set_exception(error)
    return future


def _only_warns(on_error: OnError) -> bool:
    if on_error not in ("raise", "warn"):
        raise ValueError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
    return on_error == "warn"


# -------------------------------------------------------------------------------- stop signals

_before: dict[int, Any] = {}  # signal -> the handler that `_note` has replaced
_waiting: list[StopSignals] = []


class StopSignals:
    """Notes signals, which do not end the process until `release` is called.

    `came` is True once one of the signals has been received.  Only the main thread can handle
    signals: other threads get a ValueError.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.came = False
        self._pid = os.getpid()
        self._numbers = frozenset(numbers)
        _waiting.append(self)
        try:
            for number in self._numbers:
                handler = signal.signal(number, _note)
                if handler is not _note:
                    _before[number] = handler
        except (OSError, TypeError, ValueError) as error:
            self.release()
            raise ValueError(f"stop_signals={numbers!r} cannot be handled: {error}") from error

    def takes(self, number: int) -> bool:
        """Return whether this object notes a signal: not SIGTERM in a forked child."""
        return number in self._numbers and (number != signal.SIGTERM or self._pid == os.getpid())

    def release(self) -> None:
        """Install the handlers again that were there before this object.

        Only the main thread can do this.  After a call in another thread, our handler of a signal
        stays until the signal comes.
        """
        if self in _waiting:
            _waiting.remove(self)
        for number in self._numbers & _before.keys():
            if not any(number in each._numbers for each in _waiting):
                _put_back(number)


def _note(number: int, frame: FrameType | None) -> None:
    takers = [each for each in _waiting if each.takes(number)]
    for each in takers:
        each.came = True
    if not takers and signal.getsignal(number) is _note:  # not called by another handler
        _put_back(number)
        os.kill(os.getpid(), number)


def _put_back(number: int) -> None:
    """Install the earlier handler again, unless other code has replaced ours meanwhile."""
    try:
        if signal.getsignal(number) is _note:
            before = _before.get(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
        _before.pop(number, None)
    except ValueError:  # not the main thread
        return
