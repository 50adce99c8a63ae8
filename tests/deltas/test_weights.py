"""`Weights` gives the tensors of a version to `load_model`, `iter_weights` and engines' loaders."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from _weights import module_of
from delta_reference import assert_same_bits, changed, random_bits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from ptsave.deltas import Publisher, Weights, apply

pytestmark = pytest.mark.usefixtures("one_torch_thread")
_N = 4
_ROWS = {"q": 32, "k": 16, "v": 16}
_RANKS = 2
State = dict[str, Tensor]


def checkpoints() -> list[State]:
    """Return versions of a layer, as a trainer has it."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"attn.{name}_proj.weight": (rows, 48) for name, rows in _ROWS.items()}
    shapes |= {"attn.o_proj.weight": (48, 32), "norm.weight": (48,), "frozen.weight": (7, 3)}
    found = [{name: random_bits(torch.bfloat16, shape) for name, shape in shapes.items()}]
    for _ in range(1, _N):
        found.append(
            {
                name: tensor if "frozen" in name else changed(tensor, 0.05)
                for name, tensor in found[-1].items()
            }
        )
    return found


class Engine(nn.Module):
    """One rank's part of the layer, with q, k and v packed, as vLLM and SGLang hold it."""

    def __init__(self, rank: int, *, takes_slices: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.packed_modules_mapping = {f"{name}_proj": ("qkv_proj", name) for name in _ROWS}
        self.seen: list[str] = []
        for name, module in module_of(
            self.expected(checkpoints()[0]), requires_grad=False
        ).named_children():
            self.add_module(name, module)
        qkv, columns = (self.get_parameter(f"attn.{name}_proj.weight") for name in ("qkv", "o"))
        qkv.weight_loader = self._load_qkv  # type: ignore[attr-defined]
        loader = functools.partial(self._load_columns)
        loader.takes_slices = takes_slices  # type: ignore[attr-defined]
        columns.weight_loader = loader  # type: ignore[attr-defined]

    def _load_qkv(self, parameter: Tensor, weight: Tensor, shard_id: str) -> None:
        begins = {"q": 0, "k": 16, "v": 24}
        n = _ROWS[shard_id] // _RANKS
        part = weight.narrow(0, self.rank * n, n)
        parameter.data[begins[shard_id] : begins[shard_id] + n].copy_(part)

    def _load_columns(self, parameter: Tensor, weight: Any) -> None:
        n = parameter.shape[1]
        parameter.data.copy_(weight.narrow(1, self.rank * n, n))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.seen.append(name)
            projection = name.split(".")[-2]
            packed, shard_id = self.packed_modules_mapping.get(projection, (projection, None))
            parameter = self.get_parameter(name.replace(projection, packed))
            loader = getattr(parameter, "weight_loader", ptsave.default_weight_loader)
            loader(parameter, tensor, *([shard_id] if shard_id else []))

    def expected(self, state: State) -> State:
        """Return the parameters that stock slices of a checkpoint make."""
        parts = [state[f"attn.{name}_proj.weight"].chunk(_RANKS)[self.rank] for name in _ROWS]
        columns = state["attn.o_proj.weight"].chunk(_RANKS, 1)[self.rank]
        plain = {name: state[name] for name in ("norm.weight", "frozen.weight")}
        return {"attn.qkv_proj.weight": torch.cat(parts), "attn.o_proj.weight": columns, **plain}


def published(folder: Path, **options: Any) -> tuple[list[State], Publisher]:
    weights = checkpoints()
    ptsave.save_model(weights[0], folder / "base", max_shard_size="2KB")
    options = {"max_depth": None, **options}
    publisher = Publisher(folder / "versions", folder / "base", **options)
    for each in weights[1:]:
        publisher.publish(each)
    return weights, publisher


@pytest.mark.parametrize("takes_slices", [False, True])
@pytest.mark.parametrize("rank", range(_RANKS))
def test_packed_and_sharded_parameters(rank: int, takes_slices: bool, tmp_path: Path) -> None:
    weights, _ = published(tmp_path)
    engine = Engine(rank, takes_slices=takes_slices)
    for version in range(1, _N):
        found = Weights(tmp_path / "versions", tmp_path / "base", version)
        assert not any(ptsave.load_model(engine, found))
        assert_same_bits(engine.state_dict(), engine.expected(weights[version]))


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_only_changed_tensors_reach_an_engine(encoding: Any, tmp_path: Path) -> None:
    weights, _ = published(tmp_path, encoding=encoding)
    engine = Engine(1)
    first = Weights(tmp_path / "versions", tmp_path / "base", 1)
    engine.load_weights(ptsave.iter_weights(first))
    assert_same_bits(engine.state_dict(), engine.expected(weights[1]))
    engine.seen.clear()
    newest = Weights(tmp_path / "versions", tmp_path / "base")
    assert newest.version == _N - 1
    engine.load_weights(ptsave.iter_weights(newest.changed_since(first.version)))
    assert sorted(engine.seen) == sorted(weights[0].keys() - {"frozen.weight"})
    assert_same_bits(engine.state_dict(), engine.expected(weights[-1]))
    assert not list(ptsave.iter_weights(newest.changed_since(newest.version)))
    with pytest.raises(ValueError, match="is later than version 1"):
        first.changed_since(2)


@pytest.mark.parametrize("begins_at", range(_N))
def test_a_base_of_any_version(begins_at: int, tmp_path: Path) -> None:
    """A file of torch is a base, too, and the model's dtype may differ."""
    weights, publisher = published(tmp_path)
    torch.save(weights[begins_at], tmp_path / "base.pt")
    found = Weights(tmp_path / "versions", tmp_path / "base.pt")
    assert found.version == publisher.version
    assert_same_bits(dict(ptsave.iter_weights(found)), weights[-1])
    model = module_of(weights[0], requires_grad=False).float()
    ptsave.load_model(model, found)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), weights[-1][name].float().nan_to_num())
    hooked = module_of(weights[0], requires_grad=False)
    seen: list[str] = []
    hooked.get_submodule("norm").register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: seen.append(prefix)
    )
    ptsave.load_model(hooked, found)
    assert seen == ["norm."]
    assert_same_bits(hooked.state_dict(), weights[-1])


def test_versions_beside_the_base(tmp_path: Path) -> None:
    weights = checkpoints()
    save_file(weights[0], tmp_path / "model.safetensors")
    publisher = Publisher(tmp_path, tmp_path)
    for each in weights[1:]:
        publisher.publish(each)
    assert repr(Weights(tmp_path, version=2)).startswith("<Weights: version 2 of ")
    assert_same_bits(dict(ptsave.iter_weights(Weights(tmp_path, version=2))), weights[2])
    assert_same_bits(dict(ptsave.iter_weights(Weights(tmp_path))), weights[-1])
    assert_same_bits(load_file(tmp_path / "model.safetensors"), weights[0])
    # Two processes may apply and read the same files: the checksums show the version.
    apply(tmp_path, tmp_path / "model.safetensors", 2)
    assert_same_bits(dict(ptsave.iter_weights(Weights(tmp_path))), weights[-1])


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_whole_versions(encoding: Any, tmp_path: Path) -> None:
    """They take the place of the base, which may be unknown or missing."""
    weights, _ = published(tmp_path, encoding=encoding, max_depth=1)
    versions = tmp_path / "versions"
    save_file({name: t + 1 for name, t in weights[0].items()}, tmp_path / "other.safetensors")
    for version in (2, 3):
        for base in (None, tmp_path / "base", tmp_path / "other.safetensors"):
            found = Weights(versions, base, version)
            assert_same_bits(dict(ptsave.iter_weights(found)), weights[version])
    changed_names = {name for name, _ in ptsave.iter_weights(Weights(versions).changed_since(1))}
    assert changed_names == weights[0].keys()
    with pytest.raises(FileNotFoundError):
        dict(ptsave.iter_weights(Weights(versions, version=1)))
    save_file({name: t.float() for name, t in weights[0].items()}, tmp_path / "wide.safetensors")
    with pytest.raises(ValueError, match=r"float32 .* in the target, but torch\.bfloat16"):
        dict(ptsave.iter_weights(Weights(versions, tmp_path / "wide.safetensors")))
    newer = {name: changed(tensor, 0.1) for name, tensor in weights[-1].items()}
    Publisher(versions, Weights(versions), encoding=encoding).publish(newer)
    assert_same_bits(dict(ptsave.iter_weights(Weights(versions))), newer)


@pytest.mark.usefixtures("_clean_file_systems")
def test_a_url(tmp_path: Path) -> None:
    weights = checkpoints()
    ptsave.save_model(weights[0], "memory://model")
    publisher = Publisher("memory://model", "memory://model")
    for each in weights[1:]:
        publisher.publish(each)
    assert_same_bits(dict(ptsave.iter_weights(Weights("memory://model"))), weights[-1])
    ptsave.save_model(weights[0], tmp_path / "model")
    found = Weights("memory://model", tmp_path / "model", storage_options={})
    assert_same_bits(dict(ptsave.iter_weights(found)), weights[-1])


def test_a_publisher_goes_on_from_weights(tmp_path: Path) -> None:
    weights, _ = published(tmp_path)
    found = Weights(tmp_path / "versions", tmp_path / "base")
    publisher = Publisher(tmp_path / "versions", found)
    assert publisher.version == _N - 1
    newer = {name: changed(tensor, 0.1) for name, tensor in weights[-1].items()}
    publisher.publish(newer)
    found = Weights(tmp_path / "versions", tmp_path / "base")
    assert_same_bits(dict(ptsave.iter_weights(found)), newer)
    with pytest.raises(ValueError, match=r"pass version=4 .*\(ptsave\.deltas\.Weights\)"):
        Publisher(tmp_path / "versions", Weights(tmp_path / "versions", tmp_path / "base", 2))


def test_refusals(tmp_path: Path) -> None:
    weights, _ = published(tmp_path)
    versions = tmp_path / "versions"
    other = {name: changed(tensor, 0.5) for name, tensor in weights[0].items()}
    save_file(other, tmp_path / "other.safetensors")
    match = r"would not get the checksum of version 3 in .*: the base .*other\.safetensors has none"
    with pytest.raises(ptsave.WrongBaseError, match=match):
        dict(ptsave.iter_weights(Weights(versions, tmp_path / "other.safetensors")))
    with pytest.raises(ptsave.UnsupportedUrlError, match="this URL cannot be read"):
        Weights("https://host/versions")
    narrow = {name: tensor.flatten()[:1] for name, tensor in weights[0].items()}
    with pytest.raises(ptsave.CorruptCheckpointError, match="cannot be used: it expands to"):
        apply(versions, narrow)
    save_file({"norm.weight": weights[0]["norm.weight"]}, tmp_path / "few.safetensors")
    model = module_of(weights[0], requires_grad=False)
    with pytest.raises(ValueError, match=r"the target has no tensor attn\.k_proj\.weight"):
        ptsave.load_model(model, Weights(versions, tmp_path / "few.safetensors"), strict=False)
    with pytest.raises(FileNotFoundError, match="not in their directory: pass base="):
        ptsave.load_model(model, Weights(versions))
    with pytest.raises(FileNotFoundError, match="version 9 is missing"):
        Weights(versions, tmp_path / "base", 9)
    os.mkdir(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there is no version"):
        Weights(tmp_path / "empty", tmp_path / "base")
    with pytest.raises(TypeError, match="storage_options are only for URLs"):
        next(ptsave.iter_weights(Weights(versions, tmp_path / "base"), storage_options={"a": 1}))
    shard = versions / "weight_v000003" / "model-00000-of-00001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-20] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises((ptsave.CorruptCheckpointError, ptsave.WrongBaseError)):
        dict(ptsave.iter_weights(Weights(versions, tmp_path / "base")))


def test_a_version_before_its_index_is_not_there(tmp_path: Path) -> None:
    """At a URL, and in slime's versions, the index comes last; a killed publisher leaves none."""
    weights, _ = published(tmp_path)
    index = tmp_path / "versions" / "weight_v000003" / "model.safetensors.index.json"
    index.rename(tmp_path / "index")
    found = Weights(tmp_path / "versions", tmp_path / "base")
    assert found.version == 2
    assert_same_bits(dict(ptsave.iter_weights(found)), weights[2])
    with pytest.raises(FileNotFoundError, match="version 3 is missing, or its index is"):
        Weights(tmp_path / "versions", tmp_path / "base", 3)


# ------------------------------------------------------------------------- packed, but not sharded


def test_packed_parameters_that_are_whole(tmp_path: Path) -> None:
    """Patches change the parts of a packed parameter in place."""
    weights, _ = published(tmp_path)
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def packed(state: State) -> State:
        parts = [state[f"attn.{name}_proj.weight"] for name in _ROWS]
        others = {
            name: state[name] for name in state if name[:6] not in ("attn.q", "attn.k", "attn.v")
        }
        return {**others, "attn.qkv_proj.weight": torch.cat(parts)}

    model = module_of(packed(weights[0]), requires_grad=False)
    ptsave.load_model(model, tmp_path / "base", packed_modules_mapping=mapping)
    with pytest.raises(ValueError, match=r"no tensor attn\.k_proj.*use ptsave\.deltas\.Weights"):
        apply(tmp_path / "versions", model)
    assert apply(tmp_path / "versions", model, 2, packed_modules_mapping=mapping) == 2
    model.packed_modules_mapping = mapping
    assert apply(tmp_path / "versions", model, base_version=2) == _N - 1
    assert_same_bits(model.state_dict(), packed(weights[-1]))
    qkv = model.get_parameter("attn.qkv_proj.weight")
    qkv.weight_saver = lambda parameter, part: torch.zeros(32, 48)
    with pytest.raises(ValueError, match="weight_saver returns copies"):
        apply(tmp_path / "versions", model, 1)
