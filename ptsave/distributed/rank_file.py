"""A rank's file: the items of its plan, each at an aligned place, and checksums of its blocks.

::

    small items   head, payload, head, payload, ...          payloads at multiples of 64
    large items   padding, head | payload                    payloads at multiples of 4,096
    table         the CRC-32 of each block of 4,096 bytes before it

The metadata has a checksum for each section of the table: `ptsave.dcp.blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.dcp.blocks import BLOCK_NBYTES, section_crcs
from ptsave.dcp.metadata import CheckedFile
from ptsave.distributed.items import head_of
from ptsave.streaming.payload_sources import Payload
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
        self, dtype: torch.dtype, shape: torch.Size, payload: Payload
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
        FileWriter(plan, compute_crcs=True, fsync=fsync, atomic=True, progress=progress).write_path(
            path
        )
        nbytes = _align(self._end, BLOCK_NBYTES)
        return CheckedFile(nbytes=nbytes, crcs=section_crcs(plan.block_crcs))
