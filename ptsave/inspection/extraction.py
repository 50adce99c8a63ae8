"""Reads parts of checkpoints, and writes them to new files."""

from __future__ import annotations

import errno
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor

from ptsave.contents.archive import open as open_archive
from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.errors import EntryNotFoundError
from ptsave.inspection.verification import verify_file
from ptsave.serialization import save
from ptsave.sources.locations import position_kept
from ptsave.streaming.payload_sources import write_bytes, write_safetensors
from ptsave.tree.containers import MAX_DEPTH, Path, attributes_of, items_of, path_in, set_attributes
from ptsave.tree.extents import check_expansion
from ptsave.tree.leaves import read_entry, require_picklable
from ptsave.tree.tree import EntryTree, holds_opaque, type_name_of
from ptsave.writing.targets import FileTarget, exists, name_of, resolve_file


def read_entries(
    file: Any,
    names: Sequence[str],
    *,
    verify: bool = True,
    recover: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read only the entries of a file that have these `names`.

    A name is the dotted name of a tensor, container or value, or the text of a tuple of keys, such
    as ``"('a.b', 0)"``.  If an entry does not exist, a KeyError suggests similar names.
    """
    with (
        position_kept(file),
        open_archive(
            file, verify=verify, recover=recover, storage_options=storage_options
        ) as archive,
    ):
        return {name: find_entry(archive.__getitem__, name) for name in names}


def read_whole(
    file: Any, *, storage_options: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Read all undamaged entries of a damaged or truncated file.

    Also returns the names of the parts left out: damaged tensors, and objects that
    ``weights_only=True`` does not allow.  Raises CorruptCheckpointError if parts other than tensors
    are damaged, and TypeError if the file does not hold a dict.
    """
    found = verify_file(file, recover=True, storage_options=storage_options)
    with position_kept(file):
        contents = open_checkpoint(file, OpenOptions(storage_options, recover=True))
        if not isinstance(contents.obj, Mapping):
            kind = type_name_of(contents.obj)
            raise TypeError(f"{name_of(file)} holds {kind}, not a dict of entries")
        damaged = [name for problem in found.problems for name in problem.entries]
        entries, lost = without_entries(contents.obj, {*damaged, *_opaque_in(contents.obj)})
        known = {node.name for node in EntryTree(contents.obj).nodes}
        lost += [name for name in damaged if name not in known]  # recovery left these out before
        path = name_of(file)
        return read_entry(entries, lambda tensors: contents.read(tensors, None), path), lost


def without_entries(obj: Mapping[Any, Any], names: Set[str]) -> tuple[dict[str, Any], list[str]]:
    """Copy a mapping without the leaves in `names`; also return the names of all parts left out.

    A list or tuple with such a leaf is left out, too, because the positions of its other elements
    would change.
    """
    lost: list[str] = []
    copies: dict[int, Any] = {}  # by id(), so that a mapping is copied once

    def rest_of(container: Any, prefix: str, depth: int) -> Any:
        if id(container) in copies:
            return copies[id(container)]
        rest: dict[Any, Any] = OrderedDict() if type(container) is OrderedDict else {}
        copies[id(container)] = rest
        set_attributes(rest, attributes_of(container))
        for key, value in items_of(container):
            name = f"{prefix}{key}"
            inner = value
            if type(value) in (dict, OrderedDict) and value and depth < MAX_DEPTH:
                inner = rest_of(value, f"{name}.", depth + 1)
                if not inner:  # every part is left out
                    continue
            elif name in names or (
                isinstance(value, (list, tuple, set, frozenset, Mapping))
                and any(each.startswith(f"{name}.") for each in names)
            ):
                lost.append(name)
                continue
            rest[key] = inner
        return rest

    return rest_of(obj, "", 0), lost


def without_opaque(obj: Any) -> tuple[Any, list[str]]:
    """Copy a mapping without its `Opaque` parts, and return the names of these parts."""
    opaque = _opaque_in(obj)
    return without_entries(obj, opaque) if opaque and isinstance(obj, Mapping) else (obj, [])


def _opaque_in(obj: Any) -> set[str]:
    tree = EntryTree(obj)
    leaves = [node for n, node in enumerate(tree.nodes) if not tree.is_container(n)]
    return {node.name for node in leaves if holds_opaque((node.key, node.value))}


def find_entry(find: Callable[[str | Path], Any], name: str) -> Any:
    """Return `find(...)` for a dotted name, or for the text of a tuple of keys."""
    path = path_in(name)
    if path is not None:
        with suppress(EntryNotFoundError):
            return find(path)
    return find(name)


class Counts(NamedTuple):
    """Numbers of tensors and of other values, and the size of the tensors' elements in bytes."""

    tensors: int
    values: int
    nbytes: int


def count_entries(entries: Mapping[str, Any]) -> Counts:
    """Count the leaves in entries; a tensor with two names counts twice."""
    tree = EntryTree(dict(entries))
    leaves = [n for n in range(len(tree.nodes)) if not tree.is_container(n)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tree.tensors)
    return Counts(len(tree.tensors), len(leaves) - len(tree.tensors), nbytes)


def default_output(name: str) -> str:
    """Return the default name of the file for the entry `name`, in the current directory.

    >>> default_output("model.layers.0.weight")
    'model.layers.0.weight.pt'
    """
    safe = "".join(c if c.isprintable() and c not in "/\\" else "_" for c in name)
    return f"{safe.lstrip('.') or 'entry'}.pt"


def write_entries(
    entries: Mapping[str, Any],
    output: str | BinaryIO,
    *,
    overwrite: bool = False,
    max_size: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write entries to a file; a failure leaves no partial file.

    A single entry is written by itself, several are written as a dict.  The suffix ``.safetensors``
    or ``.npy`` selects this format; only with these, `max_size` limits the tensors' bytes.
    """
    obj = next(iter(entries.values())) if len(entries) == 1 else dict(entries)
    if not isinstance(output, str):
        save(obj, output, storage_options=storage_options)
        return
    target = resolve_file(output, storage_options)
    output = name_of(target)
    if isinstance(target, str) and os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "is a directory: name a file in it", output)
    if exists(target) and not overwrite:
        raise FileExistsError(errno.EEXIST, "the file exists: --force replaces it", output)
    if output.endswith(".safetensors"):
        tensors = _tensors_of(dict(entries) if isinstance(obj, Tensor) else obj)
        check_expansion(tensors.values(), output, max_size=max_size)
        write_safetensors(tensors, target, {"format": "pt"}, checksums=True)
    elif output.endswith(".npy"):
        if isinstance(obj, Tensor):
            check_expansion([obj], output, max_size=max_size)
        _write_npy(target, obj)
    else:
        require_picklable(obj, output)
        save(obj, target)


def _tensors_of(obj: Any) -> dict[str, Tensor]:
    """Return all tensors by name; raise an error if the object has other values."""
    tree = EntryTree(obj)
    tensors: dict[str, Tensor] = {}
    for number, node in enumerate(tree.nodes):
        if node.tensor < 0 and not tree.is_container(number):
            raise TypeError(
                f"a safetensors file holds only tensors, but {node.name!r} is of type "
                f"{type(node.value).__name__}: write a .pt file, or name only tensors"
            )
        if node.tensor >= 0:
            tensors[node.name] = node.value
    return tensors


def _write_npy(target: FileTarget, obj: Any) -> None:
    """Write the bytes that ``numpy.save`` would write: NumPy's header, then the tensor's memory."""
    if not isinstance(obj, Tensor):
        raise TypeError(
            f"an .npy file holds one array, not {type(obj).__name__}: write a .pt file, or ask for "
            "one tensor"
        )
    try:
        from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0

        values = obj.detach().resolve_conj().resolve_neg()
        facts = header_data_from_array_1_0(values.numpy())
    except (ImportError, RuntimeError, TypeError) as error:  # NumPy is missing, or lacks this dtype
        raise TypeError(f"NumPy cannot hold the tensor ({error}): write a .pt file") from None
    header = io.BytesIO()
    write_array_header_1_0(header, facts)
    if facts["fortran_order"]:  # columns are contiguous
        values = values.permute(*reversed(range(values.dim())))
    write_bytes(target, header.getvalue(), values.contiguous())
