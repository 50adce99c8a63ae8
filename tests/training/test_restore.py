"""Restoring from files: what torch.load and load_state_dict do, without a second copy."""

from __future__ import annotations

import copy
import io
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from stock_comparison import (
    assert_same_failure,
    assert_same_object,
    failure_of,
    stock_load,
    stock_save,
    zip_records,
    zipped,
)
from torch import Tensor, nn

import ptsave
from ptsave.training import restoring
from ptsave.training.restoring import FileCopier

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with parameters, buffers, a norm, and a chunk-crossing tensor."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 20_000, bias=False))
    net(torch.randn(5, 3))  # running statistics
    return net.to(dtype)


def stock_restore(path: Any, module: nn.Module, **options: Any) -> Any:
    return module.load_state_dict(stock_load(path), **options)


@pytest.fixture(scope="module")
def saved_net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "net.pt"
    stock_save(make_net().state_dict(), path)
    return path


@pytest.fixture
def path(saved_net: Path, tmp_path: Path) -> Path:
    """A file that holds the state dict of `make_net(0)`."""
    return Path(shutil.copy(saved_net, tmp_path))


def assert_restores(path: Path, make: Callable[[], nn.Module], **options: Any) -> None:
    """Both ways must return the same and leave the same behind, in the same objects."""
    expected, target = make(), make()
    tensors = {name: id(tensor) for name, tensor in target.state_dict(keep_vars=True).items()}
    theirs = stock_restore(path, expected, **options)
    assert ptsave.load_into(path, target, **options) == theirs
    assert_same_object(target.state_dict(), expected.state_dict())
    if not options.get("assign"):
        after = target.state_dict(keep_vars=True)
        assert {name: id(tensor) for name, tensor in after.items()} == tensors


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The records that each restore has read into memory of their own."""
    records: list[list[int]] = []
    fill = FileCopier._fill

    def note(self: FileCopier, wanted: Any) -> None:
        wanted = list(wanted)
        records.append(wanted)
        fill(self, wanted)

    monkeypatch.setattr(FileCopier, "_fill", note)
    return records


# --------------------------------------------------------------------------------------- modules


def test_module(path: Path, kept: list[list[int]]) -> None:
    """Nothing is read into memory but the model's own."""
    assert_restores(path, lambda: make_net(1))
    assert kept == [[]]


def test_inference_mode_needs_no_second_copy(path: Path, kept: list[list[int]]) -> None:
    """What is loaded there has no autograd keys, but is nothing but numbers."""
    net = make_net(1)
    with torch.inference_mode():
        ptsave.load_into(path, net)
    assert kept == [[]]
    assert_same_object(net.state_dict(), make_net().state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(path: Path, dtype: torch.dtype) -> None:
    assert_restores(path, lambda: make_net(1, dtype))


def test_versions_are_counted(path: Path) -> None:
    """Autograd must notice that a saved tensor has changed."""
    net = make_net(1)
    before = [tensor._version for tensor in net.state_dict(keep_vars=True).values()]
    ptsave.load_into(path, net)
    after = [tensor._version for tensor in net.state_dict(keep_vars=True).values()]
    assert all(a > b for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", ["path", "str", "file", "BytesIO", "buffered", "offset"])
def test_sources(path: Path, kind: str) -> None:
    net, expected = make_net(1), make_net()
    if kind in ("path", "str"):
        ptsave.load_into(path if kind == "path" else str(path), net)
    elif kind == "BytesIO":
        ptsave.load_into(io.BytesIO(path.read_bytes()), net)
    else:
        prefix = b"x" * 777 if kind == "offset" else b""
        path.write_bytes(prefix + path.read_bytes())
        with path.open("rb", buffering=0 if kind == "file" else -1) as file:
            file.seek(len(prefix))
            ptsave.load_into(file, net)
    assert_same_object(net.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    ("weights_only", "map_location"),
    [(True, None), (False, "cpu"), (None, torch.device("cpu")), (True, {"cpu": "cpu"})],
)
def test_options(path: Path, weights_only: Any, map_location: Any) -> None:
    net = make_net(1)
    ptsave.load_into(path, net, weights_only=weights_only, map_location=map_location)
    assert_same_object(net.state_dict(), make_net().state_dict())


def test_map_location_that_looks(path: Path) -> None:
    """A callable gets storages that are filled."""
    beginnings: list[list[int]] = []

    def look(storage: Any, location: str) -> Any:
        beginnings.append(storage[:16].tolist())
        return storage

    ptsave.load_into(path, make_net(1), map_location=look)
    assert len(beginnings) == len(make_net().state_dict())
    assert any(map(any, beginnings))


@pytest.mark.parametrize("new_format", [False, True])
@pytest.mark.parametrize("byte_order", ["little", "big"])
def test_files_that_torch_reads(tmp_path: Path, new_format: bool, byte_order: str) -> None:
    stock_save(
        make_net().state_dict(),
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=new_format,
    )
    if new_format and byte_order == "big":
        rewrite(tmp_path / "old.pt", byteorder=b"big")
    net, expected = make_net(1), make_net(2)
    stock_restore(tmp_path / "old.pt", expected)
    ptsave.load_into(tmp_path / "old.pt", net)
    assert_same_object(net.state_dict(), expected.state_dict())


def rewrite(path: Path, *, method: int = 0, order: int = 1, **replaced: bytes) -> None:
    """Write the same records as another zip writer would: other places, no descriptors."""
    records = zip_records(path.read_bytes()) | replaced
    path.write_bytes(zipped({name: records[name] for name in list(records)[::order]}, method))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_other_writers(path: Path, method: int, order: int) -> None:
    rewrite(path, method=method, order=order)
    assert_restores(path, lambda: make_net(1))


def tie(net: nn.Module) -> nn.Module:
    net.tied = net[0]  # type: ignore[index]
    return net


def double(net: nn.Module) -> nn.Module:
    net.tied = twin = copy.deepcopy(net[0])  # type: ignore[index]
    twin.weight.data += 1
    return net


@pytest.mark.parametrize("in_model", [tie, double])
@pytest.mark.parametrize("in_file", [tie, double])
def test_tied(tmp_path: Path, in_file: Any, in_model: Any, kept: list[list[int]]) -> None:
    """Tied bytes are read once, and copied from there; of two values the last one wins."""
    stock_save(in_file(make_net()).state_dict(), tmp_path / "tied.pt")
    assert_restores(tmp_path / "tied.pt", lambda: in_model(make_net(1)))
    assert kept == [[]] or in_file is double


class Views(nn.Module):
    """Parameters that are parts of one flat buffer."""

    def __init__(self, *, overlap: bool = False) -> None:
        super().__init__()
        self.flat = torch.rand(60_000)
        self.first = nn.Parameter(self.flat[:20_000].view(100, 200))
        start = 10_000 if overlap else 20_000
        self.second = nn.Parameter(self.flat[start : start + 30_000])
        self.register_buffer("transposed", torch.rand(30, 40).t())
        self.register_buffer("strided", torch.rand(40, 30)[:, ::2])
        self.register_buffer("scalar", torch.rand(()))
        self.register_buffer("empty", torch.rand(0, 3))
        self.register_buffer("image", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("saved_overlap", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_views(tmp_path: Path, overlap: bool, saved_overlap: bool) -> None:
    """Views in the file, in the model, in both, and such as overlap."""
    stock_save(Views(overlap=saved_overlap).state_dict(), tmp_path / "views.pt")
    torch.manual_seed(3)
    state = torch.random.get_rng_state()

    def make() -> nn.Module:
        torch.random.set_rng_state(state)
        return Views(overlap=overlap)

    assert_restores(tmp_path / "views.pt", make)
    contiguous = {k: v.contiguous().clone() for k, v in make().state_dict().items()}
    stock_save(contiguous, tmp_path / "contiguous.pt")
    assert_restores(tmp_path / "contiguous.pt", make)


def test_bytes_around_a_view_stay(tmp_path: Path) -> None:
    """Only the target's own elements may change."""
    memory = torch.zeros(300_000)
    net = nn.Module()
    net.weight = nn.Parameter(memory[100_000:200_000])
    stock_save({"weight": torch.ones(100_000)}, tmp_path / "weight.pt")
    ptsave.load_into(tmp_path / "weight.pt", net)
    assert memory[:100_000].sum() == 0
    assert memory[200_000:].sum() == 0
    assert memory.sum() == 100_000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).to(torch.complex64),
        torch.arange(6).to(torch.complex64).conj(),
        torch.arange(6.0).to_sparse(),
        torch.ones(1),
        torch.arange(6) > 2,
        torch.arange(6.0).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: str(tensor.dtype) + str(tensor.layout),
)
def test_kinds_of_tensors(tmp_path: Path, tensor: Tensor) -> None:
    def make() -> nn.Module:
        net = make_net(1)
        net.register_buffer("extra", torch.zeros_like(tensor))
        return net

    saved = make_net().state_dict()
    saved["extra"] = tensor
    stock_save(saved, tmp_path / "kinds.pt")
    assert_restores(tmp_path / "kinds.pt", make)


def test_assign(path: Path) -> None:
    assert_restores(path, lambda: make_net(1), assign=True)
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 20_000, bias=False))
    ptsave.load_into(path, net, assign=True)
    assert_same_object(net.state_dict(), make_net().state_dict())


# -------------------------------------------------------------------------- code of the model's own


class Looks(nn.Module):
    """Sees its part of the state dict, and the model, before and after."""

    def __init__(self, seen: list[Any], model: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = seen
        self.model = model
        self.register_load_state_dict_pre_hook(self.look_before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self.look_after)  # type: ignore[no-untyped-call]

    def look_before(self, module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        self.seen.append({name: tensor.tolist() for name, tensor in state_dict.items()})
        self.seen.append(self.model[0][0].weight.tolist())  # type: ignore[index]
        state_dict[prefix + "inner.bias"] = state_dict[prefix + "inner.bias"] + 1

    def look_after(self, module: Any, keys: Any) -> None:
        self.seen.append(self.inner.weight.tolist())


def make_looking(seen: list[Any]) -> nn.Module:
    model: list[nn.Module] = []
    model.append(nn.Sequential(nn.Linear(3, 3), Looks(seen, model), nn.Linear(3, 3)))
    return model[0]


def test_hooks_see_values(tmp_path: Path, kept: list[list[int]]) -> None:
    torch.manual_seed(0)
    stock_save(make_looking([]).state_dict(), tmp_path / "looks.pt")
    theirs: list[Any] = []
    ours: list[Any] = []
    expected, target = make_looking(theirs), make_looking(ours)
    stock_restore(tmp_path / "looks.pt", expected)
    ptsave.load_into(tmp_path / "looks.pt", target)
    assert ours == theirs
    assert_same_object(target.state_dict(), expected.state_dict())
    assert max(map(len, kept)) == 2  # of the six records, those of its part are in memory


def test_extra_state(tmp_path: Path) -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.extra = torch.zeros(3)

        def get_extra_state(self) -> Any:
            return {"tensor": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["tensor"] * 2

    saved = Extra()
    saved.extra += 3
    stock_save(saved.state_dict(), tmp_path / "extra.pt")
    expected, target = Extra(), Extra()
    stock_restore(tmp_path / "extra.pt", expected)
    ptsave.load_into(tmp_path / "extra.pt", target)
    assert_same_object(target.extra, expected.extra)


def test_parametrized_modules(tmp_path: Path) -> None:
    def make() -> nn.Module:
        module: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        return module

    stock_save(make().state_dict(), tmp_path / "norm.pt")
    state = copy.deepcopy(make().state_dict())

    def same() -> nn.Module:
        fresh = make()
        fresh.load_state_dict(state)
        return fresh

    assert_restores(tmp_path / "norm.pt", same)


# ------------------------------------------------------------------------------ checks come first


def values_of(module: nn.Module) -> Any:
    return copy.deepcopy(module.state_dict())


@pytest.mark.parametrize("device", [None, "cpu", "meta"], ids=str)  # tensors are assigned there
@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "type", "everything"])
def test_nothing_changes_if_keys_do_not_fit(path: Path, damage: str, device: str | None) -> None:
    saved: Any = OrderedDict(stock_load(path))
    if damage in ("missing", "everything"):
        del saved["1.bias"]
    if damage in ("unexpected", "everything"):
        saved["9.bias"] = torch.ones(2)
    if damage in ("shape", "everything"):
        saved["2.weight"] = torch.ones(2)
    if damage in ("type", "everything"):
        saved["0.bias"] = [1, 2]
    stock_save(saved, path)
    options: dict[str, Any] = {} if device is None else {"assign": True}
    net, other = make_net(1).to(device), make_net(1).to(device)
    parameters, before = dict(net.named_parameters()), values_of(net)
    assert_same_failure(
        lambda: ptsave.load_into(path, net, **options),
        lambda: stock_restore(path, other, **options),
    )
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    if device != "meta":
        assert_same_object(net.state_dict(), before)


def test_not_strict(path: Path) -> None:
    saved: Any = OrderedDict(stock_load(path))
    del saved["1.bias"]
    saved["9.bias"] = torch.ones(2)
    stock_save(saved, path)
    assert_restores(path, lambda: make_net(1), strict=False)


def test_mismatched_sizes(path: Path) -> None:
    net = make_net(1)
    net[2] = nn.Linear(40, 10, bias=False)  # type: ignore[operator]
    keys = ptsave.load_into(path, net, ignore_mismatched_sizes=True)
    assert keys.mismatched_keys == [("2.weight", torch.Size([20_000, 40]), torch.Size([10, 40]))]
    assert torch.equal(net[0].weight, make_net()[0].weight)  # type: ignore[index]


def test_damage_is_named_with_what_has_changed(path: Path) -> None:
    flip_middle(path, "data/7")
    net = make_net(1)
    with pytest.raises(ptsave.CorruptCheckpointError, match="data/7") as raised:
        ptsave.load_into(path, net)
    error: Any = raised.value
    assert error.entries == ["2.weight"]
    assert error.overwritten == list(net.state_dict())
    if hasattr(error, "__notes__"):
        assert "stopped halfway: 8 entries" in error.__notes__[0]
    assert torch.equal(net[0].weight, make_net()[0].weight)  # type: ignore[index]
    ptsave.load_into(path, net, verify=False)


def test_damaged_pickle_changes_nothing(path: Path) -> None:
    flip_middle(path, "data.pkl")
    net = make_net(1)
    before = values_of(net)
    with pytest.raises(ptsave.CorruptCheckpointError) as raised:
        ptsave.load_into(path, net)
    assert not hasattr(raised.value, "overwritten")
    assert_same_object(net.state_dict(), before)


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1_000_000, -1])
def test_truncated_files_change_nothing(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])
    net = make_net(1)
    before = values_of(net)
    expected = failure_of(lambda: stock_load(path))
    failure = failure_of(lambda: ptsave.load_into(path, net))
    assert isinstance(failure, type(expected))
    assert_same_object(net.state_dict(), before)


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has changed when Ctrl-C came is said, and nothing changes any more."""

    @contextmanager
    def interrupting(*_: Any) -> Iterator[Callable[[int], None]]:
        def interrupt(nbytes: int) -> None:
            raise KeyboardInterrupt

        yield interrupt

    saved, net = nn.Linear(100, 100), nn.Linear(100, 100)
    stock_save(saved.state_dict(), tmp_path / "small.pt")  # too small for threads
    monkeypatch.setattr(restoring, "progress_bar", interrupting)
    with pytest.raises(KeyboardInterrupt) as raised:
        ptsave.load_into(tmp_path / "small.pt", net, progress=True)
    assert raised.value.overwritten == ["weight", "bias"]  # type: ignore[attr-defined]
    monkeypatch.undo()
    ptsave.load_into(tmp_path / "small.pt", net)
    assert_same_object(net.state_dict(), saved.state_dict())


# ------------------------------------------------------------------------- optimizers and the rest


def trained(seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 2000))
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    for _ in range(seed + 1):
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("fresh", [False, True])
def test_optimizer(tmp_path: Path, fresh: bool, kept: list[list[int]]) -> None:
    _, saved = trained(0, lr=0.5, amsgrad=True)
    stock_save(saved.state_dict(), tmp_path / "optimizer.pt")

    def make() -> Any:
        net, optimizer = trained(1, amsgrad=True)
        return torch.optim.AdamW(net.parameters(), amsgrad=True) if fresh else optimizer

    expected, target = make(), make()
    before = [id(value) for state in target.state.values() for value in state.values()]
    expected.load_state_dict(stock_load(tmp_path / "optimizer.pt"))
    assert ptsave.load_into(tmp_path / "optimizer.pt", target) is None
    assert_same_object(target.state_dict(), expected.state_dict())
    after = [id(value) for state in target.state.values() for value in state.values()]
    assert fresh or after == before
    read = {record for records in kept for record in records}
    assert len(read) == (16 if fresh else 0)


def test_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    _, saved = trained()
    state_dict = saved.state_dict()
    state_dict["param_groups"][0]["params"].pop()
    stock_save(state_dict, tmp_path / "optimizer.pt")
    _, target = trained(1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        ptsave.load_into(tmp_path / "optimizer.pt", target)
    assert_same_object(target.state_dict(), before)


def test_dict(path: Path, kept: list[list[int]]) -> None:
    expected = stock_load(path)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    tensors = dict(target)
    keys = ptsave.load_into(path, target)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert all(target[name] is tensors[name] for name in tensors)
    assert_same_object(target, dict(expected))
    assert kept == [[]]


def test_nested_dict(tmp_path: Path) -> None:
    saved = {"a": {"b": [torch.ones(3), 5]}, "epoch": 3, "tensors": (torch.ones(2), torch.ones(1))}
    stock_save(saved, tmp_path / "nested.pt")
    target: Any = {
        "a": {"b": [torch.zeros(3), None]},
        "epoch": 0,
        "tensors": (torch.zeros(2), torch.zeros(1)),
    }
    ptsave.load_into(tmp_path / "nested.pt", target)
    assert_same_object(target, saved)


def test_dict_that_does_not_fit(path: Path) -> None:
    target: Any = {"0.weight": torch.zeros(40, 3), "0.bias": torch.zeros(2), "other": torch.ones(1)}
    with pytest.raises(RuntimeError) as raised:
        ptsave.load_into(path, target)
    message = str(raised.value)
    assert 'Missing key(s) in state_dict: "other". ' in message
    assert 'Unexpected key(s) in state_dict: "1.weight"' in message
    assert "size mismatch for 0.bias" in message
    assert target["0.weight"].sum() == 0


@pytest.mark.parametrize("target", [3, None, "text", (1, 2)], ids=repr)
def test_targets_that_are_none(path: Path, target: Any) -> None:
    with pytest.raises(TypeError, match="expected a module, an optimizer, a dict"):
        ptsave.load_into(path, target)


def test_checkpoint(tmp_path: Path, kept: list[list[int]]) -> None:
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu")
    objects = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    rng = torch.get_rng_state()
    ptsave.save_checkpoint(tmp_path / "c.pt", **objects, epoch=3, rng=rng, history=[0.5])
    plain = {name: obj.state_dict() for name, obj in objects.items()}
    (tmp_path / "stock").mkdir()
    stock_save(
        {**plain, "epoch": 3, "rng": rng, "history": [0.5]},
        tmp_path / "stock" / "c.pt",
    )
    assert (tmp_path / "c.pt").read_bytes() == (tmp_path / "stock" / "c.pt").read_bytes()

    other, other_optimizer = trained(1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 3)
    rest = ptsave.load_checkpoint(
        tmp_path / "c.pt", scheduler=other_scheduler, optimizer=other_optimizer, model=other
    )
    assert list(rest) == ["scaler", "epoch", "rng", "history"]
    assert torch.equal(rest["rng"], rng)
    assert_same_object(other.state_dict(), net.state_dict())
    assert_same_object(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert kept[-1] == [20]  # the state of the random number generator, which nobody had


def test_rest_that_shares_memory_with_the_model(tmp_path: Path) -> None:
    """An entry that is returned has its values, even if a target took the same bytes."""
    net, _ = trained()
    state = net.state_dict()
    stock_save({"model": state, "ema": {"0.weight": state["0.weight"]}}, tmp_path / "c.pt")
    other, _ = trained(1)
    rest = ptsave.load_checkpoint(tmp_path / "c.pt", model=other)
    assert torch.equal(rest["ema"]["0.weight"], state["0.weight"])
    assert_same_object(other.state_dict(), state)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    ptsave.save_checkpoint(tmp_path / "c.pt", model=make_net())
    with pytest.raises(KeyError, match=r"no entry 'modle'.*did you mean 'model'"):
        ptsave.load_checkpoint(tmp_path / "c.pt", modle=make_net(1))
    stock_save([1, 2], tmp_path / "list.pt")
    with pytest.raises(TypeError, match="holds list, not a dict"):
        ptsave.load_checkpoint(tmp_path / "list.pt", model=make_net(1))
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        ptsave.load_into(tmp_path / "list.pt", make_net(1))


def test_conversions_go_through_little_memory(tmp_path: Path) -> None:
    """Several batches, with records that are used twice."""
    tensors = {str(i): torch.full((3_000_000,), float(i)) for i in range(8)}
    saved: Any = {**tensors, **{f"again.{i}": tensors[str(i)] for i in range(8)}}
    stock_save(saved, tmp_path / "large.pt")
    target = {name: torch.zeros(3_000_000, dtype=torch.bfloat16) for name in saved}
    ptsave.load_into(tmp_path / "large.pt", target)
    assert all(bool((target[name] == float(name[-1])).all()) for name in saved)


@pytest.mark.parametrize("map_location", ["cuda:0", "nowhere", torch.device("cuda")], ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the location exists")
def test_locations_that_do_not_exist(path: Path, map_location: Any) -> None:
    """They are refused in torch's words, before anything changes."""
    net = make_net(1)
    before = values_of(net)
    assert_same_failure(
        lambda: ptsave.load_into(path, net, map_location=map_location),
        lambda: stock_load(path, map_location=map_location),
    )
    assert_same_object(net.state_dict(), before)


def test_rest_that_belongs_elsewhere(tmp_path: Path) -> None:
    """An entry that cannot be restored is found before anything changes."""
    net = make_net()
    stock_save({"model": net.state_dict(), "rest": torch.ones(2)}, tmp_path / "c.pt")
    data = (tmp_path / "c.pt").read_bytes()
    cpu, elsewhere = (b"X\x03\x00\x00\x00" + name for name in (b"cpu", b"xyz"))
    (tmp_path / "c.pt").write_bytes(data.replace(cpu, elsewhere))
    other = make_net(1)
    before = values_of(other)
    with pytest.raises(RuntimeError, match="don't know how to restore data location"):
        ptsave.load_checkpoint(tmp_path / "c.pt", model=other, verify=False)
    assert_same_object(other.state_dict(), before)


def test_arguments_in_the_wrong_order(tmp_path: Path) -> None:
    """load_into takes the file first, load_model the model."""
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    file: Any = tmp_path / "model.pt"
    for target in (model, torch.optim.SGD(model.parameters())):
        with pytest.raises(TypeError, match=r"wrong order: call load_into\(file, target\)"):
            ptsave.load_into(target, file)
    with pytest.raises(TypeError, match=r"wrong order: call load_model\(model, path\)"):
        ptsave.load_model(file, model)
