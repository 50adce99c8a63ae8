"""The records of a capture: the calls of modules, the values of each call, and totals.

A capture's file contains one dict, with only tensors, plain dicts, tuples, numbers and text.  So
``torch.load(..., weights_only=True)`` loads it. docs/format.md, "Captures", lists its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

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

VERSION = 1  # readers refuse a larger one
SUMMARY = "capture/end"  # the key of the last entry, the totals; a killed run has no totals

Row = tuple[Any, ...]  # a record in the file

# In their order within a step.  The gradient of a call's value belongs to the same call.
PHASES = ("params", "forward", "recompute", "backward", "recompute_backward", "grads")
# For each phase of gradients: the phase of the calls whose values have these gradients.
GRADIENT_PHASES = {"backward": "forward", "recompute_backward": "recompute"}


class Name(NamedTuple):
    """The parts of a value's name, ``step/phase/module.path#call/argument/path``."""

    step: int
    phase: str
    module: str
    call: int
    path: tuple[str, ...]


class Statistics(NamedTuple):
    """Statistics of one tensor; mean, std, min, max and norm cover only its finite elements.

    Attributes
    ----------
    numel : int
        Number of elements; for a sparse tensor, the number of its stored values.
    n_nan, n_inf, n_zero : int
        Numbers of elements that are NaN, infinite and zero.
    mean, std : float or complex
        Accumulated in double precision; std is the square root of the unbiased variance.  NaN if
        no element (for std, only one) is finite.  The mean of complex elements is complex.
    min, max : int or float
        Exact; for complex elements, extremes of the absolute values.  NaN if none is finite.
    norm : float
        The L2 norm.
    checksum : int
        CRC-32 of the elements' bytes in row-major order, for any strides.
    """

    numel: int
    n_nan: int
    n_inf: int
    n_zero: int
    mean: float | complex
    std: float
    min: float
    max: float
    norm: float
    checksum: int


@dataclass(frozen=True)
class CapturedCall:
    """One call of a module.

    Attributes
    ----------
    id : int
        Unique in the run; ids increase in the order in which the calls began.
    step, phase, module, call
        The parts of the call's name.  The phase is ``forward``, or ``recompute`` where activation
        checkpointing runs a forward again during the backward.
    class_name : str
        The module's class, for example ``"torch.nn.modules.linear.Linear"``.
    order, end : int
        Numbers of the call's beginning and end: a run numbers all beginnings and ends of calls, and
        all values, from 0, in the order of execution.
    parent : int or None
        `id` of the call, in the same thread, that contains this call; None if there is none.
    status : {"returned", "raised", "stopped", "unfinished"}
        "stopped" is a recomputation that ended early, because the backward needs no more values.
        "unfinished" is a call whose end no hook saw, for example because of a KeyboardInterrupt.
        Its `end` is the time when the capture noticed that.  If the process was killed, only the
        values of an unfinished call are known.
    error : str
        Type and message of the exception, if the call raised one.
    stack : tuple of str
        The call stack, outermost frame first, as ``"file:line function"``.  Empty if the
        capture does not record call stacks.
    values : mapping of str to CapturedValue
        Arguments and results, and the containers around them, by paths such as ``"inputs/0"`` or
        ``"outputs/logits"``.  Filled in only when a capture is read.
    grads : mapping of str to CapturedValue
        Gradients with respect to `values`, by the same paths.
    inputs, outputs : list of CapturedValue
        The tensors among the arguments, and those in the result, from `values`.
    """

    id: int
    step: int
    phase: str
    module: str
    call: int
    class_name: str
    order: int
    end: int
    parent: int | None
    status: Literal["returned", "raised", "stopped", "unfinished"] = "returned"
    error: str = ""
    stack: tuple[str, ...] = ()
    values: Mapping[str, CapturedValue] = field(default_factory=dict, repr=False, compare=False)
    grads: Mapping[str, CapturedValue] = field(default_factory=dict, repr=False, compare=False)

    @property
    def inputs(self) -> list[CapturedValue]:
        """The tensors among the call's arguments, also nested ones, in their order."""
        return self._tensors("inputs")

    @property
    def outputs(self) -> list[CapturedValue]:
        """The tensors in the call's result, also nested ones; none if the call raised."""
        return self._tensors("outputs")

    def _tensors(self, root: str) -> list[CapturedValue]:
        return [
            value
            for path, value in self.values.items()
            if value.kind == "tensor" and path.partition("/")[0] == root
        ]


@dataclass(frozen=True)
class CapturedValue:
    """An argument, result, gradient or parameter, or an element of a container among them.

    Attributes
    ----------
    name : str
        ``step/phase/module.path#call/argument/path``; `parse_name` returns the parts.
    order : int
        Number of the value in the order of execution, as in :class:`CapturedCall`.
    call : int or None
        `id` of the call; None in the phases ``params`` and ``grads``.
    kind : {"tensor", "container", "plain"}
        A container's elements follow as values of their own, with longer paths.
    type : str
        ``"Tensor"``, ``"tuple"``, ``"transformers.modeling_outputs.BaseModelOutput"``, ...
    dtype, device, layout : str
        For a tensor, as torch writes them: ``"torch.float32"``, ``"cuda:0"``, ``"torch.strided"``.
    shape : tuple of int
        The shape of a tensor; for a container, a tuple of its length.
    nbytes : int
        Bytes of the tensor's elements.
    requires_grad : bool
        Whether a tensor requires gradients.
    stored : str
        The key of the tensor in the file: its own name, or the name of an earlier tensor with the
        same bytes.  ``""`` if the tensor is not in the file.
    value : object
        None, a bool, a number or a text; for other plain values (bytes, ...), a shortened `repr`.
    note : str
        Why something is missing or different: ``"meta: no values"``, ``"dropped: max_bytes"``, ...
    statistics : Statistics or None
        A tensor's statistics, if the capture computes them and the tensor has values.
    """

    name: str
    order: int
    call: int | None
    kind: Literal["tensor", "container", "plain"]
    type: str
    dtype: str = ""
    device: str = ""
    layout: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    requires_grad: bool = False
    stored: str = ""
    value: Any = None
    note: str = ""
    statistics: Statistics | None = None


def escape(text: str) -> str:
    """Escape a part of a name: ``/``, ``#`` and ``%`` become ``%2F``, ``%23`` and ``%25``.

    >>> escape("a/b"), escape("layers.0")
    ('a%2Fb', 'layers.0')
    """
    if text.isidentifier():
        return text
    return text.replace("%", "%25").replace("/", "%2F").replace("#", "%23")


def parse_name(name: str) -> Name:
    """Return the parts of a value's name; any other text raises ValueError.

    >>> parse_name("3/forward/layers.0.mlp#0/inputs/0")
    Name(step=3, phase='forward', module='layers.0.mlp', call=0, path=('inputs', '0'))
    """
    step, phase, module_call, *path = [*name.split("/"), "", ""][: max(3, name.count("/") + 1)]
    module, separator, call = module_call.rpartition("#")
    if phase not in PHASES or not separator or not (step.isdecimal() and call.isdecimal()):
        raise ValueError(
            f"{name!r} is not the name of a captured value, step/phase/module.path#call/argument, "
            f"where the phase is one of {', '.join(PHASES)}"
        )
    return Name(int(step), phase, unquote(module), int(call), tuple(map(unquote, path)))


def block_key(step: int, number: int) -> str:
    """Return the key of a block of records; `number` counts the blocks of a step from 0."""
    return f"{step}/records/{number}"


def is_block_key(key: object) -> bool:
    """Return whether a key of a capture's dict belongs to a block of records."""
    return isinstance(key, str) and "/records/" in key and key.split("/")[1] == "records"


def block_to_plain(calls: list[Row], values: list[Row]) -> dict[str, Any]:
    """Return the dict that is written to the file for a block of records."""
    return {
        "call_fields": CALL_FIELDS,
        "calls": calls,
        "value_fields": VALUE_FIELDS,
        "values": values,
    }


CALL_FIELDS = tuple(each.name for each in fields(CapturedCall) if each.compare)
VALUE_FIELDS = tuple(each.name for each in fields(CapturedValue))


# ----------------------------------------------------------------------------------------- totals

_WIDTH = 80
_MIN_CLASS_WIDTH = 12
_CLASS, _OUTPUTS = 0, 3  # columns that are cut if there is no room
_LEFT = {_CLASS, _OUTPUTS, 4}
_OUTPUT = "[^/]*/(?:forward|recompute)/[^/]*/outputs"


@dataclass(frozen=True)
class ClassSummary:
    """Totals of all calls of the modules of one class.

    Attributes
    ----------
    class_name : str
        Full name, ``"torch.nn.modules.linear.Linear"``.
    n_modules, n_calls, n_raised : int
        Numbers of modules that were called, of calls, and of calls that raised.
    shapes : tuple of tuple
        Shapes of tensors in outputs, each once, in the order of their first appearance.
    dtypes : tuple of str
        Dtypes of tensors in arguments, results and gradients, each once.
    n_tensors, nbytes : int
        Number of tensors in arguments, results and gradients, and the bytes of their elements.  A
        tensor counts each time that it is an argument or a result.
    n_nan, n_inf : int
        Numbers of NaN and infinite elements in these tensors; 0 if there are no statistics.
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
    """Totals of a capture; ``str()`` is a table whose lines have up to 80 characters.

    Attributes
    ----------
    path : str
        Name of the file.
    model : str
        Full name of the model's class.
    steps : tuple of int
        The steps that have records.
    n_calls, n_values : int
        Numbers of recorded calls, and of recorded values: arguments, results, gradients, parameters
        and containers.
    stored_nbytes : int or None
        Bytes of tensors in the file; None if the process was killed.
    n_dropped : int or None
        Number of tensors that were left out of the file; None if the process was killed.
    is_finished : bool
        Whether the capture was stopped.  If not, the process was killed.
    classes : tuple of ClassSummary
        The totals of each class of modules, in the order of the classes' first calls.
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
        """Return the totals as a dict of plain values, for ``json.dumps``."""
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
    is_output = re.compile(_OUTPUT).match
    outputs = [row for row in rows if is_output(row[_NAME])]
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
