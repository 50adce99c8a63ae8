"""Plug-ins for checkpoints as Lightning asks for them, for both of its packages.

``lightning`` and ``pytorch_lightning`` are the same code under two names, and each refuses the
other's classes.  So `lightning` and `pytorch_lightning` beside this file make the classes of either
over the library's own base class.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from ptsave.contents.loading import load
from ptsave.integrations.pending_saves import (
    PendingSaves,
    make_parent,
    path_key,
    remove_checkpoint,
)
from ptsave.integrations.staged_files import StagedFile, staged_file
from ptsave.serialization import save
from ptsave.support.flags import check_flags
from ptsave.writing.targets import resolve_file

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]


class CheckpointIO:
    """Lets Lightning save and load checkpoints by ptsave: no copy, whole or not at all, verified.

    ``lightning.Trainer(plugins=[CheckpointIO()])``, and the same for ``lightning.Fabric``; take it
    from :mod:`ptsave.integrations.lightning`, or, for ``import pytorch_lightning``, from
    :mod:`ptsave.integrations.pytorch_lightning`.

    Parameters
    ----------
    fsync : bool, default False
        Whether a checkpoint survives power loss when the call has returned, which is before
        Lightning removes the one before it.  Lightning's own does not wait for the disk either.
    atomic : bool, default True
        As for :func:`ptsave.save`.
    verify : bool, default True
        Whether loading compares checksums.
    storage_options : mapping, optional
        For the file system of paths that are URLs.  Those that a call of ``save_checkpoint`` brings
        go before them, also when that checkpoint is loaded or removed.
    weights_only_check : bool, default False
        As for :func:`ptsave.save`.

    Notes
    -----
    Strategies that write several files (FSDP, ModelParallel, DeepSpeed) do not ask the plug-in;
    those of the first two are :mod:`ptsave.distributed`'s under
    ``ptsave.install(distributed=True)``.  The whole checkpoint is in CPU memory when
    ``load_checkpoint`` returns, as Lightning wants it; :func:`ptsave.load_checkpoint` loads a model
    without that second copy.
    ``weights_only=None`` means torch's default, also for a checkpoint at ``http://``, where
    Lightning's own means False.

    Examples
    --------
    >>> import lightning  # doctest: +SKIP
    >>> from ptsave.integrations.lightning import CheckpointIO  # doctest: +SKIP
    >>> trainer = lightning.Trainer(plugins=[CheckpointIO(fsync=True)])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        fsync: bool = False,
        atomic: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
    ) -> None:
        super().__init__()
        check_flags(
            fsync=fsync, atomic=atomic, verify=verify, weights_only_check=weights_only_check
        )
        self._fsync = fsync
        self._atomic = atomic
        self._verify = verify
        self._storage_options = storage_options
        # Of calls that brought their own, by path: removing and loading bring none.
        self._options_of: dict[str, Mapping[str, Any]] = {}
        self._weights_only_check = weights_only_check

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint; its directory is made.

        Raises
        ------
        SaveError
            An :class:`OSError`; the file that was there is unchanged.
        TypeError
            If there are `storage_options` and the path is no URL.
        """
        options = self._storage_options if storage_options is None else storage_options
        make_parent(os.fspath(path), options)
        staged = self._staged(path, options)
        try:
            save(
                checkpoint,
                os.fspath(path) if staged is None else staged.path,
                fsync=self._fsync,
                atomic=self._atomic,
                storage_options=options,
                weights_only_check=self._weights_only_check,
            )
            if staged is not None:
                staged.publish(fsync=self._fsync)
        finally:
            if staged is not None:
                staged.discard()
        self._note_options(path, storage_options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, to the CPU unless `map_location` says otherwise.

        Raises
        ------
        CorruptCheckpointError
            If it is damaged: the error names the record and the entries that use it.
        FileNotFoundError
            If it is not there.
        """
        checkpoint: dict[str, Any] = load(
            os.fspath(path),
            map_location,
            weights_only=weights_only,
            verify=self._verify,
            storage_options=self._options_for(path),
        )
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, a file or a directory, if it is there."""
        remove_checkpoint(os.fspath(path), self._options_for(path))
        self._note_options(path, None)

    def teardown(self) -> None:
        """Do nothing: nothing is pending."""

    def _staged(self, path: str | os.PathLike[str], options: Any) -> StagedFile | None:
        """Return a place for a checkpoint of a SLURM job, whose leftovers Lightning would count."""
        return staged_file(resolve_file(path, options)) if self._atomic else None

    def _options_for(self, path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
        return self._options_of.get(path_key(os.fspath(path)), self._storage_options)

    def _note_options(self, path: str | os.PathLike[str], options: Any) -> None:
        if options is None:
            self._options_of.pop(path_key(os.fspath(path)), None)
        else:
            self._options_of[path_key(os.fspath(path))] = options


class AsyncCheckpointIO(CheckpointIO):
    """Lets Lightning go on while ptsave writes the checkpoint: the call copies the tensors once.

    As :class:`CheckpointIO`, and:

    * Lightning removes an older checkpoint right after the call that saves the new one.  Here it
      goes when the new one is durable, and stays if that fails.
    * An error of a save is raised by the next call that saves, loads or removes, and by the end of
      the Trainer's run (``teardown``).  Fabric has no such end: Python waits for unfinished saves
      when it exits, and warns of those that failed; ``teardown()`` does both earlier.
    * ``load_checkpoint`` waits for pending saves first.

    Parameters
    ----------
    fsync : bool, default True
        Whether older checkpoints go only when the new one survives power loss.  With False it
        survives the death of the process, not that of the machine.
    atomic, verify, storage_options, weights_only_check
        As for :class:`CheckpointIO`.
    max_staged_bytes, when_full
        Room for the copies, as for :func:`ptsave.async_save`.

    Examples
    --------
    >>> import lightning  # doctest: +SKIP
    >>> from ptsave.integrations.lightning import AsyncCheckpointIO  # doctest: +SKIP
    >>> trainer = lightning.Trainer(plugins=[AsyncCheckpointIO()])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        fsync: bool = True,
        atomic: bool = True,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
        max_staged_bytes: int | None = None,
        when_full: Literal["wait", "raise"] = "wait",
    ) -> None:
        super().__init__(
            fsync=fsync,
            atomic=atomic,
            verify=verify,
            storage_options=storage_options,
            weights_only_check=weights_only_check,
        )
        self._max_staged_bytes = max_staged_bytes
        self._when_full = when_full
        self._saves = PendingSaves()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Begin to save a checkpoint; then raise the error of an earlier one, if there is any."""
        options = self._storage_options if storage_options is None else storage_options
        self._saves.save(
            checkpoint,
            os.fspath(path),
            staged=lambda: self._staged(path, options),
            fsync=self._fsync,
            atomic=self._atomic,
            storage_options=options,
            weights_only_check=self._weights_only_check,
            max_staged_bytes=self._max_staged_bytes,
            when_full=self._when_full,
        )
        self._note_options(path, storage_options)
        self._saves.check()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Wait for pending saves, and load a checkpoint as :class:`CheckpointIO` does."""
        self._saves.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when the saves that have begun are durable."""
        self._saves.check()
        self._saves.remove(os.fspath(path), self._options_for(path))
        self._note_options(path, None)

    def teardown(self) -> None:
        """Wait for pending saves and removals; raise the error of one that failed."""
        self._saves.wait()
