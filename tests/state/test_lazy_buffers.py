"""`register_lazy_buffer`: buffers without a shape, by torch's loading and by ptsave's."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from stock_comparison import saved_bytes, stock_load, stock_save
from torch import Tensor, nn

import ptsave

LOADERS = [
    lambda module, *args, **options: module.load_state_dict(*args, **options),
    ptsave.load_state_dict,
]


class Memory(nn.Module):
    """Has seen nothing at first."""

    seen: Any

    def __init__(self, seen: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = seen
        ptsave.register_lazy_buffer(self, "seen")


@pytest.fixture(params=LOADERS, ids=["torch", "ptsave"])
def load(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("saved", [None, torch.arange(3), torch.rand(2, 2), torch.rand(())])
@pytest.mark.parametrize("present", [None, torch.zeros(2, 2), torch.zeros(1), torch.zeros(3).int()])
def test_every_change_of_shape(
    saved: Tensor | None, present: Tensor | None, assign: bool, load: Any
) -> None:
    source, target = (copy.deepcopy(nn.Sequential(Memory(each))) for each in (saved, present))
    old: Any = target[0].seen
    state_dict = source.state_dict()
    assert ("0.seen" in state_dict) == (saved is not None)
    assert load(target, state_dict, assign=assign) == ([], [])
    new: Any = target[0].seen
    if saved is None:
        assert new is None
    else:
        assert torch.equal(new, saved.to(new.dtype))
        assert new.dtype == (saved.dtype if assign or old is None else old.dtype)
        assert (new is old) == (not assign and old is not None and old.shape == saved.shape)
        assert (new.data_ptr() == state_dict["0.seen"].data_ptr()) == assign
        assert not new.requires_grad
    assert "0.seen" in target.state_dict() or saved is None


def test_everything_else_stays_strict(load: Any) -> None:
    state_dict = {"0.seen": torch.ones(2), "0.other": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0\.weight".*Unexpected.*"0\.other"'):
        load(nn.Sequential(Memory()), state_dict)
    with pytest.raises(RuntimeError):
        load(Memory(), {"weight": torch.ones(2), "seen": "no tensor"})


def test_swapping(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    target = Memory()
    for assign in (False, True):
        state_dict = {"weight": torch.zeros(2), "seen": torch.ones(3 + assign)}
        load(target, state_dict, assign=assign)
        assert torch.equal(target.seen, state_dict["seen"])


def test_devices(load: Any) -> None:
    state_dict = Memory(torch.ones(3)).state_dict()
    with torch.device("meta"):
        target = Memory()
    load(target, state_dict, assign=True)
    assert target.seen is not None
    assert target.seen.device.type == "cpu"
    alone = nn.Module()
    ptsave.register_lazy_buffer(alone, "seen")
    state_dict = {"seen": torch.ones(2)}
    with torch.device("meta"):
        load(alone, state_dict)
    assert alone.seen.tolist() == [1, 1]  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:for seen. copying from a non-meta parameter")
def test_the_device_of_the_other_tensors(load: Any) -> None:
    target = Memory().to("meta")
    with pytest.warns(UserWarning, match="no-op"):
        load(target, Memory(torch.ones(3)).state_dict())
    assert target.seen is not None
    assert target.seen.is_meta


def test_sparse(load: Any) -> None:
    target = Memory()
    load(target, Memory(torch.eye(2).to_sparse()).state_dict())
    assert target.seen is not None
    assert target.seen.is_sparse
    assert torch.equal(target.seen.to_dense(), torch.eye(2))


def saved_and_loaded(module: nn.Module) -> Any:
    stream = io.BytesIO(saved_bytes(stock_save, module))
    return stock_load(stream, weights_only=False)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded]
)
def test_copies_and_pickles_of_the_module(clone: Any, load: Any) -> None:
    original = nn.Sequential(Memory(torch.ones(5)))
    module = clone(original)
    load(module, nn.Sequential(Memory(torch.zeros(3))).state_dict())
    assert module[0].seen.shape == (3,)
    assert original[0].seen.shape == (5,)


def test_conversions_and_assignments() -> None:
    module = Memory().double()
    assert module.seen is None
    module.seen = torch.ones(2)
    module.half()
    assert module.seen.dtype is torch.float16
    assert "seen" in module.state_dict()
    module.seen = None
    assert "seen" not in module.state_dict()


def test_what_can_be_declared() -> None:
    module: Any = Memory()
    ptsave.register_lazy_buffer(module, "seen")  # again
    assert len(module._load_state_dict_pre_hooks) == 1
    ptsave.register_lazy_buffer(module, "unknown_before")
    assert module.unknown_before is None
    present = torch.ones(2)
    module.register_buffer("present", present)
    ptsave.register_lazy_buffer(module, "present")
    assert module.present is present
    module.register_buffer("hidden", None, persistent=False)
    with pytest.raises(ValueError, match="left out of state dicts"):
        ptsave.register_lazy_buffer(module, "hidden")
    with pytest.raises(KeyError):
        ptsave.register_lazy_buffer(module, "weight")
    with pytest.raises(KeyError):
        ptsave.register_lazy_buffer(module, "a.b")
    with pytest.raises(TypeError):
        ptsave.register_lazy_buffer(module, 3)  # type: ignore[arg-type]
    module.text = "no tensor"
    with pytest.raises(TypeError, match="'text'"):
        ptsave.register_lazy_buffer(module, "text")
    assert module.text == "no tensor"


# ------------------------------------------------------------------------------- when loading fails


PRESENT = [None, torch.zeros(1)]  # what the buffer is before; no test's entry has that shape


def remembering(present: Tensor | None, name: str = "seen") -> Any:
    module = Memory()
    setattr(module, name, None if present is None else present.clone())
    return module


def hooked(hook: Callable[[dict[str, Any], str], object]) -> Callable[[Any], None]:
    """Return what registers a hook later than that of the buffer."""

    def register(module: Any) -> None:
        module.register_load_state_dict_pre_hook(
            lambda _, entries, prefix, *rest: hook(entries, f"{prefix}seen")
        )

    return register


def fail(error: BaseException) -> Callable[[Any, str], None]:
    def hook(*_: Any) -> None:
        raise error

    return hook


drop_later = hooked(lambda entries, key: entries.pop(key))
raise_later = hooked(fail(LookupError("of a hook")))
SABOTAGES = {
    "dropped": drop_later,
    "raises": raise_later,
    "interrupted": hooked(fail(KeyboardInterrupt())),
    "no tensor": hooked(lambda entries, key: entries.update({key: "no tensor"})),
    "cannot be copied": hooked(
        lambda entries, key: entries.update({key: torch.ones(5, device="meta")})
    ),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("present", PRESENT, ids=["None", "tensor"])
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_the_buffer_stays_what_it_was(
    sabotage: str, present: Tensor | None, nested: bool, assign: bool, load: Any
) -> None:
    """Whatever a hook that was registered later does to its key."""
    if assign and sabotage == "cannot be copied":
        pytest.skip("a tensor without memory can be assigned")
    module = remembering(present)
    before: Any = module.seen
    SABOTAGES[sabotage](module)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    target = nn.Sequential(nn.Sequential(module)) if nested else module
    prefix = "0.0." if nested else ""
    state_dict = {f"{prefix}seen": torch.ones(2, 2), f"{prefix}weight": torch.zeros(2)}
    hooks = list(module._load_state_dict_pre_hooks.items())
    for _ in range(2):
        with contextlib.suppress(LookupError, KeyboardInterrupt, RuntimeError):
            load(target, dict(state_dict), strict=False, assign=assign)
        assert module.seen is before
        assert before is None or before.tolist() == [0]
        assert list(module._load_state_dict_pre_hooks.items()) == hooks


@pytest.mark.parametrize("present", PRESENT, ids=["None", "tensor"])
def test_a_key_that_is_dropped_later_is_missing_only_where_there_is_a_buffer(
    present: Tensor | None, load: Any
) -> None:
    module = remembering(present)
    drop_later(module)
    result = load(module, {"seen": torch.ones(2), "weight": torch.zeros(2)}, strict=False)
    assert result == ([] if present is None else ["seen"], [])


def test_a_key_that_is_renamed_later(load: Any) -> None:
    module: Any = Memory()

    def rename(_: nn.Module, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
        entries[prefix + "seen"] = entries.pop(prefix + "old")

    module.register_load_state_dict_pre_hook(rename)
    assert load(module, {"old": torch.ones(3), "weight": torch.zeros(2)}) == ([], [])
    assert torch.equal(module.seen, torch.ones(3))


def test_a_failing_copy_is_reported_in_torchs_words(load: Any) -> None:
    failures = []
    for module in (remembering(torch.zeros(1)), nn.Module()):
        module.register_buffer("seen", getattr(module, "seen", torch.zeros(5)))
        entries = {"seen": torch.ones(5, device="meta"), "weight": torch.zeros(2)}
        with pytest.raises(RuntimeError) as caught:
            load(module, entries, strict=False)
        failures.append(str(caught.value).split("\n", 1)[1])
    assert failures[0] == failures[1]


def test_two_lazy_buffers_and_hooks_among_them(load: Any) -> None:
    module: Any = nn.Module()
    calls: list[str] = []
    for name in ("a", "b", "c"):
        ptsave.register_lazy_buffer(module, name)
        module.register_load_state_dict_pre_hook(
            lambda module, *_, name=name: calls.append(f"{name}: {module.a}, {module.b}")
        )
    for _ in range(2):
        load(module, {"a": torch.ones(1), "c": torch.ones(3)})
        assert (module.a.tolist(), module.b, module.c.tolist()) == ([1], None, [1, 1, 1])
    assert calls[:3] == [f"{name}: None, None" for name in "abc"]
    assert len(calls) == 6


def test_an_interrupt_between_hooks_is_forgotten(load: Any) -> None:
    """What stands in for a hook then is still there, and must not do what the old load wanted."""
    module = remembering(torch.zeros(1))
    module.register_load_state_dict_pre_hook(lambda *_: None)
    lazy, later = module._load_state_dict_pre_hooks.values()
    lazy({"seen": torch.ones(9)}, "", {}, True, [], [], [])  # and never the later one
    clone = copy.deepcopy(module)
    for target in (module, clone):
        load(target, {"seen": torch.ones(4), "weight": torch.zeros(2)})
        assert target.seen.tolist() == [1] * 4
    assert list(module._load_state_dict_pre_hooks.values()) == [lazy, later]


def test_shared_modules(load: Any) -> None:
    """A module with two places in the model is loaded twice; the second counts."""
    for first, second in itertools.product((None, torch.ones(1), torch.ones(3)), repeat=2):
        for present in (None, torch.zeros(3)):
            module = remembering(present)
            entries = {"0.seen": first, "1.seen": None if second is None else second + 1}
            state_dict: dict[str, Any] = {k: v for k, v in entries.items() if v is not None}
            state_dict |= {"0.weight": torch.zeros(2), "1.weight": torch.ones(2)}
            load(nn.Sequential(module, module), state_dict)
            if second is None:
                assert module.seen is None
            else:
                assert torch.equal(module.seen, second + 1)


def test_sizes_that_are_ignored() -> None:
    for hooked in (False, True):
        module: Any = remembering(torch.zeros(1))
        if hooked:
            module.register_load_state_dict_pre_hook(lambda *_: None)
        keys: Any = ptsave.load_state_dict(
            module, {"seen": torch.ones(3), "weight": torch.zeros(5)}, ignore_mismatched_sizes=True
        )
        assert module.seen.tolist() == [1, 1, 1]
        assert keys.mismatched_keys == [("weight", torch.Size([5]), torch.Size([2]))]


# -------------------------------------------------------------------------------------- from a file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with two lazy buffers and parameters before, between and behind them."""
    stock_save(pair(torch.arange(3.0), torch.rand(50_000)).state_dict(), tmp_path / "pair.pt")
    return tmp_path / "pair.pt"


def pair(first: Tensor | None, second: Tensor | None) -> Any:
    return nn.Sequential(nn.Linear(2, 2), Memory(first), nn.Linear(2, 2), Memory(second))


RESTORES: dict[str, Any] = {
    "load_into": ptsave.load_into,
    "load_checkpoint": lambda f, target, **options: ptsave.load_checkpoint(
        f, model=target, **options
    ),
}


@pytest.fixture(params=RESTORES)
def restore(request: pytest.FixtureRequest, path: Path) -> Any:
    if request.param == "load_checkpoint":
        stock_save({"model": stock_load(path)}, path)
    return RESTORES[request.param]


def state_of(model: nn.Module) -> dict[str, Any]:
    """The tensors themselves, and their values."""
    tensors = {
        **dict(model.named_parameters()),
        **{
            f"{prefix}.{name}": buffer
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
        },
    }
    return {
        name: (id(each), None if each is None else each.detach().clone())
        for name, each in tensors.items()
    }


def changed_entries(model: nn.Module, before: dict[str, Any]) -> set[str]:
    return {
        name
        for name, (identity, values) in state_of(model).items()
        if identity != before[name][0]
        or (values is not None and not torch.equal(values, before[name][1]))
    }


@pytest.mark.parametrize("present", PRESENT, ids=["None", "tensor"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_damaged_read(
    path: Path, restore: Any, present: Tensor | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", threads)
    with zipfile.ZipFile(path) as archive:
        records = [name[5:] for name in archive.namelist() if name.startswith("pair/data/")]
    whole = path.read_bytes()
    for record in records:
        path.write_bytes(whole)
        flip_middle(path, record)
        target = pair(present, present)
        before = state_of(target)
        with pytest.raises(ptsave.CorruptCheckpointError) as caught:
            restore(path, target)
        changed = changed_entries(target, before)
        assert not {name for name in changed if "seen" in name}
        assert changed <= overwritten(caught.value)
        assert not {name for name in overwritten(caught.value) if "seen" in name}


def overwritten(error: BaseException) -> set[str]:
    return {name.removeprefix("model.") for name in getattr(error, "overwritten", [])}


@pytest.mark.parametrize("assign", [False, True])
def test_a_hook_that_raises_halfway(path: Path, assign: bool) -> None:
    """What comes before has been restored by then, and is named."""
    target = pair(None, torch.zeros(1))
    raise_later(target[2])
    before = state_of(target)
    with pytest.raises(LookupError) as caught:
        ptsave.load_into(path, target, assign=assign)
    changed = changed_entries(target, before)
    assert {"0.weight", "0.bias", "1.seen"} <= changed
    assert changed <= overwritten(caught.value)
    assert torch.equal(target[1].seen, torch.arange(3.0))
    assert "3.seen" not in changed | overwritten(caught.value)


@pytest.mark.parametrize("wrong", ["no tensor", "too large", "unexpected"])
@pytest.mark.parametrize("hooked", [False, True])
def test_another_lazy_buffers_entry_is_wrong(
    path: Path, restore: Any, wrong: str, hooked: bool
) -> None:
    """Nothing has changed then, and nothing is said to have."""
    obj = stock_load(path)
    state_dict = obj.get("model", obj)
    if wrong == "no tensor":
        state_dict["3.seen"] = "text"
    elif wrong == "too large":
        state_dict["3.seen"] = torch.zeros(1).expand(1 << 50)
    else:
        state_dict["3.other"] = torch.zeros(1)
    stock_save(obj, path)
    target = pair(None, torch.zeros(1))
    if hooked:
        target[2].register_load_state_dict_pre_hook(lambda *_: None)
    before = state_of(target)
    with pytest.raises(RuntimeError) as caught:
        restore(path, target)
    if not (hooked and wrong != "no tensor"):  # known only when the hook has seen its module
        assert changed_entries(target, before) == set()
        assert not hasattr(caught.value, "overwritten")
    assert changed_entries(target, before) <= overwritten(caught.value)
    assert target[3].seen.tolist() == [0]


def test_an_interrupted_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for present in PRESENT:
        target = pair(present, present)
        before = state_of(target)
        with monkeypatch.context() as patched:
            patched.setattr("ptsave.training.restoring.fill", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ptsave.load_into(path, target)
        assert changed_entries(target, before) == set()
        ptsave.load_into(path, target)
        assert torch.equal(target[1].seen, torch.arange(3.0))


def test_metadata_that_assigns(tmp_path: Path) -> None:
    """torch leaves its wish to assign in the metadata of a state dict, which is then saved."""
    state_dict = pair(torch.ones(3), torch.ones(4)).state_dict()
    pair(torch.zeros(3), None).load_state_dict(state_dict, assign=True)
    stock_save(state_dict, tmp_path / "assigns.pt")
    flip_middle(tmp_path / "assigns.pt", "data/1")
    target = pair(None, None)
    before = state_of(target)
    with pytest.raises(ptsave.CorruptCheckpointError) as caught:
        ptsave.load_into(tmp_path / "assigns.pt", target)
    assert changed_entries(target, before) <= overwritten(caught.value)
    assert target[3].seen is None
    for parameter in target.parameters():
        assert parameter.isfinite().all()
