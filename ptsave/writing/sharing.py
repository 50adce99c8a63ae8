"""`Base`: an older file, with which the file of a save shares unchanged bytes.

A local file shares blocks if its file system can (XFS, btrfs, servers of NFS 4.2).  The engine
compares the blocks' hashes, if this process has written the older file, or else the bytes.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ptsave import _C
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError
from ptsave.sources.locations import Identity
from ptsave.sources.ranges import LocalFile

if TYPE_CHECKING:
    from ptsave.sources.url_locations import UrlLocation

_MAX_N_HASHED = 8
# The hashes of the files that this process wrote last: 0.02 % of their bytes.
_hashed: OrderedDict[Identity, _C.FileHashes] = OrderedDict()


class SavedBytes(NamedTuple):
    """The bytes of a file that a save has written, and those that it shares with an older file.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     old, new = os.path.join(folder, "old.pt"), os.path.join(folder, "new.pt")
    ...     ptsave.save(torch.ones(1 << 20), old)
    ...     saved = ptsave.save(torch.ones(1 << 20), new, base=old)
    ...     saved.written + saved.shared == os.path.getsize(new)
    True
    """

    written: int
    shared: int


@dataclass(eq=False)
class Base:
    """The older file.  Without a `target`, only the new file's hashes are computed."""

    target: str | UrlLocation | None
    is_required: bool  # whether it must be an archive of torch

    def sharing_for(self, plan: _C.WritePlan) -> _C.Sharing | None:
        """Return the engine's object for a write of `plan`; None if there is no base."""
        if self.target is None:
            return _C.Sharing(plan)
        if not isinstance(self.target, str):
            return None
        try:
            with closing(LocalFile.open(self.target)) as source:
                return _sharing(source, plan)
        except (OSError, CorruptCheckpointError, UnsupportedSourceError):
            if self.is_required:
                raise
            return _C.Sharing(plan)

    def location(self) -> UrlLocation | None:
        """Return the base at a URL; None if there is none, or if it is a local file."""
        if self.target is None or isinstance(self.target, str):
            return None
        if self.is_required and not self.target.is_there():
            raise FileNotFoundError(errno.ENOENT, "the base does not exist", self.target.path)
        return self.target

    def remember(self, sharing: _C.Sharing) -> None:
        """Keep the hashes of the new file after a write, for a save that has this file as base."""
        if sharing.hashed is None:
            return
        identity, hashes = sharing.hashed
        _hashed[identity] = hashes
        while len(_hashed) > _MAX_N_HASHED:
            _hashed.popitem(last=False)


def _sharing(source: LocalFile, plan: _C.WritePlan) -> _C.Sharing:
    if source.kind != "zip":
        raise UnsupportedSourceError(
            f"{source.name}: a base must be a file in torch's format, as ptsave.save and "
            "torch.save write it"
        )
    status = os.fstat(source.descriptor)
    # The time of a change, because programs may set back st_mtime_ns.
    identity = status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns
    hashes = _hashed.get(identity)
    if hashes is not None:
        _hashed.move_to_end(identity)
    return _C.Sharing(plan, source.for_engine, hashes)
