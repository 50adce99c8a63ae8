"""`Publisher`: writes versions of weights as patches, and whole versions in between."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.archive.spans import bytes_of, new_storage
from ptsave.deltas import versions
from ptsave.deltas.applying import in_threads, kind_text
from ptsave.deltas.versions import WHOLE, Patch, Version, bytes_in, name_of, newest_in
from ptsave.deltas.weights import Weights
from ptsave.errors import SaveError
from ptsave.models.iterating import iter_weights
from ptsave.models.save_model import ShardSet, save_errors, split, tensors_of
from ptsave.sources.locations import Location
from ptsave.streaming.payload_sources import check_safetensors
from ptsave.support import config
from ptsave.support.calls import check_flags, checked_int, optional_int
from ptsave.support.text import some_of
from ptsave.writing.targets import resolve_folder

# Patches since the last whole version may have this part of its bytes.
_MAX_PATCHED = 0.5
_SHARD_NBYTES = 5 * 10**9
_N_NAMED = 3
_MIN_HUGE_NBYTES = 4 << 20


class Publisher:
    """Publishes versions of a model's weights; most of them hold only the bytes that changed.

    The format is that of slime, miles and SGLang: SGLang's ``/pull_weights`` applies such versions,
    and so does :func:`ptsave.deltas.apply`.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL; a missing one is created.
    base : torch.nn.Module, mapping of str to torch.Tensor, Weights, str or os.PathLike
        The weights that receivers start with, or their file or directory.  The publisher keeps a
        copy of them in the CPU's memory.  Use the files that receivers have: a trainer's weights
        may differ from them, for example in padded rows of a vocabulary.  To go on after a
        restart, pass the newest version in the directory: ``Weights(directory, base)``.
    version : int, optional
        The version that `base` is.  The default is 0, or the version of the `Weights`.
    encoding : {"overwrite", "xor"}, default "overwrite"
        Whether patches hold positions with new bytes, or old bytes combined with new ones.  An
        ``"overwrite"`` patch can be applied again after an interruption.  An ``"xor"`` patch is as
        long as the tensor before it is compressed; tensors of 4 GiB or more need it.
    checksum : {"xxh3-128", "adler32", "blake3"}, default "xxh3-128"
        The checksum that receivers compare.  ``"adler32"`` is slow, and different small tensors may
        have the same one; other receivers need no library for it.
    max_depth : int or None, default 8
        The most versions in a row that hold patches.  The next one is a whole checkpoint, and so is
        a version with which the patches in a row would exceed half of the weights' bytes.  With
        None, all versions hold patches.
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
        If a weight is not a dense tensor, or safetensors files cannot hold it.  The latter does not
        matter with ``max_depth=None``.
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
        base: nn.Module | Mapping[str, Tensor] | Weights | str | os.PathLike[str],
        *,
        version: int | None = None,
        encoding: Literal["overwrite", "xor"] = "overwrite",
        checksum: Literal["xxh3-128", "adler32", "blake3"] = "xxh3-128",
        max_depth: int | None = 8,
        fsync: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if encoding not in versions.ENCODINGS or checksum not in versions.CHECKSUMS:
            raise ValueError(
                f"encoding must be one of {', '.join(versions.ENCODINGS)}, and checksum one of "
                f"{', '.join(versions.CHECKSUMS)}, not {encoding!r} and {checksum!r}"
            )
        check_flags(fsync=fsync)
        versions.zstd()
        versions.checksum_of(torch.empty(0).byte(), checksum)  # needs its library
        own = base.version if isinstance(base, Weights) else 0
        self.version = checked_int(own if version is None else version, "version", 0)
        self._encoding, self._checksum, self._fsync = encoding, checksum, fsync
        self._max_depth = optional_int(max_depth, "max_depth", 0)
        self._root = resolve_folder(directory, storage_options)
        is_file = isinstance(base, (str, bytes, os.PathLike, Weights))
        tensors = dict(iter_weights(base)) if is_file else _tensors_in(base)
        if max_depth is not None:
            check_safetensors(tensors)
        for name, tensor in tensors.items():
            if tensor.nbytes > _C.MAX_PATCHED_NBYTES and encoding == "overwrite":
                raise ValueError(
                    f"tensor {name} has {tensor.nbytes} bytes, but positions in patches have 32 "
                    "bits: use encoding='xor'"
                )
        self._kinds = {name: _kind_of(tensor) for name, tensor in tensors.items()}
        self._base = {name: _copy_of(bytes_in(tensor)) for name, tensor in tensors.items()}
        self._depth = self._nbytes = 0  # of the versions since the last whole one
        self._check_directory()

    def publish(self, state: nn.Module | Mapping[str, Tensor], version: int | None = None) -> str:
        """Write the next version, and return the path or URL of its directory.

        If this fails, or the process is killed, there is no such version.  At a URL, the index
        makes the version appear, and is written last.

        Parameters
        ----------
        state : torch.nn.Module or mapping of str to torch.Tensor
            The new weights, with the names, shapes and dtypes of `base`.  Tied weights may have
            more names here, if their bytes are equal.
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
        if optional_int(version, "version", 0) not in (None, number):
            raise ValueError(f"the next version is {number}, and not {version!r}")
        tensors = self._untied(_tensors_in(state))
        self._check_names(tensors)
        is_whole = self._max_depth is not None and self._depth >= self._max_depth
        found = [] if is_whole else self._encode(tensors)
        nbytes = self._nbytes + sum(each.blob.nbytes for each in found)
        if self._max_depth is not None:
            all_nbytes = sum(memory.nbytes for memory in self._base.values())
            is_whole |= nbytes > _MAX_PATCHED * all_nbytes
        with save_errors(self._root.name), self._new_folder(number) as folder:
            if is_whole:
                shards = split(tensors, _SHARD_NBYTES, tied=False)
                ShardSet(folder, "safetensors", shards, self._fsync, checksums=True).write()
            else:
                # Two publishers at a URL must not replace each other's shard.
                token = f"{secrets.token_hex(4)}-" if folder.is_url else ""
                versions.write_patches(
                    folder,
                    Version(number, self.version, self._encoding, self._checksum),
                    {each.name: each.blob for each in found},
                    {each.name: each.checksum for each in found},
                    shard=f"model-{token}00000-of-00001.safetensors",
                    fsync=self._fsync,
                    is_new=True,
                )
        changes = [(*each.change, None) for each in found]
        if is_whole:
            changes = [(bytes_in(each), self._base[name], None) for name, each in tensors.items()]
        _C.apply_changes(changes, n_threads=config.current().n_threads)
        self.version = number
        self._depth, self._nbytes = (0, 0) if is_whole else (self._depth + 1, nbytes)
        return self._root.join(name_of(number))

    # ------------------------------------------------------------------------------------ checks

    def _check_directory(self) -> None:
        """Raise ValueError unless the base is the newest version in the directory."""
        newest = newest_in(self._root)
        if newest is None:
            return
        if newest != self.version:
            raise ValueError(
                f"{self._root.name} already has version {newest}: pass version={newest} and the "
                "weights of this version (ptsave.deltas.Weights), or another directory"
            )
        version, patches = versions.open_version(self._root, self.version)
        for name, other in versions.tied(patches, self._base.keys()).items():
            self._base[name], self._kinds[name] = _copy_of(self._base[other]), self._kinds[other]
        for patch in patches:
            memory = self._base.get(patch.name)
            if memory is None or not _has_result(memory, patch, version):
                raise ValueError(
                    f"the base is not version {self.version} of {self._root.name}: tensor "
                    f"{patch.name} differs"
                )
        if self._max_depth is not None:
            for version, patches in versions.links(self._root, self.version, None):
                if version.encoding != WHOLE:
                    self._depth += 1
                    self._nbytes += sum(patch.nbytes for patch in patches)

    def _untied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out tied weights: tensors that the base lacks, but with another tensor's bytes."""
        own = [tensor for name, tensor in tensors.items() if name in self._base]
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name in self._base or not any(_are_equal(tensor, other) for other in own)
        }

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the names, dtypes and shapes are those of the base."""
        kinds = {name: _kind_of(tensor) for name, tensor in tensors.items()}
        found = [
            f"tensor {name} is {kind_text(kinds.get(name))} in the new weights, but "
            f"{kind_text(self._kinds.get(name))} in the base"
            for name in sorted({name for name, _ in kinds.items() ^ self._kinds.items()})
        ]
        if found:
            raise ValueError(some_of(found, _N_NAMED))

    # ----------------------------------------------------------------------------------- writing

    def _encode(self, tensors: Mapping[str, Tensor]) -> list[_Encoded]:
        """Return the patches of the tensors that have changed."""
        by_size = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
        return [each for each in in_threads(self._encoded, by_size) if each is not None]

    def _encoded(self, item: tuple[str, Tensor]) -> _Encoded | None:
        """Return the patch of a tensor, compressed; None if nothing has changed."""
        name, tensor = item
        before, after = self._base[name], bytes_in(tensor)
        fused = None  # a hash that is computed while the bytes are compared
        if self._encoding == "overwrite":
            fused = versions.fused_digest(self._checksum)
            data = _C.find_changes(before, after, fused)
            if len(data) == versions.MIN_PATCH_NBYTES:
                return None
            blob = versions.compressed(data)
            data = data if len(data) < len(after) else after
        else:
            data, parts = after, [slice(*each) for each in versions.blocks_of(len(after))]
            found = (_C.find_changes(before[part], after[part]) for part in parts)
            if all(len(each) == versions.MIN_PATCH_NBYTES for each in found):
                return None
            blocks = ((before, part.start, [after[part]]) for part in parts)
            blob = versions.xor_frame(blocks, len(after))
        digest = fused.hexdigest() if fused else versions.checksum_of(after, self._checksum)
        return _Encoded(name, blob, digest, (data, before))

    @contextmanager
    def _new_folder(self, number: int) -> Iterator[Location]:
        """Yield a directory that becomes the version's directory if the block succeeds."""
        path = self._root.join(name_of(number))
        taken = SaveError(errno.EEXIST, "another publisher has written this version", path)
        if (newest_in(self._root) or 0) >= number:
            raise taken
        if self._root.is_url:
            folder = versions.folder_of(self._root, number)
            folder.make()
            try:
                yield folder
            except FileExistsError as error:
                raise taken from error
            return
        with versions.staging_of(self._root, number) as folder:
            folder.make()
            yield folder
            if self._fsync:
                folder.sync()
            try:
                os.rename(folder.path, path)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise taken from error
                raise
            if self._fsync:
                self._root.sync()


class _Encoded(NamedTuple):
    name: str
    blob: Tensor  # the compressed patch
    checksum: str
    change: tuple[Tensor, Tensor]  # that makes the base the new version


def _has_result(memory: Tensor, patch: Patch, version: Version) -> bool:
    """Return whether these are a tensor's bytes in the patch's version."""
    if patch.is_whole:
        return torch.equal(memory, patch.whole())
    return versions.checksum_of(memory, version.checksum) == patch.checksum


def _tensors_in(state: Any) -> dict[str, Tensor]:
    return tensors_of(state.state_dict() if isinstance(state, nn.Module) else state)[0]


def _copy_of(memory: Tensor) -> Tensor:
    """Return a copy in huge pages: with them, a patch is found and applied in 0.6 of the time."""
    nbytes = len(memory)
    is_large = nbytes >= _MIN_HUGE_NBYTES
    storage = _C.huge_page_storage(nbytes) if is_large else new_storage(nbytes)
    return bytes_of(storage).copy_(memory)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return _kind_of(a) == _kind_of(b) and torch.equal(bytes_in(a), bytes_in(b))


def _kind_of(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
