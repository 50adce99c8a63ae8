"""Outlines (entries without values) of plain files, made without the slow import of torch.

A plain file is undamaged and holds only tensors, parameters, numbers and text in dicts, lists and
tuples.  Any other file has no outline: torch opens it, and reports what is wrong.  A listing looks
the same with and without an outline.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from ptsave import _core
from ptsave._core import OutlinedTensor
from ptsave.contents.files import metadata_of
from ptsave.contents.safetensors_fields import (
    DTYPES,
    SafetensorsFields,
    crcs_in,
    read_fields,
)
from ptsave.errors import CorruptCheckpointError, NotCheckpointError
from ptsave.sources.kinds import what_it_is
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support import config

if TYPE_CHECKING:
    from ptsave.contents.contents import Place

_SMALL = (
    ".format_version",
    "byteorder",
    ".storage_alignment",
    ".data/serialization_id",
    "version",
    ".data/version",
)
_MAX_SMALL_NBYTES = 64 << 10
_VERSIONS = re.compile(rb"([1-9]|10)\n?")  # the archive versions that torch can read
# Environment variables that change the behaviour of torch's loader.
_VARIABLES = ("TORCH_SERIALIZATION_DEBUG", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# Element sizes, in bytes, of the dtypes that safetensors files have.
_ITEMSIZES = {
    name: int(bits) // 8 or 1
    for name in DTYPES.values()
    for bits in re.findall(r"(?:float|int|complex)(\d+)", name)
} | {"bool": 1}
del _ITEMSIZES["float4_e2m1fn_x2"]  # an element holds two numbers


@dataclass(frozen=True)
class Outline:
    """Like `Contents`, but with an `OutlinedTensor`, which has no values, for each tensor."""

    path: str
    kind: str
    obj: Any
    metadata: dict[str, str]
    nbytes: int
    archive: _core.Archive | None = None  # open; None for a safetensors file
    # Of a safetensors file with checksums: the offset, size and CRC of each tensor.
    checked: list[tuple[int, int, int | None]] | None = None

    def facts_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the facts of tensors, like `contents.facts_of`."""
        return [tensor[0] for tensor in tensors]

    def places_of(self, tensors: Sequence[Any]) -> list[Place]:
        """Return where tensors are in the file, like `Contents.places_of`."""
        return [tensor[1] or (id(tensor), None, None, None) for tensor in tensors]


def outline_of(source: RangeSource) -> Outline | None:
    """Return the outline of a local file, which stays open; None if torch has to open the file.

    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     torch.save({"weight": torch.ones(2, 3)}, path)
    ...     outline_of(LocalFile.open(path)).obj["weight"].facts
    ('float32', (2, 3), (3, 1), 0, 24, 24)
    """
    if not isinstance(source, LocalFile) or sys.byteorder != "little":
        return None
    if source.kind == "safetensors":
        return _outline_of_safetensors(source)
    archive = plain_archive(source)
    if archive is None:
        return None
    try:
        small = {name: archive.read(name) for name in _SMALL if archive.nbytes_of(name) is not None}
        found = archive.outline(archive.read("data.pkl"))
    except CorruptCheckpointError:
        return None
    if found is None:
        return None
    metadata = metadata_of(small)
    return Outline(source.name, metadata["format"], *found, metadata, archive.nbytes, archive)


def plain_archive(source: RangeSource) -> _core.Archive | None:
    """Open a local archive with the layout of torch.save; return None for any other file."""
    if not isinstance(source, LocalFile) or source.kind != "zip":
        return None
    if what_it_is(source.head, source.nbytes) is not None:
        return None
    if not stat.S_ISREG(os.fstat(source.descriptor).st_mode):
        return None
    if any(os.environ.get(name, "0") != "0" for name in _VARIABLES):
        return None
    try:
        archive = _core.Archive.open_descriptor(
            source.descriptor,
            source.begin,
            os.fsencode(source.name),
            direct=config.current().direct_reads,
        )
        return archive if _is_plain(archive) else None
    except CorruptCheckpointError:
        return None


def _is_plain(archive: _core.Archive) -> bool:
    sizes = {name: archive.nbytes_of(name) for name in (*_SMALL, "data.pkl", "constants.pkl")}
    if sizes["data.pkl"] is None or sizes["constants.pkl"] is not None or not archive.all_stored:
        return False
    if any((sizes[name] or 0) > _MAX_SMALL_NBYTES for name in _SMALL):
        return False
    if sizes["byteorder"] is not None and archive.read("byteorder") != b"little":
        return False
    version = ".data/version" if sizes[".data/version"] is not None else "version"
    return sizes[version] is not None and bool(_VERSIONS.fullmatch(archive.read(version)))


def plain_pickle(source: RangeSource) -> bytes | None:
    """Return the pickle of a local archive of torch.save, or None for any other file."""
    archive = plain_archive(source)
    try:
        return None if archive is None else archive.read("data.pkl")
    except CorruptCheckpointError:
        return None


def _outline_of_safetensors(source: RangeSource) -> Outline | None:
    try:
        fields = read_fields(source)
        crcs = crcs_in(fields, source.name)
    except (CorruptCheckpointError, NotCheckpointError, ImportError):
        return None
    tensors = _tensors_in(fields, source.nbytes)
    if tensors is None:
        return None
    metadata = {"format": "safetensors", **fields.metadata}
    checked = None
    if fields.checksums is not None:
        places = [(fields.nbytes + n for n in entry["data_offsets"]) for _, entry in fields.tensors]
        checked = [
            (begin, end - begin, crc) for (begin, end), crc in zip(places, crcs, strict=True)
        ]
    return Outline(source.name, "safetensors", tensors, metadata, source.nbytes, checked=checked)


def _tensors_in(fields: SafetensorsFields, file_nbytes: int) -> dict[str, OutlinedTensor] | None:
    tensors = {}
    for name, entry in fields.tensors:
        dtype = DTYPES.get(entry["dtype"], "")
        if dtype not in _ITEMSIZES:
            return None
        shape = tuple(entry["shape"])
        begin, end = (fields.nbytes + offset for offset in entry["data_offsets"])
        nbytes = prod(shape) * _ITEMSIZES[dtype]
        if end - begin != nbytes or not fields.nbytes <= begin <= end <= file_nbytes:
            return None
        steps = accumulate((max(n, 1) for n in reversed(shape[1:])), int.__mul__, initial=1)
        stride = tuple(reversed([*steps])) if shape else ()
        facts = (dtype, shape, stride, 0, nbytes, nbytes)
        tensors[name] = OutlinedTensor((facts, (name, None, begin, None)))  # type: ignore[arg-type, call-arg]  # a C type
    return tensors
