"""Checks the types of captured records, column by column.

A check gets one field of all records of a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

from ptsave.tree.capture_schema import GRADIENT_PHASES, PHASES, Statistics

_NAME = re.compile(rf"[0-9]{{1,18}}/(?:{'|'.join(PHASES)})/[^/#]*#[0-9]{{1,18}}(?:/[^/]*)+")
_MAX_NUMBER = (1 << 64) - 1


def is_column_right(kind: str, field: str, column: Collection[Any]) -> bool:
    """Return whether a field of records of a `kind`, ``call`` or ``value``, has its type.

    >>> is_column_right("call", "order", (1, 2)), is_column_right("call", "order", (1, -2))
    (True, False)
    """
    try:
        return _CHECKS.get((kind, field), are_texts)(column)
    except TypeError:  # a value cannot be in a set
        return False


def are_texts(column: Iterable[Any]) -> bool:
    """Return whether all are `str`."""
    return set(map(type, column)) <= {str}


def _are_counts(column: Collection[Any]) -> bool:
    """Return whether all are whole numbers of up to 64 bits."""
    if not set(map(type, column)) <= {int, bool}:
        return False
    return not column or (min(column) >= 0 and max(column) <= _MAX_NUMBER)


def _are_counts_or_none(column: Collection[Any]) -> bool:
    return _are_counts([number for number in column if number is not None])


def _are_flags(column: Collection[Any]) -> bool:
    return set(map(type, column)) <= {bool}


def _are_plain(column: Collection[Any]) -> bool:
    return set(map(type, column)) <= {type(None), bool, int, float, complex, str}


def _are_tuples(column: Collection[Any]) -> bool:
    return set(map(type, column)) <= {tuple}


def _are_shapes(column: Collection[Any]) -> bool:
    """Return whether all are tuples of sizes; sizes of nested tensors may be symbols."""
    sizes = set(chain.from_iterable(set(column))) if _are_tuples(column) else {None}
    return _are_counts([size for size in sizes if type(size) is not str])


def _are_stacks(column: Collection[Any]) -> bool:
    return _are_tuples(column) and are_texts(chain.from_iterable(set(column)))


def _are_statistics(column: Collection[Any]) -> bool:
    # Values that are the same tensor share one tuple.
    found = {id(each): each for each in column if each is not None}.values()
    n_fields = len(Statistics._fields)
    if not _are_tuples(found) or min(map(len, found), default=n_fields) < n_fields:
        return False
    columns = zip(*found, strict=False)  # there may be more fields
    return all(
        _STATISTICS[name](numbers)
        for name, numbers in zip(Statistics._fields, columns, strict=False)
    )


def _are_numbers(column: Collection[Any]) -> bool:
    kinds = set(map(type, column))
    if int in kinds:
        numbers = [number for number in column if type(number) is int]
        return kinds <= {int, float} and -_MAX_NUMBER <= min(numbers) <= max(numbers) <= _MAX_NUMBER
    return kinds <= {float}


def _are_means(column: Collection[Any]) -> bool:
    return _are_numbers([number for number in column if type(number) is not complex])


def _are_names(column: Collection[Any]) -> bool:
    return are_texts(column) and all(map(_NAME.fullmatch, column))


def _one_of(*choices: str) -> Callable[[Collection[Any]], bool]:
    allowed = frozenset(choices)
    return lambda column: set(column) <= allowed


_STATISTICS: dict[str, Callable[[Collection[Any]], bool]] = {
    **dict.fromkeys(("numel", "n_nan", "n_inf", "n_zero", "checksum"), _are_counts),
    **dict.fromkeys(("std", "min", "max", "norm"), _are_numbers),
    "mean": _are_means,
}
# All other fields are texts.
_CHECKS: dict[tuple[str, str], Callable[[Collection[Any]], bool]] = {
    **{("call", name): _are_counts for name in ("id", "step", "call", "order", "end")},
    ("call", "phase"): _one_of(*GRADIENT_PHASES.values()),
    ("call", "parent"): _are_counts_or_none,
    ("call", "status"): _one_of("returned", "raised", "stopped", "unfinished"),
    ("call", "stack"): _are_stacks,
    ("value", "name"): _are_names,
    ("value", "order"): _are_counts,
    ("value", "call"): _are_counts_or_none,
    ("value", "kind"): _one_of("tensor", "container", "plain"),
    ("value", "shape"): _are_shapes,
    ("value", "nbytes"): _are_counts,
    ("value", "requires_grad"): _are_flags,
    ("value", "value"): _are_plain,
    ("value", "statistics"): _are_statistics,
}
