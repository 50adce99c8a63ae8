"""Reads the values of one view of a storage whose bytes are in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_device
from ptsave.archive.spans import Span, SpanReader
from ptsave.support import config
from ptsave.support.torch_names import negated_view
from ptsave.tree.extents import blocks_of

Allocator: TypeAlias = Callable[[int], torch.UntypedStorage]  # given a number of bytes, on the CPU

_MAX_SPARSE_NBYTES = 64 << 20  # read at once although most is dropped
_MIN_SENT_NBYTES = 256 << 10  # of a block that is sent to an accelerator by itself
_PACK_NBYTES = 16 << 20  # of blocks that are sent together
_CPU = torch.device("cpu")


def new_storage(nbytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """Return memory on `device`, whatever torch's default device is."""
    return torch.UntypedStorage(nbytes, device=device)


def read_view(
    spans: SpanReader,
    record: int | None,
    view: Tensor,
    verify: bool | None,
    device: torch.device = _CPU,
    *,
    allocate: Allocator = new_storage,
) -> Tensor:
    """Read the values of one view into memory of their own; bytes between its blocks are dropped.

    `record` is None for a storage without bytes.  `verify` is as in `SpanReader.read`.  Blocks for
    an accelerator are sent one by one or, if they are small, in packs; host memory holds one pack
    at a time.  `allocate` gives the memory of a result on the CPU.
    """
    blocks = blocks_of(view, spans.max_gap)
    nbytes = blocks.nbytes * len(blocks.begins)
    if device != _CPU:
        device = torch.empty(0, device=device).device  # with its number
        if nbytes < _C.MIN_PINNED_NBYTES or not _C.can_stage(device):
            return to_device(read_view(spans, record, view, verify), device)
    if record is not None and nbytes > max(_MAX_SPARSE_NBYTES, 2 * view.nbytes):
        if verify:
            spans.check([record])
        return _read_halves(spans, record, view, device)
    storage = allocate(nbytes) if device == _CPU else new_storage(nbytes, device)
    if record is not None:
        memory = bytes_of(storage)
        parts = [
            Span(record, begin, memory[i * blocks.nbytes : (i + 1) * blocks.nbytes])
            for i, begin in enumerate(blocks.begins)
        ]
        if device == _CPU or (spans.reach_devices and blocks.nbytes >= _MIN_SENT_NBYTES):
            spans.read(parts, verify=verify)
        else:
            _read_packs(spans, parts, verify)
    result = view_as(storage, view, 0, blocks.stride)
    return result.contiguous() if result.nbytes < storage.nbytes() else result


def _read_packs(spans: SpanReader, parts: Sequence[Span], verify: bool | None) -> None:
    """Fill targets that follow each other in an accelerator's memory, one pack at a time."""
    if verify:
        spans.check([parts[0].record])
    if verify is None and len(parts) == 1:  # it may be a whole record, which is compared then
        _read_pack(spans, parts, None)
        return
    pack: list[Span] = []
    nbytes = 0
    for part in parts:
        for begin in range(0, len(part.target), _PACK_NBYTES):
            target = part.target[begin : begin + _PACK_NBYTES]
            if nbytes + len(target) > _PACK_NBYTES:
                _read_pack(spans, pack, False)
                pack, nbytes = [], 0
            pack.append(Span(part.record, part.begin + begin, target))
            nbytes += len(target)
    _read_pack(spans, pack, False)


def _read_pack(spans: SpanReader, pack: Sequence[Span], verify: bool | None) -> None:
    here = bytes_of(new_storage(sum(len(part.target) for part in pack)))
    pieces = here.split([len(part.target) for part in pack])
    spans.read(
        [Span(part.record, part.begin, piece) for part, piece in zip(pack, pieces, strict=True)],
        verify=verify,
    )
    there = bytes_of(pack[0].target.untyped_storage())
    begin = pack[0].target.storage_offset()
    limits = config.current()
    _C.copy_to_devices(
        [(here, there[begin : begin + len(here)])],
        n_threads=limits.n_readers,
        max_pinned_nbytes=limits.max_pinned_nbytes,
    )


def _read_halves(spans: SpanReader, record: int, view: Tensor, device: torch.device) -> Tensor:
    """Read a view that is spread over much more memory than its values, half by half."""
    result = torch.empty(view.shape, dtype=view.dtype, device=device)
    dims = [dim for dim in range(view.dim()) if view.shape[dim] > 1]
    dim = max(dims, key=view.stride)
    half = view.shape[dim] // 2
    for begin, n in ((0, half), (half, view.shape[dim] - half)):
        part = read_view(spans, record, view.narrow(dim, begin, n), False, device)
        result.narrow(dim, begin, n).copy_(part)
    return result


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a uint8 tensor over all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_as(
    storage: torch.UntypedStorage, like: Tensor, offset: int, stride: tuple[int, ...]
) -> Tensor:
    """Return a tensor over a storage with the dtype, shape, and conj and neg bits of another."""
    tensor = torch.empty(0, dtype=like.dtype, device=storage.device)
    tensor.set_(storage, offset, like.shape, stride)
    if like.is_conj():
        tensor = tensor.conj()
    return negated_view(tensor) if like.is_neg() else tensor


def unfilled_tensors(kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Return tensors of these dtypes and shapes over addresses without memory."""
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in kinds]
    storages = _C.untyped_storages(_C.unfilled_storages(sizes))
    tensors = []
    for (dtype, shape), storage in zip(kinds, storages, strict=True):
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensors.append(tensor.set_(storage, 0, tuple(shape), _contiguous_stride(shape)))
    return tensors


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.append(stride[-1] * max(n, 1))
    return tuple(reversed(stride[: len(shape)]))
