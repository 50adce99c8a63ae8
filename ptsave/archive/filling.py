"""Fills the storages of an archive with bytes, in CPU memory or on accelerators.

Before bytes are read, torch's rules choose a device for each saved location such as "cuda:0".
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.reader import ID_RECORD, RecordReader
from ptsave.errors import CheckpointWarning
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, warn_user
from ptsave.support.torch_names import location_rules, restore_location

_ID_N_DIGITS = 20  # of the hash of names in the id; a hash of checksums follows
_CPU = torch.device("cpu")


def verifies_storages(reader: RecordReader) -> bool:
    """Whether to compare the storages with their checksums; warn if the checksums are missing."""
    if not reader.verify or reader.engine.storages_have_crcs:
        return reader.verify
    if storages_were_left_out(reader):
        return False
    warn_user(
        f"{reader.path} was written without checksums of its storages "
        "(set_crc32_options(False)): the storages are loaded unverified",
        CheckpointWarning,
    )
    return False


def storages_were_left_out(reader: RecordReader) -> bool:
    """Whether the file was written under torch's ``skip_data``, without the storages' bytes."""
    # In such a file, storages lack checksums but other records have them, and the serialization id
    # ends with the hash of their checksums.  An ordinary file that lost checksums has another id.
    if reader.engine.storages_have_crcs or not reader.engine.has_crcs:
        return False
    records = [record for record in reader.engine.records() if record.name != ID_RECORD]
    crcs = [record.crc for record in records if record.nbytes]
    folded = 0  # as docs/format.md says
    for crc in crcs:
        folded ^= (crc + 0x9E3779B9 + (folded << 6) + (folded >> 2)) & 0xFFFF_FFFF_FFFF_FFFF
    return reader.serialization_id()[_ID_N_DIGITS:] == f"{folded:0{_ID_N_DIGITS}}"


def resources(limits: config.Config) -> dict[str, Any]:
    """Return keyword arguments that limit the threads and memory of the engine's reads."""
    return {"n_threads": limits.n_readers, "max_pinned_nbytes": limits.max_pinned_nbytes}


def fill(
    reader: RecordReader, records: Iterable[int], *, verify: bool, progress: ProgressCallback | None
) -> None:
    """Make the copies that the engine has noted, and read `records` into their storages."""
    damaged = reader.engine.fill(
        list(records), verify=verify, progress=progress, **resources(reader.limits)
    )
    if damaged:
        from ptsave.archive.damage import damage_of

        raise damage_of(reader, damaged)


# ----------------------------------------------------------------------------------- devices


def accelerator_of(map_location: Any) -> torch.device | None:
    """Return the accelerator for all storages; None if uncertain, or if ptsave cannot fill it."""
    if type(map_location) not in (str, torch.device) or not _follows_torchs_rules():
        return None
    device = restore_location(map_location)(torch.UntypedStorage(0), "cpu").device
    return device if _C.can_stage(device) else None


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor.to(device)``, but copy as `to_devices` does."""
    (result,) = to_devices([tensor], [torch.device(device)])
    return result


def to_devices(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Return each tensor on its device; large amounts are copied through page-locked memory."""
    results: list[Tensor | None] = [None] * len(tensors)
    if sum(tensor.nbytes for tensor in tensors if _is_bytes(tensor)) >= _C.MIN_PINNED_NBYTES:
        results = [memory_for(*pair) for pair in zip(tensors, devices, strict=True)]
    copies = [(t, there) for t, there in zip(tensors, results, strict=True) if there is not None]
    if copies:
        _C.copy_to_devices(copies, **resources(config.current()))
    return [
        tensor.to(device) if there is None else there
        for tensor, device, there in zip(tensors, devices, results, strict=True)
    ]


def memory_for(tensor: Tensor, device: torch.device) -> Tensor | None:
    """Return a new tensor to copy `tensor` into; None if only ``tensor.to`` can copy it."""
    if not _is_bytes(tensor):
        return None
    target = torch.empty(0, device=device).device
    return torch.empty_like(tensor, device=target) if _C.can_stage(target) else None


def _is_bytes(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device == _CPU
        and not tensor.requires_grad
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def may_reach_accelerator(reader: RecordReader, map_location: Any) -> bool:
    """Whether a load may have to put storages of an archive on this process's accelerator."""
    accelerator = torch.accelerator.current_accelerator()  # from torch's build; starts no device
    if accelerator is None or not _follows_torchs_rules():
        return False
    name = accelerator.type
    if type(map_location) in (str, torch.device):
        return str(map_location).startswith(name)
    if map_location is None:
        return name.encode() in reader.get_record("data.pkl")
    return type(map_location) is dict and (
        name.encode() in reader.get_record("data.pkl")
        or any(str(device).startswith(name) for device in map_location.values())
    )


def goes_by_torchs_rules(map_location: Any) -> bool:
    """Whether only torch's own rules choose the devices of storages, without user code."""
    known = map_location is None or type(map_location) in (str, torch.device, dict)
    return known and _follows_torchs_rules()


def _follows_torchs_rules() -> bool:
    """Whether all registered rules that move storages to devices are torch's own."""
    rules = (rule for _, _, rule in location_rules)
    functions = (rule.func if isinstance(rule, functools.partial) else rule for rule in rules)
    return all(function.__module__ == "torch.serialization" for function in functions)


class _Placement:
    """A `map_location` function for storages that have memory, but no bytes from the file yet."""

    def __init__(self, reader: RecordReader, map_location: Any) -> None:
        self._reader = reader
        self._restore = restore_location(map_location)
        self._devices: dict[str, torch.device] = {}

    def _fills(self, device: torch.device) -> bool:
        """Whether the engine itself makes the storages on `device`, and reads their bytes later."""
        return device == _CPU

    def _device_of(self, location: str) -> torch.device:
        device = self._devices.get(location)
        if device is None:
            # torch moves an empty storage to the right device, or raises its error for the
            # location.
            device = self._restore(torch.UntypedStorage(0), location).device
            self._devices[location] = device
            if self._fills(device):
                self._reader.engine.place(location, device)
        return device


class Placement(_Placement):
    """Makes storages directly on accelerators; ``engine.fill()`` reads their bytes later."""

    def __init__(self, reader: RecordReader, map_location: Any, *, verify: bool) -> None:
        super().__init__(reader, map_location)
        self._verify = verify

    def __call__(self, storage: torch.UntypedStorage, location: str) -> Any:
        if storage.nbytes() == 0:
            return self._restore(storage, location)
        device = self._device_of(location)
        if device == _CPU:
            return storage
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = self._reader.engine.record_of(tensor)
        if record is not None and _C.can_stage(device):
            return self._reader.engine.placed_storage(record, device)
        if record is not None:
            self._fill([record])
        return self._restore(storage, location)

    def finish(self) -> None:
        """Read the bytes of all storages that are still in use."""
        self._fill(self._reader.engine.referenced())

    def _fill(self, records: list[int]) -> None:
        fill(self._reader, records, verify=self._verify, progress=self._reader.progress)

    def _fills(self, device: torch.device) -> bool:
        return device == _CPU or _C.can_stage(device)


class ReceivedPlacement(_Placement):
    """A `_Placement` for received bytes; `placed` holds the storages that are not on the CPU."""

    def __init__(self, reader: RecordReader, map_location: Any) -> None:
        super().__init__(reader, map_location)
        self.placed: dict[int, torch.UntypedStorage] = {}

    def __call__(self, storage: torch.UntypedStorage, location: str) -> Any:
        device = self._device_of(location)
        if device == _CPU and storage.nbytes() > 0:
            return storage
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = self._reader.engine.record_of(tensor)
        if record is None or device.type == "meta":
            return self._restore(storage, location)
        if record not in self.placed:
            self.placed[record] = torch.UntypedStorage(storage.nbytes(), device=device)
        return self.placed[record]
