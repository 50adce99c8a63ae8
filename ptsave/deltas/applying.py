"""`apply`: brings weights in memory, or the files of a model, to a later version.

Patches are read and checked before the first byte changes.  Then the old values of all bytes that
are to change are noted, the bytes change in place, and each tensor's checksum is compared.  If an
error is raised meanwhile, the old values are put back.

Files also change in place.  If 1 % of the elements change, nearly every page changes, so a copy
beside the file shares nothing with it.  Its pages are new, which takes three to four times as long.
The old values are written to a journal first.  If the process is killed, the next call puts them
back.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.archive.spans import memory_of
from ptsave.contents.directories import find_files
from ptsave.contents.files import ShardFiles
from ptsave.contents.loading import load
from ptsave.contents.safetensors_fields import CHECKSUMS as CRCS
from ptsave.contents.safetensors_fields import N_CRC_DIGITS
from ptsave.deltas import versions
from ptsave.deltas.versions import WHOLE, Change, Patch, make, undo
from ptsave.errors import CorruptCheckpointError, WrongBaseError
from ptsave.models.filling import note_changes
from ptsave.models.packed_modules import PackedModules, PackedModulesMapping, unpacked
from ptsave.models.save_model import tensors_of
from ptsave.serialization import save
from ptsave.sources.kinds import regular_only
from ptsave.sources.locations import LocalFolder, Location, sync_path
from ptsave.sources.ranges import LocalFile, open_source
from ptsave.streaming.payload_sources import PayloadSources, write_bytes, write_copy
from ptsave.support import config
from ptsave.support.calls import check_flags, optional_int
from ptsave.support.locks import FolderLock
from ptsave.support.text import some_of
from ptsave.support.threads import ThreadPool
from ptsave.support.torch_names import storage_id

_S = TypeVar("_S")
_T = TypeVar("_T")

_FOLDER = ".weight_sync"  # SGLang's folder for a directory's lock and version
_N_NAMED = 3
# If a file has been replaced, it probably has another inode.  If its bytes have changed, also by
# `apply`, it has another time, which programs cannot set back.
_NUMBERS, _TIMES = ("st_ino", "st_size"), ("st_ctime_ns",)


def apply(
    directory: str | os.PathLike[str],
    target: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
    version: int | None = None,
    *,
    base_version: int | None = None,
    packed_modules_mapping: PackedModulesMapping | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Bring weights to a later version, in place, and return the number of this version.

    The versions come from :class:`ptsave.deltas.Publisher`, slime or miles.  If an error is raised,
    no byte of the target has changed.  If there is a whole version between that of the target and
    the wanted one, or the target has none of the versions, the newest whole version is the
    beginning.

    Parameters
    ----------
    directory : str or os.PathLike
        The directory of the versions, or its URL.
    target : torch.nn.Module, mapping of str to torch.Tensor, str or os.PathLike
        The weights: in memory, or safetensors files of this machine (a directory, an index or a
        file).  It may have weights that no version changes.  An empty directory first gets a copy
        of the newest whole version.
    version : int, optional
        The wanted version; by default, the newest one.
    base_version : int, optional
        The version that the target has.  Without it, files have the version that was last applied
        to them.  If that is unknown, for example because a file has been replaced, or the last
        version was one of another directory, checksums show the version of each tensor; this reads
        all weights once more.  They also do for weights in memory.
    packed_modules_mapping : mapping or list, optional
        Modules of the checkpoint that a model in memory packs into one, as for
        :func:`ptsave.load_model`.  The default is the model's attribute of this name.
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
        If the target is none of the versions, which its checksums show, and no version is whole.
    CorruptCheckpointError
        If a patch or an index is damaged.
    FileNotFoundError
        If a version or a file is missing.
    UnsupportedSourceError
        If a version uses an unknown encoding, compression or checksum, or the files of a whole
        version or of the target are not safetensors files.
    ValueError
        If the target has a later version, lacks a tensor, or has one of another dtype or shape.  If
        it is a link to a shared file, is itself a version of the directory, or has other files but
        no model.  Or if a packed parameter cannot be divided.
    TypeError
        If a tensor in memory is not dense, is expanded, or has no memory of its own, as a DTensor.
    ImportError
        If a library is missing: ``pip install "ptsave[deltas]"``.

    Notes
    -----
    A model in memory needs whole tensors with the checkpoint's bytes.  If an engine shards,
    transposes or quantizes its parameters, use :class:`ptsave.deltas.Weights`.
    Calls for the same files wait for each other, and for SGLang.  Processes that have mapped the
    files see new bytes at once.  If the process is killed while files change, the next call first
    brings the old bytes back.  Until then, the files have bytes of both versions, and
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
    version = optional_int(version, "version", 0)
    base_version = optional_int(base_version, "base_version", 0)
    root = versions.root_at(directory, storage_options)
    if isinstance(target, (str, bytes, os.PathLike)):
        path = os.fsdecode(target)
        os.stat(path)  # raises an error before a missing directory gets a lock
        folder = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
        names = map(versions.name_of, () if root.is_url else versions.numbers_in(root))
        if os.path.realpath(folder) in {os.path.realpath(root.join(name)) for name in names}:
            raise ValueError(f"{folder} is itself a version of {root.name}: copy its files first")
        sync = _Sync(folder, root, fsync)
        with sync.locked():
            sync.undo()
            base = base_version
            try:
                files = find_files(path)
            except FileNotFoundError:
                base = sync.copy_whole(root, version)
                if base is None:
                    raise
                files = find_files(path)
            sync.paths = files.paths
            base = sync.version if base is None else base
            return _apply_to_files(plan_for(root, version, base), files, sync)
    model = target if isinstance(target, nn.Module) else None
    tensors = tensors_of(target if model is None else model.state_dict())[0]
    plan = plan_for(root, version, base_version)
    if packed_modules_mapping is None:
        packed_modules_mapping = getattr(model, "packed_modules_mapping", None)
    if packed_modules_mapping and not plan.patches.keys() <= tensors.keys():
        tensors = _unpacked(tensors, packed_modules_mapping, model)
    return _apply_in_memory(plan, tensors)


def _unpacked(
    tensors: dict[str, Tensor], mapping: PackedModulesMapping, model: nn.Module | None
) -> dict[str, Tensor]:
    """Return views of the parts of packed tensors, under their names in the checkpoint."""
    parts = unpacked(tensors, PackedModules(mapping), model)
    known = {storage_id(tensor.untyped_storage()) for tensor in tensors.values()}
    for name, part in parts.items():
        if storage_id(part.untyped_storage()) not in known:
            raise ValueError(
                f"{name} is a part of a packed parameter whose weight_saver returns copies: use "
                "ptsave.load_model(model, ptsave.deltas.Weights(...))"
            )
    return parts


class Plan(NamedTuple):
    """How to reach a version."""

    version: int
    patches: dict[str, list[Patch]]  # of each tensor, in order
    is_base_known: bool  # otherwise checksums decide which of the patches are applied

    def require(self, kinds: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
        """Raise ValueError if a tensor with patches is of another kind, or missing and not tied."""
        for name in versions.tied([each[-1] for each in self.patches.values()], kinds):
            del self.patches[name]
        missing = sorted(name for name in self.patches if name not in kinds)
        if missing:
            raise ValueError(
                f"the target has no tensor {some_of(missing, _N_NAMED)}, which versions up to "
                f"{self.version} change; if a model packs or shards it, use ptsave.deltas.Weights"
            )
        for name, patches in self.patches.items():
            if patches[0].kind not in (None, kinds[name]):
                raise ValueError(
                    f"tensor {name} is {kind_text(kinds[name])} in the target, but "
                    f"{kind_text(patches[0].kind)} in {patches[0].source.name}"
                )


def kind_text(kind: Any) -> str:
    """Return a dtype and a shape as text."""
    return "missing" if kind is None else f"{kind[0]} {[*kind[1]]}"


def plan_for(root: Location, version: int | None, base: int | None) -> Plan:
    """Return the patches that lead to a version, from version `base` if it is known."""
    if version is None:
        version = versions.newest_in(root)
        if version is None:
            raise FileNotFoundError(errno.ENOENT, "there is no version", root.name)
    if base is not None and version < base:
        raise ValueError(f"the target has version {base}, which is later than version {version}")
    found = versions.links(root, version, base)
    return Plan(version, versions.by_tensor(found), base is not None)


class _Tensor(NamedTuple):
    """A tensor of the target that has patches."""

    memory: Tensor  # its bytes, which are to change
    patches: list[Patch]  # none if it already has the wanted version
    changes: list[Change]

    def check(self, target: str = "the target") -> None:
        """Raise WrongBaseError if the checksum is wrong."""
        for last in self.patches[-1:]:
            digest = self.changes[0].digest if self.changes else None
            if digest is not None:  # of a change of all of `memory`
                found = digest.hexdigest()
            else:
                found = last.checksum and versions.checksum_of(self.memory, last.version.checksum)
            if found != last.checksum:
                raise WrongBaseError(
                    f"tensor {last.name} would not get the checksum of version "
                    f"{last.version.number} in {last.source.name}: {target} has none of these "
                    "versions, or another dtype or shape, or a patch is damaged"
                )


def _read_patches(
    source: Tensor, memory: Tensor, patches: list[Patch], *, is_base_known: bool
) -> _Tensor:
    """Read the patches of a tensor; `source` has the old bytes, and may be `memory` itself."""
    if not is_base_known:
        patches = _missing(source, patches)
    return _Tensor(memory, patches, _changes(source, memory, patches))


def patch_in_place(
    memory: Tensor, patches: list[Patch], *, is_base_known: bool, base: str = "the base"
) -> None:
    """Patch a tensor's bytes and compare their checksum; an error leaves other bytes."""
    if patches[0].is_whole:
        memory.copy_(patches[0].whole())
        patches, is_base_known = patches[1:], True
    found = _read_patches(memory, memory, patches, is_base_known=is_base_known)
    make(found.changes)
    found.check(base)


def _changes(source: Tensor, memory: Tensor, patches: list[Patch]) -> list[Change]:
    """Return the changes that patches make together; `source` has the old bytes of `memory`."""
    begins, nbytes = source, len(memory)
    if patches and patches[0].is_whole:
        begins, patches = patches[0].whole(), patches[1:]
    steps: list[Iterator[tuple[bytes, bool]]] = []  # what each block takes of a patch
    for patch in patches:
        if patch.version.encoding == "xor":
            steps.append((block, True) for block in patch.xor_blocks(nbytes))
            continue
        data = patch.overwritten(nbytes)
        if len(patches) == 1 and begins is source and len(data) < nbytes:
            # Tensors in memory may share bytes, so they are hashed when all have changed.
            in_memory, checksum = source is memory, patch.version.checksum
            digest = None if in_memory else versions.fused_digest(checksum)
            return [Change(data, memory, _C.inverse(data, source), digest)]
        steps.append(repeat((data, False)))
    changes: list[Change] = []
    block = torch.empty(min(nbytes, versions.BLOCK_NBYTES), dtype=torch.uint8)
    for begin, end in versions.blocks_of(nbytes) if steps or begins is not source else ():
        new = block[: end - begin]
        _C.patched_copy(begins, begin, new, [next(step) for step in steps])
        old = source[begin:end]
        found: bytes | Tensor = _C.find_changes(old, new)
        if len(found) > versions.MIN_PATCH_NBYTES:
            if len(found) >= end - begin:
                found = bytes(memory_of(new))
            changes.append(Change(found, memory[begin:end], _C.inverse(found, old)))
    return changes


def _missing(memory: Tensor, patches: list[Patch]) -> list[Patch]:
    """Return the patches behind the oldest one whose checksum the bytes have; else all patches.

    Other bytes may have the same Adler-32.  Behind a newer one, no patch might be left to notice.
    """
    found: dict[str, str] = {}
    for number, patch in enumerate(patches, 1):
        if patch.is_whole:  # its bytes decide
            continue
        kind = patch.version.checksum
        if kind not in found:
            found[kind] = versions.checksum_of(memory, kind)
        if found[kind] == patch.checksum:
            return patches[number:]
    return patches


def in_threads(call: Callable[[_S], _T], items: Iterable[_S]) -> list[_T]:
    """Call a function with each item, in all threads, and return the results."""
    with ThreadPool(config.current().n_threads) as pool:
        return list(pool.map(call, items))


def _read_all(plan: Plan, memories: dict[str, tuple[Tensor, Tensor]]) -> dict[str, _Tensor]:
    """Read the patches of tensors, each with its old bytes and the memory that is to change."""

    def read(name: str) -> _Tensor:
        return _read_patches(*memories[name], plan.patches[name], is_base_known=plan.is_base_known)

    names = sorted(plan.patches, key=lambda name: -len(memories[name][0]))
    return dict(zip(names, in_threads(read, names), strict=True))


def _apply_in_memory(plan: Plan, tensors: dict[str, Tensor]) -> int:
    plan.require({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    memories = {name: versions.bytes_in(tensors[name]) for name in plan.patches}
    for name in memories:
        if _may_overlap(tensors[name]):
            raise TypeError(
                f"tensor {name} is expanded, or its elements overlap otherwise: pass a copy, for "
                "example clone()"
            )
    found = _read_all(plan, {name: (memory, memory) for name, memory in memories.items()})
    changes = [change for each in found.values() for change in each.changes]
    changed: list[str] = []
    try:
        make(changes)
        in_threads(_Tensor.check, found.values())
        for name in (name for name, each in found.items() if each.changes):
            changed.append(name)
            _copy_back(memories[name], tensors[name])
    except BaseException:
        undo(changes)
        for name in changed:
            _copy_back(memories[name], tensors[name])
        raise
    note_changes([tensors[name] for name in changed])
    return plan.version


def _may_overlap(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory."""
    end = 1  # behind the elements that the smaller strides reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return tensor.numel() > 0
            end += stride * (size - 1)
    return False


def _copy_back(memory: Tensor, tensor: Tensor) -> None:
    """Give a tensor the bytes in `memory`, unless they are its own."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))


# ------------------------------------------------------------------------------- weights in files


def _apply_to_files(plan: Plan, files: ShardFiles, sync: _Sync) -> int:
    places = versions.tensors_in(files)
    stored = {name: header.tensors[number] for name, (_, header, number) in places.items()}
    plan.require({name: each[2:0:-1] for name, each in stored.items()})
    paths = {name: places[name][0].name for name in plan.patches}
    # If a mapping is first read and then written, each page faults twice, which takes ext4 ten
    # times as long.  So the old bytes have their own mapping.
    new = {path: sync.map(path) for path in {*paths.values()}}
    old = {path: _mapped_to_read(path) for path in new}
    slices = {name: slice(stored[name][3], sum(stored[name][3:5])) for name in paths}
    memories = {name: (old[paths[name]][at], new[paths[name]][at]) for name, at in slices.items()}
    found = _read_all(plan, memories)
    changes: list[tuple[str, Change]] = []
    digits: dict[str, Change] = {}  # of checksums in headers
    for name, each in found.items():
        _, header, number = places[name]
        path = paths[name]
        changes += ((path, change) for change in each.changes)
        if each.changes and header.has_checksums:
            at = _crc_place(path, old[path][: header.tensors[0].offset], number)
            same = old[path][at]
            digits[name] = Change(same, new[path][at], same.clone())
            changes.append((path, digits[name]))
    with sync.changing(plan.version, new, changes):
        make(change for _, change in changes)
        in_threads(_Tensor.check, found.values())
        n_threads = config.current().n_threads
        crcs = {name: _C.crc32_of(found[name].memory, n_threads=n_threads) for name in digits}
        make(each._replace(data=b"%08x" % crcs[name]) for name, each in digits.items())
    return plan.version


def _mapped_to_read(path: str) -> Tensor:
    with closing(LocalFile.open(path)) as file:
        return file.map(0, file.nbytes)


def _crc_place(path: str, head: Tensor, number: int) -> slice:
    """Return where the digits of a tensor's checksum are in a file's header."""
    found = re.search(rb'"%s"\s*:\s*"' % re.escape(CRCS).encode(), memory_of(head))
    if found is None:
        raise CorruptCheckpointError(f"{path}: the header does not name {CRCS} plainly", path=path)
    begin = found.end() + N_CRC_DIGITS * number
    return slice(begin, begin + N_CRC_DIGITS)


class _Sync:
    """The version of the files in a directory, and the journal of a change to them."""

    def __init__(self, folder: str, root: Location, fsync: bool) -> None:
        self.folder, self._fsync = folder, fsync
        self.paths: Sequence[str] = ()  # of the target's files
        # Another directory of versions has other versions with the same numbers.
        self._versions = root.name if root.is_url else os.path.realpath(root.path)
        self._own = os.path.join(folder, _FOLDER)
        self._state = os.path.join(self._own, "state.json")
        self._journal = os.path.join(self._own, "ptsave-journal.pt")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other calls and against SGLang; wait until it is free."""
        lock = FolderLock(self._own, "lock", self.folder, wait=True)
        try:
            yield
        finally:
            if not any(map(os.path.exists, (self._state, self._journal))):  # nothing was applied
                lock.release()
            lock.close()

    @property
    def version(self) -> int | None:
        """The version that the target's files have; None if it is unknown."""
        version, facts = self._stated() or (None, {})
        return version if "files" not in facts or facts == self._facts() else None

    def _facts(self) -> dict[str, Any]:
        """Return the directory of the versions, and the identities of the files."""
        return {"versions": self._versions, "files": self._identities(*_NUMBERS, *_TIMES)}

    def _identities(self, *fields: str) -> dict[str, list[int]]:
        """Return fields of the status of each file that exists."""
        found = {}
        for path in self.paths:
            with suppress(FileNotFoundError):
                status = os.stat(path)
                name = os.path.relpath(path, self.folder)
                found[name] = [getattr(status, field) for field in fields]
        return found

    def _stated(self) -> tuple[int, dict[str, Any]] | None:
        """Return the version that was last applied, and its facts, which SGLang does not note."""
        try:
            with open(self._state, encoding="utf-8") as file:
                state = json.load(file)
            text = str(state.pop("version"))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            text = ""
        if not re.fullmatch("[0-9]{1,15}", text):
            raise CorruptCheckpointError(
                f"{self._state} does not say which version the files have: remove it, and "
                "checksums will show the version",
                path=self._state,
            )
        return int(text), state

    def map(self, path: str) -> Tensor:
        """Map a file in the directory into memory, to change it."""
        own = os.path.join(os.path.realpath(self.folder), os.path.relpath(path, self.folder))
        if os.path.realpath(path) != own:
            raise ValueError(
                f"{path} is a link out of {self.folder}, perhaps into a cache that other programs "
                "share: copy the files first"
            )
        with open(path, "r+b", buffering=0, opener=regular_only) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    @contextmanager
    def changing(
        self, version: int, files: Mapping[str, Tensor], changes: list[tuple[str, Change]]
    ) -> Iterator[None]:
        """Write the journal; the block then makes the changes, or leaves the files as they are."""
        before, paths = self.version, {path for path, _ in changes}
        if changes:
            entries = []
            for path, (_, target, inverse, _) in changes:
                offset = target.data_ptr() - files[path].data_ptr()
                name = os.path.relpath(path, self.folder)
                entries.append((name, offset, len(target), inverse))
            facts = {"versions": self._versions, "files": self._identities(*_NUMBERS)}
            journal = {"version": before, **facts, "entries": entries}
            save(journal, self._journal, fsync=self._fsync)
            # From here on, only the journal knows the bytes of the files.
            with suppress(FileNotFoundError):
                os.unlink(self._state)
            if self._fsync:
                sync_path(self._own)
        try:
            yield
        except BaseException:
            undo(change for _, change in changes)  # if this fails, the journal stays
            self._settle(before, paths)
            raise
        self._settle(version, paths)

    def copy_whole(self, root: Location, version: int | None) -> int | None:
        """Copy the newest whole version up to `version`; return its number, or None without one."""
        version = versions.newest_in(root) if version is None else version
        chain = () if version is None else versions.links(root, version, None)
        found = next((each for each, _ in chain if each.encoding == WHOLE), None)
        if found is None:
            return None
        files = versions.whole_files(versions.folder_of(root, found.number))
        paths = {files.name_of(path): path for path in (*files.paths, files.index_path) if path}
        LocalFolder(self.folder).remove_leftovers(paths.__contains__)  # of a killed process
        own = {name.partition(os.sep)[0] for name in paths}
        if others := {*os.listdir(self.folder)} - {_FOLDER, *own}:
            raise ValueError(
                f"{self.folder} has no complete model, but is not empty ({min(others)}): only an "
                "empty directory gets a copy of a whole version"
            )
        with suppress(FileNotFoundError):
            os.unlink(self._state)
        for name, path in paths.items():
            copy = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            with ExitStack() as stack:
                source = open_source(path, files.storage_options)
                local = PayloadSources(stack, self.folder).localize(source)
                write_copy(local, copy, fsync=self._fsync)
        return found.number

    def undo(self) -> None:
        """Undo a change that was interrupted."""
        if not os.path.exists(self._journal):
            return
        if self._stated() is not None:
            # These files are not those of the journal: its change had not begun, or has ended, or
            # SGLang has made other files.
            os.unlink(self._journal)
            return
        journal = load(self._journal, weights_only=True)
        memories: dict[str, Tensor] = {}
        changes = []
        try:
            self.paths = [os.path.join(self.folder, name) for name in journal["files"]]
            if self._identities(*_NUMBERS) != journal["files"]:
                raise ValueError("a file has been replaced")
            version = optional_int(journal["version"], "version", 0)
            if journal["versions"] != self._versions:
                version = None
            for name, offset, nbytes, old in journal["entries"]:
                path = os.path.join(self.folder, name)
                if path not in memories:
                    memories[path] = self.map(path)
                target = memories[path][offset : offset + nbytes]
                if len(target) != nbytes:
                    raise ValueError(f"{name} has another size")
                changes.append(Change(old, target, old))
            make(changes)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptCheckpointError(
                f"{self._journal}: not a journal of these files: {error}: remove it, and checksums "
                "will show the version",
                path=self._journal,
            ) from None
        self._settle(version, memories)

    def _settle(self, version: int | None, paths: Iterable[str]) -> None:
        """Write the version that the files have now, if it is known, and remove the journal."""
        if self._fsync:
            for path in paths:
                sync_path(path)
        if version is not None:
            state = {"version": f"{version:06d}", **self._facts()}
            write_bytes(self._state, json.dumps(state).encode(), fsync=self._fsync)
        _C.remove_file(os.fsencode(self._journal))
