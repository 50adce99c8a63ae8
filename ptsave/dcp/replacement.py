"""Tells a checkpoint that is replaced while it is read from one that lacks a file.

A save removes the files of the previous checkpoint once its own metadata has the name.  A reader of
the old metadata that opens those files late may find that they are gone.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ptsave.sources.local import Identity, identity_of


def replaced(directory: str) -> OSError:
    """Return the error for a checkpoint that was replaced while it was read."""
    return OSError(
        errno.ESTALE,
        "another save has replaced the checkpoint while this one was read, and has removed its "
        "files: load it again",
        directory,
    )


@dataclass(frozen=True)
class ReadMetadata:
    """A metadata file, as it was when it was read."""

    path: str
    identity: Identity  # taken before the read, so that a replacement during it counts

    @classmethod
    def of(cls, path: str) -> ReadMetadata:
        """Return the identity of a file that is about to be read."""
        return cls(path, identity_of(path))

    @property
    def has_changed(self) -> bool:
        """Whether the name now belongs to another file, or to none."""
        try:
            return identity_of(self.path) != self.identity
        except FileNotFoundError:  # torch's writer removes it before it renames the next one
            return True

    @property
    def directory(self) -> str:
        """The directory of the checkpoint."""
        return os.path.dirname(self.path) or "."
