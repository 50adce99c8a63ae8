"""Shows the differences of two checkpoints as text and JSON."""

from __future__ import annotations

import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ptsave.comparison.compare import Comparison
from ptsave.comparison.entries import EntryDifference, quantizer_of
from ptsave.comparison.moved_names import prefixes_of
from ptsave.support.text import (
    count_text,
    differ_text,
    dtype_text,
    printable,
    shape_text,
    size_text,
)
from ptsave.tree.tree import Opaque, type_name_of

# -------------------------------------------------------------------------------------------- text


def comparison_lines(a: str, b: str, found: Comparison, top: int | None) -> Iterator[str]:
    """Yield text lines: entries of one side only, other types, other numbers."""
    numbers = [each for each in found.differences if each.kind == "numbers"]
    others = [each for each in found.differences if each.kind != "numbers"]
    yield from _alone_lines(a, b, [each for each in others if each.kind.startswith("only")])
    for each in others:
        if not each.kind.startswith("only"):
            yield f"~ {_name(each)}  {each.kind}: {_text(each, each.a)} / {_text(each, each.b)}"
    for each in _largest(numbers, top):
        yield f"~ {_name(each)}  {_tensor_text(each.a)}: {_numbers_text(each)}"
    if top is not None and len(numbers) > top:
        yield f"  and {len(numbers) - top} more tensors whose values differ less"
    for name, reason in found.not_compared.items():
        yield f"! {printable(name)}  not compared: {printable(reason)}"
    yield _summary(a, b, found)


def _alone_lines(a: str, b: str, alone: list[EntryDifference]) -> Iterator[str]:
    """Yield lines for entries of one side only; entries that seem renamed come first."""
    moved = [each for each in alone if each.moved is not None]
    prefixes: dict[tuple[str, str], list[EntryDifference]] = {}
    for each in moved:
        if each.kind == "only in a":
            prefixes.setdefault(prefixes_of(each.name, each.moved or ""), []).append(each)
    for (in_a, in_b), entries in prefixes.items():
        example = f"{printable(entries[0].name)} / {printable(entries[0].moved or '')}"
        yield (
            f"> {count_text(len(entries), 'tensor')} called {printable(in_a)}* in {a} may be "
            f"{printable(in_b)}* in {b}: {example}"
        )
    missing: dict[tuple[str, str], list[EntryDifference]] = {}
    for each in alone:
        if each.moved is None:
            missing.setdefault((each.kind, each.top), []).append(each)
    for (kind, name), entries in missing.items():
        side, sign = (a, "-") if kind == "only in a" else (b, "+")
        yield f"{sign} {printable(name)}  only in {side}: {_content_text(name, entries)}"


def _content_text(name: str, entries: list[EntryDifference]) -> str:
    values = [each.a if each.kind == "only in a" else each.b for each in entries]
    if len(values) == 1 and entries[0].name == name:
        return _text(entries[0], values[0])
    tensors = [value for value in values if isinstance(value, Tensor)]
    nbytes = sum(value.numel() * value.itemsize for value in tensors)
    parts = [f"{count_text(len(tensors), 'tensor')} ({size_text(nbytes)})"] if tensors else []
    if len(tensors) < len(values):
        parts.append(count_text(len(values) - len(tensors), "value"))
    return ", ".join(parts)


def _text(difference: EntryDifference, value: Any) -> str:
    if difference.kind == "type":
        return _type_text(value)
    if isinstance(value, Tensor):
        if difference.kind == "dtype":
            return dtype_text(value.dtype)
        return shape_text(value.shape) if difference.kind == "shape" else _tensor_text(value)
    return _value_text(value)


def _type_text(value: Any) -> str:
    kind = type_name_of(value) if isinstance(value, Opaque) else type(value).__qualname__
    if not isinstance(value, Tensor):
        return kind
    if value.layout != torch.strided:
        return f"{kind} ({str(value.layout).removeprefix('torch.')})"
    if value.is_quantized:
        return f"{kind} (quantized: {', '.join(map(_value_text, quantizer_of(value)))})"
    return kind


def _tensor_text(tensor: Tensor) -> str:
    return f"{dtype_text(tensor.dtype)} {shape_text(tensor.shape)}"


def _value_text(value: Any) -> str:
    return printable(reprlib.repr(value))


def _numbers_text(difference: EntryDifference) -> str:
    numbers = difference.numbers
    assert numbers is not None
    differ = differ_text(numbers.n_different, numbers.n_outside, numbers.numel)
    if numbers.max_abs is None:
        return f"{differ} (torch cannot compute with this dtype)"
    parts = [differ, f"max abs {numbers.max_abs:.3g}", f"max rel {numbers.max_rel:.3g}"]
    if numbers.max_abs == 0 and not (numbers.n_nan_a or numbers.n_nan_b):
        parts = [f"{differ}, in their bits only: the values are equal"]
    for n, side in ((numbers.n_nan_a, "A"), (numbers.n_nan_b, "B")):
        if n:
            parts.append(f"{n:,} NaN only in {side}")
    return ", ".join(parts)


def _summary(a: str, b: str, found: Comparison) -> str:
    kinds: Counter[str] = Counter(each.kind for each in found.differences)
    compared = f"{count_text(found.n_tensors, 'tensor')} compared ({size_text(found.nbytes)})"
    if found.within_tolerance:
        compared += f", {len(found.within_tolerance)} of them equal within the tolerance"
    if found.not_compared:
        compared += f", {count_text(len(found.not_compared), 'file')} not compared"
    if not found.differences:
        return f"equal: {compared}" if found.equal else f"no difference found: {compared}"
    words = {
        "only in a": f"only in {a}",
        "only in b": f"only in {b}",
        "type": "of another type",
        "dtype": "of another dtype",
        "shape": "of another shape",
        "value": "with another value",
        "numbers": "with other numbers",
    }
    parts = [f"{kinds[kind]} {text}" for kind, text in words.items() if kinds[kind]]
    return f"different: {', '.join(parts)}; {compared}"


def _name(difference: EntryDifference) -> str:
    return printable(difference.name) or "(the whole)"


def _largest(numbers: list[EntryDifference], top: int | None) -> list[EntryDifference]:
    """Return the `top` largest differences, largest first, or all in their order."""
    if top is None:
        return numbers
    return sorted(numbers, key=_size, reverse=True)[:top]


def _size(difference: EntryDifference) -> tuple[bool, float]:
    numbers = difference.numbers
    assert numbers is not None
    has_nan = bool(numbers.n_nan_a or numbers.n_nan_b)
    return has_nan, math.inf if numbers.max_abs is None else numbers.max_abs


# -------------------------------------------------------------------------------------------- JSON


def comparison_json(a: str, b: str, found: Comparison, top: int | None) -> dict[str, Any]:
    """Return the JSON object for a comparison."""
    numbers = [each for each in found.differences if each.kind == "numbers"]
    others = [each for each in found.differences if each.kind != "numbers"]
    return {
        "a": os.fspath(a),
        "b": os.fspath(b),
        "equal": found.equal,
        "n_tensors": found.n_tensors,
        "nbytes": found.nbytes,
        "n_differences": len(found.differences),
        "differences": [*map(_entry, [*others, *_largest(numbers, top)])],
        "within_tolerance": [*map(_entry, found.within_tolerance)],
        "not_compared": found.not_compared,
        "remarks": found.remarks,
    }


def _entry(difference: EntryDifference) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": difference.kind, "name": difference.name}
    for side, value in (("a", difference.a), ("b", difference.b)):
        if difference.kind != f"only in {'b' if side == 'a' else 'a'}":
            entry[side] = _json_value(difference, value)
    if difference.moved is not None:
        entry["moved"] = difference.moved
    if (numbers := difference.numbers) is not None:
        entry |= {
            "numel": numbers.numel,
            "n_different": numbers.n_different,
            "n_outside_tolerance": numbers.n_outside,
            "n_nan_only_in_a": numbers.n_nan_a,
            "n_nan_only_in_b": numbers.n_nan_b,
        }
        for name in ("max_abs", "max_rel"):  # an infinity becomes a string
            number = getattr(numbers, name)
            entry[name] = str(number) if number is not None and math.isinf(number) else number
    return entry


def _json_value(difference: EntryDifference, value: Any) -> Any:
    if difference.kind == "type":
        return _type_text(value)
    if isinstance(value, Tensor):
        return {"dtype": dtype_text(value.dtype), "shape": list(value.shape)}
    return _value_text(value)
