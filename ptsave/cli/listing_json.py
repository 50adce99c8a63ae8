"""The form of ``ptsave ls --json``, which programs rely on: keys are added, never changed.

A file is an object with

- ``path``, ``format`` (``pt``, ``safetensors``, ...) and ``metadata``, the file's own;
- ``tensors``, a list of objects;
- ``values``, the other leaves: objects with ``name``, ``path``, ``type`` and, if JSON can express
  it, ``value``;
- ``totals`` of the whole file, even if names were given: ``tensors``, ``tensor_nbytes``,
  ``storages``, ``storage_nbytes``, ``unused_nbytes`` and ``file_nbytes``;
- ``listed``: the first four totals for the listed tensors.

A tensor is an object with

- ``name`` (dotted) and ``path``, the keys; a key that JSON cannot express is text;
- ``dtype``, ``shape`` (-1 where the parts of a nested tensor differ), ``nbytes`` (elements times
  their size) and ``stride`` in elements, null for nested tensors and other layouts;
- ``location``: the device that the tensor was saved from;
- ``record`` and ``offset``, the first byte's position in the file;
- ``storage`` (tensors with the same number share a storage) and ``storage_nbytes``;
- ``chunks`` in a distributed checkpoint, the parts of ranks: objects with ``offsets`` (index of
  the first element), ``sizes`` (a shape), ``file`` (its name in the directory), ``offset`` and
  ``nbytes`` (the item's place in that file).

Unknown facts are null.  A directory is an object with ``path``, ``index`` (the path of the
index, or null), ``files`` (a list of file objects), ``totals`` and ``listed``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ptsave.inspection.listing import FileListing, Totals, totals_of
from ptsave.support.text import dtype_text
from ptsave.tree.opaque import type_name_of
from ptsave.tree.tree import Node, is_plain


def file_json(listing: FileListing, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the JSON object for the numbered nodes of a file."""
    nodes = listing.tree.nodes
    tensors = [number for number in numbers if nodes[number].tensor >= 0]
    values = [
        number
        for number in numbers
        if nodes[number].tensor < 0 and not listing.tree.is_container(number)
    ]
    return {
        "path": listing.path,
        "format": listing.kind,
        "metadata": listing.metadata,
        "tensors": [_tensor_json(listing, number) for number in tensors],
        "values": [
            {**_name_json(listing, number), **_value_json(nodes[number])} for number in values
        ],
        "totals": _totals_json(listing.totals),
        "listed": _sums_json(totals_of(listing, numbers)),
    }


def directory_json(path: str, index_path: str, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object for a directory of shards."""
    sums: dict[str, dict[str, int]] = {"totals": {}, "listed": {}}
    for file in files:
        for kind, found in sums.items():
            for key, value in file[kind].items():
                found[key] = found.get(key, 0) + value
    return {"path": path, "index": index_path or None, "files": list(files), **sums}


def _tensor_json(listing: FileListing, number: int) -> dict[str, Any]:
    node = listing.tree.nodes[number]
    dtype, shape, stride, begin, nbytes, storage_nbytes = listing.facts[node.tensor]
    _, record, offset, location = listing.places[node.tensor]
    is_strided = len(stride) == len(shape)
    chunks = listing.chunks.get(node.tensor)
    return {
        **_name_json(listing, number),
        "dtype": dtype_text(dtype),
        "shape": [*shape],
        "stride": [*stride] if is_strided else None,
        "nbytes": nbytes,
        "location": location,
        "record": record,
        "offset": None if offset is None else offset + begin,
        "storage": listing.sharing.get(node.tensor, [node.tensor])[0],
        "storage_nbytes": storage_nbytes,
        **({} if chunks is None else {"chunks": [chunk._asdict() for chunk in chunks]}),
    }


def _name_json(listing: FileListing, number: int) -> dict[str, Any]:
    path = listing.tree.path_of(number)
    return {
        "name": listing.tree.nodes[number].name,
        "path": [key if _is_json(key) else str(key) for key in path],
    }


def _value_json(node: Node) -> dict[str, Any]:
    is_plain_json = is_plain(node.value) and all(map(_is_json, _parts(node.value)))
    type_name = type_name_of(node.value)
    if node.again is not None or not is_plain_json:
        return {"type": type_name}
    return {"type": type_name, "value": node.value}


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _is_json(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _sums_json(totals: Totals) -> dict[str, int]:
    return {
        "tensors": totals.n_tensors,
        "tensor_nbytes": totals.tensor_nbytes,
        "storages": totals.n_storages,
        "storage_nbytes": totals.storage_nbytes,
    }


def _totals_json(totals: Totals) -> dict[str, int]:
    return {
        **_sums_json(totals),
        "unused_nbytes": totals.unused_nbytes,
        "file_nbytes": totals.file_nbytes,
    }
