"""The form of ``ptsave ls --stats --json``, which programs rely on: keys are added, never changed.

A capture, also without ``--stats``, is an object with

- ``path``, ``format`` (``"capture"``), ``model`` (the full name of its class), ``steps`` (the
  recorded ones) and ``finished`` (false if the process was killed);
- ``modules``: a list of objects with ``path``, ``class``, ``calls`` (how many) and ``values``, a
  list of objects with ``name``, ``phase``, ``tensors`` (how many), ``dtypes``, ``shapes``,
  ``nbytes``, ``note`` and ``statistics``.

A checkpoint is the object of ``ptsave ls --json``, whose tensors also have ``note`` and
``statistics``.  ``statistics`` is null, or an object with ``numel``, ``n_nan``, ``n_inf``,
``n_zero``, ``mean``, ``std``, ``min``, ``max`` and ``norm``.  NaN and infinities are null, and a
complex number is the list of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ptsave.inspection.statistics import ModuleStatistics, ValueStatistics
from ptsave.tree.captured_run import CapturedRun
from ptsave.tree.pooled_statistics import PooledStatistics

_FIELDS = ("numel", "n_nan", "n_inf", "n_zero", "mean", "std", "min", "max", "norm")


def run_json(run: CapturedRun, modules: Iterable[ModuleStatistics]) -> dict[str, Any]:
    """Return the JSON object for some modules of a capture."""
    return {
        "path": run.path,
        "format": "capture",
        "model": run.model,
        "steps": [*run.steps],
        "finished": run.totals is not None,
        "modules": [
            {
                "path": module.path,
                "class": module.class_name,
                "calls": module.n_calls,
                "values": [_value_json(value) for value in module.values],
            }
            for module in modules
        ],
    }


def add_statistics(
    file: dict[str, Any], statistics: Mapping[int, ValueStatistics]
) -> dict[str, Any]:
    """Add statistics, in the order of the tensors, to the JSON object of a file; return it."""
    for tensor, value in zip(file["tensors"], statistics.values(), strict=True):
        tensor["note"] = value.note
        tensor["statistics"] = statistics_json(value.statistics)
    return file


def _value_json(value: ValueStatistics) -> dict[str, Any]:
    return {
        "name": value.name,
        "phase": value.phase,
        "tensors": value.n_tensors,
        "dtypes": [dtype.removeprefix("torch.") for dtype in value.dtypes],
        "shapes": [[*shape] for shape in value.shapes],
        "nbytes": value.nbytes,
        "note": value.note,
        "statistics": statistics_json(value.statistics),
    }


def statistics_json(found: PooledStatistics | None) -> dict[str, Any] | None:
    """Return the JSON object for statistics, or None."""
    if found is None:
        return None
    return {name: number_json(getattr(found, name)) for name in _FIELDS}


def number_json(number: Any) -> Any:
    """Return a number for JSON; NaN and infinities are None."""
    if isinstance(number, complex):
        return [number_json(number.real), number_json(number.imag)]
    return number if math.isfinite(number) else None
