"""`load_into` of a checkpoint with more in it says which part was probably meant."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object, stock_save
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ptsave


def sgd(n: int = 2) -> Any:
    return torch.optim.SGD(nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))).parameters(), lr=0.1)


def failure_of(path: Path, obj: Any, target: Any, **options: Any) -> str:
    """Save, and return the words of the error; the target must not have changed."""
    stock_save(obj, path)
    before = {key: value.clone() for key, value in _tensors_of(target).items()}
    with pytest.raises((RuntimeError, KeyError)) as caught:
        ptsave.load_into(path, target, **options)
    assert_same_object(_tensors_of(target), before)
    return str(caught.value)


def _tensors_of(target: Any) -> dict[str, Any]:
    if isinstance(target, nn.Module):
        return dict(target.state_dict())
    return dict(target) if isinstance(target, dict) else {}


def test_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    state = sgd().state_dict()
    words = failure_of(path, {"model": {}, "optim": state}, sgd())
    assert "no state dict of an optimizer" in words
    assert "The file's entry 'optim' fits: ptsave.load_checkpoint(path, optim=optimizer)" in words
    words = failure_of(path, {"run": {"optim": state}}, sgd())
    assert "ptsave.load_optimizer_state_dict(optimizer, ptsave.load(path)['run']['optim'])" in words
    words = failure_of(path, {"small": sgd(1).state_dict(), "right": state}, sgd())
    assert "'right' fits" in words
    words = failure_of(path, {"small": sgd(1).state_dict()}, sgd())
    assert "'small' is one of an optimizer" in words
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
