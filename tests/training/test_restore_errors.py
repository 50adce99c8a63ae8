"""The errors of `load_into` and `load_checkpoint` list what torch's `load_state_dict` lists."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_failure, assert_same_object, stock_load, stock_save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parameter import is_lazy

import ptsave


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        self.was_set = True


class Lazy(nn.Module):
    memory: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.memory = None
        ptsave.register_lazy_buffer(self, "memory")


def nested(*children: nn.Module) -> Any:
    """A model whose first layer will not fit, and whose other ones lack keys."""
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(*children), nn.Linear(2, 2))


def with_hook(hook: Callable[..., Any], kind: str = "pre") -> Any:
    model = nested(nn.Linear(2, 2), nn.BatchNorm1d(2))
    getattr(model[1], f"register_load_state_dict_{kind}_hook")(hook)
    return model


def rename(_: nn.Module, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in list(entries):
        assert not isinstance(entries[key], Tensor) or entries[key].isfinite().all()
        entries[key.replace("old.", "0.")] = entries.pop(key)


def add_errors(_: nn.Module, entries: Any, prefix: str, metadata: Any, *lists: Any) -> None:
    strict, missing, unexpected, errors = lists
    assert strict is True
    missing.append(prefix + "a")
    unexpected.append(prefix + "b")
    errors.append("of a hook")


def edit_keys(_: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if "bias" not in key]
    keys.unexpected_keys.append("of a post-hook")


def with_a_hook_that_keeps_its_dict() -> Any:
    kept: list[Any] = []
    model = with_hook(lambda _, entries, *rest: kept.append(entries))
    model[1][0].register_load_state_dict_post_hook(lambda *_: kept[0].update({"1.1.late": 1}))
    return model


def fail(*_: Any) -> None:
    raise LookupError("of a hook")


MODELS: dict[str, Callable[[], Any]] = {
    "hook that looks": lambda: with_hook(lambda *_: None),
    "hook that renames": lambda: with_hook(rename),
    "hook that adds errors": lambda: with_hook(add_errors),
    "post-hook": lambda: with_hook(edit_keys, "post"),
    "hook that keeps its dict": with_a_hook_that_keeps_its_dict,
    "hook that raises": lambda: with_hook(fail),
    "post-hook that returns": lambda: with_hook(lambda *_: 1, "post"),
    "lazy buffer": lambda: nested(Lazy()),
    "lazy module": lambda: nested(nn.Linear(2, 2), nn.LazyLinear(2)),
    "extra state": lambda: nested(Extra(2, 2), nn.Linear(2, 2)),
    "weight norm": lambda: nested(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
    "no hooks": lambda: nested(nn.Linear(2, 2), nn.BatchNorm1d(2)),
}

# Of the file, beside a first layer whose weight has another shape.
ENTRIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "some": {"1.0.weight": torch.ones(2, 2), "1.old.weight": torch.ones(2, 2), "else": 1},
    "other shapes": {"1.0.weight": torch.ones(3), "1.old.bias": torch.ones(3), "2.bias": "text"},
    "extra": {"1.0._extra_state": 3, "1.0.memory": torch.ones(3), "2._extra_state": 3},
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_listed(name: str, entries: str, strict: bool, tmp_path: Path) -> None:
    state_dict = {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(2), **ENTRIES[entries]}
    path = tmp_path / "state.pt"
    stock_save(state_dict, path)
    stock_save({"model": state_dict}, tmp_path / "checkpoint.pt")

    def by_load_into(model: nn.Module) -> None:
        ptsave.load_into(path, model, strict=strict)

    def by_load_checkpoint(model: nn.Module) -> None:
        ptsave.load_checkpoint(tmp_path / "checkpoint.pt", model=model, strict=strict)

    for load in (by_load_into, by_load_checkpoint):
        model = MODELS[name]()
        before = [each.detach().clone() for each in model.parameters() if not is_lazy(each)]
        failure = assert_same_failure(
            functools.partial(load, model),
            lambda: MODELS[name]().load_state_dict(stock_load(path), strict=strict),
        )
        assert not hasattr(failure, "overwritten")
        assert not any(hasattr(module, "was_set") for module in model.modules())
        after = [each.detach() for each in model.parameters() if not is_lazy(each)]
        assert_same_object(after, before)


def test_hooks_run_once(tmp_path: Path) -> None:
    """Also where the error is found without them."""
    calls: list[str] = []
    for weight in (torch.ones(3, 3), torch.ones(2, 2)):
        model = with_hook(lambda *_: calls.append("pre"))
        model[1].register_load_state_dict_post_hook(lambda *_: calls.append("post"))
        stock_save({**model.state_dict(), "0.weight": weight}, tmp_path / "state.pt")
        calls.clear()
        if weight.shape == (3, 3):
            with pytest.raises(RuntimeError):
                ptsave.load_into(tmp_path / "state.pt", model)
        else:
            ptsave.load_into(tmp_path / "state.pt", model)
        assert calls == ["pre", "post"]


def test_a_method_that_only_calling_it_knows(tmp_path: Path) -> None:
    """Nothing of it is called in vain: sizes that differ elsewhere are an error before."""

    class Own(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise AssertionError("nothing is to be changed")

    model = nested(Own(2, 2))
    stock_save({"0.weight": torch.ones(3, 3)}, tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        ptsave.load_into(tmp_path / "state.pt", model)


# ---------------------------------------------------------------- which part was probably meant


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda s: {"model": s, "epoch": 3}, "'model' fits: ptsave.load_checkpoint(path, model="),
        (lambda s: {"state_dict": s, "lr": 0.1}, "ptsave.load_checkpoint(path, state_dict=model)"),
        (lambda s: {"model_state_dict": s, "optimizer": {"state": {}}}, "model_state_dict=model)"),
        (lambda s: {"a b": s}, "ptsave.load_checkpoint(path, **{'a b': model})"),
        (lambda s: {"ema": {"b c": s}}, "model, ptsave.load(path)['ema']['b c'])"),
        (lambda s: {"x": nn.Linear(3, 3).state_dict(), "critic": s}, "(path, critic=model)"),
        (lambda s: ptsave.add_prefix(s, "module."), "ptsave.strip_prefix(ptsave.load(path), 'mod"),
        (
            lambda s: {"model": ptsave.add_prefix(s, "module.")},
            "ptsave.strip_prefix(ptsave.load(path)['model'], 'module.')",
        ),
        (lambda s: {"other": torch.ones(1)}, ""),
        (lambda s: {"model": {"other": torch.ones(1)}}, ""),
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_part_that_was_meant(make: Any, advice: str, hooked: bool, tmp_path: Path) -> None:
    saved, model = nested(nn.Linear(2, 2)), nested(nn.Linear(2, 2))
    if hooked:
        model[1].register_load_state_dict_pre_hook(lambda *_: None)
    stock_save(make(saved.state_dict()), tmp_path / "checkpoint.pt")
    failure = assert_same_failure(
        lambda: ptsave.load_into(tmp_path / "checkpoint.pt", model),
        lambda: model.load_state_dict(stock_load(tmp_path / "checkpoint.pt")),
    )
    assert advice in str(failure)
    assert ("ptsave." in str(failure)) == bool(advice)


def test_the_part_that_was_meant_for_load_model(tmp_path: Path) -> None:
    saved = {"epoch": 3, "optimizer": {"state": {}}, "model": nn.Linear(2, 2).state_dict()}
    stock_save(saved, tmp_path / "checkpoint.pt")
    with pytest.raises(TypeError, match=r"ptsave\.load_checkpoint\(path, model=model\)"):
        ptsave.load_model(nn.Linear(2, 2), tmp_path / "checkpoint.pt")


def sgd(n: int = 2) -> Any:
    return torch.optim.SGD(nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))).parameters(), lr=0.1)


def failure_of(path: Path, obj: Any, target: Any) -> str:
    """Save, and return the words of the error; a dict must not have changed."""
    stock_save(obj, path)
    before = copy.deepcopy(target)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        ptsave.load_into(path, target)
    if isinstance(target, dict):
        assert_same_object(target, before)
    return str(caught.value)


def test_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    state = sgd().state_dict()
    words = failure_of(path, {"model": {}, "optim": state}, sgd())
    assert "does not hold an optimizer's state dict" in words
    assert "The file's entry 'optim' fits: ptsave.load_checkpoint(path, optim=optimizer)" in words
    words = failure_of(path, {"run": {"optim": state}}, sgd())
    assert "ptsave.load_optimizer_state_dict(optimizer, ptsave.load(path)['run']['optim'])" in words
    words = failure_of(path, {"small": sgd(1).state_dict(), "right": state}, sgd())
    assert "'right' fits" in words
    words = failure_of(path, {"small": sgd(1).state_dict()}, sgd())
    assert "'small' is an optimizer's state" in words
    words = failure_of(path, {"opt 1": state}, sgd())
    assert "ptsave.load_checkpoint(path, **{'opt 1': optimizer})" in words
    assert "ptsave." not in failure_of(path, {"model": nn.Linear(1, 1).state_dict()}, sgd())


@pytest.mark.parametrize("flat", [False, True])
def test_an_optimizer_of_names(tmp_path: Path, flat: bool) -> None:
    model = nn.Linear(2, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), options=options)
    words = failure_of(tmp_path / "c.pt", {"model": model.state_dict(), "o": state}, sgd())
    assert "ptsave.load_checkpoint(path, o=optimizer)" in words


def test_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    target = {"a": torch.zeros(1), "b": torch.zeros(1)}
    saved = {"a": torch.ones(1), "b": torch.ones(1)}
    words = failure_of(path, {"counters": saved, "epoch": 1}, target)
    assert "ptsave.load_checkpoint(path, counters=target)" in words
    words = failure_of(path, {"x": {"y": saved}}, target)
    assert "fits: ptsave.load(path)['x']['y']" in words


@pytest.mark.parametrize("target", [nn.Linear(2, 2), {"weight": torch.zeros(2, 2)}])
def test_nothing_is_loaded_without_a_word(tmp_path: Path, target: Any) -> None:
    """With ``strict=False`` it is no error."""
    stock_save({"net": nn.Linear(2, 2).state_dict(), "epoch": 1}, tmp_path / "c.pt")
    with pytest.warns(ptsave.CheckpointWarning, match="entry 'net' fits"):
        keys = ptsave.load_into(tmp_path / "c.pt", target, strict=False)
    assert "weight" in keys.missing_keys
    stock_save(nn.Linear(2, 2, bias=False).state_dict(), tmp_path / "c.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ptsave.load_into(tmp_path / "c.pt", target, strict=False)


def test_a_module_that_was_saved_whole(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt")
    torch.save({"net": nn.Linear(2, 2)}, tmp_path / "c.pt")
    with pytest.raises(TypeError, match="saved whole"):
        ptsave.load_into(tmp_path / "m.pt", nn.Linear(2, 2), weights_only=False)
    with pytest.raises(TypeError, match="saved whole"):
        ptsave.load_checkpoint(tmp_path / "c.pt", net=nn.Linear(2, 2), weights_only=False)


@pytest.mark.parametrize("match", [None, "order", "name"])
def test_a_module_is_no_optimizer(match: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    ptsave.save_checkpoint(path, model=model, optimizer=optimizer)
    with pytest.raises(KeyError, match=r"'model' cannot be restored.*AdamW"):
        ptsave.load_checkpoint(path, model=optimizer, match=match)
    with pytest.raises(KeyError, match="param_groups"):
        optimizer.load_state_dict(model.state_dict())


def test_flags_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    ptsave.save([1], path)
    with pytest.raises(TypeError, match="verify must be True or False, not 'no'"):
        ptsave.load(path, verify="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fsync must be True or False, not 'no'"):
        ptsave.AsyncCheckpointer(tmp_path / "run", fsync="no")  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
