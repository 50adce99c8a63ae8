"""The parts of a staged folder that the ranks of a job write while training goes on.

A collective call in the background would mix with those of the training.  So each rank locks a file
beside the folder while it writes, and leaves its outcome there for the rank that publishes the
folder.  An unlocked file without an outcome means that its process has died.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ptsave.errors import SaveError
from ptsave.integrations.staged_folders import StagedFolder
from ptsave.support.rank_lock import RankLock, last_word_of

__all__ = ["FolderParts"]

_WRITTEN = "written"
_MAX_N_CHARACTERS = 2000  # of an error
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class FolderParts:
    """The ranks' parts of a folder that all ranks see; `rank` is this process's.

    A second process with the same rank is a RuntimeError.  A file system without locks is an
    OSError.
    """

    def __init__(self, folder: StagedFolder, rank: int, size: int) -> None:
        os.makedirs(folder.root, exist_ok=True)
        self._folder, self._rank, self._size = folder, rank, size
        self._lock = RankLock(Path(folder.root), rank, size)

    def tell(self, error: BaseException | None) -> None:
        """Report that this rank's part is written, or its error."""
        text = _WRITTEN if error is None else f"{type(error).__name__}: {error}"
        self._lock.leave(text[:_MAX_N_CHARACTERS])

    def wait(self) -> None:
        """Wait for the other ranks' parts; a rank that failed, or has died, is a SaveError."""
        words = {rank: self._word_of(rank) for rank in range(self._size) if rank != self._rank}
        self._lock.release()
        for rank, word in words.items():
            if word != _WRITTEN:
                problem = word or "it has ended, or does not see this file system"
                raise SaveError(
                    f"{self._folder.final}: rank {rank} could not write its part of the "
                    f"checkpoint: {problem}"
                )

    def _word_of(self, rank: int) -> str:
        pause = _SHORTEST_PAUSE_S
        while (word := last_word_of(Path(self._folder.root), rank, self._size)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return word
