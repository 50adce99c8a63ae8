"""Presents a safetensors file as `Contents`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_device
from ptsave.archive.spans import MAX_FETCHED_GAP, MAX_READ_GAP, Span, batches, memory_of
from ptsave.archive.views import (
    Allocator,
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

# Smaller tensors are copied: a process may have 65,530 mappings in all, and a copy costs less.
_MIN_MAPPED_NBYTES = 64 << 10


class SafetensorsContents(OneFile):
    """`Contents` of a safetensors file.

    `maps` maps every large tensor of a local file into memory.  By default, only tensors in the
    page cache of a local file system are mapped.  Each fault of a cold mapping waits for a few
    pages, while several threads read large blocks.  `spans` numbers tensors as the header does.
    """

    def __init__(self, source: RangeSource, *, maps: bool = False) -> None:
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
        self._maps = maps
        self.spans = _SourceSpans(source, header.tensors)

    def park(self) -> None:
        if isinstance(self.source, LocalFile):
            self.source.park()

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        stored = (self._stored[self._numbers[id(tensor)]] for tensor in tensors)
        return [(tensor.name, None, tensor.offset, None) for tensor in stored]

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        self._refuse(verify)
        found: list[Tensor] = []
        spans: dict[int, Span] = {}
        for tensor in tensors:
            number = self._numbers[id(tensor)]
            mapped = self._mapped(number)
            if mapped is not None:
                found.append(mapped)
                continue
            span = spans.get(number)
            if span is None:
                is_fresh = allocate is new_storage and tensor.nbytes >= _MIN_MAPPED_NBYTES
                storage = (_C.huge_page_storage if is_fresh else allocate)(tensor.nbytes)
                span = spans[number] = Span(number, 0, bytes_of(storage))
            found.append(view_as(span.target.untyped_storage(), tensor, 0, tensor.stride()))
        self.spans.read([*spans.values()], verify=False)
        return found

    def _mapped(self, number: int) -> Tensor | None:
        """Return a tensor mapped from the page cache, or None if the file is better read."""
        file, stored = self.source, self._stored[number]
        if not isinstance(file, LocalFile) or stored.nbytes < _MIN_MAPPED_NBYTES:
            return None
        memory = (file.map if self._maps else file.map_cached)(stored.offset, stored.nbytes)
        if memory is None:
            return None
        if memory.data_ptr() % stored.dtype.itemsize:
            memory = memory.clone()
        return memory.view(stored.dtype).view(stored.shape)

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        if _C.can_stage(device):
            return self.read_slice(tensor, ..., verify, device)
        return super().read_to(device, tensor, verify)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        self._refuse(verify)
        number = self._numbers[id(tensor)]
        mapped = None if _C.can_stage(device) else self._mapped(number)
        if mapped is not None:
            return to_device(mapped[index].clone(), device)
        return read_view(self.spans, number, tensor[index], False, device, allocate=allocate)

    def verify(self, *, progress: bool) -> None:
        self._refuse(True)

    def _refuse(self, verify: bool | None) -> None:
        if verify:
            raise ValueError(f"{self.path}: a safetensors file has no checksums to compare")


class _SourceSpans:
    """A `SpanReader` whose records are a file's tensors."""

    def __init__(self, source: RangeSource, tensors: Sequence[StoredTensor]) -> None:
        self._source = source
        self._tensors = tensors
        self.reach_devices = isinstance(source, LocalFile)
        self.max_gap = MAX_READ_GAP if self.reach_devices else MAX_FETCHED_GAP

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        if isinstance(self._source, LocalFile):
            if spans:
                self._read_local(self._source, spans)
            return
        for batch in batches(spans):
            begins = [self._tensors[span.record].offset + span.begin for span in batch]
            pieces = self._source.read(
                [(begin, begin + len(s.target)) for begin, s in zip(begins, batch, strict=True)]
            )
            for span, piece in zip(batch, pieces, strict=True):
                memory_of(span.target)[:] = piece

    def _read_local(self, file: LocalFile, spans: Sequence[Span]) -> None:
        limits = config.current()
        begins = [self._tensors[span.record].offset + span.begin for span in spans]
        with file.opened() as open_file:
            files = _C.RangeFiles(
                [open_file.for_engine], n_threads=limits.n_readers, direct=limits.direct_reads
            )
        files.read(
            [(0, file.begin + at, each.target) for at, each in zip(begins, spans, strict=True)],
            n_threads=limits.n_readers,
            max_pinned_nbytes=limits.max_pinned_nbytes,
            max_gap=self.max_gap,
            progress=None,
        )

    def check(self, records: Sequence[int]) -> None:
        """Do nothing: there are no checksums."""
