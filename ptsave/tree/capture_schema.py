"""The records of a capture: which calls of modules there were, and the values of each.

A capture is an archive of one dict.  Beside tensors it holds plain dicts, tuples, numbers and text,
so that ``torch.load(..., weights_only=True)`` opens it; docs/format.md, "Captures", lists its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

__all__ = [
    "CALL_FIELDS",
    "FORMAT",
    "GRADIENT_PHASES",
    "HEADER",
    "PHASES",
    "SUMMARY",
    "VALUE_FIELDS",
    "VERSION",
    "CapturedCall",
    "CapturedValue",
    "Name",
    "Statistics",
    "block_key",
    "block_to_plain",
    "check_header",
    "escape",
    "is_block_key",
    "is_capture",
    "name_of",
    "parse_name",
]

FORMAT = "ptsave.capture"
VERSION = 1  # readers refuse a larger one
HEADER = "capture"  # the key of the header, the first entry
SUMMARY = "capture/end"  # the key of the totals, the last entry; a killed run has none

# In the order of a step.  A gradient belongs to the call whose value it is the gradient of.
PHASES = ("params", "forward", "recompute", "backward", "recompute_backward", "grads")
# Those of gradients with respect to the values of calls, and the phases of these calls.
GRADIENT_PHASES = {"backward": "forward", "recompute_backward": "recompute"}


class Name(NamedTuple):
    """The parts of ``step/phase/module.path#call/argument/path``.

    Attributes
    ----------
    step : int
        Number of the training step.
    phase : str
        One of `PHASES`.
    module : str
        Path of the module, as :meth:`torch.nn.Module.named_modules` says it, without the prefixes
        of wrappers such as ``module.`` (DDP); ``""`` is the model itself.
    call : int
        How many calls of this module came before in this step and phase.  For ``grads``, how many
        times the gradient of this parameter had been accumulated before.
    path : tuple of str
        ``("inputs", "0")``, ``("inputs", "mask")``, ``("outputs",)``, ``("outputs", "logits")``;
        for ``params`` and ``grads`` the name of the parameter, ``("weight",)``.  A key whose text
        is that of another one has its type, too: ``("outputs", "1:int")`` beside ``"1"``.
    """

    step: int
    phase: str
    module: str
    call: int
    path: tuple[str, ...]


class Statistics(NamedTuple):
    """Statistics of one tensor; all but the counts and the checksum are of its finite values.

    Attributes
    ----------
    numel : int
        Number of elements; of a sparse tensor, of its stored values.
    n_nan, n_inf, n_zero : int
        Elements that are NaN, infinite, zero.
    mean, std : float or complex
        Of the finite elements, accumulated in double precision; std is the square root of the
        unbiased variance.  NaN where there is nothing to divide by.  Only the mean of complex
        elements is complex.
    min, max : int or float
        Of the finite elements, exact; of complex ones, of their absolute values.  NaN if there is
        none.
    norm : float
        The L2 norm of the finite elements.
    checksum : int
        CRC-32 of the elements' bytes in row-major order, whatever the strides.
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
        Unique in the run, in the order in which the calls began.
    step, phase, module, call
        As in `Name`; the phase is ``forward``, or ``recompute`` where activation checkpointing
        runs a forward again during the backward.
    class_name : str
        The module's class, for example ``"torch.nn.modules.linear.Linear"``.
    order, end : int
        Numbers of the events of its beginning and its end; events of a run are counted from 0.
    parent : int or None
        `id` of the call that this one was made in, by the same thread.
    status : {"returned", "raised", "stopped", "unfinished"}
        "stopped" is a recomputation that ended early, when it had all that the backward needs;
        "unfinished" a call whose end no hook saw, because of a KeyboardInterrupt for example (its
        `end` is the beginning of the next call), or because the process was killed: of that one
        only its values are known.
    error : str
        Type and message of the exception of a call that raised.
    stack : tuple of str
        Where it was called, outermost first, as ``"file:line function"``; empty unless asked for.
    values : mapping of str to CapturedValue
        Arguments and results by their paths in the name, ``"inputs/0"`` or ``"outputs/logits"``,
        with the containers that they are in.  Only calls that were read have them.
    grads : mapping of str to CapturedValue
        Gradients with respect to `values`, by the same paths.
    inputs, outputs : list of CapturedValue
        The tensors in `values`.
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
        """The tensors among its arguments, also of nested ones, in their order."""
        return self._tensors("inputs")

    @property
    def outputs(self) -> list[CapturedValue]:
        """The tensors in its result: one, several of a tuple, none if it raised."""
        return self._tensors("outputs")

    def _tensors(self, root: str) -> list[CapturedValue]:
        return [
            value
            for path, value in self.values.items()
            if value.kind == "tensor" and path.partition("/")[0] == root
        ]


@dataclass(frozen=True)
class CapturedValue:
    """An argument, a result, a gradient or a parameter, or a container or plain value in one.

    Attributes
    ----------
    name : str
        ``step/phase/module.path#call/argument/path``; `parse_name` takes it apart.
    order : int
        Number of the event.
    call : int or None
        `id` of the call; None for ``params`` and ``grads``.
    kind : {"tensor", "container", "plain"}
        A container's elements follow as values of their own, with longer paths.
    type : str
        ``"Tensor"``, ``"tuple"``, ``"transformers.modeling_outputs.BaseModelOutput"``, ...
    dtype, device, layout : str
        Of a tensor, as torch writes them: ``"torch.float32"``, ``"cuda:0"``, ``"torch.strided"``.
    shape : tuple of int
        Of a tensor; of a container, its length alone.
    nbytes : int
        Bytes of the tensor's elements.
    requires_grad : bool
        Whether a tensor does.
    stored : str
        The key of the archive that holds the tensor: its own name, or that of an earlier one with
        the same bytes; ``""`` if it is not there.
    value : object
        A plain value: None, a bool, a number or a text; of anything else the `repr`, cut.
    note : str
        Why something is missing or different: ``"meta: no values"``, ``"dropped: memory"``, ...
    statistics : Statistics or None
        Of a tensor, if they were asked for and it has values.
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
    """Return a part of a name with ``/``, ``#`` and ``%`` as ``%2F``, ``%23`` and ``%25``.

    >>> escape("a/b"), escape("layers.0")
    ('a%2Fb', 'layers.0')
    """
    if text.isidentifier():
        return text
    return text.replace("%", "%25").replace("/", "%2F").replace("#", "%23")


def name_of(step: int, phase: str, module: str, call: int, path: Iterable[str]) -> str:
    """Return the name of a value.

    >>> name_of(3, "forward", "layers.0.mlp", 0, ("inputs", "0"))
    '3/forward/layers.0.mlp#0/inputs/0'
    """
    parts = (str(step), phase, f"{escape(module)}#{call}", *map(escape, path))
    return "/".join(parts)


def parse_name(name: str) -> Name:
    """Return the parts of a value's name.

    Raises
    ------
    ValueError
        If it is none.

    Examples
    --------
    >>> parse_name("3/forward/layers.0.mlp#0/inputs/0")
    Name(step=3, phase='forward', module='layers.0.mlp', call=0, path=('inputs', '0'))
    """
    step, phase, module_call, *path = [*name.split("/"), "", ""][: max(3, name.count("/") + 1)]
    module, separator, call = module_call.rpartition("#")
    if phase not in PHASES or not separator or not (step.isdecimal() and call.isdecimal()):
        raise ValueError(
            f"{name!r} names no captured value: it should be step/phase/module.path#call/argument, "
            f"where the phase is one of {', '.join(PHASES)}"
        )
    return Name(int(step), phase, unquote(module), int(call), tuple(map(unquote, path)))


def block_key(step: int, number: int) -> str:
    """Return the key of a block of records: a step has one or more, numbered from 0."""
    return f"{step}/records/{number}"


def is_block_key(key: object) -> bool:
    """Return whether a key of a capture's dict is that of a block of records."""
    return isinstance(key, str) and "/records/" in key and key.split("/")[1] == "records"


def block_to_plain(
    calls: Iterable[CapturedCall | tuple[Any, ...]],
    values: Iterable[CapturedValue | tuple[Any, ...]],
) -> dict[str, Any]:
    """Return a block of records as it is written: rows are tuples, in the order of the fields."""
    return {
        "call_fields": CALL_FIELDS,
        "calls": [_row(call) for call in calls],
        "value_fields": VALUE_FIELDS,
        "values": [_row(value) for value in values],
    }


def is_capture(obj: object) -> bool:
    """Return whether a loaded object is that of a capture, of whatever version."""
    header = dict.get(obj, HEADER) if isinstance(obj, dict) else None
    return isinstance(header, dict) and dict.get(header, "format") == FORMAT


def check_header(header: Mapping[str, Any], file: str) -> None:
    """Refuse a capture that a later ptsave has written in another way.

    Raises
    ------
    ValueError
        If its version is larger than this one.
    """
    if header["version"] > VERSION:
        raise ValueError(
            f"{file}: a capture of version {header['version']}, and this ptsave reads up to "
            f"{VERSION}: install a newer one"
        )


CALL_FIELDS = tuple(each.name for each in fields(CapturedCall) if each.compare)
VALUE_FIELDS = tuple(each.name for each in fields(CapturedValue))


def _row(record: Any) -> tuple[Any, ...]:
    if isinstance(record, tuple):
        return record
    row = {each.name: getattr(record, each.name) for each in fields(record) if each.compare}
    if row.get("statistics") is not None:
        row["statistics"] = tuple(row["statistics"])  # a named tuple is a class of its own
    return tuple(row.values())
