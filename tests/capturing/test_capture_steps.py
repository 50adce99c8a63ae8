"""Steps of captures: what counts to which, and gradients that come late."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_runs import Run, captured
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

import ptsave

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # jvp's imports


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


def steps_of(run: Run) -> int:
    steps = run.entries["capture/end"]["steps"]
    assert isinstance(steps, int)
    return steps


@pytest.mark.parametrize(
    ("steps", "n_ended", "goes_on", "n_steps"),
    [(None, 3, False, 3), (None, 3, True, 4), ([1], 4, True, 4)],
)
def test_a_step_counts_if_it_has_ended_or_has_records(
    path: Path, steps: Any, n_ended: int, goes_on: bool, n_steps: int
) -> None:
    model = nn.Linear(2, 2)
    with ptsave.capture(model, path, steps=steps) as capture:
        for _ in range(n_ended):
            model(torch.ones(1, 2))
            capture.step()
        if goes_on:
            model(torch.ones(1, 2))
    assert steps_of(Run(path)) == n_steps


@pytest.mark.parametrize("steps", [None, [0]])
def test_gradients_that_come_after_the_step(path: Path, steps: Any) -> None:
    """They belong to the call, also those of leaves, and of steps before one without records."""
    model = nn.Linear(2, 2)
    leaf = torch.ones(1, 2, requires_grad=True)
    with ptsave.capture(model, path, steps=steps) as capture:
        loss = model(leaf).sum()
        capture.step()
        loss.backward()
    run = Run(path)
    assert leaf.grad is not None
    assert torch.equal(run.tensor("0/backward/#0/inputs/0"), leaf.grad)
    assert torch.equal(run.tensor("0/backward/#0/outputs"), torch.ones(1, 2))
    # That of a parameter has no call: it counts where it comes.
    assert ("1/grads/#0/weight" in run.values) == (steps is None)


def test_a_leaf_of_several_steps(path: Path) -> None:
    model = nn.Linear(2, 2)
    leaf = torch.ones(1, 2, requires_grad=True)
    with ptsave.capture(model, path) as capture:
        for i in range(3):
            loss = (i + 1) * model(leaf).sum()
            if i != 1:  # the second one never gets its gradient
                loss.backward()
            capture.step()
    run = Run(path)
    found = [name for name in run.names("backward") if name.endswith("inputs/0")]
    assert found == ["0/backward/#0/inputs/0", "2/backward/#0/inputs/0"]
    torch.testing.assert_close(3 * run.tensor(found[0]), run.tensor(found[1]))
    assert not leaf._backward_hooks


def test_hooks_of_leaves_go_with_the_capture(path: Path) -> None:
    model = nn.Linear(2, 2)
    leaves = [torch.ones(1, 2, requires_grad=True) for _ in range(3)]
    with ptsave.capture(model, path) as capture:
        for leaf in leaves:
            model(leaf)
            capture.step()
    assert not any(leaf._backward_hooks for leaf in leaves)


# --------------------------------------------------------------------------------------- optimizers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = 3) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_an_optimizer_of_another_model_is_refused(path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(ValueError, match=r"optimizer \(SGD\) has none of the model's parameters"):
        ptsave.capture(model, path, optimizer=other).start()
    assert not list(path.parent.iterdir())
    assert not model[0]._forward_hooks
    frozen = nn.Linear(2, 2).requires_grad_(False)  # a part that is not trained has its steps
    captured(frozen, lambda: frozen(torch.ones(1, 2)), path, optimizer=other)
    one = torch.optim.SGD(list(model.parameters())[1:], 0.1)
    run = captured(model, lambda: train(model, one), path, optimizer=one, include="1")
    assert steps_of(run) == 3


def test_steps_that_nobody_marks(path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(ptsave.CheckpointWarning, match=r"took 3 steps.*capture\.step\(\)") as found:
        captured(model, lambda: train(model, optimizer), path)
    assert found[0].filename.endswith("captured_runs.py")
    assert not optimizer_module._global_optimizer_post_hooks


def test_steps_of_optimizers_that_are_gone(path: Path) -> None:
    """Made in a function, or anew for each step."""
    model = nn.Linear(2, 2)

    def run() -> None:
        for _ in range(3):
            train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
            gc.collect()

    with pytest.warns(ptsave.CheckpointWarning, match=r"took 3 steps.*capture\.step\(\)"):
        captured(model, run, path)


def test_one_step_is_no_cause_for_a_warning(path: Path) -> None:
    """Two optimizers, accumulated gradients, an optimizer of another model, marked steps."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    halves = [torch.optim.SGD([each], 0.1) for each in model.parameters()]
    others = torch.optim.SGD(other.parameters(), 0.1)

    def run() -> None:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        for half in halves:
            half.step()
        train(other, others)

    captured(model, run, path)
    with ptsave.capture(model, path) as capture:
        for _ in range(3):
            train(model, halves[0], 2)
            capture.step()


# --------------------------------------------------------------------------------------- torch.func


def model_of_two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def loss_of(model: nn.Module) -> Any:
    return lambda parameters, x: torch.func.functional_call(model, parameters, (x,)).sum()


def transforms(model: nn.Module) -> dict[str, Any]:
    x, samples = torch.linspace(0, 1, 3), torch.linspace(0, 1, 15).view(5, 3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = loss_of(model)
    return {
        "grad": lambda: torch.func.grad(loss)(parameters, x),
        "vmap": lambda: torch.vmap(model)(samples),
        "grads of samples": lambda: torch.vmap(torch.func.grad(loss), (None, 0))(
            parameters, samples
        ),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(model)(x),
        "hessian": lambda: torch.func.hessian(lambda x: model(x).sum())(x),
        "functionalize": lambda: torch.func.functionalize(model)(samples),
    }


@pytest.mark.parametrize("name", list(transforms(model_of_two_layers())))
def test_transforms(path: Path, name: str) -> None:
    """Their results are those without a capture, which records the tensors that they wrap."""
    model = model_of_two_layers()
    transform = transforms(model)[name]
    expected = torch.utils._pytree.tree_leaves(transform())
    found: list[Tensor] = []
    run = captured(
        model,
        lambda: found.extend(torch.utils._pytree.tree_leaves(transform())),
        path,
    )
    assert all(map(torch.equal, expected, found))
    value = run.values["0/forward/#0/inputs/0"]
    if name == "functionalize":
        assert value.note == "functionalized: no values"
    else:
        assert run.tensor(value.name).flatten()[-1] == 1


def test_values_of_vmap_have_all_samples(path: Path) -> None:
    model = model_of_two_layers()
    samples = torch.linspace(0, 1, 15).view(3, 5)
    run = captured(model, lambda: torch.vmap(model, in_dims=1)(samples), path)
    value = run.values["0/forward/#0/inputs/0"]
    assert value.shape == (3,)
    assert value.note == "vmap: all samples, as (3, 5)"
    assert torch.equal(run.tensor(value.name), samples)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
def test_wrappers_that_outlive_their_transform(path: Path, tensors: bool, statistics: bool) -> None:
    model = nn.Identity()
    leaked: list[Tensor] = []

    def leak(x: Tensor) -> Tensor:
        leaked.append(x)
        return 2 * x

    x = torch.arange(6.0).view(3, 2)
    torch.vmap(leak)(x)
    torch.func.grad(lambda x: leak(x).sum())(x)
    torch.func.jvp(leak, (x,), (x,))
    torch.func.functionalize(leak)(x)
    run = captured(
        model,
        lambda: [model(each) for each in leaked],
        path,
        statistics=statistics,
        tensors=tensors,
    )
    values = [run.values[f"0/forward/#{i}/inputs/0"] for i in range(4)]
    assert [value.note for value in values] == [
        "vmap: all samples, as (3, 2)",
        "",
        "",
        "functionalized: no values",
    ]
    if tensors:
        assert all(torch.equal(run.tensor(value.name), x) for value in values[:3])
