"""Archives whose files are open only while they are read: a set may have more than may be open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ptsave import _C
from ptsave.sources.ranges import LocalFile

__all__ = ["Parking"]


class Parking:
    """Opens the file of an archive for those that read it, and closes it behind the last of them.

    Safe for concurrent use.

    Parameters
    ----------
    engine : _C.Reader
        The archive, whose file is closed at once.
    file : LocalFile
        The same file, parked: it says where it is, and knows it again.
    direct : bool
        Whether it is read past the page cache.
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
        """Have the file open within a block.

        Raises
        ------
        OSError
            If it cannot be opened any more, or is another one by now.
        """
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
