"""Storage and resharding with ptsave for torch_checkpointing, in place of its own.

The resharder reads the pieces of all files at once.  The library's own reads piece by piece, with a
thread for each file.  For a piece of columns it reads everything from the first element to the
last; the engine skips the gaps.
"""

from __future__ import annotations

import logging
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.dcp.rank_files import RankFiles
from ptsave.dcp.read_plan import ReadPlan, StoredTensor
from ptsave.errors import CorruptCheckpointError
from ptsave.integrations import engine_storage
from ptsave.integrations.engine_storage import ReadStream, Storage, StorageConfig
from ptsave.integrations.lazy_classes import classes_over
from ptsave.support.calls import check_flags

__all__ = ["Resharder", "Storage", "StorageConfig"]

_log = logging.getLogger(__name__)

# The library's method that reads the planned pieces.
_METHOD = "_execute_load_plans_with_read_strategy"
_CHECKED_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, and its whole record as a tensor of bytes."""

    tensor: StoredTensor
    record: StoredTensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a stored tensor, from an index on, and its target."""

    source: _Source
    begins: Sequence[int]
    target: Tensor


class Resharder:
    """Loads checkpoints of another sharding; the pieces of all files are read at once.

    It plans like the library's ``DefaultResharder``, and takes its arguments.  The library itself
    reads files that are no plain archives of strided tensors, and storages other than ptsave's.

    Parameters
    ----------
    verify_parts : bool, default False
        Whether a record that is needed only in part is read whole, to compare it with its checksum.
        Otherwise its parts are logged as unverified, because they have no checksums of their own.
        ``StorageConfig(verify=False)`` turns all comparisons off.
    **options
        Arguments of ``DefaultResharder``.

    Raises
    ------
    CorruptCheckpointError
        During a load, if a record does not match its checksum.

    Examples
    --------
    >>> from torch_checkpointing import ItemSpec  # doctest: +SKIP
    >>> from ptsave.integrations.torch_checkpointing import Resharder  # doctest: +SKIP
    >>> items = {"model": ItemSpec(resharder=Resharder())}  # doctest: +SKIP
    """

    def __init__(self, *, verify_parts: bool = False, **options: Any) -> None:
        check_flags(verify_parts=verify_parts)
        super().__init__(**options)
        self._verify_parts = verify_parts
        if not hasattr(super(), _METHOD):
            raise ImportError(
                f"this torch_checkpointing has no DefaultResharder.{_METHOD}: install the release "
                "that ptsave's README names, or use DefaultResharder"
            )

    def _execute_load_plans_with_read_strategy(  # noqa: PLR0917 - the library's signature
        self,
        read_strategy: Any,
        source_path: Path,
        source_layouts_by_rank: Mapping[int, Any],
        item_key: str,
        plans_by_rank: Mapping[int, list[Any]],
        target_by_path: Mapping[Any, Any],
        storage: Any,
        file_read_workers: int,
        *rest: Any,
    ) -> None:
        """Read the planned pieces of all files, and leave the rest to the library."""
        left = dict(plans_by_rank)
        if isinstance(storage, engine_storage.Storage) and read_strategy.name != "FULL_FILE":

            def find(rank: int) -> dict[str, _Source] | None:
                layout, names = source_layouts_by_rank[rank], {p.src_fqn for _, p in left[rank]}
                return _stored_in(source_path, layout, item_key, names)

            with ThreadPoolExecutor(file_read_workers, "ptsave-reshard") as pool:
                found = dict(zip(left, pool.map(find, list(left)), strict=True))
            left = {rank: plans for rank, plans in left.items() if found[rank] is None}
            pieces = list(_pieces(plans_by_rank, found, target_by_path))
            with RankFiles(str(source_path), {}, verify=storage.verifies) as files:
                if files.verify:
                    _check_parts(files, pieces, is_wanted=self._verify_parts)
                plan = ReadPlan(files.read)
                for each in pieces:
                    plan.add(each.source.tensor, each.begins, each.target)
                plan.read()
        if left:
            read: Any = getattr(super(), _METHOD)
            read(
                read_strategy,
                source_path,
                source_layouts_by_rank,
                item_key,
                left,
                target_by_path,
                storage,
                file_read_workers,
                *rest,
            )


def _stored_in(
    folder: Path, layout: Any, item_key: str, names: Iterable[str]
) -> dict[str, _Source] | None:
    """Return the wanted tensors of a rank's file; None if the library has to read it."""
    from torch_checkpointing import checkpoint_layout, default_resharder

    library: Any = default_resharder
    if not isinstance(layout.serialization_format, checkpoint_layout.TorchSerialization):
        return None
    try:
        # Not verified, because torch's C++ reader would replace the error by one of its own.
        with ReadStream(folder / layout.file_path, verify=False) as stream:
            crcs = _crcs_in(stream)
            # weights_only=False as in the library: its files hold DTensors and other objects.
            tree = torch.load(stream, map_location="meta", weights_only=False)
        flat = library._flatten_state_dict(item_key, tree)
        return {
            name: _stored(library._unwrap_dtensor(flat[name]), layout.file_path, name, crcs)
            for name in names
        }
    except NotImplementedError as error:
        _log.warning("%s is read by torch_checkpointing: %s", layout.file_path, error)
        return None


def _crcs_in(stream: Any) -> list[tuple[int, int]]:
    """Return the header offset and CRC-32 of each record, sorted by offset."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise NotImplementedError("it is no archive") from error
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise NotImplementedError("it is compressed")
    stream.seek(0)
    return sorted((member.header_offset, member.CRC) for member in members)


def _stored(tensor: Any, file: str, name: str, crcs: Sequence[tuple[int, int]]) -> _Source:
    """Return where a tensor that torch has loaded to the device "meta" is in its file."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise NotImplementedError(f"{name} is no plain tensor")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError(f"{name} is quantized, or a view of other numbers")
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None and tensor.numel():
        raise NotImplementedError(f"{name} has no place in the file")
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    offset = (begin or 0) + int(tensor.storage_offset()) * tensor.itemsize
    nbytes = tensor.untyped_storage().nbytes()
    # The record's header is the last one before its payload.  A CRC of 0 means none.
    at = bisect_left(crcs, (begin or 0, 0))
    of_record = (crcs[at - 1][1] or None) if at else None
    record = StoredTensor(
        file, name, torch.uint8, torch.Size([nbytes]), (1,), begin or 0, of_record
    )
    crc = of_record if tensor.is_contiguous() and tensor.nbytes == nbytes else None
    stored = StoredTensor(file, name, tensor.dtype, tensor.shape, strides, offset, crc)
    return _Source(stored, record)


def _check_parts(files: RankFiles, pieces: Sequence[_Piece], *, is_wanted: bool) -> None:
    """Verify records that are needed only in part, if `is_wanted`; log the unverified ones."""
    unverified: dict[tuple[str, int], int] = {}  # bytes, by file and offset of a record
    checked: set[tuple[str, int]] = set()
    for each in pieces:
        stored, record = each.source.tensor, each.source.record
        nbytes = each.target.numel() * stored.dtype.itemsize
        is_whole = stored.crc is not None and each.target.shape == stored.shape
        key = record.file, record.offset
        if is_whole or not nbytes or key in checked:
            continue
        if is_wanted and record.crc is not None:
            _check_record(files, record)
            checked.add(key)
        else:
            unverified[key] = unverified.get(key, 0) + nbytes
    if unverified:
        _log.info(
            "%s: parts of %d tensors, %d bytes, are unverified: a checksum is that of a whole one"
            "%s",
            files.path,
            len(unverified),
            sum(unverified.values()),
            "" if is_wanted else ", which Resharder(verify_parts=True) reads",
        )


def _check_record(files: RankFiles, record: StoredTensor) -> None:
    memory = torch.empty(min(record.nbytes, _CHECKED_NBYTES), dtype=torch.uint8)
    crc = 0
    for begin in range(0, record.nbytes, _CHECKED_NBYTES):
        piece = memory[: record.nbytes - begin]
        files.read([record.box((begin,), piece)])
        crc = _C.crc32(memory_of(piece), crc)
    if crc != record.crc:
        path = files.file(record.file)
        raise CorruptCheckpointError(
            f"{path}: the record of {record.name} at offset {record.offset} is damaged: its CRC-32 "
            f"is {crc:08x}, not {record.crc:08x}",
            path=path,
            offset=record.offset,
            entries=[record.name],
        )


def _pieces(
    plans_by_rank: Mapping[int, list[Any]],
    found: Mapping[int, dict[str, _Source] | None],
    targets: Mapping[Any, Any],
) -> Iterator[_Piece]:
    """Yield the pieces of the files that the engine can read."""
    for rank, plans in plans_by_rank.items():
        stored = found.get(rank)
        if stored is None:
            continue
        for path, plan in plans:
            local = getattr(targets[path], "_local_tensor", targets[path]).detach()
            index = tuple(
                slice(begin, begin + n) for begin, n in zip(plan.offsets, plan.sizes, strict=True)
            )
            yield _Piece(stored[plan.src_fqn], plan.src_offsets, local[index])


_BASES = {
    "Resharder": "torch_checkpointing.default_resharder.DefaultResharder",
    "Storage": "torch_checkpointing.storage.base_storage.Storage",
    "StorageConfig": "torch_checkpointing.storage.base_storage.StorageConfig",
}
__getattr__ = classes_over(__name__, _BASES, package="torch_checkpointing")
