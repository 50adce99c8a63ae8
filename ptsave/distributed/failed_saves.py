"""Removes a rank's file of a failed save when the rank saves again.

A save that succeeds removes the files that no metadata names.  A save that fails cannot: only one
rank knows why.  Without this module, a loop that goes on after a full disk would add a file with
each save.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from ptsave.distributed.directory import CheckpointDirectory


@dataclass(frozen=True)
class _Written:
    """A file that this process has written."""

    name: str
    thread: threading.Thread  # its save is over when the thread has ended, or saves again
    process: int  # id of the writer; a process forked from it has not written the file

    @property
    def is_of_ended_save(self) -> bool:
        """Whether the save that has written it is over."""
        has_ended = self.thread is threading.current_thread() or not self.thread.is_alive()
        return has_ended and self.process == os.getpid()


_lock = threading.Lock()
_written: dict[tuple[str, int], list[_Written]] = {}  # by directory and rank


def note_written(directory: CheckpointDirectory, rank: int, name: str) -> None:
    """Remember a file that this thread's save has written: its end is not known here."""
    key = os.path.abspath(directory.path), rank
    with _lock:
        found = _Written(name, threading.current_thread(), os.getpid())
        _written.setdefault(key, []).append(found)


def remove_failed(directory: CheckpointDirectory, rank: int) -> None:
    """Remove the files of a rank's ended saves, unless metadata names them."""
    key = os.path.abspath(directory.path), rank
    with _lock:
        all_written = _written.pop(key, [])
        ended = [each for each in all_written if each.is_of_ended_save]
        others = [each for each in all_written if each not in ended]
        if others:
            _written[key] = others
    directory.remove_unnamed([each.name for each in ended], rank)
