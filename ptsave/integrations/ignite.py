"""Save handlers that let ignite's ``Checkpoint`` save with ptsave."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptsave.integrations.lazy_classes import classes_over
from ptsave.integrations.pending_saves import PendingSaves, make_parent, remove_checkpoint
from ptsave.serialization import save
from ptsave.support.calls import check_flags
from ptsave.writing.targets import resolve

__all__ = ["AsyncSaveHandler", "SaveHandler"]


class _UrlFolder(str):
    """A directory at a URL; ignite uses ``/`` to join it with a file name, as with a `Path`."""

    __slots__ = ()

    def __truediv__(self, name: str) -> str:
        return f"{self.rstrip('/')}/{name}"


class SaveHandler:
    """A ``DiskSaver`` that lets ignite's ``Checkpoint`` save with ptsave.

    Parameters
    ----------
    dirname : str or os.PathLike
        Directory of the checkpoints, or a URL.
    atomic : bool, default True
        As for :func:`ptsave.save`.
    create_dir, require_empty : bool, default True
        As for a ``DiskSaver``: whether to make the directory, and whether ``.pt`` files in it are
        an error.  At a URL, the directory is always made and never checked.
    save_on_rank : int, default 0
        The rank that saves.
    fsync : bool, default False
        Whether a checkpoint survives power loss when the call returns.
    storage_options : mapping, optional
        Options for the file system of a URL.
    weights_only_check : bool, default False
        As for :func:`ptsave.save`.
    **kwargs : object
        More options of :func:`torch.save`, such as ``pickle_protocol``.

    Raises
    ------
    ValueError
        If `require_empty` is true and the directory has ``.pt`` files, or if `create_dir` is False
        and the directory does not exist.

    Examples
    --------
    >>> from ignite.handlers import Checkpoint  # doctest: +SKIP
    >>> from ptsave.integrations.ignite import SaveHandler  # doctest: +SKIP
    >>> handler = Checkpoint({"model": model}, SaveHandler("run"), n_saved=2)  # doctest: +SKIP
    """

    dirname: Path | _UrlFolder
    save_on_rank: int

    def __init__(
        self,
        dirname: str | os.PathLike[str],
        atomic: bool = True,
        create_dir: bool = True,
        require_empty: bool = True,
        save_on_rank: int = 0,
        *,
        fsync: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        weights_only_check: bool = False,
        **kwargs: Any,
    ) -> None:
        check_flags(
            atomic=atomic,
            create_dir=create_dir,
            require_empty=require_empty,
            fsync=fsync,
            weights_only_check=weights_only_check,
        )
        folder = resolve(dirname, storage_options)
        is_url = not isinstance(folder, str)
        self._options: dict[str, Any] = {
            "fsync": fsync,
            "atomic": atomic,
            "storage_options": storage_options if is_url else None,
            "weights_only_check": weights_only_check,
            **kwargs,
        }
        inspect.signature(save).bind(None, "", **self._options)  # raises now, not at the first save
        # The DiskSaver makes a local directory and checks its files.
        initialize: Any = super().__init__
        initialize(
            "." if is_url else folder,
            atomic=atomic,
            create_dir=create_dir,
            require_empty=require_empty and not is_url,
            save_on_rank=save_on_rank,
            **kwargs,
        )
        if is_url:
            self.dirname = _UrlFolder(os.fspath(dirname))

    def __call__(
        self,
        checkpoint: Mapping[str, Any],
        filename: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """If this is the rank that saves, save a checkpoint as `filename` in the directory."""
        if self._saves_here():
            path = os.fspath(self.dirname / filename)
            make_parent(path, self._options["storage_options"])
            self._save(checkpoint, path)

    def remove(self, filename: str) -> None:
        """If this is the rank that saves, remove a checkpoint."""
        if self._saves_here():
            self._remove(os.fspath(self.dirname / filename))

    def _save(self, checkpoint: Mapping[str, Any], path: str) -> None:
        save(checkpoint, path, **self._options)

    def _remove(self, path: str) -> None:
        remove_checkpoint(path, self._options["storage_options"])

    def _saves_here(self) -> bool:
        import ignite.distributed

        return bool(ignite.distributed.get_rank() == self.save_on_rank)


class AsyncSaveHandler(SaveHandler):
    """Saves in the background: a call copies the tensors once, and training goes on.

    A checkpoint that ignite removes is deleted only when all earlier saves are written.  If one of
    these saves fails, the checkpoint is kept.  The next call raises the error of a failed save.
    At the end of the run, call :meth:`wait`: ``trainer.add_event_handler(Events.COMPLETED,
    lambda: handler.wait())``.  Python also waits for unfinished saves when it exits.

    Parameters
    ----------
    *args : object
        ``dirname`` and other options of :class:`SaveHandler`.
    fsync : bool, default True
        Whether older checkpoints stay until the new one is safe from power loss.
    **kwargs : object
        Options of :class:`SaveHandler`.

    Examples
    --------
    >>> from ptsave.integrations.ignite import AsyncSaveHandler  # doctest: +SKIP
    >>> handler = AsyncSaveHandler("run")  # doctest: +SKIP
    """

    def __init__(self, *args: Any, fsync: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, fsync=fsync, **kwargs)
        self._saves = PendingSaves()

    def _save(self, checkpoint: Mapping[str, Any], path: str) -> None:
        self._saves.save(checkpoint, path, **self._options)
        self._saves.check()

    def _remove(self, path: str) -> None:
        self._saves.check()
        self._saves.remove(path, self._options["storage_options"])

    def wait(self) -> None:
        """Wait for pending saves and removals, and raise the error of a failed one."""
        self._saves.wait()


_BASE = "ignite.handlers.checkpoint.DiskSaver"
__getattr__ = classes_over(__name__, dict.fromkeys(__all__, _BASE), package="pytorch-ignite")
