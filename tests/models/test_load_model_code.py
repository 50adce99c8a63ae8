"""load_model of modules whose own code takes part: hooks, overrides, versions, extra state."""

from __future__ import annotations

import base64
import copy
import io
import warnings
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from _weights import assert_equal, write_file
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from ptsave.models import module_code

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

SUFFIXES = (".safetensors", ".pt")


class Versioned(nn.Module):
    """Its weights were stored transposed in version 1, and under another name."""

    _version = 2

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, 2))
        self.inner = nn.Linear(2, 2)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version") is None and prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t() + 1
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class PreHooked(nn.Module):
    """A hook joins what was saved in two."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2, 4)
        self.register_load_state_dict_pre_hook(self.join)  # type: ignore[no-untyped-call]

    @staticmethod
    def join(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            parts = [state_dict.pop(f"{prefix}{part}.{name}", None) for part in ("one", "two")]
            if parts[0] is not None:
                state_dict[f"{prefix}both.{name}"] = torch.cat(parts)


class PostHooked(nn.Linear):
    """A hook derives something from the loaded values, and forgives a key."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("total", torch.zeros(()))
        self.register_load_state_dict_post_hook(self.derive)  # type: ignore[no-untyped-call]

    @staticmethod
    def derive(module: Any, keys: Any) -> None:
        module.total = module.weight.detach().sum()
        for name in list(keys.missing_keys):
            if name.endswith("total"):
                keys.missing_keys.remove(name)


class Stateful(nn.Linear):
    """With extra state, a tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return torch.tensor([7, 8])

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def old_versioned() -> dict[str, Tensor]:
    inner = nn.Linear(2, 2).state_dict()
    return {"kernel": torch.randn(2, 3), **{f"inner.{name}": inner[name] for name in inner}}


def two_parts() -> dict[str, Tensor]:
    tensors = {}
    for part in ("one", "two"):
        for name, tensor in nn.Linear(2, 2).state_dict().items():
            tensors[f"{part}.{name}"] = tensor
    return tensors


def without_count() -> dict[str, Tensor]:
    tensors = dict(nn.BatchNorm1d(2).state_dict())
    del tensors["num_batches_tracked"]
    tensors["running_mean"] = torch.randn(2)
    return tensors


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are announced as new
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def lazy_tensors() -> dict[str, Tensor]:
    saved = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    return {name: torch.randn_like(t.float()).to(t.dtype) for name, t in saved.state_dict().items()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "version": (Versioned, old_versioned),
    "pre-hook": (PreHooked, two_parts),
    "post-hook": (PostHooked, lambda: dict(nn.Linear(2, 2).state_dict())),
    "extra state": (Stateful, lambda: dict(Stateful().state_dict())),
    "norm": (lambda: nn.BatchNorm1d(2), without_count),
    "lazy": (lazy, lazy_tensors),
}


def nested(make: Callable[[], nn.Module]) -> Any:
    return nn.ModuleDict({"first": nn.Linear(2, 2), "second": make(), "third": nn.Linear(2, 2)})


def stored(make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {f"second.{name}": tensor for name, tensor in make().items()}
    for part in ("first", "third"):
        for name, tensor in nn.Linear(2, 2).state_dict().items():
            tensors[f"{part}.{name}"] = tensor
    return tensors


def values_of(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("assign", [False, True])
def test_everything_is_as_after_load_state_dict(
    tmp_path: Path, suffix: str, case: str, assign: bool
) -> None:
    make, tensors = CASES[case]
    path = tmp_path / f"model{suffix}"
    write_file(path, stored(tensors))
    ours, theirs = nested(make), nested(make)
    report = ptsave.load_model(ours, path, assign=assign)
    theirs.load_state_dict(
        load_file(path) if suffix == ".safetensors" else torch.load(path), assign=assign
    )
    assert report == ([], [], [], {})
    assert_equal(values_of(ours), values_of(theirs))
    assert [type(each) for each in ours.modules()] == [type(each) for each in theirs.modules()]
    if case == "extra state":
        assert torch.equal(ours["second"].seen, theirs["second"].seen)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("assign", [False, True])
def test_models_on_the_meta_device(tmp_path: Path, case: str, assign: bool) -> None:
    make, tensors = CASES[case]
    path = tmp_path / "model.safetensors"
    write_file(path, stored(tensors))
    if case in ("post-hook", "norm", "lazy"):
        pytest.skip("torch does not do that on the meta device")
    with torch.device("meta"):
        ours = nested(make)
    theirs = nested(make)
    ptsave.load_model(ours, path, assign=assign, device="cpu")
    theirs.load_state_dict(load_file(path))
    assert_equal(values_of(ours), values_of(theirs))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_load_state_dict_and_change_nothing(
    tmp_path: Path, suffix: str, case: str
) -> None:
    make, tensors = CASES[case]
    path = tmp_path / f"model{suffix}"
    found = stored(tensors)
    del found["third.bias"]
    found["first.weight"] = torch.zeros(3, 3)
    found["fourth.weight"] = torch.zeros(3, 3)
    write_file(path, found)
    ours, theirs = nested(make), nested(make)
    before = {name: tensor.clone() for name, tensor in values_of(ours["third"]).items()}
    with pytest.raises(RuntimeError) as mine:
        ptsave.load_model(ours, path)
    with pytest.raises(RuntimeError) as stock:
        theirs.load_state_dict(found)
    # A method of its own may change which keys there are: only calling it would tell.
    keys_are_certain = case != "version"
    for key in ("first.weight", *(("third.bias", "fourth.weight") if keys_are_certain else ())):
        assert key in str(mine.value)
        assert key in str(stock.value)
    assert_equal(values_of(ours["third"]), before)
    report = ptsave.load_model(ours, path, strict=False, ignore_mismatched_sizes=True)
    assert report.missing_keys == ["third.bias"]
    assert report.unexpected_keys == ["fourth.weight"]
    assert [key for key, *_ in report.mismatched_keys] == ["first.weight"]


def test_versions_are_those_in_the_files(tmp_path: Path) -> None:
    saved = Versioned()
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    seen: list[Any] = []
    model = nn.ModuleDict({"part": Versioned()})
    inner = model["part"]
    inner.register_load_state_dict_pre_hook(lambda *arguments: seen.append(arguments[3]["version"]))
    ptsave.load_model(model, tmp_path, rename=lambda name: f"part.{name}")
    assert seen == [2]


class Counting(nn.Module):
    """Has extra state that is no tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_extra_state(self) -> Any:
        return {"count": 3, "values": torch.arange(4)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("kind", ["safetensors", "pt", "torch"])
@pytest.mark.parametrize("inner", [nn.Linear(2, 2), nn.Identity()])  # the latter has no tensor
def test_extra_state_that_is_no_tensor(tmp_path: Path, kind: Any, inner: nn.Module) -> None:
    saved, model = nn.Sequential(Counting(inner)), nn.Sequential(Counting(inner))
    if kind == "torch":
        torch.save(saved.state_dict(), tmp_path / "model.pt")
    else:
        ptsave.save_model(saved, tmp_path, format=kind)
    assert not any(ptsave.load_model(model, tmp_path))
    seen: Any = model[0].seen
    assert (seen["count"], seen["values"].tolist()) == (3, [0, 1, 2, 3])
    plain = nn.Sequential(nn.ModuleDict({"inner": inner}))
    with pytest.raises(RuntimeError, match="_extra_state"):
        ptsave.load_model(plain, tmp_path)
    assert ptsave.load_model(plain, tmp_path, strict=False).unexpected_keys == ["0._extra_state"]


class Divided(nn.Linear):
    """A module with extra state that no file is read for."""

    def get_extra_state(self) -> Any:
        return Fraction(1, 2)

    def set_extra_state(self, state: Any) -> None:
        """Take anything."""


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_extra_state_that_could_not_be_loaded(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(TypeError, match=r"_extra_state.*could not be loaded.*get_extra_state"):
        ptsave.save_model(nn.Sequential(Divided(2, 2)), tmp_path, format=kind)
    assert list(tmp_path.iterdir()) == []


def test_weights_beside_extra_state_that_cannot_be_loaded(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(Fraction(1, 2), stream)
    metadata = {"ptsave.extra_state.0._extra_state": base64.b64encode(stream.getvalue()).decode()}
    saved = nn.Sequential(nn.Linear(2, 2))
    save_file(saved.state_dict(), tmp_path / "model.safetensors", metadata)
    assert [name for name, _ in ptsave.iter_weights(tmp_path)] == ["0.bias", "0.weight"]
    plain = nn.Sequential(nn.Linear(2, 2))
    ptsave.load_model(plain, tmp_path, strict=False)
    assert_equal(plain.state_dict(), saved.state_dict())
    with pytest.raises(ptsave.CorruptCheckpointError, match="_extra_state"):
        ptsave.load_model(nn.Sequential(Divided(2, 2)), tmp_path)


class Wide(nn.Module):
    """A layer with an override, so that its own weights are read before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 1024))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        weight = state_dict[prefix + "weight"]
        alive.append(sum(t is not None for t in (each() for each in seen)))
        seen.append(weakref.ref(weight.untyped_storage()))
        super()._load_from_state_dict(state_dict, prefix, *rest)


seen: list[Any] = []
alive: list[int] = []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_module_is_in_memory_at_a_time(tmp_path: Path, suffix: str) -> None:
    seen.clear()
    alive.clear()
    layers = [Wide() for _ in range(8)]
    tensors = {f"{i}.weight": torch.randn(256, 1024) for i in range(8)}
    write_file(tmp_path / f"model{suffix}", tensors)
    model = nn.Sequential(*layers)
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert len(alive) == 8
    assert max(alive) <= 1


@pytest.mark.parametrize("returns", [True, False])
def test_a_model_with_a_load_state_dict_of_its_own(tmp_path: Path, returns: bool) -> None:
    class Doubling(nn.Linear):
        def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
            doubled = {name: 2 * tensor for name, tensor in state_dict.items()}
            keys = super().load_state_dict(doubled, *arguments, **options)
            return keys if returns else None

    tensors = dict(nn.Linear(2, 3).state_dict())
    write_file(tmp_path / "model.safetensors", tensors)
    model = Doubling(2, 3)
    assert ptsave.load_model(model, tmp_path) == ([], [], [], {})
    assert_equal(model.state_dict(), {name: 2 * tensor for name, tensor in tensors.items()})


ACCESSES: dict[str, Callable[[Any, str], Any]] = {
    "getitem": lambda d, key: d[key],
    "get": lambda d, key: d.get(key),
    "pop": lambda d, key: d.pop(key),
    "items": lambda d, key: dict(d.items())[key],
    "values": lambda d, key: list(d.values())[list(d).index(key)],
    "dict": lambda d, key: dict(d)[key],
    "star": lambda d, key: {**d}[key],
    "copy": lambda d, key: d.copy()[key],
    "shallow copy": lambda d, key: copy.copy(d)[key],
    "deep copy": lambda d, key: copy.deepcopy(d)[key],
    "or": lambda d, key: (d | {})[key],
    "ror": lambda d, key: ({} | d)[key],
    "setdefault": lambda d, key: d.setdefault(key, 3),
    "popitem": lambda d, key: dict([d.popitem() for _ in range(len(d))])[key],
    "update": lambda d, key: (other := {}, other.update(d), other)[2][key],
}


@pytest.mark.parametrize("access", ACCESSES)
def test_every_way_to_an_entry_finds_its_values(tmp_path: Path, access: str) -> None:
    tensors = {"0.weight": torch.randn(3, 2), "1.weight": torch.randn(2, 3)}
    write_file(tmp_path / "model.safetensors", tensors)
    model: Any = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    found: list[Any] = []
    kept: list[Any] = []

    def look(state_dict: Any, *_: Any) -> None:
        kept.append(state_dict)
        assert list(state_dict) == list(tensors)
        assert "absent" not in state_dict
        assert state_dict.get("absent", 5) == 5
        assert state_dict.pop("absent", 6) == 6
        found.append(ACCESSES[access](state_dict, "1.weight"))

    model._register_load_state_dict_pre_hook(look)
    ptsave.load_model(model, tmp_path, strict=False)
    assert type(found[0]) is Tensor
    assert torch.equal(found[0], tensors["1.weight"])
    for name, tensor in kept[0].items():  # also when the files are closed
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_hook_of_the_whole_model_leaves_others_in_the_file(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{i}.weight": torch.randn(256, 256) for i in range(6)}
    old = {f"old.{name}" if name == "3.weight" else name: each for name, each in tensors.items()}
    write_file(tmp_path / f"model{suffix}", old)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))

    def rename(state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[prefix + "3.weight"] = state_dict.pop(prefix + "old.3.weight")

    model._register_load_state_dict_pre_hook(rename)
    read: list[str] = []
    lend = module_code.ShardCopier.lend

    def count(self: Any, entries: Any) -> None:
        before = dict(entries)
        lend(self, entries)
        read.extend(key for key in before if entries[key] is not before[key])

    monkeypatch.setattr(module_code.ShardCopier, "lend", count)
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert read == ["old.3.weight"]


def test_loaders_and_packed_parts_beside_code(tmp_path: Path) -> None:
    tensors = {**{f"pre.{k}": v for k, v in two_parts().items()}}
    for part in "qkv":
        tensors[f"{part}_proj.weight"] = torch.randn(2, 2)
    tensors["loaded"] = torch.randn(3)
    write_file(tmp_path / "model.safetensors", tensors)
    model: Any = nn.ModuleDict({"pre": PreHooked(), "qkv": nn.Linear(2, 6, bias=False)})
    model.loaded = nn.Parameter(torch.zeros(3))
    model.loaded.weight_loader = lambda parameter, tensor: parameter.copy_(-tensor)
    mapping = {"qkv": ["q_proj", "k_proj", "v_proj"]}
    ptsave.load_model(model, tmp_path, packed_modules_mapping=mapping)
    assert torch.equal(model["qkv"].weight, torch.cat([tensors[f"{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(model.loaded, -tensors["loaded"])
    assert torch.equal(
        model["pre"].both.bias, torch.cat([tensors["pre.one.bias"], tensors["pre.two.bias"]])
    )
