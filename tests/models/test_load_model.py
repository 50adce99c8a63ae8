"""load_model: every layout, what does not fit, bad files; results against load_state_dict."""

from __future__ import annotations

import io
import json
import os
import struct
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _weights import (
    Engine,
    assert_equal,
    engine_checkpoint,
    packed,
    tied_model,
    write_file,
    write_shards,
)
from safetensors import safe_open
from safetensors.torch import save_file
from stock_comparison import saved_bytes
from torch import Tensor, nn

import ptsave
from ptsave import _C
from ptsave.models import filling, iterating
from ptsave.models import load_model as weights
from ptsave.models.shards import Read
from ptsave.sources.ranges import LocalFile

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

ALL_SUFFIXES = (".safetensors", ".bin", ".pt")
SUFFIXES = ALL_SUFFIXES[:2]  # .pt has the reader of .bin, and another name


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_fills(path: Any, tensors: dict[str, Tensor]) -> None:
    """Fail unless the files at a path fill an `Engine` with these tensors."""
    model = Engine()
    assert ptsave.load_model(model, path) == ([], [], [], {})
    assert_equal(model.state_dict(), packed(tensors))


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("suffix", ALL_SUFFIXES)
@pytest.mark.parametrize("index", [True, False])
def test_a_directory_of_shards(tmp_path: Path, suffix: str, index: bool) -> None:
    tensors = engine_checkpoint()
    write_shards(tmp_path, tensors, 3, suffix, index=index)
    assert_fills(tmp_path, tensors)


@pytest.mark.parametrize("suffix", ALL_SUFFIXES)
def test_one_file(tmp_path: Path, suffix: str) -> None:
    tensors = engine_checkpoint()
    path = tmp_path / f"weights{suffix}"
    write_file(path, tensors)
    assert_fills(str(path), tensors)


def test_the_path_of_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, engine_checkpoint(), 2, ".bin", index=True)
    write_shards(tmp_path, tensors := engine_checkpoint(), 2, ".safetensors", index=True)
    assert_fills(tmp_path / "model.safetensors.index.json", tensors)


def test_safetensors_come_before_other_formats(tmp_path: Path) -> None:
    for suffix in (".pt", ".bin"):
        write_shards(tmp_path, engine_checkpoint(), 2, suffix, index=True)
    tensors = engine_checkpoint()
    write_shards(tmp_path, tensors, 2, ".safetensors", index=False)
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert_fills(tmp_path, tensors)


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    tensors = engine_checkpoint()
    write_shards(tmp_path, tensors, 2, ".safetensors", index=True)
    write_file(tmp_path / "consolidated.safetensors", engine_checkpoint())
    assert_fills(tmp_path, tensors)


def test_the_index_decides_between_two_tensors_of_a_name(tmp_path: Path) -> None:
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    write_file(tmp_path / "a.safetensors", {"weight": a, "bias": a[0].clone()})
    write_file(tmp_path / "b.safetensors", {"weight": b})
    weight_map = {"weight": "b.safetensors", "bias": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = nn.Linear(2, 2)
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), {"weight": b, "bias": a[0].clone()})


def test_an_unsplit_model_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_shards(tmp_path, engine_checkpoint(), 2, ".safetensors", index=True)
    tensors = engine_checkpoint()
    write_file(tmp_path / "model.safetensors", tensors)
    for _ in range(2):
        assert_fills(tmp_path, tensors)
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)


def test_old_files_of_torch(tmp_path: Path) -> None:
    tensors = engine_checkpoint()
    half = len(tensors) // 2
    for number, part in enumerate((list(tensors)[:half], list(tensors)[half:])):
        torch.save(
            {name: tensors[name] for name in part},
            tmp_path / f"{number}.pt",
            _use_new_zipfile_serialization=False,
        )
    assert_fills(tmp_path, tensors)


# --------------------------------------------------------------------------------- the model's side


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_converted_is_as_by_load_state_dict(tmp_path: Path, suffix: str) -> None:
    def model() -> nn.Module:
        made = nn.Module()
        made.narrow = nn.Parameter(torch.zeros(300, 70, dtype=torch.bfloat16))
        made.transposed = nn.Parameter(torch.zeros(70, 30).t())
        made.register_buffer("integers", torch.zeros(5, dtype=torch.int32))
        made.register_buffer("scalar", torch.zeros(()))
        made.register_buffer("empty", torch.zeros(0, 3))
        made.register_buffer("expanded", torch.zeros(4, 6)[:, ::2])
        return made

    tensors = {
        "narrow": torch.randn(300, 70),
        "transposed": torch.randn(30, 70),
        "integers": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "expanded": torch.randn(4, 3, dtype=torch.float64),
    }
    write_file(tmp_path / f"model{suffix}", tensors)
    ours, theirs = model(), model()
    ptsave.load_model(ours, tmp_path / f"model{suffix}")
    theirs.load_state_dict(tensors)
    assert_equal(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_staged_in_pieces(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_PIECE_NBYTES", 1000)
    monkeypatch.setattr(iterating, "MAX_AHEAD_NBYTES", 5000)
    tensors = engine_checkpoint(width=32)
    write_shards(tmp_path, tensors, 2, suffix, index=True)
    model = Engine(width=32).to(torch.float64)
    ptsave.load_model(model, tmp_path)
    expected = {name: tensor.double() for name, tensor in packed(tensors).items()}
    assert_equal(model.state_dict(), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "complex64", "bool", "uint16"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    tensor = torch.randn(7, 3).to(getattr(torch, dtype))
    model = nn.Module()
    model.register_buffer("tensor", torch.zeros_like(tensor))
    save_file({"tensor": tensor}, tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    assert torch.equal(model.tensor.view(torch.uint8), tensor.view(torch.uint8))  # type: ignore[operator]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("present", [("first",), ("second",), ("first", "second")])
def test_tied_weights_need_one_name(tmp_path: Path, suffix: str, present: tuple[str]) -> None:
    tensors = {f"{name}.weight": torch.randn(4, 4) for name in present}
    tensors["two"] = torch.randn(3)
    write_file(tmp_path / f"model{suffix}", tensors)
    model = tied_model()
    ptsave.load_model(model, tmp_path / f"model{suffix}")
    assert model.first.weight is model.second.weight  # type: ignore[union-attr]
    expected = tied_model()
    expected.load_state_dict(tensors, strict=False)
    assert_equal(model.state_dict(), expected.state_dict())


def test_parameters_that_overlap_are_filled_one_after_the_other(tmp_path: Path) -> None:
    memory = torch.zeros(6)
    model = nn.Module()
    for name, (begin, end) in {"a": (0, 4), "b": (2, 6), "c": (4, 6)}.items():
        model.register_buffer(name, memory[begin:end])
    tensors = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    assert torch.equal(memory, torch.ones(6))


def test_buffers_outside_of_the_state_dict_may_be_missing_and_may_be_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("rotary", torch.zeros(3), persistent=False)
    tensors = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}
    for extra in ({}, {"rotary": torch.ones(3)}):
        save_file({**tensors, **extra}, tmp_path / "model.safetensors")
        assert not any(ptsave.load_model(model, tmp_path))
        assert_equal(model.state_dict(), tensors)
    assert torch.equal(model.rotary, torch.ones(3))  # type: ignore[arg-type]


def test_autograd_sees_that_a_parameter_has_changed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file(dict(nn.Linear(2, 2).state_dict()), tmp_path / "model.safetensors")
    loss = (model(torch.ones(2)) * model.weight).sum()
    ptsave.load_model(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_model_on_the_meta_device(tmp_path: Path, suffix: str) -> None:
    tensors = engine_checkpoint()
    write_shards(tmp_path, tensors, 2, suffix, index=True)
    with torch.device("meta"):
        model = Engine()
        model.head = nn.Linear(8, 10, bias=False)
    model.head.weight = model.embed.weight
    model.embed.weight.note = "kept"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="meta device"):
        ptsave.load_model(model, tmp_path)
    ptsave.load_model(model, tmp_path, device="cpu")
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.note == "kept"  # type: ignore[attr-defined]
    assert_equal(model.state_dict(), {**packed(tensors), "head.weight": tensors["embed.weight"]})
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_meta_tensors_that_get_no_values_are_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
        model.register_buffer("rotary", torch.zeros(3), persistent=False)
    with pytest.warns(ptsave.CheckpointWarning, match="no values for rotary"):
        ptsave.load_model(model, tmp_path, device="cpu")
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_an_unknown_device_changes_nothing(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 2, bias=False)
    before = values_of(model)
    with pytest.raises(RuntimeError, match="nonsense"):
        ptsave.load_model(model, tmp_path, device="nonsense")
    assert_equal(model.state_dict(), before)


# ----------------------------------------------------------------------------------- weight_loader


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_weight_loaders_are_called_in_the_order_of_the_files(tmp_path: Path, suffix: str) -> None:
    tensors = {
        "q_proj.weight": torch.randn(8, 8),
        "k_proj.weight": torch.randn(8, 8),
        "v_proj.weight": torch.randn(8, 8),
    }
    for number, name in enumerate(("v_proj", "q_proj", "k_proj")):
        write_file(tmp_path / f"{number}{suffix}", {f"{name}.weight": tensors[f"{name}.weight"]})
    if suffix == ".bin":
        for number in range(3):
            (tmp_path / f"{number}.bin").rename(tmp_path / f"pytorch_model_{number}.bin")
    module = Engine().blocks[0]
    mapping = Engine.packed_modules_mapping
    ptsave.load_model(module, tmp_path, packed_modules_mapping=mapping, strict=False)
    layer = module.qkv_proj
    assert layer.calls == [("weight", "v"), ("weight", "q"), ("weight", "k")]  # type: ignore[union-attr]
    kept = dict(zip("vqk", layer.kept, strict=True))  # type: ignore[union-attr,arg-type]
    for shard_id, tensor in kept.items():  # they are the loader's own
        assert torch.equal(tensor, tensors[f"{shard_id}_proj.weight"])


def test_a_packed_checkpoint_comes_in_one_call(tmp_path: Path) -> None:
    tensors = packed(engine_checkpoint())
    save_file(tensors, tmp_path / "model.safetensors")
    model = Engine()
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert model.blocks[0].qkv_proj.calls == [("weight", None)]  # type: ignore[union-attr]


def test_the_list_form_passes_positions(tmp_path: Path) -> None:
    tensors = engine_checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    model = Engine()
    for block in model.blocks:
        block.qkv_proj.rows = {0: 0, 1: 8, 2: 16}  # type: ignore[union-attr]
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    ptsave.load_model(model, tmp_path, packed_modules_mapping=mapping)
    assert_equal(model.state_dict(), packed(tensors))


def test_a_loader_gets_the_parameter_and_what_the_file_has(tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor, bool]] = []
    model = nn.Linear(2, 2, bias=False)

    def load(parameter: Tensor, tensor: Tensor) -> None:
        seen.append((parameter, tensor, torch.is_grad_enabled()))
        parameter.copy_(tensor[:2])

    model.weight.weight_loader = load  # type: ignore[attr-defined]
    tensor = torch.randn(5, 2, dtype=torch.float64)  # of a shape that only the loader knows about
    save_file({"weight": tensor}, tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    ((parameter, got, grad_enabled),) = seen
    assert parameter is model.weight
    assert got.dtype == torch.float64
    assert torch.equal(got, tensor)
    assert not grad_enabled
    assert torch.equal(model.weight, tensor[:2].float())


def test_an_error_of_a_loader_says_where_it_was(tmp_path: Path) -> None:
    def fail(parameter: Tensor, tensor: Tensor) -> None:
        raise KeyError("from the loader")

    model = nn.Linear(2, 2, bias=False)
    model.weight.weight_loader = fail  # type: ignore[attr-defined]
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ptsave.CheckpointWarning)  # instead of notes, before 3.11
        with pytest.raises(KeyError, match="from the loader") as caught:
            ptsave.load_model(model, tmp_path)
    notes = getattr(caught.value, "__notes__", ["weight model.safetensors"])
    assert "weight" in notes[0]
    assert "model.safetensors" in notes[0]


def test_memory_that_is_read_ahead_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterating, "MAX_AHEAD_NBYTES", 8 * 4000)
    alive: set[int] = set()
    peak = 0
    make = filling.Filling._stage_all

    def stage_all(self: filling.Filling, memory: Any, pieces: Any) -> list[Read | None]:
        nonlocal peak
        staged = make(self, memory, pieces)
        for read in staged:
            assert read is not None
            alive.add(id(read.target))
            weakref.finalize(read.target, alive.discard, id(read.target))
        peak = max(peak, len(alive))
        return staged

    monkeypatch.setattr(filling.Filling, "_stage_all", stage_all)
    model = nn.ParameterList(nn.Parameter(torch.zeros(1000)) for _ in range(40))
    for parameter in model:
        parameter.weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
    tensors = {str(number): torch.full((1000,), float(number)) for number in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert 1 < peak <= 9  # of 4000 bytes, and one that is being delivered


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read as if none of them was in the page cache."""
    monkeypatch.setattr(LocalFile, "map_cached", lambda *_: None)


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("keep", ["tensor", "view", "storage", "array", "detached"])
def test_what_a_loader_keeps_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    monkeypatch.setattr(iterating, "MAX_AHEAD_NBYTES", 4 << 20)  # two tensors
    keepers: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda tensor: tensor,
        "view": lambda tensor: tensor[5:],
        "storage": lambda tensor: tensor.untyped_storage(),
        "array": lambda tensor: tensor.numpy(),
        "detached": lambda tensor: tensor.detach(),
    }
    kept: list[Any] = []
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 18)) for _ in range(12))

    def load(parameter: Tensor, tensor: Tensor) -> None:
        parameter.copy_(tensor)
        kept.append(keepers[keep](tensor))

    for parameter in model:
        parameter.weight_loader = load
    tensors = {str(number): torch.full((1 << 18,), float(number)) for number in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert len(kept) == 12
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for number, value in zip(file.keys(), kept, strict=True):
            flat = torch.empty(0).set_(value) if keep == "storage" else torch.as_tensor(value)
            assert flat[-1] == float(number)
            assert flat[0] == float(number)


@pytest.mark.usefixtures("nothing_cached")
def test_memory_that_no_loader_keeps_is_used_again(tmp_path: Path) -> None:
    places: set[int] = set()
    model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 18)) for _ in range(200))
    for parameter in model:
        parameter.weight_loader = lambda parameter, tensor: places.add(tensor.data_ptr())
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    ptsave.load_model(model, tmp_path)
    assert len(places) <= 140  # 1 MiB each, of 128 MiB


# ----------------------------------------------------------------------------------- lazy buffers


class Remembering(nn.Module):
    """A module with lazy buffers: None, of another shape, of the same shape."""

    first: Tensor | None
    second: Tensor | None
    third: Tensor | None

    def __init__(self, **sizes: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        for name in ("first", "second", "third"):
            n = sizes.get(name)
            self.register_buffer(name, None if n is None else torch.full((n,), float(n)))
            ptsave.register_lazy_buffer(self, name)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "sizes", [{}, {"first": 2, "second": 5, "third": 7}, {"first": 5, "third": 1}], ids=str
)
@pytest.mark.parametrize("shared", [False, True])
def test_lazy_buffers_are_as_after_load_state_dict(
    tmp_path: Path, suffix: str, sizes: dict[str, int], shared: bool
) -> None:
    saved, expected, model = (
        Remembering(first=5, second=3),
        Remembering(**sizes),
        Remembering(**sizes),
    )
    modules = [nn.Sequential(each, each) if shared else each for each in (saved, expected, model)]
    state = {name: tensor.clone() for name, tensor in modules[0].state_dict().items()}
    write_file(tmp_path / f"model{suffix}", state)
    kept = model.first
    modules[1].load_state_dict(modules[0].state_dict())
    assert ptsave.load_model(modules[2], tmp_path / f"model{suffix}") == ([], [], [], {})
    assert_equal(model.state_dict(), expected.state_dict())
    assert model.third is None
    assert (model.first is kept) == (sizes.get("first") == 5)
    assert model.first is not None
    assert not model.first.is_meta


def test_lazy_buffers_stay_where_loading_fails(tmp_path: Path) -> None:
    model = Remembering(first=2, third=1)
    buffers = dict(model.named_buffers())
    path = tmp_path / "model.pt"
    torch.save({**Remembering(first=5).state_dict(), "linear.bias": torch.ones(4)}, path)
    check_refused(model, path, "size mismatch")
    data = saved_bytes(torch.save, Remembering(first=500).state_dict())
    at = data.index(np.full(500, 500, "f4").tobytes())
    path.write_bytes(data[: at + 9] + b"?" + data[at + 10 :])
    with pytest.raises(ptsave.CorruptCheckpointError, match="first"):
        ptsave.load_model(model, path)
    assert all(getattr(model, name) is buffer for name, buffer in buffers.items())
    assert values_of(model)["first"].tolist() == [2, 2]


def test_lazy_buffers_of_a_model_on_the_meta_device(tmp_path: Path) -> None:
    saved = Remembering(first=5, second=3)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = Remembering(first=2, third=1)
    ptsave.load_model(model, tmp_path / "model.pt", device="cpu")
    assert_equal(model.state_dict(), saved.state_dict())


# ------------------------------------------------------------------------------- what does not fit


def check_refused(model: nn.Module, path: Path, *words: str, error: Any = RuntimeError) -> None:
    """Fail unless loading raises, with these words, and changes nothing."""
    before = values_of(model)
    with pytest.raises(error) as caught:
        ptsave.load_model(model, path)
    for word in words:
        assert word in str(caught.value)
    assert_equal(model.state_dict(), before)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_and_unexpected_names(tmp_path: Path, suffix: str) -> None:
    tensors = engine_checkpoint()
    del tensors["blocks.0.norm.bias"]
    tensors["blocks.9.norm.bias"] = torch.zeros(1)
    write_shards(tmp_path, tensors, 2, suffix, index=True)
    model = Engine()
    check_refused(
        model,
        tmp_path,
        'Missing key(s) in state_dict: "blocks.0.norm.bias"',
        'Unexpected key(s) in state_dict: "blocks.9.norm.bias"',
    )
    kept = model.blocks[0].norm.bias.clone()  # type: ignore[union-attr,operator]
    report = ptsave.load_model(model, tmp_path, strict=False)
    assert report.missing_keys == ["blocks.0.norm.bias"]
    assert report.unexpected_keys == ["blocks.9.norm.bias"]
    del tensors["blocks.9.norm.bias"]
    assert_equal(model.state_dict(), {**packed(tensors), "blocks.0.norm.bias": kept})


def test_missing_names_are_those_of_load_state_dict(tmp_path: Path) -> None:
    model = tied_model()
    tensors = {"first.weight": torch.zeros(4, 4), "unknown": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    report = ptsave.load_model(model, tmp_path, strict=False)
    assert report.missing_keys == ["one", "two"]
    assert report.unexpected_keys == ["unknown"]


def test_a_packed_parameter_that_is_not_filled(tmp_path: Path) -> None:
    tensors = engine_checkpoint()
    del tensors["blocks.1.v_proj.weight"]
    write_shards(tmp_path, tensors, 2, ".safetensors", index=True)
    check_refused(Engine(), tmp_path, "blocks.1.qkv_proj.weight", "'v'")
    report = ptsave.load_model(Engine(), tmp_path, strict=False)
    assert report == ([], [], [], {"blocks.1.qkv_proj.weight": ["v"]})


def test_a_packed_parameter_that_gets_nothing_is_missing(tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in engine_checkpoint().items()
        if "blocks.1" not in name or "o_proj" in name or "norm" in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    report = ptsave.load_model(Engine(), tmp_path, strict=False)
    assert report == (["blocks.1.qkv_proj.weight"], [], [], {})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_tensor_that_is_in_two_files(tmp_path: Path, suffix: str) -> None:
    tensors = engine_checkpoint()
    write_shards(tmp_path, tensors, 2, suffix, index=False)
    again = {"embed.weight": torch.randn(10, 8)}
    stem = "pytorch_model-x" if suffix == ".bin" else "z"
    write_file(tmp_path / f"{stem}{suffix}", again)
    check_refused(Engine(), tmp_path, 'loaded twice: "embed.weight"')
    model = Engine()
    report = ptsave.load_model(model, tmp_path, strict=False)
    assert report == ([], [], ["embed.weight"], {})
    assert_equal(model.state_dict(), packed({**tensors, **again}))  # the later file


def test_a_whole_parameter_and_its_parts(tmp_path: Path) -> None:
    tensors = engine_checkpoint(1)
    tensors["blocks.0.qkv_proj.weight"] = torch.randn(24, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    check_refused(Engine(1), tmp_path, "loaded twice")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_shapes_that_differ_are_errors_in_any_case(tmp_path: Path, suffix: str) -> None:
    tensors = {"weight": torch.zeros(3, 2), "bias": torch.ones(2)}
    path = tmp_path / f"some{suffix}"
    write_file(path, tensors)
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as torchs:
        model.load_state_dict(tensors)
    (words,) = [line.strip() for line in str(torchs.value).split("\n") if "mismatch" in line]
    check_refused(model, path, words, str(path))
    with pytest.raises(RuntimeError, match="size mismatch"):
        ptsave.load_model(model, path, strict=False)


def test_a_packed_parameter_without_a_loader_that_its_parts_do_not_make(tmp_path: Path) -> None:
    tensors = engine_checkpoint(1)
    tensors["blocks.0.k_proj.weight"] = torch.randn(4, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Engine(1)
    del model.blocks[0].qkv_proj.weight.weight_loader  # type: ignore[union-attr]
    check_refused(model, tmp_path, "blocks.0.qkv_proj.weight", "weight_loader", "model.safetensors")


def test_a_parameter_without_a_shape(tmp_path: Path) -> None:
    save_file(dict(nn.Linear(2, 2, bias=False).state_dict()), tmp_path / "model.safetensors")
    model = nn.Module()
    model.weight = nn.UninitializedParameter()
    with pytest.raises(RuntimeError, match="no shape yet"):
        ptsave.load_model(model, tmp_path)


# ---------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_shard_that_the_index_names_and_nobody_has(tmp_path: Path, suffix: str) -> None:
    paths = write_shards(tmp_path, engine_checkpoint(), 3, suffix, index=True)
    paths[1].unlink()
    words = (paths[1].name, "index.json", "blocks.")
    check_refused(Engine(), tmp_path, *words, error=FileNotFoundError)


def test_a_set_without_index_that_is_not_complete(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, engine_checkpoint(), 3, ".safetensors", index=False)
    paths[1].unlink()
    check_refused(Engine(), tmp_path, paths[1].name, error=FileNotFoundError)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("nbytes", [0, 7, -1, -300])
def test_a_shard_that_is_cut_short(tmp_path: Path, suffix: str, nbytes: int) -> None:
    paths = write_shards(tmp_path, engine_checkpoint(), 3, suffix, index=True)
    os.truncate(paths[2], nbytes if nbytes >= 0 else paths[2].stat().st_size + nbytes)
    words = (str(paths[2]), "blocks.")
    check_refused(Engine(), tmp_path, *words, error=ptsave.CorruptCheckpointError)


def test_a_tensor_that_a_shard_has_not_got(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, engine_checkpoint(), 2, ".safetensors", index=True)
    write_file(paths[0], {"embed.weight": torch.zeros(10, 8)})
    words = (str(paths[0]), "blocks.", "index.json")
    check_refused(Engine(), tmp_path, *words, error=ptsave.CorruptCheckpointError)


NO_CHECKPOINTS: dict[str, tuple[bytes, str]] = {
    "html": (b"\n<!DOCTYPE html>\n<html><head><title>404", "HTML page"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied', "XML document"),
    "text": (b"just some text, " * 20, ""),
    "huge header": (struct.pack("<Q", 1 << 62) + bytes(100), ""),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint(tmp_path: Path, suffix: str, kind: str) -> None:
    contents, word = NO_CHECKPOINTS[kind]
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(contents)
    for each in (path, tmp_path):
        check_refused(nn.Linear(2, 2), each, path.name, word, error=ptsave.CorruptCheckpointError)


@pytest.mark.parametrize(
    "contents",
    [
        "[]",
        "{}",
        "not JSON",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"weight": 7}}',
        '{"weight_map": {"weight": "../model.safetensors"}}',
        '{"weight_map": {"weight": "/etc/passwd"}}',
        '{"weight_map": {"weight": ""}}',
        '{"weight_map": {"weight": "a\\u0000b"}}',
        "[" * 100_000,
        "version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_hostile_indices(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(contents)
    check_refused(nn.Linear(2, 2), tmp_path, path.name, error=ptsave.CorruptCheckpointError)


def test_several_models_in_a_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    check_refused(nn.Linear(2, 2), tmp_path, "several models", error=ValueError)


def test_there_is_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    check_refused(model, tmp_path, str(tmp_path), error=FileNotFoundError)
    check_refused(model, tmp_path / "model.pt", "model.pt", error=FileNotFoundError)
    (tmp_path / "model.safetensors").mkdir()
    check_refused(model, tmp_path, "model.safetensors", error=IsADirectoryError)


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    check_refused(nn.Linear(2, 2), tmp_path, "this is a pipe", "model.safetensors", error=OSError)


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    check_refused(nn.Linear(2, 2), tmp_path, "model.safetensors", error=FileNotFoundError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").chmod(0)
    check_refused(nn.Linear(2, 2), tmp_path, "model.safetensors", error=PermissionError)


@pytest.mark.parametrize(
    "obj",
    [
        [torch.ones(2)],
        {"weight": 1},
        {1: torch.ones(2)},
        {"model": {"weight": torch.ones(2)}, "epoch": 3},
        {"weight": torch.ones(2, 2).to_sparse()},
    ],
)
def test_pickles_of_something_else(tmp_path: Path, obj: Any) -> None:
    path = tmp_path / "model.pt"
    torch.save(obj, path)
    check_refused(nn.Linear(2, 2), path, str(path), error=TypeError)


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize("new_format", [True, False])
def test_pickles_that_would_run_code(tmp_path: Path, new_format: bool) -> None:
    path = tmp_path / "model.bin"
    torch.save({"weight": Hostile()}, path, _use_new_zipfile_serialization=new_format)
    error = ptsave.CorruptCheckpointError
    check_refused(nn.Linear(2, 2), path, str(path), "weights_only", error=error)


def test_a_file_that_becomes_shorter_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(nn.Linear(100, 100).state_dict()), path)
    move = weights._move

    def cut(*arguments: Any) -> list[str]:
        os.truncate(path, 5000)
        return move(*arguments)

    monkeypatch.setattr(weights, "_move", cut)
    with pytest.raises(ptsave.CorruptCheckpointError, match=path.name):
        ptsave.load_model(nn.Linear(100, 100), path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_progress(
    tmp_path: Path,
    suffix: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that stays
    write_shards(tmp_path, engine_checkpoint(), 2, suffix, index=True)
    ptsave.load_model(Engine(), tmp_path, progress=True)
    assert "loading: 100%" in capfd.readouterr().err


def test_dtypes_that_convert_alike_everywhere() -> None:
    """All pairs but those that make integers of numbers with fractions."""
    fractions = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
    integers = (torch.int8, torch.uint64, torch.int64, torch.bool)
    for source in (*fractions, *integers):
        for target in (*fractions, *integers):
            expected = source in integers or target in fractions
            assert _C.convert_alike(source, target) == expected
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        _C.convert_alike("float32", torch.int8)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ file objects


class Stream:
    """A seekable file object that is no BytesIO and no file of the system."""

    def __init__(self, contents: bytes) -> None:
        self._stream = io.BytesIO(contents)

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readinto", "readline", "seek", "tell"):
            return getattr(self._stream, name)
        raise AttributeError(name)


@pytest.mark.parametrize("loads", [True, False])
def test_a_file_object_can_be_loaded_again(loads: bool) -> None:
    model = nn.Linear(2, 2)
    stream = Stream(saved_bytes(torch.save, model.state_dict() if loads else model))
    if loads:
        ptsave.load_model(nn.Linear(2, 2), stream)
    else:  # the advice is to get the module with `ptsave.load`
        with pytest.raises(ptsave.CorruptCheckpointError, match="weights_only=False"):
            ptsave.load_model(nn.Linear(2, 2), stream)
    assert stream.tell() == 0
    loaded = ptsave.load(stream, weights_only=False)
    assert torch.equal((loaded if loads else loaded.state_dict())["weight"], model.weight)


def test_a_missing_checksum_is_a_warning_of_the_caller(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(ptsave.CheckpointWarning, match="without checksums") as caught:
        ptsave.load_model(nn.Linear(2, 2), tmp_path / "model.pt")
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("new_format", [True, False])
def test_conjugated_tensors(new_format: bool) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    stream = io.BytesIO()
    state = {"weight": values.conj()}
    torch.save(state, stream, _use_new_zipfile_serialization=new_format)
    for source in (Stream(stream.getvalue()), io.BytesIO(stream.getvalue())):
        model = nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.complex64)})
        ptsave.load_model(model, source)
        assert torch.equal(model["weight"], values.conj())
        assert torch.equal(dict(ptsave.iter_weights(source))["weight"], values.conj())
