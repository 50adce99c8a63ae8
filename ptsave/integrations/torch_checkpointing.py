"""A storage and a resharder for torch_checkpointing that replace the library's own.

The resharder reads the needed parts of all files together.  The library's own resharder reads part
by part, with a thread for each file.  If a part consists of columns, the library's resharder reads
everything from the first element to the last, but ptsave's engine skips the gaps.

The library calls ``torch.save(object, stream)``.  ptsave's stream is also a path-like object.  When
torch.save asks for its path, ptsave's engine saves the object.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Buffer

from ptsave import _C
from ptsave.archive.damage import damage_of
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import memory_of
from ptsave.dcp.rank_files import RankFiles
from ptsave.dcp.read_plan import ReadPlan, StoredTensor, is_strided
from ptsave.errors import CorruptCheckpointError, SaveError
from ptsave.integrations.lazy_classes import classes_over
from ptsave.serialization import save
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.sources.locations import name_for, sync_path
from ptsave.support import config
from ptsave.support.calls import check_flags

__all__ = [
    "ReadStream",
    "Resharder",
    "Storage",
    "StorageConfig",
]

_log = logging.getLogger(__name__)

# The library's method that reads the pieces of its plans.
_METHOD = "_execute_load_plans_with_read_strategy"
_CHECKED_NBYTES = 32 << 20
# From this size on, several threads read faster than one.
_MIN_PARALLEL_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, and the record that contains it, as a tensor of bytes."""

    tensor: StoredTensor
    record: StoredTensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a stored tensor, from the index `begins` on, and its target in memory."""

    source: _Source
    begins: Sequence[int]
    target: Tensor


class Resharder:
    """Loads checkpoints into another sharding; reads the needed parts of all files together.

    It makes the same plans as the library's ``DefaultResharder``, and takes the same arguments.
    ``DefaultResharder`` itself reads files that are not plain archives of strided tensors, and
    reads from storages other than ptsave's.

    Parameters
    ----------
    verify_parts : bool, default False
        Whether to read all of a record and compare its checksum, even if only a part is needed.
        Otherwise the part is logged as unverified, because parts have no checksums of their own.
        ``StorageConfig(verify=False)`` turns all comparisons off.
    **options
        Arguments of ``DefaultResharder``.

    Raises
    ------
    CorruptCheckpointError
        During a load, if a record does not match its checksum.

    Examples
    --------
    >>> from torch_checkpointing import ItemSpec  # doctest: +SKIP
    >>> from ptsave.integrations.torch_checkpointing import Resharder  # doctest: +SKIP
    >>> items = {"model": ItemSpec(resharder=Resharder())}  # doctest: +SKIP
    """

    def __init__(self, *, verify_parts: bool = False, **options: Any) -> None:
        check_flags(verify_parts=verify_parts)
        super().__init__(**options)
        self._verify_parts = verify_parts
        if not hasattr(super(), _METHOD):
            raise ImportError(
                f"this torch_checkpointing has no DefaultResharder.{_METHOD}: install the release "
                "that ptsave's README names, or use DefaultResharder"
            )

    def _execute_load_plans_with_read_strategy(  # noqa: PLR0917 - the library's signature
        self,
        read_strategy: Any,
        source_path: Path,
        source_layouts_by_rank: Mapping[int, Any],
        item_key: str,
        plans_by_rank: Mapping[int, list[Any]],
        target_by_path: Mapping[Any, Any],
        storage: Any,
        file_read_workers: int,
        *rest: Any,
    ) -> None:
        """Read the pieces of all files that the engine can read; the library reads other files."""
        left = dict(plans_by_rank)
        if isinstance(storage, __getattr__("Storage")) and read_strategy.name != "FULL_FILE":

            def find(rank: int) -> dict[str, _Source] | None:
                layout, names = source_layouts_by_rank[rank], {p.src_fqn for _, p in left[rank]}
                return _stored_in(source_path, layout, item_key, names)

            with ThreadPoolExecutor(file_read_workers, "ptsave-reshard") as pool:
                found = dict(zip(left, pool.map(find, list(left)), strict=True))
            left = {rank: plans for rank, plans in left.items() if found[rank] is None}
            pieces = list(_pieces(plans_by_rank, found, target_by_path))
            with RankFiles(str(source_path), {}, verify=storage.verifies) as files:
                if files.verify:
                    _check_parts(files, pieces, is_wanted=self._verify_parts)
                plan = ReadPlan(files.read)
                for each in pieces:
                    plan.add(each.source.tensor, each.begins, each.target)
                plan.read()
        if left:
            read: Any = getattr(super(), _METHOD)
            read(
                read_strategy,
                source_path,
                source_layouts_by_rank,
                item_key,
                left,
                target_by_path,
                storage,
                file_read_workers,
                *rest,
            )


def _stored_in(
    folder: Path, layout: Any, item_key: str, names: Iterable[str]
) -> dict[str, _Source] | None:
    """Return the tensors `names` of a rank's file; None if the library has to read the file."""
    from torch_checkpointing import checkpoint_layout, default_resharder

    library: Any = default_resharder
    if not isinstance(layout.serialization_format, checkpoint_layout.TorchSerialization):
        return None
    try:
        # Not verified, because torch's C++ reader would replace the error by its own.
        with ReadStream(folder / layout.file_path, verify=False) as stream:
            crcs = _crcs_in(stream)
            # weights_only=False as in the library: its files hold DTensors and other objects.
            tree = torch.load(stream, map_location="meta", weights_only=False)
        flat = library._flatten_state_dict(item_key, tree)
        return {
            name: _stored(library._unwrap_dtensor(flat[name]), layout.file_path, name, crcs)
            for name in names
        }
    except NotImplementedError as error:
        _log.warning("torch_checkpointing, not ptsave, reads %s: %s", layout.file_path, error)
        return None


def _crcs_in(stream: Any) -> list[tuple[int, int]]:
    """Return the header offset and CRC-32 of each record, sorted by offset."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise NotImplementedError("the file is not a ZIP archive") from error
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise NotImplementedError("the file is compressed")
    stream.seek(0)
    return sorted((member.header_offset, member.CRC) for member in members)


def _stored(tensor: Any, file: str, name: str, crcs: Sequence[tuple[int, int]]) -> _Source:
    """Return where a tensor is in its file; torch has loaded `tensor` to the device "meta"."""
    if not is_strided(tensor):
        raise NotImplementedError(f"{name} is not a plain strided tensor")
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None and tensor.numel():
        raise NotImplementedError(f"the place of {name} in the file is unknown")
    begin = begin or 0
    nbytes = tensor.untyped_storage().nbytes()
    # The record's header is the last one before its payload.  A CRC of 0 means that there is none.
    at = bisect_left(crcs, (begin, 0))
    of_record = (crcs[at - 1][1] or None) if at else None
    record = StoredTensor(file, name, torch.uint8, torch.Size([nbytes]), (1,), begin, of_record)
    crc = of_record if tensor.is_contiguous() and tensor.nbytes == nbytes else None
    return _Source(StoredTensor.of(tensor, file, name, begin, crc), record)


def _check_parts(files: RankFiles, pieces: Sequence[_Piece], *, is_wanted: bool) -> None:
    """Verify records that are needed only in part, if `is_wanted`; log the unverified ones."""
    unverified: dict[tuple[str, int], int] = {}  # bytes, by file and offset of a record
    checked: set[tuple[str, int]] = set()
    for each in pieces:
        stored, record = each.source.tensor, each.source.record
        nbytes = each.target.numel() * stored.dtype.itemsize
        is_whole = stored.crc is not None and each.target.shape == stored.shape
        key = record.file, record.offset
        if is_whole or not nbytes or key in checked:
            continue
        if is_wanted and record.crc is not None:
            _check_record(files, record)
            checked.add(key)
        else:
            unverified[key] = unverified.get(key, 0) + nbytes
    if unverified:
        _log.info(
            "%s: parts of %d tensors, %d bytes, were not verified, because a checksum covers all "
            "of a tensor%s",
            files.path,
            len(unverified),
            sum(unverified.values()),
            "" if is_wanted else "; Resharder(verify_parts=True) verifies them",
        )


def _check_record(files: RankFiles, record: StoredTensor) -> None:
    memory = torch.empty(min(record.nbytes, _CHECKED_NBYTES), dtype=torch.uint8)
    crc = 0
    for begin in range(0, record.nbytes, _CHECKED_NBYTES):
        piece = memory[: record.nbytes - begin]
        files.read([record.box((begin,), piece)])
        crc = _C.crc32(memory_of(piece), crc)
    if crc != record.crc:
        path = files.file(record.file)
        raise CorruptCheckpointError(
            f"{path}: the record of {record.name} at offset {record.offset} is damaged: its CRC-32 "
            f"is {crc:08x}, not {record.crc:08x}",
            path=path,
            offset=record.offset,
            entries=[record.name],
        )


def _pieces(
    plans_by_rank: Mapping[int, list[Any]],
    found: Mapping[int, dict[str, _Source] | None],
    targets: Mapping[Any, Any],
) -> Iterator[_Piece]:
    """Yield the pieces of the files that the engine can read."""
    for rank, plans in plans_by_rank.items():
        stored = found.get(rank)
        if stored is None:
            continue
        for path, plan in plans:
            local = getattr(targets[path], "_local_tensor", targets[path]).detach()
            index = tuple(
                slice(begin, begin + n) for begin, n in zip(plan.offsets, plan.sizes, strict=True)
            )
            yield _Piece(stored[plan.src_fqn], plan.src_offsets, local[index])


# --------------------------------------------------------------------------------- storage


@dataclass(kw_only=True, unsafe_hash=True)
class StorageConfig:
    """The options of `Storage`; each process that saves or loads makes its storage from them.

    Parameters
    ----------
    fsync : bool, default True
        Whether a checkpoint survives power loss once it has its name.
    verify : bool, default True
        Whether files of tensors are compared with their checksums when they are read whole.

    Examples
    --------
    >>> from torch_checkpointing import CheckpointManager  # doctest: +SKIP
    >>> from ptsave.integrations.torch_checkpointing import StorageConfig  # doctest: +SKIP
    >>> options = CheckpointManager.Config(storage_config=StorageConfig())  # doctest: +SKIP
    """

    fsync: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        check_flags(fsync=self.fsync, verify=self.verify)

    def create_storage(self) -> Storage:
        """Return the storage."""
        return cast("Storage", __getattr__("Storage")(self))  # derived from the library's class


class Storage:
    """Writes and reads local files and directories with ptsave's engine."""

    def __init__(self, config: StorageConfig) -> None:
        self._fsync = config.fsync
        self.verifies = config.verify  # whether files are compared with their checksums, if any

    @property
    def mmap_fill_workers(self) -> int:
        """Number of streams that read one file: one, because the engine has its own threads."""
        return 1

    def stream_read(self, path: Path, read_args: Any = None) -> io.RawIOBase | io.BytesIO:
        """Open a file; unless `read_args` says otherwise, first read it whole and verify it."""
        stream = ReadStream(path, verify=self.verifies)
        if read_args is not None and not read_args.pre_read_full_file:
            return stream
        with stream:
            return io.BytesIO(stream.readall())

    def read(self, path: Path, read_args: Any = None) -> bytes:
        """Return the bytes of a file, after verifying them if the option `verify` is set."""
        with ReadStream(path, verify=self.verifies) as stream:
            return stream.readall()

    def stream_write(self, path: Path) -> io.RawIOBase:
        """Return a stream; the complete file appears when the stream is closed."""
        return WriteStream(path, fsync=self._fsync)

    def get_write_stream(self, path: Path, data: object) -> io.RawIOBase:
        """Return a stream that saves `data` when the stream is passed to torch.save."""
        return ObjectStream(path, data, fsync=self._fsync)

    def write(self, path: Path, data: Buffer) -> None:
        """Write a file; it appears complete or not at all."""
        with WriteStream(path, fsync=self._fsync) as stream:
            stream.write(memoryview(data).cast("B"))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make missing directories up to `path`; if not `recursive`, make only `path` itself."""
        if recursive:
            os.makedirs(path, exist_ok=True)
        else:
            os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and its contents."""
        shutil.rmtree(path)

    def delete(self, path: Path) -> None:
        """Remove a file."""
        os.remove(path)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a file or a directory; with the option `fsync`, the new name survives power loss.

        A file may replace a file, and a directory may replace an empty directory.  Other existing
        targets, and targets on another file system, raise an OSError.
        """
        if self._fsync and os.path.isdir(src_path):
            for folder, _, _ in os.walk(src_path):
                sync_path(folder)
        try:
            os.rename(src_path, dst_path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                message = f"{os.strerror(error.errno)}: remove the target to rename {src_path}"
                raise type(error)(error.errno, message, str(dst_path)) from None
            raise
        if self._fsync:
            for folder in {os.path.dirname(dst_path) or ".", os.path.dirname(src_path) or "."}:
                sync_path(folder)

    def ls(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def exists(self, path: Path) -> bool:
        """Return whether a path exists."""
        return os.path.exists(path)

    def getsize(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        return os.path.getsize(path)

    def isdir(self, path: Path) -> bool:
        """Return whether a path is a directory."""
        return os.path.isdir(path)

    def remap_path(self, path: Path) -> str:
        """Return the path for other programs: it is the same path."""
        return str(path)


class ReadStream(io.FileIO):
    """Reads a file; with `verify`, a call that reads a whole archive compares its checksums."""

    read = io.RawIOBase.read  # type: ignore[assignment]  # calls `readinto` and `readall`

    def __init__(self, path: Path, *, verify: bool) -> None:
        super().__init__(os.fspath(path))
        self._path = os.fspath(path)
        self._verify = verify
        self._nbytes = os.fstat(self.fileno()).st_size

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer, up to the end of the file; verify an archive that is read whole."""
        # The views are released before an error is raised.  The traceback would keep them, and the
        # buffer's owner may want to unmap the memory.
        with memoryview(buffer) as whole, whole.cast("B") as view:
            begin = self.tell()
            nbytes = min(view.nbytes, max(self._nbytes - begin, 0))
            if nbytes < _MIN_PARALLEL_NBYTES and nbytes < self._nbytes:
                return super().readinto(view) or 0
            if nbytes:
                self._fill(view, nbytes, begin)
            self.seek(begin + nbytes)
            error = None
            if self._verify and nbytes == self._nbytes:
                with view[:nbytes] as data:
                    error = self._damage(data)
        if error is not None:
            raise error
        return nbytes

    def readall(self) -> bytes:
        data = bytearray(max(self._nbytes - self.tell(), 0))
        n = self.readinto(data)
        return bytes(memoryview(data)[:n])

    def _fill(self, view: memoryview, nbytes: int, begin: int) -> None:
        limits = config.current()
        files = [(self.fileno(), os.fsencode(self._path))]
        _C.RangeFiles(files, direct=limits.direct_reads, n_threads=limits.n_readers).read(
            [(0, begin, torch.frombuffer(view, dtype=torch.uint8, count=nbytes))],
            n_threads=limits.n_readers,
            max_pinned_nbytes=limits.max_pinned_nbytes,
            progress=None,
        )

    def _damage(self, data: memoryview) -> CorruptCheckpointError | None:
        if bytes(data[: len(ZIP_MAGIC)]) != ZIP_MAGIC:
            return None  # JSON, metadata and safetensors files have no checksums
        limits = config.current()
        try:
            engine = _C.Reader.open_memory(data, os.fsencode(self._path))
        except CorruptCheckpointError:
            return None  # truncated, or another kind of zip file: the caller decides
        reader = RecordReader(engine, self._path, limits, verify=True)
        if not (engine.has_crcs and engine.storages_have_crcs and engine.all_stored):
            return None
        damaged = engine.read_records(
            list(range(len(engine.records()))),
            [],
            n_threads=limits.n_threads,
            verify=True,
            max_pinned_nbytes=limits.max_pinned_nbytes,
        )
        return damage_of(reader, damaged) if damaged else None


class WriteStream(io.RawIOBase):
    """Writes a file; the complete file appears when the stream is closed without an error."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._fsync = fsync
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        return self._opened().write(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _opened(self) -> io.BufferedWriter:
        if self._file is None:
            folder, name = os.path.split(self._path)
            if not os.path.isdir(folder or "."):
                message = f"Parent directory {folder} does not exist."
                raise SaveError(errno.ENOENT, message, self._path)
            self._file = open(os.path.join(folder, name_for(name)), "xb")  # noqa: SIM115
        return self._file

    def close(self) -> None:
        """Publish the file under its name."""
        if self.closed:
            return
        try:
            with self._opened() as file:
                file.flush()
                if self._fsync:
                    os.fsync(file.fileno())
            os.replace(file.name, self._path)
            if self._fsync:
                sync_path(os.path.dirname(self._path) or ".")
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the stream without publishing its file; an older file stays."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._file.name)
            self._file = None
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        if error is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        """Abort a stream that was not closed."""
        self.abort()


class _ObjectSavedError(Exception):
    """Ends the torch.save call that asked a stream for its path."""


class ObjectStream(WriteStream):
    """Saves `data` with the engine when torch.save gets the stream in a ``with`` block.

    Bytes that are written to the stream go to the file as usual.
    """

    def __init__(self, path: Path, data: object, *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._data = data

    def __fspath__(self) -> str:
        """Save the object when torch.save asks for the path; then raise an error to end torch.save.

        The ``with`` block catches that error.
        """
        save(self._data, self._path, fsync=self._fsync)
        raise _ObjectSavedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        super().__exit__(kind, error, traceback)
        return isinstance(error, _ObjectSavedError)


_BASES = {
    "Resharder": "torch_checkpointing.default_resharder.DefaultResharder",
    "Storage": "torch_checkpointing.storage.base_storage.Storage",
    "StorageConfig": "torch_checkpointing.storage.base_storage.StorageConfig",
}
__getattr__ = classes_over(__name__, _BASES, package="torch_checkpointing")
