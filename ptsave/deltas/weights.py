"""`Weights`: a version of a model's weights, which `load_model` and `iter_weights` read."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from ptsave import _C
from ptsave.deltas.applying import Plan, in_threads, patch_in_place, plan_for
from ptsave.deltas.versions import bytes_in, name_of, root_at
from ptsave.models.shards import Entry, ModelSource, Read, Shard, ShardReader, open_model
from ptsave.sources.locations import is_url
from ptsave.support.calls import checked_int, optional_int


class Weights(ModelSource):
    """A version of a model's weights, to be read by `load_model` or `iter_weights`.

    :func:`ptsave.load_model` and :func:`ptsave.iter_weights` take this object in place of a path.
    They read each tensor from the files of the base, patch it in memory and compare its checksum,
    before the model gets it.  So engines that pack, shard or quantize weights need no code for
    patches.  No file changes, so any number of processes may read the same base.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL.
    base : str or os.PathLike, optional
        The files that the first version changes, as for :func:`ptsave.load_model`.  They may also
        have a later version, which their checksums show.  By default, the newest whole version up
        to the wanted one, or else files in `directory`.
    version : int, optional
        The wanted version; by default, the newest one.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Attributes
    ----------
    version : int
        The version.

    Raises
    ------
    FileNotFoundError
        If there is no version, or a file is missing.
    CorruptCheckpointError
        If an index is damaged.  If a patch is damaged, `load_model` and `iter_weights` raise this.

    Notes
    -----
    If the base is none of the versions, `load_model` and `iter_weights` raise
    :class:`ptsave.WrongBaseError`.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> from ptsave.deltas import Publisher, Weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model({"a": torch.zeros(3)}, f"{folder}/base")
    ...     publisher = Publisher(f"{folder}/versions", f"{folder}/base")
    ...     _ = publisher.publish({"a": torch.ones(3)})
    ...     dict(ptsave.iter_weights(Weights(f"{folder}/versions", f"{folder}/base")))
    {'a': tensor([1., 1., 1.])}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        base: str | os.PathLike[str] | None = None,
        version: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = root_at(directory, storage_options)
        self._plan = plan_for(self._root, optional_int(version, "version", 0), None)
        whole = {each[0].version.number for each in self._plan.patches.values() if each[0].is_whole}
        if base is None:
            base = self._root.join(name_of(max(whole))) if whole else self._root.path
        self._base, self._options = os.fsdecode(base), storage_options
        self._names: set[str] | None = None
        self.version = self._plan.version

    def __repr__(self) -> str:
        return f"<Weights: version {self.version} of {self._root.name}>"

    def changed_since(self, version: int) -> Weights:
        """Return the same weights, but only the tensors that later versions than `version` change.

        Parameters
        ----------
        version : int
            The version that a model has.

        Raises
        ------
        ValueError
            If `version` is later than this one.
        """
        found = copy.copy(self)
        base = checked_int(version, "version", 0)
        found._names = {*plan_for(self._root, self.version, base).patches}
        return found

    def _open(self, stack: ExitStack) -> tuple[Sequence[Shard], list[Entry]]:
        """Open the files of the base and of all versions; `stack` will close them."""
        options = self._options if is_url(self._base) else None
        try:
            shards, entries = open_model(self._base, options, stack)
        except FileNotFoundError as error:
            if self._base != self._root.path:
                raise
            reason = "the versions change weights that are not in their directory: pass base="
            raise FileNotFoundError(errno.ENOENT, reason, self._root.name) from error
        self._plan.require({entry.name: (entry.dtype, entry.shape) for entry in entries})
        if self._names is not None:
            entries = [entry for entry in entries if entry.name in self._names]
        reader = stack.enter_context(closing(ShardReader(entry.shard for entry in entries)))
        patched = {shard: _PatchedShard(shard, reader, self._plan) for shard in shards}
        return [*patched.values()], [replace(each, shard=patched[each.shard]) for each in entries]


class _PatchedShard(Shard):
    """A file of the base; its tensors are patched after each read."""

    def __init__(self, shard: Shard, reader: ShardReader, plan: Plan) -> None:
        self.path, self.objects, self.metadata = shard.path, shard.objects, shard.metadata
        self._shard, self._reader, self._plan = shard, reader, plan

    def read(self, reads: Sequence[Read]) -> None:
        in_threads(self._read, reads)

    def _read(self, read: Read) -> None:
        stored, target = replace(read.entry, shard=self._shard), read.target
        patches = self._plan.patches.get(stored.name)
        if patches is None:
            self._reader.read([replace(read, entry=stored)])
            return
        (takes_bytes,) = _C.take_bytes([target], [stored.dtype])
        is_whole = takes_bytes and target.is_cpu and read.index is None
        whole = target if is_whole else torch.empty(stored.shape, dtype=stored.dtype)
        if not patches[0].is_whole:
            self._reader.read([Read(stored, whole)])
        is_known, base = self._plan.is_base_known, f"the base {self.path}"
        patch_in_place(bytes_in(whole), patches, is_base_known=is_known, base=base)
        if not is_whole:
            part = whole if read.index is None else whole[read.index]
            with torch.no_grad():
                target.copy_(part.reshape(target.shape))
