"""Verifies checkpoints of torch.distributed.checkpoint: all files of all ranks."""

from __future__ import annotations

import os

from ptsave.dcp.checking import DcpDamage, find_dcp_damage
from ptsave.dcp.checkpoint import DcpCheckpoint
from ptsave.errors import CorruptCheckpointError
from ptsave.inspection.findings import Problem, Verification
from ptsave.sources.ranges import FsspecFile
from ptsave.support.calls import ProgressCallback
from ptsave.support.text import count_text, some_of

_METADATA_UNCHECKED = (
    "its metadata has no checksum, as torch's writer gives it none: a name or a number in it that "
    "has changed and still makes sense is not found"
)


def verify_ranks(metadata: str | FsspecFile, progress: ProgressCallback | None) -> Verification:
    """Check a distributed checkpoint: every file that its metadata names, and every checksum.

    `metadata` is ``.metadata`` or ``__<rank>.metadata``: its path or, at a URL, the file.

    >>> import os, tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from ptsave.distributed import StorageWriter
    >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = dcp.save({"w": torch.ones(9)}, storage_writer=StorageWriter(folder))
    ...     found = verify_ranks(os.path.join(folder, ".metadata"), None)
    >>> found.problems, found.whole
    ([], ['w'])
    """
    metadata_path = metadata if isinstance(metadata, str) else metadata.name
    path = os.path.dirname(metadata_path) or "."
    try:
        checkpoint = DcpCheckpoint(metadata)
    except CorruptCheckpointError as error:
        reason = str(error).removeprefix(f"{metadata_path}: ")
        problem = Problem(f"{os.path.basename(metadata_path)}: {reason}", None, None, error.entries)
        return Verification(path, [problem], nbytes=_nbytes_of(metadata))
    found = find_dcp_damage(checkpoint, progress)
    lost = {name for damage in found.damage for name in damage.entries}
    names = [*checkpoint.tensors]
    remarks = []
    if not found.metadata_is_checked:
        remarks.append(_METADATA_UNCHECKED)
    if found.unverified:
        what = count_text(len(found.unverified), "item")
        remarks.append(
            f"unverified, as there are no checksums of them: {what}, {some_of(found.unverified, 3)}"
        )
    return Verification(
        path,
        [_problem_of(damage) for damage in found.damage],
        remarks,
        nbytes=checkpoint.nbytes,
        tensors=names,
        whole=[name for name in names if name not in lost],
        has_checksums=not found.unverified,
    )


def _nbytes_of(metadata: str | FsspecFile) -> int:
    return os.stat(metadata).st_size if isinstance(metadata, str) else metadata.nbytes


def _problem_of(damage: DcpDamage) -> Problem:
    name = os.path.basename(damage.path)
    return Problem(f"{name}: {damage.reason}", None, damage.offset, damage.entries)
