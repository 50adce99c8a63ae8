"""A rank's file: the items of its plan, each at an aligned place, and checksums of its blocks.

::

    small items   head, payload, head, payload, ...          payloads at multiples of 64
    large items   padding, head | payload                    payloads at multiples of 4,096
    table         the CRC-32 of each block of 4,096 bytes before it

The metadata has a checksum for each section of the table: `ptsave.dcp.metadata`.

DCP keeps every tensor as a whole ``torch.save`` file and reads it with ``torch.load``.  That also
reads the format before torch 1.6: a few pickles, which are the head, then the bytes.  A head takes
300 bytes, where an archive takes 1.6 KiB around the payload.  Nothing follows the payload, so the
end of the item tells where it is.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ptsave import _C
from ptsave.dcp.metadata import BLOCK_NBYTES, CheckedFile, section_crcs
from ptsave.streaming.payload_sources import StoragePlace
from ptsave.support import torch_dcp
from ptsave.support.calls import ProgressCallback
from ptsave.writing.targets import FileWriter

_SMALL_ALIGNMENT = 64


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _alignment(nbytes: int) -> int:
    return _SMALL_ALIGNMENT if nbytes < BLOCK_NBYTES else BLOCK_NBYTES


class RankFile:
    """Lays out one file and writes it; it needs least padding if small items are added first."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []
        self._end = 0

    def add_tensors(
        self, tensors: Sequence[Tensor], alike: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Add contiguous tensors, and return the offsets and the sizes of their items.

        `alike` has a number for each tensor: tensors of the same number have the same dtype and
        shape.
        """
        kinds: dict[int, tuple[bytes, int, int]] = {}
        begins, lengths, pieces, end = [], [], self._pieces, self._end
        for tensor, number in zip(tensors, alike, strict=True):
            kind = kinds.get(number)
            if kind is None:
                head, nbytes = head_of(tensor.dtype, tensor.shape), tensor.nbytes
                kind = kinds[number] = head, nbytes, _alignment(nbytes)
            head, nbytes, alignment = kind
            payload = _align(end + len(head), alignment)
            begin, end = payload - len(head), payload + nbytes
            pieces.append((begin, head))
            if nbytes:
                pieces.append((payload, tensor))
            begins.append(begin)
            lengths.append(end - begin)
        self._end = end
        return begins, lengths

    def add_payload(
        self, dtype: torch.dtype, shape: torch.Size, payload: StoragePlace
    ) -> tuple[int, int]:
        """Add a tensor whose bytes are in the sources of `write`; return its offset and size."""
        place = (payload.nbytes, payload.source, payload.offset, payload.parts)
        head = head_of(dtype, shape)
        at = _align(self._end + len(head), _alignment(payload.nbytes))
        begin = at - len(head)
        self._pieces.append((begin, head))
        if payload.nbytes:
            self._pieces.append((at, place))
        self._end = at + payload.nbytes
        return begin, self._end - begin

    def add_bytes(self, data: bytes) -> tuple[int, int]:
        """Add an item that needs no head; return its offset and size."""
        begin = _align(self._end, _SMALL_ALIGNMENT)
        self._pieces.append((begin, data))
        self._end = begin + len(data)
        return begin, len(data)

    def write(
        self,
        path: str,
        *,
        fsync: bool,
        sources: _C.PayloadSources | None = None,
        progress: ProgressCallback | None = None,
    ) -> CheckedFile:
        """Write the file, which appears whole or not at all.

        `sources` has the bytes of tensors that `add_payload` has added.  `progress` gets the number
        of bytes that are written.
        """
        plan = _C.CheckedPlan(self._pieces, sources)
        FileWriter(plan, compute_crcs=True, fsync=fsync, atomic=True, progress=progress).write_file(
            path
        )
        nbytes = _align(self._end, BLOCK_NBYTES)
        return CheckedFile(nbytes=nbytes, crcs=section_crcs(plan.block_crcs))


# ------------------------------------------------------------------------------ heads of items

_SYSTEM = {
    "protocol_version": PROTOCOL_VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
_KEY = "0"
_PROTOCOL = 2


class _Storage:
    """Stands for the storage of a tensor; its bytes follow the pickles."""

    def __init__(self, kind: Any, numel: int) -> None:
        self.id = ("storage", kind, _KEY, "cpu", numel, None)


class _Tensor:
    """Pickles as a contiguous tensor."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _Storage) else None


@functools.lru_cache(maxsize=1024)
def head_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return the pickles that torch.load reads before the bytes of a contiguous tensor.

    >>> values = torch.tensor([1.0, 2.0])
    >>> file = head_of(values.dtype, values.shape) + values.numpy().tobytes()
    >>> torch.load(io.BytesIO(file), weights_only=True)
    tensor([1., 2.])
    """
    # A meta tensor has the strides that torch gives to a contiguous one.
    stride = torch.empty(shape, device="meta").stride()
    tail: tuple[Any, ...] = (0, tuple(shape), stride, False, OrderedDict())
    kind = _STORAGES.get(dtype)
    nbytes = shape.numel() * dtype.itemsize
    if kind is not None:
        numel = shape.numel()
        tensor = _Tensor(torch_dcp.rebuild_tensor, (_Storage(kind, numel), *tail))
    else:  # such as float8, for which torch has no storage class
        numel = nbytes
        storage = _Storage(torch.ByteStorage, numel)
        tensor = _Tensor(torch_dcp.rebuild_tensor_of_dtype, (storage, *tail, dtype))
    stream = io.BytesIO()
    for value in (MAGIC_NUMBER, PROTOCOL_VERSION, _SYSTEM, tensor, [_KEY]):
        _Pickler(stream, protocol=_PROTOCOL).dump(value)
    stream.write(numel.to_bytes(8, "little"))
    return stream.getvalue()
