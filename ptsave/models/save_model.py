"""`save_model`: saves a model as a set of shards in the Hugging Face layout.

Readers find shards through the index, so the index gets its name after all shards are written.
Shards that replace other shards have random digits (a tag) in their names. Then the old files are
removed: first an old file of the complete model, because readers prefer such a file to an index.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ptsave.contents.files import FORMATS, ShardFormat
from ptsave.errors import SaveError
from ptsave.models.packed_modules import PackedModules, PackedModulesMapping, unpacked
from ptsave.models.shards import is_extra_state, metadata_of, require_loadable
from ptsave.serialization import save
from ptsave.sources.ranges import Folder
from ptsave.streaming.payload_sources import check_safetensors, write_bytes, write_safetensors
from ptsave.support.calls import check_flags, parse_size, pausing_garbage_collection
from ptsave.tree.extents import nbytes_of
from ptsave.writing.targets import FileTarget, name_of, resolve_file, resolve_folder

_SHARD_SIZE = "5GB"
# By values of the argument `format`; "pt" files have the suffix .bin in this layout.
FORMAT_FILES = {"safetensors": FORMATS["safetensors"], "pt": FORMATS["bin"]}


def save_model(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = _SHARD_SIZE,
    format: Literal["safetensors", "pt"] = "safetensors",  # noqa: A002 (the usual name of this option)
    packed_modules_mapping: PackedModulesMapping | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    checksums: bool = True,
) -> None:
    r"""Save weights in shards with an index, which :func:`ptsave.load_model` and transformers read.

    A process that reads the directory during the save finds the old weights or the new ones.

    Parameters
    ----------
    model_or_state_dict : torch.nn.Module or mapping of str to torch.Tensor
        The weights to save.
    directory : str or os.PathLike
        Directory of the files, or its URL (``"s3://bucket/model"``); a missing one is created.  If
        the name ends with ``.safetensors`` and is not a directory, all weights go to one file.
    max_shard_size : int or str, default "5GB"
        The most bytes of tensors in a shard; a larger tensor gets its own shard.  It is a number
        of bytes, or text with a unit: ``"500MB"`` (MB: 10**6 bytes), ``"2GiB"`` (GiB: 2**30).
    format : {"safetensors", "pt"}, default "safetensors"
        ``model-00001-of-00008.safetensors``, ... with ``model.safetensors.index.json``, or
        ``pytorch_model-00001-of-00008.bin``, ... with ``pytorch_model.bin.index.json``.  If one
        shard is enough, it is ``model.safetensors`` or ``pytorch_model.bin``, without an index.
    packed_modules_mapping : mapping or list, optional
        As for :func:`ptsave.load_model`: each part of a packed parameter is saved under its name in
        published checkpoints.  If the parameter has an attribute ``weight_saver``, the call
        ``weight_saver(parameter, shard_id)`` returns each part.  If not, the parts lie one after
        another, in the order of the mapping.  Their sizes are those that `load_model` loaded, or
        the list `output_sizes` of the parameter's module; without either, the sizes are equal.
    fsync : bool, default False
        Whether to wait until the files have reached the disk, so that they survive power loss.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    checksums : bool, default True
        Whether safetensors files have a CRC-32 of each tensor in their metadata, under the key
        ``ptsave.crc32``.  ptsave compares it when it reads a tensor; other readers ignore it.

    Raises
    ------
    TypeError
        If a weight is not a tensor, or is a kind of tensor that the format cannot hold.
    ValueError
        If the size or format is invalid, or the sizes of a packed parameter's parts are unknown.
    SaveError
        If a file cannot be written, or `directory` is a URL that fsspec cannot write to.  The
        directory then holds the old weights, or the new ones if all their files were written.

    Notes
    -----
    Tied tensors (the same memory in the same shape) are stored once.  A ``"safetensors"`` file has
    the first name, and lists the other names in its metadata; a ``"pt"`` file has all names.  If a
    module's extra state is not a tensor, a safetensors file has it in its metadata, where
    `load_model` finds it.

    Shards get new names, with random digits if they replace others.  When all shards are complete,
    the new index replaces the old one, and then the old files are removed.  A process that has read
    the old index, but has not opened the old shards by then, cannot find them.  Only one process at
    a time may save to a directory.  Files of the other format stay.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(model, folder, max_shard_size="20KB")
    ...     print(*sorted(os.listdir(folder)), sep="\n")
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json
    """
    if format not in FORMAT_FILES:
        raise ValueError(f"format must be 'safetensors' or 'pt', not {format!r}")
    check_flags(fsync=fsync, checksums=checksums)
    limit = parse_size(max_shard_size, "max_shard_size")
    file = _named_file(directory, storage_options)
    if file is not None and (format != "safetensors" or max_shard_size != _SHARD_SIZE):
        raise ValueError(
            f"{name_of(file)} is one file: format and max_shard_size are for directories"
        )
    state_dict = model_or_state_dict
    if isinstance(state_dict, nn.Module):
        state_dict = state_dict.state_dict()
    with pausing_garbage_collection():
        tensors, objects = tensors_of(state_dict)
    require_loadable(objects)
    if packed_modules_mapping is not None:
        model = model_or_state_dict if isinstance(model_or_state_dict, nn.Module) else None
        tensors = unpacked(tensors, PackedModules(packed_modules_mapping), model)
    if format == "safetensors":
        check_safetensors(tensors)
    with pausing_garbage_collection():
        shards = split(tensors, sys.maxsize if file is not None else limit)
    shards[-1].objects = objects
    if file is not None:
        with save_errors(name_of(file)):
            _write_safetensors(file, shards[0], fsync=fsync, checksums=checksums)
        return
    folder = resolve_folder(directory, storage_options)
    with save_errors(folder.name):
        folder.make()
        ShardSet(folder, format, shards, fsync, checksums).write()


# ----------------------------------------------------------------------------- division into shards


@dataclass
class Shard:
    """The tensors of one file, their aliases (more names of tied tensors), and extra state."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    nbytes: int = 0
    objects: dict[str, Any] = field(default_factory=dict)

    def under_all_names(
        self, stored: Callable[[Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return a dict from all names (also aliases) to the tensors, or to `stored(tensor)`."""
        named: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            value = tensor if stored is None else stored(tensor)
            named.update(dict.fromkeys((name, *self.aliases.get(name, ())), value))
        return named


def _named_file(path: Any, storage_options: Mapping[str, Any] | None) -> FileTarget | None:
    """Return the safetensors file that a path or URL names; None if it names a directory."""
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if not text.endswith(".safetensors") or os.path.isdir(text):
        return None
    return resolve_file(path, storage_options)


def tensors_of(state_dict: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a state dict's tensors, and the extra state of modules that is not a tensor."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected a module or a state dict, not {type(state_dict).__name__}")
    objects = {name: value for name, value in state_dict.items() if is_extra_state(name, value)}
    tensors = {name: value for name, value in state_dict.items() if name not in objects}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"entry {name!r} is {type(tensor).__name__}, not a tensor: "
                "use ptsave.save_checkpoint()"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"entry {name!r} is not a dense tensor with memory of its own")
    return {name: tensor.detach() for name, tensor in tensors.items()}, objects


def split(tensors: Mapping[str, Tensor], limit: int, *, tied: bool = True) -> list[Shard]:
    """Divide tensors into shards, in the order of the mapping.

    A shard has at most `limit` bytes of tensors, or one larger tensor. With `tied`, several tensors
    with the same memory, dtype and shape become one tensor with aliases.
    """
    shards = [Shard()]
    homes: dict[object, tuple[Shard, str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        flags = (tensor.is_conj(), tensor.is_neg())
        home = homes.get((place, flags)) if tied and tensor.numel() > 0 else None
        if home is not None:
            home[0].aliases.setdefault(home[1], []).append(name)
            continue
        nbytes = nbytes_of(tensor)
        if shards[-1].tensors and shards[-1].nbytes + nbytes > limit:
            shards.append(Shard())
        shards[-1].tensors[name] = tensor
        shards[-1].nbytes += nbytes
        homes[place, flags] = shards[-1], name
    return shards


# -------------------------------------------------------------------------------------- the files


@dataclass
class ShardSet:
    """The shards and the index of one save; `kind` is "safetensors" or "pt"."""

    folder: Folder
    kind: str
    shards: list[Shard]
    fsync: bool
    checksums: bool

    def write(self) -> None:
        """Write the shards, then write the index, and then remove the old files."""
        files = FORMAT_FILES[self.kind]
        old = files_of_sets(self.folder, files)
        names = self._names(files)
        shards, others = _pattern_of_shards(files), (files.single, files.index_name)
        self.folder.remove_leftovers(lambda name: name in others or bool(shards.fullmatch(name)))
        self.folder.check_room(sum(shard.nbytes for shard in self.shards))
        index = self._index(names)
        with ExitStack() as undo:
            if len(names) > 1:
                undo.callback(self._remove_unless_indexed, names, files.index_name, index)
            self.write_files([self.folder.file(name) for name in names])
            if len(names) > 1:
                write_bytes(self.folder.file(files.index_name), index, fsync=self.fsync)
            undo.pop_all()
        self._remove(old - set(names), files)
        if self.fsync:
            self.folder.sync()

    def _names(self, files: ShardFormat) -> list[str]:
        count = len(self.shards)
        if count == 1:
            return [files.single]  # replacing this file is atomic
        # A new shard with an old shard's name would damage the old set before the index changes.
        for tag in ("", f"-{secrets.token_hex(4)}"):
            names = [
                f"{files.stem}{tag}-{number:05}-of-{count:05}{files.suffix}"
                for number in range(1, count + 1)
            ]
            if not any(self.folder.is_taken(name) for name in names):
                return names
        raise FileExistsError(errno.EEXIST, "all names for shards are taken", self.folder.name)

    def _remove_unless_indexed(self, names: list[str], index_name: str, index: bytes) -> None:
        """Remove the shards of a failed save, unless the directory already has their index.

        If the index cannot be read or a shard cannot be removed, the next save removes the shards.
        """
        with suppress(OSError):
            if self.folder.bytes_of(index_name) != index:
                for name in names:
                    self.folder.remove(name)

    def write_files(self, targets: Sequence[FileTarget]) -> None:
        """Write each shard to its target, one at a time, because one write uses all threads."""
        for target, shard in zip(targets, self.shards, strict=True):
            if self.kind == "pt":
                tensors = shard.under_all_names(_compact)
                save({**shard.objects, **tensors}, target, fsync=self.fsync)
                del tensors  # they may be copies
            else:
                _write_safetensors(target, shard, fsync=self.fsync, checksums=self.checksums)

    def _index(self, names: list[str]) -> bytes:
        weight_map = {}
        for name, shard in zip(names, self.shards, strict=True):
            tensors = shard.under_all_names() if self.kind == "pt" else shard.tensors
            weight_map.update(dict.fromkeys(tensors, name))
        total = sum(shard.nbytes for shard in self.shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()

    def _remove(self, old: set[str], files: ShardFormat) -> None:
        """Remove the old files in an order in which a reader always finds complete weights."""
        if len(self.shards) > 1:
            # Readers prefer a single file to an index, so they find the new set without it.
            old |= {files.single}
            order = sorted(old, key=lambda name: name != files.single)
        else:
            old |= {files.index_name}
            order = sorted(old, key=lambda name: name == files.index_name)
        for name in order:
            self.folder.remove(name)


def files_of_sets(folder: Folder, files: ShardFormat) -> set[str]:
    """Return the names of files in a folder that are named like shards."""
    pattern = _pattern_of_shards(files)
    return {name for name in folder.files() if pattern.fullmatch(name)}


def _pattern_of_shards(files: ShardFormat) -> re.Pattern[str]:
    stem, suffix = re.escape(files.stem), re.escape(files.suffix)
    return re.compile(rf"{stem}(-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}}{suffix}")


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if its storage has more bytes than its values."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _write_safetensors(target: FileTarget, shard: Shard, *, fsync: bool, checksums: bool) -> None:
    metadata = {"format": "pt", **metadata_of(shard.objects)}
    for name, others in shard.aliases.items():
        metadata.update(dict.fromkeys(others, name))
    write_safetensors(
        shard.tensors, target, metadata, fsync=fsync, are_checked=True, checksums=checksums
    )


@contextmanager
def save_errors(folder: str) -> Iterator[None]:
    """Turn an OSError from the `with` block, which writes to `folder`, into a `SaveError`."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else folder
        raise SaveError.from_os_error(error, path) from error
