"""load_optimizer_state_dict by name: every parameter finds its own state, or is reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stock_comparison import assert_same_object
from torch.nn import Parameter

import ptsave

Load = Callable[..., Any]


def load_by_name(optimizer: Any, state_dict: Any, **options: Any) -> ptsave.UnmatchedParameters:
    return ptsave.load_optimizer_state_dict(optimizer, state_dict, match="name", **options)


def shape_of(name: str) -> tuple[int, ...]:
    """Return a shape that is the same for a name in every optimizer."""
    return (len(name), ord(name[0]) % 5 + 1)


def parameter_of(name: str) -> Parameter:
    return Parameter(torch.full(shape_of(name), float(ord(name[0]))))


def make(groups: list[list[str]], kind: Any = torch.optim.AdamW, **hyper: Any) -> Any:
    """Return an optimizer with named parameters; `hyper` are lists, by group."""
    return kind(
        [
            {
                "params": [(name, parameter_of(name)) for name in names],
                **{key: values[i] for key, values in hyper.items()},
            }
            for i, names in enumerate(groups)
        ]
    )


def step(optimizer: Any) -> None:
    """Make a state that tells which parameter it is of."""
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            name = group["param_names"][i] if "param_names" in group else str(i)
            parameter.grad = torch.full_like(parameter, sum(map(ord, name)) / 100)
    optimizer.step()


def stepped(*arguments: Any, **hyper: Any) -> Any:
    optimizer = make(*arguments, **hyper)
    step(optimizer)
    return optimizer


def states_by_name(optimizer: Any) -> dict[str, Any]:
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    pairs = zip(names, params, strict=True)
    return {name: optimizer.state[param] for name, param in pairs if param in optimizer.state}


def snapshot(optimizer: Any) -> list[Any]:
    """Return all that loading can change, as objects; the containers are copied."""
    groups = [dict(group) for group in optimizer.param_groups]
    return [groups, {param: dict(state) for param, state in optimizer.state.items()}]


def assert_refused(optimizer: Any, state_dict: Any, error: Any, match: str, **options: Any) -> None:
    """Nothing may have changed when an error comes."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=match):
        load_by_name(optimizer, state_dict, **options)
    assert_same_object(snapshot(optimizer), before)


# ------------------------------------------------------------------------------------- what matches


def test_the_same_as_by_order() -> None:
    """With the same names in the same order, everything is as torch does it."""
    results: list[list[Any]] = []
    for match in ("order", "name"):
        saved = stepped([["a", "bb"], ["ccc"]], lr=[0.5, 0.25], betas=[(0.5, 0.75), (0.25, 0.5)])
        saved.param_groups[1]["extra"] = [{"tensor": torch.ones(2)}]
        saved.state["everybody"] = {"count": 3}
        optimizer = make([["a", "bb"], ["ccc"]])
        load: Load = ptsave.load_optimizer_state_dict
        load(optimizer, saved.state_dict(), match=match)
        results.append([{**group, "params": None} for group in optimizer.param_groups])
        results[-1] += [list(optimizer.state.values()), type(optimizer.state)]
    assert [sorted(group) for group in results[1][:2]] == [
        sorted(group) for group in results[0][:2]
    ]
    for group, expected in zip(results[1][:2], results[0][:2], strict=True):
        assert_same_object({key: group[key] for key in expected}, expected)
    assert_same_object(results[1][2:], results[0][2:])


def test_extended_and_shrunk() -> None:
    saved = stepped([["a", "bb", "ccc"]])
    optimizer = stepped([["new", "ccc"], ["newer", "a"]], lr=[0.5, 0.25])
    present = dict(states_by_name(optimizer))
    unmatched = load_by_name(optimizer, saved.state_dict(), strict=False)
    assert unmatched == (["new", "newer"], ["bb"])
    assert unmatched.missing == ["new", "newer"]
    assert unmatched.unexpected == ["bb"]
    loaded, expected = states_by_name(optimizer), states_by_name(saved)
    assert loaded["new"] is present["new"]
    assert loaded["newer"] is present["newer"]
    assert_same_object([loaded["a"], loaded["ccc"]], [expected["a"], expected["ccc"]])
    assert len(optimizer.state) == 4


def test_strict() -> None:
    saved = stepped([["a", "bb", "ccc"]])
    message = (
        "Error\\(s\\) in loading state_dict for AdamW:\n"
        '\tMissing parameter\\(s\\) in state_dict: "new", "newer"\\. \n'
        '\tUnexpected parameter\\(s\\) in state_dict: "a", "bb"\\. '
    )
    optimizer = stepped([["new", "ccc", "newer"]])
    assert_refused(optimizer, saved.state_dict(), RuntimeError, message)


def test_a_parameter_without_saved_state_has_none_afterwards() -> None:
    saved, optimizer = make([["a", "bb"]]), stepped([["bb", "a"]])
    load_by_name(optimizer, saved.state_dict())
    assert not optimizer.state


# ---------------------------------------------------------------------------------------- the names


def unnamed(names: list[str]) -> tuple[Any, list[tuple[str, Parameter]]]:
    named_parameters = [(name, parameter_of(name)) for name in names]
    return torch.optim.AdamW([parameter for _, parameter in named_parameters]), named_parameters


def test_names_for_files_without() -> None:
    saved, _ = unnamed(["a", "bb", "ccc"])
    step(saved)
    optimizer = make([["ccc"], ["a", "bb"]])
    state_dict = saved.state_dict()
    assert_refused(optimizer, state_dict, ValueError, "has no param_names.*pass names=")
    load_by_name(optimizer, state_dict, names=("a", "bb", "ccc"))
    loaded = states_by_name(optimizer)
    assert_same_object([loaded[name] for name in ("a", "bb", "ccc")], list(saved.state.values()))


def test_names_take_the_place_of_saved_ones() -> None:
    saved, optimizer = stepped([["old.a", "old.bb"]], torch.optim.SGD), make([["bb", "a"]])
    saved.state.clear()
    assert load_by_name(optimizer, saved.state_dict(), names=["a", "bb"]) == ([], [])


def test_named_parameters_for_optimizers_without() -> None:
    saved = stepped([["a", "bb"]])
    optimizer, named_parameters = unnamed(["bb", "a"])
    assert_refused(
        optimizer, saved.state_dict(), ValueError, "have no names: pass named_parameters"
    )
    frozen = ("frozen", Parameter(torch.ones(1)))
    pairs = [*named_parameters[::-1], frozen]
    load_by_name(optimizer, saved.state_dict(), named_parameters=iter(pairs))
    expected = states_by_name(saved)
    assert_same_object(list(optimizer.state.values()), [expected["a"], expected["bb"]])
    assert "param_names" not in optimizer.param_groups[0]


def test_names_that_do_not_fit() -> None:
    state_dict = stepped([["a", "bb"]]).state_dict()
    optimizer, named_parameters = unnamed(["a", "bb"])

    def refuse(error: Any, match: str, which: Any = state_dict, **options: Any) -> None:
        options.setdefault("named_parameters", named_parameters)
        assert_refused(optimizer, which, error, match, **options)

    refuse(ValueError, 'the state dict has two parameters named "a"', names=["a", "a"])
    refuse(ValueError, "the state dict has 2 parameters, but 3 names", names=["a", "bb", "c"])
    refuse(TypeError, "must be a sequence of str", names="ab")
    refuse(TypeError, "must be a sequence of str", names=[1, 2])
    refuse(ValueError, "parameter 1 of the optimizer", named_parameters=named_parameters[:1])
    twice = [*named_parameters, ("c", named_parameters[0][1])]
    refuse(ValueError, 'one parameter under two names, "a" and "c"', named_parameters=twice)
    same = [("a", parameter) for _, parameter in named_parameters]
    refuse(ValueError, 'the optimizer has two parameters named "a"', named_parameters=same)
    refuse(TypeError, "pairs of a str", named_parameters=[parameter for _, parameter in same])
    refuse(TypeError, "pairs of a str", named_parameters=[(1, same[0][1])])
    group = state_dict["param_groups"][0]
    for broken in ({"params": [0, 0]}, {"params": [0]}, {"param_names": ["a"]}):
        which = {**state_dict, "param_groups": [{**group, **broken}]}
        refuse(ValueError, "the state dict has", which)


@pytest.mark.parametrize(
    "state_dict",
    [None, {}, {"param_groups": 3}, {"param_groups": [3]}, {"param_groups": [{}], "state": {}}],
    ids=repr,
)
def test_broken_state_dicts(state_dict: Any) -> None:
    assert_refused(
        make([["a"]]), state_dict, (TypeError, KeyError, ValueError, AttributeError), "."
    )


# ------------------------------------------------------------------------------- shapes, optimizers


def test_other_shapes() -> None:
    saved, optimizer = stepped([["a", "bb"]]), stepped([["bb", "a"]])
    state = states_by_name(saved)
    state["a"]["exp_avg_sq"] = torch.ones(4, 4)
    message = (
        r"size mismatch for a: its exp_avg_sq has shape torch.Size\(\[4, 4\]\) in the checkpoint, "
        r"but must have shape torch.Size\(\[1, 3\]\)"
    )
    for strict in (False, True):
        assert_refused(optimizer, saved.state_dict(), RuntimeError, message, strict=strict)


def test_other_shapes_in_a_users_optimizer() -> None:
    """Only what is there already tells what shape is right."""

    class Users(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.5})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param] = {"low_rank": torch.ones(2, param.shape[0]), "n": 3}

    saved = stepped([["a", "bb"]], Users)
    load_by_name(make([["bb", "a"]], Users), saved.state_dict())
    states_by_name(saved)["a"]["low_rank"] = torch.ones(3, 1)
    load_by_name(make([["bb", "a"]], Users), saved.state_dict())
    message = "size mismatch for a: its low_rank has shape"
    assert_refused(stepped([["bb", "a"]], Users), saved.state_dict(), RuntimeError, message)


KINDS = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"


@pytest.mark.parametrize("kind", KINDS.split())
def test_every_state_of_torchs_optimizers(kind: str) -> None:
    """What has a parameter's shape is known to have it: a transposed one is noticed."""
    if not hasattr(torch.optim, kind):
        pytest.skip("not in this torch")
    all_options: dict[str, dict[str, Any]] = {
        "Adam": {"amsgrad": True},
        "RMSprop": {"momentum": 0.5, "centered": True},
        "SGD": {"momentum": 0.5},
    }
    options = all_options.get(kind, {})

    def one(*shape: int) -> Any:
        return getattr(torch.optim, kind)([("a", Parameter(torch.ones(shape)))], **options)

    def saved_from(*shape: int) -> Any:
        optimizer = one(*shape)
        step(optimizer)
        return optimizer.state_dict()

    saved = saved_from(2, 3)
    load_by_name(one(2, 3), saved)
    large = [key for key, value in saved["state"][0].items() if getattr(value, "ndim", 0) > 0]
    assert large
    with pytest.raises(RuntimeError) as caught:
        load_by_name(one(4, 5), saved)
    for key in large:
        assert f"size mismatch for a: its {key} has shape" in str(caught.value)
    if kind == "Adafactor":
        with pytest.raises(RuntimeError, match="its variance has shape"):
            load_by_name(one(4), saved_from(3))


def test_lbfgs_has_one_state() -> None:
    def one(*names: str) -> Any:
        return torch.optim.LBFGS([(name, parameter_of(name)) for name in names], max_iter=2)

    saved = one("a", "bb")
    for group in saved.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    saved.step(lambda: 1.0)
    optimizer = one("a", "bb")
    load_by_name(optimizer, saved.state_dict())
    assert_same_object(list(optimizer.state.values()), list(saved.state.values()))
    message = "LBFGS keeps one state for all parameters"
    for names in (["bb", "a"], ["a"], ["a", "bb", "c"]):
        assert_refused(one(*names), saved.state_dict(), ValueError, message, strict=False)


# ------------------------------------------------------------------------------------------- groups


def test_hyper_parameters_follow_the_parameters() -> None:
    saved = stepped([["a", "bb"], ["ccc"]], lr=[0.5, 0.25], weight_decay=[0.1, 0.2])
    saved.param_groups[0]["note"] = ["shared"]
    optimizer = make([["ccc"], ["new"], ["x"], ["a"], ["bb"]], lr=[1.0, 2.0, 3.0, 4.0, 5.0])
    optimizer.param_groups[2] = {"params": [], "lr": 3.0, "weight_decay": 0.01}
    load_by_name(optimizer, saved.state_dict(), strict=False)
    groups = optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.25, 2.0, 3.0, 0.5, 0.5]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.01, 0.01, 0.1, 0.1]
    notes = [groups[3]["note"], groups[4]["note"], saved.param_groups[0]["note"]]
    assert notes == [["shared"]] * 3
    assert len({id(note) for note in notes}) == 3


def test_groups_that_are_joined() -> None:
    hyper = {"lr": [0.5, 0.5], "betas": [(0.5, 0.75)] * 2}
    saved = stepped([["a", "bb"], ["ccc"]], **hyper)
    for group in saved.param_groups:
        group["tensor"] = torch.ones(2)
    optimizer = stepped([["a", "ccc", "bb"]])
    load_by_name(optimizer, saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    for key, value in (("lr", 0.25), ("tensor", torch.zeros(2)), ("betas", [0.5, 0.75]), ("k", 1)):
        other = stepped([["a", "bb"], ["ccc"]], **hyper)
        other.param_groups[0]["tensor"] = other.param_groups[1]["tensor"] = torch.ones(2)
        other.param_groups[1][key] = value
        message = f"group 0 has parameters of the saved groups 0 and 1, which disagree in {key} "
        assert_refused(optimizer, other.state_dict(), ValueError, message)


def test_hooks() -> None:
    """They come before the names are looked at, and after everything."""
    optimizer, saved = make([["a", "bb"]]), stepped([["old.bb", "old.a"]], lr=[0.5])
    saved.state.clear()
    seen = []

    def rename(_: Any, state_dict: Any) -> Any:
        group = state_dict["param_groups"][0]
        names = [name.removeprefix("old.") for name in group.get("param_names", [])]
        return {**state_dict, "param_groups": [{**group, "param_names": names}]}

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(
        lambda which: seen.append(which.param_groups[0]["lr"])
    )
    load_by_name(optimizer, saved.state_dict())
    assert seen == [0.5]


# ---------------------------------------------------------------------------------------- generated

NAMES = [letter * n for letter in "abcdef" for n in (1, 2, 3)]


def partitions(names: list[str]) -> st.SearchStrategy[list[list[str]]]:
    """Return all ways to put names into up to three groups, in any order."""

    def split(order: list[str], places: list[int]) -> list[list[str]]:
        pairs = list(zip(order, places, strict=True))
        groups = [[name for name, place in pairs if place == group] for group in range(3)]
        return [group for group in groups if group] or [[]]  # torch mixes no named and unnamed

    places = st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names))
    return st.builds(split, st.permutations(names), places)


@given(
    saved_names=st.sets(st.sampled_from(NAMES), max_size=8),
    own_names=st.sets(st.sampled_from(NAMES), max_size=8),
    data=st.data(),
    same_ids=st.booleans(),
)
def test_any_groups(
    saved_names: set[str], own_names: set[str], data: st.DataObject, same_ids: bool
) -> None:
    """Compared with torch, which is given a state dict that was put in order by hand."""
    saved = make(data.draw(partitions(sorted(saved_names))), lr=[0.5] * 3)
    step(saved)
    own_groups = data.draw(partitions(sorted(own_names)))
    state_dict = saved.state_dict()
    if not same_ids:
        rename_ids(state_dict)
    optimizer, expected = make(own_groups), make(own_groups)
    unmatched = load_by_name(optimizer, state_dict, strict=False)
    order = [name for group in own_groups for name in group]
    assert unmatched.missing == [name for name in order if name not in saved_names]
    assert set(unmatched.unexpected) == saved_names - own_names
    expected.load_state_dict(in_order(state_dict, own_groups))
    assert_same_object(states_by_name(optimizer), states_by_name(expected))
    for group, names in zip(optimizer.param_groups, own_groups, strict=True):
        assert group.get("param_names", []) == names
        assert group["lr"] == (0.5 if set(names) & saved_names else 0.001)


def rename_ids(state_dict: Any) -> None:
    """Give the parameters ids that say nothing of their order."""
    n_params = sum(len(group["params"]) for group in state_dict["param_groups"])
    ids = random.Random(n_params).sample(range(1000), n_params)
    state_dict["state"] = {ids[i]: state for i, state in state_dict["state"].items()}
    for group in state_dict["param_groups"]:
        group["params"] = [ids[i] for i in group["params"]]


def in_order(state_dict: Any, own_groups: list[list[str]]) -> dict[str, Any]:
    states = {
        name: state_dict["state"][param_id]
        for group in state_dict["param_groups"]
        for name, param_id in zip(group.get("param_names", []), group["params"], strict=True)
    }
    flat = [name for names in own_groups for name in names]
    places = {name: i for i, name in enumerate(flat)}
    hyper = make([["a"]]).state_dict()["param_groups"][0]
    return {
        "state": {places[name]: states[name] for name in flat if name in states},
        "param_groups": [
            {**hyper, "params": [places[name] for name in names], "param_names": names}
            for names in own_groups
        ],
    }
