"""Checkpoint plug-ins for Lightning, but not yet derived from Lightning's base class.

``lightning`` and ``pytorch_lightning`` are the same code under two names, and each refuses the
other's classes.  So ptsave has a module for each name, which derives plug-ins for that library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from ptsave.contents.loading import load
from ptsave.integrations.pending_saves import (
    PendingSaves,
    StagedFile,
    make_parent,
    path_key,
    remove_checkpoint,
)
from ptsave.serialization import save
from ptsave.support.calls import check_flags
from ptsave.writing.targets import resolve_file

__all__ = ["AsyncCheckpointIO", "CheckpointIO"]


class CheckpointIO:
    """Lets Lightning save and load checkpoints with ptsave: atomic, verified, without extra copies.

    Pass it as ``lightning.Trainer(plugins=[CheckpointIO()])``, or to ``lightning.Fabric``.  Import
    it from :mod:`ptsave.integrations.lightning`.  If your program imports ``pytorch_lightning``,
    import it from :mod:`ptsave.integrations.pytorch_lightning`.

    Parameters
    ----------
    fsync : bool, default False
        Whether a saved checkpoint survives power loss when the call returns.  Lightning removes the
        older checkpoint after that.  Lightning's own plug-in does not wait for the disk.
    atomic : bool, default True
        As for :func:`ptsave.save`.
    verify : bool, default True
        Whether loading compares checksums.
    storage_options : mapping, optional
        Options for the file system of URLs.  The options of a ``save_checkpoint`` call
        take precedence, also when the saved checkpoint is later loaded or removed.
    weights_only_check : bool, default False
        As for :func:`ptsave.save`.

    Notes
    -----
    Strategies that write several files (FSDP, ModelParallel, DeepSpeed) do not use the plug-in.
    FSDP and ModelParallel can use :mod:`ptsave.distributed`: ``install(distributed=True)``.
    The method ``load_checkpoint`` returns the whole checkpoint in CPU memory, as Lightning expects.
    :func:`ptsave.load_checkpoint` loads a checkpoint into a model without this copy.
    The default ``weights_only=None`` means torch's default, also for ``http://`` URLs.  For these,
    Lightning's own plug-in uses False.

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
        # Options of save_checkpoint calls, by path, because other calls have no options.
        self._options_of: dict[str, Mapping[str, Any]] = {}
        self._weights_only_check = weights_only_check

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint; first make its directory, if it is missing.

        Raises
        ------
        SaveError
            If the file cannot be written; an older file is unchanged.  SaveError is an OSError.
        TypeError
            If there are `storage_options`, but the path is not a URL.
        """
        place, options = self._place_of(path, storage_options)
        try:
            save(checkpoint, place.path, **options)
            place.publish(fsync=self._fsync)
        finally:
            place.discard()
        self._note_options(path, storage_options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, by default to the CPU.

        Raises
        ------
        CorruptCheckpointError
            If the file is damaged.  The error names the record, and the entries that use it.
        FileNotFoundError
            If there is no such file.
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
        """Remove a checkpoint, which may be a file or a directory, if it exists."""
        remove_checkpoint(os.fspath(path), self._options_for(path))
        self._note_options(path, None)

    def teardown(self) -> None:
        """Do nothing, because no save is pending."""

    def _place_of(
        self, path: str | os.PathLike[str], storage_options: Any
    ) -> tuple[StagedFile, dict[str, Any]]:
        """Make a file's directory; return the place to write the file, and options of `save`."""
        options = self._storage_options if storage_options is None else storage_options
        make_parent(os.fspath(path), options)
        place = StagedFile(os.fspath(path), resolve_file(path, options) if self._atomic else None)
        return place, {
            "fsync": self._fsync,
            "atomic": self._atomic,
            "storage_options": options,
            "weights_only_check": self._weights_only_check,
        }

    def _options_for(self, path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
        return self._options_of.get(path_key(os.fspath(path)), self._storage_options)

    def _note_options(self, path: str | os.PathLike[str], options: Any) -> None:
        if options is None:
            self._options_of.pop(path_key(os.fspath(path)), None)
        else:
            self._options_of[path_key(os.fspath(path))] = options


class AsyncCheckpointIO(CheckpointIO):
    """Saves in the background: a call copies the tensors once, and training goes on.

    Differences from :class:`CheckpointIO`:

    * Lightning removes an older checkpoint right after the call that saves the new one.  This
      class delays the removal until the new one is written, and removes nothing if the save fails.
    * The next call that saves, loads or removes raises the error of a failed save.  The end of the
      Trainer's run (``teardown``) also raises it.  With Fabric, call ``teardown()`` yourself.
      Without this call, Python waits for unfinished saves at exit, and warns of failed ones.
    * ``load_checkpoint`` waits for pending saves first.

    Parameters
    ----------
    fsync : bool, default True
        Whether older checkpoints stay until the new one is safe from power loss.  With
        False, the new one survives the end of the process, but perhaps not a power loss.
    atomic, verify, storage_options, weights_only_check
        As for :class:`CheckpointIO`.
    max_staged_bytes, when_full
        Limit of the copies, as for :func:`ptsave.async_save`.

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
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Begin to save a checkpoint; then, if an earlier save failed, raise its error."""
        place, options = self._place_of(path, storage_options)
        self._saves.save(
            checkpoint,
            os.fspath(path),
            place,
            max_staged_bytes=self._max_staged_bytes,
            when_full=self._when_full,
            **options,
        )
        self._note_options(path, storage_options)
        self._saves.check()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Wait for pending saves, then load a checkpoint as :class:`CheckpointIO` does."""
        self._saves.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when all earlier saves are written; keep it if one of them fails."""
        self._saves.check()
        self._saves.remove(os.fspath(path), self._options_for(path))
        self._note_options(path, None)

    def teardown(self) -> None:
        """Wait for pending saves and removals, and raise the error of a failed one."""
        self._saves.wait()
