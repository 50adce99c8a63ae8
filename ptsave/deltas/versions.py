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

A version may also be a whole checkpoint: safetensors files as of `save_model`.  Its index has none
of the entries for patches, or ``model.safetensors`` is its only file.

`fold` makes one version of several.  ptsave's ``folded_from`` in its index is the first of them.
If the encoding is ``overwrite``, its patches also change every version between base and version.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.contents.directories import find_files, version_numbers
from ptsave.contents.files import FORMATS, ShardFiles, index_in, those_in_index
from ptsave.contents.safetensors import SafetensorsHeader, read_header
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError
from ptsave.sources.locations import Location, folder_for
from ptsave.sources.ranges import LocalFile, RangeSource, open_source
from ptsave.streaming.payload_sources import write_bytes, write_safetensors
from ptsave.support import config
from ptsave.support.locks import FolderLock
from ptsave.writing.targets import is_url_file, resolve_folder

INDEX = FORMATS["safetensors"].index_name
_SINGLE = FORMATS["safetensors"].single
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
_CRC = "crc32"
ENCODINGS = ("overwrite", "xor")
WHOLE = "whole"  # the encoding of a whole checkpoint, whose tensors may have a CRC-32
_KINDS = {
    "delta_encoding": ENCODINGS,
    "compression_format": ("zstd",),
    "checksum_format": CHECKSUMS,
}
# A tensor is patched and its checksum computed in blocks that fit a processor's cache.
BLOCK_NBYTES = 512 << 10
_MIN_PATCH_NBYTES = 4  # of a patch without changes
_PATCH_NBYTES_PER_BYTE = 5
# A patch of an unknown tensor may be at most as many times as large as its frame, and this many
# bytes more.  All positions in a row, at zstd's level 19, are 6 times as large.
_MAX_EXPANSION, _MAX_MORE = 64, 64 << 10
_LEVEL = 1  # of zstd; higher levels take much longer for a few percent


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
    checksum: str  # "" if a whole tensor has none
    kind: tuple[torch.dtype, torch.Size] | None = None  # of a whole tensor

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of the tensor, which are not compressed."""
        return self.kind is not None

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

    def whole(self) -> Tensor:
        """Return the bytes of a whole tensor, and compare their checksum."""
        data = torch.frombuffer(bytearray(self.read()), dtype=torch.uint8)
        if self.checksum and checksum_of(data, self.version.checksum) != self.checksum:
            raise self.damaged("the checksum differs")
        return data

    def overwritten(self, nbytes: int | None = None) -> bytes:
        """Return an ``overwrite`` patch for a tensor of `nbytes` bytes, decompressed and checked.

        The size in the frame's header is checked before the patch gets any memory.
        """
        with self.naming_damage():
            data = self.read()
            limit = _MAX_EXPANSION * len(data) + _MAX_MORE
            if nbytes is not None:
                limit = _MIN_PATCH_NBYTES + _PATCH_NBYTES_PER_BYTE * nbytes
            size = zstd().get_frame_parameters(data).content_size
            if size > limit and size != zstd().CONTENTSIZE_UNKNOWN:
                raise ValueError(f"it expands to {size} bytes, but at most {limit} are justified")
            patch: bytes = (
                zstd()
                .ZstdDecompressor()
                .decompress(data, max_output_size=limit, allow_extra_data=False)
            )
            _C.check_patch(patch, _C.MAX_PATCHED_NBYTES if nbytes is None else nbytes)
        return patch

    def xor_nbytes(self) -> int:
        """Return the size of the tensor that an ``xor`` patch changes, as the frame states it."""
        with self.naming_damage():
            size = int(zstd().get_frame_parameters(self.read()).content_size)
            if size == zstd().CONTENTSIZE_UNKNOWN:
                raise ValueError("the frame does not state the size of its contents")
        return size

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
    """A version that has patches, or is a whole checkpoint (WHOLE), which is its own base."""

    number: int
    base: int
    encoding: str
    checksum: str
    folded_from: int | None = None

    def changes(self, number: int) -> bool:
        """Return whether the patches also change a version that `fold` has made part of them."""
        is_part = self.folded_from is not None and self.base < number < self.number
        return is_part and self.encoding == "overwrite"

    def index_bytes(self, names: Iterable[str], shard: str) -> bytes:
        """Return the index of a version with patches, which are in one shard."""
        metadata = {
            "version": f"{self.number:06d}",
            "base_version": f"{self.base:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }
        if self.folded_from is not None:
            metadata["folded_from"] = f"{self.folded_from:06d}"
        return json.dumps(
            {"metadata": metadata, "weight_map": dict.fromkeys(sorted(names), shard)}
        ).encode()


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


def compressed(data: bytes) -> Tensor:
    """Compress a patch."""
    return _frame(zstd().ZstdCompressor(level=_LEVEL).compress(data))


def _frame(data: bytes) -> Tensor:
    # A bytearray, because torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def xor_frame(blocks: Iterable[tuple[Tensor, int, Sequence[memoryview | bytes]]], n: int) -> Tensor:
    """Compress an ``xor`` patch of `n` bytes, block by block.

    A block is a range of memory, which begins at a position, and bytes to combine with it.
    """
    stream = zstd().ZstdCompressor(level=_LEVEL).compressobj(size=n)
    pieces = []
    for memory, begin, others in blocks:
        out = torch.empty(len(others[0]), dtype=torch.uint8)
        _C.patched_copy(memory, begin, out, [(other, True) for other in others])
        pieces.append(stream.compress(memory_of(out)))
    return _frame(b"".join([*pieces, stream.flush()]))


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


class _Sum:
    """A checksum of 32 bits with the methods of other checksums."""

    def __init__(self, function: Callable[[memoryview, int], int], value: int) -> None:
        self._function, self._value = function, value

    def update(self, data: memoryview) -> None:
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(checksum: str) -> Any:
    """Return an object with ``update`` and ``hexdigest`` that computes the checksum."""
    if checksum in ("adler32", _CRC):
        return _Sum(zlib.adler32, 1) if checksum == "adler32" else _Sum(_C.crc32, 0)
    if checksum == "xxh3-128":
        return _C.Xxh3()
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
    try:
        return version_numbers(root.names())
    except FileNotFoundError:
        if root.is_url:  # a store has no directory before its first file
            return []
        raise


def number_of(path: str) -> int | None:
    """Return the number of the version whose directory has this path or URL; None for another."""
    return next(iter(version_numbers([os.path.basename(path.rstrip("/"))])), None)


def newest_in(root: Location) -> int | None:
    """Return the newest version with an index or a single file, which publishers write last."""
    for number in reversed(numbers_in(root)):
        if any(map(folder_of(root, number).is_taken, (INDEX, FORMATS["safetensors"].single))):
            return number
    return None


def version_folders(root: Location) -> set[str]:
    """Return the real paths of the versions in a local directory."""
    return {os.path.realpath(root.join(name_of(number))) for number in numbers_in(root)}


def folder_of(root: Location, number: int) -> Location:
    """Return the directory of a version."""
    return resolve_folder(root.join(name_of(number)), root.storage_options or None)


def open_version(root: Location, number: int) -> tuple[Version, list[Patch]]:
    """Open a version, and check that its files have the patches that the index names."""
    version, files = version_in(root, number)
    folder = folder_of(root, number)
    if version.encoding == WHOLE:
        return version, [*_whole_tensors(version, folder)]
    names: dict[str, set[str]] = {}
    for tensor, file in files.items():
        names.setdefault(file, set()).add(tensor)
    return version, [
        patch for file in sorted(names) for patch in _patches_in(folder, file, names[file], version)
    ]


def version_in(root: Location, number: int) -> tuple[Version, dict[str, str]]:
    """Read the index of a version, and return the file of each patch."""
    folder = folder_of(root, number)
    path = folder.join(INDEX)
    whole = Version(number, number, WHOLE, _CRC)
    try:
        with closing(open_source(path, folder.storage_options or None)) as source:
            index = index_in(source)
    except FileNotFoundError:
        if folder.is_taken(_SINGLE):
            return whole, {}
        reason = f"version {number} is missing, or its index is"
        raise FileNotFoundError(errno.ENOENT, reason, path) from None
    metadata, kinds = index.get("metadata"), _KINDS
    if not isinstance(metadata, dict) or not {"base_version", *kinds} & metadata.keys():
        return whole, {}
    found: list[int] = []
    for key in ("version", "base_version", "folded_from"):
        text = metadata.get(key)
        if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,15}", text):
            if key in metadata or key != "folded_from":
                raise CorruptCheckpointError(
                    f"{path}: {key} must be digits: {text!r:.80}", path=path
                )
        else:
            found.append(int(text))
    if found[0] != number or found[1] >= number:
        raise CorruptCheckpointError(
            f"{path}: this is version {found[0]}, based on version {found[1]}", path=path
        )
    for key, known in kinds.items():
        if metadata.get(key) not in known:
            raise UnsupportedSourceError(
                f"{path}: {key} is {metadata.get(key)!r:.80}, but ptsave knows {', '.join(known)}"
            )
    version = Version(number, found[1], metadata["delta_encoding"], metadata["checksum_format"])
    return version._replace(folded_from=found[2] if len(found) > 2 else None), index["weight_map"]


def tensors_in(files: ShardFiles) -> dict[str, tuple[RangeSource, SafetensorsHeader, int]]:
    """Return where each tensor of safetensors files is: file, header, number in the header."""
    every = []
    for source in files.open():
        with source.closed_on_error():
            if source.kind != "safetensors":
                raise UnsupportedSourceError(
                    f"{source.name}: only safetensors files can be changed: convert this file first"
                )
            header = read_header(source)
            if isinstance(source, LocalFile):
                source.park()
        every += [
            (stored.name, source.name, (source, header, number))
            for number, stored in enumerate(header.tensors)
        ]
    found: dict[str, tuple[RangeSource, SafetensorsHeader, int]] = {}
    for source, header, number in those_in_index(every, files):
        name = header.tensors[number].name
        if name in found:
            raise ValueError(f"{name} is in {found[name][0].name} and in {source.name}")
        found[name] = source, header, number
    return found


def whole_files(folder: Location) -> ShardFiles:
    """Return the files of a version that is a whole checkpoint."""
    name = INDEX if folder.is_taken(INDEX) else _SINGLE
    return find_files(folder.join(name), folder.storage_options or None)


def _whole_tensors(version: Version, folder: Location) -> Iterator[Patch]:
    for source, header, number in tensors_in(whole_files(folder)).values():
        name, shape, dtype, begin, nbytes, crc = header.tensors[number]
        checksum = "" if crc is None else f"{crc:08x}"
        yield Patch(name, version, source, begin, nbytes, checksum, (dtype, shape))


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


def links(root: Location, newest: int, base: int | None) -> Iterator[tuple[Version, list[Patch]]]:
    """Yield the versions that lead to `newest`, in descending order.

    The last one is a whole checkpoint, or is based on `base`.  If `base` is None, it is the first
    version in the directory.
    """
    first = min([newest, *numbers_in(root)])
    number = newest
    while number != base and (base is not None or number >= first):
        if base is not None and number < base:
            raise ValueError(
                f"{root.name}: version {newest} is based on version {number}, and not on version "
                f"{base}, which the target has"
            )
        version, patches = open_version(root, number)
        yield version, patches
        if version.encoding == WHOLE or (base is not None and version.changes(base)):
            return
        number = version.base


def chain(root: Location, newest: int, base: int | None) -> dict[str, list[Patch]]:
    """Return the patches of each tensor that lead from version `base` to `newest`, in order.

    If a whole checkpoint is in between, they begin with the whole tensors.
    """
    patches: dict[str, list[Patch]] = {}
    for _, found in links(root, newest, base):
        for patch in found:
            patches.setdefault(patch.name, []).insert(0, patch)
    return patches


# ------------------------------------------------------------------------------------- writing


def write_patches(
    folder: Location,
    version: Version,
    patches: Mapping[str, tuple[Tensor, str]],
    *,
    shard: str = "model-00000-of-00001.safetensors",
    fsync: bool,
    is_new: bool = False,
) -> None:
    """Write compressed patches, with the checksums of new tensors, and then their index.

    If the version is new, and another publisher has written it at a URL, raise FileExistsError.
    """
    if patches:
        blobs = {name: blob for name, (blob, _) in patches.items()}
        checksums = {name: checksum for name, (_, checksum) in patches.items()}
        write_safetensors(blobs, folder.file(shard), checksums, fsync=fsync)
    target, index = folder.file(INDEX), version.index_bytes(patches, shard)
    if is_new and is_url_file(target):
        target.create(index)
    else:
        write_bytes(target, index, fsync=fsync)


@contextmanager
def staging_of(root: Location, number: int) -> Iterator[Location]:
    """Lock a version against other writers; yield a temporary directory, which does not exist."""
    name = name_of(number)
    staging = root.join(folder_for(name))
    lock = FolderLock(staging, "lock", root.join(name))
    folder = resolve_folder(os.path.join(staging, name))
    try:
        with suppress(FileNotFoundError):  # of a process that was killed
            shutil.rmtree(folder.path)
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        lock.release()
