"""Safetensors files behind the interface of an archive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_device
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.spans import MAX_FETCHED_GAP, MAX_READ_GAP, Span, batches, memory_of
from ptsave.archive.views import (
    bytes_of,
    new_storage,
    read_view,
    unfilled_tensors,
    view_as,
)
from ptsave.contents.contents import CPU, OneFile, Place
from ptsave.contents.safetensors_header import StoredTensor, read_header
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support import config

__all__ = ["SafetensorsContents"]

# Smaller tensors are copied: a process may have 65,530 mappings in all, and a copy costs less.
_MIN_MAPPED_NBYTES = 64 << 10


class SafetensorsContents(OneFile):
    """The tensors of a safetensors file: `Contents` for it.

    Parameters
    ----------
    source : RangeSource
        The file.

    Attributes
    ----------
    source : RangeSource
        The file.
    header : SafetensorsHeader
        Its header.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    CorruptCheckpointError
        If the library refuses the file.
    """

    def __init__(self, source: RangeSource) -> None:
        self.header = header = read_header(source)
        self.kind = "safetensors"  # the file's own "format" is the library it was written for
        self.metadata = {"format": "safetensors", **header.metadata}
        self.nbytes = source.nbytes
        tensors = unfilled_tensors([(stored.dtype, stored.shape) for stored in header.tensors])
        self.obj = {stored.name: each for stored, each in zip(header.tensors, tensors, strict=True)}
        self.path = source.name
        self._stored = header.tensors
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.source = source
        self._spans = _SourceSpans(source, header.tensors)

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        stored = (self._stored[self._numbers[id(tensor)]] for tensor in tensors)
        return [(tensor.name, None, tensor.offset, None) for tensor in stored]

    def read(self, tensors: Sequence[Tensor], verify: bool | None) -> list[Tensor]:
        self._refuse(verify)
        found: list[Tensor] = []
        spans: list[Span] = []
        for tensor in tensors:
            number = self._numbers[id(tensor)]
            if isinstance(self.source, LocalFile) and tensor.nbytes >= _MIN_MAPPED_NBYTES:
                found.append(_mapped(self.source, self._stored[number]))
                continue
            storage = new_storage(tensor.nbytes)
            spans.append(Span(number, 0, bytes_of(storage)))
            found.append(view_as(storage, tensor, 0, tensor.stride()))
        self._spans.read(spans, verify=False)
        return found

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        if _C.can_stage(device):
            return self.read_slice(tensor, ..., verify, device)
        return super().read_to(device, tensor, verify)

    def read_slice(
        self, tensor: Tensor, index: Any, verify: bool | None, device: torch.device = CPU
    ) -> Tensor:
        self._refuse(verify)
        number = self._numbers[id(tensor)]
        if isinstance(self.source, LocalFile) and not _C.can_stage(device):
            return to_device(_mapped(self.source, self._stored[number])[index].clone(), device)
        return read_view(self._spans, number, tensor[index], False, device)

    def verify(self, *, progress: bool) -> None:
        self._refuse(True)

    def _refuse(self, verify: bool | None) -> None:
        if verify:
            raise ValueError(f"{self.path}: a safetensors file has no checksums to compare")


class _SourceSpans:
    """A `SpanReader` for a file that has to be fetched, whose records are its tensors."""

    def __init__(self, source: RangeSource, tensors: Sequence[StoredTensor]) -> None:
        self._source = source
        self._tensors = tensors
        self.reach_devices = isinstance(source, LocalFile)
        self.max_gap = MAX_READ_GAP if self.reach_devices else MAX_FETCHED_GAP

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        there = [span for span in spans if span.target.device != CPU]
        if there and isinstance(self._source, LocalFile):
            self._send(self._source, there)
            spans = [span for span in spans if span.target.device == CPU]
        for batch in batches(spans):
            begins = [self._tensors[span.record].offset + span.begin for span in batch]
            pieces = self._source.read(
                [(begin, begin + len(s.target)) for begin, s in zip(begins, batch, strict=True)]
            )
            for span, piece in zip(batch, pieces, strict=True):
                memory_of(span.target)[:] = piece

    def _send(self, file: LocalFile, spans: Sequence[Span]) -> None:
        limits = config.current()
        begins = [self._tensors[span.record].offset + span.begin for span in spans]
        try:
            files = _C.RangeFiles(
                [file.for_engine], n_threads=limits.n_readers, direct=limits.direct_reads
            )
            files.read(
                [(0, file.begin + at, each.target) for at, each in zip(begins, spans, strict=True)],
                n_threads=limits.n_readers,
                max_pinned_nbytes=limits.max_pinned_nbytes,
                progress=None,
            )
        except _C.FormatError as error:  # the file has become shorter
            raise_corrupt(error, file.name)

    def check(self, records: Sequence[int]) -> None:
        """Do nothing: there are no checksums."""


def _mapped(file: LocalFile, stored: StoredTensor) -> Tensor:
    """Return a tensor whose bytes come from the page cache when they are used."""
    try:
        memory = file.map(stored.offset, stored.nbytes)
    except _C.FormatError as error:  # the file has become shorter
        raise_corrupt(error, file.name)
    if memory.data_ptr() % stored.dtype.itemsize:
        memory = memory.clone()
    return memory.view(stored.dtype).view(stored.shape)
