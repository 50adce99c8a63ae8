"""The format of patches that slime, miles and SGLang share.

A trainer publishes each version of a model's weights in a directory ``weight_v000001``, with at
least six digits.  Version 0 is the model that trainer and receivers start with; it has no
directory.  These programs publish every number, and base each version on the one before.

``model.safetensors.index.json`` has the usual ``weight_map``, and this metadata:

===================  ==============================================================
version              the version's number: six digits, as text
base_version         the number of the version that the patches change
delta_encoding       ``overwrite`` or ``xor``; a whole checkpoint has no such entry
compression_format   ``zstd``
checksum_format      ``adler32``, ``xxh3-128`` or ``blake3``
===================  ==============================================================

Shards are called ``model-00000-of-00001.safetensors``; the numbers begin at 0.  A shard holds a
uint8 tensor under the name of each tensor of the model that has changed.  The tensor is one zstd
frame, and the frame's header has the size of its contents.  A version without changes has an empty
weight_map and no shard.  The ``__metadata__`` of a shard has the checksum of each whole new tensor,
under the tensor's name, as hexadecimal digits.  Adler-32 has eight digits.

Patches count bytes and know nothing of dtypes.  Contents of a frame, for a tensor of n bytes:

``xor``
    n bytes, each the old byte combined with the new one.
``overwrite``
    A u4 count, as many u4 positions of changed bytes, which ascend, and as many new bytes; all
    little-endian.  If both bytes of a bf16 element have changed, both have a position.  So no
    tensor has more than 2**32 - 1 bytes.

Receivers decompress the patch, change their copy, and compare its checksum.  SGLang remembers the
version of a directory in ``.weight_sync/state.json``, and locks ``.weight_sync/lock`` meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.contents.files import FORMATS, index_in
from ptsave.contents.safetensors import read_header
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError
from ptsave.sources.locations import Location
from ptsave.sources.ranges import LocalFile, RangeSource, open_source
from ptsave.support import config
from ptsave.writing.targets import resolve_folder

INDEX = FORMATS["safetensors"].index_name
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
ENCODINGS = ("overwrite", "xor")
# A tensor is patched and its checksum computed in blocks that fit a processor's cache.
BLOCK_NBYTES = 512 << 10
_MIN_PATCH_NBYTES = 4  # of a patch without changes
_PATCH_NBYTES_PER_BYTE = 5


class Change(NamedTuple):
    """New contents of a part of a tensor: a patch, or all bytes; see `_C.apply_changes`."""

    data: bytes
    target: Tensor
    is_whole: bool
    old: bytes  # the bytes that are replaced

    @classmethod
    def of_patch(cls, patch: bytes, target: Tensor, source: Tensor) -> Change:
        """Return the change that a patch makes to `target`; `source` has the old bytes."""
        return cls(patch, target, False, _C.old_values(patch, source))

    @classmethod
    def of_all(cls, data: bytes, target: Tensor, source: Tensor) -> Change:
        """Return the change of all bytes of `target`; `source` has the old bytes."""
        return cls(data, target, True, bytes(memory_of(source)))

    @property
    def positions(self) -> memoryview:
        """The part of a patch before its values; nothing if all bytes change."""
        n_values = len(self.data) // _PATCH_NBYTES_PER_BYTE
        return memoryview(self.data)[: 0 if self.is_whole else len(self.data) - n_values]


def make(changes: Iterable[Change]) -> None:
    """Make changes, with all threads; signal handlers run afterwards."""
    _C.apply_changes([each[:3] for each in changes], n_threads=config.current().n_threads)


def undo(changes: Iterable[Change]) -> None:
    """Bring the bytes back that changes have replaced."""
    make(each._replace(data=b"".join([each.positions, each.old])) for each in changes)


class Patch(NamedTuple):
    """The patch of one tensor in one version, which is not read yet."""

    name: str
    version: Version
    source: RangeSource
    begin: int
    nbytes: int
    checksum: str

    def read(self) -> bytes:
        """Return the compressed patch."""
        (data,) = self.source.read([(self.begin, self.begin + self.nbytes)])
        return data

    def damaged(self, reason: object) -> CorruptCheckpointError:
        """Return the error for a patch that cannot be used."""
        path = self.source.name
        message = f"{path}: the patch of tensor {self.name} is damaged: {reason}"
        return CorruptCheckpointError(message, path=path, offset=self.begin, entries=[self.name])

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turn the errors of the block, which reads the patch, into a CorruptCheckpointError."""
        try:
            yield
        except (ValueError, zstd().ZstdError) as error:
            raise self.damaged(error) from None

    def overwritten(self, nbytes: int) -> bytes:
        """Return an ``overwrite`` patch for a tensor of `nbytes` bytes, decompressed and checked.

        The size in the frame's header is checked before the patch gets any memory.
        """
        limit = _MIN_PATCH_NBYTES + _PATCH_NBYTES_PER_BYTE * nbytes
        with self.naming_damage():
            data = self.read()
            size = zstd().get_frame_parameters(data).content_size
            if size > limit and size != zstd().CONTENTSIZE_UNKNOWN:
                raise ValueError(f"it expands to {size} bytes, but the tensor has {nbytes}")
            patch: bytes = (
                zstd()
                .ZstdDecompressor()
                .decompress(data, max_output_size=limit, allow_extra_data=False)
            )
            _C.check_patch(patch, nbytes)
        return patch

    def xor_blocks(self, nbytes: int) -> Iterator[bytes]:
        """Yield an ``xor`` patch for a tensor of `nbytes` bytes in blocks."""
        with self.naming_damage():
            reader = zstd().ZstdDecompressor().stream_reader(self.read())
            for begin, end in blocks_of(nbytes):
                block = reader.read(end - begin)
                if len(block) < end - begin:
                    raise ValueError(f"it has {begin + len(block)} of the tensor's {nbytes} bytes")
                if end == nbytes and reader.read(1):
                    raise ValueError(f"it has more than the tensor's {nbytes} bytes")
                yield block


class Version(NamedTuple):
    """A version that has patches."""

    number: int
    base: int
    encoding: str
    checksum: str


def blocks_of(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the blocks in which a tensor is patched."""
    for begin in range(0, nbytes, BLOCK_NBYTES):
        yield begin, min(begin + BLOCK_NBYTES, nbytes)


def bytes_in(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: a view if it is contiguous and on the CPU, else a copy."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def changes_between(before: Tensor, after: Tensor, target: Tensor) -> list[Change]:
    """Return the changes that give `target` the bytes of `after`, if it has those of `before`."""
    changes = []
    for begin, end in blocks_of(len(after)):
        patch = _C.find_changes(before[begin:end], after[begin:end])
        if len(patch) == _MIN_PATCH_NBYTES:
            continue
        old = before[begin:end]
        if len(patch) <= end - begin:
            changes.append(Change.of_patch(patch, target[begin:end], old))
        else:
            new = bytes(memory_of(after[begin:end]))
            changes.append(Change.of_all(new, target[begin:end], old))
    return changes


# ------------------------------------------------------------------------------------- libraries


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f'patches of weights need the {name} library: pip install "ptsave[deltas]"', name=name
        ) from None


def zstd() -> Any:
    """Return the module zstandard."""
    return _library("zstandard")


class _Adler32:
    """Adler-32 with the methods of other checksums."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(checksum: str) -> Any:
    """Return an object with ``update`` and ``hexdigest`` that computes the checksum."""
    if checksum == "adler32":
        return _Adler32()
    if checksum == "xxh3-128":
        return _library("xxhash").xxh3_128()
    return _library("blake3").blake3()


def checksum_of(memory: Tensor, checksum: str) -> str:
    """Return the checksum of a uint8 tensor's bytes."""
    found = hasher(checksum)
    found.update(memory_of(memory))
    return str(found.hexdigest())


# --------------------------------------------------------------------------------------- reading


def name_of(version: int) -> str:
    """Return the name of a version's directory."""
    return f"weight_v{version:06d}"


def numbers_in(root: Location) -> list[int]:
    """Return the numbers of the versions in a directory, in order."""
    found = map(re.compile(r"weight_v(\d{6,15})").fullmatch, root.names())
    return sorted(int(match[1]) for match in found if match is not None)


def newest_in(root: Location) -> int | None:
    """Return the newest version with an index or a single file, which publishers write last."""
    for number in reversed(numbers_in(root)):
        if any(map(_folder_of(root, number).is_taken, (INDEX, FORMATS["safetensors"].single))):
            return number
    return None


def version_folders(root: Location) -> set[str]:
    """Return the real paths of the versions in a local directory."""
    return {os.path.realpath(root.join(name_of(number))) for number in numbers_in(root)}


def _folder_of(root: Location, number: int) -> Location:
    return resolve_folder(root.join(name_of(number)), root.storage_options or None)


def open_version(root: Location, number: int) -> tuple[Version, list[Patch]]:
    """Open a version, and check that its files have the patches that the index names."""
    folder = _folder_of(root, number)
    path = folder.join(INDEX)
    try:
        with closing(open_source(path, folder.storage_options or None)) as source:
            index = index_in(source)
    except FileNotFoundError:
        if folder.is_taken(FORMATS["safetensors"].single):
            raise _whole(number, folder.path) from None
        reason = f"version {number} is missing, or its index is"
        raise FileNotFoundError(errno.ENOENT, reason, path) from None
    version = _version_in(index.get("metadata"), number, path)
    names: dict[str, set[str]] = {}
    for tensor, file in index["weight_map"].items():
        names.setdefault(file, set()).add(tensor)
    return version, [
        patch for file in sorted(names) for patch in _patches_in(folder, file, names[file], version)
    ]


def _whole(number: int, path: str) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{path}: version {number} is a whole checkpoint: load it with ptsave.load_model, and then "
        f"apply later versions with base_version={number}"
    )


def _version_in(metadata: Any, number: int, path: str) -> Version:
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        raise _whole(number, path)
    found = []
    for key in ("version", "base_version"):
        text = metadata.get(key)
        if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,15}", text):
            raise CorruptCheckpointError(f"{path}: {key} must be digits: {text!r:.80}", path=path)
        found.append(int(text))
    if found[0] != number or found[1] >= number:
        raise CorruptCheckpointError(
            f"{path}: this is version {found[0]}, based on version {found[1]}", path=path
        )
    kinds = {
        "delta_encoding": ENCODINGS,
        "compression_format": ("zstd",),
        "checksum_format": CHECKSUMS,
    }
    for key, known in kinds.items():
        if metadata.get(key) not in known:
            raise UnsupportedSourceError(
                f"{path}: {key} is {metadata.get(key)!r:.80}, but ptsave knows {', '.join(known)}"
            )
    return Version(number, found[1], metadata["delta_encoding"], metadata["checksum_format"])


def _patches_in(folder: Location, file: str, names: set[str], version: Version) -> Iterator[Patch]:
    source = open_source(folder.join(file), folder.storage_options or None)
    with source.closed_on_error():
        header = read_header(source, verify=False)
        if isinstance(source, LocalFile):
            source.park()  # a chain may have many files
    path = source.name
    if names != {stored.name for stored in header.tensors}:
        raise CorruptCheckpointError(
            f"{path}: the tensors of this file are not those that {INDEX} names", path=path
        )
    for stored in header.tensors:
        checksum = header.metadata.get(stored.name)
        if checksum is None or stored.dtype != torch.uint8:
            raise CorruptCheckpointError(
                f"{path}: tensor {stored.name} is not a patch with a checksum",
                path=path,
                entries=[stored.name],
            )
        yield Patch(stored.name, version, source, stored.offset, stored.nbytes, checksum)


def chain(root: Location, newest: int, base: int | None) -> dict[str, list[Patch]]:
    """Return the patches of each tensor that lead from version `base` to `newest`, in order.

    If `base` is None, the patches of all versions down to the first one are returned.
    """
    patches: dict[str, list[Patch]] = {}
    first = min([newest, *numbers_in(root)])
    number = newest
    while number != base and (base is not None or number >= first):
        if base is not None and number < base:
            raise ValueError(
                f"{root.name}: version {newest} is based on version {number}, and not on version "
                f"{base}, which the target has"
            )
        version, found = open_version(root, number)
        for patch in found:
            patches.setdefault(patch.name, []).insert(0, patch)
        number = version.base
    return patches
