"""Storage for torch_checkpointing: files, streams and directories of this machine.

The library calls ``torch.save(object, stream)``.  The stream is also a path, which torch.save asks
for first, so the engine saves the object.  The engine also reads whole files, and verifies them.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

from typing_extensions import Buffer

from ptsave.integrations.storage_streams import ObjectStream, ReadStream, WriteStream
from ptsave.support.flags import check_flags
from ptsave.support.syncing import sync_path

__all__ = ["Storage", "StorageConfig"]


class StorageConfig:
    """Makes the storage, in each process that saves or loads.

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

    def __init__(self, *, fsync: bool = True, verify: bool = True) -> None:
        check_flags(fsync=fsync, verify=verify)
        self.fsync = fsync
        self.verify = verify

    def __repr__(self) -> str:
        return f"StorageConfig(fsync={self.fsync}, verify={self.verify})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.fsync, self.verify))

    def create_storage(self) -> Storage:
        """Return the storage."""
        kind = getattr(sys.modules[type(self).__module__], "Storage", Storage)
        return cast("Storage", kind(self))


class Storage:
    """Files and directories of this machine, written and read by the engine."""

    def __init__(self, config: StorageConfig) -> None:
        self._fsync = config.fsync
        self._verify = config.verify

    @property
    def verifies(self) -> bool:
        """Whether files that have checksums are compared with them."""
        return self._verify

    @property
    def mmap_fill_workers(self) -> int:
        """Number of streams that read one file: one, as the engine has its own threads."""
        return 1

    # ------------------------------------------------------------------------------- reading

    def stream_read(self, path: Path, read_args: Any = None) -> io.RawIOBase | io.BytesIO:
        """Open a file; read it whole first, and verify it, unless `read_args` says otherwise."""
        stream = ReadStream(path, verify=self._verify)
        if read_args is not None and not read_args.pre_read_full_file:
            return stream
        with stream:
            return io.BytesIO(stream.readall())

    def read(self, path: Path, read_args: Any = None) -> bytes:
        """Return the verified bytes of a file."""
        with ReadStream(path, verify=self._verify) as stream:
            return stream.readall()

    # ------------------------------------------------------------------------------- writing

    def stream_write(self, path: Path) -> io.RawIOBase:
        """Return a stream whose file appears, complete, when the stream is closed."""
        return WriteStream(path, fsync=self._fsync)

    def get_write_stream(self, path: Path, data: object) -> io.RawIOBase:
        """Return a stream that saves `data` when torch.save gets the stream next."""
        return ObjectStream(path, data, fsync=self._fsync)

    def write(self, path: Path, data: Buffer) -> None:
        """Write a file, which appears complete or not at all."""
        with WriteStream(path, fsync=self._fsync) as stream:
            stream.write(memoryview(data).cast("B"))

    # --------------------------------------------------------------------------- directories

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory, by default with its parents and only if it is missing."""
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
        """Rename a file or a directory, durably with `fsync`.

        A file replaces a file, and a directory an empty directory; all else is an OSError, as is
        another file system.
        """
        if self._fsync and os.path.isdir(src_path):
            for folder, _, _ in os.walk(src_path):
                sync_path(folder)
        try:
            os.rename(src_path, dst_path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                message = f"{os.strerror(error.errno)}: the name of {src_path} is taken, remove it"
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
        """Return the path as other programs know it, which is the same."""
        return str(path)
