"""Reads captures back, and trains models with and without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ptsave
from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import CapturedCall, CapturedValue, block_to_plain, escape, parse_name


def name_of(step: int, phase: str, module: str, call: int, path: Iterable[str]) -> str:
    """Return the name of a captured value."""
    return "/".join((str(step), phase, f"{escape(module)}#{call}", *map(escape, path)))


def block_of(calls: Iterable[CapturedCall], values: Iterable[CapturedValue]) -> dict[str, Any]:
    """Return a block of records as it is written."""
    return block_to_plain(list(map(_row, calls)), list(map(_row, values)))


def _row(record: CapturedCall | CapturedValue) -> tuple[Any, ...]:
    row = {each.name: getattr(record, each.name) for each in fields(record) if each.compare}
    if row.get("statistics") is not None:
        row["statistics"] = tuple(row["statistics"])  # a named tuple would be saved as a class
    return tuple(row.values())


class Run:
    """A capture, read with stock torch."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Any] = torch.load(path, weights_only=True)
        run = CapturedRun(self.entries, str(path))
        self.calls: list[CapturedCall] = run.calls()
        values = list(run.values())
        self.values: dict[str, CapturedValue] = {value.name: value for value in values}
        assert len(self.values) == len(values), "two values have one name"
        for name in self.values:
            parse_name(name)

    def tensor(self, name: str) -> Tensor:
        tensor = self.entries[self.values[name].stored]
        assert isinstance(tensor, Tensor)
        return tensor

    def names(self, phase: str) -> list[str]:
        return [name for name in self.values if parse_name(name).phase == phase]


def captured(model: nn.Module, run: Callable[[], object], path: Path, **options: Any) -> Run:
    with ptsave.capture(model, path, **options):
        run()
    return Run(path)


def tensors_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of nested values, with paths as a capture writes them."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, (*path, str(i)))


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    """Compare two tensors; a training that diverges has NaN in both."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def assert_bit_identical(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], path: Path, **options: Any
) -> Run:
    """Train two copies for two steps, one of them captured; compare all bits."""
    results = []
    for capturing in (False, True):
        torch.manual_seed(1)
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in copied.parameters() if p.requires_grad], 0.1)
        found: list[Tensor] = []
        capture = ptsave.capture(copied, path, optimizer=optimizer, **options)
        if capturing:
            capture.start()
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(copied)
            loss.backward()
            found += [p.grad.clone() for p in copied.parameters() if p.grad is not None]
            optimizer.step()
            found += [loss.detach(), *(p.detach().clone() for p in copied.parameters())]
        capture.stop()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())
        results.append(found)
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)
    return Run(path)


@dataclass
class Observed:
    """A call, as plain hooks see it."""

    module: str
    class_name: str
    phase: str
    parent: int | None
    values: dict[str, Tensor] = field(default_factory=dict)


class Observer:
    """Plain hooks that keep clones of all tensors of all calls."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Observed] = []
        self._open: list[int] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        kind = type(module)
        is_recomputed = torch._C._current_graph_task_id() != -1
        call = Observed(
            path,
            f"{kind.__module__}.{kind.__qualname__}",
            "recompute" if is_recomputed else "forward",
            self._open[-1] if self._open else None,
        )
        self._open.append(len(self.calls))
        self.calls.append(call)
        self._keep(call, "inputs", {**dict(enumerate(args)), **kwargs})

    def _after(self, _module: nn.Module, _args: Any, result: Any) -> None:
        self._keep(self.calls[self._open.pop()], "outputs", result)

    def _keep(self, call: Observed, side: str, values: Any) -> None:
        for place, tensor in tensors_in(values, (side,)):
            call.values["/".join(place)] = tensor.detach().clone()

    def assert_same(self, calls: list[CapturedCall], tensor_of: Callable[[str], Tensor]) -> None:
        """Compare all calls of a run, whose ids are their numbers, and all their tensors."""
        for call, seen in zip(calls, self.calls, strict=True):
            assert (call.module, call.class_name) == (seen.module, seen.class_name)
            assert (call.phase, call.parent) == (seen.phase, seen.parent)
            found = {path: value for path, value in call.values.items() if value.kind == "tensor"}
            assert set(found) == set(seen.values)
            for path, value in found.items():
                assert torch.equal(tensor_of(value.name), seen.values[path]), value.name
