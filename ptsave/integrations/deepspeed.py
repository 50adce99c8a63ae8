"""A checkpoint engine that lets DeepSpeed save and load with ptsave."""

from __future__ import annotations

import os
from typing import Any

from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.contents.loading import load
from ptsave.integrations.lazy_classes import classes_over
from ptsave.serialization import save
from ptsave.sources.locations import sync_path
from ptsave.support.calls import check_flags

__all__ = ["CheckpointEngine"]


class CheckpointEngine:
    """Lets DeepSpeed save and load with ptsave; one commit makes all files of a tag durable.

    DeepSpeed cannot register an engine: set ``engine.checkpoint_engine = CheckpointEngine()`` after
    ``deepspeed.initialize``.  DeepSpeed's own engine writes torch's old format by default.  This
    engine writes zip archives, which DeepSpeed's engine can read, too.

    Parameters
    ----------
    config_params : object, optional
        DeepSpeed's configuration; ignored.
    in_background : bool, default False
        Whether training goes on while the files are written.  DeepSpeed calls such an engine
        "decoupled", and commits the files before the optimizer's next step.
    fsync : bool, default True
        Whether the files of a tag survive power loss when the commit returns.  After that,
        DeepSpeed writes the tag into the file ``latest``.
    verify : bool, default True
        Whether loading compares checksums.

    Examples
    --------
    >>> from ptsave.integrations.deepspeed import CheckpointEngine  # doctest: +SKIP
    >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> engine.checkpoint_engine = CheckpointEngine()  # doctest: +SKIP
    """

    def __init__(
        self,
        config_params: Any = None,
        *,
        in_background: bool = False,
        fsync: bool = True,
        verify: bool = True,
    ) -> None:
        check_flags(in_background=in_background, fsync=fsync, verify=verify)
        super().__init__(config_params)  # type: ignore[call-arg]
        self.name = "PtsaveCheckpointEngine"
        self._in_background = in_background
        self._fsync = fsync
        self._verify = verify
        self._commit_info: Any = None
        self._saves: list[tuple[str, SaveFuture | None]] = []  # a future syncs its file itself

    def create(self, info: Any) -> None:
        """Begin a checkpoint.

        Raises
        ------
        SaveError
            If a file of an earlier, uncommitted checkpoint could not be written.
        """
        self._finish()
        self._commit_info = info if self._in_background else None

    def save(self, state_dict: Any, path: str) -> None:
        """Save one file of the checkpoint or, with `in_background`, begin to save it."""
        if self._in_background:
            self._saves.append((path, async_save(state_dict, path, fsync=self._fsync)))
        else:
            save(state_dict, path)
            self._saves.append((path, None))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file that may contain any objects (``weights_only=False``), as DeepSpeed does.

        Raises
        ------
        CorruptCheckpointError
            If the file is damaged.
        """
        return load(path, map_location, weights_only=False, verify=self._verify)

    def commit(self, info: Any) -> bool:
        """Wait until all files are written; with `fsync`, until they are on the disk.

        Raises
        ------
        SaveError
            If a file could not be written.
        """
        self._finish()
        self._commit_info = None
        return True

    def is_decoupled(self) -> bool:
        return self._in_background

    def set_commit_info(self, info: Any) -> None:
        self._commit_info = info

    def get_commit_info(self) -> Any:
        return self._commit_info

    def cleanup(self) -> None:
        """Wait for pending writes."""
        self._finish()

    def _finish(self) -> None:
        saves, self._saves = self._saves, []
        futures = [future for _, future in saves if future is not None]
        for future in futures:  # wait for all, so that no file is written after an error
            future.exception()
        for future in futures:
            future.result()
        if self._fsync:
            folders = {os.path.dirname(os.path.abspath(path)) for path, _ in saves}
            # DeepSpeed makes the tag's directory; its name is durable if the parent is synced.
            above = {os.path.dirname(folder) for folder in folders}
            paths = [path for path, future in saves if future is None]
            for path in [*paths, *sorted(folders | above)]:
                sync_path(path)


_BASE = "deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"
__getattr__ = classes_over(__name__, {"CheckpointEngine": _BASE}, package="deepspeed")
