"""Tells a checkpoint that is being replaced while it is read from one that lacks a file.

A save removes the files of the checkpoint before once its own metadata has the name.  So who has
read the old metadata, and opens the files late, may find that they are gone.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ptsave.sources.file_limits import Identity, identity_of

__all__ = ["ReadMetadata", "replaced"]


def replaced(directory: str) -> OSError:
    """Return the error for a checkpoint in whose place another one is by now."""
    return OSError(
        errno.ESTALE,
        "another save has replaced the checkpoint while this one was read, and has removed its "
        "files: load it again",
        directory,
    )


@dataclass(frozen=True)
class ReadMetadata:
    """A metadata file, as it was when it was read.

    Attributes
    ----------
    path : str
        The file.
    identity : tuple
        Taken before it was read: a file that is replaced meanwhile counts as changed.
    """

    path: str
    identity: Identity

    @classmethod
    def of(cls, path: str) -> ReadMetadata:
        """Return it of a file that is read next; `OSError` if there is none."""
        return cls(path, identity_of(path))

    @property
    def has_changed(self) -> bool:
        """Whether another file has its name by now, or none."""
        try:
            return identity_of(self.path) != self.identity
        except FileNotFoundError:  # torch's writer removes it before it renames the next one
            return True

    @property
    def directory(self) -> str:
        """The directory of the checkpoint."""
        return os.path.dirname(self.path) or "."
