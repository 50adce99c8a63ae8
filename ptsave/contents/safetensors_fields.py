"""Reads the names, types and places of tensors from the header of a safetensors file."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.errors import RECOVERY_ADVICE, CorruptCheckpointError, not_checkpoint
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    MAX_SAFETENSORS_HEADER_NBYTES,
    what_it_surely_is,
)
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support import config
from ptsave.support.calls import ProgressCallback

if TYPE_CHECKING:
    from ptsave.archive.recovery import Recovery

LENGTH_NBYTES = 8  # of the number in front of the header: the header's length
_FIRST_NBYTES = 64 << 10  # read at once; enough for most headers
# The key of the header's metadata for checksums: the CRC-32 of each tensor's bytes, 8 hexadecimal
# digits each, in the order of the tensors in the file.  Other readers ignore it.
CHECKSUMS = "ptsave.crc32"
N_CRC_DIGITS = 8
_CHECKED_NBYTES = 256 << 20  # read between two updates of a progress bar
REWRITTEN = (
    "If another program has rewritten the file, PTSAVE_VERIFY=0 reads it without comparing "
    "checksums"
)

DTYPES = {  # the format's names, and torch's names
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class SafetensorsFields(NamedTuple):
    """The parsed header of a safetensors file; the safetensors library has accepted it."""

    # In the order of their bytes: names, and the fields dtype, shape and data_offsets.
    tensors: list[tuple[str, dict[str, Any]]]
    metadata: dict[str, str]  # the writer's __metadata__, without checksums
    checksums: str | None
    nbytes: int  # size of the length and the header; the data begins at this offset


def read_fields(source: RangeSource) -> SafetensorsFields:
    """Read a file's header; raise CorruptCheckpointError if the safetensors library refuses it."""
    if sys.byteorder != "little":
        raise NotImplementedError(
            f"{source.name}: safetensors files are little-endian, but this machine is not"
        )
    head = fetch_header(source)
    _judge(source, head)
    fields = json.loads(head[LENGTH_NBYTES:])
    metadata = fields.pop("__metadata__", None) or {}
    in_order = sorted(fields.items(), key=lambda item: item[1]["data_offsets"])
    return SafetensorsFields(in_order, metadata, metadata.pop(CHECKSUMS, None), len(head))


def crcs_in(fields: SafetensorsFields, path: str) -> list[int | None]:
    """Return the CRC of each tensor, or None for each; raise if the checksums do not fit."""
    digits, count = fields.checksums, len(fields.tensors)
    if digits is None:
        return [None] * count
    if len(digits) == count * N_CRC_DIGITS and re.fullmatch("[0-9a-f]*", digits):
        begins = range(0, len(digits), N_CRC_DIGITS)
        crcs = [int(digits[begin : begin + N_CRC_DIGITS], 16) for begin in begins]
        ends = (entry["data_offsets"] for _, entry in fields.tensors)
        if not any(crc and begin == end for crc, (begin, end) in zip(crcs, ends, strict=True)):
            return [*crcs]
    raise CorruptCheckpointError(
        f"{path}: the checksums in the header do not fit the tensors. {REWRITTEN}", path=path
    )


def damaged_in(
    file: LocalFile,
    tensors: Sequence[tuple[int, int, int | None]],
    progress: ProgressCallback | None,
) -> list[int]:
    """Return the numbers of damaged tensors, each given as (offset, nbytes, CRC or None)."""
    from ptsave import _core

    damaged: list[int] = []
    begin = 0
    for end, (offset, nbytes, _) in enumerate(tensors, 1):
        if offset + nbytes - tensors[begin][0] < _CHECKED_NBYTES and end < len(tensors):
            continue
        some = tensors[begin:end]
        found = _core.crcs_of_ranges(
            *file.for_engine,
            [(file.begin + at, size) for at, size, _ in some],
            n_threads=config.current().n_readers,
        )
        pairs = zip(range(begin, end), some, found, strict=True)
        damaged += [i for i, (_, _, crc), own in pairs if crc not in (None, own)]
        if progress is not None:
            progress(offset + nbytes)
        begin = end
    return damaged


def fetch_header(source: RangeSource) -> bytes:
    """Return the header with its length in front, or fewer bytes if the length is wrong."""
    (head,) = source.read([(0, min(_FIRST_NBYTES, source.nbytes))])
    end = LENGTH_NBYTES + int.from_bytes(head[:LENGTH_NBYTES], "little")
    if len(head) < end <= min(source.nbytes, LENGTH_NBYTES + MAX_SAFETENSORS_HEADER_NBYTES):
        (rest,) = source.read([(len(head), end)])
        head += rest
    return head[:end]


def _judge(source: RangeSource, head: bytes) -> None:
    """Raise an error if the safetensors library refuses a file with this header."""
    try:
        from safetensors import SafetensorError
    except ImportError:
        raise ImportError(
            f"{source.name}: reading it needs the safetensors library: pip install safetensors"
        ) from None
    try:
        let_library_read(head, source.nbytes, source.name)
    except SafetensorError as error:
        _refuse_another_kind(source)
        names = _tensors_cut_off(head, source.nbytes)
        where = f": the file ends before tensor {names[0]} does. {RECOVERY_ADVICE}" if names else ""
        raise CorruptCheckpointError(
            f"{source.name} is damaged or incomplete ({error}){where}",
            path=source.name,
            entries=names,
        ) from None


def _refuse_another_kind(source: RangeSource) -> None:
    """Raise NotCheckpointError if the file clearly has another format."""
    (head,) = source.read([(0, min(HEAD_NBYTES, source.nbytes))])
    what = what_it_surely_is(head, source.nbytes)
    if what is not None:
        raise not_checkpoint(f"{source.name} is not a checkpoint: {what}", source.name)


def let_library_read(head: bytes, nbytes: int, name: str) -> None:
    """Let the library check a header by opening a sparse file of this size that begins with it."""
    from safetensors import safe_open

    # With "pt", the library maps the whole file; the system refuses that if the file is large.
    framework = "np" if find_spec("numpy") else "pt"
    try:
        with open(os.memfd_create("ptsave", os.MFD_CLOEXEC), "wb") as stand_in:
            stand_in.truncate(nbytes)
            stand_in.write(head)
            stand_in.flush()
            path = f"/proc/self/fd/{stand_in.fileno()}"
            try:
                with safe_open(path, framework=framework):
                    pass
            except FileNotFoundError:  # the library raises it for any failure to open the file
                os.close(os.open(path, os.O_RDONLY))
                raise
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), name) from None


def _tensors_cut_off(head: bytes, file_nbytes: int) -> list[str]:
    """Return the names of tensors that the header places beyond the end of the file."""
    try:
        fields = json.loads(head[LENGTH_NBYTES:])
        fields.pop("__metadata__", None)
        ends = sorted((entry["data_offsets"][1], name) for name, entry in fields.items())
        return [name for end, name in ends if len(head) + end > file_nbytes]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []  # the header itself is damaged


def recover_safetensors(source: RangeSource) -> Recovery | None:
    """Return a repaired file with the complete tensors of `source`; None if no end is missing."""
    from ptsave.archive.recovery import CompletedFile, Recovery

    try:
        read_fields(source)
    except CorruptCheckpointError as error:
        head = fetch_header(source)
        if not error.entries:  # the damage is more than a missing end
            raise
        fields = json.loads(head[LENGTH_NBYTES:])
        ends = {name: fields[name]["data_offsets"] for name in error.entries}
        lost = {name: None for name, (begin, end) in ends.items() if begin < end}
        kept = {name: value for name, value in fields.items() if name not in lost}
        whole = kept.keys() - ends.keys() - {"__metadata__"}
        if not whole:
            raise
        last = max(kept[name]["data_offsets"][1] for name in whole)
        for name in ends.keys() & kept.keys():  # tensors without bytes
            kept[name]["data_offsets"] = [last, last]
        header = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
        nbytes = len(head) - LENGTH_NBYTES
        if len(header) > nbytes:
            raise
        end = len(head) + last
        patch = head[:LENGTH_NBYTES] + header.ljust(nbytes)
        return Recovery(CompletedFile(source, end, b"", {0: patch}), entries=[*lost])
    return None
