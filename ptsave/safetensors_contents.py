"""Safetensors files, read by the safetensors library behind the interface of an archive."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave.archive_contents import Place
from ptsave.errors import CorruptCheckpointError
from ptsave.slicing import span_of

__all__ = ["SafetensorsContents"]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SafetensorsContents:
    """The tensors of a safetensors file: `Contents` for it.

    Parameters
    ----------
    stream : io.FileIO or buffered file
        A real file, at the beginning of the file.
    path : str
        What to call it in messages.
    begin : int
        The stream's position.

    Raises
    ------
    ImportError
        If safetensors is not installed.
    CorruptCheckpointError
        If the library refuses the file.
    """

    def __init__(self, stream: Any, path: str, begin: int) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                f"{path} is a safetensors file: to open it, pip install safetensors"
            ) from error
        name = getattr(stream, "name", None)
        if begin != 0 or not isinstance(name, (str, bytes)):
            raise OSError(f"{path}: a safetensors file has to be given as a path")
        try:
            open_file: Any = safe_open  # its methods have no annotations
            self._file = open_file(os.fsdecode(name), framework="pt", device="cpu")
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{path}: {error}", path=path) from error
        self.metadata = {"format": "safetensors", **(self._file.metadata() or {})}
        self.nbytes = os.fstat(stream.fileno()).st_size
        self._path = path
        self._read_header(stream)

    def _read_header(self, stream: Any) -> None:
        """Make tensors without values.

        The library has checked the header, but does not tell where tensors lie.
        """
        nbytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(nbytes))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        self.obj: dict[str, Tensor] = {}
        self._places: dict[int, Place] = {}
        self._names: dict[int, str] = {}
        for name, entry in entries:
            tensor = torch.empty(entry["shape"], dtype=self._dtype(name, entry), device="meta")
            self.obj[name] = tensor
            self._names[id(tensor)] = name
            offset = 8 + nbytes + entry["data_offsets"][0]
            self._places[id(tensor)] = (name, None, offset, None)

    def _dtype(self, name: str, entry: dict[str, Any]) -> torch.dtype:
        try:
            return _DTYPES[entry["dtype"]]
        except KeyError:
            raise CorruptCheckpointError(
                f"{self._path}: {name}: no dtype of torch is {entry['dtype']}", path=self._path
            ) from None

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        return [self._places[id(tensor)] for tensor in tensors]

    def read(self, tensors: Sequence[Tensor], verify: bool | None) -> list[Tensor]:
        self._refuse(verify)
        return [self._file.get_tensor(self._names[id(tensor)]) for tensor in tensors]

    def read_slice(self, tensor: Tensor, index: Any, verify: bool | None) -> Tensor:
        self._refuse(verify)
        name = self._names[id(tensor)]
        view = tensor[index]
        if view.numel() == 0 or tensor.dim() == 0:
            whole: Tensor = self._file.get_tensor(name)
            return whole[index].clone() if view.numel() else _empty(view)
        begin, end = (offset // view.itemsize for offset in span_of(view))
        row = tensor.stride(0)
        first, last = begin // row, (end - 1) // row
        rows: Tensor = self._file.get_slice(name)[first : last + 1].contiguous()
        offset = rows.storage_offset() + view.storage_offset() - first * row
        return rows.as_strided(view.shape, view.stride(), offset).clone()

    def verify(self, *, progress: bool) -> None:
        self._refuse(True)

    def _refuse(self, verify: bool | None) -> None:
        if verify:
            raise ValueError(f"{self._path}: a safetensors file has no checksums to compare")


def _empty(view: Tensor) -> Tensor:
    return torch.empty(view.shape, dtype=view.dtype, device="cpu")
