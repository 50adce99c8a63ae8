"""The object that an open archive holds, and how the values of its tensors are had."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, _weights_only_unpickler
from torch.nn import Parameter

from ptsave import _C
from ptsave.entries import storage_id
from ptsave.errors import CheckpointWarning
from ptsave.progress import progress_bar
from ptsave.reading import RecordReader
from ptsave.serialization import unpickling_errors
from ptsave.slicing import blocks_of, span_of
from ptsave.sources import RemoteReader
from ptsave.spans import EngineSpans, FetchedSpans, Span, SpanReader
from ptsave.unpickling import unpickle_unread

__all__ = ["Contents", "LoadedContents", "Place", "UnreadContents", "as_saved", "view_over"]

_SMALL_TEXTS = ("version", "byteorder", "serialization_id", "format_version", "storage_alignment")
_MAX_SPARSE_NBYTES = 64 << 20  # of which most is dropped
_ALIGNMENT = 16  # the largest size of an element
_VERIFIED_AT_ONCE_NBYTES = 512 << 20  # between two movements of a progress bar


# Where in a file a storage lies: what tells it from others, the archive's record, the offset in
# bytes, and the device it was saved from.  A plain tuple, of which there may be 100,000.
Place: TypeAlias = tuple[object, str | None, int | None, str | None]


class Contents(Protocol):
    """What an `Archive` asks of a file.  Safe for concurrent use.

    Attributes
    ----------
    obj : object
        What was saved.  The values of its tensors may not be there.
    metadata : dict
        What the file says about itself.
    """

    obj: Any
    metadata: dict[str, str]

    def places_of(self, tensors: list[Tensor]) -> list[Place]: ...
    def read(self, tensors: Sequence[Tensor], verify: bool | None) -> list[Tensor]: ...
    def read_slice(self, tensor: Tensor, index: Any, verify: bool | None) -> Tensor: ...
    def verify(self, *, progress: bool) -> None: ...


class UnreadContents:
    """The tensors are unread: they have storages that take no memory and hold no values.

    Parameters
    ----------
    reader : RecordReader
        An archive for which `can_defer_reading` holds.

    Attributes
    ----------
    reader : RecordReader
        The archive.
    """

    def __init__(self, reader: RecordReader) -> None:
        self.reader = reader
        self._first_at: dict[int, str] = {}
        # The unpickler keeps its reader until the next garbage collection.
        with (
            closing(RecordReader(reader.engine, reader.path, verify=reader.verify)) as unpickled,
            unpickling_errors(_weights_only_unpickler),
        ):
            self.obj = unpickle_unread(unpickled, _weights_only_unpickler, set(), self._first_at)
        self.metadata = metadata_of(reader)
        self._spans: SpanReader = (
            FetchedSpans(reader) if isinstance(reader, RemoteReader) else EngineSpans(reader)
        )

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        engine = self.reader.engine
        places: list[Place] = [*engine.places()]
        for number, location in self._first_at.items():
            places[number] = (*places[number][:3], location)
        return [
            (id(tensor), None, None, None) if number is None else places[number]
            for number, tensor in zip(engine.records_of(tensors), tensors, strict=True)
        ]

    def read(self, tensors: Sequence[Tensor], verify: bool | None) -> list[Tensor]:
        """Read tensors; those that share a storage do so afterwards."""
        if len(tensors) == 1:
            return [as_saved(tensors[0], self._read_view(tensors[0].detach(), verify))]
        extents: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            number = self.reader.engine.record_of(tensor)
            begin, end = span_of(tensor)
            begin -= begin % _ALIGNMENT  # the others may be of other dtypes
            if number is not None and begin < end:
                first, last = extents.get(number, (begin, end))
                extents[number] = min(first, begin), max(last, end)
        storages = {number: _new_storage(end - begin) for number, (begin, end) in extents.items()}
        spans = [Span(i, extents[i][0], _bytes(storage)) for i, storage in storages.items()]
        self._spans.read(spans, verify=verify)
        result = []
        for tensor in tensors:
            number = self.reader.engine.record_of(tensor)
            if number is None or number not in extents:
                result.append(
                    as_saved(tensor, view_over(_new_storage(0), tensor, 0, tensor.stride()))
                )
                continue
            offset = int(tensor.storage_offset()) - extents[number][0] // tensor.itemsize
            result.append(
                as_saved(tensor, view_over(storages[number], tensor, offset, tensor.stride()))
            )
        return result

    def read_slice(self, tensor: Tensor, index: Any, verify: bool | None) -> Tensor:
        return self._read_view(tensor.detach()[index], verify)

    def _read_view(self, view: Tensor, verify: bool | None) -> Tensor:
        """Read the bytes of one view; what comes with them is not kept."""
        blocks = blocks_of(view, self._spans.max_gap)
        number = self.reader.engine.record_of(view)
        nbytes = blocks.nbytes * len(blocks.begins)
        if number is not None and nbytes > max(_MAX_SPARSE_NBYTES, 2 * view.nbytes):
            if verify:
                self._spans.check([number])
            return self._read_halves(view, False)
        storage = _new_storage(nbytes)
        if number is not None:
            memory = _bytes(storage)
            self._spans.read(
                [
                    Span(number, begin, memory[i * blocks.nbytes : (i + 1) * blocks.nbytes])
                    for i, begin in enumerate(blocks.begins)
                ],
                verify=verify,
            )
        result = view_over(storage, view, 0, blocks.stride)
        return result.contiguous() if result.nbytes < storage.nbytes() else result

    def _read_halves(self, view: Tensor, verify: bool) -> Tensor:
        """Read a view that is scattered over much more than it holds, without holding all that."""
        result = torch.empty(view.shape, dtype=view.dtype, device="cpu")
        dims = [dim for dim in range(view.dim()) if view.shape[dim] > 1]
        dim = max(dims, key=view.stride)
        half = view.shape[dim] // 2
        for begin, n in ((0, half), (half, view.shape[dim] - half)):
            part = self._read_view(view.narrow(dim, begin, n), verify)
            result.narrow(dim, begin, n).copy_(part)
        return result

    def verify(self, *, progress: bool) -> None:
        """Compare every record with its checksum."""
        engine = self.reader.engine
        with progress_bar(progress, "verifying", engine.nbytes) as callback:
            batch: list[int] = []
            nbytes = 0
            for number, record in self._records_with_checksums():
                batch.append(number)
                nbytes += record.nbytes
                if callback is not None and nbytes >= _VERIFIED_AT_ONCE_NBYTES:
                    self._spans.check(batch)
                    batch, nbytes = [], 0
                    callback(record.limit)
            if batch:
                self._spans.check(batch)

    def check(self, records: Sequence[int]) -> None:
        """Compare some records, by their numbers, with their checksums."""
        self._spans.check(records)

    def _records_with_checksums(self) -> list[tuple[int, _C.Record]]:
        engine = self.reader.engine
        records = list(enumerate(engine.records()))
        if engine.storages_have_crcs:
            return records
        warnings.warn(
            f"{self.reader.path} was written without checksums of its storages "
            "(set_crc32_options(False) or skip_data()): they cannot be verified",
            CheckpointWarning,
            stacklevel=4,
        )
        others = set(engine.other_names()) if engine.has_crcs else set()
        return [(number, record) for number, record in records if record.name in others]


class LoadedContents:
    """The tensors are in memory: the file is of a kind that can only be loaded as a whole.

    Parameters
    ----------
    obj : object
        What it holds.
    locations : dict of int to str
        The locations of its storages, by `storage_id`.
    metadata : dict
        As of `Contents`.
    """

    def __init__(self, obj: Any, locations: dict[int, str], metadata: dict[str, str]):
        self.obj = obj
        self.metadata = metadata
        self.locations = locations

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        return list(map(self._place_of, tensors))

    def _place_of(self, tensor: Tensor) -> Place:
        storage = storage_id(tensor)
        if storage is None:
            return id(tensor), None, None, str(tensor.device)
        return storage, None, None, self.locations.get(storage, str(tensor.device))

    def read(self, tensors: Sequence[Tensor], verify: bool | None) -> list[Tensor]:
        return list(tensors)

    def read_slice(self, tensor: Tensor, index: Any, verify: bool | None) -> Tensor:
        return tensor.detach()[index].clone()

    def verify(self, *, progress: bool) -> None:
        """Do nothing: what could be verified was when it was loaded."""


def metadata_of(reader: RecordReader) -> dict[str, str]:
    """Return what the small records of an archive say."""
    names = [(text, f".data/{text}", f".{text}", text) for text in _SMALL_TEXTS]
    metadata = {"format": "pt"}
    for text, *places in names:
        found = next((name for name in places if reader.has_record(name)), None)
        if found is not None:
            metadata[text] = reader.get_record(found).decode("utf-8", "replace").strip()
    return metadata


def _new_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device="cpu")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def view_over(
    storage: torch.UntypedStorage, like: Tensor, offset: int, stride: tuple[int, ...]
) -> Tensor:
    """Return a tensor over a storage with the dtype, the shape and the lazy bits of another."""
    tensor = torch.empty(0, dtype=like.dtype, device="cpu")
    tensor.set_(storage, offset, like.shape, stride)
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def as_saved(like: Tensor, values: Tensor) -> Tensor:
    """Return values as a tensor of the kind that was saved."""
    if isinstance(like, Parameter):
        return Parameter(values, requires_grad=like.requires_grad)
    return values.requires_grad_() if like.requires_grad else values
