"""load_optimizer_state_dict by order: everything as from Optimizer.load_state_dict."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stock_comparison import (
    assert_same_failure,
    assert_same_object,
    failure_of,
    saved_bytes,
    stock_load,
    stock_save,
)
from torch import Tensor
from torch.nn import Parameter

import ptsave

Case = tuple[Any, Any]  # an optimizer, and what to load into it
SHAPES = [(3, 2), (4,), (), (2, 3, 2)]


def make_parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Parameter]:
    torch.manual_seed(1)
    return [Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def step(optimizer: Any, n_steps: int = 2, *, sparse: bool = False) -> None:
    """Give every parameter a gradient, and the optimizer a state."""
    torch.manual_seed(2)
    for _ in range(n_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype)
                parameter.grad = gradient.to_sparse() if sparse else gradient
        optimizer.step(lambda: torch.tensor(1.0))


def assert_same_loading(make_case: Callable[[], Case]) -> Any:
    """Load twice, into equal optimizers; returns the one that ptsave has loaded into."""
    (stock, stock_dict), (ours, our_dict) = make_case(), make_case()
    assert stock.load_state_dict(stock_dict) is None
    result: object = ptsave.load_optimizer_state_dict(ours, our_dict)
    assert result is None
    # Together with the state dict: what is aliased must be the same, and what is changed in it.
    assert_same_object(parts_of(ours, our_dict), parts_of(stock, stock_dict))
    return ours


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def parts_of(optimizer: Any, state_dict: Any) -> list[Any]:
    return [optimizer.param_groups, optimizer.state, optimizer.defaults, state_dict]


# ------------------------------------------------------------------------------- torch's optimizers

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, betas=(0.8, 0.9), weight_decay=0.1),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def stepped(name: str, n_steps: int = 2) -> Any:
    optimizer = OPTIMIZERS[name](make_parameters())
    step(optimizer, n_steps)
    return optimizer


def own_state(name: str) -> Case:
    optimizer = stepped(name)
    return optimizer, optimizer.state_dict()


def read_by_torch(state_dict: Any) -> Any:
    return stock_load(io.BytesIO(saved_bytes(stock_save, state_dict)), weights_only=True)


HOW: dict[str, Callable[[str], Case]] = {
    **{
        str(dtype): lambda name, dtype=dtype: (  # type: ignore[misc]
            OPTIMIZERS[name](make_parameters(dtype)),
            stepped(name).state_dict(),
        )
        for dtype in DTYPES
    },
    "into an optimizer with state": lambda name: (stepped(name), stepped(name, 3).state_dict()),
    "its own state": own_state,
    "after torch.load": lambda name: (
        OPTIMIZERS[name](make_parameters()),
        read_by_torch(stepped(name).state_dict()),
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(name: str, how: str) -> None:
    ours = assert_same_loading(lambda: HOW[how](name))
    if how == str(torch.float32):
        step(ours)


@case
def sparse_adam() -> Case:
    saved, target = (torch.optim.SparseAdam(make_parameters(shapes=[(3, 2)])) for _ in "ab")
    step(saved, sparse=True)
    return target, saved.state_dict()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    def make_case() -> Case:
        saved, target = (torch.optim.Muon(make_parameters(shapes=[(3, 2)] * 3)) for _ in "ab")
        step(saved)
        return target, saved.state_dict()

    assert_same_loading(make_case)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fused", [False, True, None])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16], ids=str)
def test_the_step(capturable: bool, fused: bool | None, dtype: torch.dtype) -> None:
    """Its dtype depends on the saved group, not on the parameter; only under the key "step"."""

    def make_case() -> Case:
        params = make_parameters()
        flags = {"capturable": capturable, "fused": fused}
        state = {
            i: {"step": torch.tensor(3, dtype=dtype), "steps": {"step": torch.tensor(4.5).double()}}
            for i in range(4)
        }
        groups = [{"params": [0, 1], "lr": 0.5, **flags}, {"params": [2, 3], "lr": 0.25}]
        target = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
        return target, {"state": state, "param_groups": groups}

    assert_same_loading(make_case)


def test_a_step_that_is_a_number() -> None:
    """`__setstate__` makes a tensor of it, as files of old torch versions need."""

    def make_case() -> Case:
        state_dict = {
            "state": {i: {"step": 3, "exp_avg": torch.ones(SHAPES[i])} for i in range(4)},
            "param_groups": [{"params": [0, 1, 2, 3], "lr": 0.5}],
        }
        return torch.optim.Adam(make_parameters()), state_dict

    ours = assert_same_loading(make_case)
    assert all(isinstance(state["step"], Tensor) for state in ours.state.values())


@case
def integer_and_complex_parameters() -> Case:
    params = [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64)]
    state = {i: {"buffer": torch.ones(2, dtype=torch.float64)} for i in range(2)}
    groups = [{"params": [0, 1]}]
    return torch.optim.SGD(params), {"state": state, "param_groups": groups}


@case
def on_the_meta_device() -> Case:
    saved = torch.optim.Adam(make_parameters())
    step(saved)
    target = torch.optim.Adam([Parameter(p.to("meta")) for p in make_parameters()])
    return target, saved.state_dict()


# -------------------------------------------------------------------------------------- groups, ids


def named(params: list[Parameter], prefix: str = "layer") -> list[tuple[str, Parameter]]:
    return [(f"{prefix}.{i}", parameter) for i, parameter in enumerate(params)]


@pytest.mark.parametrize("saved_names", [False, True])
@pytest.mark.parametrize("own_names", [False, True])
def test_groups_and_names(saved_names: bool, own_names: bool) -> None:
    def make(prefix: str | None, lr: float) -> Any:
        params = make_parameters()
        items: list[Any] = named(params, prefix) if prefix else list(params)
        groups = [{"params": items[:1], "lr": lr}, {"params": items[1:], "weight_decay": lr}]
        return torch.optim.AdamW(groups)

    def make_case() -> Case:
        saved = make("saved" if saved_names else None, 0.5)
        step(saved)
        saved.param_groups[0]["note"] = ["anything", {"nested": torch.ones(2)}]
        return make("own" if own_names else None, 0.25), saved.state_dict()

    assert_same_loading(make_case)


def state_dict_of(ids: list[list[Any]], **extra: Any) -> dict[str, Any]:
    """Return a state dict with momentum for every id, as SGD has it."""
    flat = [param_id for group in ids for param_id in group]
    return {
        "state": {
            param_id: {"momentum_buffer": torch.full((2,), float(i))}
            for i, param_id in enumerate(flat)
        },
        "param_groups": [{"params": group, "lr": 0.5, **extra} for group in ids],
    }


def make_sgd(*sizes: int) -> Any:
    groups = [{"params": [Parameter(torch.zeros(2)) for _ in range(size)]} for size in sizes]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "ids",
    [
        [[7, 3], [5]],
        [["a", "b"], ["c"]],
        [["a", 1], [(2, 3)]],
        [[0, 0], [0]],
        [[0, 1], [1]],
        [[1.0, True], [2]],
        [[None, 2.5], [float("inf")]],
        [[10**30, "x" * 1000], [-1]],
        [(1, 2), (3,)],
        ["ab", "c"],
        [{1: "one", 2: "two"}, [3]],
        [range(2), [2]],
    ],
    ids=str,
)
def test_ids(ids: Any) -> None:
    assert_same_loading(lambda: (make_sgd(2, 1), state_dict_of(ids)))
    assert_same_loading(lambda: (make_sgd(2, 1), state_dict_of(ids, fused=True)))


@case
def equal_ids_of_other_types() -> Case:
    state_dict = state_dict_of([[0, 1], [2]], capturable=True)
    state_dict["state"] = {
        1.0: {"step": torch.tensor(1.0).double()},
        False: {"step": torch.ones(1)},
    }
    return make_sgd(2, 1), state_dict


class Either(int):
    """An id that is found under one number, and equal to another one, too."""

    def __hash__(self) -> int:
        return hash(1)

    def __eq__(self, other: object) -> bool:
        return other in (0, 1)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("param_id", [1, Either(1)])
def test_an_id_in_two_groups(param_id: Any, first: bool) -> None:
    """The first group that torch's search finds decides."""

    def make_case() -> Case:
        state_dict = state_dict_of([[0], [2, 1], [1]])
        for i, group in enumerate(state_dict["param_groups"]):
            group["fused"] = (i == 0) == first
        state_dict["param_groups"][1]["capturable"] = isinstance(param_id, Either) and not first
        state_dict["state"] = {param_id: {"step": torch.tensor(3.0).double()}}
        return make_sgd(1, 2, 1), state_dict

    assert_same_loading(make_case)


@case
def an_id_in_two_groups_that_differ() -> Case:
    state_dict = state_dict_of([[0, 1], [1]])
    state_dict["param_groups"][0]["capturable"] = True
    state_dict["state"] = {1: {"step": torch.tensor(3.0).double()}}
    return make_sgd(2, 1), state_dict


def test_state_of_unknown_ids_is_kept() -> None:
    def make_case() -> Case:
        state_dict = state_dict_of([[0, 1]])
        state_dict["state"].update({"global": torch.ones(2).double(), 9: {"a": [1]}, None: 3})
        return make_sgd(2), state_dict

    ours = assert_same_loading(make_case)
    assert isinstance(ours.state, defaultdict)
    assert ours.state["never seen"] == {}


@case
def groups_that_share_objects() -> Case:
    """A deep copy keeps what is one object one object, and so do we."""
    shared: list[Any] = [1, 2.5]
    lists: list[Any] = [shared, shared]
    state_dict = state_dict_of([[0, 1], [2]], betas=shared, lists=lists, loop=[])
    state_dict["param_groups"][0]["loop"].append(state_dict["param_groups"][1])
    state_dict["param_groups"][1]["tensor"] = torch.ones(2)
    state_dict["param_groups"][0]["view"] = state_dict["param_groups"][1]["tensor"][:1]
    return make_sgd(2, 1), state_dict


@case
def a_parameter_that_is_there_twice() -> Case:
    parameter = Parameter(torch.zeros(2))
    return torch.optim.SGD([parameter, parameter], lr=0.1), state_dict_of([[0, 1]])


# ---------------------------------------------------------------------------------------- odd state

Pair = namedtuple("Pair", "one other")


class Collection(list[Any]):
    """A user's container; the generator that it is rebuilt from must be a generator."""


class Marked(Tensor):
    """A tensor with a `to` of its own."""

    def to(self, *arguments: Any, **options: Any) -> Any:
        return ("moved", sorted(options))


def odd_state() -> dict[Any, Any]:
    double = torch.ones(3, dtype=torch.float64)
    return {
        "list": [double, [double, torch.tensor(1)], 3],
        "tuple": (double, None, 2),
        "nested": {"step": torch.tensor(2).double(), 3: {"step": [double]}, "d": OrderedDict(a=1)},
        "default": defaultdict(list, a=[double]),
        "ordered": OrderedDict(b=double, a=double[1:]),
        "none": None,
        "set": {1, 2},
        "frozen": frozenset([1, 2]),
        "bytes": b"bytes",
        "collection": Collection([double, 1]),
        "number": 3.5,
        "aliased": double,
        "fits": torch.ones(3),
        "parameter": Parameter(torch.ones(3)),
        "sparse": double.to_sparse(),
        "grad": torch.ones(3, requires_grad=True),
        "marked": double.as_subclass(Marked),
        4: torch.ones(2, dtype=torch.int8),
    }


@case
def state_of_odd_things() -> Case:
    state_dict = state_dict_of([[0, 1], [2]])
    state_dict["state"] = {0: odd_state(), 1: [torch.ones(2).double()], 2: torch.ones(2).half()}
    return make_sgd(2, 1), state_dict


@case
def state_as_another_mapping() -> Case:
    state_dict = OrderedDict(state_dict_of([[0, 1]]))
    state_dict["state"] = defaultdict(dict, state_dict["state"])
    return make_sgd(2), state_dict


def test_strings_become_what_torch_makes_of_them() -> None:
    for load in (torch.optim.Optimizer.load_state_dict, ptsave.load_optimizer_state_dict):
        optimizer, state_dict = make_sgd(1), state_dict_of([[0]])
        state_dict["state"][0] = {"text": "text"}
        load(optimizer, state_dict)
        (state,) = optimizer.state.values()
        assert state["text"].startswith("<generator object")


def test_another_policy() -> None:
    """Whoever replaces torch's rule for dtypes gets what torch would pass, in all its calls."""
    calls: list[Any] = []

    def policy(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        group = next(group for group in param_groups if param_id in group["params"])
        calls.append([value, param_id, group["lr"], key])
        return value.clone()

    def make_case() -> Case:
        calls.append("case")
        return make_sgd(2, 1), state_dict_of([[0, 1], [2]])

    name = "_process_value_according_to_param_policy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Optimizer, name, staticmethod(policy))
        assert_same_loading(make_case)
    n_calls = (len(calls) - 2) // 2
    assert n_calls == 3
    assert_same_object(calls[2 + n_calls :], calls[2 : 2 + n_calls])


# ------------------------------------------------------------------------------------ people's code


CASES["empty"] = lambda: (make_sgd(0), {"state": {}, "param_groups": [{"params": []}]})


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", CASES)
def test_as_torch_loads(name: str) -> None:
    assert_same_loading(CASES[name])


class WithHistory(torch.optim.SGD):
    """Notes the calls that torch makes, with what can be seen at that time."""

    history: list[Any]

    def note(self, event: str, *seen: Any) -> None:
        groups = [dict(group) for group in self.param_groups]
        self.history.append([event, groups, dict(self.state), *seen])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.note("before", list(state), type(state["state"]), state)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.note("after")


def test_hooks_and_setstate() -> None:
    def make_case() -> Case:
        optimizer: Any = WithHistory([Parameter(torch.zeros(2)) for _ in range(3)], lr=0.1)
        optimizer.history = []

        def first(which: Any, state_dict: Any) -> None:
            which.note("first", state_dict)
            state_dict["param_groups"] = [{**state_dict["param_groups"][0], "lr": 0.75}]

        def second(which: Any, state_dict: Any) -> Any:
            which.note("second", state_dict)
            return state_dict_of([["a", "b", "c"]])

        optimizer.register_load_state_dict_pre_hook(first)
        optimizer.register_load_state_dict_pre_hook(second)
        optimizer.register_load_state_dict_post_hook(lambda which: which.note("last"))
        optimizer.register_load_state_dict_post_hook(lambda which: which.note("post"), prepend=True)
        return optimizer, state_dict_of([[0, 1, 2]])

    (stock, stock_dict), (ours, our_dict) = make_case(), make_case()
    stock.load_state_dict(stock_dict)
    ptsave.load_optimizer_state_dict(ours, our_dict)
    events = [event for event, *_ in ours.history]
    assert events == ["first", "second", "before", "after", "post", "last"]
    assert_same_object(
        [ours.history, *parts_of(ours, our_dict)], [stock.history, *parts_of(stock, stock_dict)]
    )


@pytest.mark.parametrize("when", ["pre", "setstate", "post"])
def test_people_who_raise(when: str) -> None:
    class Fails(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            if when == "setstate":
                raise LookupError("setstate")

    def fail(*_: Any) -> None:
        raise LookupError(when)

    def make_case() -> Case:
        optimizer = Fails([Parameter(torch.zeros(2))], lr=0.1)
        if when == "pre":
            optimizer.register_load_state_dict_pre_hook(fail)
        elif when == "post":
            optimizer.register_load_state_dict_post_hook(fail)
        return optimizer, state_dict_of([[0]])

    assert_same_refusal(make_case)


def test_methods_of_their_own() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> Any:
            super().load_state_dict(state_dict)
            return "its own result"

    state_dict = state_dict_of([[0]])
    optimizer = Own([Parameter(torch.zeros(2))])
    result: Any = ptsave.load_optimizer_state_dict(optimizer, state_dict)
    assert result == "its own result"
    assert len(optimizer.state) == 1
    wrapped: Any = make_sgd(1)
    wrapped.load_state_dict = lambda state_dict: "wrapped"
    result = ptsave.load_optimizer_state_dict(wrapped, state_dict)
    assert result == "wrapped"
    with pytest.raises(TypeError, match="Own has a load_state_dict"):
        ptsave.load_optimizer_state_dict(optimizer, state_dict, match="name")


def test_schedulers_and_scalers() -> None:
    """Their state is plain, and they load it themselves."""

    def make(epochs: int) -> list[Any]:
        optimizer = torch.optim.SGD(make_parameters(), lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for _ in range(epochs):
            optimizer.step()
            cosine.step()
        return [optimizer, cosine, torch.amp.GradScaler("cpu", init_scale=2.0 ** (epochs + 3))]

    saved, stock, ours = make(3), make(0), make(0)
    for source, expected, target in zip(saved, stock, ours, strict=True):
        expected.load_state_dict(source.state_dict())
        ptsave.load_optimizer_state_dict(target, source.state_dict())
        assert_same_object(target.state_dict(), source.state_dict())
    assert ours[1].get_last_lr() == stock[1].get_last_lr() == saved[1].get_last_lr()


# ------------------------------------------------------------------------------------ hostile input


def assert_same_refusal(make_case: Callable[[], Case]) -> None:
    (stock, stock_dict), (ours, our_dict) = make_case(), make_case()
    assert_same_failure(
        lambda: ptsave.load_optimizer_state_dict(ours, our_dict),
        lambda: stock.load_state_dict(stock_dict),
    )
    assert_same_object(parts_of(ours, our_dict), parts_of(stock, stock_dict))


def broken() -> Iterator[tuple[str, Any]]:
    good = state_dict_of([[0, 1]])
    group, state = good["param_groups"][0], good["state"]
    yield "nothing", {}
    yield "None", None
    yield "a list", [1, 2]
    yield "no groups", {"state": state}
    yield "no state", {"param_groups": [group]}
    yield "one group too many", {**good, "param_groups": [group, group]}
    yield "no group", {**good, "param_groups": []}
    yield "a parameter too few", {**good, "param_groups": [{"params": [0]}]}
    yield "no params", {**good, "param_groups": [{"lr": 0.5}]}
    yield "params are None", {**good, "param_groups": [{"params": None}]}
    yield "params are a number", {**good, "param_groups": [{"params": 2}]}
    yield "unhashable ids", {**good, "param_groups": [{"params": [[0], [1]]}]}
    yield "a group is a list", {**good, "param_groups": [[0, 1]]}
    yield "a group is None", {**good, "param_groups": [None]}
    yield "groups are None", {**good, "param_groups": None}
    yield "groups are a dict", {**good, "param_groups": {0: group}}
    yield "groups are text", {**good, "param_groups": "x"}
    yield "the state is a list", {**good, "state": [1]}
    yield "the state is None", {**good, "state": None}
    yield "a named tuple", {**good, "state": {0: {"pair": Pair(1, 2)}}}
    yield "a range", {**good, "state": {0: {"range": range(3)}}}
    yield "a size", {**good, "state": {0: {"file": io.StringIO("a")}}}


@pytest.mark.parametrize("state_dict", [pytest.param(case, id=what) for what, case in broken()])
def test_broken_state_dicts(state_dict: Any) -> None:
    assert_same_refusal(lambda: (make_sgd(2), state_dict))


def test_a_state_of_another_optimizer() -> None:
    """torch notices in `__setstate__`, or never."""
    assert_same_refusal(
        lambda: (torch.optim.Adam(make_parameters(shapes=[2])), state_dict_of([[0]]))
    )


def test_a_state_that_holds_itself() -> None:
    state_dict = state_dict_of([[0]])
    loop: list[Any] = []
    loop.append(loop)
    state_dict["state"][0]["loop"] = loop
    for load in (torch.optim.Optimizer.load_state_dict, ptsave.load_optimizer_state_dict):
        optimizer = make_sgd(1)
        assert isinstance(failure_of(lambda: load(optimizer, state_dict)), RecursionError)  # noqa: B023
        assert not optimizer.state


def test_options() -> None:
    load: Any = ptsave.load_optimizer_state_dict
    with pytest.raises(ValueError, match='match must be "order" or "name", not \'id\''):
        load(make_sgd(1), state_dict_of([[0]]), match="id")
    with pytest.raises(ValueError, match="can only be used with"):
        load(make_sgd(1), state_dict_of([[0]]), names=["a"])


def test_time_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's search for a group ends at its first step, every time it is asked."""
    n_looked_through = []

    def policy(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        n_looked_through.append([len(group["params"]) for group in param_groups])
        return value

    name = "_process_value_according_to_param_policy"
    monkeypatch.setattr(torch.optim.Optimizer, name, staticmethod(policy))
    ids: list[Any] = [list(range(100)), list("abc")]
    ptsave.load_optimizer_state_dict(make_sgd(100, 3), state_dict_of(ids))
    assert n_looked_through == [[1]] * 103
    n_looked_through.clear()
    ids[1][0] = 100.5  # whose comparison torch is left to do
    ptsave.load_optimizer_state_dict(make_sgd(100, 3), state_dict_of(ids))
    assert n_looked_through == [[100, 3]] * 103
