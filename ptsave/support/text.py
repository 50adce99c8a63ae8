"""Formats sizes, shapes, dtypes and counts as text that people read."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNITS = (" KiB", " MiB", " GiB", " TiB", " PiB")
_COUNT_UNITS = ("k", "M", "G", "T", "P", "E")


def size_text(nbytes: int) -> str:
    """Return a number of bytes in a suitable unit.

    >>> size_text(1000), size_text(1536), size_text(3 << 40)
    ('1000 B', '1.50 KiB', '3.00 TiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    return _scaled(nbytes, 1024, 1000, _UNITS)


def shape_text(shape: Sequence[object]) -> str:
    """Return a shape as ``[2, 3]``; the shape of a scalar is ``[]``."""
    return f"[{', '.join(map(str, shape))}]"


def dtype_text(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def count_text(n: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count_text(1, "tensor"), count_text(100_000, "tensor")
    ('1 tensor', '100,000 tensors')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def differ_text(n_different: int, n_outside: int, n: int) -> str:
    """Return a text: how many of `n` numbers differ, and how many by more than is allowed."""
    outside = f", {n_outside:,} by more than allowed" if n_outside != n_different else ""
    return f"{n_different:,} of {n:,} differ{outside}"


def short_count_text(n: int) -> str:
    """Return a number in up to six characters.

    >>> short_count_text(99_999), short_count_text(123_456), short_count_text(7_000_000)
    ('99999', '123k', '7.00M')
    """
    if n < 100_000:
        return str(n)
    return _scaled(n, 1000, 999.5, _COUNT_UNITS)


def _scaled(number: float, base: int, limit: float, units: Sequence[str]) -> str:
    """Return a number with three digits, in the first unit that makes it less than `limit`."""
    power = 1
    while (number := number / base) >= limit and power < len(units):
        power += 1
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}{units[power - 1]}"


def cut(text: str, width: int) -> str:
    """Return text; if it is wider than `width` terminal columns, two dots replace its end.

    >>> cut("Transformer", 11), cut("Transformer", 8)
    ('Transformer', 'Transf..')
    """
    if n_columns(text) <= width:
        return text
    return f"{_beginning(text, width - 2)}.."


def cut_in_the_middle(text: str, width: int) -> str:
    """Return text; if it is wider than `width` terminal columns, two dots replace its middle.

    >>> cut_in_the_middle("model.layers.10.self_attn.q_proj.weight", 24)
    'model.layer..proj.weight'
    """
    if n_columns(text) <= width:
        return text
    half = (width - 2) // 2
    return f"{_beginning(text, half)}..{_beginning(text[::-1], half)[::-1]}"


def _beginning(text: str, width: int) -> str:
    kept = text[:width]
    while n_columns(kept) > width:
        kept = kept[:-1]
    return kept


def padded(text: str, width: int) -> str:
    """Return text with spaces after it, up to a width in terminal columns.

    >>> padded("ab", 4) + "|", padded("\u65e5", 4) + "|"
    ('ab  |', '\u65e5  |')
    """
    return text + " " * (width - n_columns(text))


def n_columns(text: str) -> int:
    """Return how many terminal columns a text takes; a Chinese character takes two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def printable(text: str) -> str:
    r"""Return text with escapes for characters that a terminal does not print.

    >>> printable("weight\n")
    'weight\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def some_of(texts: Sequence[str], n: int) -> str:
    """Return the first `n` texts, joined by commas, and how many more there are."""
    more = len(texts) - n
    return ", ".join(texts[:n]) + (f" and {more:,} more" if more > 0 else "")


def first_of(texts: Sequence[str]) -> str:
    """Return the first text, and how many others there are."""
    more = f" +{len(texts) - 1}" if len(texts) > 1 else ""
    return f"{printable(texts[0])}{more}" if texts else ""
