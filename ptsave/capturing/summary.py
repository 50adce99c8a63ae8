"""Totals of a capture: of the run, and of each class of modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ptsave.capturing.schema import VALUE_FIELDS, CapturedCall, Row
from ptsave.support.text import (
    count_text,
    cut,
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


@dataclass
class Totals:
    """Totals of a class, while they are counted."""

    modules: set[str] = field(default_factory=set)
    n_calls: int = 0
    n_raised: int = 0
    shapes: dict[tuple[Any, ...], None] = field(default_factory=dict)
    dtypes: dict[str, None] = field(default_factory=dict)
    n_tensors: int = 0
    nbytes: int = 0
    n_nan: int = 0
    n_inf: int = 0

    def add_call(self, call: CapturedCall) -> None:
        self.modules.add(call.module)
        self.n_calls += 1
        self.n_raised += call.status == "raised"

    def add_tensor(self, row: Row) -> None:
        self.dtypes[row[_DTYPE]] = None
        self.n_tensors += 1
        self.nbytes += row[_NBYTES]
        statistics = row[_STATISTICS]
        if statistics is not None:
            self.n_nan += statistics[1]
            self.n_inf += statistics[2]
        if _is_output(row[_NAME]):
            self.shapes[row[_SHAPE]] = None

    def of_class(self, class_name: str) -> ClassSummary:
        return ClassSummary(
            class_name,
            len(self.modules),
            self.n_calls,
            self.n_raised,
            tuple(self.shapes),
            tuple(self.dtypes),
            self.n_tensors,
            self.nbytes,
            self.n_nan,
            self.n_inf,
        )


_NAME, _SHAPE, _DTYPE, _NBYTES, _STATISTICS = map(
    VALUE_FIELDS.index, ("name", "shape", "dtype", "nbytes", "statistics")
)


def _is_output(name: str) -> bool:
    _, phase, _, path = name.split("/", 3)
    return phase in ("forward", "recompute") and path.startswith("outputs")


# ----------------------------------------------------------------------------------------- table

_HEAD = ("class", "calls", "modules", "outputs", "dtypes", "bytes", "NaN", "Inf")


def _columns_of(found: ClassSummary) -> tuple[str, ...]:
    return (
        printable(found.name),
        short_count_text(found.n_calls),
        short_count_text(found.n_modules),
        _first_of([shape_text(shape) for shape in found.shapes]),
        _first_of([dtype.removeprefix("torch.") for dtype in found.dtypes]),
        size_text(found.nbytes),
        short_count_text(found.n_nan),
        short_count_text(found.n_inf),
    )


def _first_of(texts: Sequence[str]) -> str:
    more = f" +{len(texts) - 1}" if len(texts) > 1 else ""
    return f"{printable(texts[0])}{more}" if texts else ""


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(n_columns, column)) for column in zip(*rows, strict=True)]
    free = _WIDTH - sum(widths) - 2 * (len(widths) - 1) + widths[_CLASS] + widths[_OUTPUTS]
    widths[_CLASS] = min(widths[_CLASS], max(_MIN_CLASS_WIDTH, free - widths[_OUTPUTS]))
    widths[_OUTPUTS] = min(widths[_OUTPUTS], max(free - widths[_CLASS], len("outputs")))
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: tuple[str, ...], widths: Sequence[int]) -> Iterable[str]:
    for i, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield padded(cut(text, width), width) if i in _LEFT else text.rjust(width)
