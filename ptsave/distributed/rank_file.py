"""A rank's file: the items of its plan at places of their own, and checksums of its blocks.

::

    small items   head, payload, head, payload, ...          payloads at multiples of 64
    large items   padding, head | payload                    payloads at multiples of 4,096
    table         the CRC-32 of each block of 4,096 bytes before it

The metadata has a checksum for each section of the table: `ptsave.dcp.blocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.dcp.blocks import BLOCK_NBYTES, section_crcs
from ptsave.dcp.metadata import CheckedFile
from ptsave.distributed.items import head_of
from ptsave.streaming.places import Payload
from ptsave.support.progress import ProgressCallback
from ptsave.writing.targets import FileWriter

__all__ = ["RankFile"]

_SMALL_ALIGNMENT = 64


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class RankFile:
    """Lays out one file and writes it.

    Items are added in any order, the small ones first.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []
        self._end = 0

    def add_tensor(self, tensor: Tensor) -> tuple[int, int]:
        """Add a contiguous tensor; returns offset and size of its item."""
        return self._add(tensor.dtype, tensor.shape, tensor.nbytes, tensor)

    def add_payload(
        self, dtype: torch.dtype, shape: torch.Size, payload: Payload
    ) -> tuple[int, int]:
        """Add a tensor whose bytes are in the sources that `write` gets."""
        place = (payload.nbytes, payload.source, payload.offset, payload.parts)
        return self._add(dtype, shape, payload.nbytes, place)

    def _add(
        self, dtype: torch.dtype, shape: torch.Size, nbytes: int, data: Any
    ) -> tuple[int, int]:
        head = head_of(dtype, shape)
        alignment = _SMALL_ALIGNMENT if nbytes < BLOCK_NBYTES else BLOCK_NBYTES
        payload = _align(self._end + len(head), alignment)
        begin = payload - len(head)
        self._pieces.append((begin, head))
        if nbytes:
            self._pieces.append((payload, data))
        self._end = payload + nbytes
        return begin, self._end - begin

    def add_bytes(self, data: bytes) -> tuple[int, int]:
        """Add an item that is whole in itself; returns its offset and size."""
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

        Parameters
        ----------
        path : str
            The file.
        fsync : bool
            Whether it is on the disk when the call returns.
        sources : _C.PayloadSources, optional
            Those of tensors that `add_payload` has added.
        progress : callable, optional
            Gets the number of bytes that are written.

        Raises
        ------
        SaveError
            If it cannot be written.
        """
        plan = _C.CheckedPlan(self._pieces, sources)
        FileWriter(plan, compute_crcs=True, fsync=fsync, atomic=True, progress=progress).write_path(
            path
        )
        nbytes = _align(self._end, BLOCK_NBYTES)
        return CheckedFile(nbytes=nbytes, crcs=section_crcs(plan.block_crcs))
