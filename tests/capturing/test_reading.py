"""Captures that are opened: calls, values and statistics, against plain hooks on the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from captured_runs import Observer
from client_checkpoints import killed_by_itself
from hypothesis import given, settings
from hypothesis import strategies as st
from random_modules import build, first_tensor, trees
from stock_comparison import stock_load
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ptsave
from ptsave.capturing.schema import Statistics


class Model(nn.Module):
    def __init__(self, inner: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = inner
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)


@settings(max_examples=20, deadline=None)
@given(trees, st.booleans(), st.integers(1, 3))
def test_calls_of_random_trees(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, recomputes: bool, n_steps: int
) -> None:
    model = Model(build(tree), recomputes)
    path = tmp_path_factory.mktemp("tree") / "run.pt"
    observer = Observer(model)
    step_of: list[int] = []
    with ptsave.capture(model, path) as capture:
        for step in range(n_steps):
            first_tensor(model(torch.randn(4, 3))).square().sum().backward()
            step_of += [step] * (len(observer.calls) - len(step_of))
            capture.step()
    with ptsave.open(path) as run:
        calls = run.calls()
        assert [call.step for call in calls] == step_of
        assert [call.order for call in calls] == sorted(call.order for call in calls)
        assert [call.id for call in calls] == [*range(len(calls))]
        observer.assert_same(calls, run.tensor)
        for value in (each for call in calls for each in (*call.inputs, *call.outputs)):
            assert value.statistics is not None
            assert_statistics(value.statistics, run.tensor(value.name))
        numbers: dict[tuple[int, str, str], int] = {}
        for call in calls:
            key = call.step, call.phase, call.module
            assert call.call == numbers.get(key, 0)
            numbers[key] = call.call + 1
        assert_gradients(run, model)
        summary = run.summary()
    assert summary.steps == tuple(range(n_steps))
    assert sum(each.n_calls for each in summary.classes) == summary.n_calls == len(calls)
    assert json.loads(json.dumps(summary.as_dict()))["n_calls"] == len(calls)
    assert {value.name for call in calls for value in (*call.values.values(), *call.grads.values())}
    assert stock_load(path)["capture"]["format"] == "ptsave.capture"


def assert_statistics(found: Statistics, tensor: Tensor) -> None:
    values = tensor.double()
    n = tensor.numel()
    assert (found.numel, found.n_nan, found.n_inf) == (n, 0, 0)
    assert found.n_zero == int((tensor == 0).sum())
    expected = [values.mean(), values.min(), values.max(), values.norm()]
    assert [found.mean, found.min, found.max, found.norm] == pytest.approx(
        [each.item() for each in expected], abs=1e-12
    )
    if n > 1:
        assert found.std == pytest.approx(values.std().item(), abs=1e-12)


def assert_gradients(run: ptsave.Archive, model: nn.Module) -> None:
    """Compare the last gradient of each parameter with the one that it has."""
    last = {value.name.split("/", 2)[2]: value for value in run.captured_values("grads")}
    accumulated: dict[str, str] = {}
    for key, value in last.items():
        module, _, rest = key.partition("#")
        accumulated[f"{module}.{rest.partition('/')[2]}"] = value.name
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(run.tensor(accumulated[name]), parameter.grad)
    outputs = [call.grads.get("outputs") for call in run.calls() if call.module == "first"]
    assert all(value is not None and "backward/first#0" in value.name for value in outputs)


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """Calls, values and the summary are there though the tensors' bytes are damaged."""
    path = tmp_path / "run.pt"
    model = nn.Linear(100, 100)
    with ptsave.capture(model, path):
        model(torch.full((100, 100), 7.0))
    data = path.read_bytes()
    sevens = torch.full((100,), 7.0).numpy().tobytes()
    assert sevens in data
    path.write_bytes(data.replace(sevens, b"\1" * len(sevens)))
    with ptsave.open(path) as run:
        (call,) = run.calls()
        statistics = call.values["inputs/0"].statistics
        assert statistics is not None
        assert statistics.min == 7
        assert "Linear" in str(run.summary())
        with pytest.raises(ptsave.CorruptCheckpointError):
            run.tensor(call.values["inputs/0"].name)
        assert run.tensor(call.values["inputs/0"].name, verify=False).shape == (100, 100)
        assert run.tensor(call.values["outputs"].name, "meta").device.type == "meta"


def test_a_checkpoint_is_no_capture(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with ptsave.open(tmp_path / "model.pt") as archive:
        for ask in (archive.calls, archive.captured_values, archive.summary):
            with pytest.raises(ValueError, match=r"model\.pt is not a capture"):
                ask()
        with pytest.raises(ValueError, match="get_tensor"):
            archive.tensor("weight")
    with pytest.raises(ValueError, match="closed"):
        archive.calls()


_KILLED = """
import os, signal, sys, torch, ptsave
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
capture = ptsave.capture(model, sys.argv[1]).start()
for step in range(4):
    model(torch.full((2, 4), float(step))).sum().backward()
    capture.step()
capture._writer.flush()
model[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
model(torch.ones(2, 4))
"""


def test_a_killed_run(tmp_path: Path) -> None:
    """Steps that had been written before the kill are all there."""
    killed_by_itself(_KILLED, tmp_path / "run.pt")
    (leftover,) = tmp_path.glob(".run.pt.*.ptsave")
    with ptsave.open(leftover, recover=True) as run:
        calls = run.calls()
        assert [call.step for call in calls[:12]] == [step for step in range(4) for _ in range(3)]
        for call in calls[:12]:
            assert call.status == "returned"
            for value in (*call.values.values(), *call.grads.values()):
                assert value.kind != "tensor" or run.tensor(value.name).shape == value.shape
        first = run.tensor("3/forward/#0/inputs/0")
        assert torch.equal(first, torch.full((2, 4), 3.0))
        summary = run.summary()
    assert not summary.is_finished
    assert summary.stored_nbytes is None
    assert "unfinished" in str(summary)
    result = command_line.succeed("ls", "--stats", "--recover", leftover)
    assert "unfinished: the process was killed" in result.stdout
    command_line.succeed("ls", "--recover", leftover)
    assert command_line.run("ls", leftover).exit_code == 2
