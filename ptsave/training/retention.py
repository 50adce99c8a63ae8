"""Chooses which checkpoints of a directory stay: the newest ones, and others by step or entry.

A checkpoint's metric is an entry of its own file, so a process that continues the run keeps the
same checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

# Returns the named entries that a step's checkpoint has; None if it cannot be read.
ReadEntries = Callable[[int, Collection[str]], "Mapping[str, Any] | None"]


class Retention:
    """The rules by which checkpoints stay, from arguments of `AsyncCheckpointer`."""

    def __init__(
        self,
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_marked: str | None = None,
    ) -> None:
        others = {"keep_every": keep_every, "keep_best": keep_best, "keep_marked": keep_marked}
        named = [name for name, value in others.items() if value is not None]
        if keep is None and named:
            raise ValueError(f"keep=None keeps all checkpoints: leave {named[0]} out, or set keep")
        if (keep_best is None) != (metric is None):
            raise TypeError("keep_best and metric go together: keep_best=2, metric='val_loss'")
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
        for name, entry in (("metric", metric), ("keep_marked", keep_marked)):
            if not isinstance(entry, (str, type(None))):
                raise TypeError(f"{name} must be the name of an entry, not {entry!r}")
        self.keep, self.keep_every = keep, keep_every
        self.keep_best, self.metric, self.mode = keep_best, metric, mode
        self.keep_marked = keep_marked

    def check(self, entries: Mapping[str, Any]) -> None:
        """Raise a TypeError if the metric is not a number."""
        if self.metric is None or self.metric not in entries:
            return
        value = entries[self.metric]
        if _number(value) is None:
            kind = type(value).__name__
            raise TypeError(f"the metric {self.metric!r} must be a number, not of type {kind}")

    def spare(self, steps: Iterable[int], written: int, read: ReadEntries) -> list[int]:
        """Return the steps whose checkpoints may go after the step `written` was saved.

        The written step and the highest step stay: after training went back to an earlier step,
        both are the newest of their runs.  A checkpoint that cannot be read stays, too, if its
        entries would decide.
        """
        if self.keep is None:
            return []
        steps = sorted(steps)
        newest = {written, max(steps, default=written)}
        older = [step for step in steps if step not in newest]
        spare = older[: max(len(steps) - self.keep, 0)]
        if self.keep_every is not None:
            spare = [step for step in spare if step % self.keep_every]
        wanted = [name for name in (self.metric, self.keep_marked) if name is not None]
        if not (spare and wanted):
            return spare
        entries = {step: read(step, wanted) for step in steps}
        best = self._best(entries)
        return [
            step
            for step in spare
            if (values := entries[step]) is not None
            and step not in best
            and not (self.keep_marked is not None and _is_true(values.get(self.keep_marked)))
        ]

    def _best(self, entries: Mapping[int, Mapping[str, Any] | None]) -> set[int]:
        """Return the steps with the best metric; of equal steps the newest."""
        if self.metric is None:
            return set()
        sign = 1 if self.mode == "min" else -1
        values = {step: _number((found or {}).get(self.metric)) for step, found in entries.items()}
        ranked = sorted(
            (sign * value, -step)
            for step, value in values.items()
            if value is not None and not math.isnan(value)
        )
        return {-step for _, step in ranked[: self.keep_best]}


def _number(value: Any) -> float | None:
    """Return a number, or a tensor or array of one number, as a float; otherwise None.

    Accepts only types that load from a checkpoint without running its code.
    """
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if type(value) in (bool, int, float) else None
    except OverflowError:  # of a large int
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_true(value: Any) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several values
        return True
