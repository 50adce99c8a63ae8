"""`Publisher`: writes versions of weights as patches."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.archive.spans import bytes_of, memory_of, new_storage
from ptsave.deltas.versions import (
    CHECKSUMS,
    ENCODINGS,
    INDEX,
    Change,
    blocks_of,
    bytes_in,
    changes_between,
    checksum_of,
    hasher,
    make,
    name_of,
    newest_in,
    open_version,
    zstd,
)
from ptsave.errors import SaveError, UnsupportedSourceError
from ptsave.models.iterating import iter_weights
from ptsave.models.save_model import save_errors, tensors_of
from ptsave.sources.locations import Location, folder_for
from ptsave.streaming.payload_sources import write_bytes, write_safetensors
from ptsave.support import config
from ptsave.support.calls import check_flags
from ptsave.support.locks import FolderLock
from ptsave.support.text import some_of
from ptsave.support.threads import ThreadPool
from ptsave.writing.targets import resolve_folder

_SHARD = "model-00000-of-00001.safetensors"
_LEVEL = 1  # of zstd; higher levels take much longer for a few percent
_N_NAMED = 3
_MIN_HUGE_NBYTES = 4 << 20


class Publisher:
    """Publishes versions of a model's weights; each version holds only the bytes that changed.

    The format is that of slime, miles and SGLang: SGLang's ``/pull_weights`` applies such versions,
    and so does :func:`ptsave.deltas.apply`.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL; a missing one is created.
    base : torch.nn.Module, mapping of str to torch.Tensor, str or os.PathLike
        The weights that receivers start with, or their file or directory.  The publisher keeps a
        copy of them in the CPU's memory.  Use the files that receivers have: a trainer's weights
        may differ from them, for example in padded rows of a vocabulary.
    version : int, default 0
        The version that `base` is.  To go on after a restart, pass the newest version in the
        directory, and the weights of that version.
    encoding : {"overwrite", "xor"}, default "overwrite"
        Whether patches hold positions with new bytes, or old bytes combined with new ones.  An
        ``"overwrite"`` patch can be applied again after an interruption.  An ``"xor"`` patch is as
        long as the tensor before it is compressed; tensors of 4 GiB or more need it.
    checksum : {"xxh3-128", "adler32", "blake3"}, default "xxh3-128"
        The checksum that receivers compare.  ``"adler32"`` needs no library, but is slow.
    fsync : bool, default False
        Whether :meth:`publish` waits until the files have reached the disk.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Attributes
    ----------
    version : int
        The newest version.

    Raises
    ------
    ValueError
        If the directory already has other versions, or `base` is not version `version` of them.
    TypeError
        If a weight is not a dense tensor.
    ImportError
        If zstandard or the library of the checksum is missing: ``pip install "ptsave[deltas]"``.

    Notes
    -----
    The extra state of modules is not published.

    Examples
    --------
    >>> import tempfile, torch
    >>> from ptsave.deltas import Publisher, apply
    >>> model, replica = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    >>> replica.load_state_dict(model.state_dict())
    <All keys matched successfully>
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     publisher = Publisher(folder, model)
    ...     with torch.no_grad():
    ...         _ = model.bias.add_(1)
    ...     _ = publisher.publish(model)
    ...     apply(folder, replica)
    1
    >>> torch.equal(model.bias, replica.bias)
    True
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        base: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
        *,
        version: int = 0,
        encoding: Literal["overwrite", "xor"] = "overwrite",
        checksum: Literal["xxh3-128", "adler32", "blake3"] = "xxh3-128",
        fsync: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if encoding not in ENCODINGS or checksum not in CHECKSUMS:
            raise ValueError(
                f"encoding must be one of {', '.join(ENCODINGS)}, and checksum one of "
                f"{', '.join(CHECKSUMS)}, not {encoding!r} and {checksum!r}"
            )
        check_flags(fsync=fsync)
        zstd()
        hasher(checksum)
        self.version = version
        self._encoding, self._checksum, self._fsync = encoding, checksum, fsync
        self._root = resolve_folder(directory, storage_options)
        is_file = isinstance(base, (str, os.PathLike))
        tensors = dict(iter_weights(base)) if is_file else _tensors_in(base)
        self._check_sizes(tensors)
        self._kinds = {name: _kind_of(tensor) for name, tensor in tensors.items()}
        self._base = {name: _copy_of(bytes_in(tensor)) for name, tensor in tensors.items()}
        with save_errors(self._root.name):
            self._root.make()
        self._check_directory()

    def publish(self, state: nn.Module | Mapping[str, Tensor], version: int | None = None) -> str:
        """Write the next version, and return the path or URL of its directory.

        If this fails, or the process is killed, there is no such version.  At a URL, the index is
        written last, and a reader that does not need it may see an incomplete version.

        Parameters
        ----------
        state : torch.nn.Module or mapping of str to torch.Tensor
            The new weights, with the names, shapes and dtypes of `base`.
        version : int, optional
            The number of the version, which must be ``publisher.version + 1``.

        Raises
        ------
        ValueError
            If a name, shape or dtype differs from the base, or `version` is another number.
        SaveError
            If the files cannot be written, or another publisher writes, or has written, the same
            version.
        """
        number = self.version + 1
        if version not in (None, number):
            raise ValueError(f"the next version is {number}, and not {version!r}")
        tensors = _tensors_in(state)
        self._check_names(tensors)
        found = self._encode(tensors)
        with save_errors(self._root.name), self._new_folder(number) as folder:
            blobs = {each.name: each.blob for each in found}
            if blobs:
                checksums = {each.name: each.checksum for each in found}
                write_safetensors(blobs, folder.file(_SHARD), checksums, fsync=self._fsync)
            write_bytes(folder.file(INDEX), self._index(number, blobs), fsync=self._fsync)
        make(change for each in found for change in each.changes)
        self.version = number
        return self._root.join(name_of(number))

    # ------------------------------------------------------------------------------------ checks

    def _check_sizes(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.nbytes > _C.MAX_PATCHED_NBYTES and self._encoding == "overwrite":
                raise ValueError(
                    f"tensor {name} has {tensor.nbytes} bytes, but positions in patches have 32 "
                    "bits: use encoding='xor'"
                )

    def _check_directory(self) -> None:
        """Raise ValueError unless the base is the newest version in the directory."""
        newest = newest_in(self._root)
        if newest is None:
            return
        if newest != self.version:
            raise ValueError(
                f"{self._root.name} already has version {newest}: pass version={newest} and the "
                "weights of this version, or another directory"
            )
        try:
            version, patches = open_version(self._root, self.version)
        except UnsupportedSourceError:  # a whole checkpoint, which has no checksums
            return
        for patch in patches:
            memory = self._base.get(patch.name)
            if memory is None or checksum_of(memory, version.checksum) != patch.checksum:
                raise ValueError(
                    f"the base is not version {self.version} of {self._root.name}: tensor "
                    f"{patch.name} differs"
                )

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the names, dtypes and shapes are those of the base."""
        kinds = {name: _kind_of(tensor) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            names = sorted(name for name, _ in kinds.items() ^ self._kinds.items())
            raise ValueError(
                "these tensors are missing in the base or in the new weights, or have another "
                f"shape or dtype there: {some_of(list(dict.fromkeys(names)), _N_NAMED)}"
            )

    # ----------------------------------------------------------------------------------- writing

    def _encode(self, tensors: Mapping[str, Tensor]) -> list[_Encoded]:
        """Return the patches of the tensors that have changed."""
        by_size = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
        with ThreadPool(config.current().n_threads) as pool:
            return [each for each in pool.map(self._encoded, by_size) if each is not None]

    def _encoded(self, item: tuple[str, Tensor]) -> _Encoded | None:
        """Return the patch of a tensor, compressed; None if nothing has changed."""
        name, tensor = item
        before, after = self._base[name], bytes_in(tensor)
        if self._encoding == "overwrite":
            patch = _C.find_changes(before, after)
            changes = [Change(patch, before, False, b"")] if any(patch[:4]) else []
        else:
            changes = changes_between(before, after, before)
        if not changes:
            return None
        digest = checksum_of(after, self._checksum)
        compressor = zstd().ZstdCompressor(level=_LEVEL)
        if self._encoding == "overwrite":
            blob = compressor.compress(patch)
        else:
            blob = b"".join(_xor_pieces(compressor, before, after))
        # A bytearray, because torch warns of memory that cannot be written.
        return _Encoded(name, torch.frombuffer(bytearray(blob), dtype=torch.uint8), digest, changes)

    def _index(self, number: int, names: Mapping[str, Tensor]) -> bytes:
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{self.version:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        return json.dumps(
            {"metadata": metadata, "weight_map": dict.fromkeys(sorted(names), _SHARD)}
        ).encode()

    @contextmanager
    def _new_folder(self, number: int) -> Iterator[Location]:
        """Yield a directory that becomes the version's directory if the block succeeds."""
        name = name_of(number)
        path = self._root.join(name)
        taken = SaveError(errno.EEXIST, "another publisher has written this version", path)
        if (newest_in(self._root) or 0) >= number:
            raise taken
        if self._root.is_url:
            folder = resolve_folder(path, self._root.storage_options)
            folder.make()
            yield folder
            return
        staging = self._root.join(folder_for(name))
        lock = FolderLock(staging, "lock", path)
        try:
            folder = resolve_folder(os.path.join(staging, name))
            with suppress(FileNotFoundError):  # of a publisher that was killed
                shutil.rmtree(folder.path)
            try:
                folder.make()
                yield folder
                if self._fsync:
                    folder.sync()
                os.rename(folder.path, path)
                if self._fsync:
                    self._root.sync()
            except BaseException as error:
                shutil.rmtree(folder.path, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise taken from error
                raise
        finally:
            lock.release()


class _Encoded(NamedTuple):
    name: str
    blob: Tensor  # the compressed patch
    checksum: str
    changes: list[Change]  # that make the base the new version


def _tensors_in(state: Any) -> dict[str, Tensor]:
    return tensors_of(state.state_dict() if isinstance(state, nn.Module) else state)[0]


def _copy_of(memory: Tensor) -> Tensor:
    """Return a copy in huge pages: with them, a patch is found and applied in 0.6 of the time."""
    nbytes = len(memory)
    is_large = nbytes >= _MIN_HUGE_NBYTES
    storage = _C.huge_page_storage(nbytes) if is_large else new_storage(nbytes)
    return bytes_of(storage).copy_(memory)


def _kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _xor_pieces(compressor: Any, before: Tensor, after: Tensor) -> Iterator[bytes]:
    """Compress a whole tensor's bytes, combined with the old ones, block by block."""
    stream = compressor.compressobj(size=len(after))
    begin, end = next(blocks_of(len(after)))
    block = torch.empty(end - begin, dtype=torch.uint8)
    for begin, end in blocks_of(len(after)):
        out = block[: end - begin]
        _C.patched_copy(before, begin, out, [(memory_of(after[begin:end]), True)])
        yield stream.compress(memory_of(out))
    yield stream.flush()
