"""Reads the calls and values of a capture, and computes statistics of tensors.

Records are read as tuples and checked column by column, because creating an object for each of
100,000 calls takes longer. Objects are created when a caller asks for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ptsave.capturing.schema import (
    CALL_FIELDS,
    GRADIENT_PHASES,
    PHASES,
    SUMMARY,
    VALUE_FIELDS,
    VERSION,
    CapturedCall,
    CapturedValue,
    CaptureSummary,
    Row,
    Statistics,
    class_summary,
    is_block_key,
    parse_name,
)
from ptsave.capturing.tensors import local_values, statistics_of
from ptsave.contents.captures import HEADER
from ptsave.errors import CorruptCheckpointError, EntryNotFoundError
from ptsave.support import config
from ptsave.tree.containers import is_tensor
from ptsave.tree.tree import entry_not_found

if TYPE_CHECKING:
    from torch import Tensor

    from ptsave.contents.contents import Contents
    from ptsave.inspection.reports import FileListing

_CALL_PHASES = frozenset(GRADIENT_PHASES.values())
_STEP, _MODULE, _CLASS = map(CALL_FIELDS.index, ("step", "module", "class_name"))
_NAME, _CALL, _KIND, _DTYPE, _SHAPE, _NBYTES, _NOTE, _STATISTICS = map(
    VALUE_FIELDS.index,
    ("name", "call", "kind", "dtype", "shape", "nbytes", "note", "statistics"),
)


class CapturedRun:
    """The calls and values of a capture; `obj` is its file's dict, where tensors may be unread.

    docs/format.md lists the fields of `header`. `totals` is None if the process was killed before
    the capture ended. A capture of a later format version raises ValueError; damaged records raise
    CorruptCheckpointError. If it is unknown whether `obj` is a capture, use `captured_run`.
    """

    def __init__(self, obj: Any, path: str) -> None:
        self.path = path
        self._obj = self._dict_of(obj)
        self.header: dict[str, Any] = self._dict_of(self._obj[HEADER], {})
        self._check_version()
        self.totals = self._dict_of(self._obj.get(SUMMARY))
        self.blocks = {key: value for key, value in self._obj.items() if is_block_key(key)}
        if not self.blocks and not isinstance(self.header.get("modules"), dict):
            raise self._damaged("there are no records, and the header lists no modules")
        self.call_rows: list[Row] = []
        self.value_rows: list[Row] = []
        for key, block in self.blocks.items():
            self.call_rows += self._rows(key, block, "call", CALL_FIELDS, _CALL_DEFAULTS)
            self.value_rows += self._rows(key, block, "value", VALUE_FIELDS, _VALUE_DEFAULTS)
        self.value_rows.sort(key=itemgetter(VALUE_FIELDS.index("order")))
        self._check_ids()

    @property
    def model(self) -> str:
        """The full name of the model's class."""
        found = self.header.get("model")
        return found if type(found) is str else ""

    @cached_property
    def modules(self) -> dict[str, str]:
        """A dict from the path of each captured module to the name of its class."""
        found = self._dict_of(self.header.get("modules"), {})
        return {path: name for path, name in found.items() if type(path) is type(name) is str}

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that have records."""
        texts = {row[_NAME].partition("/")[0] for row in self.value_rows}
        found = {*map(int, texts), *(row[CALL_FIELDS.index("step")] for row in self.call_rows)}
        return tuple(sorted(found))

    def total(self, name: str) -> int | None:
        """Return a total that the capture wrote at its end, or None if it is missing."""
        found = (self.totals or {}).get(name)
        return found if type(found) is int and 0 <= found < 1 << 64 else None

    def calls(self) -> list[CapturedCall]:
        """Return all calls, in the order in which they began."""
        return list(self._calls)

    def values(self, phase: str | None = None, step: int | None = None) -> Iterator[CapturedValue]:
        """Yield all values (of `phase` and `step`, if given), in the order of their capture."""
        for row in self.value_rows:
            if phase is not None or step is not None:
                of_step, of_phase, _ = row[_NAME].split("/", 2)
                if phase not in (None, of_phase) or step not in (None, int(of_step)):
                    continue
            yield _value_of(row)

    def value(self, name: str) -> CapturedValue:
        """Return the value called `name`, or raise EntryNotFoundError with similar names."""
        row = self._by_name.get(name)
        if row is None:
            raise entry_not_found(self.path, name, self._by_name)
        return _value_of(row)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of the value called `name`, as it is in the loaded dict.

        Raises TypeError if the value is not a tensor, EntryNotFoundError if the capture left it
        out, and CorruptCheckpointError if the file should contain it, but does not.
        """
        value = self.value(name)
        if value.kind != "tensor":
            raise TypeError(f"{self.path}: {name!r} is not a tensor, but a {value.type}")
        if not value.stored:
            reason = value.note or "the capture was made with tensors=False"
            raise EntryNotFoundError(
                f"{self.path}: the tensor {name!r} is not in the file ({reason})"
            )
        tensor = self._obj.get(value.stored)
        if not is_tensor(tensor):
            raise self._damaged(f"the tensor {value.stored!r} of {name!r} is missing")
        return tensor

    def summary(self) -> CaptureSummary:
        """Return the totals of the run, and of each class of modules."""
        calls = self.calls()
        classes: dict[str, list[CapturedCall]] = {}
        for call in calls:
            classes.setdefault(call.class_name, []).append(call)
        class_of = {call.id: call.class_name for call in calls}
        tensors: dict[str | None, list[Row]] = {}
        for row in self.value_rows:
            if row[_KIND] == "tensor":
                tensors.setdefault(class_of.get(row[_CALL]), []).append(row)
        return CaptureSummary(
            self.path,
            self.model,
            self.steps,
            len(calls),
            len(self.value_rows),
            self.total("stored_nbytes"),
            self.total("dropped"),
            self.totals is not None,
            tuple(class_summary(name, of, tensors.get(name, [])) for name, of in classes.items()),
        )

    # -------------------------------------------------------------------------------- views

    @cached_property
    def _calls(self) -> list[CapturedCall]:
        groups: dict[int | None, list[Row]] = {}
        for row in self.value_rows:
            groups.setdefault(row[_CALL], []).append(row)
        calls = [_call_of(row, groups.pop(row[0], ())) for row in self.call_rows]
        groups.pop(None, None)
        if groups:  # calls that were not finished when the process was killed
            calls += filter(None, map(self._unfinished, groups.values()))
        calls.sort(key=lambda call: call.order)
        return calls

    def _unfinished(self, rows: list[Row]) -> CapturedCall | None:
        """Make a call that has no record from its values' rows; None if they belong to no call."""
        values = list(map(_value_of, rows))
        name = parse_name(values[0].name)
        phase = GRADIENT_PHASES.get(name.phase, name.phase)
        if phase not in _CALL_PHASES:
            return None
        class_name = self.modules.get(name.module, "")
        order, end = values[0].order, values[-1].order
        call_id = rows[0][_CALL]
        return _call_of(
            (
                *(call_id, name.step, phase, name.module, name.call, class_name),
                *(order, end, None, "unfinished", "", ()),
            ),
            rows,
        )

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row[_NAME]: row for row in self.value_rows}

    # ------------------------------------------------------------------------------- checks

    def _damaged(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path}: the capture is damaged: {reason}", path=self.path, record="data.pkl"
        )

    def _check_version(self) -> None:
        version = self.header.get("version")
        if type(version) is not int:
            raise self._damaged(f"the version is {type(version).__name__}, not int")
        if version > VERSION:
            raise ValueError(
                f"{self.path}: the capture has version {version}, but this ptsave reads only "
                f"versions up to {VERSION}: install a newer ptsave"
            )

    def _dict_of(self, value: Any, default: Any = None) -> Any:
        """Return a dict's items as a plain dict, or `default`; never call a subclass's methods."""
        return dict(dict.items(value)) if isinstance(value, dict) else default

    def _rows(
        self, key: str, block: Any, kind: str, known: tuple[str, ...], defaults: dict[str, Any]
    ) -> Sequence[Row]:
        """Return the rows of a block; each row has the fields `known`, in this order."""
        block = self._dict_of(block, {})
        names, rows = block.get(f"{kind}_fields"), block.get(f"{kind}s")
        if type(names) is not tuple or type(rows) is not list or not _are_texts(names):
            raise self._damaged(f"{key!r} has no list of {kind}s with the names of their fields")
        if set(map(type, rows)) - {tuple} or set(map(len, rows)) - {len(names)}:
            raise self._damaged(f"{key!r}: the {kind}s are not tuples of {len(names)} fields")
        if names != known:
            missing = [name for name in known if name not in names and name not in defaults]
            if missing:
                raise self._damaged(f"{key!r}: the {kind}s have no {', '.join(missing)}")
            filled = [{**defaults, **dict(zip(names, row, strict=True))} for row in rows]
            rows = [tuple(row[name] for name in known) for row in filled]
        for name, column in zip(known, zip(*rows, strict=True), strict=False):
            if not _is_column_right(kind, name, column):
                raise self._damaged(f"{key!r}: a {kind} has a wrong {name}")
        return rows

    def _check_ids(self) -> None:
        ids = set(map(itemgetter(0), self.call_rows))
        if len(ids) < len(self.call_rows):
            raise self._damaged("two calls have the same id")
        parent = CALL_FIELDS.index("parent")
        if any(row[parent] is not None and row[parent] >= row[0] for row in self.call_rows):
            raise self._damaged("a call began before the call that contains it")


class _Values(Mapping[str, CapturedValue]):
    """The values of a call by their paths; the first access creates them."""

    def __init__(self, rows: Sequence[Row], phases: Iterable[str]) -> None:
        self._rows = rows
        self._phases = phases

    @cached_property
    def _by_path(self) -> dict[str, CapturedValue]:
        found = {}
        for row in self._rows:
            _, phase, _, path = row[_NAME].split("/", 3)
            if phase in self._phases:
                found[path] = _value_of(row)
        return found

    def __getitem__(self, path: str) -> CapturedValue:
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

    def __repr__(self) -> str:
        return repr(self._by_path)


def _call_of(row: Row, values: Sequence[Row]) -> CapturedCall:
    make: Any = CapturedCall  # its fields are a row's fields, then the values
    return make(*row, _Values(values, _CALL_PHASES), _Values(values, GRADIENT_PHASES))  # type: ignore[no-any-return]


def _value_of(row: Row) -> CapturedValue:
    found = row[_STATISTICS]
    if found is not None:
        row = (*row[:_STATISTICS], Statistics(*found[: len(Statistics._fields)]))
    return CapturedValue(*row)


def _defaults_of(kind: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING}


_CALL_DEFAULTS = _defaults_of(CapturedCall)
_VALUE_DEFAULTS = _defaults_of(CapturedValue)


# ------------------------------------------------------------------------------------------ types

_NAME_PATTERN = re.compile(rf"[0-9]{{1,18}}/(?:{'|'.join(PHASES)})/[^/#]*#[0-9]{{1,18}}(?:/[^/]*)+")
_MAX_NUMBER = (1 << 64) - 1


def _is_column_right(kind: str, field: str, column: Collection[Any]) -> bool:
    """Return whether a column has the type of its field; `kind` is ``call`` or ``value``."""
    try:
        return _CHECKS.get((kind, field), _are_texts)(column)
    except TypeError:  # a value is not hashable
        return False


def _of_types(*kinds: type) -> Callable[[Iterable[Any]], bool]:
    allowed = frozenset(kinds)
    return lambda column: set(map(type, column)) <= allowed


_are_texts = _of_types(str)
_are_tuples = _of_types(tuple)


def _are_counts(column: Collection[Any]) -> bool:
    """Return whether all elements are non-negative integers of up to 64 bits, or bools."""
    if not set(map(type, column)) <= {int, bool}:
        return False
    return not column or (min(column) >= 0 and max(column) <= _MAX_NUMBER)


def _are_counts_or_none(column: Collection[Any]) -> bool:
    return _are_counts([number for number in column if number is not None])


def _are_shapes(column: Collection[Any]) -> bool:
    """Return whether all elements are tuples of sizes: integers, or text for nested tensors."""
    sizes = set(chain.from_iterable(set(column))) if _are_tuples(column) else {None}
    return _are_counts([size for size in sizes if type(size) is not str])


def _are_statistics(column: Collection[Any]) -> bool:
    # Values that are the same tensor share one tuple.
    found = {id(each): each for each in column if each is not None}.values()
    n_fields = len(Statistics._fields)
    if not _are_tuples(found) or min(map(len, found), default=n_fields) < n_fields:
        return False
    columns = zip(*found, strict=False)  # a later version may add fields
    return all(
        _STATISTICS_CHECKS[name](numbers)
        for name, numbers in zip(Statistics._fields, columns, strict=False)
    )


def _are_numbers(column: Collection[Any]) -> bool:
    kinds = set(map(type, column))
    if int in kinds:
        numbers = [number for number in column if type(number) is int]
        return kinds <= {int, float} and -_MAX_NUMBER <= min(numbers) <= max(numbers) <= _MAX_NUMBER
    return kinds <= {float}


def _one_of(*choices: str) -> Callable[[Collection[Any]], bool]:
    allowed = frozenset(choices)
    return lambda column: set(column) <= allowed


_STATISTICS_CHECKS: dict[str, Callable[[Collection[Any]], bool]] = {
    **dict.fromkeys(("numel", "n_nan", "n_inf", "n_zero", "checksum"), _are_counts),
    **dict.fromkeys(("std", "min", "max", "norm"), _are_numbers),
    "mean": lambda column: _are_numbers([each for each in column if type(each) is not complex]),
}
# All other fields are texts.
_CHECKS: dict[tuple[str, str], Callable[[Collection[Any]], bool]] = {
    **{("call", name): _are_counts for name in ("id", "step", "call", "order", "end")},
    ("call", "phase"): _one_of(*GRADIENT_PHASES.values()),
    ("call", "parent"): _are_counts_or_none,
    ("call", "status"): _one_of("returned", "raised", "stopped", "unfinished"),
    ("call", "stack"): lambda column: (
        _are_tuples(column) and _are_texts(chain.from_iterable(set(column)))
    ),
    ("value", "name"): lambda column: (
        _are_texts(column) and all(map(_NAME_PATTERN.fullmatch, column))
    ),
    ("value", "order"): _are_counts,
    ("value", "call"): _are_counts_or_none,
    ("value", "kind"): _one_of("tensor", "container", "plain"),
    ("value", "shape"): _are_shapes,
    ("value", "nbytes"): _are_counts,
    ("value", "requires_grad"): _of_types(bool),
    ("value", "value"): _of_types(type(None), bool, int, float, complex, str),
    ("value", "statistics"): _are_statistics,
}

# ------------------------------------------------------------------------------------- statistics

_PHASES = {  # in the order in which values are listed, with the suffixes of their names
    "forward": "",
    "recompute": " (recomputed)",
    "backward": ".grad",
    "recompute_backward": ".grad (recomputed)",
    "params": "",
    "grads": ".grad",
}
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}


class PooledStatistics:
    """The `Statistics` of several tensors, as if they were one tensor.

    The variance is that of all finite elements, computed by the parallel algorithm of Chan et al.
    """

    def __init__(self) -> None:
        self.numel = 0
        self.n_nan = 0
        self.n_inf = 0
        self.n_zero = 0
        self.mean: complex = math.nan
        self.min: float = math.nan
        self.max: float = math.nan
        self.norm = 0.0
        self._n_finite = 0
        self._deviation = 0.0  # root mean square of the distances to the mean

    @property
    def std(self) -> float:
        """The square root of the unbiased variance; NaN for fewer than two finite elements."""
        n = self._n_finite
        return self._deviation * math.sqrt(n / (n - 1)) if n > 1 else math.nan

    def add(self, statistics: Sequence[Any]) -> None:
        """Include a tensor, given the fields of its `Statistics`."""
        found = Statistics(*statistics[: len(Statistics._fields)])
        self.numel += found.numel
        self.n_nan += found.n_nan
        self.n_inf += found.n_inf
        self.n_zero += found.n_zero
        n_finite = found.numel - found.n_nan - found.n_inf
        if n_finite <= 0:
            return
        self.min = found.min if self._n_finite == 0 else min(self.min, found.min)
        self.max = found.max if self._n_finite == 0 else max(self.max, found.max)
        self.norm = math.hypot(self.norm, found.norm)
        self._add_moments(n_finite, found.mean, found.std)

    def _add_moments(self, n: int, mean: complex, std: float) -> None:
        # Not a sum of squares, which may overflow or underflow even if its root does not.
        deviation = std * math.sqrt((n - 1) / n) if n > 1 else 0.0
        if self._n_finite == 0:
            self._n_finite, self.mean, self._deviation = n, mean, deviation
            return
        before, total = self._n_finite, self._n_finite + n
        half = mean / 2 - self.mean / 2  # the whole distance may exceed the largest float
        spread = math.hypot(half.real, half.imag) * (2 * math.sqrt(before) * math.sqrt(n) / total)
        self._deviation = math.hypot(
            self._deviation * math.sqrt(before / total), deviation * math.sqrt(n / total), spread
        )
        step = half * (n / total)
        self.mean = self.mean + step + step
        self._n_finite = total


@dataclass
class ValueStatistics:
    """Statistics of all tensors with one name, from all calls and steps, as if of one tensor."""

    name: str  # "inputs/0", "outputs.grad", "weight", "weight.grad", ...
    phase: str = ""  # as in the capture's names; empty for the entry of a checkpoint
    n_tensors: int = 0
    nbytes: int = 0  # of the elements
    dtypes: dict[str, None] = field(default_factory=dict)  # in the order of their first appearance
    shapes: dict[tuple[Any, ...], None] = field(default_factory=dict)
    statistics: PooledStatistics | None = None  # None if no tensor has any; `note` may say why
    note: str = ""

    def add(self, row: Row) -> None:
        """Add a captured tensor."""
        self.n_tensors += 1
        self.nbytes += row[_NBYTES]
        self.dtypes[row[_DTYPE]] = None
        self.shapes[row[_SHAPE]] = None
        self.note = self.note or row[_NOTE]
        self.add_statistics(row[_STATISTICS])

    def add_statistics(self, found: Sequence[Any] | None) -> None:
        if found is not None:
            self.statistics = self.statistics or PooledStatistics()
            self.statistics.add(found)


@dataclass
class ModuleStatistics:
    """A module of a capture, with the statistics of its values."""

    path: str  # as in `torch.nn.Module.named_modules`
    class_name: str  # full name
    n_calls: int = 0  # including recomputations
    values: list[ValueStatistics] = field(default_factory=list)  # by phase and first appearance
    depth: int = 0  # number of listed modules that contain this one
    label: str = ""  # path within the innermost of them; for the model, the class name


def module_statistics(
    run: CapturedRun, *, step: int | None = None, patterns: Sequence[str] = ()
) -> list[ModuleStatistics]:
    """Return the modules of a capture; each module comes before its submodules.

    Each of `patterns` is a module's path or a shell pattern, and also selects all submodules.
    Raises EntryNotFoundError if a pattern matches no module, and ValueError if `step` has no
    records.
    """
    if step is not None and step not in run.steps:
        raise ValueError(
            f"{run.path}: no records of step {step}: its steps are {steps_text(run.steps)}"
        )
    modules = {path: ModuleStatistics(path, name) for path, name in run.modules.items()}
    for row in run.call_rows:
        module = modules.setdefault(row[_MODULE], ModuleStatistics(row[_MODULE], row[_CLASS]))
        module.n_calls += step in (None, row[_STEP])
    for path, values in _values_by_module(run, step).items():
        module = modules.setdefault(path, ModuleStatistics(path, ""))
        module.values = sorted(values.values(), key=lambda value: _NUMBERS[value.phase])
    chosen = [modules[path] for path in _selected(run.path, modules, patterns)]
    _nest(chosen)
    return chosen


def steps_text(steps: Iterable[int]) -> str:
    """Return step numbers as text: the first ones, and the last one."""
    numbers = [*map(str, sorted(steps))]
    return ", ".join([*numbers[:7], "...", numbers[-1]] if len(numbers) > 8 else numbers) or "none"


def _values_by_module(
    run: CapturedRun, step: int | None
) -> dict[str, dict[tuple[str, str], ValueStatistics]]:
    """Return the statistics of each module's values, by the values' phases and paths."""
    found: dict[str, dict[tuple[str, str], ValueStatistics]] = {}  # by the escaped path in the name
    of_step = None if step is None else str(step)
    for row in run.value_rows:
        if row[_KIND] != "tensor":
            continue
        in_step, phase, call, path = row[_NAME].split("/", 3)
        if of_step not in (None, in_step):
            continue
        values = found.setdefault(call.partition("#")[0], {})
        value = values.get((phase, path))
        if value is None:
            value = ValueStatistics(f"{path}{_PHASES[phase]}", phase)
            values[phase, path] = value
        value.add(row)
    return {unquote(text): values for text, values in found.items()}


def _selected(file: str, paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return paths that match a pattern, and their submodules; all paths if there is no pattern."""
    paths = list(paths)
    if not patterns:
        return paths
    roots: set[str] = set()
    for pattern in patterns:
        met = {path for path in paths if path == pattern or fnmatchcase(path, pattern)}
        if not met:
            raise entry_not_found(file, pattern, paths)
        roots |= met
    return [path for path in paths if not roots.isdisjoint(_around(path))]


def _around(path: str) -> Iterable[str]:
    """Yield a module's path and the paths of the modules that contain it, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _nest(modules: Sequence[ModuleStatistics]) -> None:
    """Set `depth` and `label` of each of these modules."""
    by_path = {module.path: module for module in modules}
    for module in modules:
        outer = [path for path in _around(module.path) if path in by_path][1:]
        module.depth = len(outer)
        module.label = module.path
        if outer and outer[0]:
            module.label = module.path[len(outer[0]) + 1 :]
        elif not module.path:
            module.label = module.class_name.rpartition(".")[2]


def entry_statistics(
    contents: Contents, listing: FileListing, numbers: Iterable[int]
) -> dict[int, ValueStatistics]:
    """Read the tensors of the nodes `numbers` one by one; return statistics by node number."""
    found = {}
    for number in numbers:
        node = listing.tree.nodes[number]
        if node.tensor >= 0:
            (tensor,) = contents.read([node.value], None)
            nbytes = listing.facts[node.tensor][4]
            found[number] = tensor_statistics(node.name, tensor, nbytes)
    return found


def tensor_statistics(name: str, tensor: Tensor, nbytes: int) -> ValueStatistics:
    """Return the statistics of one tensor, whose elements take `nbytes` bytes."""
    value = ValueStatistics(name, n_tensors=1, nbytes=nbytes)
    values, value.note = local_values(tensor)
    if values is not None:
        value.add_statistics(statistics_of(values, config.current().n_threads))
        if value.statistics is None:
            value.note = f"{tensor.dtype}: no statistics"
    return value
