"""Compares two objects entry by entry, except for the values of tensors.

An `Opaque` stands for each object that loading did not build; `ValueNumbers` compares them.
"""

from __future__ import annotations

import cmath
import fnmatch
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ptsave.comparison.tensors import NumberDifference, TensorPair, Tolerance, quantizer_of
from ptsave.support.torch_names import untyped_of
from ptsave.tree.containers import MAX_DEPTH, attributes_of, is_container, items_of, nested_too_deep
from ptsave.tree.tree import OPAQUE_HOLDERS, Opaque, entry_not_found, type_name_of

Kind = Literal["only in a", "only in b", "type", "value", "dtype", "shape", "numbers"]
Detail = Literal["names", "shapes", "values"]
_Pair: TypeAlias = tuple[Any, Any, str]  # two entries, and the name that both have
_PLAIN_KEYS = {str, int, bool, bytes}
_NUMBERS = {int, float, complex}
_BY_NUMBER = (Opaque, set, frozenset, deque)  # values that may contain `Opaque` objects


@dataclass(frozen=True, eq=False)
class EntryDifference:
    """A difference between two checkpoints.

    Attributes
    ----------
    kind : str
        ``"only in a"``, ``"only in b"``, ``"type"``, ``"value"``, ``"dtype"``, ``"shape"`` or
        ``"numbers"``.
    name : str
        The entry's dotted name; ``""`` for the whole object.
    a, b : object
        The two values; tensors in them have no values.  None for a side that lacks the entry.
    top : str
        For an entry that only one side has: the name of the outermost container around it that the
        other side lacks.  If there is no such container, the entry's own name.
    moved : str or None
        For an entry that only one side has: its likely name on the other side.
    numbers : NumberDifference or None
        Counts and sizes of the differences between the values of two tensors.
    """

    kind: Kind
    name: str
    a: Any = None
    b: Any = None
    top: str = ""
    moved: str | None = None
    numbers: NumberDifference | None = None


class Wanted:
    """Matches names with patterns; remembers names without a match for an error message."""

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
        """Raise EntryNotFoundError if no name so far has matched; `paths` are for the message."""
        if self._found:
            return
        files = " and ".join(dict.fromkeys(paths))
        raise entry_not_found(files, self._patterns[0], dict.fromkeys(self._others))


@dataclass(frozen=True)
class Settings:
    """The options of a comparison."""

    wanted: Wanted
    detail: Detail
    ignore_dtype: bool  # applies to Python's numbers, too
    tolerance: Tolerance | None  # applies to numbers outside tensors, too
    progress: bool


class EntryComparer:
    """Walks through two objects together, and collects their differences.

    With `ignore_types`, a tensor and a parameter count as the same type.  `differences` are in the
    order of object a; in each container, entries that only b has are at the end.  `pairs` has the
    pairs of tensors whose values must still be compared.
    """

    def __init__(self, settings: Settings, *, ignore_types: bool) -> None:
        self._settings = settings
        self._wanted = settings.wanted
        self._ignore_types = ignore_types
        self._numbers = ValueNumbers()
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # temporary objects, kept alive so that their ids stay unique
        self.differences: list[EntryDifference] = []
        self.pairs: list[TensorPair] = []

    def compare(self, a: Any, b: Any) -> None:
        """Compare two objects and all entries in them, depth first, without recursion."""
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
        are_numbers = self._settings.ignore_dtype and {type(a), type(b)} <= _NUMBERS
        if type(a) is not type(b) and not are_numbers:
            if self._wanted(name):
                self.differences.append(EntryDifference("type", name, a, b))
            are_named = isinstance(a, Mapping), isinstance(b, Mapping)
            if parts[0] is None or parts[1] is None or are_named[0] != are_named[1]:
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
        """Replace each key of `b` that equals a key of `a` by that key; here, NaN equals NaN."""
        keys = {self._numbers.of(key): key for key in a if type(key) not in _PLAIN_KEYS}
        if not keys:
            return b
        return {
            key if type(key) in _PLAIN_KEYS else keys.get(self._numbers.of(key), key): value
            for key, value in b.items()
        }

    def _pairs_of(self, a: dict[Any, Any], b: dict[Any, Any], prefix: str) -> Iterator[_Pair]:
        """Yield the entries that both sides have, and note the entries that only one side has."""
        for key, value in a.items():
            if key in b:
                yield value, b[key], f"{prefix}{key}"
            else:
                self._note_alone("only in a", value, f"{prefix}{key}")
        for key, value in b.items():
            if key not in a:
                self._note_alone("only in b", value, f"{prefix}{key}")

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
        valued = not a.is_meta, not b.is_meta  # a meta tensor has no values
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

    def _compare_values(self, a: Any, b: Any, name: str) -> None:
        if isinstance(a, _BY_NUMBER) and isinstance(b, _BY_NUMBER):
            equal = self._numbers.of(a) == self._numbers.of(b)
            if equal:  # the values of tensors in them are compared later
                for n, pair in enumerate(self._numbers.tensor_pairs(a, b)):
                    self._compare_tensors(*pair, f"{name}.<tensor {n}>")
        elif {type(a), type(b)} <= _NUMBERS:
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


def _same_layout(a: Tensor, b: Tensor) -> bool:
    if a.layout != b.layout or a.is_quantized != b.is_quantized or a.is_nested != b.is_nested:
        return False
    return not a.is_quantized or quantizer_of(a) == quantizer_of(b)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a container or the attributes of another object, or else None."""
    if isinstance(value, Tensor):
        return None
    if is_container(value) and not isinstance(value, torch.Size):
        parts = dict(items_of(value))
        for name, attribute in attributes_of(value).items():  # such as `_metadata`
            parts[f"__dict__.{name}" if name in parts else name] = attribute
        return parts
    # An object without its own __eq__ is equal to another object if their attributes are equal.
    has_equality = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
    return None if has_equality else attributes_of(value) or None


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) pairs of a value; search a container once, even if it occurs twice."""
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
    except OverflowError:  # integers that are too large for a float
        return False


# ----------------------------------------------------------------------------------- value numbers

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_HOLDERS = (Opaque, *OPAQUE_HOLDERS)


class _Again(NamedTuple):
    """Stands for a container where it occurs again inside itself."""

    order: int


class _Open:
    """A container that `ValueNumbers.of` has read in part; `rest` yields its other parts."""

    __slots__ = ("lowest", "order", "rest", "start", "value")

    def __init__(self, value: Any, order: int, start: int, parts: Iterable[Any]) -> None:
        self.value = value
        # `order`: number of incomplete containers before this one.  `lowest`: the order of the
        # outermost container known to be in a reference cycle with this one.
        self.order = self.lowest = order
        self.start = start  # the position of its first token
        self.rest = iter(parts)


class ValueNumbers:
    """Gives numbers to the values of several files: equal values get the same number.

    All tensors have one common number, and all storages have another; `tensor_pairs` yields the
    tensors to compare.  An object in two containers counts as two equal objects.  Each container is
    searched once, unless it contains itself.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # objects, kept alive so that their ids stay unique

    def of(self, value: Any) -> int:
        """Return the number that this value shares with all equal values."""
        # A container becomes a row of tokens.  A complete container becomes one token in the row of
        # the container around it.  Containers in a reference cycle are completed together (Tarjan's
        # algorithm).
        tokens: list[Any] = []
        orders: dict[int, int] = {}  # of incomplete containers
        around = [_Open(None, -1, 0, (value,))]
        while True:
            for each in around[-1].rest:
                part = opened(each)
                if isinstance(part, Tensor):
                    tokens.append(self._number(("tensor",) if each is part else ("storage",)))
                elif not isinstance(part, _HOLDERS):
                    tokens.append(self._number(comparable(each)))
                elif id(part) in self._known:
                    tokens.append(self._known[id(part)])
                elif id(part) in orders:
                    tokens.append(_Again(orders[id(part)]))
                    around[-1].lowest = min(around[-1].lowest, orders[id(part)])
                else:
                    self._kept.append(part)
                    order = next(reversed(orders.values()), -1) + 1
                    orders[id(part)] = order
                    inner = _parts_of(part)
                    around.append(_Open(part, order, len(tokens), inner))
                    tokens.append((len(inner), type_name_of(part)))
                    break
            else:
                done = around.pop()
                if not around:
                    return int(tokens[0])
                around[-1].lowest = min(around[-1].lowest, done.lowest)
                if done.lowest == done.order:
                    self._complete(done, tokens, orders)

    def _complete(self, done: _Open, tokens: list[Any], orders: dict[int, int]) -> None:
        """Replace the tokens of a container, or of all containers in a cycle, by one number."""
        form = tokens[done.start :]
        if isinstance(done.value, (set, frozenset)) and all(type(each) is int for each in form[1:]):
            form[1:] = sorted(form[1:])
        form = [
            _Again(each.order - done.order) if isinstance(each, _Again) else each for each in form
        ]
        number = self._number(tuple(form))
        tokens[done.start :] = [number]
        self._known[id(done.value)] = number
        while orders and next(reversed(orders.values())) >= done.order:
            orders.popitem()

    def _number(self, form: Any) -> int:
        return self._numbers.setdefault(form, len(self._numbers))

    def tensor_pairs(self, a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the tensors of two equal values; visit each pair of their containers only once."""
        pending = [(a, b)]
        while pending:
            one, other = map(opened, pending.pop())
            if isinstance(one, Tensor):
                yield one, other
            elif isinstance(one, _HOLDERS) and (id(one), id(other)) not in self._seen:
                self._seen.add((id(one), id(other)))
                self._kept += one, other
                parts = zip(self._in_order(one), self._in_order(other), strict=True)
                pending += reversed([*parts])

    def _in_order(self, value: Any) -> list[Any]:
        parts = _parts_of(value)
        return sorted(parts, key=self.of) if isinstance(value, (set, frozenset)) else parts


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Opaque):
        return value.parts
    if isinstance(value, (set, frozenset)):
        return [*value]
    items = [*items_of(value)]
    if isinstance(value, Mapping) and not any(isinstance(key, _HOLDERS) for key, _ in items):
        items.sort(key=lambda item: repr(comparable(item[0])))  # their order does not count
    attributes = attributes_of(value)
    return [*(part for item in items for part in item), *([attributes] if attributes else [])]


def comparable(value: Any) -> tuple[Any, ...]:
    """Return a hashable form of a value; equal values, also NaN and arrays, have equal forms."""
    if hasattr(value, "tobytes"):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    try:
        hash(value)
        is_equal = bool(value == value)  # noqa: PLR0124 - NaN
    except Exception:  # a slice, or a signaling NaN
        is_equal = False
    return type(value), value if is_equal else repr(value)


def opened(value: Any) -> Any:
    """Return a tensor over the storage `value`; return any other value unchanged."""
    if isinstance(value, torch.TypedStorage):
        dtype, value = value.dtype, untyped_of(value)
        if dtype in _QUANTIZED:  # a quantized tensor also needs scales
            dtype = torch.uint8
        return torch.empty(0, dtype=dtype, device=value.device).set_(value)
    if isinstance(value, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
    return value


# ------------------------------------------------------------------------------------- moved names

# Components that wrappers of modules add to names, at any depth.
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)


def moved_names(a: Mapping[str, Hashable], b: Mapping[str, Hashable]) -> dict[str, str]:
    """For names in `a`, return their likely new names in `b`; leave out ambiguous names.

    Components from wrappers (``module.``, ``_orig_mod.``) are ignored.  One name must end with the
    other (``model.fc.weight``, ``fc.weight``), or both must end with the same two or more
    components.  Of several candidates, the one with the longest common end is chosen.  The values
    of the two names in the mappings, such as dtype and shape, must be equal.

    >>> moved_names({"fc.weight": 1, "fc.bias": 2}, {"module.fc.weight": 1, "module.fc.bias": 3})
    {'fc.weight': 'module.fc.weight'}
    """
    by_end: dict[tuple[str, Hashable], list[str]] = {}
    for name, fact in b.items():
        for end in _ends(name):
            by_end.setdefault((end, fact), []).append(name)
    moved: dict[str, str] = {}
    for name, fact in a.items():
        found = _partner([by_end.get((end, fact), []) for end in _ends(name)])
        if found is not None:
            moved[name] = found
    count = Counter(moved.values())  # two old names may not get one new name
    return {name: other for name, other in moved.items() if count[other] == 1}


def _ends(name: str) -> list[str]:
    """Return the dotted ends of a name, the longest first: ``a.b.c``, ``b.c``, ``c``."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _partner(candidates: list[list[str]]) -> str | None:
    n_parts = len(candidates)
    begin = next((i for i, names in enumerate(candidates) if names), n_parts)
    if begin == n_parts:
        return None
    n_common, names = n_parts - begin, candidates[begin]
    if len(names) > 1:
        # Many names may have the same end: take the name that is exactly this end.
        names = [other for other in names if len(_ends(other)) == n_common]
    if len(names) != 1:
        return None
    is_whole = n_common == min(n_parts, len(_ends(names[0])))
    return names[0] if is_whole or n_common >= 2 else None


def prefixes_of(name: str, other: str) -> tuple[str, str]:
    """Return the two names without the components at their ends that both have.

    >>> prefixes_of("module.fc.weight", "fc.weight"), prefixes_of("a.w", "b.w")
    (('module.', ''), ('a.', 'b.'))
    """
    parts, others = name.split("."), other.split(".")
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return "".join(f"{part}." for part in parts), "".join(f"{part}." for part in others)
