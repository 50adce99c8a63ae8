"""Captures of models that go through `torch.compile`, before and while they are captured."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _system import run_python
from captured_runs import Run, captured
from stock_comparison import assert_same_object
from torch import Tensor, nn

import ptsave

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # dynamo's imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks for it
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


@pytest.fixture(autouse=True)
def own_code() -> Iterator[None]:
    """Dynamo remembers the code of classes, also of other tests."""
    import torch._dynamo

    torch.compiler.reset()
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    yield
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result = self.act(self.linear(x))
        assert isinstance(result, Tensor)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result = self.head(x)
        assert isinstance(result, Tensor)
        return result


Function = Callable[[Tensor], Tensor]
ALL = ["", *(f"blocks.{i}{own}" for i in range(6) for own in ("", ".linear", ".act")), "head"]


def wrapped_elsewhere(model: Model, backend: str) -> Function:
    compiled: Function = torch.compile(model, backend=backend)
    compiled(torch.ones(2, 4))
    return compiled


def class_compiled_before(model: Model, backend: str) -> Function:
    torch.compile(Model(), backend=backend)(torch.ones(2, 4))
    compiled: Function = torch.compile(model, backend=backend)
    return compiled


def compiled_in_place(model: Model, backend: str) -> Function:
    model.compile(backend=backend)
    model(torch.ones(2, 4))
    return model


def a_part(model: Model, backend: str) -> Function:
    for i in range(3):
        compiled = torch.compile(model.blocks[i], backend=backend)
        assert isinstance(compiled, nn.Module)
        model.blocks[i] = compiled
    model(torch.ones(2, 4))
    return model


def in_a_function(model: Model, backend: str) -> Function:
    @torch.compile(backend=backend)
    def function(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    function(torch.ones(2, 4))
    return function


@pytest.mark.parametrize(
    ("prepare", "backend"),
    [
        *((wrapped_elsewhere, "eager"), (wrapped_elsewhere, "aot_eager")),
        *((class_compiled_before, "eager"), (compiled_in_place, "aot_eager")),
        *((a_part, "eager"), (in_a_function, "aot_eager")),
    ],
)
def test_code_that_was_compiled_before(
    path: Path, prepare: Callable[[Model, str], Function], backend: str
) -> None:
    """All calls of all modules are there, with their values, and gradients as without."""
    model, x = Model(), torch.randn(2, 4)
    run_model = prepare(model, backend)

    def train() -> tuple[Tensor, Tensor | None]:
        model.zero_grad()
        result = run_model(x)
        result.square().sum().backward()
        return result.detach(), model.head.weight.grad

    expected = train()
    found: list[tuple[Tensor, Tensor | None]] = []
    run = captured(model, lambda: found.append(train()), path)
    assert sorted(call.module for call in run.calls) == sorted(ALL)
    assert {call.status for call in run.calls} == {"returned"}
    parents = {call.id: call.module for call in run.calls}
    for call in run.calls:
        parent = call.module.rpartition(".")[0].removesuffix("blocks") if call.module else None
        assert (None if call.parent is None else parents[call.parent]) == parent
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(run.tensor("0/forward/#0/outputs"), expected[0])
    torch.testing.assert_close(run.tensor("0/grads/head#0/weight"), expected[1])
    torch.testing.assert_close(train(), expected)


def test_a_compiled_wrapper_is_looked_through(path: Path) -> None:
    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    run = captured(compiled, lambda: compiled(torch.ones(2, 4)), path)
    assert sorted(call.module for call in run.calls) == sorted(ALL)


def test_another_instance_that_is_compiled_meanwhile(path: Path) -> None:
    """Its code has no hooks, and dynamo would use it for the model that has some."""
    model, other, x = Model(), Model(), torch.ones(2, 4)

    def run_both() -> None:
        for each in (other, model):
            torch.compile(each, backend="eager")(x)

    run = captured(model, run_both, path)
    assert sorted(call.module for call in run.calls) == sorted(ALL)


def test_code_is_compiled_without_breaks_when_the_capture_has_ended(path: Path) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model, x = Model(), torch.ones(2, 4)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    assert len(graphs) == 1
    run = captured(model, lambda: compiled(x), path)
    assert sorted(call.module for call in run.calls) == sorted(ALL)
    graphs.clear()
    compiled(x)
    compiled(x)
    assert len(graphs) == 1


def test_several_captures_at_once(tmp_path: Path) -> None:
    first, second, x = Model(), Model(), torch.ones(2, 4)
    one, two = (torch.compile(each, backend="eager") for each in (first, second))
    one(x)
    with ptsave.capture(first, tmp_path / "1.pt"):
        two(x)
        with ptsave.capture(second, tmp_path / "2.pt"):
            two(x)
        one(x)
    for i in (1, 2):
        run = Run(tmp_path / f"{i}.pt")
        assert sorted(call.module for call in run.calls) == sorted(ALL)


def test_a_setting_of_the_user_goes_on_after_the_capture(path: Path) -> None:
    import torch._dynamo

    model, x = Model(), torch.ones(2, 4)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        class_compiled_before(model, "eager")
        run = captured(model, lambda: torch.compile(model, backend="eager")(x), path)
        assert torch._dynamo.config.skip_nnmodule_hook_guards
    assert sorted(call.module for call in run.calls) == sorted(ALL)


def test_fullgraph_says_why_it_breaks(path: Path) -> None:
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 4))
    with (
        pytest.raises(RuntimeError, match=r"ptsave\.capture records here"),
        ptsave.capture(model, path),
    ):
        compiled(torch.ones(2, 4))


_DYNAMO_COMES_LATER = """
import sys, torch, ptsave
from test_compiled_capture import Model
models, x = [Model(), Model()], torch.ones(2, 4)
capture = ptsave.capture(models[1], sys.argv[1]).start()
assert "torch._dynamo" not in sys.modules
for model in models:
    torch.compile(model, backend="eager")(x)
assert not torch._dynamo.config.skip_nnmodule_hook_guards
capture.stop()
assert torch._dynamo.config.skip_nnmodule_hook_guards
assert not [finder for finder in sys.meta_path if "ptsave.support" in type(finder).__module__]
"""


def test_dynamo_is_imported_during_the_capture(path: Path) -> None:
    folders = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    run_python(_DYNAMO_COMES_LATER, path, env={**os.environ, "PYTHONPATH": folders})
    assert sorted(call.module for call in Run(path).calls) == sorted(ALL)


def test_compilation_inside_a_capture(path: Path) -> None:
    model, x = Model(), torch.randn(2, 4)
    expected = model(x)
    with ptsave.capture(model, path) as capture:
        compiled = torch.compile(model, backend="eager")
        result = compiled(x)
        result.sum().backward()
        capture.step()
        compiled(x)
    assert torch.equal(result, expected)
    run = Run(path)
    assert sorted(call.module for call in run.calls) == sorted(2 * ALL)
    assert torch.equal(run.tensor("0/forward/#0/outputs"), expected)
    compiled(x)  # its hooks are gone


# ------------------------------------------------------------------------- captures without a call


def test_why_no_call_was_captured(path: Path) -> None:
    model = Model()
    with pytest.warns(ptsave.CheckpointWarning, match="not called in the recorded steps"):
        captured(model, lambda: None, path)
    with pytest.warns(ptsave.CheckpointWarning, match="includes none of the 1 step"):
        captured(model, lambda: model(torch.ones(2, 4)), path, steps=[])
    scripted = torch.jit.script(Block())
    with pytest.warns(ptsave.CheckpointWarning, match="TorchScript"):
        captured(scripted, lambda: scripted(torch.ones(2, 4)), path)


def test_weights_are_those_of_hooks_that_are_not_compiled(path: Path) -> None:
    """A graph in pieces may add gradients in another order, whoever has broken it; no more does."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    words = torch.randint(0, 50, (2, 8))

    def trained(
        prepare: Callable[[nn.Module], ptsave.Capture | None], *, compiles: bool = True
    ) -> list[Tensor]:
        torch.compiler.reset()
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        call = torch.compile(own, backend="aot_eager") if compiles else own
        capture = prepare(own)
        for _ in range(2):
            optimizer.zero_grad()
            call(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            if capture is not None:
                capture.step()
        if capture is not None:
            capture.stop()
        return [parameter.detach() for parameter in own.parameters()]

    def hooked(module: nn.Module) -> None:
        nothing = torch._dynamo.disable(lambda *_: None)
        for each in module.modules():
            each.register_forward_hook(nothing)

    def capturing(module: nn.Module) -> ptsave.Capture:
        return ptsave.capture(module, path).start()

    assert_same_object(trained(capturing), trained(hooked))
    bare = trained(lambda module: None, compiles=False)
    assert_same_object(trained(capturing, compiles=False), bare)
