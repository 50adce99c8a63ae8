"""Verifies whole files without torch; `verification` judges all other files."""

from __future__ import annotations

from collections.abc import Iterator

from ptsave import _core
from ptsave.contents.outline import Outline, outline_of
from ptsave.errors import CorruptCheckpointError
from ptsave.inspection.findings import NO_CHECKSUMS, Verification
from ptsave.sources.ranges import LocalFile
from ptsave.sources.urls import is_url
from ptsave.support import config
from ptsave.support.calls import ProgressCallback
from ptsave.tree.tree import EntryTree

_READ_AT_ONCE_NBYTES = 512 << 20  # between two updates of a progress bar


def whole_file(path: str, progress: ProgressCallback | None) -> Verification | None:
    """Return the result of `verify_file` for a plain local archive or safetensors file, if whole.

    None for any other file, also a damaged one: only torch can tell what is left of it.

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
        return None if outline is None else _verified(outline, progress)
    except (OSError, CorruptCheckpointError):
        return None
    finally:
        source.close()


def _verified(outline: Outline, progress: ProgressCallback | None) -> Verification | None:
    tree = EntryTree(outline.obj)
    if not tree.is_whole:
        return None
    path, nbytes, archive = outline.path, outline.nbytes, outline.archive
    names = [name for name, _ in tree.named_tensors()]
    if outline.kind == "safetensors":
        return Verification(path, [], [NO_CHECKSUMS], 0, nbytes, names, names, has_checksums=False)
    if archive is None or not archive.has_crcs or not _is_whole(archive, progress):
        return None
    known = names or None
    return Verification(path, [], [], archive.n_records, nbytes, known, known)


def _is_whole(archive: _core.Archive, progress: ProgressCallback | None) -> bool:
    n_threads = config.current().n_readers
    for begin, end, limit in _batches(archive.limits()):
        if not archive.are_whole(begin, end, n_threads=n_threads):
            return False
        if progress is not None:
            progress(limit)
    return True


def _batches(limits: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of records, by their numbers, and the offset where each range ends."""
    begin = done = 0
    for end, limit in enumerate(limits, 1):
        if limit - done >= _READ_AT_ONCE_NBYTES or end == len(limits):
            yield begin, end, limit
            begin, done = end, limit
