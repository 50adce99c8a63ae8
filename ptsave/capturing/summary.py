"""Totals of a capture: of the run, and of each class of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ptsave.capturing.schema import VALUE_FIELDS, CapturedCall, Row
from ptsave.support.text import (
    count_text,
    cut,
    first_of,
    n_columns,
    padded,
    printable,
    shape_text,
    short_count_text,
    size_text,
)

_WIDTH = 80
_MIN_CLASS_WIDTH = 12
_CLASS, _OUTPUTS = 0, 3  # columns that are cut if there is no room
_LEFT = {_CLASS, _OUTPUTS, 4}
_OUTPUT = re.compile("[^/]*/(?:forward|recompute)/[^/]*/outputs")


@dataclass(frozen=True)
class ClassSummary:
    """Totals of the calls of modules of one class.

    Attributes
    ----------
    class_name : str
        Full name, ``"torch.nn.modules.linear.Linear"``.
    n_modules, n_calls, n_raised : int
        Numbers of modules that were called, of calls, and of calls that raised.
    shapes : tuple of tuple
        Shapes of tensors in outputs, each once, in the order of their first appearance.
    dtypes : tuple of str
        Dtypes of tensors in arguments, results and gradients, ``"torch.float32"``, each once.
    n_tensors, nbytes : int
        Number of such tensors, and the bytes of their elements.  A tensor counts each time that it
        is an argument or a result.
    n_nan, n_inf : int
        Their elements that are NaN or infinite; 0 if the capture has no statistics.
    """

    class_name: str
    n_modules: int
    n_calls: int
    n_raised: int
    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[str, ...]
    n_tensors: int
    nbytes: int
    n_nan: int
    n_inf: int

    @property
    def name(self) -> str:
        """The class's name without its module."""
        return self.class_name.rpartition(".")[2]


@dataclass(frozen=True)
class CaptureSummary:
    """Totals of a capture; ``str()`` is a table of up to 80 columns.

    Attributes
    ----------
    path : str
        Name of the file.
    model : str
        Full name of the model's class.
    steps : tuple of int
        The steps that have records.
    n_calls, n_values : int
        Numbers of the records of calls, and of values: arguments, results, gradients, parameters
        and containers.
    stored_nbytes : int or None
        Bytes of tensors in the file; None if the capture was killed.
    n_dropped : int or None
        Tensors that were left out for lack of room; None if the capture was killed.
    is_finished : bool
        Whether the capture was stopped.  If not, the process was killed, and the file recovered.
    classes : tuple of ClassSummary
        In the order of their first calls.
    """

    path: str
    model: str
    steps: tuple[int, ...]
    n_calls: int
    n_values: int
    stored_nbytes: int | None
    n_dropped: int | None
    is_finished: bool
    classes: tuple[ClassSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and text, for ``json.dumps``."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *_table([_HEAD, *map(_columns_of, self.classes)])])

    def _head(self) -> Iterable[str]:
        model = printable(self.model.rpartition(".")[2])
        yield cut(
            f"{model}: {count_text(len(self.steps), 'step')}, {count_text(self.n_calls, 'call')}, "
            f"{count_text(self.n_values, 'value')}",
            _WIDTH,
        )
        if not self.is_finished:
            yield "unfinished: the process ended before the capture was stopped"
        if self.stored_nbytes is not None:
            yield f"{size_text(self.stored_nbytes)} of tensors in the file"
        if self.n_dropped:
            yield f"{count_text(self.n_dropped, 'tensor')} left out for lack of room"


_NAME, _SHAPE, _DTYPE, _NBYTES, _STATISTICS = map(
    VALUE_FIELDS.index, ("name", "shape", "dtype", "nbytes", "statistics")
)


def class_summary(
    class_name: str, calls: Sequence[CapturedCall], rows: Sequence[Row]
) -> ClassSummary:
    """Return the totals of a class, given its calls and the rows of their tensors."""
    statistics = [row[_STATISTICS] for row in rows if row[_STATISTICS] is not None]
    outputs = [row for row in rows if _OUTPUT.match(row[_NAME])]
    return ClassSummary(
        class_name,
        len({call.module for call in calls}),
        len(calls),
        sum(call.status == "raised" for call in calls),
        tuple(dict.fromkeys(row[_SHAPE] for row in outputs)),
        tuple(dict.fromkeys(row[_DTYPE] for row in rows)),
        len(rows),
        sum(row[_NBYTES] for row in rows),
        sum(found[1] for found in statistics),
        sum(found[2] for found in statistics),
    )


# ----------------------------------------------------------------------------------------- table

_HEAD = ("class", "calls", "modules", "outputs", "dtypes", "bytes", "NaN", "Inf")


def _columns_of(found: ClassSummary) -> tuple[str, ...]:
    return (
        printable(found.name),
        short_count_text(found.n_calls),
        short_count_text(found.n_modules),
        first_of([shape_text(shape) for shape in found.shapes]),
        first_of([dtype.removeprefix("torch.") for dtype in found.dtypes]),
        size_text(found.nbytes),
        short_count_text(found.n_nan),
        short_count_text(found.n_inf),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(n_columns, column)) for column in zip(*rows, strict=True)]
    free = _WIDTH - sum(widths) - 2 * (len(widths) - 1) + widths[_CLASS] + widths[_OUTPUTS]
    widths[_CLASS] = min(widths[_CLASS], max(_MIN_CLASS_WIDTH, free - widths[_OUTPUTS]))
    widths[_OUTPUTS] = min(widths[_OUTPUTS], max(free - widths[_CLASS], len("outputs")))
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: tuple[str, ...], widths: Sequence[int]) -> Iterable[str]:
    for i, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield padded(cut(text, width), width) if i in _LEFT else text.rjust(width)
