"""Restoring where it hurts: what is said after failures, checks first, hooks that look around."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import archive_of, flip_middle
from stock_comparison import assert_same_object, failure_of, stock_load, stock_save
from test_restore import assert_restores
from torch import Tensor, nn

import ptsave
from ptsave.training import checkpoint
from ptsave.training.restoring import FileCopier

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")


class Watching(nn.Linear):
    """A layer that loads with code of its own, and so sees what it gets."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class Failing(nn.Linear):
    """A layer that stops a load in the middle."""

    def _load_from_state_dict(self, *args: Any) -> None:
        raise ValueError("not this one")


def square(n: int, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    return kind(n, n, bias=False)


def values_of(target: Any) -> Any:
    return copy.deepcopy(target.state_dict())


def failure_that_tells(path: Path, net: nn.Module) -> BaseException:
    """Return the error of a load, which must name every entry that has changed."""
    before = values_of(net)
    failure = failure_of(lambda: ptsave.load_into(path, net))
    changed = {name for name, value in net.state_dict().items() if not value.equal(before[name])}
    assert changed
    assert changed <= set(getattr(failure, "overwritten", []))
    return failure


# ------------------------------------------------------------------------- what failures say


def test_what_has_changed_is_not_forgotten_when_it_is_read_again(tmp_path: Path) -> None:
    """The second time the record is read into memory, for a layer that looks."""

    def make() -> nn.Module:
        layers = {"a": square(99), "h": square(2, Watching), "b": square(99, Watching)}
        return nn.ModuleDict({**layers, "c": square(99)})

    saved = make().state_dict()
    saved["b.weight"] = saved["a.weight"]
    stock_save(saved, tmp_path / "f.pt")
    flip_middle(tmp_path / "f.pt", "data/2")
    failure_that_tells(tmp_path / "f.pt", make())


def test_what_other_code_has_copied_is_told(tmp_path: Path) -> None:
    net = nn.ModuleDict({"h": square(9, Watching), "c": square(99)})
    stock_save({name: value + 1 for name, value in net.state_dict().items()}, tmp_path / "f.pt")
    flip_middle(tmp_path / "f.pt", "data/1")
    failure_that_tells(tmp_path / "f.pt", net)


def test_files_that_torch_reads_tell_too(tmp_path: Path) -> None:
    net = nn.ModuleDict({"a": square(9), "b": square(2, Failing), "c": square(3)})
    new = {name: value + 1 for name, value in net.state_dict().items()}
    stock_save(new, tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    failure = failure_that_tells(tmp_path / "f.pt", net)
    assert isinstance(failure, ValueError)
    assert failure.overwritten == ["a.weight", "b.weight"]  # type: ignore[attr-defined]


def test_files_cut_short_meanwhile_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that cannot be read any more do not keep the names from being known."""
    stock_save(nn.Sequential(*[square(600) for _ in range(4)]).state_dict(), tmp_path / "f.pt")
    net = nn.Sequential(*[square(600) for _ in range(4)])
    fill = FileCopier._fill

    def shrink(self: FileCopier, records: Any) -> None:
        os.truncate(tmp_path / "f.pt", 2_000_000)
        fill(self, records)

    monkeypatch.setattr(FileCopier, "_fill", shrink)
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "1")
    failure = failure_that_tells(tmp_path / "f.pt", net)
    assert isinstance(failure, ptsave.CorruptCheckpointError)
    assert "unexpected end of file" in str(failure)


def test_new_optimizer_state_is_told(tmp_path: Path) -> None:
    class Stubborn:
        def state_dict(self) -> Any:
            return {"a": 1}

        def load_state_dict(self, _: Any) -> None:
            raise ValueError("not this one")

    net, optimizer = trained()
    ptsave.save_checkpoint(tmp_path / "f.pt", net=net, optimizer=optimizer, other=Stubborn())
    fresh = torch.optim.AdamW(net.parameters())
    targets: Any = {"net": net, "optimizer": fresh, "other": Stubborn()}
    failure: Any = failure_of(lambda: ptsave.load_checkpoint(tmp_path / "f.pt", **targets))
    assert "optimizer.state.0.exp_avg" in failure.overwritten


def test_values_of_a_dict_are_replaced_only_when_they_are_there(tmp_path: Path) -> None:
    stock_save({"a": torch.ones(50), "w": torch.ones(500, 500)}, tmp_path / "f.pt")
    flip_middle(tmp_path / "f.pt", "data/1")
    target = {"a": None, "w": torch.zeros(500, 500)}
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load_into(tmp_path / "f.pt", target)
    assert target["a"] is None


# ------------------------------------------------------------------------- checks come first


def trained(lr: Any = 0.1) -> tuple[nn.Linear, torch.optim.Optimizer]:
    net = nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    net(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    return net, optimizer


def wrong_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(1))])


def test_records_that_cannot_be_read_are_damage(tmp_path: Path) -> None:
    """One that is encrypted; ptsave.load says the same."""
    net = nn.Linear(2, 2)
    archive = archive_of(net.state_dict())
    archive.entry("data/1").central["flags"] = 1
    (tmp_path / "f.pt").write_bytes(archive.to_bytes())
    expected = failure_of(lambda: ptsave.load(tmp_path / "f.pt"))
    failure = failure_of(lambda: ptsave.load_into(tmp_path / "f.pt", net))
    assert isinstance(failure, ptsave.CorruptCheckpointError)
    assert str(failure) == str(expected)


@pytest.mark.parametrize(
    "wrong",
    [wrong_optimizer, lambda: {"x": torch.ones(2)}, lambda: None, lambda: nn.Linear],
    ids=["optimizer", "dict", "None", "class"],
)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["lr", "tensor-lr"])
def test_all_targets_are_checked_first(
    tmp_path: Path, wrong: Callable[[], Any], lr: float | Tensor
) -> None:
    """An optimizer needs its state early; then it is too late for anybody to be wrong."""
    net, optimizer = trained(lr)
    target = wrong()
    last = {"x": torch.ones(3)} if isinstance(target, dict) else optimizer
    ptsave.save_checkpoint(tmp_path / "f.pt", net=net, optimizer=optimizer, last=last)
    other = nn.Linear(20, 20)
    fresh = torch.optim.AdamW(other.parameters())
    before = values_of(other)
    targets: Any = {"net": other, "optimizer": fresh, "last": target}
    failure = failure_of(lambda: ptsave.load_checkpoint(tmp_path / "f.pt", **targets))
    assert not hasattr(failure, "overwritten")
    assert_same_object(values_of(other), before)
    assert not fresh.state


def test_models_are_checked_before_the_hooks_of_others(tmp_path: Path) -> None:
    ptsave.save_checkpoint(tmp_path / "f.pt", a=square(5, Watching), b=nn.Linear(3, 3))
    net = square(5, Watching)
    before = values_of(net)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ptsave.load_checkpoint(tmp_path / "f.pt", a=net, b=nn.Linear(4, 4))
    assert_same_object(values_of(net), before)


def test_keys_that_other_code_forgives(tmp_path: Path) -> None:
    """An override gets the list of missing keys, and so has the last word."""

    class Forgiving(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            args[4].clear()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Forgiving(2, 2))

    saved = make().state_dict()
    del saved["0.bias"]
    stock_save(saved, tmp_path / "f.pt")
    theirs = make().load_state_dict(stock_load(tmp_path / "f.pt"))
    assert ptsave.load_into(tmp_path / "f.pt", make()) == theirs


def test_lazy_buffers_stay_as_they_are_if_keys_do_not_fit(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("cache", None)
    ptsave.register_lazy_buffer(net, "cache")
    stock_save({**net.state_dict(), "cache": torch.ones(3), "extra": 1}, tmp_path / "f.pt")
    with pytest.raises(RuntimeError, match="Unexpected"):
        ptsave.load_into(tmp_path / "f.pt", net)
    assert net.cache is None


def test_models_in_a_dict_are_not_replaced(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    stock_save({"net": net.state_dict()}, tmp_path / "f.pt")
    target = {"net": net}
    with pytest.raises(RuntimeError, match="net is a Linear"):
        ptsave.load_into(tmp_path / "f.pt", target)
    assert target["net"] is net


# ------------------------------------------------------------------------- what others see


def test_hooks_that_pass_on_tensors_of_the_model(tmp_path: Path) -> None:
    """The source of a copy is the target of a later one: the old value is copied."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"x": square(300)})
            self.b = square(300)
            self.a.register_load_state_dict_pre_hook(self._pass_on)

        def _pass_on(self, _: nn.Module, state_dict: dict[str, Any], *__: Any) -> None:
            state_dict["a.x.weight"] = self.b.weight

    def make() -> Net:
        net = Net()
        nn.init.eye_(net.b.weight)
        return net

    stock_save(Net().state_dict(), tmp_path / "f.pt")
    assert_restores(tmp_path / "f.pt", make)


def test_storages_in_extra_state_have_their_bytes(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> Any:
            return {"storage": torch.arange(10.0).untyped_storage()}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["storage"]._untyped_storage.tolist()  # torch loads a typed one

    stock_save(Extra().state_dict(), tmp_path / "f.pt")
    expected, target = Extra(), Extra()
    expected.load_state_dict(stock_load(tmp_path / "f.pt"))
    ptsave.load_into(tmp_path / "f.pt", target)
    assert target.seen == expected.seen


def test_tensors_in_metadata_have_their_values(tmp_path: Path) -> None:
    class Reading(nn.Linear):
        seen: Any = None

        def _load_from_state_dict(
            self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
        ) -> None:
            self.seen = local_metadata["scale"].clone()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    saved: Any = Reading(3, 3).state_dict()
    saved._metadata[""]["scale"] = torch.arange(7.0)
    stock_save(saved, tmp_path / "f.pt")
    target = Reading(3, 3)
    ptsave.load_into(tmp_path / "f.pt", target)
    assert torch.equal(target.seen, torch.arange(7.0))


# ------------------------------------------------------------------------- nothing is read twice


@pytest.mark.parametrize("saved_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu"), None], ids=repr)
@pytest.mark.parametrize("rest", [3, torch.ones(3)], ids=["number", "tensor"])
def test_the_rest_is_not_loaded_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: str, map_location: Any, rest: Any
) -> None:
    """Nothing of the rest leaves the CPU, so no second load has to say where it goes."""
    if saved_on != "cpu" and map_location is None and isinstance(rest, Tensor):
        pytest.skip("goes back to its device")
    net = nn.Linear(3, 3)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: saved_on)
    stock_save({"net": net.state_dict(), "rest": rest}, tmp_path / "f.pt")
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "load_source", None)
    target = nn.Linear(3, 3)
    found = ptsave.load_checkpoint(tmp_path / "f.pt", map_location=map_location, net=target)
    assert_same_object(dict(found), {"rest": rest})
    assert_same_object(target.state_dict(), net.state_dict())


# ------------------------------------------------------------------------- as under torch


def test_state_that_takes_part_in_autograd(tmp_path: Path) -> None:
    """Converting a parameter that is part of an optimizer's state leaves a result with history."""

    def make() -> torch.optim.Optimizer:
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param])
        optimizer.state[param]["mean"] = nn.Parameter(torch.ones(3, dtype=torch.float64))
        return optimizer

    stock_save(make().state_dict(), tmp_path / "f.pt")
    expected, target = make(), make()
    expected.load_state_dict(stock_load(tmp_path / "f.pt"))
    ptsave.load_into(tmp_path / "f.pt", target)
    (theirs,), (ours,) = expected.state.values(), target.state.values()
    assert ours["mean"].grad_fn.name() == theirs["mean"].grad_fn.name()
    assert torch.equal(ours["mean"], theirs["mean"])


def test_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 3)
    stock_save(net.state_dict(), tmp_path / "f.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="forcing weights_only=False") as warned:
        ptsave.load_into(tmp_path / "f.pt", net)
    assert len(warned) == 1
