"""Handlers that save checkpoints as ignite asks for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ptsave.integrations.pending_saves import PendingSaves, make_parent, remove_checkpoint
from ptsave.serialization import save

__all__ = ["AsyncSaveHandler", "SaveHandler"]


class SaveHandler:
    """Lets ignite's ``Checkpoint`` save by ptsave, in the place of a ``DiskSaver``.

    Parameters
    ----------
    dirname : str or os.PathLike
        Directory of the checkpoints, made if it is not there; or a URL.
    fsync : bool, default False
        Whether a checkpoint survives power loss when the call has returned.
    atomic : bool, default True
        As for :func:`ptsave.save`.
    require_empty : bool, default True
        Whether ``.pt`` files that are in a local directory are an error, as for a ``DiskSaver``.
    save_on_rank : int, default 0
        The rank that saves.
    storage_options : mapping, optional
        For the file system of a URL.
    weights_only_check : bool, default False
        As for :func:`ptsave.save`.

    Raises
    ------
    ValueError
        If there are ``.pt`` files in the directory, and `require_empty`.

    Examples
    --------
    >>> from ignite.handlers import Checkpoint  # doctest: +SKIP
    >>> from ptsave.integrations.ignite import SaveHandler  # doctest: +SKIP
    >>> handler = Checkpoint({"model": model}, SaveHandler("run"), n_saved=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        dirname: str | os.PathLike[str],
        *,
        fsync: bool = False,
        atomic: bool = True,
        require_empty: bool = True,
        save_on_rank: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
    ) -> None:
        super().__init__()
        self.dirname = os.path.expanduser(os.fspath(dirname))
        self.save_on_rank = save_on_rank
        self._options: dict[str, Any] = {
            "fsync": fsync,
            "atomic": atomic,
            "storage_options": storage_options,
            "weights_only_check": weights_only_check,
        }
        if require_empty and self._saves_here() and os.path.isdir(self.dirname):
            found = sorted(name for name in os.listdir(self.dirname) if name.endswith(".pt"))
            if found:
                raise ValueError(
                    f"Files {found} with extension '.pt' are already present in the directory "
                    f"{self.dirname}. If you want to use this directory anyway, pass "
                    "`require_empty=False`."
                )

    def __call__(
        self,
        checkpoint: Mapping[str, Any],
        filename: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint under a name in the directory."""
        if self._saves_here():
            path = self._path_of(filename)
            make_parent(path, self._options["storage_options"])
            save(checkpoint, path, **self._options)

    def remove(self, filename: str) -> None:
        """Remove a checkpoint."""
        if self._saves_here():
            remove_checkpoint(self._path_of(filename), self._options["storage_options"])

    def _path_of(self, filename: str) -> str:
        return f"{self.dirname.rstrip('/')}/{filename}"

    def _saves_here(self) -> bool:
        import ignite.distributed

        return bool(ignite.distributed.get_rank() == self.save_on_rank)


class AsyncSaveHandler(SaveHandler):
    """Lets ignite go on while ptsave writes: the call copies the tensors once.

    As :class:`SaveHandler`, and: a checkpoint that ignite removes goes when the saves that were
    begun before are durable, and stays if one of them fails.  Such an error is raised by the next
    call, or by :meth:`wait`, for the end of the run (``trainer.add_event_handler(Events.COMPLETED,
    lambda: handler.wait())``).  Python waits for unfinished saves when it exits.

    Parameters
    ----------
    dirname, atomic, require_empty, save_on_rank, storage_options, weights_only_check
        As for :class:`SaveHandler`.
    fsync : bool, default True
        Whether older checkpoints go only when the new one survives power loss.

    Examples
    --------
    >>> from ptsave.integrations.ignite import AsyncSaveHandler  # doctest: +SKIP
    >>> handler = AsyncSaveHandler("run")  # doctest: +SKIP
    """

    def __init__(
        self,
        dirname: str | os.PathLike[str],
        *,
        fsync: bool = True,
        atomic: bool = True,
        require_empty: bool = True,
        save_on_rank: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
    ) -> None:
        super().__init__(
            dirname,
            fsync=fsync,
            atomic=atomic,
            require_empty=require_empty,
            save_on_rank=save_on_rank,
            storage_options=storage_options,
            weights_only_check=weights_only_check,
        )
        self._saves = PendingSaves()

    def __call__(
        self,
        checkpoint: Mapping[str, Any],
        filename: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save a checkpoint; then raise the error of an earlier one, if there is any."""
        if self._saves_here():
            self._saves.save(checkpoint, self._path_of(filename), **self._options)
            self._saves.check()

    def remove(self, filename: str) -> None:
        """Remove a checkpoint when the saves that have begun are durable."""
        if self._saves_here():
            self._saves.check()
            self._saves.remove(self._path_of(filename), self._options["storage_options"])

    def wait(self) -> None:
        """Wait for pending saves and removals; raise the error of one that failed."""
        self._saves.wait()
