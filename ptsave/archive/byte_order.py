"""Shows torch an archive in this machine's byte order, so that it swaps no bytes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ptsave.support.torch_tensors import set_checkpoint_offset

__all__ = ["NativeOrderReader"]

_RECORD = "byteorder"


class NativeOrderReader:
    """An archive whose storages are made without bytes, so that none can be swapped.

    :func:`torch.load` swaps the bytes of storages on the meta device, too, and ends in a
    segmentation fault.  A record that names no byte order is shown as it is: torch refuses it.

    Parameters
    ----------
    reader : RecordReader
        The archive.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def has_record(self, name: str) -> bool:
        return name == _RECORD or bool(self._reader.has_record(name))

    def get_record(self, name: str) -> bytes:
        found: bytes | None = None
        if name != _RECORD or self._reader.has_record(name):
            found = self._reader.get_record(name)
        if name == _RECORD and found in (None, b"little", b"big"):
            return sys.byteorder.encode()
        assert found is not None
        return found

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> torch.Tensor:
        """Make a storage as torch does for the meta device, where an older torch would read it."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        set_checkpoint_offset(tensor.untyped_storage(), self.get_record_offset(name))
        return tensor
