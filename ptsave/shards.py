"""The files of a model as sources of tensors: what is in them, and reading it into place."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from ptsave import _C, config
from ptsave.copying import Copier
from ptsave.errors import CorruptCheckpointError, CorruptPickleError
from ptsave.progress import ProgressCallback
from ptsave.reading import raise_corrupt
from ptsave.restoring import FileCopier, restoring
from ptsave.shard_files import ShardFiles, refuse_what_is_no_checkpoint

__all__ = [
    "SAFETENSORS_DTYPES",
    "Entry",
    "PickledShard",
    "Read",
    "SafetensorsShard",
    "Shard",
    "open_shards",
    "read_all",
    "those_in_index",
]

_T = TypeVar("_T")

_MAX_READ_NBYTES = 1 << 20  # of a header, whose length may be anything in a damaged file
SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: Shard

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """The elements of an entry from `begin` on that fill a tensor.

    All of them, in the entry's shape, or a part of them in a flat one.
    """

    entry: Entry
    target: Tensor
    begin: int = 0


class SafetensorsShard:
    """A safetensors file.  Its library says whether the header is sound.

    Parameters
    ----------
    path : str
        The file, and what to call it in messages.
    opened : str, optional
        The file, if `path` is only what to call it.

    Attributes
    ----------
    entries : list of Entry
        Its tensors, in the order of their bytes.
    metadata : dict of str to str
        Its ``__metadata__``.
    """

    def __init__(self, path: str, opened: str = "") -> None:
        self.path = path
        self._stream: BinaryIO = open(opened or path, "rb", buffering=0)  # noqa: SIM115 (see close)
        try:
            header, data_offset = _safetensors_header(self._stream, path)
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = self._parse(header, data_offset)
        except BaseException:
            self._stream.close()
            raise

    def _parse(self, header: Mapping[str, Any], data_offset: int) -> list[Entry]:
        entries = []
        self._offsets: dict[str, int] = {}
        file_nbytes = os.fstat(self._stream.fileno()).st_size
        for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = getattr(torch, SAFETENSORS_DTYPES.get(fields["dtype"], ""), None)
            if dtype is None:
                raise CorruptCheckpointError(
                    f"{self.path}: tensor {name} is of a type that torch has not: "
                    f"{fields['dtype']}",
                    path=self.path,
                )
            entry = Entry(name, torch.Size(fields["shape"]), dtype, self)
            begin, end = (data_offset + offset for offset in fields["data_offsets"])
            if end - begin != entry.nbytes or not data_offset <= begin <= end <= file_nbytes:
                raise CorruptCheckpointError(
                    f"{self.path}: the header puts tensor {name} where its bytes cannot be",
                    path=self.path,
                    offset=begin,
                )
            self._offsets[name] = begin
            entries.append(entry)
        return entries

    @property
    def file(self) -> tuple[int, bytes]:
        return self._stream.fileno(), os.fsencode(self.path)

    def offset_of(self, entry: Entry) -> int:
        """Return where in the file the bytes of a tensor begin."""
        return self._offsets[entry.name]

    def range_of(self, read: Read) -> tuple[int, Tensor]:
        """Return where in the file a read begins, and its tensor."""
        offset = self._offsets[read.entry.name] + read.begin * read.entry.dtype.itemsize
        return offset, read.target

    def can_fill(self, entry: Entry, target: Tensor) -> bool:
        """Whether `target` may be that of a `Read` of the whole entry: bytes are all it takes."""
        return (
            target.device.type == "cpu"
            and target.dtype == entry.dtype
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        )

    def close(self) -> None:
        self._stream.close()

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _safetensors_header(stream: BinaryIO, path: str) -> tuple[dict[str, Any], int]:
    """Return what the header says of each tensor, and where the bytes of the first begin."""
    if sys.byteorder != "little":
        raise NotImplementedError(
            f"{path}: safetensors files are little-endian, this machine is not"
        )
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(f"{path} is read with the help of: pip install safetensors") from None
    try:
        # The descriptor's file, whatever has become of the name.
        with safe_open(f"/proc/self/fd/{stream.fileno()}", framework="pt"):
            pass
    except SafetensorError as error:
        name = _tensor_cut_off(stream)
        where = f"; the file ends before tensor {name} does" if name else ""
        raise CorruptCheckpointError(
            f"{path}: not a whole safetensors file: {error}{where}",
            path=path,
            entries=[name] if name else None,
        ) from None
    return _parsed_header(stream)


def _parsed_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    stream.seek(0)
    header_nbytes = int.from_bytes(stream.read(8), "little")
    header = json.loads(_read_exactly(stream, header_nbytes))
    return header, 8 + header_nbytes


def _tensor_cut_off(stream: BinaryIO) -> str:
    """Return the first tensor of a damaged file that is not all there, if its header says."""
    nbytes = os.fstat(stream.fileno()).st_size
    try:
        header, data_offset = _parsed_header(stream)
        header.pop("__metadata__", None)
        ends = sorted((fields["data_offsets"][1], name) for name, fields in header.items())
        return next((name for end, name in ends if data_offset + end > nbytes), "")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""  # the header is what is damaged


def _read_exactly(stream: BinaryIO, nbytes: int) -> bytes:
    parts = []
    while nbytes and (part := stream.read(min(nbytes, _MAX_READ_NBYTES))):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


class PickledShard:
    """What :func:`torch.save` has written: a dict of tensors, loaded with ``weights_only=True``.

    Files whose tensors cannot be left unread (those of old versions of torch) are loaded to see
    what is in them, let go of, and loaded again when they are read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._open_file = ExitStack()
        self._copier: Copier | None = None
        self._tensors: dict[str, Tensor] = {}
        self._open()
        self.entries = [
            Entry(name, tensor.shape, tensor.dtype, self) for name, tensor in self._tensors.items()
        ]
        if not isinstance(self._copier, FileCopier):
            self.close()

    def _open(self) -> None:
        with ExitStack() as stack:
            loading = restoring(self.path, "cpu", weights_only=True, verify=True, progress=False)
            try:
                obj, self._copier, _ = stack.enter_context(loading)
            except (CorruptCheckpointError, OSError, MemoryError, Warning):
                raise
            except Exception as error:  # torch's unpickler stumbles in every way
                raise CorruptPickleError(f"{self.path}: {error}", path=self.path) from error
            self._tensors = self._checked(obj)
            self._open_file = stack.pop_all()

    def _checked(self, obj: Any) -> dict[str, Tensor]:
        if not isinstance(obj, Mapping):
            raise TypeError(f"{self.path} holds {type(obj).__name__}, not a dict of tensors")
        for name, tensor in obj.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.path}: entry {name!r} is {type(tensor).__name__}, not a tensor: a "
                    "checkpoint with more in it than weights is for ptsave.load_checkpoint()"
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise TypeError(f"{self.path}: entry {name!r} is not a dense tensor")
        return {name: tensor.detach() for name, tensor in obj.items()}

    def can_fill(self, entry: Entry, target: Tensor) -> bool:
        """Whether `target` may be that of a `Read`: any that ``copy_`` would fill."""
        return not target.is_meta

    def read(self, reads: Iterable[Read]) -> None:
        if self._copier is None:
            self._open()
        assert self._copier is not None
        for read in reads:
            source = self._tensors[read.entry.name]
            self._copier.copy(read.target, source)
        self._copier.show({})  # makes the copies

    def close(self) -> None:
        """Let go of the file, reading nothing more."""
        self.__exit__(None, None, None)

    def __exit__(self, *exception: Any) -> None:
        self._tensors = {}  # what is still referred to would be read
        self._copier = None
        self._open_file.__exit__(*exception)
        self._open_file = ExitStack()


Shard = SafetensorsShard | PickledShard


def open_shards(files: ShardFiles, stack: ExitStack) -> list[Entry]:
    """Open all files, closed by `stack`, and return their tensors in the order of the files.

    Where there is an index, a tensor counts in the file that the index names.

    Raises
    ------
    CorruptCheckpointError
        If a file is damaged, no checkpoint, or has not got what the index promises.
    OSError
        If one cannot be opened.
    """
    entries: list[Entry] = []
    for path in files.paths:
        shard = _open_indexed(path, files)
        stack.push(shard.__exit__)
        entries += shard.entries
    return those_in_index(((entry.name, entry.shard.path, entry) for entry in entries), files)


def _open_indexed(path: str, files: ShardFiles) -> Shard:
    """Open a shard; of one that is too damaged to name tensors the index knows them."""
    try:
        return _open_shard(path)
    except CorruptCheckpointError as error:
        if not error.entries and files.weight_map is not None:
            error.entries = [name for name, shard in files.weight_map.items() if shard == path]
            more = ", ..." if len(error.entries) > 3 else ""
            named = ", ".join(error.entries[:3]) + more
            error.args = (f"{error}; {files.index_path} says that it holds {named}",)
        raise


def those_in_index(found: Iterable[tuple[str, str, _T]], files: ShardFiles) -> list[_T]:
    """Return what counts of what is in the files of a model.

    Parameters
    ----------
    found : iterable of (str, str, object)
        Names, the paths of their files, and what belongs to them.
    files : ShardFiles
        The files; a name counts in the one that the index says.

    Raises
    ------
    CorruptCheckpointError
        If the index promises what is not there.
    """
    if files.weight_map is None:
        return [each for _, _, each in found]
    promised = dict(files.weight_map)
    kept = []
    for name, path, each in found:
        if files.weight_map.get(name, path) == path:
            kept.append(each)
            promised.pop(name, None)
    for name, path in promised.items():
        raise CorruptCheckpointError(
            f"{path}: there is no tensor {name} in this shard, where {files.index_path} puts it",
            path=path,
            entries=[name],
        )
    return kept


def _open_shard(path: str) -> Shard:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not os.path.isfile(path):  # opening a pipe would wait for its writer
        os.stat(path)
        raise OSError(errno.EINVAL, "not a file", path)
    refuse_what_is_no_checkpoint(path)
    return SafetensorsShard(path) if path.endswith(".safetensors") else PickledShard(path)


def read_all(reads: Sequence[Read], progress: ProgressCallback | None = None) -> None:
    """Fill the targets of all reads, those of safetensors files at the same time.

    Raises
    ------
    CorruptCheckpointError, OSError
        Some targets may have been changed by then.
    """
    _read_ranges(
        [read for read in reads if isinstance(read.entry.shard, SafetensorsShard)], progress
    )
    by_shard: dict[PickledShard, list[Read]] = {}
    for read in reads:
        if isinstance(read.entry.shard, PickledShard):
            by_shard.setdefault(read.entry.shard, []).append(read)
    for shard, its_reads in by_shard.items():
        shard.read(its_reads)


def _read_ranges(reads: Sequence[Read], progress: ProgressCallback | None) -> None:
    numbers: dict[SafetensorsShard, int] = {}
    ranges = []
    for read in reads:
        shard = read.entry.shard
        assert isinstance(shard, SafetensorsShard)
        ranges.append((numbers.setdefault(shard, len(numbers)), *shard.range_of(read)))
    try:
        _C.read_ranges(
            [shard.file for shard in numbers],
            ranges,
            n_threads=config.current().n_readers,
            progress=progress,
        )
    except _C.FormatError as error:  # a file has become shorter; the message has its name
        paths = [shard.path for shard in numbers]
        raise_corrupt(error, next((path for path in paths if path in error.args[1]), ""))
