"""Statistics of a file's tensors: by modules in a capture, by entries in any other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from torch import Tensor

from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import CALL_FIELDS, VALUE_FIELDS, Row, Statistics
from ptsave.capturing.tensors import local_values, statistics_of
from ptsave.contents.contents import Contents
from ptsave.inspection.listing import FileListing
from ptsave.support import config
from ptsave.tree.tree import entry_not_found

_PHASES = {  # in the order of the list, with the suffixes of names
    "forward": "",
    "recompute": " (recomputed)",
    "backward": ".grad",
    "recompute_backward": ".grad (recomputed)",
    "params": "",
    "grads": ".grad",
}
_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_STEP, _MODULE, _CLASS = map(CALL_FIELDS.index, ("step", "module", "class_name"))
_NAME, _KIND, _DTYPE, _SHAPE, _NBYTES, _NOTE, _STATISTICS = map(
    VALUE_FIELDS.index, ("name", "kind", "dtype", "shape", "nbytes", "note", "statistics")
)


class PooledStatistics:
    """The `Statistics` of several tensors, as if they were one.

    The variance is that of all elements, by the parallel algorithm of Chan et al.
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
        self._deviation = 0.0  # the root of the mean square of the distances to the mean

    @property
    def std(self) -> float:
        """The square root of the unbiased variance; NaN for fewer than two finite elements."""
        n = self._n_finite
        return self._deviation * math.sqrt(n / (n - 1)) if n > 1 else math.nan

    def add(self, statistics: Sequence[Any]) -> None:
        """Add the fields of a tensor's `Statistics`."""
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
        # No sum of squares, which may be infinite or zero in doubles where its root is neither.
        deviation = std * math.sqrt((n - 1) / n) if n > 1 else 0.0
        if self._n_finite == 0:
            self._n_finite, self.mean, self._deviation = n, mean, deviation
            return
        before, total = self._n_finite, self._n_finite + n
        half = mean / 2 - self.mean / 2  # the whole distance may exceed any float
        spread = math.hypot(half.real, half.imag) * (2 * math.sqrt(before) * math.sqrt(n) / total)
        self._deviation = math.hypot(
            self._deviation * math.sqrt(before / total), deviation * math.sqrt(n / total), spread
        )
        step = half * (n / total)
        self.mean = self.mean + step + step
        self._n_finite = total


@dataclass
class ValueStatistics:
    """Tensors of one name, from all calls and steps, as if they were one tensor."""

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
    """A module of a capture, with its values."""

    path: str  # as in `torch.nn.Module.named_modules`
    class_name: str  # full name
    n_calls: int = 0  # with recomputations
    values: list[ValueStatistics] = field(default_factory=list)  # by phase and first appearance
    depth: int = 0  # number of listed modules around it
    label: str = ""  # its path in the innermost of these; the class name for the model itself


def module_statistics(
    run: CapturedRun, *, step: int | None = None, patterns: Sequence[str] = ()
) -> list[ModuleStatistics]:
    """Return the modules of a capture, each in front of its submodules.

    `patterns` are paths of modules, which include all submodules, or shell patterns.  Raises
    EntryNotFoundError if a pattern matches no module, and ValueError if `step` has no records.
    """
    if step is not None and step not in run.steps:
        raise ValueError(f"{run.path}: no records of step {step}: there are {_numbers(run.steps)}")
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


def _numbers(steps: Sequence[int]) -> str:
    shown = [*steps[:5], "...", steps[-1]] if len(steps) > 7 else steps
    return ", ".join(map(str, shown)) or "none at all"


def _values_by_module(
    run: CapturedRun, step: int | None
) -> dict[str, dict[tuple[str, str], ValueStatistics]]:
    """Return the values of each module by phase and path."""
    found: dict[str, dict[tuple[str, str], ValueStatistics]] = {}  # by the quoted path in the name
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
    """Return the paths that match a pattern, and the paths of all their submodules."""
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
    """Yield a module's path and the paths of the modules around it, from inside."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _nest(modules: Sequence[ModuleStatistics]) -> None:
    """Set the depth of each module, and its path in the module that it is listed below."""
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
    """Read tensors one by one; return their statistics by the numbers of their nodes."""
    found = {}
    for number in numbers:
        node = listing.tree.nodes[number]
        if node.tensor >= 0:
            (tensor,) = contents.read([node.value], None)
            nbytes = listing.facts[node.tensor][4]
            found[number] = tensor_statistics(node.name, tensor, nbytes)
    return found


def tensor_statistics(name: str, tensor: Tensor, nbytes: int) -> ValueStatistics:
    """Return the statistics of one tensor, whose elements have `nbytes` bytes."""
    value = ValueStatistics(name, n_tensors=1, nbytes=nbytes)
    values, value.note = local_values(tensor)
    if values is not None:
        value.add_statistics(statistics_of(values, config.current().n_threads))
        if value.statistics is None:
            value.note = f"{tensor.dtype}: no statistics"
    return value
