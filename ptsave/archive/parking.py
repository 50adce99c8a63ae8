"""Keeps archive files open only while they are read, as a set may have too many files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ptsave import _C
from ptsave.sources.ranges import LocalFile


class Parking:
    """Opens an archive's file for its readers, and closes it after the last reader.

    Closes the engine's file at once.  `file` is the same file, parked: it has the path, and
    recognises the file.  `direct` reads past the page cache.  Safe for concurrent use.
    """

    def __init__(self, engine: _C.Reader, file: LocalFile, *, direct: bool) -> None:
        self._engine = engine
        self._file = file
        self._direct = direct
        self._lock = threading.Lock()
        self._n_users = 0
        engine.close_file()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the file open within a block; raises OSError if it is gone or has been replaced."""
        with self._lock:
            if self._n_users == 0:
                with self._file.opened() as file:
                    self._engine.lend_file(file.descriptor, file.begin, direct=self._direct)
            self._n_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_users -= 1
                if self._n_users == 0:
                    self._engine.close_file()
