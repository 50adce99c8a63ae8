"""Reads and writes ``.metadata``, the pickle that makes a directory a DCP checkpoint.

In a rank's file of `ptsave.distributed`, a table follows the last block of data.  It has the CRC-32
of each block of 4,096 bytes.  A section of the table covers 1,024 blocks, and the metadata has a
CRC-32 for each section.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import Buffer

from ptsave import _C
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import regular_only
from ptsave.sources.locations import identity_of
from ptsave.support import torch_dcp
from ptsave.support.calls import pausing_garbage_collection
from ptsave.support.torch_names import user_allowed_globals

BLOCK_NBYTES = _C.CHECKED_BLOCK_NBYTES
SECTION_BLOCKS = 1024
SECTION_NBYTES = SECTION_BLOCKS * BLOCK_NBYTES
CRC_NBYTES = 4

# The attribute of StorageMeta that lists the files with checksums; stock torch ignores it.
_ATTRIBUTE = "ptsave"
_FORMAT = 1
# This text and the pickle's CRC-32 follow the pickle; unpicklers ignore bytes after its end.
_TRAILER = b"ptsave\0\1"
_TRAILER_NBYTES = len(_TRAILER) + 4

_CLASSES: tuple[type, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    torch_dcp.MemoryFormat,
    torch_dcp.StorageInfo,
    torch.Size,
    OrderedDict,
)


class _MegatronMetadata(Metadata):
    """Metadata of Megatron-LM's format ``torch_dist``: DCP's fields, and more for resharding."""


class _Opaque:
    """A value that only Megatron-LM uses."""


_MEGATRON = {"MCoreMetadata": _MegatronMetadata, "MCoreSavePlan": _Opaque}
_GUARDED = (*_CLASSES, *_MEGATRON.values())
_ALLOWED = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _CLASSES}
# Older torch releases pickle two of the classes under these names, with the same state.
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED[f"{_SHARDED_TENSOR}.TensorProperties"] = TensorProperties
_ALLOWED[f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING"] = torch_dcp.MemoryFormat
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"}
_MAX_NUMBER = (1 << 31) - 1
_pack_number = struct.Struct("<I").pack
_pack_int = struct.Struct("<i").pack
_NEW, _STATE, _BUILD = b")\x81", b"}(", b"ub"


def metadata_name(rank: int | None) -> str:
    """Return the metadata file's name: for all ranks (None), or for a rank that saves by itself."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


# ------------------------------------------------------------------------------------- reading it


class _Unpickler(pickle.Unpickler):
    """Builds only plain values, DCP's classes, and classes that the user allows."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names; raise if the pickle may not use the object.

        For a path class, this is a new function, because a pickle could change a shared function.
        """
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in _MEGATRON:
            return _MEGATRON[name]
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        if full == f"torch.serialization.{torch_dcp.layout_function}":
            return lambda text: _layout(text)  # noqa: PLW0108 (a pickle may set attributes of it)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return lambda *parts: os.path.join(*map(str, parts))
        allowed = user_allowed_globals()
        if full in allowed:
            return allowed[full]
        raise pickle.UnpicklingError(
            f"the pickle names {full}, which DCP's metadata does not need: if you trust the file, "
            "allow this name with torch.serialization.add_safe_globals"
        )


def _layout(text: str) -> torch.layout:
    value = getattr(torch, str(text).removeprefix("torch."), None)
    if not isinstance(value, torch.layout):
        raise pickle.UnpicklingError(f"torch has no layout {text!r}, which the pickle names")
    return value


@contextmanager
def _guarded_classes() -> Iterator[None]:
    """After the `with` block, undo a pickle's changes to allowed classes, and raise if any."""
    before = {kind: dict(vars(kind)) for kind in _GUARDED}
    try:
        yield
    finally:
        changed = [kind for kind in _GUARDED if dict(vars(kind)) != before[kind]]
        for kind in changed:
            for name in vars(kind).keys() - before[kind].keys():
                type.__delattr__(kind, name)
            for name, value in before[kind].items():
                if vars(kind).get(name) is not value:
                    type.__setattr__(kind, name, value)
        if changed:
            raise pickle.UnpicklingError(f"the pickle changes the class {changed[0].__qualname__}")


def load_metadata(path: str, *, data: bytes | None = None) -> Metadata:
    """Read metadata from a local file or from `data`, without running code that it contains."""
    data = _read(path) if data is None else data
    if data[-_TRAILER_NBYTES:].startswith(_TRAILER) and data != _with_trailer(
        data[:-_TRAILER_NBYTES]
    ):
        raise CorruptCheckpointError(f"{path}: damaged: its checksum differs", path=path)
    claim = _C.unjustified_claim(data)
    if claim is not None:
        raise CorruptCheckpointError(f"{path}: damaged: {claim}", path=path)
    return _unpickled(io.BytesIO(data), path)


def _read(path: str) -> bytes:
    with open(path, "rb", opener=regular_only) as stream:  # a pipe might never end
        return stream.read()


def _with_trailer(data: bytes) -> bytes:
    return data + _TRAILER + _C.crc32(data).to_bytes(4, "little")


def dump_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of a metadata file: a pickle, and its checksum, which torch ignores."""
    return _with_trailer(pickled_metadata(metadata) or pickle.dumps(metadata, protocol=4))


def has_checksum(path: str, data: bytes | None = None) -> bool:
    """Return whether metadata that `load_metadata` can read has a checksum.

    Raises CorruptCheckpointError for other bytes after the pickle, such as a damaged checksum.
    """
    stream = io.BytesIO(_read(path) if data is None else data)
    _unpickled(stream, path)
    rest = stream.read()
    if rest and not (rest.startswith(_TRAILER) and len(rest) == _TRAILER_NBYTES):
        raise CorruptCheckpointError(
            f"{path}: damaged: {len(rest)} bytes after its end are not a checksum", path=path
        )
    return bool(rest)


def _unpickled(stream: io.BytesIO, path: str) -> Metadata:
    try:
        with pausing_garbage_collection(), _guarded_classes():
            metadata = _Unpickler(stream).load()
    except MemoryError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path}: not the metadata of a checkpoint: {error}", path=path
        ) from error
    if type(metadata) is _MegatronMetadata:
        names = {each.name for each in dataclasses.fields(Metadata)}
        found = {name: value for name, value in vars(metadata).items() if name in names}
        metadata = Metadata(**{"state_dict_metadata": None, **found})
    _check_types(metadata, path)
    return metadata  # type: ignore[no-any-return]


def _check_types(metadata: Any, path: str) -> None:
    if type(metadata) is not Metadata:
        raise CorruptCheckpointError(f"{path}: the file holds no DCP metadata", path=path)
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(vars(metadata).get(name), dict):
            raise CorruptCheckpointError(f"{path}: the field {name} is not a dict", path=path)
    meta = vars(metadata).setdefault("storage_meta", None)
    if meta is not None and type(meta) is not StorageMeta:
        raise CorruptCheckpointError(f"{path}: the storage_meta is not a StorageMeta", path=path)


# ------------------------------------------------------------------------- the files with checksums


@dataclass(frozen=True)
class CheckedFile:
    """A rank's file whose blocks have checksums."""

    nbytes: int  # of all blocks; the table of checksums follows the blocks
    crcs: bytes  # of the table's sections: four bytes for each 4 MiB of the file

    @property
    def table_nbytes(self) -> int:
        """The size of the table."""
        return self.nbytes // BLOCK_NBYTES * CRC_NBYTES

    @property
    def saved_nbytes(self) -> int:
        """The size of the file."""
        return self.nbytes + self.table_nbytes


def section_crcs(table: Buffer) -> bytes:
    """Return the checksums of the sections of a table, four bytes each."""
    view = memoryview(table)
    return b"".join(
        _C.crc32(view[at : at + SECTION_BLOCKS * CRC_NBYTES]).to_bytes(CRC_NBYTES, "little")
        for at in range(0, view.nbytes, SECTION_BLOCKS * CRC_NBYTES)
    )


def set_checked_files(metadata: Metadata, files: dict[str, CheckedFile]) -> None:
    """Add the files' checksums to metadata that has a StorageMeta."""
    described = {name: (file.nbytes, file.crcs) for name, file in files.items()}
    setattr(metadata.storage_meta, _ATTRIBUTE, {"format": _FORMAT, "files": described})


def checked_files(metadata: Metadata, path: str) -> dict[str, CheckedFile]:
    """Return the files that have checksums, by name."""
    described = getattr(metadata.storage_meta, _ATTRIBUTE, None)
    if described is None:
        return {}
    try:
        if described["format"] != _FORMAT:
            raise CorruptCheckpointError(
                f"{path}: the files have format {described['format']}, which this release of "
                "ptsave does not know",
                path=path,
            )
        files = {name: CheckedFile(*each) for name, each in described["files"].items()}
        sane = all(
            type(name) is str and type(file.nbytes) is int and type(file.crcs) is bytes
            for name, file in files.items()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: the checksums are malformed", path=path) from error
    if not sane:
        raise CorruptCheckpointError(f"{path}: the checksums are malformed", path=path)
    return files


# ------------------------------------------------------------------- a checkpoint that is replaced


def replaced(directory: str) -> OSError:
    """Return the error for a checkpoint that was replaced while it was read.

    A save removes the files of the previous checkpoint once its own metadata is in place.  If a
    reader has read the previous metadata, but has not yet opened a file, that file may be gone.
    """
    return OSError(
        errno.ESTALE,
        "another save has replaced the checkpoint while it was being read, and has removed its "
        "files: load the checkpoint again",
        directory,
    )


class ReadMetadata:
    """Notes the identity of a metadata file, to tell later whether the file was replaced."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = identity_of(path)

    @property
    def has_changed(self) -> bool:
        """Whether the path now names another file or no file."""
        try:
            return identity_of(self._path) != self._identity
        except FileNotFoundError:  # torch's writer removes the old file first
            return True


# ------------------------------------------------------------------------------------ pickling it
#
# This code takes a third of the time that `pickle` takes.  Equal objects that never change (shapes,
# properties, classes, names) are made once, at the beginning of the pickle, and put into its memo.
# Later opcodes fetch them from the memo:
#
#     PROTO 4
#     GLOBAL torch.Size, ..., MEMO 0, POP     for each shared object
#     the metadata, with BINGET 0 ...
#     STOP


class _UnusualError(Exception):
    """Raised for a value that `_Pickle` cannot pickle, but the module `pickle` can."""


def pickled_metadata(metadata: Metadata) -> bytes | None:
    """Return a pickle of metadata; None if only the module `pickle` can pickle some value."""
    if type(metadata) is not Metadata:
        return None
    try:
        return _Pickle().dump(metadata)
    except _UnusualError:
        return None


class _Pickle:
    """Makes the pickle of one checkpoint's metadata."""

    def __init__(self) -> None:
        self._n_memo = 0
        # By key: the opcodes that fetch a shared object from the memo.  `_head` makes the objects.
        self._shared: dict[Any, bytes] = {}
        self._head: list[bytes] = []
        self._names: dict[str, int] = {}  # memo numbers of texts that are in the pickle
        self._tensors: dict[Any, bytes] = {}
        self._files: dict[str, bytes] = {}

    def dump(self, metadata: Metadata) -> bytes:
        """Return the pickle of metadata."""
        fields: dict[str, Callable[[Any], bytes]] = {
            "state_dict_metadata": self._described,
            "planner_data": self._paths,
            "storage_data": self._places,
        }
        begin = self._class(Metadata) + _NEW + _STATE  # first: this class identifies the file
        state = [
            self._constant(name) + fields.get(name, self._value)(value)
            for name, value in vars(metadata).items()
        ]
        body = begin + b"".join(state) + _BUILD + b"."
        whole = b"".join(self._head) + body
        # Without a frame, an unpickler would fetch each argument with a read of its own.
        return b"\x80\x04\x95" + struct.pack("<Q", len(whole)) + whole

    # ---------------------------------------------------------------------------- shared objects

    def _share(self, key: Any, make: Callable[[], bytes]) -> bytes:
        """Return the opcodes that fetch an object; the beginning of the pickle makes the object."""
        found = self._shared.get(key)
        if found is None:
            made = make()  # `make` may share other objects
            number = _pack_number(self._new_number())
            self._head += [made, b"r", number, b"0"]
            found = self._shared[key] = b"j" + number
        return found

    def _new_number(self) -> int:
        self._n_memo += 1
        return self._n_memo - 1

    def _name(self, text: str) -> bytes:
        number = self._names.get(text)
        if number is not None:
            return b"j" + _pack_number(number)
        number = self._names[text] = self._new_number()
        return _text(text) + b"r" + _pack_number(number)

    def _constant(self, name: str) -> bytes:
        return self._share(("text", name), lambda: _text(name))

    def _class(self, kind: Any) -> bytes:
        return self._global(kind.__module__, kind.__qualname__)

    def _global(self, module: str, name: str) -> bytes:
        return self._share(("global", module, name), f"c{module}\n{name}\n".encode)

    def _size(self, size: Any) -> bytes:
        _require(size, torch.Size)
        return self._shared.get(size) or self._share(
            size, lambda: self._global("torch", "Size") + _numbers(tuple(size)) + b"\x85R"
        )

    def _dtype(self, dtype: torch.dtype) -> bytes:
        return self._global("torch", str(dtype).removeprefix("torch."))

    def _properties(self, properties: TensorProperties) -> bytes:
        _require(properties, TensorProperties)
        dtype, layout, needs_grad, memory_format, pinned, *more = properties.__getstate__()
        if type(needs_grad) is not bool or type(pinned) is not bool or len(more) > 1:
            raise _UnusualError
        for strides in more:  # from torch 2.15 on
            if strides is not None:
                _require(strides, tuple)
                _require_all(strides, int)

        def make() -> bytes:
            encoding = self._class(type(memory_format)) + _numbers((memory_format.value,)) + b"R"
            named_layout = self._global("torch.serialization", torch_dcp.layout_function)
            named_layout += _text(str(layout)) + b"\x85R"
            state = [self._dtype(dtype), named_layout, _flag(needs_grad), encoding, _flag(pinned)]
            state += [b"N" if strides is None else _numbers(strides) for strides in more]
            return self._class(TensorProperties) + _NEW + b"(" + b"".join(state) + b"tb"

        key = ("properties", dtype, layout, needs_grad, memory_format, pinned, *more)
        return self._share(key, make)

    # -------------------------------------------------------------------------------- its fields

    def _described(self, entries: Any) -> bytes:
        _require(entries, dict)
        _require_all(entries, str)
        _require_all(entries.values(), TensorStorageMetadata, BytesStorageMetadata)
        if not self._names.keys().isdisjoint(entries):
            raise _UnusualError
        is_bytes = self._class(BytesStorageMetadata) + _NEW
        pickled = [
            self._tensor(entry) if type(entry) is TensorStorageMetadata else is_bytes
            for entry in entries.values()
        ]
        names, first = [*entries], self._n_memo
        numbers = [*range(first, first + len(names))]
        self._n_memo += len(names)
        self._names.update(zip(names, numbers, strict=True))
        return b"}(" + _C.packed_rows((b"X", names, b"r", numbers, pickled)) + b"u"

    def _tensor(self, entry: TensorStorageMetadata) -> bytes:
        properties, size, chunks = entry.properties, entry.size, entry.chunks
        same: Any = None
        alike: Any = None
        if len(chunks) == 1:  # most tensors have one chunk, and many chunks are equal
            (chunk,) = chunks
            same = id(properties), id(size), type(chunk), id(chunk.offsets), id(chunk.sizes)
            if (found := self._tensors.get(same)) is not None:
                return found
            alike = (*vars(properties).values(), size, type(chunk), chunk.offsets, chunk.sizes)
            if (found := self._tensors.get(alike)) is not None:
                return found
        parts = [self._class(TensorStorageMetadata), _NEW, _STATE]
        parts += [self._constant("properties"), self._properties(properties)]
        parts += [self._constant("size"), self._size(size), self._constant("chunks"), b"]("]
        parts += [self._chunk(chunk) for chunk in chunks]
        parts += [b"e", _BUILD]
        pickled = b"".join(parts)
        if same is not None:
            self._tensors[same] = self._tensors[alike] = pickled
        return pickled

    def _chunk(self, chunk: ChunkStorageMetadata) -> bytes:
        _require(chunk, ChunkStorageMetadata)
        parts = [self._class(ChunkStorageMetadata), _NEW, _STATE]
        parts += [self._constant("offsets"), self._size(chunk.offsets)]
        parts += [self._constant("sizes"), self._size(chunk.sizes), _BUILD]
        return b"".join(parts)

    def _paths(self, paths: Any) -> bytes:
        if type(paths) is not dict or paths.keys() - self._names.keys():
            return self._value(paths)
        _require_all(paths.values(), tuple)
        if not all(paths.values()):
            return self._value(paths)
        numbers = [self._names[name] for name in paths]
        begins, kinds, lasts = [], [], []
        known: dict[tuple[str, ...], bytes] = {}
        for path in paths.values():
            parents, last = path[:-1], path[-1]
            begin = known.get(parents)
            if begin is None:
                begin = self._begin_of_path(parents)
                if all(type(each) is str for each in parents):  # 1 and True are equal keys
                    known[parents] = begin
            is_text = type(last) is str
            begins.append(begin)
            kinds.append(b"X" if is_text else b"")
            lasts.append(last if is_text else self._value(last))
        return b"}(" + _C.packed_rows((b"j", numbers, begins, kinds, lasts, b"t")) + b"u"

    def _begin_of_path(self, parents: tuple[Any, ...]) -> bytes:
        return b"(" + b"".join(
            self._constant(each) if type(each) is str else self._value(each) for each in parents
        )

    def _places(self, places: Any) -> bytes:
        _require(places, dict)
        _require_all(places, MetadataIndex)
        _require_all(places.values(), torch_dcp.StorageInfo)
        new_index = self._class(MetadataIndex) + _NEW + _STATE + self._constant("fqn") + b"j"
        try:
            numbers = [self._names[key.fqn] for key in places]
        except KeyError:
            raise _UnusualError from None
        tails: dict[Any, bytes] = {}
        rest = []
        for key in places:
            place = key.index, key.offset
            tail = tails.get(place) or tails.setdefault(place, self._rest_of_index(*place))
            rest.append(tail)
        columns = self._columns_of(list(places.values()))
        return b"}(" + _C.packed_rows((new_index, numbers, rest, *columns)) + b"u"

    def _rest_of_index(self, index: Any, offset: Any) -> bytes:
        parts = [self._constant("index"), b"N" if index is None else _number(index)]
        if offset is not None:
            parts += [self._constant("offset"), self._size(offset)]
        return b"".join(parts) + _BUILD

    def _columns_of(self, infos: list[Any]) -> tuple[Any, ...]:
        """Return the pickled StorageInfos of items, as the columns that `packed_rows` joins."""
        if not all(map(_is_usual, infos)):
            return ([self._place(info) for info in infos],)
        begin = self._begin_of_place
        return (
            [self._files.get(info.relative_path) or begin(info.relative_path) for info in infos],
            [info.offset for info in infos],
            self._constant("length") + b"J",
            [info.length for info in infos],
            _BUILD,
        )

    def _begin_of_place(self, file: Any) -> bytes:
        """Return the pickle of an item's StorageInfo, up to the item's offset in the file."""
        _require(file, str)
        begin = self._class(torch_dcp.StorageInfo) + _NEW + _STATE
        begin += self._constant("relative_path") + self._constant(file)
        found = self._files[file] = begin + self._constant("offset") + b"J"
        return found

    def _place(self, info: Any) -> bytes:
        values = [
            self._constant(name) + self._value(each) for name, each in info.__getstate__().items()
        ]
        return self._class(torch_dcp.StorageInfo) + _NEW + _STATE + b"".join(values) + _BUILD

    # ------------------------------------------------------------------------------ plain values

    def _value(self, value: Any) -> bytes:
        if type(value) is int:  # the usual case
            return _number(value)
        pickled = self._BY_TYPE.get(type(value))
        if pickled is None:
            raise _UnusualError
        return pickled(self, value)

    def _all(self, values: Iterable[Any]) -> bytes:
        return b"".join(map(self._value, values))

    _BY_TYPE: ClassVar[dict[type, Callable[[_Pickle, Any], bytes]]] = {
        str: _name,
        tuple: lambda self, values: b"(" + self._all(values) + b"t",
        type(None): lambda *_: b"N",
        bool: lambda _, value: _flag(value),
        dict: lambda self, values: b"}(" + self._all(chain.from_iterable(values.items())) + b"u",
        list: lambda self, values: b"](" + self._all(values) + b"e",
        bytes: lambda _, data: b"B" + _pack_number(len(data)) + data,
        torch.Size: _size,
        torch.dtype: _dtype,
        StorageMeta: lambda self, meta: (
            self._class(StorageMeta) + _NEW + self._value(vars(meta)) + b"b"
        ),
    }


def _require(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise _UnusualError


def _require_all(values: Iterable[Any], *kinds: type) -> None:
    if not {type(value) for value in values} <= set(kinds):
        raise _UnusualError


def _is_usual(info: Any) -> bool:
    """Return whether a StorageInfo has only the usual fields, and its numbers fit into 31 bits."""
    state = vars(info)
    offset, length = state.get("offset"), state.get("length")
    return (
        len(state) == 4
        and state.get("transform_descriptors", 0) is None
        and type(offset) is type(length) is int
        and 0 <= offset < _MAX_NUMBER - length
        and length >= 0
    )


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + _pack_number(len(data)) + data


def _number(value: int) -> bytes:
    if type(value) is not int:
        raise _UnusualError
    if -_MAX_NUMBER <= value <= _MAX_NUMBER:
        return b"J" + _pack_int(value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise _UnusualError
    return b"\x8a" + bytes([len(data)]) + data


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _flag(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"
