"""Which entries `load_module` leaves out, and what it shows to whom before values are there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from _state_dicts import saved
from stock_comparison import assert_same_failure
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

import ptsave
from ptsave._C import copies_plainly
from ptsave.state.copying import Copier
from ptsave.state.modules import load_module

# ------------------------------------------------------------------------- sizes that do not match


class Foreign(nn.Linear):
    """Whose own code runs first."""

    def _load_from_state_dict(self, state_dict: Any, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, *rest)


def add_pre_hook(module: nn.Module, hook: Any) -> None:
    add: Any = module._register_load_state_dict_pre_hook
    add(hook)


class Renaming(nn.Linear):
    """Whose weight is found by a hook."""

    def __init__(self, n_inputs: int, n_outputs: int) -> None:
        super().__init__(n_inputs, n_outputs)
        add_pre_hook(self, self.rename)

    def rename(self, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")


def model(make: Any, n_classes: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(2, 2), "head": make(2, n_classes)})


def state_dict_for(module: nn.Module) -> dict[str, Any]:
    state_dict = saved(module)
    if isinstance(module["head"], Renaming):  # type: ignore[index]
        state_dict["head.old"] = state_dict.pop("head.weight")
    return state_dict


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [nn.Linear, Foreign, Renaming])
def test_mismatched_entries_are_left_out(
    make: Any, assign: bool, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    source, target = model(make, 5), model(make, 3)
    state_dict = state_dict_for(source)
    before = copy.deepcopy(dict(target.state_dict()))
    keys = ptsave.load_state_dict(target, state_dict, assign=assign, ignore_mismatched_sizes=True)
    assert isinstance(keys, ptsave.IncompatibleKeys)
    assert tuple(keys) == ([], [])
    assert sorted(keys.mismatched_keys) == [
        ("head.bias", torch.Size([5]), torch.Size([3])),
        ("head.weight", torch.Size([5, 2]), torch.Size([3, 2])),
    ]
    after = target.state_dict()
    for name in ("weight", "bias"):
        assert torch.equal(after[f"head.{name}"], before[f"head.{name}"])
        assert torch.equal(after[f"body.{name}"], state_dict[f"body.{name}"])
    assert all(parameter.requires_grad for parameter in target.parameters())
    n_hooks = len(target["head"]._load_state_dict_pre_hooks)  # type: ignore[index]
    assert n_hooks == (make is Renaming)


def test_other_errors_stay_errors() -> None:
    source, target = model(nn.Linear, 5), model(nn.Linear, 3)
    state_dict = state_dict_for(source)
    del state_dict["body.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "body.bias"') as info:
        ptsave.load_state_dict(target, state_dict, ignore_mismatched_sizes=True)
    assert "size mismatch" not in str(info.value)
    keys = ptsave.load_state_dict(target, state_dict, False, ignore_mismatched_sizes=True)
    assert keys.missing_keys == ["body.bias"]
    assert len(keys.mismatched_keys) == 2  # type: ignore[attr-defined]


def test_one_element_is_no_mismatch() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(0.0))
    keys = ptsave.load_state_dict(module, {"scale": torch.ones(1)}, ignore_mismatched_sizes=True)
    assert keys.mismatched_keys == []  # type: ignore[attr-defined]
    assert module.scale == 1


def test_entries_that_are_no_tensors_are_no_mismatch() -> None:
    module = nn.Linear(1, 1)
    values = {"weight": "text", "bias": torch.ones(1)}
    assert_same_failure(
        lambda: ptsave.load_state_dict(module, values, ignore_mismatched_sizes=True),
        lambda: module.load_state_dict(values),
    )


def test_an_overridden_method_cannot_ignore_sizes() -> None:
    module = nn.Linear(1, 1)
    module.load_state_dict = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has its own load_state_dict"):
        ptsave.load_state_dict(module, {}, ignore_mismatched_sizes=True)


def test_a_hook_that_keeps_its_dict_finds_the_entries_in_it() -> None:
    module, kept = nn.Linear(2, 2), []
    add_pre_hook(module, lambda state_dict, *_: kept.append(state_dict))
    values = {"weight": torch.ones(3, 2), "bias": torch.ones(2)}
    ptsave.load_state_dict(module, values, ignore_mismatched_sizes=True)
    assert kept[0]["weight"] is values["weight"]


def test_the_result_is_torchs_and_can_be_pickled() -> None:
    module = nn.Linear(1, 1)
    state_dict = module.state_dict()
    keys = ptsave.load_state_dict(module, state_dict, ignore_mismatched_sizes=True)
    assert repr(keys) == repr(module.load_state_dict(state_dict))
    missing, unexpected = keys
    assert (missing, unexpected) == ([], [])
    full = ptsave.IncompatibleKeys(["a"], [], [("b", torch.Size([1]), torch.Size([2]))])
    again = pickle.loads(pickle.dumps(full))
    assert (again, again.mismatched_keys) == (full, full.mismatched_keys)
    assert "mismatched_keys=[('b'" in repr(full)


# ---------------------------------------------------------------- values that have not arrived yet


class CopyLater(Copier):
    """Notes copies, and does them when somebody may look; entries hold nothing before that."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.values = {id(entry): entry.clone() for entry in self.tensors_of(state_dict)}
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.shown: list[list[str]] = []
        for entry in self.tensors_of(state_dict):
            entry.zero_()

    @staticmethod
    def tensors_of(state_dict: Mapping[str, Any]) -> list[Tensor]:
        return [entry for entry in state_dict.values() if isinstance(entry, Tensor)]

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.pending += copies

    def show(self, state_dict: Mapping[str, Any]) -> None:
        self.shown.append(list(state_dict))
        for entry in self.tensors_of(state_dict):
            self.fill(entry)
        for target, source in self.pending:
            self.fill(source)
            super().copy([(target, source)])
        self.pending.clear()

    def fill(self, entry: Tensor) -> None:
        if id(entry) in self.values:
            entry.copy_(self.values[id(entry)])


def load_later(module: nn.Module, assign: bool = False) -> CopyLater:
    """Load other values into a copy of the module by `CopyLater`, and into itself by torch."""
    torch.manual_seed(1)
    expected, module = module, copy.deepcopy(module)
    state_dict = saved(module)
    expected.load_state_dict(copy.deepcopy(state_dict), assign=assign)
    copier = CopyLater(state_dict)
    assert load_module(module, state_dict, True, assign, copier) == ([], [])
    shown = copier.shown[:]
    copier.show(state_dict)
    for name, value in expected.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(module.state_dict()[name], value), name
    copier.shown = shown
    return copier


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(2, 2)),
    "half": lambda: nn.Sequential(nn.Linear(2, 2).half()),
    "strided": lambda: nn.ParameterList([torch.zeros(2, 3).t()]),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_show_nothing(name: str, assign: bool) -> None:
    copier = load_later(PLAIN[name](), assign)
    assert copier.shown == []


def test_a_lazy_buffer_shows_nothing() -> None:
    module = nn.Module()
    module.seen = torch.ones(3)
    ptsave.register_lazy_buffer(module, "seen")
    assert load_later(module).shown == []
    fresh = nn.Module()
    ptsave.register_lazy_buffer(fresh, "seen")
    state_dict = {"seen": torch.ones(2)}
    copier = CopyLater(state_dict)
    load_module(fresh, state_dict, True, False, copier)
    assert copier.shown == []
    copier.show({})
    assert fresh.seen.tolist() == [1, 1]  # type: ignore[operator]


class Looking(nn.Linear):
    """Looks at the values of all entries and targets, in every way that there is."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[Any] = []

    def look(self, entries: Mapping[str, Any]) -> None:
        self.seen.append({key: entry.tolist() for key, entry in entries.items()})
        self.seen.append(self.weight.tolist())

    def get_extra_state(self) -> Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: Tensor) -> None:
        self.look({"": state})


class Overriding(Looking):
    def _load_from_state_dict(self, state_dict: Any, *rest: Any) -> None:
        self.look(state_dict)
        super()._load_from_state_dict(state_dict, *rest)


def looking(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), Overriding() if kind == "override" else Looking())
    found = module[1]
    assert isinstance(found, Looking)
    if kind == "pre-hook":
        add_pre_hook(found, lambda entries, *_: found.look(entries))
    if kind == "post-hook":
        add: Any = found.register_load_state_dict_post_hook
        add(lambda *_: found.look({}))
    return module


@pytest.mark.parametrize("kind", ["extra state", "override", "pre-hook", "post-hook"])
def test_whoever_looks_sees_values(kind: str) -> None:
    seen = []
    for later in (False, True):
        torch.manual_seed(0)
        module = looking(kind)
        state_dict = saved(module)
        copier = CopyLater(state_dict) if later else Copier()
        load_module(module, state_dict, True, False, copier)
        seen.append(module[1].seen)  # type: ignore[index]
    assert seen[0] == seen[1]
    assert seen[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.ParameterList([torch.zeros(3), torch.zeros(2, dtype=torch.cfloat)]),
        lambda: nn.Sequential(*(looking(kind) for kind in ("override", "pre-hook", "post-hook"))),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_mixed_modules_load_later(make: Any, assign: bool) -> None:
    load_later(make(), assign)


def test_no_more_is_shown_than_is_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Looking(), nn.Linear(2, 2)))
    assert load_later(module).shown == [["1.0._extra_state"]]
    module.register_buffer("odd", torch.tensor(0.0))
    state_dict = {**saved(module), "odd": torch.ones(1)}
    copier = CopyLater(state_dict)
    load_module(module, state_dict, True, False, copier)
    assert copier.shown == [["1.0._extra_state"]]  # a scalar as torch 0.3 saved it is copied


# ------------------------------------------------------------------------- copies of plain tensors


def _conjugate(*shape: int) -> Tensor:
    return torch.conj(torch.randn(shape, dtype=torch.complex64))


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.arange(6.0)


def _overlapping_halves() -> tuple[Tensor, Tensor]:
    memory = torch.arange(9.0)
    return memory[:6], memory[3:]


def _own() -> tuple[Tensor, Tensor]:
    parameter = nn.Parameter(torch.arange(6.0))
    return parameter, parameter.detach()


PAIRS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], bool]] = {
    "small": (lambda: (torch.zeros(6), torch.arange(6.0)), True),
    "large": (lambda: (torch.zeros(99_999), torch.randn(99_999)), True),
    "parameter": (lambda: (nn.Parameter(torch.zeros(6)), torch.arange(6.0)), True),
    "empty": (lambda: (torch.zeros(0), torch.zeros(0)), True),
    "scalar": (lambda: (torch.tensor(1.0), torch.tensor(2.0)), True),
    "transposed": (lambda: (torch.zeros(3, 2).T, torch.arange(6.0).view(2, 3)), True),
    "part": (lambda: (torch.zeros(9)[3:], torch.arange(9.0)[:6]), True),
    "inference": (lambda: (torch.zeros(6), _inference()), True),
    "own": (_own, True),
    "converted": (lambda: (torch.zeros(6).half(), torch.randn(6)), True),
    "to complex": (lambda: (torch.zeros(6).to(torch.complex64), torch.randn(6)), True),
    "float8": (lambda: (torch.zeros(6).to(torch.float8_e5m2),) * 2, True),
    "from complex": (lambda: (torch.zeros(6), torch.randn(6).to(torch.complex64)), False),
    "from float8": (lambda: (torch.zeros(6), torch.zeros(6).to(torch.float8_e5m2)), False),
    "conjugate": (lambda: (torch.zeros(2).to(torch.complex64), _conjugate(2)), False),
    "into inference": (lambda: (_inference(), torch.zeros(6)), False),
    "shapes": (lambda: (torch.zeros(6), torch.zeros(1)), False),
    "expanded": (lambda: (torch.zeros(1).expand(6), torch.zeros(6)), False),
    "overlap": (_overlapping_halves, False),
    "other type, own memory": (lambda: ((t := torch.ones(6)), t.view(torch.int32)), False),
    "sparse": (lambda: (torch.zeros(6), torch.zeros(6).to_sparse()), False),
    "meta": (lambda: (torch.zeros(6), torch.zeros(6, device="meta")), False),
    "quantized": (
        lambda: (torch.zeros(6), torch.quantize_per_tensor(torch.ones(6), 1, 0, torch.qint8)),
        False,
    ),
    "subclass": (lambda: (torch.zeros(6), torch.zeros(6).as_subclass(Labelled)), False),
}


class Labelled(Tensor):
    """Whose code runs when it is copied."""


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("name", PAIRS)
def test_plain_copies_are_torchs(name: str) -> None:
    make, is_plain = PAIRS[name]
    torch.manual_seed(0)
    target, source = make()
    assert copies_plainly(target, source) == is_plain
    if not is_plain:
        return
    torch.manual_seed(0)
    expected, same_source = make()
    with torch.no_grad():
        expected.copy_(same_source)
    pairs = [(target, source)] * 2  # after a pair that is torch's to copy, the next one counts, too
    version = target._version
    Copier().copy(pairs)
    assert target.untyped_storage().tolist() == expected.untyped_storage().tolist()
    assert target._version == version + 2
    assert target.requires_grad == expected.requires_grad


def test_copies_keep_to_their_order() -> None:
    target = torch.zeros(6)
    sources = [torch.full((6,), 1.0), torch.full((6,), 2.0).half(), torch.full((6,), 3.0)]
    for n in range(1, 4):
        Copier().copy([(target, source) for source in sources[:n]])
        assert torch.equal(target, sources[n - 1].float())


def test_a_module_takes_its_own_state_dict_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(3, 3)
    looker = Copier()
    monkeypatch.setattr(looker, "show", lambda _: pytest.fail("torch's code is not needed"))
    versions = [parameter._version for parameter in module.parameters()]
    load_module(module, module.state_dict(), True, False, looker)
    module.load_state_dict(module.state_dict())
    assert [parameter._version for parameter in module.parameters()] == [n + 2 for n in versions]


@pytest.mark.filterwarnings(  # forward_ad uses it
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)
def test_forward_gradients_are_copied() -> None:
    def load(run: Callable[[nn.Module, dict[str, Tensor]], object]) -> Tensor:
        module = nn.Linear(2, 2)
        values = {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}
        with forward_ad.dual_level():
            values["bias"] = forward_ad.make_dual(values["bias"], torch.full((2,), 3.0))
            run(module, values)
            tangent: Tensor | None = forward_ad.unpack_dual(module.bias).tangent
            assert tangent is not None
            return tangent

    ours = load(ptsave.load_state_dict)
    assert torch.equal(ours, load(lambda module, values: module.load_state_dict(values)))
