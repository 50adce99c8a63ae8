"""Reads and writes ``.metadata``, the pickle that makes a directory a DCP checkpoint.

A rank's file that `ptsave.distributed` has written has a table behind its last block: the CRC-32 of
each block of 4,096 bytes.  The metadata has a CRC-32 for each section of the table, which covers
1,024 blocks.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from ptsave.dcp.metadata_pickle import pickled_metadata
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import regular_only
from ptsave.sources.locations import Identity, identity_of
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
# Behind the pickle, where no reader of pickles looks: this and the CRC-32 of the pickle.
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
    """Metadata of Megatron-LM's ``torch_dist``: DCP's fields, and facts for its resharding."""


class _Opaque:
    """A value that only Megatron-LM uses."""


_MEGATRON = {"MCoreMetadata": _MegatronMetadata, "MCoreSavePlan": _Opaque}
_GUARDED = (*_CLASSES, *_MEGATRON.values())
_ALLOWED = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _CLASSES}
# Checkpoints of older torch releases name these, with the same state and values.
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED[f"{_SHARDED_TENSOR}.TensorProperties"] = TensorProperties
_ALLOWED[f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING"] = torch_dcp.MemoryFormat
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"}


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata file of all ranks, or of a rank that saves by itself."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


# ------------------------------------------------------------------------------------- reading it


class _Unpickler(pickle.Unpickler):
    """Builds DCP's classes and plain values, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names, if the pickle may use it.

        The function for paths is made anew, because a pickle can set attributes of what it gets.
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
            f"it names {full}, which is no part of DCP's metadata: if you trust the file, allow it "
            "with torch.serialization.add_safe_globals"
        )


def _layout(text: str) -> torch.layout:
    value = getattr(torch, str(text).removeprefix("torch."), None)
    if not isinstance(value, torch.layout):
        raise pickle.UnpicklingError(f"it names the layout {text!r}, which torch does not have")
    return value


@contextmanager
def _guarded_classes() -> Iterator[None]:
    """Undo and refuse changes that a pickle makes to the classes themselves."""
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
            raise pickle.UnpicklingError(f"it changes the class {changed[0].__qualname__}")


def load_metadata(path: str, *, data: bytes | None = None) -> Metadata:
    """Read metadata from a local file, or from `data`; no code in it runs."""
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
    with open(path, "rb", opener=regular_only) as stream:  # a pipe would never end
        return stream.read()


def _with_trailer(data: bytes) -> bytes:
    return data + _TRAILER + _C.crc32(data).to_bytes(4, "little")


def dump_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of a metadata file: a pickle, and its checksum, which stock ignores."""
    return _with_trailer(pickled_metadata(metadata) or pickle.dumps(metadata, protocol=4))


def has_checksum(path: str, data: bytes | None = None) -> bool:
    """Return whether metadata, once `load_metadata` has read it, has a checksum.

    Other bytes behind the pickle, such as a damaged checksum, are a CorruptCheckpointError.
    """
    stream = io.BytesIO(_read(path) if data is None else data)
    _unpickled(stream, path)
    rest = stream.read()
    if rest and not (rest.startswith(_TRAILER) and len(rest) == _TRAILER_NBYTES):
        raise CorruptCheckpointError(
            f"{path}: damaged: {len(rest)} bytes behind its end are no checksum", path=path
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
        raise CorruptCheckpointError(f"{path}: it holds no DCP metadata", path=path)
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(vars(metadata).get(name), dict):
            raise CorruptCheckpointError(f"{path}: its {name} is no dict", path=path)
    meta = vars(metadata).setdefault("storage_meta", None)
    if meta is not None and type(meta) is not StorageMeta:
        raise CorruptCheckpointError(f"{path}: its storage_meta is none", path=path)


# ------------------------------------------------------------------------- the files in it, checked


@dataclass(frozen=True)
class CheckedFile:
    """A rank's file whose blocks have checksums."""

    nbytes: int  # of its blocks; the table of their checksums follows
    crcs: bytes  # of the table's sections: four bytes for 4 MiB of the file

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
                f"{path}: its files are of format {described['format']}, which this release of "
                "ptsave does not know",
                path=path,
            )
        files = {name: CheckedFile(*each) for name, each in described["files"].items()}
        sane = all(
            type(name) is str and type(file.nbytes) is int and type(file.crcs) is bytes
            for name, file in files.items()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: its checksums make no sense", path=path) from error
    if not sane:
        raise CorruptCheckpointError(f"{path}: its checksums make no sense", path=path)
    return files


# ------------------------------------------------------------------- a checkpoint that is replaced


def replaced(directory: str) -> OSError:
    """Return the error for a checkpoint that was replaced while it was read.

    A save removes the files of the previous checkpoint once its own metadata has the name.  A
    reader of the old metadata that opens those files late may find that they are gone.
    """
    return OSError(
        errno.ESTALE,
        "another save has replaced the checkpoint while this one was read, and has removed its "
        "files: load it again",
        directory,
    )


@dataclass(frozen=True)
class ReadMetadata:
    """A metadata file, as it was when it was read."""

    path: str
    identity: Identity  # taken before the read, so that a replacement during it counts

    @classmethod
    def of(cls, path: str) -> ReadMetadata:
        """Return the identity of a file that is about to be read."""
        return cls(path, identity_of(path))

    @property
    def has_changed(self) -> bool:
        """Whether the name now belongs to another file, or to none."""
        try:
            return identity_of(self.path) != self.identity
        except FileNotFoundError:  # torch's writer removes it before it renames the next one
            return True
