"""Reads the names, types and places of tensors from the header of a safetensors file."""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.util import find_spec
from typing import Any, NamedTuple

from ptsave.errors import RECOVERY_ADVICE, CorruptCheckpointError, not_checkpoint
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    MAX_SAFETENSORS_HEADER_NBYTES,
    what_it_surely_is,
)
from ptsave.sources.ranges import RangeSource

__all__ = [
    "DTYPES",
    "LENGTH_NBYTES",
    "SafetensorsFields",
    "fetch_header",
    "let_library_read",
    "read_fields",
]

LENGTH_NBYTES = 8  # of the number before the header
_FIRST_NBYTES = 64 << 10  # fetched at once: most headers are in there

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
    """The header of a safetensors file, as its library has judged it sound.

    Attributes
    ----------
    tensors : list of (str, dict)
        Names and fields (``dtype``, ``shape``, ``data_offsets``), in the order of their bytes.
    metadata : dict of str to str
        The writer's ``__metadata__``.
    nbytes : int
        Bytes of the header and its length: the data begins there.
    """

    tensors: list[tuple[str, dict[str, Any]]]
    metadata: dict[str, str]
    nbytes: int


def read_fields(source: RangeSource) -> SafetensorsFields:
    """Read a header.

    Parameters
    ----------
    source : RangeSource
        The file.  Only its header is read.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    CorruptCheckpointError
        If the library refuses the file.
    """
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
    """Return the length and the header, or less if there cannot be such a header."""
    (head,) = source.read([(0, min(_FIRST_NBYTES, source.nbytes))])
    end = LENGTH_NBYTES + int.from_bytes(head[:LENGTH_NBYTES], "little")
    if len(head) < end <= min(source.nbytes, LENGTH_NBYTES + MAX_SAFETENSORS_HEADER_NBYTES):
        (rest,) = source.read([(len(head), end)])
        head += rest
    return head[:end]


def _judge(source: RangeSource, head: bytes) -> None:
    """Let the library look at a file of the same size with nothing but the header in it."""
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
    """Raise NotCheckpointError for a file of another kind under a safetensors file's name."""
    (head,) = source.read([(0, min(HEAD_NBYTES, source.nbytes))])
    what = what_it_surely_is(head, source.nbytes)
    if what is not None:
        raise not_checkpoint(f"{source.name} is no checkpoint: {what}", source.name)


def let_library_read(head: bytes, nbytes: int, name: str) -> None:
    """Let the library read a header, in front of a file that takes no memory.

    Parameters
    ----------
    head : bytes
        The header, with its length.
    nbytes : int
        The size of the whole file.
    name : str
        Name of the file in messages.

    Raises
    ------
    safetensors.SafetensorError
        If the library does not accept it.
    OSError
        If the system refuses such a file, or one more.
    """
    from safetensors import safe_open

    # For torch all of the file would be mapped, which the system refuses if it is large.
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
            except FileNotFoundError:  # which the library calls any reason not to open it
                os.close(os.open(path, os.O_RDONLY))
                raise
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), name) from None


def _tensors_cut_off(head: bytes, file_nbytes: int) -> list[str]:
    """Return the tensors of a damaged file that are not all there, as far as its header says."""
    try:
        fields = json.loads(head[LENGTH_NBYTES:])
        fields.pop("__metadata__", None)
        ends = sorted((entry["data_offsets"][1], name) for name, entry in fields.items())
        return [name for end, name in ends if len(head) + end > file_nbytes]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []  # the header itself is damaged
