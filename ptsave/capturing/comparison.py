"""`compare_captures`: how two captured runs differ, and where the first difference is."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ptsave.capturing.difference import TensorDifference, difference_of_rows
from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import CapturedValue, Statistics, parse_name
from ptsave.comparison.entries import TensorPair
from ptsave.comparison.moved_names import moved_names
from ptsave.comparison.numbers import Tolerance, checked_tolerance
from ptsave.comparison.tensors import (
    ComparedCheckpoint,
    cannot_compare,
    compare_tensors,
    dense_values,
    flat,
    opened_sides,
    threads_of_measure,
)
from ptsave.contents.captures import is_capture
from ptsave.contents.contents import Contents
from ptsave.sources.locations import position_kept
from ptsave.support.calls import pausing_garbage_collection, progress_bar
from ptsave.support.text import count_text

Kind = Literal[
    "numbers", "statistics", "shape", "layout", "type", "value", "not compared", "not comparable"
]
# Plain values of these types may differ: they say where and in what form a run was made.
_OF_THE_RUN = {"torch.device", "torch.dtype", "torch.layout"}
# Those of torch.testing.assert_close, and some for small floats.
_EXACT = Tolerance(0.0, 0.0)
_BY_DTYPE = {
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex32: Tolerance(1e-3, 1e-5),
    torch.complex64: Tolerance(1.3e-6, 1e-5),
    torch.complex128: Tolerance(1e-7, 1e-7),
    # torch has none for these: one unit in the last place, and the smallest number.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-10),
    torch.float8_e5m2: Tolerance(2**-2, 2**-16),
    torch.float8_e5m2fnuz: Tolerance(2**-2, 2**-17),
    torch.float8_e8m0fnu: Tolerance(1.0, 0.0),
    torch.float4_e2m1fn_x2: Tolerance(2**-1, 2**-1),
}


@dataclass(frozen=True, eq=False)
class CapturedDifference:
    """Two values of one name, and how they differ.

    Attributes
    ----------
    name : str
        ``step/phase/module.path#call/argument``, as in the run.
    kind : str
        ``"numbers"``: the elements were compared.  ``"statistics"``: these were compared, because
        one side has no elements.  ``"value"``: values that are no tensors were compared.
        ``"shape"``, ``"layout"``, ``"type"``: this differs; the lengths of containers are compared
        as ``"shape"``, too.  ``"not compared"``: one side has not even statistics.
        ``"not comparable"``: torch cannot compare the elements.
    equal : bool
        Whether they are equal, within the tolerance.
    a, b : CapturedValue
        Records of both.
    numbers : TensorDifference or None
        Counts and sizes, if their elements were compared.
    """

    name: str
    kind: Kind
    equal: bool
    a: CapturedValue
    b: CapturedValue
    numbers: TensorDifference | None = None

    @property
    def call(self) -> str:
        """The call: ``step/phase/module.path#call``."""
        return _call_of(self.name)

    @property
    def relative_error(self) -> float:
        """The largest distance, divided by the root mean square of b; by statistics if need be.

        inf if it is unknown: other shapes, or NaN on one side.
        """
        if self.numbers is not None:
            found = self.numbers
            return math.inf if found.n_nan_only_a or found.n_nan_only_b else found.relative_error
        if self.kind == "statistics" and self.a.statistics and self.b.statistics:
            return _statistics_error(self.a.statistics, self.b.statistics)
        return 0.0 if self.equal else math.inf


@dataclass
class CaptureComparison:
    """The differences of two captured runs.

    Attributes
    ----------
    compared : list of CapturedDifference
        All values that both have, equal or not, in the first run's order of execution.
    only_in_a, only_in_b : list of str
        Steps and calls that only one run has, and values that only one run has in a call of both.
        In order of execution.
    remarks : list of str
        Parts that were not compared, and differences that do not count.
    nbytes : int
        Bytes of the first run's tensors that were compared.
    incomparable : dict of str to str
        Names of values that cannot be compared, and why.  `compared` has them as equal.
    """

    compared: list[CapturedDifference] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    nbytes: int = 0
    incomparable: dict[str, str] = field(default_factory=dict)

    @property
    def differences(self) -> list[CapturedDifference]:
        """Values that differ by more than the tolerance."""
        return [each for each in self.compared if not each.equal]

    @property
    def first(self) -> CapturedDifference | None:
        """The first difference, in the first run's order of execution."""
        return next((each for each in self.compared if not each.equal), None)

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not (self.only_in_a or self.only_in_b or self.first)


def compare_captures(
    a: Any,
    b: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    step: int | None = None,
    recover: bool = False,
    progress: bool = False,
    a_storage_options: Mapping[str, Any] | None = None,
    b_storage_options: Mapping[str, Any] | None = None,
) -> CaptureComparison:
    """Compare two runs that :func:`ptsave.capture` has recorded, or one with a checkpoint.

    Values are aligned by step, phase, module, number of the call and argument.  So runs may differ
    in dtype, device, compilation and the order of their calls.  Tensors are read and compared in
    pieces, and the next pieces are read meanwhile.  This takes some 150 MiB of memory, however
    large the tensors are.  Where one run has only statistics, these are compared.

    Parameters
    ----------
    a, b : str, os.PathLike or file-like
        Two captures.  Or a capture and a checkpoint of any kind: its tensors are compared with the
        parameters of a step, by their names.
    rtol, atol : float, optional
        Numbers are equal if ``abs(a - b) <= atol + rtol * abs(b)``, and NaN equals any NaN.  The
        defaults are those of :func:`torch.testing.assert_close` for the coarser dtype, and one unit
        in the last place of 8-bit floats.  If only one is given, the other is 0.
    exact : bool, default False
        Whether only the same bits are equal; between two dtypes, the same values.
    step : int, optional
        Compare only this step.  Beside a checkpoint, the default is the first step.
    recover : bool, default False
        Whether to read leftovers of killed runs, as :func:`ptsave.open` does.
    progress : bool, default False
        Whether to show a progress bar.
    a_storage_options, b_storage_options : mapping, optional
        For the file systems of URLs, of a and of b.

    Returns
    -------
    CaptureComparison

    Raises
    ------
    ValueError
        If neither is a capture, they have no step in common, or a tolerance is negative.
    OSError, CorruptCheckpointError, pickle.UnpicklingError
        As :func:`ptsave.open`.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [os.path.join(folder, name) for name in ("a.pt", "b.pt")]
    ...     for path in paths:
    ...         with ptsave.capture(model, path, what=["inputs", "outputs"]):
    ...             _ = model(torch.ones(2, 4))
    ...         _ = model[2].bias.data.add_(1.0)
    ...     found = ptsave.compare_captures(*paths)
    >>> found.equal, found.first.name, round(found.first.numbers.max_abs, 3)
    (False, '0/forward/2#0/outputs', 1.0)
    """
    tolerances = Tolerances(rtol, atol, exact=exact)
    with position_kept(a), position_kept(b):
        opened = opened_sides(a, b, a_storage_options, b_storage_options, recover=recover)
        with pausing_garbage_collection():
            first, second = (CapturedSide(each, is_recovered=recover) for each in opened)
            result = CaptureComparison()
            pairs = _aligned(first, second, step, result)
            _compare(first, second, pairs, tolerances, result, progress)
        return result


def _aligned(
    a: CapturedSide, b: CapturedSide, step: int | None, result: CaptureComparison
) -> list[tuple[CapturedValue, CapturedValue]]:
    """Return the values that both sides have, in a's order; note the values of only one side."""
    if a.run is None or b.run is None:
        return _matched_parameters(a, b, step, result)
    steps = _common_steps(a, b, step, result)
    of_a, of_b = a.values_of(steps), b.values_of(steps)
    _note_names(a, b, alone(of_a, of_b), result.only_in_a, result)
    _note_names(b, a, alone(of_b, of_a), result.only_in_b, result)
    return [(value, of_b[name]) for name, value in of_a.items() if name in of_b]


def _common_steps(
    a: CapturedSide, b: CapturedSide, step: int | None, result: CaptureComparison
) -> set[int]:
    """Return the steps to compare; note the steps that only one side has."""
    of_a, of_b = a.steps, b.steps
    common = of_a & of_b if step is None else of_a & of_b & {step}
    if not common:
        wanted = "no step in common" if step is None else f"no step {step} in common"
        raise ValueError(
            f"{a.path} and {b.path} have {wanted}: their steps are {_numbers(of_a)} and "
            f"{_numbers(of_b)}"
        )
    if step is None:
        _note_names(a, b, _steps(of_a - of_b), result.only_in_a, result)
        _note_names(b, a, _steps(of_b - of_a), result.only_in_b, result)
    return common


def _steps(numbers: Iterable[int]) -> list[str]:
    return [f"step {number}" for number in sorted(numbers)]


def _numbers(steps: Iterable[int]) -> str:
    shown = sorted(steps)
    return ", ".join(map(str, shown[:8])) + (", ..." if len(shown) > 8 else "") or "none"


def _note_names(
    side: CapturedSide,
    other: CapturedSide,
    names: list[str],
    only: list[str],
    result: CaptureComparison,
) -> None:
    """Note the names of one side only: differences, or a remark if they were to be expected."""
    if not names:
        return
    if side.selection != other.selection:
        reason = "the captures were asked for different values"
    elif not other.is_complete:
        reason = f"the capture {other.path} was not completed"
    else:
        only.extend(names)
        return
    result.remarks.append(
        f"only in {side.path}, as {reason}: {', '.join(names[:3])}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    )


# ------------------------------------------------------------------------------------------- sides


class CapturedSide:
    """An open capture, or a checkpoint that is compared with one; a checkpoint has no `run`."""

    def __init__(self, contents: Contents, *, is_recovered: bool = False) -> None:
        self.source = ComparedCheckpoint(contents)
        self.path = contents.path
        is_run = is_capture(contents.obj)
        self.run = CapturedRun(contents.obj, contents.path) if is_run else None
        # A recovered run may lack tensors that its records have.
        self._stored = contents.obj.keys() if is_run and is_recovered else None

    @property
    def selection(self) -> Any:
        """The options of the capture that choose what is recorded."""
        header = {} if self.run is None else self.run.header
        return [header.get(name) for name in ("what", "include", "exclude", "steps")]

    @property
    def is_complete(self) -> bool:
        """Whether the capture was stopped rather than killed."""
        return self.run is None or self.run.totals is not None

    @cached_property
    def values(self) -> dict[str, CapturedValue]:
        """All values by their names, in the order of execution."""
        if self.run is None:
            return {}
        return {value.name: self._as_stored(value) for value in self.run.values()}

    def _as_stored(self, value: CapturedValue) -> CapturedValue:
        if self._stored is None or not value.stored or value.stored in self._stored:
            return value
        return replace(value, stored="", note="damaged")

    @cached_property
    def steps(self) -> set[int]:
        return {_step_of(name) for name in self.values}

    def values_of(self, steps: set[int]) -> dict[str, CapturedValue]:
        """Return the values of some steps."""
        if steps >= self.steps:
            return self.values
        return {name: value for name, value in self.values.items() if _step_of(name) in steps}

    def tensor(self, value: CapturedValue) -> Tensor:
        """Return the unread tensor of a stored value."""
        return self._tensors[value.stored] if self.run is None else self.run.tensor(value.name)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return flat(self.source.obj, self.path)

    def checkpoint_values(self) -> dict[str, CapturedValue]:
        """Return records of a checkpoint's tensors, by their names."""
        return {name: _record_of(name, tensor) for name, tensor in self._tensors.items()}


def _step_of(name: str) -> int:
    return int(name.partition("/")[0])


def _record_of(name: str, tensor: Tensor) -> CapturedValue:
    return CapturedValue(
        name,
        0,
        None,
        "tensor",
        type(tensor).__name__,
        dtype=str(tensor.dtype),
        device=str(tensor.device),
        layout=str(tensor.layout),
        shape=() if tensor.is_nested else tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.itemsize,
        requires_grad=tensor.requires_grad,
        stored=name,
    )


def alone(names: Iterable[str], others: Mapping[str, Any]) -> list[str]:
    """Return the calls that `others` lack, and the values that they lack in calls of both."""
    calls = {_call_of(name) for name in others}
    found = (
        name if _call_of(name) in calls else _call_of(name) for name in names if name not in others
    )
    return list(dict.fromkeys(found))


def _call_of(name: str) -> str:
    return "/".join(name.split("/", 3)[:3])


def _matched_parameters(
    a: CapturedSide, b: CapturedSide, step: int | None, result: CaptureComparison
) -> list[tuple[CapturedValue, CapturedValue]]:
    """Match the parameters of a run's step with the tensors of a checkpoint, by their names.

    Names may differ by a prefix, as in :func:`moved_names`.  Other tensors of the checkpoint are
    buffers, or an optimizer's: they give a remark.
    """
    captured, checkpoint = (a, b) if b.run is None else (b, a)
    if captured.run is None:
        raise ValueError(
            f"neither {a.path} nor {b.path} is a capture: ptsave.capture writes them; compare() "
            "and ptsave diff without --capture compare checkpoints"
        )
    parameters = _parameters_of(captured, step)
    tensors = checkpoint.checkpoint_values()
    names = {name: name for name in parameters if name in tensors}
    left = {name: value.shape for name, value in parameters.items() if name not in names}
    others = {name: value.shape for name, value in tensors.items() if name not in names}
    names |= moved_names(left, others)
    pairs = [(parameters[name], tensors[other]) for name, other in names.items()]
    pairs.sort(key=lambda pair: pair[0].order)
    missing = result.only_in_a if captured is a else result.only_in_b
    missing += [parameters[name].name for name in parameters if name not in names]
    n_others = len(tensors) - len(names)
    if n_others:
        result.remarks.append(
            f"not compared, as no parameters: {count_text(n_others, 'tensor')} of {checkpoint.path}"
        )
    return pairs if captured is a else [(y, x) for x, y in pairs]


def _parameters_of(side: CapturedSide, step: int | None) -> dict[str, CapturedValue]:
    """Return the parameters of a step by their names in a state dict."""
    found: dict[int, dict[str, CapturedValue]] = {}
    for name, value in side.values.items():
        parts = parse_name(name)
        if parts.phase == "params":
            of_step = found.setdefault(parts.step, {})
            of_step[".".join(filter(None, (parts.module, *parts.path)))] = value
    wanted = min(found, default=None) if step is None else step
    if wanted is None or wanted not in found:
        has = ", ".join(map(str, sorted(found)[:8])) or "no step"
        raise ValueError(
            f"{side.path} has no parameters of step {'0' if wanted is None else wanted}: it has "
            f'those of {has}; a capture with what=("params",) keeps them'
        )
    return found[wanted]


# ------------------------------------------------------------------------------------------ values


def _compare(  # noqa: PLR0917
    a: CapturedSide,
    b: CapturedSide,
    pairs: Sequence[tuple[CapturedValue, CapturedValue]],
    tolerances: Tolerances,
    result: CaptureComparison,
    progress: bool,
) -> None:
    compared, unread = _split(a, b, pairs, tolerances)
    result.nbytes = sum(pair.a.numel() * pair.a.itemsize for pair in unread.values())
    found = {}
    with progress_bar(progress, "comparing", result.nbytes, delay=1) as callback:
        measure = _Measure(tolerances)
        compared_pairs = compare_tensors(a.source, b.source, unread.values(), measure, callback)
        for key, (_, numbers) in zip(unread, compared_pairs, strict=True):
            found[key] = numbers
    for x, y in pairs:
        difference = compared.get(x.name)
        if difference is None:
            difference = _of_numbers(x, y, found[x.stored, y.stored], tolerances, result)
        if a.run is None:
            difference = replace(difference, name=y.name)
        result.compared.append(difference)
    n_left = sum(each.kind == "not compared" for each in result.compared)
    if n_left:
        result.remarks.append(
            f"not compared: {count_text(n_left, 'tensor')}, because one side has neither their "
            "values nor their statistics"
        )


def _of_numbers(
    x: CapturedValue,
    y: CapturedValue,
    numbers: TensorDifference,
    tolerances: Tolerances,
    result: CaptureComparison,
) -> CapturedDifference:
    """Return the difference of two values that were read, or of their statistics."""
    if not numbers.problem:
        equal = not (numbers.n_different if tolerances.exact else numbers.n_outside)
        return CapturedDifference(x.name, "numbers", equal, x, y, numbers)
    kind, equal = _by_statistics(x, y, tolerances)
    if kind == "not compared":
        kind = "not comparable"
        result.incomparable[x.name] = numbers.problem
    return CapturedDifference(x.name, kind, equal, x, y)


_Keys = tuple[str, str]


def _split(
    a: CapturedSide,
    b: CapturedSide,
    pairs: Iterable[tuple[CapturedValue, CapturedValue]],
    tolerances: Tolerances,
) -> tuple[dict[str, CapturedDifference], dict[_Keys, TensorPair]]:
    """Return the differences that the records show, and the pairs of tensors that must be read."""
    compared: dict[str, CapturedDifference] = {}
    unread: dict[_Keys, TensorPair] = {}  # an output is the next input: read once
    for x, y in pairs:
        if (x.stored, y.stored) in unread:
            continue
        kind, equal = _kind_by_records(x, y)
        if kind is None and x.stored and y.stored:
            pair = TensorPair(x.name, a.tensor(x), b.tensor(y))
            kind = _kind_by_tensors(pair)
            if kind is None:
                unread[x.stored, y.stored] = pair
                continue
        if kind is None:
            kind, equal = _by_statistics(x, y, tolerances)
        compared[x.name] = CapturedDifference(x.name, kind, equal, x, y)
    return compared, unread


def _kind_by_records(x: CapturedValue, y: CapturedValue) -> tuple[Kind | None, bool]:
    if x.kind != y.kind:
        return "type", False
    if x.kind == "tensor":
        return (None, False) if _same_shape(x.shape, y.shape) else ("shape", False)
    if x.kind == "container":
        return "shape", x.shape == y.shape
    if x.type != y.type and not {x.type, y.type} <= {"int", "float", "bool"}:
        return "type", False
    return "value", x.type in _OF_THE_RUN or _same_plain(x.value, y.value)


def _same_shape(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
    """Whether two shapes may be equal: each run has its own symbols for sizes of nested tensors."""
    return len(x) == len(y) and all(
        one == other or type(one) is type(other) is str for one, other in zip(x, y, strict=True)
    )


def _same_plain(x: object, y: object) -> bool:
    if isinstance(x, float) and isinstance(y, float) and math.isnan(x):
        return math.isnan(y)
    return x == y


def _kind_by_tensors(pair: TensorPair) -> Kind | None:
    """Return the kind of difference of tensors whose elements cannot be paired, or None."""
    if pair.a.is_nested or pair.b.is_nested:
        return "layout" if pair.a.is_nested != pair.b.is_nested else None
    if pair.a.shape != pair.b.shape:
        return "shape"
    return "layout" if pair.a.layout != pair.b.layout else None


def _by_statistics(x: CapturedValue, y: CapturedValue, tolerances: Tolerances) -> tuple[Kind, bool]:
    if x.statistics is None or y.statistics is None:
        return "not compared", True
    if x.dtype == y.dtype and x.statistics.checksum == y.statistics.checksum:
        return "statistics", True
    if tolerances.exact and x.dtype == y.dtype:
        return "statistics", False
    tolerance = tolerances.of(_dtype(x.dtype), _dtype(y.dtype))
    counts = all(
        getattr(x.statistics, name) == getattr(y.statistics, name)
        for name in ("numel", "n_nan", "n_inf")
    )
    near = all(
        _is_near(one, other, tolerance.rtol, tolerance.atol)
        for one, other in _figures(x.statistics, y.statistics)
    )
    return "statistics", counts and near


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bool


def _figures(a: Statistics, b: Statistics) -> Iterator[tuple[complex, complex]]:
    for name in ("mean", "std", "min", "max", "norm"):
        yield getattr(a, name), getattr(b, name)


def _is_near(a: complex, b: complex, rtol: float, atol: float) -> bool:
    if cmath.isnan(a) or cmath.isnan(b):
        return cmath.isnan(a) and cmath.isnan(b)
    return a == b or abs(a - b) <= atol + rtol * abs(b)


def _statistics_error(a: Statistics, b: Statistics) -> float:
    if (a.n_nan, a.n_inf, a.numel) != (b.n_nan, b.n_inf, b.numel):
        return math.inf
    rms = b.norm / math.sqrt(max(1, b.numel))
    figures = [pair for pair in _figures(a, b) if not any(map(cmath.isnan, pair))]
    largest = max(abs(x - y) for x, y in [*figures[:-1], (0.0, 0.0)])  # the last one is the norm
    return largest / rms if rms else math.inf if largest else 0.0


class Tolerances:
    """Chooses the tolerance of a pair of tensors.

    `rtol` and `atol` are for all dtypes; if only one is given, the other is 0.  With `exact`, only
    the same bits are equal.

    >>> Tolerances(None, None).of(torch.float32, torch.bfloat16)
    Tolerance(rtol=0.016, atol=1e-05)
    """

    def __init__(self, rtol: float | None, atol: float | None, *, exact: bool = False) -> None:
        self._given = checked_tolerance(rtol, atol)
        if exact and self._given is not None:
            raise ValueError("exact and a tolerance exclude each other: give one of them")
        self.exact = exact

    def of(self, a: torch.dtype, b: torch.dtype) -> Tolerance:
        """Return the larger tolerance of two dtypes."""
        if self.exact:
            return _EXACT
        if self._given is not None:
            return self._given
        of_a, of_b = _BY_DTYPE.get(a, _EXACT), _BY_DTYPE.get(b, _EXACT)
        return Tolerance(max(of_a.rtol, of_b.rtol), max(of_a.atol, of_b.atol))


class _Measure:
    """Finds the `TensorDifference` of two tensors."""

    def __init__(self, tolerances: Tolerances) -> None:
        self._tolerances = tolerances
        self._n_threads = threads_of_measure()

    def same(self, pair: TensorPair) -> TensorDifference | None:
        return None  # NaNs must be counted even if all bytes are the same

    def difference(
        self, pair: TensorPair, a: Tensor, b: Tensor, begin: Sequence[int]
    ) -> TensorDifference:
        try:
            found = self._of_nested(a, b) if a.is_nested else self._of_dense(a, b)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return TensorDifference(problem=str(cannot_compare(pair, a, b, error)))
        if a.layout != torch.strided or not begin:
            return found
        return found.moved(begin)

    def _of_nested(self, a: Tensor, b: Tensor) -> TensorDifference:
        parts = a.unbind(), b.unbind()
        sizes = [[list(part.shape) for part in side] for side in parts]
        if sizes[0] != sizes[1]:
            raise ValueError("their components have other shapes")
        total = TensorDifference()
        for i, (x, y) in enumerate(zip(*parts, strict=True)):
            found = self._of_dense(x, y)
            first = None if found.first is None else (i, *found.first)
            total += replace(found, first=first)
        return total

    def _of_dense(self, a: Tensor, b: Tensor) -> TensorDifference:
        x, y = dense_values(a, b)
        tolerance = self._tolerances.of(x.dtype, y.dtype)
        found = difference_of_rows(x, y, tolerance, self._n_threads)
        if found is None and x.dtype == y.dtype:  # no numbers: compare their bytes
            x, y = (each.contiguous().view(torch.uint8) for each in (x, y))
            found = difference_of_rows(x, y, tolerance)
        if found is None:
            raise TypeError("one of them has no numbers")
        return found
