"""`compare_captures`: finds the differences between two captured runs, in execution order."""

from __future__ import annotations

import cmath
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.capturing.run import CapturedRun, steps_text
from ptsave.capturing.schema import CapturedValue, Statistics, parse_name
from ptsave.comparison.entries import moved_names
from ptsave.comparison.tensors import (
    ComparedCheckpoint,
    TensorPair,
    Tolerance,
    cannot_compare,
    checked_tolerance,
    compare_tensors,
    dense_values,
    flat,
    opened_sides,
    rows_in_order,
    threads_of_measure,
)
from ptsave.contents.captures import is_capture
from ptsave.contents.contents import Contents
from ptsave.sources.locations import position_kept
from ptsave.support.calls import pausing_garbage_collection, progress_bar
from ptsave.support.text import count_text, some_of

Kind = Literal[
    "numbers", "statistics", "shape", "layout", "type", "value", "not compared", "not comparable"
]
# Values of these types may differ in equal runs, because they describe a run's device and format.
_OF_THE_RUN = {"torch.device", "torch.dtype", "torch.layout"}
# `_BY_DTYPE`: tolerances of torch.testing.assert_close, and additional ones for small floats.
_EXACT = Tolerance(0.0, 0.0)
_BY_DTYPE = {
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex32: Tolerance(1e-3, 1e-5),
    torch.complex64: Tolerance(1.3e-6, 1e-5),
    torch.complex128: Tolerance(1e-7, 1e-7),
    # torch has no tolerances for these: rtol is one unit in the last place, atol the least float.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-10),
    torch.float8_e5m2: Tolerance(2**-2, 2**-16),
    torch.float8_e5m2fnuz: Tolerance(2**-2, 2**-17),
    torch.float8_e8m0fnu: Tolerance(1.0, 0.0),
    torch.float4_e2m1fn_x2: Tolerance(2**-1, 2**-1),
}


@dataclass(frozen=True)
class TensorDifference:
    """How much two tensors differ; ``+`` combines the differences of two parts of the tensors.

    Attributes
    ----------
    numel : int
        Count of numbers in each of the two tensors.
    n_different : int
        Count of numbers with different bits or, between two dtypes, different values.
    n_outside : int
        Count of numbers outside the tolerance.
    n_nan_a, n_nan_b, n_inf_a, n_inf_b : int
        Counts of NaN and of infinities on each side.
    n_nan_only_a, n_nan_only_b : int
        Counts of NaN where the other side is not NaN.
    n_inf_mismatch : int
        Count of unequal pairs in which one or both numbers are infinite, and none is NaN.
    max_abs : int or float
        The largest ``abs(a - b)`` of all pairs without a NaN; exact for integers.
    max_rel : float
        The largest ``abs(a - b) / abs(b)``; inf if b is 0 and a is not.
    product, squares_a, squares_b : float
        Sums of a * b, a * a and b * b over all pairs of finite numbers.  In these sums, a is
        divided by 2**scale_a, and b by 2**scale_b.
    scale_a, scale_b : int
        0, unless squares would then overflow or underflow float64.
    ulps : tuple of int
        Counts of pairs whose distance is 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, ... units in the last
        place of the coarser dtype.  The 66th is for pairs with opposite signs, and pairs in which
        only one number is NaN or infinite.  Zeros at the end of the tuple are left out.
    first : tuple of int or None
        The index of the first number that differs, in the order of a's memory, or None.
        For nested tensors, the tuple begins with the index of the component.
    problem : str
        Why the numbers could not be compared; empty if they were.
    """

    numel: int = 0
    n_different: int = 0
    n_outside: int = 0
    n_nan_a: int = 0
    n_nan_b: int = 0
    n_inf_a: int = 0
    n_inf_b: int = 0
    n_nan_only_a: int = 0
    n_nan_only_b: int = 0
    n_inf_mismatch: int = 0
    max_abs: int | float = 0
    max_rel: float = 0.0
    product: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    scale_a: int = 0
    scale_b: int = 0
    ulps: tuple[int, ...] = ()
    first: tuple[int, ...] | None = None
    problem: str = ""

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the tensors, from all pairs of finite numbers.

        If these numbers are all 0 in both tensors, the cosine is 1.0; but if the tensors differ in
        a NaN or an infinity, it is NaN.  If they are all 0 in only one tensor, it is NaN.
        """
        if not self.n_different:
            return 1.0
        if self.squares_a == 0 == self.squares_b:
            is_zero = not (self.max_abs or self.n_nan_only_a or self.n_nan_only_b)
            return 1.0 if is_zero else math.nan
        norms = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        return max(-1.0, min(1.0, self.product / norms)) if 0 < norms < math.inf else math.nan

    @property
    def relative_error(self) -> float:
        """The largest distance `max_abs`, divided by the root mean square of b.

        Unlike `max_rel`, this error stays small if only numbers near zero differ a little.
        """
        if not self.max_abs:
            return 0.0
        rms = math.ldexp(math.sqrt(self.squares_b / max(1, self.numel)), self.scale_b)
        return self.max_abs / rms if rms else math.inf

    def __add__(self, other: TensorDifference) -> TensorDifference:
        scale_a = _common_scale(self.squares_a, self.scale_a, other.squares_a, other.scale_a)
        scale_b = _common_scale(self.squares_b, self.scale_b, other.squares_b, other.scale_b)
        products = map(
            operator.add, self._products(scale_a, scale_b), other._products(scale_a, scale_b)
        )
        return TensorDifference(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            **dict(zip(_PRODUCTS, products, strict=True)),
            scale_a=scale_a,
            scale_b=scale_b,
            max_abs=max(self.max_abs, other.max_abs),
            max_rel=max(self.max_rel, other.max_rel),
            ulps=tuple(map(sum, zip_longest(self.ulps, other.ulps, fillvalue=0))),
            first=self.first if self.first is not None else other.first,
            problem=self.problem or other.problem,
        )

    def _products(self, scale_a: int, scale_b: int) -> tuple[float, float, float]:
        """Return `product`, `squares_a` and `squares_b`, converted to these scales."""
        down_a, down_b = self.scale_a - scale_a, self.scale_b - scale_b
        return (
            math.ldexp(self.product, down_a + down_b),
            math.ldexp(self.squares_a, 2 * down_a),
            math.ldexp(self.squares_b, 2 * down_b),
        )

    def times(self, n: int) -> TensorDifference:
        """Return the total for `n` parts that all have this difference."""
        sums = {name: getattr(self, name) * n for name in (*_SUMS, *_PRODUCTS)}
        return replace(self, **sums, ulps=tuple(n * count for count in self.ulps))


_PRODUCTS = ("product", "squares_a", "squares_b")
_OTHERS = {*_PRODUCTS, "scale_a", "scale_b", "max_abs", "max_rel", "ulps", "first", "problem"}
_SUMS = [field.name for field in fields(TensorDifference) if field.name not in _OTHERS]


def _common_scale(squares: float, scale: int, other_squares: float, other_scale: int) -> int:
    """Return a common scale for two sums of squares; a sum of zero fits any scale."""
    if squares == 0:
        return other_scale
    return max(scale, other_scale) if other_squares else scale


@dataclass(frozen=True, eq=False)
class CapturedDifference:
    """Two values with the same name, and how they differ.

    Attributes
    ----------
    name : str
        The name of both values in their runs, ``step/phase/module.path#call/argument``.
    kind : str
        ``"numbers"``: the elements were compared.  ``"statistics"``: the statistics were compared,
        because one capture stored no elements.  ``"value"``: two plain values were compared.
        ``"shape"``: two tensors' shapes differ, or the lengths of two containers were compared.
        ``"layout"``, ``"type"``: this property differs.  ``"not compared"``: one side has neither
        elements nor statistics.  ``"not comparable"``: torch cannot compare the elements.
    equal : bool
        Whether the values are equal, within the tolerance.
    a, b : CapturedValue
        The records of the two values.
    numbers : TensorDifference or None
        Counts and sizes of the differences, if the elements were compared.
    """

    name: str
    kind: Kind
    equal: bool
    a: CapturedValue
    b: CapturedValue
    numbers: TensorDifference | None = None

    @property
    def call(self) -> str:
        """The name of the call, ``step/phase/module.path#call``."""
        return _call_of(self.name)

    @property
    def relative_error(self) -> float:
        """The largest distance, divided by the root mean square of b.

        If only statistics were compared, the distances of means, stds, minima and maxima count.
        The result is inf if the values differ, but have no distance: different shapes, for example.
        """
        if self.numbers is not None:
            found = self.numbers
            return math.inf if found.n_nan_only_a or found.n_nan_only_b else found.relative_error
        if self.kind == "statistics" and self.a.statistics and self.b.statistics:
            return _statistics_error(self.a.statistics, self.b.statistics)
        return 0.0 if self.equal else math.inf


@dataclass
class CaptureComparison:
    """The differences between two captured runs.

    Attributes
    ----------
    compared : list of CapturedDifference
        All values that both runs have, equal or not, in the first run's order of execution.
    only_in_a, only_in_b : list of str
        Steps, calls and values that only one run has, in order of execution.  If a step or call is
        listed, its values are not listed.
    remarks : list of str
        Texts about parts that were not compared, and about differences that `equal` ignores.
    nbytes : int
        Bytes of the first run's tensors that were compared.
    incomparable : dict of str to str
        By name: why a value cannot be compared.  `equal` ignores all these values.
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
        """The first difference in the first run's order of execution, or None."""
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
    """Compare two runs that :func:`ptsave.capture` has recorded, or a run with a checkpoint.

    Values are matched by step, phase, module, call number and argument.  So runs may differ in
    dtype, device, compilation and the order of their calls.  Tensors are read and compared in
    pieces: while some pieces are compared, the next ones are read.  This takes about 150 MiB of
    memory for tensors of any size.  If one run has only statistics, the statistics are compared.

    Parameters
    ----------
    a, b : str, os.PathLike or file-like
        Two captures, or a capture and a checkpoint of any kind.  The checkpoint's tensors are
        compared with the run's parameters of the same names, in one step.
    rtol, atol : float, optional
        Numbers are equal if ``abs(a - b) <= atol + rtol * abs(b)``, and NaN equals any NaN.  The
        defaults are those of :func:`torch.testing.assert_close` for the coarser dtype.  For 8-bit
        floats, they allow one ULP.  If only one tolerance is given, the other is 0.
    exact : bool, default False
        Whether equal numbers must have the same bits or, between two dtypes, the same values.
    step : int, optional
        Compare only this step.  The default is all steps or, with a checkpoint, the first one.
    recover : bool, default False
        Whether to read unfinished files of killed runs, as :func:`ptsave.open` does.
    progress : bool, default False
        Whether to show a progress bar.
    a_storage_options, b_storage_options : mapping, optional
        Options for the file systems of a and b, if these are URLs.

    Returns
    -------
    CaptureComparison

    Raises
    ------
    ValueError
        If neither a nor b is a capture, they have no common step, or a tolerance is negative.
    OSError, CorruptCheckpointError, pickle.UnpicklingError
        If :func:`ptsave.open` raises it.

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
            first, second = (_Side(each, is_recovered=recover) for each in opened)
            return _Comparison(first, second, tolerances).result_of(step, progress=progress)


_Pairs: TypeAlias = list[tuple[CapturedValue, CapturedValue]]
_Keys: TypeAlias = tuple[str, str]


class _Comparison:
    """Compares the values of two files, and collects the result."""

    def __init__(self, a: _Side, b: _Side, tolerances: Tolerances) -> None:
        self._a = a
        self._b = b
        self._tolerances = tolerances
        self._result = CaptureComparison()

    def result_of(self, step: int | None, *, progress: bool) -> CaptureComparison:
        """Compare one step; None means all steps or, with a checkpoint, the first one."""
        result = self._result
        are_runs = self._a.run is not None and self._b.run is not None
        pairs = self._aligned(step) if are_runs else self._matched_parameters(step)
        compared, unread = self._split(pairs)
        result.nbytes = sum(pair.a.numel() * pair.a.itemsize for pair in unread.values())
        with progress_bar(progress, "comparing", result.nbytes, delay=1) as callback:
            sources, measure = (self._a.source, self._b.source), _Measure(self._tolerances)
            measured = compare_tensors(*sources, unread.values(), measure, callback)
            found = {key: numbers for key, (_, numbers) in zip(unread, measured, strict=True)}
        for x, y in pairs:
            difference = compared.get(x.name)
            if difference is None:
                difference = self._of_numbers(x, y, found[x.stored, y.stored])
            if self._a.run is None:
                difference = replace(difference, name=y.name)
            result.compared.append(difference)
        n_left = sum(each.kind == "not compared" for each in result.compared)
        if n_left:
            result.remarks.append(
                f"not compared: {count_text(n_left, 'tensor')}, because one side has neither their "
                "values nor their statistics"
            )
        return result

    # ----------------------------------------------------------------------------------- pairs

    def _aligned(self, step: int | None) -> _Pairs:
        """Return pairs of values that both runs have, in a's order; note all other values."""
        steps = self._common_steps(step)
        of_a, of_b = self._a.values_of(steps), self._b.values_of(steps)
        self._note_alone(_alone(of_a, of_b), _alone(of_b, of_a))
        return [(value, of_b[name]) for name, value in of_a.items() if name in of_b]

    def _common_steps(self, step: int | None) -> set[int]:
        """Return the steps to compare; note the steps that only one run has."""
        a, b = self._a, self._b
        common = a.steps & b.steps if step is None else a.steps & b.steps & {step}
        if not common:
            wanted = "no step in common" if step is None else f"no step {step} in common"
            raise ValueError(
                f"{a.path} and {b.path} have {wanted}: their steps are {steps_text(a.steps)} and "
                f"{steps_text(b.steps)}"
            )
        if step is None:
            of_one = a.steps - b.steps, b.steps - a.steps
            self._note_alone(*([f"step {number}" for number in sorted(each)] for each in of_one))
        return common

    def _note_alone(self, in_a: list[str], in_b: list[str]) -> None:
        """Add names of one run to `only_in_a` or `only_in_b`; if a reason is known, to a remark."""
        for side, other, names, only in (
            (self._a, self._b, in_a, self._result.only_in_a),
            (self._b, self._a, in_b, self._result.only_in_b),
        ):
            if side.selection != other.selection:
                reason = "the captures have different options"
            elif not other.is_complete:
                reason = f"the capture {other.path} was not completed"
            else:
                only.extend(names)
                continue
            if names:
                listed = some_of(names, 3)
                self._result.remarks.append(f"only in {side.path}, because {reason}: {listed}")

    def _matched_parameters(self, step: int | None) -> _Pairs:
        """Match the parameters of a run's step with the tensors of a checkpoint, by their names.

        Names match despite other prefixes (`moved_names`).  A remark counts the checkpoint's
        other tensors, such as buffers and an optimizer's state.
        """
        a, b, result = self._a, self._b, self._result
        captured, checkpoint = (a, b) if b.run is None else (b, a)
        if captured.run is None:
            raise ValueError(
                f"neither {a.path} nor {b.path} is a capture (a file of ptsave.capture); to "
                "compare checkpoints, use compare(), or ptsave diff without --capture"
            )
        parameters, tensors = captured.parameters(step), checkpoint.checkpoint_values()
        names = {name: name for name in parameters if name in tensors}
        left = {name: value.shape for name, value in parameters.items() if name not in names}
        others = {name: value.shape for name, value in tensors.items() if name not in names}
        names |= moved_names(left, others)
        pairs = [(parameters[name], tensors[other]) for name, other in names.items()]
        pairs.sort(key=lambda pair: pair[0].order)
        missing = result.only_in_a if captured is a else result.only_in_b
        missing += [parameters[name].name for name in parameters if name not in names]
        if n_others := len(tensors) - len(names):
            result.remarks.append(
                f"not compared: {count_text(n_others, 'tensor')} of {checkpoint.path}, because not "
                "parameters"
            )
        return pairs if captured is a else [(y, x) for x, y in pairs]

    # ---------------------------------------------------------------------------------- values

    def _split(
        self, pairs: _Pairs
    ) -> tuple[dict[str, CapturedDifference], dict[_Keys, TensorPair]]:
        """Return the differences known from the records alone, and the pairs of tensors to read."""
        compared: dict[str, CapturedDifference] = {}
        unread: dict[_Keys, TensorPair] = {}  # an output that is the next call's input is read once
        for x, y in pairs:
            if (x.stored, y.stored) in unread:
                continue
            kind, equal = _kind_by_records(x, y)
            if kind is None and x.stored and y.stored:
                pair = TensorPair(x.name, self._a.tensor(x), self._b.tensor(y))
                kind = _kind_by_tensors(pair)
                if kind is None:
                    unread[x.stored, y.stored] = pair
                    continue
            if kind is None:
                kind, equal = self._by_statistics(x, y)
            compared[x.name] = CapturedDifference(x.name, kind, equal, x, y)
        return compared, unread

    def _of_numbers(
        self, x: CapturedValue, y: CapturedValue, numbers: TensorDifference
    ) -> CapturedDifference:
        """Return how two tensors differ or, if `numbers` has a `problem`, how statistics differ."""
        if not numbers.problem:
            equal = not (numbers.n_different if self._tolerances.exact else numbers.n_outside)
            return CapturedDifference(x.name, "numbers", equal, x, y, numbers)
        kind, equal = self._by_statistics(x, y)
        if kind == "not compared":
            kind = "not comparable"
            self._result.incomparable[x.name] = numbers.problem
        return CapturedDifference(x.name, kind, equal, x, y)

    def _by_statistics(self, x: CapturedValue, y: CapturedValue) -> tuple[Kind, bool]:
        if x.statistics is None or y.statistics is None:
            return "not compared", True
        if x.dtype == y.dtype and x.statistics.checksum == y.statistics.checksum:
            return "statistics", True
        if self._tolerances.exact and x.dtype == y.dtype:
            return "statistics", False
        tolerance = self._tolerances.of(_dtype(x.dtype), _dtype(y.dtype))
        equal = _counts(x.statistics) == _counts(y.statistics) and all(
            _is_near(one, other, tolerance) for one, other in _figures(x.statistics, y.statistics)
        )
        return "statistics", equal


# ------------------------------------------------------------------------------------------- sides


class _Side:
    """An open capture, or a checkpoint to compare with one; for a checkpoint, `run` is None."""

    def __init__(self, contents: Contents, *, is_recovered: bool = False) -> None:
        self.source = ComparedCheckpoint(contents)
        self.path = contents.path
        is_run = is_capture(contents.obj)
        self.run = CapturedRun(contents.obj, contents.path) if is_run else None
        # A recovered run may lack tensors that its records name.
        self._stored = contents.obj.keys() if is_run and is_recovered else None

    @property
    def selection(self) -> Any:
        """The options that chose what the capture recorded."""
        header = {} if self.run is None else self.run.header
        return [header.get(name) for name in ("what", "include", "exclude", "steps")]

    @property
    def is_complete(self) -> bool:
        """Whether the capture was stopped, not killed; True for a checkpoint."""
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
        """Return the values of these steps."""
        if steps >= self.steps:
            return self.values
        return {name: value for name, value in self.values.items() if _step_of(name) in steps}

    def tensor(self, value: CapturedValue) -> Tensor:
        """Return the tensor of a stored value, without reading its elements."""
        return self._tensors[value.stored] if self.run is None else self.run.tensor(value.name)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return flat(self.source.obj, self.path)

    def parameters(self, step: int | None) -> dict[str, CapturedValue]:
        """Return the parameters of `step` (None: the first step with any), by state-dict name."""
        found: dict[int, dict[str, CapturedValue]] = {}
        for name, value in self.values.items():
            parts = parse_name(name)
            if parts.phase == "params":
                of_step = found.setdefault(parts.step, {})
                of_step[".".join(filter(None, (parts.module, *parts.path)))] = value
        wanted = min(found, default=0) if step is None else step
        if wanted not in found:
            raise ValueError(
                f"{self.path} has no parameters of step {wanted}; steps with parameters: "
                f'{steps_text(found)}. capture(what=("params",)) records parameters'
            )
        return found[wanted]

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


def _alone(names: Iterable[str], others: Mapping[str, Any]) -> list[str]:
    """Return the names that `others` lacks; if it lacks a whole call, only the call's name."""
    calls = {_call_of(name) for name in others}
    found = (
        name if _call_of(name) in calls else _call_of(name) for name in names if name not in others
    )
    return list(dict.fromkeys(found))


def _call_of(name: str) -> str:
    return "/".join(name.split("/", 3)[:3])


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
    """Return whether two shapes match; any two symbolic sizes of nested tensors match."""
    return len(x) == len(y) and all(
        one == other or type(one) is type(other) is str for one, other in zip(x, y, strict=True)
    )


def _same_plain(x: object, y: object) -> bool:
    if isinstance(x, float) and isinstance(y, float) and math.isnan(x):
        return math.isnan(y)
    return x == y


def _kind_by_tensors(pair: TensorPair) -> Kind | None:
    """Return the kind of difference, or None if the elements can be compared in pairs."""
    if pair.a.is_nested or pair.b.is_nested:
        return "layout" if pair.a.is_nested != pair.b.is_nested else None
    if pair.a.shape != pair.b.shape:
        return "shape"
    return "layout" if pair.a.layout != pair.b.layout else None


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bool


def _figures(a: Statistics, b: Statistics) -> Iterator[tuple[complex, complex]]:
    for name in ("mean", "std", "min", "max", "norm"):
        yield getattr(a, name), getattr(b, name)


def _counts(found: Statistics) -> tuple[int, int, int]:
    return found.numel, found.n_nan, found.n_inf


def _is_near(a: complex, b: complex, tolerance: Tolerance) -> bool:
    if cmath.isnan(a) or cmath.isnan(b):
        return cmath.isnan(a) and cmath.isnan(b)
    return a == b or abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)


def _statistics_error(a: Statistics, b: Statistics) -> float:
    if _counts(a) != _counts(b):
        return math.inf
    rms = b.norm / math.sqrt(max(1, b.numel))
    figures = [pair for pair in _figures(a, b) if not any(map(cmath.isnan, pair))]
    largest = max(abs(x - y) for x, y in [*figures[:-1], (0.0, 0.0)])  # the last one is the norm
    return largest / rms if rms else math.inf if largest else 0.0


class Tolerances:
    """Chooses the tolerance of a pair of tensors.

    `rtol` and `atol` are for all dtypes; if only one is given, the other is 0.  With `exact`,
    numbers are equal only if they have the same bits or, between two dtypes, the same values.

    >>> Tolerances(None, None).of(torch.float32, torch.bfloat16)
    Tolerance(rtol=0.016, atol=1e-05)
    """

    def __init__(self, rtol: float | None, atol: float | None, *, exact: bool = False) -> None:
        self._given = checked_tolerance(rtol, atol)
        if exact and self._given is not None:
            raise ValueError("exact cannot be combined with a tolerance: pass one of them")
        self.exact = exact

    def of(self, a: torch.dtype, b: torch.dtype) -> Tolerance:
        """Return the tolerance for two dtypes; by default, the larger rtol and atol of both."""
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
        if begin and found.first is not None:
            return replace(found, first=tuple(map(operator.add, begin, found.first)))
        return found

    def _of_nested(self, a: Tensor, b: Tensor) -> TensorDifference:
        parts = a.unbind(), b.unbind()
        sizes = [[list(part.shape) for part in side] for side in parts]
        if sizes[0] != sizes[1]:
            raise ValueError("the components have different shapes")
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
        if found is None and x.dtype == y.dtype:  # not numbers: compare the bytes
            x, y = (each.contiguous().view(torch.uint8) for each in (x, y))
            found = difference_of_rows(x, y, tolerance)
        if found is None:
            raise TypeError("the elements of one tensor are not numbers")
        return found


def difference_of_rows(
    a: Tensor, b: Tensor, tolerance: Tolerance, n_threads: int = 1
) -> TensorDifference | None:
    """Compare two strided CPU tensors of the same shape, but of any dtypes, in one pass.

    Two NaNs are within any tolerance.  Returns None if a dtype is quantized, or is only bits
    (torch.bits8, ...).  Raises ValueError if the shapes differ, or if only one dtype is
    torch.float4_e2m1fn_x2.
    """
    if a.shape != b.shape:
        raise ValueError(f"tensors of {list(a.shape)} and {list(b.shape)} cannot be compared")
    x, y, dims = rows_in_order(a.detach(), b.detach())
    found = _C.tensor_difference(x, y, tolerance.rtol, tolerance.atol, n_threads)
    if found is None:
        return None
    first = found.pop("first_different")
    ulps = found.pop("ulps")
    n_used = max((i + 1 for i, count in enumerate(ulps) if count), default=0)
    return TensorDifference(
        **found, ulps=ulps[:n_used], first=_index(first, a, dims) if found["n_different"] else None
    )


def _index(flat: int, a: Tensor, dims: list[int]) -> tuple[int, ...]:
    """Convert a position in the order of memory to an index of the tensor."""
    if a.dtype == torch.float4_e2m1fn_x2:  # two numbers in an element
        flat //= 2
    index = [0] * len(dims)
    for dim in reversed(dims):
        flat, index[dim] = divmod(flat, a.shape[dim])
    return tuple(index)
