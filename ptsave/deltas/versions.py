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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError, UnsupportedUrlError
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
MIN_PATCH_NBYTES = 4  # of a patch without changes
_PATCH_NBYTES_PER_BYTE = 5
# A patch of an unknown tensor may be at most as many times as large as its frame, and this many
# bytes more.  All positions in a row, at zstd's level 19, are 6 times as large.
_MAX_EXPANSION, _MAX_MORE = 64, 64 << 10
# Positions hardly repeat, but their upper bytes are alike nearby.  A block of zstd is as large as
# the window.  In small blocks, level 1 is as fast, and its patches of 1 % have 4 % less bytes.
_LEVEL, _LOG_WINDOW = 1, 14


class Change(NamedTuple):
    """A change of a part of a tensor: a patch that is shorter than the part, or all new bytes."""

    data: bytes | Tensor
    target: Tensor
    inverse: Tensor  # undoes the change
    digest: _C.Xxh3 | None = None  # takes the new bytes


def make(changes: Iterable[Change]) -> None:
    """Make changes, with all threads; signal handlers run afterwards."""
    work = [(each.data, each.target, each.digest) for each in changes]
    _C.apply_changes(work, n_threads=config.current().n_threads)


def undo(changes: Iterable[Change]) -> None:
    """Bring the bytes back that changes have replaced."""
    make(Change(each.inverse, each.target, each.inverse) for each in changes)


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
        """Return the error for a patch that cannot be used: damage, or a tensor of another size."""
        path = self.source.name
        message = f"{path}: the patch of tensor {self.name} cannot be used: {reason}"
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
        data = tensor_of(self.read())
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
                limit = MIN_PATCH_NBYTES + _PATCH_NBYTES_PER_BYTE * nbytes
            size = zstd().get_frame_parameters(data).content_size
            if size > limit and size != zstd().CONTENTSIZE_UNKNOWN:
                raise ValueError(f"it expands to {size} bytes, but at most {limit} are justified")
            decompress = zstd().ZstdDecompressor().decompress
            patch: bytes = decompress(data, max_output_size=limit, allow_extra_data=False)
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
    folded_from: int = 0  # 0 if it is not folded

    def changes(self, number: int) -> bool:
        """Return whether the patches change a version: the base, or one that `fold` has merged."""
        is_part = self.base < number < self.number and self.encoding == "overwrite"
        return number == self.base or (is_part and self.folded_from > 0)


def blocks_of(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the blocks in which a tensor is patched."""
    for begin in range(0, nbytes, BLOCK_NBYTES):
        yield begin, min(begin + BLOCK_NBYTES, nbytes)


def bytes_in(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: a view if it is contiguous and on the CPU, else a copy."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    memory = plain.contiguous().view(-1).view(torch.uint8)
    if memory.numel() and not memory.data_ptr():
        raise TypeError(
            f"a {type(tensor).__name__} has no memory of its own: pass a plain tensor, for example "
            "full_tensor(), or load ptsave.deltas.Weights with ptsave.load_model"
        )
    return memory


def tensor_of(data: bytes) -> Tensor:
    """Return a uint8 tensor with a copy of bytes."""
    # A bytearray, because torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def compressed(patch: Tensor) -> Tensor:
    """Compress a patch."""
    parameters = zstd().ZstdCompressionParameters.from_level(_LEVEL, window_log=_LOG_WINDOW)
    compressor = zstd().ZstdCompressor(compression_params=parameters)
    return tensor_of(compressor.compress(memory_of(patch)))


def xor_frame(blocks: Iterable[tuple[Tensor, int, Sequence[bytes | Tensor]]], n: int) -> Tensor:
    """Compress an ``xor`` patch of `n` bytes, block by block.

    A block is a range of memory, which begins at a position, and bytes to combine with it.
    """
    stream = zstd().ZstdCompressor(level=_LEVEL).compressobj(size=n)
    pieces = []
    for memory, begin, others in blocks:
        out = torch.empty(len(others[0]), dtype=torch.uint8)
        _C.patched_copy(memory, begin, out, [(other, True) for other in others])
        pieces.append(stream.compress(memory_of(out)))
    return tensor_of(b"".join([*pieces, stream.flush()]))


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


def fused_digest(checksum: str) -> _C.Xxh3 | None:
    """Return a digest that the engine updates while it finds or makes changes, if it can."""
    return _C.Xxh3() if checksum == "xxh3-128" else None


def checksum_of(memory: Tensor, checksum: str) -> str:
    """Return the checksum of a uint8 tensor's bytes."""
    data = memory_of(memory)
    if checksum in ("adler32", _CRC):
        return f"{zlib.adler32(data) if checksum == 'adler32' else _C.crc32(data):08x}"
    found = fused_digest(checksum) or _library("blake3").blake3()
    found.update(data)
    return str(found.hexdigest())


# --------------------------------------------------------------------------------------- reading


def name_of(version: int) -> str:
    """Return the name of a version's directory."""
    return f"weight_v{version:06d}"


def numbers_in(root: Location) -> list[int]:
    """Return the numbers of the versions in a directory, in order; none if it does not exist."""
    with suppress(FileNotFoundError):
        return version_numbers(root.names())
    return []


def number_of(path: str) -> int | None:
    """Return the number of the version whose directory has this path or URL; None for another."""
    return next(iter(version_numbers([os.path.basename(path.rstrip("/"))])), None)


def newest_in(root: Location) -> int | None:
    """Return the newest version with an index or a single file, which publishers write last."""
    for number in reversed(numbers_in(root)):
        if any(map(folder_of(root, number).is_taken, (INDEX, _SINGLE))):
            return number
    return None


def root_at(directory: Any, storage_options: Mapping[str, Any] | None) -> Location:
    """Return the directory of versions that are to be read."""
    try:
        return resolve_folder(directory, storage_options)
    except UnsupportedUrlError:
        reason = "ptsave reads versions only where it can also write them"
        raise UnsupportedUrlError.unreadable(directory, reason) from None


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
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or not {"base_version", *_KINDS} & metadata.keys():
        return whole, {}
    found: list[int] = []
    for key in ("version", "base_version", "folded_from"):
        text = metadata.get(key, "0" if key == "folded_from" else None)
        if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,15}", text):
            raise CorruptCheckpointError(f"{path}: {key} must be digits: {text!r:.80}", path=path)
        found.append(int(text))
    if found[0] != number or found[1] >= number:
        raise CorruptCheckpointError(
            f"{path}: this is version {found[0]}, based on version {found[1]}", path=path
        )
    for key, known in _KINDS.items():
        if metadata.get(key) not in known:
            raise UnsupportedSourceError(
                f"{path}: {key} is {metadata.get(key)!r:.80}, but ptsave knows {', '.join(known)}"
            )
    forms = metadata["delta_encoding"], metadata["checksum_format"]
    return Version(number, found[1], *forms, found[2]), index["weight_map"]


def tensors_in(files: ShardFiles) -> dict[str, tuple[RangeSource, SafetensorsHeader, int]]:
    """Return where each tensor of safetensors files is: file, header, number in the header."""
    every = []
    for source in files.open():
        header = _header_of(source, verify=True)
        for number, stored in enumerate(header.tensors):
            every.append((stored.name, source.name, (source, header, number)))
    found: dict[str, tuple[RangeSource, SafetensorsHeader, int]] = {}
    for source, header, number in those_in_index(every, files):
        name = header.tensors[number].name
        if name in found:
            raise ValueError(f"{name} is in {found[name][0].name} and in {source.name}")
        found[name] = source, header, number
    return found


def _header_of(source: RangeSource, *, verify: bool) -> SafetensorsHeader:
    with source.closed_on_error():
        if verify and source.kind != "safetensors":
            raise UnsupportedSourceError(
                f"{source.name}: only safetensors files can be changed: convert this file first"
            )
        header = read_header(source, verify=verify)
        if isinstance(source, LocalFile):
            source.park()  # a chain may have many files
        return header


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
    header = _header_of(source, verify=False)
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


def by_tensor(found: Iterable[tuple[Version, list[Patch]]]) -> dict[str, list[Patch]]:
    """Return the patches of each tensor in ascending order, from versions in descending order."""
    patches: dict[str, list[Patch]] = {}
    for _, of_version in found:
        for patch in of_version:
            patches.setdefault(patch.name, []).insert(0, patch)
    return patches


def tied(patches: Collection[Patch], names: Collection[str]) -> dict[str, str]:
    """Return tensors that are not in `names`, each with a tensor there that gets the same bytes."""
    found = {each.checksum: each.name for each in patches if each.checksum and each.name in names}
    others = (each for each in patches if each.name not in names)
    return {each.name: found[each.checksum] for each in others if each.checksum in found}


# ------------------------------------------------------------------------------------- writing


def write_patches(
    folder: Location,
    version: Version,
    patches: Mapping[str, Tensor],
    checksums: Mapping[str, str],
    *,
    shard: str,
    fsync: bool,
    is_new: bool = False,
) -> None:
    """Write compressed patches, with the checksums of new tensors, and then their index.

    If the version is new, and another publisher has written it at a URL, raise FileExistsError.
    """
    if patches:
        write_safetensors(patches, folder.file(shard), checksums, fsync=fsync)
    metadata = {
        "version": f"{version.number:06d}",
        "base_version": f"{version.base:06d}",
        "delta_encoding": version.encoding,
        "compression_format": "zstd",
        "checksum_format": version.checksum,
    }
    if version.folded_from:
        metadata["folded_from"] = f"{version.folded_from:06d}"
    weight_map = dict.fromkeys(sorted(patches), shard)
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    target = folder.file(INDEX)
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
