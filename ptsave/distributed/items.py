"""Makes the heads of the items in a rank's file, so that torch.load reads the bytes that follow.

DCP keeps every tensor as a whole ``torch.save`` file and reads it with ``torch.load``.  That also
reads the format before torch 1.6: a few pickles, then the bytes.  The head takes 300 bytes, where
an archive takes 1.6 KiB around the payload.  Nothing follows the payload, so the end of the item
tells where it is.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ptsave.support import torch_dcp

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
