"""`ValueNumbers`: equal values have equal numbers, also objects that are not built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave.support.torch_names import untyped_of
from ptsave.tree.containers import attributes_of, items_of
from ptsave.tree.opaque import OPAQUE_HOLDERS, Opaque, type_name_of

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_HOLDERS = (Opaque, *OPAQUE_HOLDERS)


class _Again(NamedTuple):
    """Stands for a container that is met again inside itself."""

    order: int


class _Open:
    """A container with parts that have no number yet; `rest` are its parts without tokens."""

    __slots__ = ("lowest", "order", "rest", "start", "value")

    def __init__(self, value: Any, order: int, start: int, parts: Iterable[Any]) -> None:
        self.value = value
        # Number of incomplete containers before it, and that of the outermost container known to be
        # in a circle with it.
        self.order = self.lowest = order
        self.start = start  # number of tokens in front of its own
        self.rest = iter(parts)


class ValueNumbers:
    """Numbers the values of several files: two values have the same number if they are equal.

    All tensors have one number, and all storages have one: `tensor_pairs` yields the pairs to
    compare.  A part that two containers share counts as two equal parts.  Each container is
    searched once, unless it holds itself.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # kept alive, so that no id is used again

    def of(self, value: Any) -> int:
        """Return the number of a value."""
        # A container is a row of tokens.  When it is complete, it is one token in the row around
        # it.  Containers in a circle are completed together (Tarjan's algorithm).
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
        """Replace the tokens of a container, and of all in a circle with it, by its number."""
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
        """Yield the pairs of tensors in two values of one number, once per pair of containers."""
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
    """Return a hashable form of a value that equals itself, even for NaN and NumPy's arrays."""
    if hasattr(value, "tobytes"):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    try:
        hash(value)
        is_equal = bool(value == value)  # noqa: PLR0124 - NaN
    except Exception:  # a slice, or a signaling NaN
        is_equal = False
    return type(value), value if is_equal else repr(value)


def opened(value: Any) -> Any:
    """Return a storage as a tensor over it, and any other value as it is."""
    if isinstance(value, torch.TypedStorage):
        dtype, value = value.dtype, untyped_of(value)
        if dtype in _QUANTIZED:  # their tensors need more than a storage
            dtype = torch.uint8
        return torch.empty(0, dtype=dtype, device=value.device).set_(value)
    if isinstance(value, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
    return value
