"""load_model: renamed, packed and assigned tensors, shapes and dtypes; against load_state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _weights import Engine, assert_equal, engine_checkpoint, packed, tied_model, write_file
from safetensors.torch import save_file
from torch import Tensor, nn

import ptsave

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

SUFFIXES = (".safetensors", ".pt")
QKV = {".q_proj": (".qkv", 0), ".k_proj": (".qkv", 1), ".v_proj": (".qkv", 2)}


class Attention(nn.Module):
    """Plain layers in one: eight heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 24)
        self.out = nn.Linear(16, 16)


def attention_checkpoint() -> dict[str, Tensor]:
    rows = {"q_proj": 16, "k_proj": 4, "v_proj": 4, "out": 16}
    tensors = {}
    for name, n in rows.items():
        tensors[f"layers.0.{name}.weight"] = torch.randn(n, 16)
        tensors[f"layers.0.{name}.bias"] = torch.randn(n)
    return tensors


def fused(tensors: dict[str, Tensor], name: str) -> Tensor:
    return torch.cat([tensors[f"layers.0.{part}_proj.{name}"] for part in "qkv"])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention()])


# ------------------------------------------------------------------------------------------ packing


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("mapping", [QKV, {"qkv": ["q_proj", "k_proj", "v_proj"]}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_plain_linear_follow_each_other(
    tmp_path: Path, suffix: str, mapping: Any, dtype: torch.dtype
) -> None:
    tensors = attention_checkpoint()
    write_file(tmp_path / f"model{suffix}", tensors)
    model = Layers().to(dtype)
    report = ptsave.load_model(model, tmp_path, packed_modules_mapping=mapping)
    assert report == ([], [], [], {})
    for name in ("weight", "bias"):
        expected = fused(tensors, name).to(dtype)
        assert torch.equal(getattr(model.layers[0].qkv, name), expected)


def test_parts_may_follow_each_other_in_any_dimension(tmp_path: Path) -> None:
    tensors = {"q.weight": torch.randn(6, 4), "k.weight": torch.randn(6, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Module()
    model.qk = nn.Linear(6, 6, bias=False)
    ptsave.load_model(model, tmp_path, packed_modules_mapping={"qk": ["q", "k"]})
    assert torch.equal(model.qk.weight, torch.cat([*tensors.values()], dim=1))


def test_a_part_that_is_not_there_is_an_error_in_any_case(tmp_path: Path) -> None:
    tensors = attention_checkpoint()
    del tensors["layers.0.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="weight_loader"):
            ptsave.load_model(Layers(), tmp_path, packed_modules_mapping=QKV, strict=strict)


class Experts(nn.Module):
    """Weights of experts in one parameter, which their loader puts in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 6, 4))
        self.w13_weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Tensor, tensor: Tensor, shard_id: tuple[str, int]) -> None:
        name, expert = shard_id
        begin = {"w1": 0, "w3": 3}[name]
        parameter[expert, begin : begin + 3].copy_(tensor)


class FusedExperts(Experts):
    """The same, whose loader has the arguments of vLLM's."""

    def load(  # type: ignore[override]  # noqa: PLR0917 - vLLM's signature
        self,
        parameter: Tensor,
        tensor: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        assert weight_name == "moe.experts.w13_weight"
        super().load(parameter, tensor, (shard_id, expert_id))
        return return_success


@pytest.mark.parametrize("experts", [Experts, FusedExperts])
@pytest.mark.parametrize("form", ["mapping", "list"])
def test_experts_have_tuples_as_shard_ids(
    tmp_path: Path, form: str, experts: type[Experts]
) -> None:
    tensors = {
        f"moe.experts.{i}.{name}.weight": torch.randn(3, 4)
        for i in range(2)
        for name in ("w1", "w3")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = nn.Module()
    model.moe = nn.Module()
    model.moe.experts = experts()
    lines = [(f"experts.{i}.{name}.", name, i) for i in range(2) for name in ("w1", "w3")]
    mapping: Any = {old: ("experts.w13_", (name, i)) for old, name, i in lines}
    if form == "list":
        mapping = [("experts.w13_", old, i, name) for old, name, i in lines]
    ptsave.load_model(model, tmp_path, packed_modules_mapping=mapping)
    expected = [
        torch.cat([tensors[f"moe.experts.{i}.{name}.weight"] for name in ("w1", "w3")])
        for i in range(2)
    ]
    assert torch.equal(model.moe.experts.w13_weight, torch.stack(expected))


def test_a_tensor_for_two_parameters(tmp_path: Path) -> None:
    embedding = torch.randn(5, 3)
    save_file({"embed.weight": embedding}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    mapping = {"embed": [("tokens", None), ("head", None)]}
    ptsave.load_model(model, tmp_path, packed_modules_mapping=mapping)
    assert_equal(model.state_dict(), {"tokens.weight": embedding, "head.weight": embedding})


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "rename",
    [
        {"encoder.h": "layers", "gamma": "weight", "beta": "bias", "head": None},
        {"encoder.h.0.gamma": "layers.0.weight", "encoder.h.0.beta": "layers.0.bias", "head": None},
        lambda name: None if name == "head" else f"layers.0.{'bwe'['beta' in name :: 2]}",
    ],
)
def test_names_may_be_changed(tmp_path: Path, suffix: str, rename: Any) -> None:
    if callable(rename):

        def rename(name: str) -> str | None:
            if name == "head":
                return None
            return "layers.0.bias" if name.endswith("beta") else "layers.0.weight"

    tensors = {
        "encoder.h.0.gamma": torch.randn(3),
        "encoder.h.0.beta": torch.randn(3),
        "head": torch.randn(9),
    }
    write_file(tmp_path / f"model{suffix}", tensors)
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.LayerNorm(3)])
    assert ptsave.load_model(model, tmp_path, rename=rename) == ([], [], [], {})
    assert torch.equal(model.layers[0].weight, tensors["encoder.h.0.gamma"])
    assert torch.equal(model.layers[0].bias, tensors["encoder.h.0.beta"])


def test_a_prefix_selects_a_part_of_a_model(tmp_path: Path) -> None:
    vision, text = nn.Linear(3, 2), nn.Linear(4, 2)
    whole = nn.ModuleDict({"vision": vision, "text": text})
    ptsave.save_model(whole, tmp_path)
    model = nn.Linear(3, 2)
    assert ptsave.load_model(model, tmp_path, prefix="vision.") == ([], [], [], {})
    assert_equal(model.state_dict(), vision.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        ptsave.load_model(model, tmp_path, prefix="nothing.")


def test_renamed_tensors_are_packed(tmp_path: Path) -> None:
    tensors = engine_checkpoint(1)
    save_file({f"model.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    model = Engine(1)
    ptsave.load_model(model, tmp_path, prefix="model.")
    assert_equal(model.state_dict(), packed(tensors))


# ------------------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("ours", "theirs"), [((), (1,)), ((1,), ())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_element_has_two_shapes(
    tmp_path: Path, suffix: str, ours: Any, theirs: Any, dtype: torch.dtype
) -> None:
    value = torch.full(theirs, 2.5, dtype=dtype)
    write_file(tmp_path / f"model{suffix}", {"scale": value})
    model = nn.ParameterDict({"scale": nn.Parameter(torch.zeros(ours))})
    ptsave.load_model(model, tmp_path)
    assert model["scale"].shape == torch.Size(ours)
    assert model["scale"].item() == 2.5
    write_file(tmp_path / f"model{suffix}", {"scale": value.expand(2).clone()})
    with pytest.raises(RuntimeError, match="size mismatch"):
        ptsave.load_model(model, tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_sizes_may_be_left_out(tmp_path: Path, suffix: str) -> None:
    pretrained = nn.Linear(3, 10)
    write_file(tmp_path / f"model{suffix}", pretrained.state_dict())
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    report = ptsave.load_model(model, tmp_path, ignore_mismatched_sizes=True)
    assert sorted(report.mismatched_keys) == [
        ("bias", torch.Size([10]), torch.Size([2])),
        ("weight", torch.Size([10, 3]), torch.Size([2, 3])),
    ]
    assert "mismatched_keys" in repr(report)
    assert torch.equal(model.weight, before)
    assert report == ([], [], [], {})


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("on_meta", [True, False])
def test_assigned_tensors_are_those_of_load_state_dict(
    tmp_path: Path, suffix: str, device: Any, on_meta: bool
) -> None:
    tensors = {"weight": torch.randn(3, 2).bfloat16(), "bias": torch.randn(3).double()}
    write_file(tmp_path / f"model{suffix}", tensors)
    place = "meta" if on_meta else "cpu"
    ours, theirs = nn.Linear(2, 3, device=place), nn.Linear(2, 3, device=place)
    for model in (ours, theirs):
        model.bias.requires_grad_(False)
    old = ours.weight
    ptsave.load_model(ours, tmp_path, assign=True, device=device)
    theirs.load_state_dict(tensors, assign=True)
    assert_equal(ours.state_dict(), theirs.state_dict())
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert type(mine) is nn.Parameter
        assert mine.requires_grad == parameter.requires_grad
        assert mine.device == parameter.device
    assert ours.weight is not old


def test_assigned_tensors_stay_tied(tmp_path: Path) -> None:
    model: Any = tied_model()
    saved = tied_model().double()
    ptsave.save_model(saved, tmp_path)
    ptsave.load_model(model, tmp_path, assign=True)
    assert model.first.weight is model.second.weight
    assert model.one is model.two
    assert_equal(model.state_dict(), saved.state_dict())


def test_a_load_that_fails_assigns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(200, 200).state_dict(), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    model = nn.Linear(200, 200)
    weight = model.weight
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load_model(model, path, assign=True)
    assert model.weight is weight


def test_integers_for_a_parameter_that_requires_gradients(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="requires gradients"):
        ptsave.load_model(nn.Linear(2, 2, bias=False), tmp_path, assign=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("on_meta", [True, False])
def test_the_dtype_of_a_model(tmp_path: Path, assign: bool, on_meta: bool) -> None:
    saved = nn.BatchNorm1d(3)
    ptsave.save_model(saved, tmp_path)
    model = nn.BatchNorm1d(3, device="meta" if on_meta else None)
    ptsave.load_model(model, tmp_path, dtype=torch.bfloat16, device="cpu", assign=assign)
    expected = saved.to(torch.bfloat16).state_dict()
    assert expected["num_batches_tracked"].dtype == torch.int64
    assert_equal(model.state_dict(), expected)


# ---------------------------------------------------------------------------- default_weight_loader


def test_the_default_loader() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    values = torch.randn(2, 3, dtype=torch.float64)
    ptsave.default_weight_loader(parameter, values)
    assert torch.equal(parameter, values.float())
    scale = nn.Parameter(torch.zeros(1))
    ptsave.default_weight_loader(scale, torch.tensor(2.0))
    assert scale.item() == 2
    with pytest.raises(RuntimeError, match="size mismatch"):
        ptsave.default_weight_loader(parameter, torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prefix": None}, "prefix must be a string, not NoneType"),
        ({"prefix": b"a."}, "prefix must be a string, not bytes"),
        *(({"rename": rename}, "rename") for rename in (3, ["a"], lambda name: 3)),
        ({"rename": {1: "weight"}}, "rename: a name must be a string, not 1"),
        ({"rename": {"weight": 5}}, r"rename\['weight'\] must be a string or None, not 5"),
        ({"strict": "no"}, "strict must be True or False, not 'no'"),
        ({"assign": 1}, "assign must be True or False, not 1"),
        ({"dtype": torch.int32}, "int32"),
        ({"dtype": "bfloat16"}, "dtype must be a floating-point dtype of torch, not 'bfloat16'"),
    ],
)
def test_arguments_of_other_types(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    model = nn.Linear(2, 2)
    save_file(dict(nn.Linear(2, 2).state_dict()), tmp_path / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TypeError, match=reason):
        ptsave.load_model(model, tmp_path, **options)
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize("model", [{}, None, nn.Linear, nn.Linear(2, 2).state_dict()])
def test_what_is_no_model(tmp_path: Path, model: Any) -> None:
    save_file(dict(nn.Linear(2, 2).state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="expected a module to fill, not"):
        ptsave.load_model(model, tmp_path)
