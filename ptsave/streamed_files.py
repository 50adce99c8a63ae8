"""Files written from payloads that are elsewhere, and compared with checksums on the way."""

from __future__ import annotations

import functools
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive_contents import UnreadContents
from ptsave.errors import SaveError
from ptsave.payload_sources import PayloadSources, StoragePlace
from ptsave.pickling import pickle_object
from ptsave.planning import plan_archive
from ptsave.progress import ProgressCallback
from ptsave.reading import raise_corrupt
from ptsave.safetensors_header import DTYPES, let_library_read
from ptsave.writing import FileWriter

__all__ = ["PicklePlan", "SafetensorsPlan", "StreamedPlan", "safetensors_dtypes"]

_HEADER_ALIGNMENT = 8


class StreamedPlan:
    """A file that is planned, and what its payloads have to be.

    Parameters
    ----------
    path : str
        The file.
    sources : PayloadSources
        What its payloads are read from.

    Attributes
    ----------
    nbytes : int
        The size of the file.
    """

    nbytes: int
    _plan: _C.WritePlan | _C.PackedPlan
    _places: Mapping[Any, StoragePlace]  # of payloads that are whole records, by their keys

    def __init__(self, path: str, sources: PayloadSources) -> None:
        self.path = path
        self._sources = sources

    def write(self, *, fsync: bool, progress: ProgressCallback | None) -> None:
        """Write the file.

        Raises
        ------
        CorruptCheckpointError
            If a record is not what its checksum says; there is no file then.
        SaveError
            If it cannot be written.
        """
        writer = FileWriter(
            self._plan, compute_crcs=True, fsync=fsync, atomic=True, progress=progress
        )
        try:
            writer.write_path(self.path)
        except _C.FormatError as error:
            self._raise_damage(error)

    def _raise_damage(self, error: _C.FormatError) -> NoReturn:
        damaged: dict[UnreadContents, list[_Damaged]] = {}
        for key, crc in self._plan.damaged:
            place = self._places[key]
            assert place.contents is not None
            record = place.contents.reader.engine.record(place.record)
            each = _Damaged(record.name, place.offset, record.crc, crc)
            damaged.setdefault(place.contents, []).append(each)
        for contents, records in damaged.items():
            raise contents.reader.damage(records)  # type: ignore[arg-type]
        raise_corrupt(error, "a source")


class _Damaged(NamedTuple):
    """As `_C.DamagedRecord`."""

    name: str
    payload_offset: int
    expected_crc: int
    actual_crc: int


class PicklePlan(StreamedPlan):
    """What :func:`torch.save` would write of an object whose storages are elsewhere.

    Parameters
    ----------
    obj : object
        What to save.
    path : str
        Where.
    sources : PayloadSources
        Where the bytes of its storages are; those that it does not know are in memory.
    """

    def __init__(self, obj: Any, path: str, sources: PayloadSources) -> None:
        super().__init__(path, sources)
        data, storages = pickle_object(obj, pickle, 2, sources.locations)
        plan = plan_archive(path, data, storages, False)
        self._storages = storages
        places = sources.places_of(_C.untyped_storages(storages))
        self._places = {f"data/{i}": place for i, place in enumerate(places) if place is not None}
        if self._places:
            plan.read_from(
                sources.open(),
                [(name, p.source, p.offset, p.crc) for name, p in self._places.items()],
            )
        self._plan = plan
        self.nbytes = plan.nbytes


class SafetensorsPlan(StreamedPlan):
    """What ``safetensors.torch.save_file`` would write of tensors whose storages are elsewhere.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Strided ones, of dtypes that the format has.
    path : str
        Where.
    sources : PayloadSources
        Where the bytes of their storages are.
    metadata : mapping of str to str
        The ``__metadata__``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        path: str,
        sources: PayloadSources,
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(path, sources)
        if sys.byteorder != "little":
            raise NotImplementedError("safetensors files are little-endian, this machine is not")
        _check_names(tensors)
        names = sorted(tensors, key=lambda name: _order_of(name, tensors[name]))
        payloads = sources.payloads_of([tensors[name] for name in names])
        header = _header({name: tensors[name] for name in names}, metadata)
        self._places = {
            i: payload.place for i, payload in enumerate(payloads) if payload.place is not None
        }
        self._plan = _C.PackedPlan(
            header, sources.open(), [(p.nbytes, p.source, p.offset, p.crc) for p in payloads]
        )
        self.nbytes = self._plan.nbytes
        _check_header(header, self.nbytes, path)


# ------------------------------------------------------------------------------------- safetensors


@functools.cache
def safetensors_dtypes() -> dict[torch.dtype, str]:
    """Return the dtypes that the library writes, in its order, with its names for them."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise ImportError(
            "safetensors files are written with the help of: pip install safetensors"
        ) from None
    found = {name: getattr(torch, text, None) for name, text in DTYPES.items()}
    dtypes: dict[str, torch.dtype] = {name: dtype for name, dtype in found.items() if dtype}
    known = {name: dtype for name, dtype in dtypes.items() if _can_write(save, dtype)}
    data = save({name: torch.empty(0, dtype=dtype) for name, dtype in known.items()})
    header = json.loads(data[8:])
    return {known[name]: fields["dtype"] for name, fields in header.items()}


def _can_write(save: Callable[[dict[str, Tensor]], bytes], dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # it says so in many ways
        return False
    return True


def _order_of(name: str, tensor: Tensor) -> tuple[int, bytes]:
    return list(safetensors_dtypes()).index(tensor.dtype), name.encode()


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


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return what a file of these tensors, in this order, begins with, as the library writes it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        dtype = safetensors_dtypes()[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _check_header(header: bytes, nbytes: int, path: str) -> None:
    from safetensors import SafetensorError

    try:
        let_library_read(header, nbytes, path)
    except SafetensorError as error:
        raise ValueError(f"safetensors cannot hold these tensors: {error}") from None
    except OSError as error:
        raise SaveError.from_os_error(error, path) from None
