"""`register_lazy_buffer`: buffers without a shape, by torch's loading and by ptsave's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from comparison import stock_load, stock_save
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


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_the_module(clone: Any, load: Any) -> None:
    original = nn.Sequential(Memory(torch.ones(5)))
    module = clone(original)
    load(module, nn.Sequential(Memory(torch.zeros(3))).state_dict())
    assert module[0].seen.shape == (3,)
    assert original[0].seen.shape == (5,)


def test_a_saved_module(load: Any) -> None:
    stream = io.BytesIO()
    stock_save(Memory(), stream)
    stream.seek(0)
    module = stock_load(stream, weights_only=False)
    load(module, Memory(torch.zeros(3)).state_dict())
    assert module.seen.shape == (3,)


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
