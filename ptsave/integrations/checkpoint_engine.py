"""A checkpoint engine as DeepSpeed asks for it."""

from __future__ import annotations

import os
from typing import Any

from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.contents.loading import load
from ptsave.serialization import save
from ptsave.support.flags import check_flags
from ptsave.support.syncing import sync_path

__all__ = ["CheckpointEngine"]


class CheckpointEngine:
    """Lets DeepSpeed save and load by ptsave; one commit makes all files of a tag durable.

    DeepSpeed has no place to register one: ``engine.checkpoint_engine = CheckpointEngine()`` after
    ``deepspeed.initialize``.  Its own writes torch's old format by default; this one writes zip
    archives, which it reads.

    Parameters
    ----------
    config_params : object, optional
        DeepSpeed's configuration, which is not looked at.
    in_background : bool, default False
        Whether training goes on while the files are written: DeepSpeed calls such an engine
        decoupled, and commits before the next step of the optimizer.
    fsync : bool, default True
        Whether the files of a tag survive power loss once it is committed, before DeepSpeed points
        ``latest`` to it.
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
        self._paths: list[str] = []
        self._written: list[str] = []  # by futures, which sync the files themselves
        self._futures: list[SaveFuture] = []

    def create(self, info: Any) -> None:
        """Begin a checkpoint.

        Raises
        ------
        SaveError
            If one before it was not committed, and has failed.
        """
        self._finish()
        self._commit_info = info if self._in_background else None

    def save(self, state_dict: Any, path: str) -> None:
        """Save one file of it."""
        if self._in_background:
            self._futures.append(async_save(state_dict, path, fsync=self._fsync))
            self._written.append(path)
        else:
            save(state_dict, path)
            self._paths.append(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file, with everything that it holds, as DeepSpeed's own engine does.

        Raises
        ------
        CorruptCheckpointError
            If it is damaged.
        """
        return load(path, map_location, weights_only=False, verify=self._verify)

    def commit(self, info: Any) -> bool:
        """Return when all files of the checkpoint are there, and on the disk.

        Raises
        ------
        SaveError
            If one of them could not be written.
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
        """Wait for files that are being written."""
        self._finish()

    def _finish(self) -> None:
        futures, self._futures = self._futures, []
        paths, self._paths = self._paths, []
        written, self._written = self._written, []
        for future in futures:  # all of them, so that none is being written after an error
            future.exception()
        for future in futures:
            future.result()
        if self._fsync:
            folders = {os.path.dirname(os.path.abspath(path)) for path in [*paths, *written]}
            # DeepSpeed makes the directory of a tag, whose own name is in the one above it.
            above = {os.path.dirname(folder) for folder in folders}
            for path in [*paths, *sorted(folders | above)]:
                sync_path(path)
