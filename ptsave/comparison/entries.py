"""Compares two objects entry by entry, except for the values of tensors."""

from __future__ import annotations

import cmath
import fnmatch
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ptsave.comparison.numbers import NumberDifference, Tolerance
from ptsave.comparison.value_numbers import ValueNumbers, comparable, opened
from ptsave.tree.containers import MAX_DEPTH, attributes_of, is_container, items_of, nested_too_deep
from ptsave.tree.tree import Opaque, entry_not_found

Kind = Literal["only in a", "only in b", "type", "value", "dtype", "shape", "numbers"]
Detail = Literal["names", "shapes", "values"]
_Pair: TypeAlias = tuple[Any, Any, str]  # two entries, and their name
_PLAIN_KEYS = {str, int, bool, bytes}
_BY_NUMBER = (Opaque, set, frozenset, deque)  # leaves that may hold objects that are not built


@dataclass(frozen=True, eq=False)
class EntryDifference:
    """A difference of two checkpoints.

    Attributes
    ----------
    kind : str
        ``"only in a"``, ``"only in b"``, ``"type"``, ``"value"``, ``"dtype"``, ``"shape"`` or
        ``"numbers"``.
    name : str
        The entry's dotted name; ``""`` for the whole object.
    a, b : object
        The two values; tensors have no bytes.  None where a side has no such entry.
    top : str
        For an entry that only one side has: the name of the outermost container that is missing
        as a whole, or its own.
    moved : str or None
        For such an entry, too: its likely name on the other side.
    numbers : NumberDifference or None
        Size and place of the differences between values of tensors.
    """

    kind: Kind
    name: str
    a: Any = None
    b: Any = None
    top: str = ""
    moved: str | None = None
    numbers: NumberDifference | None = None


@dataclass(frozen=True, eq=False)
class TensorPair:
    """Two tensors of one name whose values can be compared."""

    name: str
    a: Tensor
    b: Tensor


class Wanted:
    """Matches names with patterns, and keeps the names that do not match until one matches."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._others: list[str] = []
        self._found = not patterns

    @property
    def takes_all(self) -> bool:
        return not self._patterns

    def __call__(self, name: str) -> bool:
        if not self._patterns:
            return True
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
            self._found = True
            self._others.clear()
            return True
        if not self._found:
            self._others.append(name)
        return False

    def require_any(self, *paths: str) -> None:
        """Raise EntryNotFoundError if no name has matched."""
        if self._found:
            return
        files = " and ".join(dict.fromkeys(paths))
        raise entry_not_found(files, self._patterns[0], dict.fromkeys(self._others))


@dataclass(frozen=True)
class Settings:
    """The options of a comparison."""

    wanted: Wanted
    detail: Detail
    ignore_dtype: bool  # also of Python's numbers
    tolerance: Tolerance | None  # also of numbers that are no tensors
    progress: bool


class EntryComparer:
    """Walks through two objects together, and collects their differences.

    `ignore_types` takes a tensor and a parameter for the same.  `differences` are in the order of
    a; entries that only b has come last in their container.  The values of `pairs` remain to be
    compared.
    """

    def __init__(self, settings: Settings, *, ignore_types: bool) -> None:
        self._settings = settings
        self._wanted = settings.wanted
        self._ignore_types = ignore_types
        self._numbers = ValueNumbers()
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # objects made on the way, kept so that no id is used again
        self.differences: list[EntryDifference] = []
        self.pairs: list[TensorPair] = []

    def compare(self, a: Any, b: Any) -> None:
        """Compare two objects and their contents, depth first, without recursion."""
        pending: list[Iterator[_Pair]] = [iter([(a, b, "")])]
        while pending:
            depth = len(pending) - 1
            for each in pending[-1]:
                inner = self._compare_entry(*each, depth)
                if inner is not None:
                    if depth > MAX_DEPTH:
                        raise nested_too_deep()
                    pending.append(inner)
                    break
            else:
                pending.pop()

    def _compare_entry(self, a: Any, b: Any, name: str, depth: int) -> Iterator[_Pair] | None:
        """Compare two entries; return the pairs of their contents, if they are containers."""
        a, b = opened(a), opened(b)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return self._compare_tensors(a, b, name) if self._wanted(name) else None
        parts = _parts(a), _parts(b)
        if type(a) is not type(b) and not self._are_numbers(a, b):
            self._note("type", name, a, b)
            if parts[0] is None or parts[1] is None or _is_named(a) != _is_named(b):
                return None
        if parts[0] is None or parts[1] is None:
            if self._settings.detail == "values" and self._wanted(name):
                self._compare_values(a, b, name)
            return None
        if (id(a), id(b)) in self._seen:
            return None
        self._seen.add((id(a), id(b)))
        self._kept += a, b
        entries = self._under_keys_of(parts[0], parts[1])
        return self._pairs_of(parts[0], entries, f"{name}." if depth else "")

    def _under_keys_of(self, a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of b by the equal keys of a, also NaN and keys that are not built."""
        keys = {self._numbers.of(key): key for key in a if type(key) not in _PLAIN_KEYS}
        if not keys:
            return b
        return {
            key if type(key) in _PLAIN_KEYS else keys.get(self._numbers.of(key), key): value
            for key, value in b.items()
        }

    def _pairs_of(self, a: dict[Any, Any], b: dict[Any, Any], prefix: str) -> Iterator[_Pair]:
        """Yield the entries that both have, and note the entries that only one has."""
        for key, value in a.items():
            if key in b:
                yield value, b[key], f"{prefix}{key}"
            else:
                self._note_alone("only in a", value, f"{prefix}{key}")
        for key, value in b.items():
            if key not in a:
                self._note_alone("only in b", value, f"{prefix}{key}")

    def _note(self, kind: Kind, name: str, a: Any, b: Any) -> None:
        if self._wanted(name):
            self.differences.append(EntryDifference(kind, name, a, b))

    def _note_alone(self, kind: Kind, value: Any, top: str) -> None:
        for name, leaf in _leaves(value, top):
            if self._wanted(name):
                a, b = (leaf, None) if kind == "only in a" else (None, leaf)
                self.differences.append(EntryDifference(kind, name, a, b, top=top))

    def _compare_tensors(self, a: Tensor, b: Tensor, name: str) -> Iterator[_Pair] | None:
        if a.is_nested and b.is_nested:
            self._kept += a, b
            parts = dict(enumerate(a.unbind())), dict(enumerate(b.unbind()))
            return self._pairs_of(*parts, f"{name}.")
        valued = not a.is_meta, not b.is_meta  # files hold no values of tensors on meta
        same_class = self._ignore_types or type(a) is type(b)
        alike = same_class and valued[0] == valued[1] and _same_layout(a, b)
        if not alike:
            self.differences.append(EntryDifference("type", name, a, b))
        if self._settings.detail == "names" or a.is_nested != b.is_nested:
            return None
        differs = len(self.differences)
        if a.dtype != b.dtype and not self._settings.ignore_dtype:
            self.differences.append(EntryDifference("dtype", name, a, b))
        if a.shape != b.shape:
            self.differences.append(EntryDifference("shape", name, a, b))
        comparable = all(valued) and a.layout == b.layout and a.is_quantized == b.is_quantized
        if self._settings.detail == "values" and len(self.differences) == differs and comparable:
            self.pairs.append(TensorPair(name, a, b))
        return None

    def _are_numbers(self, a: Any, b: Any) -> bool:
        return self._settings.ignore_dtype and {type(a), type(b)} <= {int, float, complex}

    def _compare_values(self, a: Any, b: Any, name: str) -> None:
        if isinstance(a, _BY_NUMBER) and isinstance(b, _BY_NUMBER):
            self._compare_by_number(a, b, name)
            return
        if {type(a), type(b)} <= {int, float, complex}:
            equal = _are_close(a, b, self._settings.tolerance)
        elif hasattr(a, "tobytes") and hasattr(b, "tobytes"):  # NumPy's arrays and scalars
            equal = comparable(a) == comparable(b)
        else:
            try:
                equal = bool(a == b or (a != a and b != b))  # noqa: PLR0124 - NaN of Decimal
            except Exception as error:
                raise TypeError(
                    f"{name}: values of type {type(a).__name__} cannot be compared "
                    f"({type(error).__name__}: {error})"
                ) from error
        if not equal:
            self.differences.append(EntryDifference("value", name, a, b))

    def _compare_by_number(self, a: Any, b: Any, name: str) -> None:
        """Compare sets, and objects that are not built, by the contents that files give them."""
        if self._numbers.of(a) != self._numbers.of(b):
            self.differences.append(EntryDifference("value", name, a, b))
            return
        for n, (one, other) in enumerate(self._numbers.tensor_pairs(a, b)):
            self._compare_tensors(one, other, f"{name}.<tensor {n}>")


def _same_layout(a: Tensor, b: Tensor) -> bool:
    if a.layout != b.layout or a.is_quantized != b.is_quantized or a.is_nested != b.is_nested:
        return False
    return not a.is_quantized or quantizer_of(a) == quantizer_of(b)


def quantizer_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the parameters that turn the integers of a quantized tensor into numbers."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    axis = tensor.q_per_channel_axis()
    return tensor.qscheme(), tuple(scales.tolist()), tuple(zero_points.tolist()), axis


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return a container's entries, or an object's attributes if it has no ``__eq__``, or None."""
    if isinstance(value, Tensor):
        return None
    if is_container(value) and not isinstance(value, torch.Size):
        parts = dict(items_of(value))
        for name, attribute in attributes_of(value).items():  # such as `_metadata`
            parts[f"__dict__.{name}" if name in parts else name] = attribute
        return parts
    # An object without an __eq__ of its own is equal to another if their attributes are.
    has_equality = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
    return None if has_equality else attributes_of(value) or None


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value; a container that occurs twice is searched once."""
    seen: set[int] = set()
    pending = [iter([(name, value)])]
    while pending:
        for entry_name, entry in pending[-1]:
            leaf = opened(entry)
            parts = _parts(leaf)
            if parts and id(leaf) not in seen and len(pending) <= MAX_DEPTH:
                seen.add(id(leaf))
                pending.append(iter([(f"{entry_name}.{key}", part) for key, part in parts.items()]))
                break
            yield entry_name, leaf
        else:
            pending.pop()


def _are_close(a: complex, b: complex, tolerance: Tolerance | None) -> bool:
    if a == b:
        return True
    try:
        if cmath.isnan(a) and cmath.isnan(b):
            return True
        if tolerance is None:
            return False
        return abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b) < float("inf")
    except OverflowError:  # integers that no float holds
        return False
