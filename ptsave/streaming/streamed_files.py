"""Writes files whose payloads come from other files, and compares checksums on the way."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.damage import RecordDamage, damage_of
from ptsave.contents.contents import UnreadContents
from ptsave.contents.safetensors import header_of, safetensors_dtypes, stored_shape
from ptsave.contents.safetensors_fields import let_library_read
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.streaming.payload_sources import PayloadSources, StoragePlace, is_in_order
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection
from ptsave.tree.extents import span_of
from ptsave.writing.planning import pickle_object, plan_archive
from ptsave.writing.targets import FileTarget, FileWriter, name_of, scratch_folder


class StreamedPlan:
    """A planned file, and the expected checksums of its payloads."""

    nbytes: int  # the size of the file
    engine_plan: _C.WritePlan | _C.PackedPlan  # the layout of the file, and its payloads' places
    _places: Mapping[Any, StoragePlace]  # of payloads, by their keys
    _has_crcs = True  # whether the file, or a payload of it, has checksums

    def __init__(self, target: FileTarget, sources: PayloadSources) -> None:
        self.path = name_of(target)
        self._target = target
        self._sources = sources

    def write(self, *, fsync: bool, progress: ProgressCallback | None) -> None:
        """Write the file; if a record does not match its checksum, there is no file."""
        writer = FileWriter(
            self.engine_plan,
            compute_crcs=self._has_crcs,
            fsync=fsync,
            atomic=True,
            progress=progress,
            scratch_for=self._sources.scratch_for,
            limits=self._sources.limits,
        )
        try:
            writer.write_file(self._target)
        except CorruptCheckpointError:
            self._require_undamaged()
            raise

    def _require_undamaged(self) -> None:
        """Raise if the last write has found damage, with the entries that it reaches."""
        damaged: dict[UnreadContents, list[RecordDamage]] = {}
        for key, crc in self.engine_plan.damaged:
            place = self._places[key]
            if place.contents is None:
                raise CorruptCheckpointError(
                    f"{place.path}: the checksum of {place.entry} differs: copy the checkpoint "
                    "again, or find what is damaged with `ptsave verify`",
                    path=place.path,
                    entries=[place.entry],
                )
            record = place.contents.reader.engine.record(place.record)
            each = RecordDamage(record.name, place.offset, record.crc, crc)
            damaged.setdefault(place.contents, []).append(each)
        for contents, records in damaged.items():
            raise damage_of(contents.reader, records)


class PicklePlan(StreamedPlan):
    """A file like that of :func:`torch.save`, of an object whose storages are elsewhere."""

    def __init__(self, obj: Any, target: FileTarget, sources: PayloadSources) -> None:
        super().__init__(target, sources)
        data, storages = pickle_object(obj, pickle, 2, sources.locations)
        plan = plan_archive(target, data, storages, False)
        self._storages = storages
        places = sources.places_of(_C.untyped_storages(storages))
        self._places = {f"data/{i}": place for i, place in enumerate(places) if place is not None}
        if self._places:
            plan.read_from(
                sources.open(),
                [(name, p.source, p.offset, p.crc, p.parts) for name, p in self._places.items()],
            )
        self.engine_plan = plan
        self.nbytes = plan.nbytes


class SafetensorsPlan(StreamedPlan):
    """A file like that of ``safetensors.torch.save_file``, of tensors with storages elsewhere."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        target: FileTarget,
        sources: PayloadSources,
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(target, sources)
        if sys.byteorder != "little":
            raise NotImplementedError("safetensors files are little-endian, this machine is not")
        _check_names(tensors)
        with pausing_garbage_collection():
            in_order, header = header_of(tensors, metadata)
        self._places, self._has_crcs = {}, False
        if any(tensor.device.type != "cpu" for tensor in in_order):
            self.engine_plan = _C.PackedPlan.of_tensors(header, in_order)
        else:
            payloads = sources.payloads_in_memory(in_order) or sources.payloads_of(in_order)
            self._places = dict(enumerate(payloads))
            self.engine_plan = _packed_plan(header, sources, payloads)
            self._has_crcs = any(payload.crc is not None for payload in payloads)
        self.nbytes = self.engine_plan.nbytes
        from safetensors import SafetensorError

        try:
            let_library_read(header, self.nbytes, self.path)
        except SafetensorError as error:
            raise ValueError(f"safetensors cannot hold these tensors: {error}") from None
        except OSError as error:
            raise SaveError.from_os_error(error, self.path) from None


# ------------------------------------------------------------------------------ tensors with values


def write_safetensors(
    tensors: Mapping[str, Tensor],
    target: FileTarget,
    metadata: Mapping[str, str],
    *,
    fsync: bool = False,
    are_checked: bool = False,
) -> None:
    """Write tensors that have values, in the bytes of ``safetensors.torch.save_file``.

    Unlike that function, it takes tensors that share memory or are not contiguous.  Tensors that
    the engine cannot read in place are copied to the CPU for the time of the call.  `are_checked`
    says that `check_safetensors` has seen the tensors.
    """
    if not are_checked:
        check_safetensors(tensors)
    with pausing_garbage_collection(), ExitStack() as stack:
        sources = PayloadSources(stack, scratch_folder(target))
        plain = {name: _in_reach(tensor) for name, tensor in tensors.items()}
        SafetensorsPlan(plain, target, sources, metadata).write(fsync=fsync, progress=None)


def write_bytes(
    target: FileTarget, head: bytes, values: Tensor | None = None, *, fsync: bool = False
) -> None:
    """Replace a file atomically by `head` and the bytes of `values`, a contiguous CPU tensor."""
    with ExitStack() as stack:
        sources = PayloadSources(stack, scratch_folder(target))
        payloads = sources.payloads_of([] if values is None else [values])
        plan = _packed_plan(head, sources, payloads)
        writer = FileWriter(plan, compute_crcs=False, fsync=fsync, atomic=True, progress=None)
        writer.write_file(target)


def check_safetensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError for tensors that safetensors files cannot hold."""
    _check_names(tensors)
    dtypes = safetensors_dtypes()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"safetensors files hold dense tensors, and {name!r} is {layout}: write a .pt file"
            )
        if tensor.dtype not in dtypes:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(
                f"safetensors files hold no {dtype}, which {name!r} is: write a .pt file"
            )
        stored_shape(tensor.dtype, tensor.shape)
        storage = tensor.untyped_storage()
        if tensor.numel() and (tensor.is_meta or span_of(tensor)[1] > storage.nbytes()):
            raise TypeError(f"{name!r} has no memory for its values: nothing to write")


def _in_reach(tensor: Tensor) -> Tensor:
    """Return a tensor whose bytes are the file's, in memory from which the engine can write."""
    if is_in_order(tensor) and (tensor.device.type == "cpu" or _C.can_stage(tensor.device)):
        return tensor.detach()
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _packed_plan(
    head: bytes, sources: PayloadSources, payloads: Iterable[StoragePlace]
) -> _C.PackedPlan:
    each = [
        (payload.nbytes, payload.source, payload.offset, payload.crc, payload.parts)
        for payload in payloads
    ]
    return _C.PackedPlan(head, sources.open(), each)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == "__metadata__":
            raise ValueError("safetensors files have no tensor called '__metadata__': rename it")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"safetensors files have no tensor called {name!r}, which is not Unicode: rename it"
            ) from None
