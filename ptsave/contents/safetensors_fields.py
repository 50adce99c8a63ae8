"""Reads the names, types and places of tensors from the header of a safetensors file."""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.errors import RECOVERY_ADVICE, CorruptCheckpointError, not_checkpoint
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    MAX_SAFETENSORS_HEADER_NBYTES,
    what_it_surely_is,
)
from ptsave.sources.ranges import RangeSource

if TYPE_CHECKING:
    from ptsave.archive.recovery import Recovery

LENGTH_NBYTES = 8  # of the header's length, which stands before it
_FIRST_NBYTES = 64 << 10  # one fetch, enough for most headers

DTYPES = {  # the format's names, and torch's
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
    """The header of a safetensors file that the safetensors library has accepted."""

    # In the order of their bytes: names, and the fields dtype, shape and data_offsets.
    tensors: list[tuple[str, dict[str, Any]]]
    metadata: dict[str, str]  # the writer's __metadata__
    nbytes: int  # of the length and the header: the data begins there


def read_fields(source: RangeSource) -> SafetensorsFields:
    """Read the header of a file, or raise CorruptCheckpointError if the library refuses it."""
    if sys.byteorder != "little":
        raise NotImplementedError(
            f"{source.name}: safetensors files are little-endian, this machine is not"
        )
    head = fetch_header(source)
    _judge(source, head)
    fields = json.loads(head[LENGTH_NBYTES:])
    metadata = fields.pop("__metadata__", None) or {}
    in_order = sorted(fields.items(), key=lambda item: item[1]["data_offsets"])
    return SafetensorsFields(in_order, metadata, len(head))


def fetch_header(source: RangeSource) -> bytes:
    """Return the length and the header, or fewer bytes if there cannot be such a header."""
    (head,) = source.read([(0, min(_FIRST_NBYTES, source.nbytes))])
    end = LENGTH_NBYTES + int.from_bytes(head[:LENGTH_NBYTES], "little")
    if len(head) < end <= min(source.nbytes, LENGTH_NBYTES + MAX_SAFETENSORS_HEADER_NBYTES):
        (rest,) = source.read([(len(head), end)])
        head += rest
    return head[:end]


def _judge(source: RangeSource, head: bytes) -> None:
    """Let the library check the header, in a file of the same size that has nothing else."""
    try:
        from safetensors import SafetensorError
    except ImportError:
        raise ImportError(
            f"{source.name} is read with the help of: pip install safetensors"
        ) from None
    try:
        let_library_read(head, source.nbytes, source.name)
    except SafetensorError as error:
        _refuse_another_kind(source)
        names = _tensors_cut_off(head, source.nbytes)
        where = f"; the file ends before tensor {names[0]} does: {RECOVERY_ADVICE}" if names else ""
        raise CorruptCheckpointError(
            f"{source.name}: not a whole safetensors file: {error}{where}",
            path=source.name,
            entries=names,
        ) from None


def _refuse_another_kind(source: RangeSource) -> None:
    """Raise NotCheckpointError for a file of another kind with a safetensors name."""
    (head,) = source.read([(0, min(HEAD_NBYTES, source.nbytes))])
    what = what_it_surely_is(head, source.nbytes)
    if what is not None:
        raise not_checkpoint(f"{source.name} is no checkpoint: {what}", source.name)


def let_library_read(head: bytes, nbytes: int, name: str) -> None:
    """Let the library read a length and header, in a file of `nbytes` bytes without memory."""
    from safetensors import safe_open

    # For torch, the library maps the whole file, which the system refuses if it is large.
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
            except FileNotFoundError:  # raised for any failure to open it
                os.close(os.open(path, os.O_RDONLY))
                raise
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), name) from None


def _tensors_cut_off(head: bytes, file_nbytes: int) -> list[str]:
    """Return the names of tensors that end behind the end of a damaged file, by its header."""
    try:
        fields = json.loads(head[LENGTH_NBYTES:])
        fields.pop("__metadata__", None)
        ends = sorted((entry["data_offsets"][1], name) for name, entry in fields.items())
        return [name for end, name in ends if len(head) + end > file_nbytes]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []  # the header itself is damaged


def recover_safetensors(source: RangeSource) -> Recovery | None:
    """Return a file of the tensors before the cut: tensors are stored one behind the other."""
    from ptsave.archive.recovery import CompletedFile, Recovery

    try:
        read_fields(source)
    except CorruptCheckpointError as error:
        head = fetch_header(source)
        if not error.entries:  # something else is wrong
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
