"""Captures of small networks: names, values, calls, and all that can go wrong in a hook."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _system import run_python
from captured_runs import Run, assert_bit_identical, captured
from hypothesis import given, settings
from random_modules import build, first_tensor, trees
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils.checkpoint import checkpoint

import ptsave
from ptsave.capturing.run import CapturedRun
from ptsave.capturing.schema import Statistics
from ptsave.capturing.tensors import statistics_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


@settings(max_examples=25)
@given(trees)
def test_random_trees(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    """Training goes on as without; test_reading.py compares the values with plain hooks'."""
    model = nn.Sequential(nn.Linear(3, 3), build(tree))
    path = tmp_path_factory.mktemp("tree") / "run.pt"

    def loss_of(module: nn.Module) -> Tensor:
        return first_tensor(module(torch.ones(4, 3))).square().sum()

    run = assert_bit_identical(model, loss_of, path)
    for name in run.names("forward"):
        if run.values[name].kind == "tensor":
            statistics = run.values[name].statistics
            assert statistics is not None
            assert statistics.numel == run.tensor(name).numel()


def test_names_and_phases(path: Path) -> None:
    run = assert_bit_identical(network(), lambda model: model(torch.ones(2, 4)).sum(), path)
    assert [call.module for call in run.calls[:4]] == ["", "0", "1", "2"]
    assert {call.step for call in run.calls} == {0, 1}
    assert run.calls[1].parent == run.calls[0].id
    assert run.calls[1].class_name == "torch.nn.modules.linear.Linear"
    assert "0/params/0#0/weight" in run.values
    assert "1/grads/2#0/bias" in run.values
    assert "0/backward/2#0/inputs/0" in run.values
    assert run.entries["capture/end"]["steps"] == 2


def test_gradients_are_those_of_autograd(path: Path) -> None:
    model = network()
    x = torch.randn(2, 4, requires_grad=True)
    kept: dict[str, Any] = {}

    def keep(_: nn.Module, args: object, output: Tensor) -> None:
        output.retain_grad()
        kept["2"] = output

    with ptsave.capture(model, path):
        model[2].register_forward_hook(keep)
        model(x).square().sum().backward()
    run = Run(path)
    assert x.grad is not None
    assert torch.equal(run.tensor("0/backward/#0/inputs/0"), x.grad)
    assert torch.equal(run.tensor("0/backward/2#0/outputs"), kept["2"].grad)
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        assert parameter.grad is not None
        assert torch.equal(run.tensor(f"0/grads/{module}#0/{own}"), parameter.grad)
        assert torch.equal(run.tensor(f"0/params/{module}#0/{own}"), parameter.detach())


def test_a_module_that_is_used_twice(path: Path) -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(OrderedDict(a=layer, b=nn.ReLU(), c=layer))
    run = captured(model, lambda: model(torch.ones(1, 3)).sum().backward(), path)
    assert [(call.module, call.call) for call in run.calls] == [
        ("", 0),
        ("a", 0),
        ("b", 0),
        ("a", 1),
    ]
    assert "0/backward/a#1/outputs" in run.values


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Output:
    logits: Tensor
    past: Any = None


class Nested(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor, mode: str, flags: dict[str, Any]) -> Output:
        return Output(x * mask, [Pair(x + 1, None), {"a/b": (x, 1.5)}])


def test_nested_values(path: Path) -> None:
    model = Nested()
    x, mask = torch.randn(2, 2), torch.ones(2, 2)
    flags = {"deep": [True, torch.float16], "what": object()}
    run = captured(model, lambda: model(x, mask=mask, mode="sum", flags=flags), path)
    values = {name.removeprefix("0/forward/#0/"): value for name, value in run.values.items()}
    assert values["inputs/mode"].value == "sum"
    assert values["inputs/flags"].shape == (2,)
    assert values["inputs/flags/deep/0"].value is True
    assert values["inputs/flags/deep/1"].value == "torch.float16"
    assert values["inputs/flags/what"].note == "not looked into"
    assert values["outputs"].type.endswith("Output")
    assert values["outputs/past/0/right"].value is None
    assert values["outputs/past/1/a%2Fb/1"].value == 1.5
    assert torch.equal(run.tensor("0/forward/#0/outputs/past/1/a%2Fb/0"), x)
    assert values["outputs/past/1/a%2Fb/0"].stored == "0/forward/#0/inputs/0"


def test_inputs_and_outputs_of_calls(path: Path) -> None:
    """The tensors alone, whatever they are nested in, as the README's loop wants them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor, scale: float) -> Any:
            return self.part(x) * scale, {"more": [x, None]}, "text"

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    model = nn.ModuleList([Model(), Broken()])

    def run() -> None:
        model[0](torch.tensor([1.0]), math.nan)
        with suppress(ValueError):
            model[1](torch.tensor([1.0]))

    captured(model, run, path)
    found = []
    with ptsave.open(path) as archive:
        for call in archive.calls():
            for output in call.outputs:
                if output.statistics and output.statistics.n_nan:
                    found.append((call.module, output.name, archive.tensor(output.name)))
        first, _, last = archive.calls()
    ((module, name, tensor),) = found
    assert (module, name) == ("0", "0/forward/0#0/outputs/0")
    assert tensor.isnan()
    assert [value.name.rpartition("#0/")[2] for value in first.outputs] == [
        "outputs/0",
        "outputs/1/more/0",
    ]
    assert [value.name.rpartition("#0/")[2] for value in first.inputs] == ["inputs/0"]
    assert (last.outputs, len(last.inputs)) == ([], 1)


class Named:
    """A key whose text is that of another."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_no_two_values_have_one_name(path: Path) -> None:
    """Keys whose texts are the same are told apart by their types, and then by numbers."""

    class Model(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            return None

    model = Model()
    keys: list[Any] = [1, "1", (1,), "(1,)", None, "None", 1.5, "1.5", "a/b", "a%2Fb", "a#b", ""]
    keys += ["1:int", Named("x"), Named("x"), Named("x"), Unspeakable(), "other", 2, 7]
    table = {key: torch.full((2,), float(i)) for i, key in enumerate(keys)}
    extra = {"0": torch.tensor(100.0), "2": torch.tensor(101.0), "0:keyword": torch.tensor(102.0)}
    run = captured(model, lambda: model(table, torch.tensor(99.0), **extra), path)
    prefix = "0/forward/#0/inputs"
    found = {name: run.tensor(name) for name in run.values if run.values[name].kind == "tensor"}
    assert sorted(tensor.flatten()[0].item() for tensor in found.values()) == [
        *map(float, range(len(keys))),
        *(99, 100, 101, 102),
    ]
    for name, expected in {
        "0/1": 1,
        "0/1%3Aint": 0,
        "0/2": 18,
        "0/a%2Fb": 8,
        "0/a%252Fb": 9,
        "0/x": 13,
        "0/x%3ANamed": 14,
        "0/x%3ANamed%3A2": 15,
        "0/Unspeakable": 16,
        "0%3Akeyword": 100,
        "2": 101,
        "0:keyword": 102,
    }.items():
        assert found[f"{prefix}/{name}"].flatten()[0] == expected, name
    with ptsave.open(path) as archive:
        assert archive.tensor(f"{prefix}/0/1%3Aint").tolist() == [0, 0]


def test_inputs_are_those_before_in_place_operations(path: Path) -> None:
    model = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 1.0])
    run = captured(model, lambda: model(x).add_(5), path)
    assert run.tensor("0/forward/#0/inputs/0").tolist() == [-1, 1]
    assert run.tensor("0/forward/#0/outputs").tolist() == [0, 1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls(path: Path, reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            result = checkpoint(self.inner, x, use_reentrant=reentrant)
            assert isinstance(result, Tensor)
            return result

    x = torch.ones(2, 4, requires_grad=True)
    run = assert_bit_identical(Model(), lambda model: model(x).sum(), path)
    phases = {(call.phase, call.module) for call in run.calls}
    assert {("forward", "inner.0"), ("recompute", "inner.0"), ("forward", "")} <= phases
    assert ("recompute", "") not in phases
    assert all(call.status in ("returned", "stopped") for call in run.calls)
    assert torch.equal(
        run.tensor("0/forward/inner.0#0/inputs/0"), run.tensor("0/recompute/inner.0#0/inputs/0")
    )
    phase = "recompute_backward" if reentrant else "backward"
    assert f"0/{phase}/inner.2#0/outputs" in run.values


def test_modules_that_raise(path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such thing")

    model = nn.Sequential(nn.Identity(), Broken())
    with ptsave.capture(model, path):
        for _ in range(2):
            with pytest.raises(KeyError):
                model(torch.ones(1))
        model[0](torch.ones(1))
    run = Run(path)
    statuses = [(call.module, call.status, call.parent) for call in run.calls]
    assert statuses == [
        ("", "raised", None),
        ("0", "returned", 0),
        ("1", "raised", 0),
        ("", "raised", None),
        ("0", "returned", 3),
        ("1", "raised", 3),
        ("0", "returned", None),
    ]
    assert run.calls[2].error == "KeyError: 'no such thing'"


@pytest.mark.parametrize("where", ["0.1", "1", ""])
def test_a_call_that_is_interrupted(path: Path, where: str) -> None:
    """Torch runs no hook for a KeyboardInterrupt: the next call is none of those interrupted."""
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.ReLU()), nn.Linear(2, 2))
    interrupts = [KeyboardInterrupt, SystemExit, None]

    def interrupt(*_: object) -> None:
        if kind := interrupts.pop(0):
            raise kind

    with ptsave.capture(model, path) as capture:
        handle = model.get_submodule(where).register_forward_pre_hook(interrupt)
        for _ in range(3):
            with suppress(KeyboardInterrupt, SystemExit):
                model(torch.ones(1, 2))
        handle.remove()
        assert not capture._recorder._thread.calls
        interrupts.append(KeyboardInterrupt)
        model.get_submodule(where).register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        with torch.no_grad():
            model[1](torch.ones(1, 2)) if where != "1" else model[0](torch.ones(1, 2))
    run = Run(path)
    by_id = {call.id: call for call in run.calls}
    roots = [call for call in run.calls if call.module == ""]
    assert [call.status for call in roots] == ["unfinished"] * 2 + ["returned", "unfinished"]
    assert all(call.parent is None for call in roots)
    for call in run.calls:
        if call.parent is not None:
            assert by_id[call.parent].order < call.order
            assert call.end < by_id[call.parent].end or "unfinished" in call.status
    last = next(c for c in reversed(run.calls) if c.status == "returned" and c.module in ("0", "1"))
    assert last.parent is None
    assert {c.status for c in run.calls} == {"returned", "unfinished"}


def test_what_an_interrupted_call_held_is_let_go(path: Path) -> None:
    model = nn.Identity()
    found: list[weakref.ref[Tensor]] = []

    def interrupted() -> None:
        x = torch.ones(10)
        found.append(weakref.ref(x))
        model(x)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with ptsave.capture(model, path):
        handle = model.register_forward_pre_hook(interrupt)
        with suppress(KeyboardInterrupt):
            interrupted()
        handle.remove()
        model(torch.ones(2))
        gc.collect()
        assert found[0]() is None


def test_an_error_in_the_block_keeps_the_file_and_no_hook(path: Path) -> None:
    model = network()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with ptsave.capture(model, path):
            model(torch.ones(1, 4))
            raise ZeroDivisionError
    assert len(Run(path).calls) == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_include_exclude_and_steps(path: Path) -> None:
    layers = nn.ModuleList([network(), network()])
    model = nn.ModuleDict({"layers": layers})

    def run() -> None:
        for _ in range(4):
            for layer in layers:
                layer(torch.ones(1, 4))
            capture.step()

    with ptsave.capture(
        model, path, include="layers.*", exclude=["*.1", "*.0.*"], steps=range(1, 3)
    ) as capture:
        run()
    found = {(call.step, call.module) for call in Run(path).calls}
    assert found == {
        (step, f"layers.{name}") for step in (1, 2) for name in ("0", "1.0", "1.2")
    } - {(1, "layers.1.1")}


def test_statistics_alone(path: Path) -> None:
    run = assert_bit_identical(
        network(), lambda model: model(torch.ones(2, 4)).sum(), path, tensors=False
    )
    assert not [value for value in run.entries.values() if isinstance(value, Tensor)]
    assert run.entries["capture/end"]["stored_nbytes"] == 0
    value = run.values["0/params/0#0/weight"]
    assert value.statistics is not None
    assert value.stored == ""


def test_tensors_without_statistics(path: Path) -> None:
    model = network()
    run = captured(model, lambda: model(torch.ones(2, 4)), path, statistics=False)
    assert all(value.statistics is None for value in run.values.values())


def test_call_stacks(path: Path) -> None:
    model = network()
    run = captured(model, lambda: model(torch.ones(2, 4)), path, call_stacks=True)
    assert any("test_capture.py" in line and "<lambda>" in line for line in run.calls[0].stack)


def test_max_bytes(path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(100, 100))
    run = captured(model, lambda: model(torch.ones(1, 100)), path, what=["outputs"], max_bytes=500)
    assert run.values["0/forward/1#0/outputs"].note == "dropped: max_bytes"
    assert run.entries["capture/end"]["dropped"] == 1
    assert run.entries["capture/end"]["stored_nbytes"] == 400


def test_views_hold_their_own_bytes_only(path: Path) -> None:
    model = nn.Identity()
    base = torch.arange(1_000_000.0)
    run = captured(model, lambda: model(base[10:40_010].view(200, 200).t()), path)
    assert path.stat().st_size < 500_000
    assert torch.equal(run.tensor("0/forward/#0/outputs"), base[10:40_010].view(200, 200).t())


def test_gradient_accumulation_and_a_second_backward(path: Path) -> None:
    model = nn.Linear(2, 2)
    with ptsave.capture(model, path):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    run = Run(path)
    assert torch.equal(run.tensor("0/grads/#1/weight"), 2 * run.tensor("0/grads/#0/weight"))
    assert "0/backward/#0/outputs/again-1" in run.values


def test_kinds_of_tensors(path: Path) -> None:
    class Model(nn.Module):
        def forward(self, **kinds: Tensor) -> None:
            return None

    model = Model()
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(3.0),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    run = captured(model, lambda: model(**kinds), path)
    for name in kinds:
        value = run.values[f"0/forward/#0/inputs/{name}"]
        assert (value.statistics is None) == (name == "meta"), name
        assert bool(value.stored) == (name != "meta"), name
    assert run.values["0/forward/#0/inputs/meta"].note == "meta: no values"
    assert torch.equal(run.tensor("0/forward/#0/inputs/sparse").to_dense(), torch.eye(3))


class Unsavable(Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no such thing\nas a pickle")


@pytest.mark.parametrize("n", [10, 100_000])
def test_a_tensor_that_cannot_be_saved(path: Path, n: int) -> None:
    """Its values are kept as those of a plain tensor."""
    model = nn.Identity()
    x = torch.ones(n)

    def run() -> None:
        for i in range(3):
            model(x * i)
            model((x * i).as_subclass(Unsavable))

    found = captured(model, run, path, what=["inputs"])
    for i in range(3):
        assert torch.equal(found.tensor(f"0/forward/#{2 * i}/inputs/0"), x * i)
        value = found.values[f"0/forward/#{2 * i + 1}/inputs/0"]
        assert value.type == "Unsavable"
        assert torch.equal(found.tensor(value.name), x * i)
    assert found.entries["capture/end"]["dropped"] == 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("n", [10, 100_000])
def test_mkldnn_tensors(path: Path, n: int) -> None:
    model = nn.Identity()
    x = torch.arange(n, dtype=torch.float32)
    run = captured(model, lambda: model(x.to_mkldnn()), path)
    value = run.values["0/forward/#0/inputs/0"]
    assert value.note == "mkldnn: as a dense tensor"
    assert value.statistics == Statistics(*statistics_of(x, 1) or ())
    assert torch.equal(run.tensor(value.name), x)


def test_jagged_tensors(path: Path) -> None:
    """With `weights_only=True` torch wants dynamo imported for them."""
    model = nn.Linear(2, 3)
    parts = [torch.ones(2, 2), torch.zeros(4, 2)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with ptsave.capture(model, path):
        model(x).values().sum().backward()
    entries = torch.load(path, weights_only=False)
    (call,) = CapturedRun(entries, "run.pt").calls()
    (value,) = call.inputs
    assert value.note == "nested: statistics of all its values"
    assert value.statistics is not None
    assert (value.statistics.numel, value.statistics.n_zero) == (12, 8)
    assert all(map(torch.equal, entries[value.stored].unbind(), parts))
    assert call.grads["inputs/0"].statistics is not None


def test_inference_and_no_grad_and_autocast(path: Path) -> None:
    model = network()

    def run_all() -> None:
        with torch.inference_mode():
            model(torch.ones(1, 4))
        with torch.no_grad():
            model(torch.ones(1, 4))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 4)).sum().backward()

    run = captured(model, run_all, path)
    assert run.values["0/forward/0#2/outputs"].dtype == "torch.bfloat16"
    assert run.names("backward")


def test_lazy_modules(path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    run = captured(model, lambda: model(torch.ones(1, 4)).sum().backward(), path)
    assert run.tensor("0/params/0#0/weight").shape == (3, 4)
    assert run.tensor("0/grads/0#0/weight").shape == (3, 4)


def test_parametrized_modules(path: Path) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    run = assert_bit_identical(model, lambda model: model(torch.ones(2, 4)).sum(), path)
    assert "0/params/0.parametrizations.weight#0/original0" in run.values


def test_wrappers_are_looked_through(path: Path) -> None:
    model = nn.DataParallel(network())
    run = captured(model, lambda: model(torch.ones(2, 4)), path)
    assert [call.module for call in run.calls] == ["", "0", "1", "2"]


def test_threads(path: Path) -> None:
    model = network()

    def work() -> None:
        for _ in range(20):
            model(torch.ones(1, 4)).sum().backward()

    def run_all() -> None:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = captured(model, run_all, path, what=["inputs", "outputs"])
    assert len(run.calls) == 3 * 20 * 4
    by_id = {call.id: call for call in run.calls}
    assert all(by_id[c.parent].module == "" for c in run.calls if c.parent is not None)


def test_parameters_that_make_no_sense(path: Path) -> None:
    with pytest.raises(ValueError, match="what must be one or more of"):
        ptsave.capture(network(), path, what=["weights"])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="not running"):
        ptsave.capture(network(), path).step()


# From 128 KiB on the statistics are taken beside the copy.
@pytest.mark.parametrize("n", [100, 40_000, 300_001])
@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.half(), lambda x: x[1:], lambda x: x.expand(2, -1), torch.Tensor.sin],
)
def test_statistics_are_those_of_the_tensor_that_is_stored(
    path: Path, n: int, change: Callable[[Tensor], Tensor]
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return change(x)

    x = torch.randn(n)
    x[-1] = math.inf
    model = Model()
    run = captured(model, lambda: model(x), path, what=("inputs", "outputs"))
    for name, expected in {"inputs/0": x, "outputs": change(x)}.items():
        value = run.values[f"0/forward/#0/{name}"]
        torch.testing.assert_close(run.tensor(value.name), expected, rtol=0, atol=0, equal_nan=True)
        assert value.statistics == Statistics(*statistics_of(expected, 1) or ())


_MEMORY = """
import resource, sys, torch, ptsave
from torch import nn
path, budget = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(*[nn.ReLU() for _ in range(8)])
x = torch.randn(2 << 20)  # 8 MiB
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
def train(steps, step=lambda: None):
    for _ in range(steps):
        model(x)
        step()
with ptsave.capture(model, path + ".first", max_memory_bytes=1 << 20, tensors=False) as capture:
    train(1, capture.step)  # loads the code
before = peak()
with ptsave.capture(model, path, max_memory_bytes=budget) as capture:
    train(10, capture.step)
print(peak() - before, capture.stored_nbytes)
"""


@pytest.mark.parametrize("is_given_back", [True, False])
def test_memory_stays_within_the_budget(path: Path, is_given_back: bool) -> None:
    """The rest is the model's: malloc gives it back at once, or uses it again."""
    budget = 48 << 20
    environment = {"MALLOC_MMAP_THRESHOLD_": "1000000"} if is_given_back else {}
    done = run_python(_MEMORY, path, budget, env={**os.environ, **environment})
    more_nbytes, stored_nbytes = map(int, done.stdout.split())
    assert stored_nbytes > 600 << 20
    assert more_nbytes <= (budget if is_given_back else stored_nbytes / 3)


def test_copies_and_whole_files_of_the_model_are_not_captured(path: Path) -> None:
    model, x = network(), torch.ones(2, 4)
    with ptsave.capture(model, path):
        copied = copy.deepcopy(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        model(x)
        for other in (copied, average, loaded):
            other(x).sum().backward()
    assert len(Run(path).calls) == 4
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("steps", [None, [1]])
def test_a_backward_that_began_before_has_names_of_its_own(path: Path, steps: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    x = torch.ones(1, 2)
    loss = model(x).sum() if steps is None else None
    with ptsave.capture(model, path, steps=steps) as capture:
        if loss is None:
            loss = model(x).sum()
            capture.step()
        loss.backward()
        model.zero_grad()
        (5 * model(x).sum()).backward()
    run = Run(path)
    grads = {name: run.tensor(name) for name in run.names("grads") if name.endswith("/weight")}
    assert [grad.mean().item() for grad in grads.values()] == [1.0, 5.0]
    for name, grad in grads.items():
        statistics = run.values[name].statistics
        assert statistics is not None
        assert statistics.mean == grad.mean()


class Subclass(torch.Tensor):
    """A tensor of a type that files are not read with."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("tensors", [False, True])
def test_tensors_that_are_freed_or_of_a_type_of_somebody(path: Path, tensors: bool) -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    model = nn.Sequential(nn.Identity())
    with ptsave.capture(model, path, tensors=tensors, what=("outputs",), include="0"):
        model(freed)
        model(torch.ones(2).as_subclass(Subclass))
        model(masked_tensor(torch.ones(2), torch.tensor([True, False])))
        model(torch.ones(2))
    with ptsave.open(path) as run:
        values = {value.name: value for value in run.captured_values()}
        notes = [value.note for value in values.values()]
        assert notes[0] == "memory was freed: no values"
        assert notes[1] == "subclass Subclass: as a plain tensor"
        assert "no values" in (notes[2] or "")
        if tensors:
            for number in (1, 3):
                assert torch.equal(run.tensor(f"0/forward/0#{number}/outputs"), torch.ones(2))
