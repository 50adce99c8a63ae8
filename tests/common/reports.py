"""Reports on a checkpoint, a directory or a file object, which commands put together themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ptsave.contents.directories import CheckpointFiles, checkpoint_files
from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.inspection.reports import FileListing, Problem, Verification, listing_of
from ptsave.inspection.verification import verify_all
from ptsave.sources.locations import position_kept


def list_file(f: Any, *, storage_options: Mapping[str, Any] | None = None) -> FileListing:
    """Return the listing of a checkpoint; several files give one listing of all entries."""
    with position_kept(f):
        return listing_of(open_checkpoint(f, OpenOptions(storage_options)))


class DirectoryVerification(NamedTuple):
    """The results for all files of a directory, and its own problems."""

    contents: CheckpointFiles
    files: list[Verification]
    problems: list[Problem]

    @property
    def is_damaged(self) -> bool:
        return bool(self.problems) or any(file.problems for file in self.files)


def verify_directory(
    f: Any,
    progress: Callable[[int], None] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> DirectoryVerification:
    """Check every checkpoint in a directory."""
    with position_kept(f):
        contents = checkpoint_files(f, storage_options)
        return DirectoryVerification(contents, *verify_all(contents, progress))
