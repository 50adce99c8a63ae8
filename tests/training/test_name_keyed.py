"""torch.distributed.checkpoint's optimizer dicts restore as `set_optimizer_state_dict` has them."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from _system import in_child
from stock_comparison import assert_same_object, stock_save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ptsave

FORMS = [False, True]  # flattened?
KINDS: list[Any] = [
    torch.optim.AdamW,
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.SGD, lr=0.1),
    torch.optim.Adagrad,
    torch.optim.Adafactor,
    partial(torch.optim.Adam, amsgrad=True, capturable=False),
]


def model_of(n: int = 3) -> Any:
    return nn.Sequential(*(nn.Linear(2 + i, 3 + i) for i in range(n)))


def groups_of(model: nn.Module, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Return two groups of parameters: weights and biases."""
    params = [*model.named_parameters()][:: -1 if backwards else 1]
    weights = [param for name, param in params if "weight" in name]
    biases = [param for name, param in params if "weight" not in name]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.5}]


def step(model: nn.Module, optimizer: Any) -> None:
    for i, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, i + 1.0) if param.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def state_dict_of(model: nn.Module, optimizer: Any, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def by_torch(model: nn.Module, optimizer: Any, state: Any, *, flat: bool) -> Any:
    """Let torch load a copy of the state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
    return optimizer


def assert_same_optimizer(actual: Any, expected: Any) -> None:
    one, other = actual.state_dict(), expected.state_dict()
    states = [  # torch makes empty ones, which mean the same, where there is nothing to load
        {key: value for key, value in sorted(each["state"].items()) if value}
        for each in (one, other)
    ]
    assert_same_object(*states)
    for mine, torchs in zip(one["param_groups"], other["param_groups"], strict=True):
        assert_same_object({key: mine[key] for key in sorted(mine)}, dict(sorted(torchs.items())))


@pytest.mark.parametrize("flat", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", ["parameters", "groups"])
def test_as_torch_loads_them(tmp_path: Path, flat: bool, kind: Any, groups: str) -> None:
    torch.manual_seed(0)
    model = model_of()
    optimizer = kind(groups_of(model) if groups == "groups" else model.parameters())
    step(model, optimizer)
    state = state_dict_of(model, optimizer, flat=flat)
    ptsave.save_checkpoint(tmp_path / "c.pt", model=model, optimizer=state)
    stock_save(state, tmp_path / "o.pt")
    for way in ("load_checkpoint", "load_into", "own names", "restore"):
        fresh, stock = model_of(), model_of()
        make = partial(groups_of, backwards=groups == "groups")
        params: Any = make(fresh) if groups == "groups" else fresh.parameters()
        if way == "own names" and groups == "parameters":
            params = fresh.named_parameters()
        mine = kind(params)
        expected = kind(make(stock) if groups == "groups" else stock.parameters())
        if way == "load_checkpoint":
            ptsave.load_checkpoint(tmp_path / "c.pt", model=fresh, optimizer=mine)
        elif way == "restore":
            os.makedirs(tmp_path / "steps", exist_ok=True)
            (tmp_path / "steps" / "step-1.pt").write_bytes((tmp_path / "c.pt").read_bytes())
            ptsave.AsyncCheckpointer(tmp_path / "steps").restore(model=fresh, optimizer=mine)
        elif way == "load_into" or groups == "groups":
            named = fresh.named_parameters()
            keys = ptsave.load_into(tmp_path / "o.pt", mine, named_parameters=named)
            assert keys == ([], [])
        else:
            ptsave.load_into(tmp_path / "o.pt", mine)
        by_torch(stock, expected, state, flat=flat)
        if way == "own names":
            for group in mine.param_groups:
                group.pop("param_names", None)
        assert_same_optimizer(mine, expected)
        step(fresh, mine)


@contextmanager
def _one_rank(folder: Path) -> Iterator[None]:
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with _one_rank(tmp_path):
        yield


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "inner ddp":
        model[1] = nn.parallel.DistributedDataParallel(model[1])
        return model
    if how == "compiled":
        return torch.compile(model)
    if how == "compiled ddp":
        return nn.parallel.DistributedDataParallel(torch.compile(model))
    if how == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPERS = ["plain", "ddp", "inner ddp", "compiled", "compiled ddp", "checkpointed"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("flat", FORMS)
@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [*(("plain", each) for each in WRAPPERS), ("compiled ddp", "compiled ddp")],
)
def test_wrappers(
    tmp_path: Path, one_rank: None, flat: bool, saved_as: str, loaded_as: str
) -> None:
    """Names in the file are those of the bare model, whatever wraps it at either end."""
    model = wrapped(model_of(), saved_as)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = state_dict_of(model, optimizer, flat=flat)
    ptsave.save_checkpoint(tmp_path / "c.pt", optimizer=state, model=model)
    fresh, stock = wrapped(model_of(), loaded_as), wrapped(model_of(), loaded_as)
    expected = by_torch(stock, torch.optim.AdamW(stock.parameters()), state, flat=flat)
    mine = torch.optim.AdamW(fresh.parameters())
    named = fresh.named_parameters()
    stock_save(state, tmp_path / "o.pt")
    if loaded_as != "inner ddp":  # whose names tell by themselves that it is wrapped
        ptsave.load_into(tmp_path / "o.pt", mine, named_parameters=named)
        assert_same_optimizer(mine, expected)
    mine = torch.optim.AdamW(fresh.parameters())
    rest = _load_beside(tmp_path, fresh, mine, state)
    assert rest.report["optimizer"] == ([], [])
    assert_same_optimizer(mine, expected)


def _load_beside(folder: Path, model: nn.Module, optimizer: Any, state: Any) -> Any:
    """Load an optimizer with its model, whose own state dict has its own names."""
    stock_save({"model": model.state_dict(), "optimizer": state}, folder / "b.pt")
    return ptsave.load_checkpoint(folder / "b.pt", model=model, optimizer=optimizer)


class Tied(nn.Module):
    """Has tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def with_a_child_called_module() -> nn.Module:
    """Only what a wrapper has put into a name is taken out of it."""
    return nn.Sequential(OrderedDict(module=nn.Linear(2, 2)))


@pytest.mark.parametrize("flat", FORMS)
@pytest.mark.parametrize("make", [Tied, with_a_child_called_module])
def test_other_models(tmp_path: Path, make: Any, flat: bool) -> None:
    model, fresh, stock = make(), make(), make()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = state_dict_of(model, optimizer, flat=flat)
    mine = torch.optim.AdamW(fresh.parameters())
    _load_beside(tmp_path, fresh, mine, state)
    expected = by_torch(stock, torch.optim.AdamW(stock.parameters()), state, flat=flat)
    assert_same_optimizer(mine, expected)


@pytest.mark.parametrize("flat", FORMS)
def test_two_optimizers_in_one_dict(tmp_path: Path, flat: bool) -> None:
    """Each takes its own part, as with torch; the report says what the other's is."""
    model = model_of(2)
    one = torch.optim.AdamW(model[0].parameters())
    two = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    step(model, one)
    for param in model[1].parameters():
        param.grad = torch.ones_like(param)
    two.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, (one, two), options=options)
    stock_save({"model": model.state_dict(), "one": state, "two": state}, tmp_path / "c.pt")
    fresh = model_of(2)
    a = torch.optim.AdamW(fresh[0].parameters())
    b = torch.optim.SGD(fresh[1].parameters(), lr=0.5, momentum=0.1)
    rest = ptsave.load_checkpoint(tmp_path / "c.pt", model=fresh, one=a, two=b)
    assert_same_optimizer(a, one)
    assert_same_optimizer(b, two)
    assert rest.report["one"].unexpected_keys == ["1.weight", "1.bias"]
    assert rest.report["two"].unexpected_keys == ["0.weight", "0.bias"]
    with pytest.raises(RuntimeError, match="Unexpected parameter"):
        ptsave.load_checkpoint(tmp_path / "c.pt", model=fresh, one=a, match="name")


@pytest.mark.parametrize("flat", FORMS)
def test_missing_parameters_are_errors_as_for_torch(tmp_path: Path, flat: bool) -> None:
    model = model_of(2)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = state_dict_of(model, optimizer, flat=flat)
    larger = model_of(3)
    mine = torch.optim.AdamW(larger.parameters())
    step(larger, mine)
    stock_save(state, tmp_path / "o.pt")
    before = copy.deepcopy(mine.state_dict())
    load = partial(ptsave.load_into, tmp_path / "o.pt", mine)
    with pytest.raises(RuntimeError, match=r'Missing parameter\(s\).*"2.weight", "2.bias"'):
        load(named_parameters=larger.named_parameters())
    assert_same_object(mine.state_dict(), before)
    keys = load(named_parameters=larger.named_parameters(), strict=False)
    assert keys.missing_keys == ["2.weight", "2.bias"]
    words = "the optimizer's parameters have no names" if flat else "doesn't match the size of"
    with pytest.raises(ValueError, match=words):
        load()
    if not flat:  # by order, as torch's own load_state_dict takes names for numbers
        matches: tuple[Literal["order"] | None, ...] = ("order", None)
        for match in matches:
            smaller = torch.optim.AdamW(model_of(2).parameters())
            assert ptsave.load_into(tmp_path / "o.pt", smaller, match=match) is None
            assert_same_optimizer(smaller, optimizer)


def test_new_names_for_such_a_dict(tmp_path: Path) -> None:
    model = model_of(2)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    fresh = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 4)})
    mine = torch.optim.AdamW(fresh.parameters())
    stock_save(
        {"model": model.state_dict(), "optimizer": state_dict_of(model, optimizer, flat=True)},
        tmp_path / "c.pt",
    )
    ptsave.load_checkpoint(
        tmp_path / "c.pt", model=fresh, optimizer=mine, key_mapping={"0": "a", "1": "b"}
    )
    assert_same_object(mine.state_dict()["state"], optimizer.state_dict()["state"])


def test_nested_state(tmp_path: Path) -> None:
    """State in dicts, as Shampoo has it, is flattened with dots."""
    model = nn.Linear(2, 2)
    state = {
        "state.weight.factors.left": torch.ones(2, 2),
        "state.weight.factors.0": torch.zeros(2),
        "state.bias.step": torch.tensor(3.0),
        "param_groups.weight.lr": 0.5,
        "param_groups.bias.lr": 0.5,
    }
    stock_save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    ptsave.load_checkpoint(tmp_path / "c.pt", model=model, optimizer=mine)
    assert mine.param_groups[0]["lr"] == 0.5
    factors = mine.state[model.weight]["factors"]
    assert_same_object(factors, {"left": torch.ones(2, 2), "0": torch.zeros(2)})
    del state["param_groups.bias.lr"]
    stock_save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"'bias\.step', but no group has that parameter"):
        ptsave.load_checkpoint(tmp_path / "c.pt", model=model, optimizer=mine)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    # DTensor keeps groups per thread for good: a child forked by another thread would free them.
    in_child(partial(_refuse_sharded, tmp_path))


def _refuse_sharded(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    with _one_rank(folder):
        model = model_of(1)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        stock_save(state_dict_of(model, optimizer, flat=False), folder / "o.pt")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded: Any = fully_shard(model_of(1), mesh=mesh)
        mine = torch.optim.AdamW(sharded.parameters())
        named = sharded.named_parameters()
        with pytest.raises(TypeError, match="set_optimizer_state_dict"):
            ptsave.load_into(folder / "o.pt", mine, named_parameters=named)
