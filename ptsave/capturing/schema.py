"""The records of a capture: the calls of modules, and the values of each.

A capture is an archive of one dict. Beside tensors it holds only plain dicts, tuples, numbers and
text, so that ``torch.load(..., weights_only=True)`` opens it; docs/format.md, "Captures", lists its
keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

VERSION = 1  # readers refuse a larger one
SUMMARY = "capture/end"  # the key of the totals, the last entry; a killed run has none

Row = tuple[Any, ...]  # a record in the file

# In the order of a step.  A gradient with respect to a value belongs to the value's call.
PHASES = ("params", "forward", "recompute", "backward", "recompute_backward", "grads")
# Phases of gradients with respect to the values of calls, and the phases of these calls.
GRADIENT_PHASES = {"backward": "forward", "recompute_backward": "recompute"}


class Name(NamedTuple):
    """The parts of ``step/phase/module.path#call/argument/path``.

    `module` is the path in :meth:`torch.nn.Module.named_modules`, without the prefixes of wrappers
    such as ``module.`` (DDP); the model itself is ``""``. `call` is the number of earlier calls of
    the module in this step and phase. For ``grads`` it is the number of earlier accumulations of
    this parameter's gradient.

    `path` is ``("inputs", "0")``, ``("outputs",)`` or ``("outputs", "logits")``; for ``params`` and
    ``grads`` it is the name of the parameter, ``("weight",)``. A key with the same text as another
    key has its type, too: ``("outputs", "1:int")`` beside ``"1"``.
    """

    step: int
    phase: str
    module: str
    call: int
    path: tuple[str, ...]


class Statistics(NamedTuple):
    """Statistics of one tensor; all but the counts and the checksum are of its finite elements.

    Attributes
    ----------
    numel : int
        Number of elements; of a sparse tensor, of its stored values.
    n_nan, n_inf, n_zero : int
        Numbers of elements that are NaN, infinite, zero.
    mean, std : float or complex
        Accumulated in double precision; std is the square root of the unbiased variance.  NaN if
        there are too few elements.  The mean of complex elements is complex.
    min, max : int or float
        Exact; for complex elements, of their absolute values.  NaN if there are no elements.
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
        Unique in the run, in the order in which the calls began.
    step, phase, module, call
        As in a value's name.  The phase is ``forward``, or ``recompute`` where activation
        checkpointing runs a forward again during the backward.
    class_name : str
        The module's class, for example ``"torch.nn.modules.linear.Linear"``.
    order, end : int
        Numbers of the events of its beginning and its end; events of a run are counted from 0.
    parent : int or None
        `id` of the call that contains this one, in the same thread.
    status : {"returned", "raised", "stopped", "unfinished"}
        "stopped" is a recomputation that ended early, when it had all that the backward needs.
        "unfinished" is a call whose end no hook saw, for example because of a KeyboardInterrupt;
        its `end` is the beginning of the next call.  If the process was killed, only the call's
        values are known.
    error : str
        Type and message of the exception of a call that raised.
    stack : tuple of str
        Where it was called, outermost first, as ``"file:line function"``.  Empty unless asked for.
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
        """The tensors among its arguments, also nested ones, in their order."""
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
        Whether a tensor requires gradients.
    stored : str
        The archive's key that holds the tensor: its own name, or the name of an earlier tensor
        with the same bytes.  ``""`` if the archive does not hold it.
    value : object
        A plain value: None, a bool, a number or a text.  Other values are a shortened `repr`.
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


def parse_name(name: str) -> Name:
    """Return the parts of a value's name; any other text raises ValueError.

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
    """Return whether a key of a capture's dict belongs to a block of records."""
    return isinstance(key, str) and "/records/" in key and key.split("/")[1] == "records"


def block_to_plain(calls: list[Row], values: list[Row]) -> dict[str, Any]:
    """Return a block of records as it is written."""
    return {
        "call_fields": CALL_FIELDS,
        "calls": calls,
        "value_fields": VALUE_FIELDS,
        "values": values,
    }


def check_header(header: Mapping[str, Any], file: str) -> None:
    """Raise ValueError for a capture of a later version than this ptsave reads."""
    if header["version"] > VERSION:
        raise ValueError(
            f"{file}: a capture of version {header['version']}, and this ptsave reads up to "
            f"{VERSION}: install a newer one"
        )


CALL_FIELDS = tuple(each.name for each in fields(CapturedCall) if each.compare)
VALUE_FIELDS = tuple(each.name for each in fields(CapturedValue))
