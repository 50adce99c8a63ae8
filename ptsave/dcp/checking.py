"""Finds damage in a DCP checkpoint, by the checksums of all of its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ptsave.dcp.checkpoint import DcpCheckpoint
from ptsave.dcp.rank_files import RankFiles
from ptsave.errors import CorruptCheckpointError, bare_message
from ptsave.support.calls import progress_from


@dataclass(frozen=True)
class DcpDamage:
    """Damage in a file, or a contradiction in the metadata."""

    path: str
    reason: str
    offset: int | None = None  # where it begins in the file
    entries: list[str] = field(default_factory=list)  # flat names of what it affects


@dataclass
class DcpFindings:
    """The result of `find_dcp_damage`."""

    damage: list[DcpDamage] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)  # flat names of entries without checksums
    metadata_is_checked: bool = False  # it has a checksum, which is right


def find_dcp_damage(
    checkpoint: DcpCheckpoint, progress: Callable[[int], None] | None = None
) -> DcpFindings:
    """Read all files of a checkpoint, and compare everything with its checksums.

    Files of `ptsave.distributed` have a checksum for each block.  Files of torch's writer have one
    for each record of each item.  `progress` gets the number of bytes that are done.
    """
    found = DcpFindings()
    try:
        found.metadata_is_checked = checkpoint.metadata_is_checked()
    except CorruptCheckpointError as error:
        found.damage.append(_damage_of(error, checkpoint.metadata_path))
    wrong = {name: checkpoint.what_is_wrong(name) for name in checkpoint.sizes}
    for name, reason in wrong.items():
        if reason:
            entries = list(dict.fromkeys(item.name for item in checkpoint.items_in(name)))
            found.damage.append(DcpDamage(checkpoint.file(name), reason, None, entries))
    for tensor in checkpoint.tensors.values():
        if any(wrong[chunk.file] for chunk in tensor.chunks):
            continue  # reported already
        try:
            checkpoint.require_tensor(tensor)
        except CorruptCheckpointError as error:
            found.damage.append(_damage_of(error, checkpoint.metadata_path))
    done = 0
    for name, nbytes in checkpoint.sizes.items():
        if nbytes < 0 or (wrong[name] and name in checkpoint.checked):
            continue
        with checkpoint.rank_files(verify=True) as files:
            if name in checkpoint.checked:
                _check_blocks(checkpoint, files, name, found, progress_from(progress, done))
            else:
                _check_items(checkpoint, files, name, found, progress_from(progress, done))
        done += nbytes
    return found


def _check_blocks(
    checkpoint: DcpCheckpoint,
    files: RankFiles,
    name: str,
    found: DcpFindings,
    progress: Callable[[int], None] | None,
) -> None:
    nbytes = checkpoint.checked[name].nbytes
    for begin, end in files.damaged_blocks(name, progress):
        what = "block" if begin < nbytes else "table of checksums"
        entries = _entries_within(checkpoint, name, begin, end) if begin < nbytes else []
        found.damage.append(
            DcpDamage(checkpoint.file(name), f"the checksum of its {what} differs", begin, entries)
        )


def _entries_within(checkpoint: DcpCheckpoint, file: str, begin: int, end: int) -> list[str]:
    items = checkpoint.items_in(file)
    hit = [item.name for item in items if item.begin < end and item.end > begin]
    return list(dict.fromkeys(hit))


def _check_items(
    checkpoint: DcpCheckpoint,
    files: RankFiles,
    name: str,
    found: DcpFindings,
    progress: Callable[[int], None] | None,
) -> None:
    """Check the items of a file of torch's writer: each item is an archive."""
    path = checkpoint.file(name)
    unverified: dict[str, None] = dict.fromkeys(found.unverified)
    for item in checkpoint.items_in(name):
        if item.end > checkpoint.sizes[name]:
            continue  # reported already
        try:
            damage = files.damage_in(item.info, item.name)
            if damage is None:
                unverified[item.name] = None
            for each in damage or ():
                record = f"record {each.record} of {item.name}: {each.reason}"
                at = item.begin + each.offset
                found.damage.append(DcpDamage(path, record, at, [item.name]))
            if not damage and item.tensor is not None and item.chunk is not None:
                checkpoint.stored(files, item.tensor, item.chunk)
        except CorruptCheckpointError as error:
            found.damage.append(DcpDamage(path, bare_message(error, path), item.begin, [item.name]))
        except NotImplementedError:  # an extension of DCP has transformed it
            unverified[item.name] = None
        if progress is not None:
            progress(item.end)
    found.unverified = [*unverified]


def _damage_of(error: CorruptCheckpointError, path: str) -> DcpDamage:
    return DcpDamage(path, bare_message(error, path), None, list(error.entries))
