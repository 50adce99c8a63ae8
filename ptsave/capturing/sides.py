"""One side of a comparison of captures: a run, or a checkpoint that is compared with a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import CapturedValue, parse_name
from ptsave.comparison.moved_names import moved_names
from ptsave.comparison.sides import ComparedCheckpoint, flat
from ptsave.contents.captures import is_capture
from ptsave.contents.contents import Contents
from ptsave.support.text import count_text


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


@dataclass
class MatchedParameters:
    """Pairs of parameters and tensors of a checkpoint, and the parameters without a tensor."""

    pairs: list[tuple[CapturedValue, CapturedValue]]
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def matched_parameters(a: CapturedSide, b: CapturedSide, step: int | None) -> MatchedParameters:
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
    found = MatchedParameters(pairs if captured is a else [(y, x) for x, y in pairs])
    missing = found.only_in_a if captured is a else found.only_in_b
    missing += [parameters[name].name for name in parameters if name not in names]
    n_others = len(tensors) - len(names)
    if n_others:
        found.remarks.append(
            f"not compared, as no parameters: {count_text(n_others, 'tensor')} of {checkpoint.path}"
        )
    return found


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
