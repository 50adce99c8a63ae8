"""load_optimizer with tensors whose bytes arrive later: nobody looks, and state stays in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object
from test_optimizer_state import (
    DTYPES,
    OPTIMIZERS,
    WithHistory,
    make_parameters,
    make_sgd,
    odd_state,
    state_dict_of,
    step,
)
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptsave.state.copying import Copier
from ptsave.state.optimizer_matching import Matching
from ptsave.state.optimizers import load_optimizer

JUNK = 111


def tensors_in(obj: Any) -> Iterator[Tensor]:
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, (Mapping, list, tuple)):
        for child in obj.values() if isinstance(obj, Mapping) else obj:
            yield from tensors_in(child)


class LateBytes(TorchDispatchMode, Copier):
    """A copier for a file that is still being read: its tensors hold junk, and must not be used.

    `show` and `finish` are when the bytes arrive.
    """

    def __init__(self, state_dict: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shown: list[Any] = []
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.copied: list[Tensor] = []
        storages: dict[int, Tensor] = {
            t.untyped_storage()._cdata: t for t in tensors_in(state_dict) if is_strided(t)
        }
        self.hidden: dict[int, Any] = {key: t.untyped_storage() for key, t in storages.items()}
        self.bytes = {key: bytes(storage) for key, storage in self.hidden.items()}
        for storage in self.hidden.values():
            storage.fill_(JUNK)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            assert type(target) in (Tensor, Parameter)
            assert type(source) in (Tensor, Parameter)
            assert target.shape == source.shape
            assert not any(target is each for each in self.copied), "filled twice"
            self.copied.append(target)
            self.pending.append((target, source))

    def replace(self, replacement: object) -> None:
        raise AssertionError("only modules have buffers")

    def show_dict(self, entries: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("only code of modules edits a dict")

    def note_assigned(self, state_dict: object) -> None:
        raise AssertionError("only modules are assigned to")

    def lend(self, state_dict: object) -> None:
        raise AssertionError("only modules have hooks that are run to find errors")

    def convert(self, source: Tensor, dtype: Any, device: Any) -> Tensor:
        if dtype in (None, source.dtype) and device == source.device:
            return source
        if not is_strided(source) or source.requires_grad:
            self.finish()
            return source.to(dtype=dtype, device=device)
        result = torch.empty(source.shape, dtype=dtype or source.dtype, device=device)
        self.pending.append((result, source))
        return result

    def show(self, state_dict: Mapping[Any, Any]) -> None:
        assert isinstance(state_dict, Mapping)
        self.shown.append(state_dict)
        self.finish()

    def finish(self) -> None:
        hidden, self.hidden = self.hidden, {}
        for key, storage in hidden.items():
            values = torch.frombuffer(bytearray(self.bytes[key]), dtype=torch.uint8)
            storage.copy_(values.untyped_storage())
        with torch.no_grad():
            for target, source in self.pending:
                target.copy_(source)
        self.pending.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if (
                isinstance(each, Tensor)
                and is_strided(each)
                and func is not torch.ops.aten.detach.default
            ):
                assert each.untyped_storage()._cdata not in self.hidden, f"{func} looks at it"
        return func(*args, **(kwargs or {}))


def is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def restore(
    optimizer: Any, state_dict: Any, *, in_place: bool = False, **options: Any
) -> LateBytes:
    """Load from a file whose bytes arrive at the end, or when they are asked for."""
    copier = LateBytes(state_dict)
    with copier:
        load_optimizer(optimizer, state_dict, copier, Matching(**options), in_place=in_place)
    copier.finish()
    # The new state is always shown before the optimizer gets it.
    copier.shown = [each for each in copier.shown if list(each) != ["state", "param_groups"]]
    return copier


def assert_same_values(actual: Any, expected: Any) -> None:
    """Compare optimizers as they are saved; whether tensors are shared is not compared."""
    mine, theirs = (copy.deepcopy(each.state_dict()) for each in (actual, expected))
    for state_dict in (mine, theirs):
        state_dict["state"] = {key: unshared(state) for key, state in state_dict["state"].items()}
    assert_same_object(mine, theirs)


def unshared(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: unshared(value) for key, value in state.items()}
    return [unshared(each) for each in state] if type(state) is list else state


# ------------------------------------------------------------------------------- torch's optimizers


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(name: str, target_dtype: torch.dtype, in_place: bool) -> None:
    """Into a new one, and into one that has state: nothing is looked at, and no byte is wrong."""
    for n_steps in (0, 2):
        saved = OPTIMIZERS[name](make_parameters())
        step(saved, 3)
        expected, target = (OPTIMIZERS[name](make_parameters(target_dtype)) for _ in "ab")
        step(expected, n_steps)
        step(target, n_steps)
        expected.load_state_dict(copy.deepcopy(saved.state_dict()))
        before = list(tensors_in(dict(target.state)))
        copier = restore(target, copy.deepcopy(saved.state_dict()), in_place=in_place)
        assert_same_values(target, expected)
        if name != "adam-tensor-lr":  # a tensor among the hyper-parameters is copied at once
            assert copier.shown == []
        after = list(tensors_in(dict(target.state)))
        stayed = [one is other for one, other in zip(before, after, strict=False)]
        if not in_place:
            assert not any(stayed)
        elif target_dtype is torch.float32 and name != "lbfgs":  # whose history is in lists
            assert all(stayed)


def test_by_name_in_place() -> None:
    def make(*names: str) -> Any:
        pairs = [(name, Parameter(torch.ones(2))) for name in names]
        return torch.optim.SGD(pairs, lr=0.1, momentum=0.9)

    saved, target = make("a", "b", "c"), make("new", "c", "a")
    step(saved)
    step(target, 1)
    new, *before = [state["momentum_buffer"] for state in target.state.values()]
    kept = new.clone()
    copier = restore(
        target, copy.deepcopy(saved.state_dict()), match="name", strict=False, in_place=True
    )
    states = [state["momentum_buffer"] for state in saved.state.values()]
    assert torch.equal(before[0], states[2])
    assert torch.equal(before[1], states[0])
    assert torch.equal(new, kept)
    params = target.param_groups[0]["params"]
    for param, buffer in zip(params, [new, *before], strict=True):
        assert target.state[param]["momentum_buffer"] is buffer
    assert copier.shown == []


# ----------------------------------------------------------------------------------------- in place


def present(make_buffers: Callable[[list[Parameter]], list[Any]]) -> Any:
    optimizer = make_sgd(3)
    params = optimizer.param_groups[0]["params"]
    for param, buffer in zip(params, make_buffers(params), strict=True):
        optimizer.state[param] = {"momentum_buffer": buffer}
    return optimizer


def around_a_parameter(params: list[Parameter]) -> list[Any]:
    memory = torch.zeros(20)
    params[0].data = memory[4:6]
    params[1].data = memory[8:10]
    return [memory[::19], torch.zeros(2), torch.zeros(2)]


def odd_tensors(params: list[Parameter]) -> list[Any]:
    with torch.inference_mode():
        inference = torch.zeros(2)
    return [torch.zeros(1).expand(2), torch.zeros(2).to_sparse(), inference]


@pytest.mark.parametrize(
    ("make_buffers", "n_filled"),
    [
        (lambda params: [torch.zeros(2)] * 3, 0),
        (lambda params: [(memory := torch.zeros(3))[:2], memory[1:], torch.zeros(2)], 1),
        (lambda params: [params[1].detach(), params[0].detach(), torch.zeros(2)], 1),
        (around_a_parameter, 2),
        (odd_tensors, 0),
        (lambda _: [torch.zeros(2).double(), torch.zeros(1, 2), torch.zeros(2).to("meta")], 0),
        (lambda _: [None, [torch.zeros(2)], torch.zeros(2, requires_grad=True)], 0),
    ],
)
def test_what_cannot_be_filled(make_buffers: Any, n_filled: int) -> None:
    """It is replaced, as torch does it; parameters never change."""
    optimizer, expected = present(make_buffers), present(make_buffers)
    values = [p.clone() for p in optimizer.param_groups[0]["params"]]
    expected.load_state_dict(state_dict_of([[0, 1, 2]]))
    copier = restore(optimizer, state_dict_of([[0, 1, 2]]), in_place=True)
    assert_same_values(optimizer, expected)
    assert len(copier.copied) == n_filled
    for parameter, value in zip(optimizer.param_groups[0]["params"], values, strict=True):
        assert torch.equal(parameter, value)


def test_views_of_one_buffer_are_filled() -> None:
    """Flat memory with the state of all parameters, side by side or interleaved by rows."""
    flat = torch.zeros(6)
    optimizer = present(lambda params: list(flat.view(3, 2)))
    restore(optimizer, state_dict_of([[0, 1, 2]]), in_place=True)
    assert flat.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_the_file_shares_stays_shared() -> None:
    state_dict = state_dict_of([[0, 1, 2]])
    shared = torch.tensor([5.0, 6.0, 7.0])
    state_dict["state"][0]["momentum_buffer"] = shared[:2]
    state_dict["state"][1]["momentum_buffer"] = shared[1:]
    optimizer = present(lambda params: [torch.zeros(2) for _ in params])
    copier = restore(optimizer, state_dict, in_place=True)
    assert len(copier.copied) == 1
    one, other, _ = (state["momentum_buffer"] for state in optimizer.state.values())
    one.fill_(9)
    assert other.tolist() == [9, 7]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_there_twice() -> None:
    """Its present state is not filled with two values."""
    parameter = Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter, parameter], lr=0.1)
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros(2)}
    restore(optimizer, state_dict_of([[0, 1]]), in_place=True)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1, 1]


def test_its_own_state_in_place() -> None:
    optimizer = torch.optim.Adam(make_parameters())
    step(optimizer)
    expected = copy.deepcopy(optimizer)
    restore(optimizer, optimizer.state_dict(), in_place=True)
    assert_same_values(optimizer, expected)


def test_nested_state_in_place() -> None:
    def nested(value: int) -> dict[str, Any]:
        one, other = torch.full((2,), float(value)), torch.full((1,), float(value))
        return {"a": {"step": one, "b": {3: other}}}

    optimizer = make_sgd(1)
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.state[parameter] = before = nested(0)
    state_dict = {**state_dict_of([[0]]), "state": {0: nested(4)}}
    restore(optimizer, state_dict, in_place=True)
    state = optimizer.state[parameter]
    assert state["a"]["step"] is before["a"]["step"]
    assert state["a"]["b"][3] is before["a"]["b"][3]
    assert_same_object(state, nested(4))


def test_nothing_is_filled_when_an_error_comes() -> None:
    optimizer = present(lambda params: [torch.zeros(2) for _ in params])
    for broken in ({"range": range(2)}, 3):
        state_dict = state_dict_of([[0, 1, 2]])
        if broken == 3:
            state_dict["param_groups"][0]["params"].append(3)
        else:
            state_dict["state"][2]["odd"] = broken
        copier = LateBytes(state_dict)
        with pytest.raises((TypeError, ValueError)), copier:
            load_optimizer(optimizer, state_dict, copier, in_place=True)
        assert copier.copied == []
        assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())


# ------------------------------------------------------------------------------------ people's code


def test_hooks_see_values() -> None:
    """Whoever may look is announced: hooks, `__setstate__`, methods of their own."""
    seen: list[Any] = []

    def look(*arguments: Any) -> None:
        for argument in arguments:
            seen.extend(t.tolist() for t in tensors_in(getattr(argument, "state", argument)))

    class Looks(torch.optim.SGD):
        def __setstate__(self, state: Any) -> None:
            look(state)
            super().__setstate__(state)  # type: ignore[no-untyped-call]

    class Loads(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            look(state_dict)

    def make(kind: Any) -> Any:
        return kind([Parameter(torch.zeros(2))], lr=0.1)

    def with_hook(kind: str) -> Any:
        optimizer = make(torch.optim.SGD)
        getattr(optimizer, f"register_load_state_dict_{kind}_hook")(look)
        return optimizer

    for optimizer in (make(Looks), make(Loads), with_hook("pre"), with_hook("post")):
        for in_place in (False, True):
            seen.clear()
            state_dict = state_dict_of([["a"]])
            state_dict["state"]["a"]["momentum_buffer"] += 3
            restore(optimizer, state_dict, in_place=in_place)
            assert [3.0, 3.0] in seen


def test_history_in_place() -> None:
    """What torch has not changed before `__setstate__`, we have not changed either."""
    optimizer = WithHistory([Parameter(torch.zeros(2))], lr=0.1)
    optimizer.history = []
    restore(optimizer, state_dict_of([[0]]))
    assert [event for event, *_ in optimizer.history] == ["before", "after"]


def test_odd_state() -> None:
    """Containers and tensors with code of their own are shown before that code runs."""
    state_dict, expected_dict = state_dict_of([[0]]), state_dict_of([[0]])
    state_dict["state"][0], expected_dict["state"][0] = odd_state(), odd_state()
    optimizer, expected = make_sgd(1), make_sgd(1)
    expected.load_state_dict(expected_dict)
    copier = restore(optimizer, state_dict, in_place=True)
    assert [list(shown) for shown in copier.shown] == [["collection"], ["marked"]]
    assert_same_object(list(optimizer.state.values()), list(expected.state.values()))


def test_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_process_value_according_to_param_policy"
    policy = staticmethod(lambda param, value, param_id, param_groups, key: value + 1)
    monkeypatch.setattr(torch.optim.Optimizer, name, policy)
    optimizer = make_sgd(1)
    assert restore(optimizer, state_dict_of([[0]])).shown
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].tolist() == [1, 1]


def test_tensors_among_hyper_parameters() -> None:
    state_dict = state_dict_of([[0]], learning_rate=torch.tensor(0.5))
    choices: list[dict[str, Any]] = [{}, {"match": "name", "names": ["a"]}]
    for options in choices:
        optimizer = torch.optim.SGD([("a", Parameter(torch.zeros(2)))])
        copier = restore(optimizer, copy.deepcopy(state_dict), **options)
        assert copier.shown
        assert optimizer.param_groups[0]["learning_rate"] == 0.5


def test_comparing_hyper_parameters() -> None:
    """Groups that are joined are compared, tensors and all."""
    for rate, n_shown in ((0.5, 0), (torch.tensor(0.5), 1)):
        saved = state_dict_of([[0], [1]])
        for group in saved["param_groups"]:
            group["learning_rate"] = copy.deepcopy(rate)
        pairs = [(name, Parameter(torch.zeros(2))) for name in "ab"]
        optimizer = torch.optim.SGD(pairs)
        copier = restore(optimizer, saved, match="name", names=["a", "b"])
        assert bool(copier.shown) == bool(n_shown)
        assert optimizer.param_groups[0]["learning_rate"] == 0.5
