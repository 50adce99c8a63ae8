"""`load_checkpoint` and `load_into` by name: `match`, `key_mapping`, and the report of keys."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object, stock_load, stock_save
from torch import nn

import ptsave


def make(*sizes: int, optimizer: Any = torch.optim.AdamW, named: bool = True) -> tuple[Any, Any]:
    """Return a model of linear layers, and an optimizer that has state."""
    model = nn.Sequential(*(nn.Linear(m, n) for m, n in pairwise(sizes)))
    params = model.named_parameters() if named else model.parameters()
    made = optimizer(params, lr=0.01)
    model(torch.randn(5, sizes[0])).sum().backward()
    made.step()
    return model, made


def state_of(optimizer: Any, param: Any) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[param]
    return state


def load_by_name(folder: Path, objects: dict[str, Any]) -> Callable[..., Any]:
    ptsave.save_checkpoint(folder / "c.pt", **objects)
    return partial(ptsave.load_checkpoint, folder / "c.pt")


def restore_step(folder: Path, objects: dict[str, Any]) -> Callable[..., Any]:
    with ptsave.AsyncCheckpointer(folder / "steps") as checkpointer:
        checkpointer.save(1, **objects)
    return checkpointer.restore


def restore_url(folder: Path, objects: dict[str, Any]) -> Callable[..., Any]:
    with ptsave.AsyncCheckpointer(f"memory://{folder.name}") as checkpointer:
        checkpointer.save(1, **objects)
    return checkpointer.restore


LOADERS = [load_by_name, restore_step, restore_url]
Loader = Callable[[Path, dict[str, Any]], Callable[..., Any]]


# ------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize("loader", LOADERS)
def test_optimizers_are_matched_by_name(tmp_path: Path, loader: Loader) -> None:
    """Two optimizers, each with its own order of parameters."""
    one, one_optimizer = make(2, 3, 4)
    two, two_optimizer = make(2, 3, 4, optimizer=partial(torch.optim.SGD, momentum=0.9))
    saved = {"one": one, "two": two, "a": one_optimizer, "b": two_optimizer, "epoch": 3}
    restore = loader(tmp_path, saved)
    fresh_one, fresh_two = make(2, 3, 4)[0], make(2, 3, 4)[0]
    backwards = list(fresh_one.named_parameters())[::-1]
    a = torch.optim.AdamW(backwards, lr=1.0)
    b = torch.optim.SGD(list(fresh_two.named_parameters())[::-1], lr=1.0, momentum=0.1)
    rest = restore(one=fresh_one, two=fresh_two, a=a, b=b, match="name")
    assert rest == {"epoch": 3}
    for model, optimizer, old, old_optimizer in (
        (fresh_one, a, one, one_optimizer),
        (fresh_two, b, two, two_optimizer),
    ):
        expected = dict(old.named_parameters())
        for name, param in model.named_parameters():
            assert_same_object(state_of(optimizer, param), state_of(old_optimizer, expected[name]))
        assert optimizer.param_groups[0]["lr"] == 0.01
    assert rest.report["a"] == ([], [])
    # By order torch would have given each another's state.
    bare = torch.optim.AdamW(backwards, lr=1.0)
    bare.load_state_dict(one_optimizer.state_dict())
    for _, param in backwards:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError):
        bare.step()


def test_names_come_from_the_modules(tmp_path: Path) -> None:
    """An optimizer without names has those of its module among the targets."""
    model, optimizer = make(2, 3, 4)
    other, other_optimizer = make(2, 3, 4)
    saved = {"model": model, "other": other, "optimizer": optimizer, "second": other_optimizer}
    restore = load_by_name(tmp_path, saved)
    fresh, fresh_other = make(2, 3, 4)[0], make(2, 3, 4)[0]
    made = torch.optim.AdamW([*fresh.parameters()][::-1])
    second = torch.optim.AdamW([*fresh_other.parameters()][::-1])
    restore(model=fresh, other=fresh_other, optimizer=made, second=second, match="name")
    for actual, expected in zip(fresh.parameters(), model.parameters(), strict=True):
        assert_same_object(state_of(made, actual), state_of(optimizer, expected))
    for actual, expected in zip(fresh_other.parameters(), other.parameters(), strict=True):
        assert_same_object(state_of(second, actual), state_of(other_optimizer, expected))


def test_one_optimizer_of_two_modules(tmp_path: Path) -> None:
    encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 2, bias=False)
    named = [*encoder.named_parameters(), ("decoder", decoder.weight)]
    optimizer = torch.optim.AdamW(named)
    decoder(encoder(torch.ones(2))).sum().backward()
    optimizer.step()
    restore = load_by_name(tmp_path, {"optimizer": optimizer})
    fresh = torch.optim.AdamW(
        [("decoder", nn.Parameter(torch.ones(2, 3))), *nn.Linear(2, 3).named_parameters()]
    )
    restore(optimizer=fresh, match="name")
    assert torch.equal(
        fresh.state[fresh.param_groups[0]["params"][0]]["exp_avg"],
        optimizer.state[decoder.weight]["exp_avg"],
    )
    nameless = torch.optim.AdamW([*encoder.parameters(), decoder.weight])
    ptsave.save_checkpoint(tmp_path / "d.pt", encoder=encoder, decoder=decoder, o=optimizer)
    with pytest.raises(ValueError, match='two parameters named "weight"'):
        ptsave.load_checkpoint(
            tmp_path / "d.pt", encoder=encoder, decoder=decoder, o=nameless, match="name"
        )


def test_tied_parameters(tmp_path: Path) -> None:
    """The saved name may be any of the parameter's."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizer = torch.optim.AdamW([("head.weight", model.head.weight)])
    model.head(torch.ones(3)).sum().backward()
    optimizer.step()
    restore = load_by_name(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Tied()
    made = torch.optim.AdamW(fresh.parameters())
    restore(model=fresh, optimizer=made, match="name")
    assert_same_object(state_of(made, fresh.head.weight), state_of(optimizer, model.head.weight))


def test_load_into_by_name(tmp_path: Path) -> None:
    model, optimizer = make(2, 3, 4)
    ptsave.save(optimizer.state_dict(), tmp_path / "o.pt")
    fresh = make(2, 3, 4)[0]
    made = torch.optim.AdamW([*fresh.parameters()][::-1])
    with pytest.raises(ValueError, match="the optimizer's parameters have no names"):
        ptsave.load_into(tmp_path / "o.pt", made, match="name")
    keys = ptsave.load_into(
        tmp_path / "o.pt", made, match="name", named_parameters=fresh.named_parameters()
    )
    assert keys == ([], [])
    for actual, expected in zip(fresh.parameters(), model.parameters(), strict=True):
        assert_same_object(state_of(made, actual), state_of(optimizer, expected))
    assert ptsave.load_into(tmp_path / "o.pt", make(2, 3, 4)[1]) is None  # by order, as ever


def test_parameters_without_a_partner(tmp_path: Path) -> None:
    model, optimizer = make(2, 3, 4)
    restore = load_by_name(tmp_path, {"model": model, "optimizer": optimizer})
    fresh, made = make(2, 3, 4, 5)
    before = copy.deepcopy((fresh.state_dict(), made.state_dict()))
    with pytest.raises(RuntimeError, match="Missing key"):
        restore(model=fresh, optimizer=made, match="name")
    with pytest.raises(RuntimeError, match=r'Missing parameter\(s\) .*"2.weight"'):
        restore(optimizer=made, match="name")
    assert_same_object((fresh.state_dict(), made.state_dict()), before)
    kept = state_of(made, fresh[2].weight)["exp_avg"].clone()
    rest = restore(model=fresh, optimizer=made, match="name", strict=False)
    assert rest.report["model"].missing_keys == ["2.weight", "2.bias"]
    assert rest.report["optimizer"].missing_keys == ["2.weight", "2.bias"]
    assert torch.equal(state_of(made, fresh[2].weight)["exp_avg"], kept)
    assert_same_object(state_of(made, fresh[0].weight), state_of(optimizer, model[0].weight))
    small, small_made = make(2, 3)
    rest = restore(model=small, optimizer=small_made, match="name", strict=False)
    assert rest.report["optimizer"].unexpected_keys == ["1.weight", "1.bias"]
    assert rest.report["model"].unexpected_keys == ["1.weight", "1.bias"]


@pytest.mark.parametrize("match", ["name", "order"])
def test_state_of_other_shapes_is_left_out(tmp_path: Path, match: Any) -> None:
    model, optimizer = make(2, 3, 4)
    restore = load_by_name(tmp_path, {"model": model, "optimizer": optimizer})
    fresh, made = make(2, 3, 7)
    kept = state_of(made, fresh[1].weight)["exp_avg"].clone()
    rest = restore(model=fresh, optimizer=made, match=match, ignore_mismatched_sizes=True)
    sizes = torch.Size([4, 3]), torch.Size([7, 3])
    assert rest.report["model"].mismatched_keys[0] == ("1.weight", *sizes)
    name = "1.weight" if match == "name" else "2"
    assert (f"{name}.exp_avg", *sizes) in rest.report["optimizer"].mismatched_keys
    assert torch.equal(state_of(made, fresh[1].weight)["exp_avg"], kept)
    assert_same_object(state_of(made, fresh[0].weight), state_of(optimizer, model[0].weight))
    fresh(torch.ones(1, 2)).sum().backward()
    made.step()


def test_match_is_checked(tmp_path: Path) -> None:
    model, optimizer = make(2, 3)
    restore = load_by_name(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(ValueError, match='must be "order" or "name"'):
        restore(model=model, optimizer=optimizer, match="id")
    with pytest.raises(TypeError, match="'match' is an option"):
        restore(model=model, match=nn.Linear(1, 1))
    ptsave.save(model.state_dict(), tmp_path / "m.pt")
    with pytest.raises(TypeError, match="match is for optimizers"):
        ptsave.load_into(tmp_path / "m.pt", model, match="name")
    with pytest.raises(TypeError, match="key_mapping is for"):
        ptsave.load_into(tmp_path / "m.pt", dict(model.state_dict()), key_mapping={"a": "b"})
    with pytest.raises(TypeError, match="match='name' is an option"):
        ptsave.save_checkpoint(tmp_path / "x.pt", model=model, match="name")


# ------------------------------------------------------------------------------------- key_mapping


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)


class Original(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.out = nn.Linear(3, 1)
        self.extra = nn.Linear(1, 1)


MAPPINGS: list[Any] = [
    {"h": "encoder", "out": "head", "extra": None},
    lambda name: (
        None
        if name.startswith("extra")
        else name.replace("h.", "encoder.", 1).replace("out.", "head.")
    ),
]


def originals() -> tuple[Original, Any]:
    model = Original()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model.out(model.h(torch.randn(4, 2))).sum().backward()
    model.extra(torch.ones(1)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("key_mapping", MAPPINGS)
def test_key_mapping(tmp_path: Path, loader: Loader, key_mapping: Any) -> None:
    """Modules and optimizers get new names by the same mapping, metadata included."""
    model, optimizer = originals()
    restore = loader(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Renamed()
    made = torch.optim.AdamW([*fresh.named_parameters()][::-1])
    rest = restore(model=fresh, optimizer=made, match="name", key_mapping=key_mapping)
    assert rest.report["model"] == ([], [])
    assert rest.report["optimizer"] == ([], [])
    assert_same_object(dict(fresh.encoder.state_dict()), dict(model.h.state_dict()))
    assert_same_object(dict(fresh.head.state_dict()), dict(model.out.state_dict()))
    assert_same_object(state_of(made, fresh.head.bias), state_of(optimizer, model.out.bias))


def test_key_mapping_keeps_versions(tmp_path: Path) -> None:
    """A BatchNorm of before version 2 has no number of batches, which its migration adds."""
    state = OrderedDict(Original().state_dict())
    del state["h.1.num_batches_tracked"]
    state._metadata = {"": {"version": 1}, "h": {"version": 1}, "h.1": {"version": 1}}  # type: ignore[attr-defined]
    stock_save(state, tmp_path / "m.pt")
    fresh = Renamed()
    keys = ptsave.load_into(tmp_path / "m.pt", fresh, key_mapping=MAPPINGS[0])
    assert keys == ([], [])
    del state._metadata  # type: ignore[attr-defined]
    state["h.1.num_batches_tracked"] = torch.tensor(3)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ptsave.load_into(tmp_path / "m.pt", fresh)


def test_a_mapping_for_each_target(tmp_path: Path) -> None:
    model, optimizer = originals()
    same = nn.Linear(2, 2)
    objects = {"model": model, "optimizer": optimizer, "out": same}
    restore = load_by_name(tmp_path, objects)
    fresh, made, other = Renamed(), torch.optim.AdamW(Renamed().named_parameters()), nn.Linear(2, 2)
    mapping = {"model": MAPPINGS[0], "optimizer": MAPPINGS[1]}
    restore(model=fresh, optimizer=made, out=other, match="name", key_mapping=mapping)
    assert_same_object(dict(fresh.head.state_dict()), dict(model.out.state_dict()))
    assert torch.equal(other.weight, same.weight)
    with pytest.raises(TypeError, match="'modell', which is neither a module"):
        restore(model=fresh, key_mapping={"modell": MAPPINGS[0]})
    with pytest.raises(TypeError, match="'key_mapping' is an option"):
        restore(model=fresh, key_mapping=3)


def test_keys_that_would_become_one(tmp_path: Path) -> None:
    model, optimizer = make(2, 2, 2)
    restore = load_by_name(tmp_path, {"model": model, "optimizer": optimizer})
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"would both become '0\.weight'"):
        restore(model=model, key_mapping={"1": "0"})
    with pytest.raises(ValueError, match=r"would both become '0\.weight'"):
        restore(optimizer=optimizer, match="name", key_mapping={"1": "0"})
    assert_same_object((model.state_dict(), optimizer.state_dict()), before)


# ------------------------------------------------------------------------------------------ report


def test_the_report(tmp_path: Path) -> None:
    model, optimizer = make(2, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    counters = {"seen": torch.ones(1), "left": torch.ones(1)}
    objects = {"model": model, "ema": model, "optimizer": optimizer, "scheduler": scheduler}
    restore = load_by_name(tmp_path, {**objects, "counters": counters, "epoch": 3})
    fresh, made = make(2, 3, 4)
    rest = restore(
        model=fresh,
        ema=nn.Sequential(nn.Linear(2, 3)),
        optimizer=optimizer,
        scheduler=scheduler,
        counters={"seen": torch.zeros(1), "new": torch.zeros(1)},
        strict=False,
    )
    assert rest == {"epoch": 3}
    assert isinstance(rest, ptsave.RestoredEntries)
    assert issubclass(ptsave.RestoredEntries, dict)
    assert list(rest.report) == ["model", "ema", "optimizer", "counters"]
    report: Any = rest.report
    assert report["model"] == (["1.weight", "1.bias"], [])
    assert rest.report["ema"] == rest.report["optimizer"] == ([], [])
    assert rest.report["counters"] == (["new"], ["left"])
    assert report["model"].mismatched_keys == []
    assert made.state


def test_the_report_is_no_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    restore = load_by_name(tmp_path, {"model": nn.Linear(1, 1), "epoch": 3, "t": torch.ones(2)})
    rest = restore(model=nn.Linear(1, 1))
    for save in (ptsave.save, stock_save):
        stream = io.BytesIO()
        save(rest, stream)
        stream.seek(0)
        again = stock_load(stream)
        assert again == OrderedDict(epoch=3, t=again["t"])
        assert torch.equal(again["t"], torch.ones(2))
    assert copy.copy(rest) == rest


class Silent(nn.Linear):
    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        super().load_state_dict(state_dict)


def test_a_module_that_says_nothing_is_not_in_the_report(tmp_path: Path) -> None:
    restore = load_by_name(tmp_path, {"model": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    rest = restore(model=Silent(1, 1), other=nn.Linear(1, 1))
    assert list(rest.report) == ["other"]
