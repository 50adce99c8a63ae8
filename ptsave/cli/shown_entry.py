"""One entry of a checkpoint for ``ptsave show``, as text and as JSON."""

from __future__ import annotations

import json
import pprint
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from ptsave.capturing.statistics import tensor_statistics
from ptsave.cli.listing_json import file_json
from ptsave.cli.listing_text import Style, tree_lines
from ptsave.cli.statistics import number_json, statistics_json, statistics_line
from ptsave.cli.terminal import terminal
from ptsave.comparison.value_numbers import opened
from ptsave.contents.contents import Contents
from ptsave.contents.opening import open_contents
from ptsave.contents.tensor_info import facts_of
from ptsave.inspection.extraction import find_entry
from ptsave.inspection.listing import listing_of, select
from ptsave.support.text import dtype_text, printable, shape_text, size_text
from ptsave.tree.containers import is_container
from ptsave.tree.entry_reading import read_entry, tensors_over
from ptsave.tree.names import EntryNames

_WIDTH = 80
_MAX_VALUES = 1000  # torch also summarises a tensor with more elements


class _Shown(Protocol):
    def lines(self) -> Iterator[str]: ...
    def as_json(self) -> dict[str, Any]: ...


def shown_entry(
    file: str, name: str, *, recover: bool, storage_options: Mapping[str, Any] | None
) -> _Shown:
    """Read an entry, with the errors of `read_entries`; a container of tensors is not read."""
    contents = open_contents(file, storage_options, recover=recover)
    entry = find_entry(EntryNames(contents.obj, contents.path).find, name)
    tensors = tensors_over(entry)
    if tensors and is_container(entry):
        return _ShownContainer(contents, name)
    shown = f"{contents.path}: {name!r}" if name else contents.path
    value = read_entry(entry, lambda each: contents.read(each, None), shown)
    facts = {"path": contents.path, "name": name, "type": type(value).__name__}
    if not tensors:
        return _ShownValue(value, facts)
    return _ShownTensor(opened(value), contents.places_of(tensors)[0][3], facts)


class _ShownContainer:
    """A container that holds tensors; it is listed as ``ptsave ls`` does."""

    def __init__(self, contents: Contents, name: str) -> None:
        self._listing = listing_of(contents)
        (self._numbers,) = select([self._listing], [name] if name else [])

    def lines(self) -> Iterator[str]:
        yield from tree_lines(self._listing, self._numbers, None, Style(terminal()))

    def as_json(self) -> dict[str, Any]:
        return file_json(self._listing, self._numbers)


class _ShownValue:
    """A number, a text or another value without tensors."""

    def __init__(self, value: Any, facts: dict[str, Any]) -> None:
        self._value = value
        self._facts = facts

    def lines(self) -> Iterator[str]:
        text = repr(self._value)
        if is_container(self._value):
            width = terminal().width or _WIDTH
            text = pprint.pformat(self._value, width=width, sort_dicts=False)
        yield from map(printable, text.splitlines())

    def as_json(self) -> dict[str, Any]:
        try:
            json.dumps(self._value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # a set, NaN, a list that contains itself
            return {**self._facts, "value": None, "text": repr(self._value)}
        return {**self._facts, "value": self._value}


class _ShownTensor:
    """A tensor, or a storage as a tensor."""

    def __init__(self, tensor: Tensor, location: str | None, facts: dict[str, Any]) -> None:
        self._tensor = tensor
        self._location = location
        self._facts = facts
        ((self._dtype, self._shape, _, _, self._nbytes, _),) = facts_of([tensor])
        self._statistics = tensor_statistics(facts["name"], tensor, self._nbytes)

    def lines(self) -> Iterator[str]:
        tensor = self._tensor
        where = "" if self._location is None else f", saved from {printable(self._location)}"
        facts = f"{dtype_text(self._dtype)} {shape_text(self._shape)}, {size_text(self._nbytes)}"
        yield f"{facts}{where}"
        try:
            text = str(tensor)
        except NotImplementedError as error:  # torch cannot read elements of this dtype
            text = f"no numbers: {error}"
        yield from map(printable, text.splitlines())
        yield statistics_line(self._statistics)

    def as_json(self) -> dict[str, Any]:
        return {
            **self._facts,
            "dtype": dtype_text(self._dtype),
            "shape": [*self._shape],
            "nbytes": self._nbytes,
            "location": self._location,
            "note": self._statistics.note,
            "statistics": statistics_json(self._statistics.statistics),
            "value": _numbers_json(self._tensor),
        }


def _numbers_json(tensor: Tensor) -> Any:
    if tensor.is_nested or tensor.numel() > _MAX_VALUES:
        return None
    try:
        return _as_json(tensor.tolist())
    except RuntimeError:  # a sparse tensor, or a dtype that Python does not have
        return None


def _as_json(numbers: Any) -> Any:
    return [*map(_as_json, numbers)] if isinstance(numbers, list) else number_json(numbers)
