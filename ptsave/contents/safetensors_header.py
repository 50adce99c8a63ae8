"""Reads the header of a safetensors file, which its library has judged sound, and makes one."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

from ptsave.errors import CorruptCheckpointError, not_checkpoint
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    MAX_SAFETENSORS_HEADER_NBYTES,
    what_it_surely_is,
)
from ptsave.sources.ranges import RangeSource

__all__ = [
    "SafetensorsHeader",
    "StoredTensor",
    "header_of",
    "let_library_read",
    "read_header",
    "safetensors_dtypes",
    "stored_shape",
]

_LENGTH_NBYTES = 8  # of the number before the header
_HEADER_ALIGNMENT = 8
_FIRST_NBYTES = 64 << 10  # fetched at once: most headers are in there

_DTYPES = {  # the format's names, and torch's
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
# Of a dtype of torch that packs several numbers into an element: how many, which the format counts.
_N_PACKED = {torch.float4_e2m1fn_x2: 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file.

    Attributes
    ----------
    name : str
        Its name.
    shape : torch.Size
        Shape in elements.
    dtype : torch.dtype
        Dtype of its elements.
    offset : int
        Position of its first byte in the file.
    nbytes : int
        Size in bytes.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors and the metadata of a safetensors file.

    Attributes
    ----------
    tensors : list of StoredTensor
        In the order of their bytes.
    metadata : dict of str to str
        The writer's ``__metadata__``.
    """

    tensors: list[StoredTensor]
    metadata: dict[str, str]


def read_header(source: RangeSource) -> SafetensorsHeader:
    """Read a header.

    Parameters
    ----------
    source : RangeSource
        The file.  Only its header is read.

    Returns
    -------
    SafetensorsHeader
        All its tensors lie within the file, and none on another.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    CorruptCheckpointError
        If the library refuses the file, or torch has no such dtype.
    """
    if sys.byteorder != "little":
        raise NotImplementedError(
            f"{source.name}: safetensors files are little-endian, this machine is not"
        )
    head = _fetch(source)
    _judge(source, head)
    fields = json.loads(head[_LENGTH_NBYTES:])
    metadata = fields.pop("__metadata__", None) or {}
    in_order = sorted(fields.items(), key=lambda item: item[1]["data_offsets"])
    tensors = [_stored_tensor(source, name, entry, len(head)) for name, entry in in_order]
    return SafetensorsHeader(tensors, metadata)


def stored_shape(dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """Return the shape that the format has for a tensor of torch's.

    Raises
    ------
    ValueError
        If it has none: numbers that are packed in pairs need a dimension to be pairs in.

    Examples
    --------
    >>> stored_shape(torch.float32, [3, 2]), stored_shape(torch.float4_e2m1fn_x2, [3, 2])
    ([3, 2], [3, 4])
    """
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return list(shape)
    if not shape:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"safetensors files hold no {name} without dimensions: reshape it to [1]")
    return [*shape[:-1], shape[-1] * n_packed]


def _shape_in_torch(dtype: torch.dtype, shape: Sequence[int]) -> torch.Size | None:
    """Return the shape that torch has for a tensor of the format; None if it has none."""
    n_packed = _N_PACKED.get(dtype, 1)
    if n_packed == 1:
        return torch.Size(shape)
    if not shape or shape[-1] % n_packed:
        return None
    return torch.Size([*shape[:-1], shape[-1] // n_packed])


def _fetch(source: RangeSource) -> bytes:
    """Return the length and the header, or less if there cannot be such a header."""
    (head,) = source.read([(0, min(_FIRST_NBYTES, source.nbytes))])
    end = _LENGTH_NBYTES + int.from_bytes(head[:_LENGTH_NBYTES], "little")
    if len(head) < end <= min(source.nbytes, _LENGTH_NBYTES + MAX_SAFETENSORS_HEADER_NBYTES):
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
        name = _tensor_cut_off(head, source.nbytes)
        where = f"; the file ends before tensor {name} does" if name else ""
        raise CorruptCheckpointError(
            f"{source.name}: not a whole safetensors file: {error}{where}",
            path=source.name,
            entries=[name] if name else None,
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


def _tensor_cut_off(head: bytes, file_nbytes: int) -> str:
    """Return the first tensor of a damaged file that is not all there, if its header says."""
    try:
        fields = json.loads(head[_LENGTH_NBYTES:])
        fields.pop("__metadata__", None)
        ends = sorted((entry["data_offsets"][1], name) for name, entry in fields.items())
        return next((name for end, name in ends if len(head) + end > file_nbytes), "")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""  # the header itself is damaged


def _stored_tensor(
    source: RangeSource, name: str, entry: Mapping[str, Any], data_offset: int
) -> StoredTensor:
    dtype = getattr(torch, _DTYPES.get(entry["dtype"], ""), None)
    shape = None if dtype is None else _shape_in_torch(dtype, entry["shape"])
    if dtype is None or shape is None:
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} is of a type that torch has not: {entry['dtype']} of "
            f"shape {entry['shape']}",
            path=source.name,
        )
    begin, end = (data_offset + offset for offset in entry["data_offsets"])
    tensor = StoredTensor(name, shape, dtype, begin, prod(shape) * dtype.itemsize)
    if end - begin != tensor.nbytes or not data_offset <= begin <= end <= source.nbytes:
        raise CorruptCheckpointError(
            f"{source.name}: the header puts tensor {name} where its bytes cannot be",
            path=source.name,
            offset=begin,
        )
    return tensor


# ----------------------------------------------------------------------------------- made anew


@functools.cache
def safetensors_dtypes() -> dict[torch.dtype, str]:
    """Return the dtypes that the library writes, in its order, with its names for them."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError(
            "safetensors files are written with the help of: pip install safetensors"
        ) from None
    found = {name: getattr(torch, text, None) for name, text in _DTYPES.items()}
    dtypes: dict[str, torch.dtype] = {name: dtype for name, dtype in found.items() if dtype}
    known = {name: dtype for name, dtype in dtypes.items() if _can_write(save, dtype)}
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype in known.items()})
    header = json.loads(data[8:])
    return {known[name]: fields["dtype"] for name, fields in header.items()}


def _can_write(save: Callable[[dict[str, Tensor]], bytes], dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # it says so in many ways
        return False
    return True


def header_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[list[Tensor], bytes]:
    """Return tensors in the order of a file, and its header, as the library writes it.

    Raises
    ------
    ValueError
        If the format has not got the shape of one.
    """
    dtypes = safetensors_dtypes()
    ranks = {dtype: rank for rank, dtype in enumerate(dtypes)}
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name.encode()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        shape = stored_shape(tensor.dtype, tensor.shape)
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return [tensors[name] for name in names], len(text).to_bytes(_LENGTH_NBYTES, "little") + text
