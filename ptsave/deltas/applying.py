"""`apply`: brings weights in memory, or the files of a model, to a later version.

All new contents are computed, and compared with their checksums, before the first byte changes.  Of
a tensor with one ``overwrite`` patch, only blocks exist a second time; other patches are first
turned into ``overwrite`` patches of blocks.

Files are changed in place.  If 1 % of the elements change, nearly every page changes, so a copy
beside the file shares nothing with it.  Its pages are new, which takes three to four times as long.
A journal with the new contents is written first.  If the process is killed, the next call first
applies the journal again, which does no harm to bytes that are new already.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.contents.directories import find_files
from ptsave.contents.files import is_inside, those_in_index
from ptsave.contents.loading import load
from ptsave.contents.safetensors import read_header
from ptsave.contents.safetensors_fields import CHECKSUMS as CRCS
from ptsave.contents.safetensors_fields import N_CRC_DIGITS
from ptsave.deltas.versions import (
    BLOCK_NBYTES,
    Change,
    Patch,
    blocks_of,
    bytes_in,
    chain,
    changes_between,
    checksum_of,
    hasher,
    numbers_in,
)
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError, WrongBaseError
from ptsave.models.filling import note_changes
from ptsave.models.save_model import tensors_of
from ptsave.serialization import save
from ptsave.sources.kinds import regular_only
from ptsave.sources.locations import Location, sync_path
from ptsave.sources.ranges import RangeSource
from ptsave.streaming.payload_sources import write_bytes
from ptsave.support import config
from ptsave.support.calls import check_flags
from ptsave.support.locks import try_lock
from ptsave.support.text import some_of
from ptsave.support.threads import ThreadPool
from ptsave.writing.targets import resolve_folder

_T = TypeVar("_T")

_FOLDER = ".weight_sync"  # SGLang's folder for a directory's lock and version
_N_NAMED = 3


def apply(
    directory: str | os.PathLike[str],
    target: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
    version: int | None = None,
    *,
    base_version: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Bring weights to a later version, in place, and return the number of this version.

    The versions come from :class:`ptsave.deltas.Publisher`, slime or miles.  If an error is raised,
    no byte of the target has changed.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL.
    target : torch.nn.Module, mapping of str to torch.Tensor, str or os.PathLike
        The weights: in memory, or safetensors files of this machine (a directory, an index or a
        file).  It may have weights that no version changes.
    version : int, optional
        The wanted version; by default, the newest one.
    base_version : int, optional
        The version that the target has.  Without it, files have the version that was last applied
        to them.  If that is unknown, or the weights are in memory, checksums show the version of
        each tensor; this reads all weights once more.
    fsync : bool, default False
        Whether to wait until changed files have reached the disk, so that they survive power loss.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Returns
    -------
    int
        The version that the target has now.

    Raises
    ------
    WrongBaseError
        If the target is none of the versions, which its checksums show.
    CorruptCheckpointError
        If a patch or an index is damaged.
    FileNotFoundError
        If a version or a file is missing.
    UnsupportedSourceError
        If a version is a whole checkpoint, or uses an unknown encoding, compression or checksum, or
        the target's files are not safetensors files.
    ValueError
        If the target has a later version, lacks a tensor, or is a link to a shared file.
    ImportError
        If a library is missing: ``pip install "ptsave[deltas]"``.

    Notes
    -----
    Calls for the same files wait for each other, and for SGLang.  Processes that have mapped the
    files see new bytes at once.  If the process is killed while files change, the next call first
    completes this change.  Until then, the files have bytes of both versions, and
    ``.weight_sync/state.json`` does not exist.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> from ptsave.deltas import Publisher, apply
    >>> model = torch.nn.Linear(64, 64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(model, f"{folder}/served")
    ...     publisher = Publisher(f"{folder}/versions", f"{folder}/served")
    ...     with torch.no_grad():
    ...         _ = model.weight.mul_(2)
    ...     _ = publisher.publish(model)
    ...     apply(f"{folder}/versions", f"{folder}/served")
    ...     torch.equal(ptsave.load(f"{folder}/served")["weight"], model.weight)
    1
    True
    """
    check_flags(fsync=fsync)
    root = resolve_folder(directory, storage_options)
    if isinstance(target, (str, os.PathLike)):
        path = os.fsdecode(target)
        folder = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
        sync = _Sync(folder, fsync)
        with sync.locked():
            sync.complete()
            plan = _plan(root, version, sync.version if base_version is None else base_version)
            _apply_to_files(plan, path, sync)
        return plan.version
    tensors = tensors_of(target.state_dict() if isinstance(target, nn.Module) else target)[0]
    plan = _plan(root, version, base_version)
    _apply_in_memory(plan, tensors)
    return plan.version


class _Plan(NamedTuple):
    """How to reach a version."""

    version: int
    patches: dict[str, list[Patch]]  # of each tensor, in order
    is_base_known: bool  # otherwise checksums decide which of the patches are applied

    def require(self, names: Container[str]) -> None:
        """Raise ValueError if a tensor with patches is missing."""
        missing = sorted(name for name in self.patches if name not in names)
        if missing:
            raise ValueError(
                f"the target has no tensor {some_of(missing, _N_NAMED)}, which versions up to "
                f"{self.version} change"
            )


def _plan(root: Location, version: int | None, base: int | None) -> _Plan:
    if version is None:
        numbers = numbers_in(root)
        if not numbers:
            raise FileNotFoundError(errno.ENOENT, "there is no version", root.name)
        version = numbers[-1]
    if base is not None and version < base:
        raise ValueError(f"the target has version {base}, which is later than version {version}")
    return _Plan(version, chain(root, version, base), base is not None)


def _renewed(
    memory: Tensor, patches: list[Patch], *, is_base_known: bool, with_crc: bool = False
) -> tuple[list[Change], int]:
    """Return the changes that bring a tensor to its version, and the CRC-32 of its new bytes.

    `memory` has the old bytes.  The CRC is computed only if there are changes.
    """
    if not is_base_known:
        patches = _missing(memory, patches)
        if not patches:
            return [], 0
    last, nbytes = patches[-1], len(memory)
    # Of a patch, each block takes all bytes, or the block's part.
    steps: list[Iterator[tuple[bytes, bool]]] = []
    only: bytes | None = None
    for patch in patches:
        if patch.version.encoding == "xor":
            steps.append((block, True) for block in patch.xor_blocks(nbytes))
        else:
            overwritten = patch.overwritten(nbytes)
            steps.append(repeat((overwritten, False)))
            only = overwritten if len(patches) == 1 else None
    digest, crc = hasher(last.version.checksum), 0
    changes = [] if only is None else [Change(only, memory)]
    block = torch.empty(min(nbytes, BLOCK_NBYTES), dtype=torch.uint8)
    for begin, end in blocks_of(nbytes):
        old, new = memory[begin:end], block[: end - begin]
        _C.patched_copy(memory, begin, new, [next(step) for step in steps])
        digest.update(memory_of(new))
        if with_crc:
            crc = _C.crc32(memory_of(new), crc)
        if only is None:
            changes += changes_between(old, new, old)
    if digest.hexdigest() != last.checksum:
        raise WrongBaseError(
            f"tensor {last.name} would not get the checksum of version {last.version.number} in "
            f"{last.source.name}: the target has none of these versions, or a patch is damaged; "
            "the target is unchanged"
        )
    return changes, crc


def _missing(memory: Tensor, patches: list[Patch]) -> list[Patch]:
    """Return the patches behind the newest one whose checksum the bytes have; else all patches."""
    found: dict[str, str] = {}
    for number, patch in reversed([*enumerate(patches, 1)]):
        kind = patch.version.checksum
        if kind not in found:
            found[kind] = checksum_of(memory, kind)
        if found[kind] == patch.checksum:
            return patches[number:]
    return patches


# ------------------------------------------------------------------------------ weights in memory


def _apply_in_memory(plan: _Plan, tensors: dict[str, Tensor]) -> None:
    plan.require(tensors)

    def renew(item: tuple[str, list[Patch]]) -> tuple[Tensor, Tensor, list[Change]]:
        tensor = tensors[item[0]]
        memory = bytes_in(tensor)
        return tensor, memory, _renewed(memory, item[1], is_base_known=plan.is_base_known)[0]

    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    found = [each for each in _in_threads(renew, plan, sizes) if each[2]]
    _C.apply_changes(
        [change for *_, changes in found for change in changes],
        n_threads=config.current().n_threads,
    )
    for tensor, memory, _ in found:
        if memory.data_ptr() != tensor.data_ptr():  # a copy
            tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))
    note_changes([tensor for tensor, *_ in found])


def _in_threads(
    renew: Callable[[tuple[str, list[Patch]]], _T], plan: _Plan, sizes: Mapping[str, int]
) -> list[_T]:
    """Call `renew` for each tensor with patches, the largest first."""
    by_size = sorted(plan.patches.items(), key=lambda item: -sizes[item[0]])
    with ThreadPool(config.current().n_threads) as pool:
        return list(pool.map(renew, by_size))


# ------------------------------------------------------------------------------- weights in files


class _Shard:
    """A safetensors file of the target."""

    def __init__(self, source: RangeSource) -> None:
        if source.kind != "safetensors":
            raise UnsupportedSourceError(
                f"{source.name}: only safetensors files can be changed: convert this file first"
            )
        self.path = source.name
        self.header = read_header(source)

    memory: Tensor  # all bytes of the file, after `map`

    def map(self) -> None:
        """Map the file into memory."""
        if not hasattr(self, "memory"):
            self.memory = _mapped(self.path)

    def crc_change(self, number: int, crc: int) -> Change:
        """Return the change of a tensor's checksum in the file's header."""
        head = memory_of(self.memory[: self.header.tensors[0].offset])
        found = re.search(rb'"%s"\s*:\s*"' % re.escape(CRCS).encode(), head)
        if found is None:
            raise CorruptCheckpointError(
                f"{self.path}: {CRCS} is not in the header", path=self.path
            )
        begin = found.end() + N_CRC_DIGITS * number
        return Change(b"%08x" % crc, self.memory[begin : begin + N_CRC_DIGITS], is_whole=True)


def _mapped(path: str) -> Tensor:
    """Map a file into memory, to change it."""
    if os.path.islink(path):
        raise ValueError(
            f"{path} is a link, perhaps into a cache that other programs share: copy the files "
            "first"
        )
    with open(path, "r+b", buffering=0, opener=regular_only) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def _apply_to_files(plan: _Plan, path: str, sync: _Sync) -> None:
    files = find_files(path)
    shards = []
    for source in files.open():
        with closing(source):
            shards.append(_Shard(source))
    every = (
        (stored.name, shard.path, (shard, number))
        for shard in shards
        for number, stored in enumerate(shard.header.tensors)
    )
    places: dict[str, tuple[_Shard, int]] = {}
    for shard, number in those_in_index(every, files):
        name = shard.header.tensors[number].name
        if name in places:
            raise ValueError(f"{name} is in {places[name][0].path} and in {shard.path}")
        places[name] = shard, number
    plan.require(places)

    def renew(item: tuple[str, list[Patch]]) -> tuple[_Shard, list[Change]]:
        shard, number = places[item[0]]
        stored, with_crc = shard.header.tensors[number], shard.header.has_checksums
        memory = shard.memory[stored.offset : stored.offset + stored.nbytes]
        changes, crc = _renewed(
            memory, item[1], is_base_known=plan.is_base_known, with_crc=with_crc
        )
        if changes and with_crc:
            changes.append(shard.crc_change(number, crc))
        return shard, changes

    sizes = {}
    for name in plan.patches:
        shard, number = places[name]
        shard.map()
        sizes[name] = shard.header.tensors[number].nbytes
    found = _in_threads(renew, plan, sizes)
    sync.change(plan.version, [(shard, each) for shard, changes in found for each in changes])


class _Sync:
    """The version of the files in a directory, and the journal of a change to them."""

    def __init__(self, folder: str, fsync: bool) -> None:
        self._folder, self._fsync = folder, fsync
        self._own = os.path.join(folder, _FOLDER)
        self._state = os.path.join(self._own, "state.json")
        self._journal = os.path.join(self._own, "ptsave-journal.pt")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other calls and against SGLang; wait until it is free."""
        os.makedirs(self._own, exist_ok=True)
        path = os.path.join(self._own, "lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try_lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    @property
    def version(self) -> int | None:
        """The version that was last applied; None if it is unknown."""
        try:
            with open(self._state, encoding="utf-8") as file:
                text = str(json.load(file)["version"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError):
            text = ""
        if not re.fullmatch("[0-9]{1,15}", text):
            raise CorruptCheckpointError(
                f"{self._state} does not say which version the files have: remove it, and "
                "checksums will show the version",
                path=self._state,
            )
        return int(text)

    def change(self, version: int, changes: list[tuple[_Shard, Change]]) -> None:
        """Write the journal, and then change the files."""
        if changes:
            entries, end = [], 0
            data = torch.empty(sum(len(each.data) for _, each in changes), dtype=torch.uint8)
            for shard, each in changes:
                begin, end = end, end + len(each.data)
                memory_of(data)[begin:end] = each.data
                name = os.path.relpath(shard.path, self._folder)
                offset = each.target.data_ptr() - shard.memory.data_ptr()
                entries.append((name, offset, len(each.target), each.is_whole, end))
            journal = {"version": version, "entries": entries, "data": data}
            save(journal, self._journal, fsync=self._fsync)
            # From here on, only this journal knows the bytes of the files.
            with suppress(FileNotFoundError):
                os.unlink(self._state)
            if self._fsync:
                sync_path(self._own)
        self._finish(version, [each for _, each in changes], {shard.path for shard, _ in changes})

    def complete(self) -> None:
        """Complete a change that was interrupted."""
        if not os.path.exists(self._journal):
            return
        if self.version is not None:
            # These files are not those of the journal: its change had not begun, or has ended, or
            # SGLang has made other files.
            os.unlink(self._journal)
            return
        journal = load(self._journal, weights_only=True)
        memories: dict[str, Tensor] = {}
        changes, begin = [], 0
        try:
            for name, offset, nbytes, is_whole, end in journal["entries"]:
                if not is_inside(name):
                    raise ValueError(f"it changes {name!r}")
                path = os.path.join(self._folder, name)
                if path not in memories:
                    memories[path] = _mapped(path)
                data = bytes(memory_of(journal["data"][begin:end]))
                target = memories[path][offset : offset + nbytes]
                if len(target) != nbytes:
                    raise ValueError(f"{name} has another size")
                changes.append(Change(data, target, is_whole))
                begin = end
            self._finish(journal["version"], changes, memories)
        except (TypeError, ValueError, KeyError) as error:
            raise CorruptCheckpointError(
                f"{self._journal}: not a journal of these files: {error}", path=self._journal
            ) from None

    def _finish(self, version: int, changes: list[Change], paths: Iterable[str]) -> None:
        _C.apply_changes(changes, n_threads=config.current().n_threads)
        if self._fsync:
            for path in paths:
                sync_path(path)
        write_bytes(
            self._state, json.dumps({"version": f"{version:06d}"}).encode(), fsync=self._fsync
        )
        with suppress(FileNotFoundError):
            os.unlink(self._journal)
