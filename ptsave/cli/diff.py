"""``ptsave diff``: the differences of two checkpoints."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import click
import torch
from torch import Tensor

from ptsave.cli.command import FAILED, NEGATIVE, Command, note, shows_progress
from ptsave.cli.completing import FILE
from ptsave.cli.diff_captures import capture_json, capture_lines, check_plot, plot_errors
from ptsave.cli.storage_options import with_storage_options
from ptsave.comparison.captures import CaptureComparison, compare_captures
from ptsave.comparison.compare import Comparison, compare
from ptsave.comparison.entries import Detail, EntryDifference, quantizer_of
from ptsave.comparison.moved_names import prefixes_of
from ptsave.support.text import count_text, dtype_text, printable, shape_text, size_text

__all__ = ["command"]

_COLORS = {"-": "red", "+": "green", ">": "cyan", "~": "yellow"}
_EXAMPLES = """
ptsave diff before.pt after.pt
ptsave diff model.pt model.safetensors      # kinds may differ: tensors are compared
ptsave diff old/ new/ --rtol 1e-3 --top 20  # directories of shards; the 20 largest differences
ptsave diff a.pt b.pt --shapes              # names, types, dtypes and shapes: reads no values
ptsave diff a.pt b.pt --only 'model.*' --ignore-dtype --json
ptsave diff run-a.pt run-b.pt --capture     # captured runs: the first call that differs
ptsave diff run.pt model.pt --capture --step 0  # the parameters of a step
"""


@click.command(
    "diff", cls=Command, short_help="In what two checkpoints differ.", examples=_EXAMPLES
)
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--rtol", type=float, help="Relative tolerance, to values in B.")
@click.option("--atol", type=float, help="Absolute tolerance.")
@click.option("--names-only", is_flag=True, help="Compare names and types only.")
@click.option("--shapes", is_flag=True, help="Compare names, types, dtypes and shapes only.")
@click.option("--ignore-dtype", is_flag=True, help="Compare values across dtypes.")
@click.option("--only", metavar="GLOB", multiple=True, help="Compare only entries of such names.")
@click.option(
    "--top", metavar="N", type=click.IntRange(min=0), help="Show the N largest differences only."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--capture", is_flag=True, help="Compare captured runs, or one with a checkpoint.")
@click.option("--step", type=click.IntRange(min=0), help="With --capture: this step only.")
@click.option("--exact", is_flag=True, help="With --capture: only equal bits are equal.")
@click.option("--recover", is_flag=True, help="With --capture: read what killed runs left.")
@click.option("--plot", metavar="PNG", help="With --capture: draw the errors along the network.")
@with_storage_options("A", "a")
@with_storage_options("B", "b")
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    *,
    rtol: float | None,
    atol: float | None,
    names_only: bool,
    shapes: bool,
    ignore_dtype: bool,
    only: tuple[str, ...],
    top: int | None,
    as_json: bool,
    capture: bool,
    step: int | None,
    exact: bool,
    recover: bool,
    plot: str | None,
    a_storage_options: dict[str, Any] | None,
    b_storage_options: dict[str, Any] | None,
) -> None:
    """Compare two checkpoints: names, types, dtypes, shapes, values.

    A and B are files (.pt, .safetensors), directories of shards, or URLs.  Tensors are equal if
    they have the same bits: 0.0 and -0.0 differ (by 0), NaN equals the same NaN.  With --rtol or
    --atol, values are equal if |a - b| <= atol + rtol * |b|, as for torch.testing.assert_close,
    and NaN equals any NaN.

    With --capture A and B are runs that ptsave.capture has recorded, aligned by step, module and
    call: the first call that differs comes first, then the worst of each module's values in each
    column.  The error is the largest distance beside the root mean square of B; the cosine of zeros
    and zeros is 1, and "-" where there is no angle.  The tolerance is that of assert_close for the
    coarser dtype, unless --rtol, --atol or --exact is given.  One of both may be a checkpoint: it
    is compared with the parameters of a step.

    Exit code: 0 if they are equal, 1 if they differ, 2 if that could not be found out, also of one
    value alone. Of two runs that were asked for the same, a step or a call that one of them has
    alone is a difference.
    """
    if capture:
        _refuse(ctx, names_only or shapes or ignore_dtype or bool(only), "--capture")
        if plot is not None:
            check_plot(plot)
        runs = compare_captures(
            a,
            b,
            rtol=rtol,
            atol=atol,
            exact=exact,
            step=step,
            recover=recover,
            progress=shows_progress(ctx),
            a_storage_options=a_storage_options,
            b_storage_options=b_storage_options,
        )
        _show_captures(ctx, a, b, runs, top, as_json, plot)
        return
    _refuse(ctx, exact or recover or step is not None or plot is not None, "")
    found = compare(
        a,
        b,
        rtol=rtol,
        atol=atol,
        detail=_detail(names_only, shapes),
        ignore_dtype=ignore_dtype,
        patterns=only,
        progress=shows_progress(ctx),
        a_storage_options=a_storage_options,
        b_storage_options=b_storage_options,
    )
    if as_json:
        click.echo(json.dumps(_as_json(a, b, found, top), indent=2))
    else:
        for remark in found.remarks:
            note(ctx, printable(remark))
        for line in _lines(a, b, found, top):
            click.echo(click.style(line, fg=_COLORS.get(line[0])))
    if not found.equal:
        ctx.exit(NEGATIVE)


def _refuse(ctx: click.Context, given: bool, capture: str) -> None:
    """Refuse options of the other kind of comparison."""
    if given and capture:
        raise click.UsageError(
            "--names-only, --shapes, --ignore-dtype and --only are not for --capture", ctx
        )
    if given:
        raise click.UsageError("--step, --exact, --recover and --plot need --capture", ctx)


def _show_captures(  # noqa: PLR0917
    ctx: click.Context,
    a: str,
    b: str,
    found: CaptureComparison,
    top: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    if plot is not None:
        plot_errors(plot, found, f"{a} / {b}")
    if as_json:
        click.echo(json.dumps(capture_json(a, b, found), indent=2))
    else:
        for remark in found.remarks:
            note(ctx, printable(remark))
        for line in capture_lines(a, b, found, top):
            click.echo(click.style(line, fg=_COLORS.get(line[:1])))
    if not found.equal:
        ctx.exit(NEGATIVE)
    if found.incomparable:
        ctx.exit(FAILED)


def _detail(names_only: bool, shapes: bool) -> Detail:
    return "names" if names_only else "shapes" if shapes else "values"


# -------------------------------------------------------------------------------------------- text


def _lines(a: str, b: str, found: Comparison, top: int | None) -> Iterator[str]:
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
    yield _summary(a, b, found)


def _alone_lines(a: str, b: str, alone: list[EntryDifference]) -> Iterator[str]:
    """Yield lines for entries that one side has alone, those that seem renamed first."""
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
    kind = type(value).__qualname__
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
    differ = f"{numbers.n_different:,} of {numbers.numel:,} differ"
    if numbers.n_outside != numbers.n_different:
        differ += f", {numbers.n_outside:,} by more than allowed"
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
    if found.equal:
        return f"equal: {compared}"
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
    """Return the largest differences first, or all in their order."""
    if top is None:
        return numbers
    return sorted(numbers, key=_size, reverse=True)[:top]


def _size(difference: EntryDifference) -> tuple[bool, float]:
    numbers = difference.numbers
    assert numbers is not None
    has_nan = bool(numbers.n_nan_a or numbers.n_nan_b)
    return has_nan, math.inf if numbers.max_abs is None else numbers.max_abs


# -------------------------------------------------------------------------------------------- JSON


def _as_json(a: str, b: str, found: Comparison, top: int | None) -> dict[str, Any]:
    numbers = [each for each in found.differences if each.kind == "numbers"]
    others = [each for each in found.differences if each.kind != "numbers"]
    return {
        "a": os.fspath(a),
        "b": os.fspath(b),
        "equal": found.equal,
        "n_tensors": found.n_tensors,
        "nbytes": found.nbytes,
        "n_differences": len(found.differences),
        "differences": _entries([*others, *_largest(numbers, top)]),
        "within_tolerance": _entries(found.within_tolerance),
        "remarks": found.remarks,
    }


def _entries(differences: Iterable[EntryDifference]) -> list[dict[str, Any]]:
    return [_entry(each) for each in differences]


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
            "max_abs": _json_number(numbers.max_abs),
            "max_rel": _json_number(numbers.max_rel),
        }
    return entry


def _json_value(difference: EntryDifference, value: Any) -> Any:
    if difference.kind == "type":
        return _type_text(value)
    if isinstance(value, Tensor):
        return {"dtype": dtype_text(value.dtype), "shape": list(value.shape)}
    return _value_text(value)


def _json_number(number: float | None) -> float | str | None:
    """Return a number as JSON has it, which knows no infinity."""
    return str(number) if number is not None and math.isinf(number) else number
