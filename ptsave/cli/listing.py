"""Formats a file's entries as text in columns, and as JSON (docs/reference/command_line.md)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.cli.terminal import PLAIN, Terminal
from ptsave.contents.captures import CapturedRecords
from ptsave.contents.files import ShardFiles
from ptsave.inspection.reports import FileListing, Totals, totals_of
from ptsave.support.text import (
    count_text,
    cut,
    cut_in_the_middle,
    dtype_text,
    n_columns,
    padded,
    printable,
    shape_text,
    size_text,
)
from ptsave.tree.tree import Node, is_plain, type_name_of

if TYPE_CHECKING:
    from ptsave.contents.contents import ChunkInfo, Facts

_MAX_VALUE_LENGTH = 60
_MAX_NAME_WIDTH = 72  # a longer name shifts only its own line
_N_SHOWN = 3  # from each end of a long list
_INDENT = _GAP = "  "
_MIN_NAME_WIDTH = 16
_MIN_REMARK_WIDTH = 12  # a shorter remark would say nothing
_AT_HOME = {None, "cpu"}


class ListOptions(NamedTuple):
    """The options of one call of ``ptsave ls``; they apply to each of its files."""

    names: tuple[str, ...]
    depth: int | None
    sort: str
    long: bool
    chunks: bool
    as_json: bool
    stats: bool | None  # None: only for a capture
    step: int | None
    recover: bool
    storage_options: dict[str, Any] | None


class Style(NamedTuple):
    """How to show entries: `with_places` adds positions, `with_chunks` adds the parts of tensors.

    Lines are cut to the terminal's width: names in the middle, other text at the end.
    """

    terminal: Terminal = PLAIN
    with_places: bool = False
    with_chunks: bool = False


def tree_lines(
    listing: FileListing, numbers: Sequence[int], max_depth: int | None, style: Style
) -> list[str]:
    """Return the lines for the nodes `numbers`, each container before its contents."""
    nodes = listing.tree.nodes
    if max_depth is not None:
        numbers = [number for number in numbers if nodes[number].depth < max_depth]
    names = [_INDENT * nodes[i].depth + _key_text(str(nodes[i].key)) for i in numbers]
    if len(nodes) == 1 and not listing.tree.path_of(0):  # the whole object, which has no name
        names = [""] * len(numbers)
    return _lines(listing, numbers, names, style)


def _key_text(key: str) -> str:
    """Return a key as text, quoted if it is empty or has blanks at an end."""
    return printable(key) if key and key == key.strip(" ") else f"'{printable(key)}'"


def lines_by_size(listing: FileListing, numbers: Sequence[int], style: Style) -> list[str]:
    """Return the lines for the tensors among the nodes `numbers`, the largest first."""
    nodes, facts = listing.tree.nodes, listing.facts
    numbers = [number for number in numbers if nodes[number].tensor >= 0]
    numbers.sort(key=lambda number: -facts[nodes[number].tensor][4])
    return _lines(listing, numbers, [printable(nodes[i].name) for i in numbers], style)


def _lines(
    listing: FileListing, numbers: Sequence[int], names: Sequence[str], style: Style
) -> list[str]:
    """Return a line for each node and, after a tensor's line, a line for each of its parts."""
    lines = _Table(listing, style).lines(numbers, names)
    if not style.with_chunks:
        return lines
    result: list[str] = []
    for number, line in zip(numbers, lines, strict=True):
        result.append(line)
        node = listing.tree.nodes[number]
        indent = _INDENT * (node.depth + 1)
        for chunk in listing.chunks.get(node.tensor, ()):
            ends = (begin + n for begin, n in zip(chunk.offsets, chunk.sizes, strict=True))
            part = ", ".join(f"{a}:{b}" for a, b in zip(chunk.offsets, ends, strict=True))
            result.append(
                f"{indent}[{part}]  {printable(chunk.file)} at {chunk.offset}, "
                f"{size_text(chunk.nbytes)}"
            )
    return result


def parts_text(chunks: Sequence[ChunkInfo]) -> str:
    """Describe how many parts a tensor has, and along which dimensions it was cut.

    >>> from ptsave.contents.contents import ChunkInfo
    >>> parts_text([ChunkInfo((i, 0), (1, 4), f"__{i}_0.distcp", 0, 16) for i in range(2)])
    '2 parts by dimension 0'
    """
    if len(chunks) < 2:
        return ""
    n_dims = len(chunks[0].offsets)
    cut = [dim for dim in range(n_dims) if len({chunk.offsets[dim] for chunk in chunks}) > 1]
    word = "dimension" if len(cut) == 1 else "dimensions"
    return f"{len(chunks)} parts by {word} {', '.join(map(str, cut))}"


class _Table:
    """Formats entries as lines with columns; formats equal columns of tensors only once."""

    def __init__(self, listing: FileListing, style: Style) -> None:
        self._listing = listing
        self._terminal = style.terminal
        self._with_places = style.with_places
        self._tree = listing.tree
        # The bytes of tensors before each node, then their total.
        sizes = (0 if node[5] < 0 else listing.facts[node[5]][4] for node in listing.tree.nodes)
        self._sizes = [*accumulate(sizes, initial=0)]

    def lines(self, numbers: Sequence[int], names: Sequence[str]) -> list[str]:
        nodes, facts = self._tree.nodes, self._listing.facts
        tensors = [nodes[number].tensor for number in numbers]
        keys = [
            facts[i][:3] if i >= 0 else number for i, number in zip(tensors, numbers, strict=True)
        ]
        rows = {
            key: self._columns_of(number) if i < 0 else _columns_of_tensor(facts[i])
            for key, (number, i) in dict(
                zip(keys, zip(numbers, tensors, strict=True), strict=True)
            ).items()
        }
        widths = [max((len(row[i]) for row in rows.values()), default=0) for i in range(3)]
        texts = {key: _joined(row, widths) for key, row in rows.items()}
        stripped = {key: text.rstrip() for key, text in texts.items()}
        is_ascii = "".join(names).isascii()  # the usual case: len() is the width
        width = min(max(map(len if is_ascii else n_columns, names), default=0), _MAX_NAME_WIDTH)
        pad = str.ljust if is_ascii else padded
        if self._terminal != PLAIN:
            return self._fitted(numbers, names, [texts[key] for key in keys], width, widths)
        lines = [
            f"{pad(name, width)}  {stripped[key]}" for name, key in zip(names, keys, strict=True)
        ]
        for at in self._remarkable(tensors):
            remarks = self._remarks(nodes[numbers[at]])
            lines[at] = f"{pad(names[at], width)}  {texts[keys[at]]}{remarks}"
        return lines

    def _fitted(
        self,
        numbers: Sequence[int],
        names: Sequence[str],
        texts: Sequence[str],
        name_width: int,
        widths: Sequence[int],
    ) -> list[str]:
        """Return the lines, coloured and cut to the terminal's width."""
        nodes, terminal = self._tree.nodes, self._terminal
        remarkable = self._remarkable([nodes[number].tensor for number in numbers])
        remarks = {at: self._remarks(nodes[numbers[at]]) for at in remarkable}
        if terminal.width is not None:
            room = terminal.width - sum(widths) - 3 * len(_GAP)
            name_width = min(name_width, max(room, _MIN_NAME_WIDTH))
        lines = []
        for at, (number, name, text) in enumerate(zip(numbers, names, texts, strict=True)):
            shown, rest = name, text.rstrip()
            if terminal.width is not None:
                shown = cut_in_the_middle(name, name_width)
                rest = cut(rest, terminal.width - name_width - len(_GAP))
            if at in remarks:
                rest = self._with_remark(text, rest, remarks[at], name_width)
            shown = padded(shown, name_width)
            if nodes[number].tensor >= 0:
                rest = terminal.paint(rest[: widths[0]], "cyan") + rest[widths[0] :]
            elif self._tree.is_container(number) and nodes[number].again is None:
                shown = terminal.paint(shown, bold=True)
            lines.append(f"{shown}{_GAP}{rest}")
        return lines

    def _with_remark(self, text: str, cut_text: str, remark: str, name_width: int) -> str:
        """Return the columns of a tensor, and as much of its remark as fits."""
        if self._terminal.width is None:
            return f"{text}{remark}"
        free = self._terminal.width - name_width - len(_GAP) - n_columns(text)
        if free < _MIN_REMARK_WIDTH:
            return cut_text
        return f"{text}{cut(remark, free)}"

    def _remarkable(self, tensors: Sequence[int]) -> list[int]:
        """Return the indexes of tensors that get a remark: shared, in parts, or from a device."""
        if self._with_places:
            return [at for at, i in enumerate(tensors) if i >= 0]
        places, sharing, chunks = self._listing.places, self._listing.sharing, self._listing.chunks
        if not sharing and not chunks and {place[3] for place in places} <= _AT_HOME:
            return []
        away = {i for i, place in enumerate(places) if place[3] not in _AT_HOME}
        away |= {i for i, parts in chunks.items() if len(parts) > 1}
        return [at for at, i in enumerate(tensors) if i in sharing or i in away]

    def _columns_of(self, number: int) -> tuple[str, str, str, str]:
        """Return the columns of an entry that is not a tensor."""
        node = self._tree.nodes[number]
        if node.again is not None:
            return type_text(node.value), "", "", f"the same as {printable(node.again)}"
        if not self._tree.is_container(number):
            return type_text(node.value), "", "", value_text(node.value)
        nbytes = self._sizes[self._tree.end_of(number)] - self._sizes[number]
        return type_text(node.value), "", size_text(nbytes) if nbytes else "", ""

    def _remarks(self, node: Node) -> str:
        location = self._listing.places[node.tensor][3]
        remarks = [self._place_text(node.tensor)] if self._with_places else []
        remarks += [] if location in _AT_HOME else [printable(str(location))]
        if parts := parts_text(self._listing.chunks.get(node.tensor, ())):
            remarks.append(parts)
        group = self._listing.sharing.get(node.tensor)
        if group is not None:
            other = self._tree.tensor_nodes[group[0] if group[0] != node.tensor else group[1]]
            more = f" and {len(group) - 2} more" if len(group) > 2 else ""
            remarks.append(f"shared with {printable(self._tree.nodes[other].name)}{more}")
        return "".join(f"  {remark}" for remark in remarks)

    def _place_text(self, tensor: int) -> str:
        """Return a tensor's size, its position, and its storage's size if that is larger."""
        _, _, _, begin, nbytes, storage_nbytes = self._listing.facts[tensor]
        _, record, offset, _ = self._listing.places[tensor]
        text = f"{nbytes} B" if offset is None else f"{nbytes} B at {offset + begin}"
        text += "" if record is None else f" in {printable(record)}"
        return text if storage_nbytes <= nbytes else f"{text}, a part of {storage_nbytes} B"


def _columns_of_tensor(facts: Facts) -> tuple[str, str, str, str]:
    dtype, shape, stride, _, nbytes, _ = facts
    remark = "" if _is_contiguous(shape, stride) else f"stride {shape_text(stride)}"
    return dtype_text(dtype), shape_text(shape), size_text(nbytes), remark


def _joined(row: tuple[str, str, str, str], widths: Sequence[int]) -> str:
    kind, shape, size, rest = row
    if not shape and not size:  # a value has no more columns
        return f"{kind.ljust(widths[0])}  {rest}"
    columns = (kind.ljust(widths[0]), shape.ljust(widths[1]), size.rjust(widths[2]), rest)
    return "  ".join(columns)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    if 0 in shape or len(stride) != len(shape):  # the latter: not a strided tensor
        return True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def type_text(value: Any) -> str:
    """Return the name of a value's type, with a container's length."""
    name = printable(type_name_of(value))
    return f"{name} of {len(value)}" if isinstance(value, (Mapping, list, tuple, set)) else name


def value_text(value: Any) -> str:
    """Return a short form of a value, empty if only its type can be shown.

    >>> value_text([*range(1000)]), value_text((0.9, 0.999)), value_text("text")
    ('[0, 1, 2, ..., 997, 998, 999]', '(0.9, 0.999)', "'text'")
    """
    if "torch" in sys.modules and (text := _text_of_torchs(value)) is not None:
        return text
    if isinstance(value, CapturedRecords):
        return str(value)
    if not is_plain(value):
        return ""
    if isinstance(value, (str, bytes)):
        return _cut(repr(value[: 4 * _MAX_VALUE_LENGTH]))
    if not isinstance(value, (list, tuple)):
        return _cut(repr(value))
    text = repr(value) if len(value) <= _MAX_VALUE_LENGTH else ""
    if 0 < len(text) <= _MAX_VALUE_LENGTH:
        return printable(text)
    begin, end = ("[", "]") if isinstance(value, list) else ("(", ")")
    shown = [*value[:_N_SHOWN], "...", *value[-_N_SHOWN:]] if len(value) > 6 else value
    parts = ["..." if part == "..." else _cut(repr(part)) for part in shown]
    return printable(f"{begin}{', '.join(parts)}{end}")


def _text_of_torchs(value: Any) -> str | None:
    """Return a short form of a storage, dtype or device; None for other values."""
    import torch

    from ptsave.support.torch_names import untyped_of

    if isinstance(value, torch.TypedStorage):
        value = untyped_of(value)  # a TypedStorage's own methods warn
    if isinstance(value, torch.UntypedStorage):
        return size_text(value.nbytes())
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else None


def _cut(text: str) -> str:
    shown = text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
    return printable(shown)


def totals_lines(
    listings: Sequence[FileListing], chosen: Sequence[Sequence[int]], terminal: Terminal = PLAIN
) -> list[str]:
    """Return the lines with the totals of the chosen nodes of all files."""
    pairs = zip(listings, chosen, strict=True)
    totals = sum((totals_of(listing, numbers) for listing, numbers in pairs), Totals())
    n_tensors = sum(listing.totals.n_tensors for listing in listings)
    rest = "" if totals.n_tensors == n_tensors else f"of {count_text(n_tensors, 'tensor')}; "
    sums = (
        f"{count_text(totals.n_tensors, 'tensor')}, {size_text(totals.tensor_nbytes)}",
        f"{count_text(totals.n_storages, 'storage')}, {size_text(totals.storage_nbytes)}",
        f"{rest}file: {size_text(totals.file_nbytes)}",
    )
    lines = [terminal.paint("; ".join(sums), bold=True)]
    if totals.unused_nbytes:
        lines.append(
            f"{size_text(totals.unused_nbytes)} of the storages belong to no tensor: `ptsave "
            "compact` removes these bytes"
        )
    return lines


def file_json(listing: FileListing, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the JSON object for the nodes `numbers` of a file."""
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
        "totals": {
            **_sums_json(listing.totals),
            "unused_nbytes": listing.totals.unused_nbytes,
            "file_nbytes": listing.totals.file_nbytes,
        },
        "listed": _sums_json(totals_of(listing, numbers)),
    }


def json_text(path: str, files: ShardFiles, objects: Sequence[dict[str, Any]]) -> str:
    """Return the JSON text for one file's object, or for the objects of a directory's files."""
    if files.source is not None:
        return json.dumps(objects[0])
    sums: dict[str, dict[str, int]] = {"totals": {}, "listed": {}}
    for file in objects:
        for kind, found in sums.items():
            for key, value in file[kind].items():
                found[key] = found.get(key, 0) + value
    index = files.index_path or None
    return json.dumps({"path": path, "index": index, "files": [*objects], **sums})


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
    value = node.value
    parts = value if isinstance(value, (list, tuple)) else [value]
    is_shown = node.again is None and is_plain(value) and all(map(_is_json, parts))
    return {"type": type_name_of(value), **({"value": value} if is_shown else {})}


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
