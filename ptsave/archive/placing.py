"""Places storages on devices by torch's rules, asked once for each location, before any bytes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ptsave import _C
from ptsave.archive.filling import fill
from ptsave.archive.reader import RecordReader
from ptsave.support.torch_serialization import location_rules, restore_location

__all__ = ["Placement", "may_reach_accelerator"]

_CPU = torch.device("cpu")


def may_reach_accelerator(reader: RecordReader, map_location: Any) -> bool:
    """Whether storages of an archive may have to go to this process's accelerator.

    Parameters
    ----------
    reader : RecordReader
        The archive.
    map_location : Any
        As for :func:`torch.load`.  A callable wants to see the storages on the CPU first.
    """
    accelerator = torch.accelerator.current_accelerator()  # of torch's build: nothing starts
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


def _follows_torchs_rules() -> bool:
    """Whether nobody has registered a way of their own to bring storages to devices."""
    return all(
        _function_of(deserialize).__module__ == "torch.serialization"
        for _, _, deserialize in location_rules
    )


def _function_of(deserialize: Any) -> Any:
    return deserialize.func if isinstance(deserialize, functools.partial) else deserialize


class Placement:
    """A callable `map_location` for torch's loader, for storages that are not read yet.

    Storages for accelerators are made there at once, and filled by the next ``engine.fill()``.

    Parameters
    ----------
    reader : RecordReader
        The archive, with all storages reserved.
    map_location : None, str, torch.device or dict
        As for :func:`ptsave.load`.
    verify : bool
        Whether records are compared with their checksums.
    """

    def __init__(self, reader: RecordReader, map_location: Any, *, verify: bool) -> None:
        self._reader = reader
        self._verify = verify
        self._restore = restore_location(map_location)
        self._devices: dict[str, torch.device] = {}

    def __call__(self, storage: torch.UntypedStorage, location: str) -> Any:
        if storage.nbytes() == 0:
            return self._restore(storage, location)
        device = self._device_of(location)
        if device == _CPU:
            return storage
        engine = self._reader.engine
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = engine.record_of(tensor)
        if record is not None and _C.can_stage(device):
            return engine.placed_storage(record, device)
        if record is not None:
            self._fill([record])
        return self._restore(storage, location)

    def finish(self) -> None:
        """Read the bytes of all storages that anybody has."""
        self._fill(self._reader.engine.referenced())

    def _fill(self, records: list[int]) -> None:
        fill(self._reader, records, verify=self._verify, progress=self._reader.progress)

    def _device_of(self, location: str) -> torch.device:
        device = self._devices.get(location)
        if device is None:
            # torch moves an empty storage to the right device, or raises its error for the
            # location.
            device = self._restore(torch.UntypedStorage(0), location).device
            self._devices[location] = device
            if device == _CPU or _C.can_stage(device):
                self._reader.engine.place(location, device)
        return device
