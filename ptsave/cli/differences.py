"""Shows the differences between two checkpoints or captured runs: text, JSON or a picture."""

from __future__ import annotations

import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ptsave.capturing.schema import parse_name
from ptsave.comparison.entries import EntryDifference, prefixes_of
from ptsave.comparison.tensors import quantizer_of
from ptsave.support.text import (
    count_text,
    cut,
    differ_text,
    dtype_text,
    printable,
    shape_text,
    size_text,
)
from ptsave.tree.tree import Opaque, type_name_of

if TYPE_CHECKING:
    from ptsave.capturing.comparison import CaptureComparison, CapturedDifference, TensorDifference
    from ptsave.capturing.schema import Statistics
    from ptsave.comparison.compare import Comparison

# -------------------------------------------------------------------------------------------- text


def comparison_lines(a: str, b: str, found: Comparison, top: int | None) -> Iterator[str]:
    """Yield lines: entries of one side only, other differences, uncompared entries, a summary."""
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
    """Yield lines for entries that only one side has; likely renamed entries come first."""
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
    return printable(difference.name) or "(the whole object)"


def _largest(numbers: list[EntryDifference], top: int | None) -> list[EntryDifference]:
    """Return the `top` largest differences, the largest first; if `top` is None, all, unsorted."""

    def size(difference: EntryDifference) -> tuple[bool, float]:
        found = difference.numbers
        assert found is not None
        has_nan = bool(found.n_nan_a or found.n_nan_b)
        return has_nan, math.inf if found.max_abs is None else found.max_abs

    return numbers if top is None else sorted(numbers, key=size, reverse=True)[:top]


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
            "max_abs": _number(numbers.max_abs),
            "max_rel": _number(numbers.max_rel),
        }
    return entry


def _json_value(difference: EntryDifference, value: Any) -> Any:
    if difference.kind == "type":
        return _type_text(value)
    if isinstance(value, Tensor):
        return {"dtype": dtype_text(value.dtype), "shape": list(value.shape)}
    return _value_text(value)


# ---------------------------------------------------------------------------------------- captures

_WIDTH = 80
_NAME_WIDTH = 34
_SIZES_WIDTH = 19  # max abs and max rel
_N_MODULES = 20
_N_ALONE = 10
_TINY = 1e-12  # the relative error at which equal values are drawn


# -------------------------------------------------------------------------------------------- text


def capture_lines(a: str, b: str, found: CaptureComparison, top: int | None) -> Iterator[str]:
    """Yield text lines: the first difference, then the worst figures of each module."""
    first = found.first
    if first is not None:
        yield from _first_lines(found, first)
    for sign, path, names in (("-", a, found.only_in_a), ("+", b, found.only_in_b)):
        for name in names[:_N_ALONE]:
            yield cut(f"{sign} {printable(name)}  only in {path}", _WIDTH)
        if len(names) > _N_ALONE:
            yield cut(f"{sign} and {len(names) - _N_ALONE} more only in {path}", _WIDTH)
    for problem in [*found.incomparable.values()][:_N_ALONE]:
        yield cut(f"? {printable(problem)}", 2 * _WIDTH)
    if first is not None:
        yield from _module_lines(found, _N_MODULES if top is None else top)
    yield _capture_summary(found)


def _first_lines(found: CaptureComparison, first: CapturedDifference) -> Iterator[str]:
    parts = parse_name(first.name)
    module = printable(parts.module) or "(the model)"
    yield "first difference, in A's order of execution:"
    yield cut(
        f"~ step {parts.step}, {parts.phase}, {module}, call {parts.call}: "
        f"{printable('/'.join(parts.path))}",
        _WIDTH,
    )
    yield from (cut(f"    {line}", _WIDTH) for line in _details(first))


def _details(difference: CapturedDifference) -> Iterator[str]:
    a, b = difference.a, difference.b
    numbers = difference.numbers
    if numbers is not None:
        differ = differ_text(numbers.n_different, numbers.n_outside, numbers.numel)
        yield f"{_types(difference)}: {differ}"
        index = "" if numbers.first is None else f", the first at {list(numbers.first)}"
        yield (
            f"max abs {numbers.max_abs:.3g}, max rel {numbers.max_rel:.3g}, "
            f"cosine {_cosine_text(numbers.cosine, '.6g')}{index}"
        )
        if any((numbers.n_nan_a, numbers.n_nan_b, numbers.n_inf_a, numbers.n_inf_b)):
            yield (
                f"NaN {numbers.n_nan_a:,} / {numbers.n_nan_b:,}, "
                f"Inf {numbers.n_inf_a:,} / {numbers.n_inf_b:,}"
            )
        yield f"ULPs: {_ulps_text(numbers)}"
    elif difference.kind == "statistics" and a.statistics and b.statistics:
        yield f"{_types(difference)}: the statistics differ (one run has no tensors)"
        yield from _statistics_lines(a.statistics, b.statistics)
    elif difference.kind == "shape":
        yield f"shape {shape_text(a.shape)} / {shape_text(b.shape)}"
    elif difference.kind == "layout":
        yield f"layout {a.layout} / {b.layout}"
    elif difference.kind == "type":
        yield f"{a.type} / {b.type}"
    else:
        yield printable(f"{a.value!r} / {b.value!r}")


def _types(difference: CapturedDifference) -> str:
    a, b = (each.dtype.removeprefix("torch.") for each in (difference.a, difference.b))
    dtypes = a if a == b else f"{a} / {b}"
    return f"{dtypes} {shape_text(difference.a.shape)}"


def _statistics_lines(a: Statistics, b: Statistics) -> Iterator[str]:
    for name in ("mean", "std", "min", "max", "norm", "n_nan", "n_inf"):
        x, y = getattr(a, name), getattr(b, name)
        if x != y and not (x != x and y != y):  # noqa: PLR0124 - NaN
            yield f"{name} {x:.6g} / {y:.6g}"


def _cosine_text(cosine: float, form: str) -> str:
    """Return a cosine as text; a dash stands for NaN, if the cosine is not defined."""
    return "-" if math.isnan(cosine) else format(cosine, form)


def _ulp_counts(numbers: TensorDifference) -> dict[str, int]:
    """Return the nonzero counts by distance in ULPs: "0", "1", "3-4", ..., "more"."""
    found = {}
    for i, count in enumerate(numbers.ulps):
        if count:
            most = 2 ** max(0, i - 1)
            text = str(i) if i < 3 else f"{most // 2 + 1}-{most}"
            found["more" if i == 65 else text] = count
    return found


def _ulps_text(numbers: TensorDifference) -> str:
    """Return the first four counts, and the sum of the other counts, as text."""
    counts = _ulp_counts(numbers)
    shown = dict([*counts.items()][:4])
    rest = sum(counts.values()) - sum(shown.values())
    text = ", ".join(f"{distance}: {count:,}" for distance, count in shown.items())
    return f"{text}, more: {rest:,}" if rest else text


def _module_lines(found: CaptureComparison, top: int) -> Iterator[str]:
    modules: dict[str, list[CapturedDifference]] = {}
    for each in found.differences:
        modules.setdefault(parse_name(each.name).module, []).append(each)
    yield ""
    yield (
        f"{'module':{_NAME_WIDTH}} {'differ':>6} {'max abs':>9} {'max rel':>9} "
        f"{'error':>9} {'cosine':>8}"
    )
    for module, differences in [*modules.items()][:top]:
        yield _module_line(module, differences)
    if len(modules) > top:
        yield f"and {len(modules) - top} more modules"


def _module_line(module: str, differences: list[CapturedDifference]) -> str:
    """Return a module's line: the worst figure of each column, perhaps of different values."""
    name = cut(printable(module) or "(the model)", _NAME_WIDTH)
    error = max(each.relative_error for each in differences)
    numbers = [each.numbers for each in differences if each.numbers is not None]
    sizes = ", ".join(dict.fromkeys(each.kind for each in differences))
    if numbers:
        max_abs = max(each.max_abs for each in numbers)
        max_rel = max(each.max_rel for each in numbers)
        sizes = f"{max_abs:>9.3g} {max_rel:>9.3g}"
    cosines = [each.cosine for each in numbers if not math.isnan(each.cosine)]
    cosine = _cosine_text(min(cosines, default=math.nan), ".5f")
    return (
        f"{name:{_NAME_WIDTH}} {len(differences):>6} {cut(sizes, _SIZES_WIDTH):>{_SIZES_WIDTH}} "
        f"{error:>9.3g} {cosine:>8}"
    )


def _capture_summary(found: CaptureComparison) -> str:
    text = f"{count_text(len(found.compared), 'value')} compared ({size_text(found.nbytes)})"
    if found.incomparable:
        text += f", but {len(found.incomparable)} cannot be compared"
    if found.equal:
        equal = "not known to differ" if found.incomparable else "equal within the tolerance"
        return f"{equal}: {text}"
    parts = [
        f"{len(found.differences)} differ" if found.differences else "",
        f"{len(found.only_in_a)} only in A" if found.only_in_a else "",
        f"{len(found.only_in_b)} only in B" if found.only_in_b else "",
    ]
    return f"different: {', '.join(filter(None, parts))}; {text}"


# -------------------------------------------------------------------------------------------- JSON


def capture_json(a: str, b: str, found: CaptureComparison) -> dict[str, Any]:
    """Return the JSON object for all differences."""
    first = found.first
    return {
        "a": os.fspath(a),
        "b": os.fspath(b),
        "equal": found.equal,
        "first": None if first is None else first.name,
        "n_compared": len(found.compared),
        "nbytes": found.nbytes,
        "differences": [_capture_entry(each) for each in found.differences],
        "incomparable": found.incomparable,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "remarks": found.remarks,
    }


def _capture_entry(difference: CapturedDifference) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": difference.name,
        "kind": difference.kind,
        "relative_error": _number(difference.relative_error),
    }
    for side, value in (("a", difference.a), ("b", difference.b)):
        entry[side] = (
            {"dtype": value.dtype.removeprefix("torch."), "shape": list(value.shape)}
            if value.kind == "tensor"
            else {"type": value.type, "value": str(value.value)}
        )
    numbers = difference.numbers
    if numbers is not None:
        entry |= {
            name: _number(getattr(numbers, name))
            for name in (
                *("numel", "n_different", "n_outside", "max_abs", "max_rel", "cosine"),
                *("n_nan_a", "n_nan_b", "n_inf_a", "n_inf_b"),
            )
        }
        entry["first"] = None if numbers.first is None else list(numbers.first)
        entry["ulps"] = _ulp_counts(numbers)
    return entry


def _number(number: float | None) -> float | str | None:
    """Return a number for JSON; infinities and NaN are strings."""
    is_json = number is None or isinstance(number, int) or math.isfinite(number)
    return number if is_json else str(number)


# ------------------------------------------------------------------------------------------ picture


def plot_errors(path: str, found: CaptureComparison, title: str) -> None:
    """Draw the relative error of each tensor, in A's order of execution, to the file `path`."""
    from ptsave.bench.rounds import require_matplotlib

    tensors = [each for each in found.compared if each.a.kind == "tensor"]
    figure = require_matplotlib()(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for equal, color, label in (
        (True, "#9aa5b1", "within the tolerance"),
        (False, "#c0392b", "outside"),
    ):
        places = [i for i, each in enumerate(tensors) if each.equal is equal]
        # The errors may be 0 or infinite, and the axis is logarithmic.
        errors = [min(max(tensors[i].relative_error, _TINY), 1e12) for i in places]
        axes.scatter(places, errors, s=12, color=color, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("largest error / root mean square of B")
    axes.set_xlabel("tensors, in A's order of execution")
    ticks = [*range(0, len(tensors), max(1, len(tensors) // 12))]
    calls = [cut(printable(tensors[i].call).replace("$", ""), 28) for i in ticks]
    axes.set_xticks(ticks, calls, rotation=30, ha="right", fontsize=7)
    axes.set_title(printable(title), fontsize=10, parse_math=False)
    axes.legend(loc="best", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
