"""Finds files whole without torch; any other one is `verification`'s to judge."""

from __future__ import annotations

from collections.abc import Iterator

from ptsave import _core
from ptsave.contents.outline import outline_of
from ptsave.inspection.findings import Verification
from ptsave.sources.ranges import LocalFile
from ptsave.sources.urls import is_url
from ptsave.support import config
from ptsave.support.progress import ProgressCallback
from ptsave.tree.tree import EntryTree

__all__ = ["whole_file"]

_READ_AT_ONCE_NBYTES = 512 << 20  # between two movements of a progress bar


def whole_file(path: str, progress: ProgressCallback | None) -> Verification | None:
    """Return the result of `verify_file` for a plain local archive that is whole.

    None for anything else, damage included: it takes torch to say what is left of that.

    Parameters
    ----------
    path : str
        The file.
    progress : callable or None
        Gets the number of bytes that have been looked at.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     torch.save({"weight": torch.ones(2, 3)}, path)
    ...     whole_file(path, None).whole
    ['weight']
    """
    if is_url(path):
        return None
    try:
        source = LocalFile.open(path)
    except OSError:
        return None
    try:
        outline = outline_of(source)
        if outline is None or outline.archive is None or not outline.archive.has_crcs:
            return None
        tree = EntryTree(outline.obj)
        if not tree.is_whole or not _is_whole(outline.archive, progress):
            return None
        names = [name for name, _ in tree.named_tensors()]
        return Verification(
            path,
            [],
            n_records=outline.archive.n_records,
            nbytes=outline.nbytes,
            tensors=names or None,
            whole=names or None,
        )
    except (OSError, _core.FormatError):
        return None
    finally:
        source.close()


def _is_whole(archive: _core.Archive, progress: ProgressCallback | None) -> bool:
    n_threads = config.current().n_readers
    for begin, end, limit in _batches(archive.limits()):
        if not archive.are_whole(begin, end, n_threads=n_threads):
            return False
        if progress is not None:
            progress(limit)
    return True


def _batches(limits: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of records, by their numbers, and where each range ends in the file."""
    begin = done = 0
    for end, limit in enumerate(limits, 1):
        if limit - done >= _READ_AT_ONCE_NBYTES or end == len(limits):
            yield begin, end, limit
            begin, done = end, limit
