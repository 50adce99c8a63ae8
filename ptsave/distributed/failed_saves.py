"""Removes a rank's file of a save that has failed, when the rank saves again.

A save that ends removes what no metadata names.  One that fails cannot: only one rank knows why.
Without this, a loop that goes on after a full disk would add a file to it with each save.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ptsave.distributed.directory import CheckpointDirectory

__all__ = ["note_written", "remove_failed"]


@dataclass(frozen=True)
class _Written:
    """A file that this process has written.

    Attributes
    ----------
    name : str
        Its name.
    thread : threading.Thread
        Made the save, which has ended when the thread has, or makes another one.
    process : int
        Wrote it: one that was forked from it has not.
    """

    name: str
    thread: threading.Thread
    process: int

    @property
    def is_of_ended_save(self) -> bool:
        """Whether the save that wrote it goes on no more."""
        has_ended = self.thread is threading.current_thread() or not self.thread.is_alive()
        return has_ended and self.process == os.getpid()


_lock = threading.Lock()
_written: dict[tuple[str, int], list[_Written]] = {}  # by directory and rank


def note_written(directory: CheckpointDirectory, rank: int, name: str) -> None:
    """Remember a file that a save of this thread has written, and whose end is not known here."""
    key = os.path.abspath(directory.path), rank
    with _lock:
        found = _Written(name, threading.current_thread(), os.getpid())
        _written.setdefault(key, []).append(found)


def remove_failed(directory: CheckpointDirectory, rank: int) -> None:
    """Remove files of a rank's saves that have ended, unless they are the checkpoint.

    Raises
    ------
    OSError
        If the directory cannot be read, or a file not be removed.
    """
    key = os.path.abspath(directory.path), rank
    with _lock:
        all_written = _written.pop(key, [])
        ended = [each for each in all_written if each.is_of_ended_save]
        others = [each for each in all_written if each not in ended]
        if others:
            _written[key] = others
    directory.remove_unnamed([each.name for each in ended], rank)
