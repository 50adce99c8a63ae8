"""Whole versions in a chain of patches: publishers write them, and appliers begin with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import delta_reference as reference
import pytest
import torch
from delta_reference import assert_same_bits, bytes_of, changed
from safetensors.torch import save_file
from test_apply import copy_of, in_killed_process, killed, publish_all, read, states
from torch import Tensor, nn

import ptsave
from ptsave.deltas import Publisher, apply, applying
from ptsave.streaming import payload_sources

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # a pool does not outlive a fork


def kinds_in(root: Path) -> str:
    """Return a letter for each version: W for a whole one, p for patches."""
    found = ""
    for folder in sorted(root.iterdir()):
        index = folder / reference.INDEX
        text = index.read_text() if index.exists() else "{}"
        is_patch = "delta_encoding" in json.loads(text).get("metadata", {})
        found += "p" if is_patch else "W"
    return found


def steps(n: int, fraction: float = 0.001) -> list[dict[str, Tensor]]:
    """Return weights and `n` later versions, in which all tensors change."""
    found = [states(1)[0]]
    for _ in range(n):
        found.append({name: changed(tensor, fraction) for name, tensor in found[-1].items()})
    return found


def save_whole(root: Path, number: int, weights: dict[str, Tensor], size: str = "1GB") -> None:
    shutil.rmtree(root / f"weight_v{number:06d}", ignore_errors=True)
    ptsave.save_model(weights, root / f"weight_v{number:06d}", max_shard_size=size)


# ------------------------------------------------------------------------------------ publishers


@pytest.mark.parametrize(
    ("max_depth", "kinds"),
    [(8, "ppppppppWppp"), (2, "ppWppWppWppW"), (0, "W" * 12), (None, "p" * 12)],
)
@pytest.mark.parametrize("restarts", [True, False])
def test_the_depth_is_bounded(
    max_depth: int | None, kinds: str, restarts: bool, tmp_path: Path
) -> None:
    weights = steps(12)
    publisher = Publisher(tmp_path, weights[0], max_depth=max_depth)
    held = {name: bytes_of(tensor).copy() for name, tensor in weights[0].items()}
    for number, new in enumerate(weights[1:], 1):
        publisher.publish(new)
        if restarts:
            publisher = Publisher(tmp_path, new, version=number, max_depth=max_depth)
        reference.pull(tmp_path, number, held)  # as SGLang does
        for name, tensor in new.items():
            assert held[name].tobytes() == bytes_of(tensor).tobytes()
    assert kinds_in(tmp_path) == kinds
    for begin in range(13):
        model = copy_of(weights[begin])
        assert apply(tmp_path, model, base_version=begin) == 12
        assert_same_bits(model, weights[-1])


def test_patches_of_half_of_the_weights_are_enough(tmp_path: Path) -> None:
    weights = steps(3, 0.04)  # a version has a fifth of the bytes of the weights
    publish_all(tmp_path, weights, max_depth=8)
    assert kinds_in(tmp_path) == "ppW"
    dense = changed(weights[-1]["a.weight"], 1)
    Publisher(tmp_path, weights[-1], version=3).publish({**weights[-1], "a.weight": dense})
    assert kinds_in(tmp_path) == "ppWW"


def test_tied_tensors_keep_all_names(tmp_path: Path) -> None:
    old, new = torch.zeros(50), torch.rand(50)
    Publisher(tmp_path, {"a": old, "b": old}, max_depth=0).publish({"a": new, "b": new})
    held = {"a": old.clone(), "b": old.clone()}
    apply(tmp_path, held)
    assert_same_bits(held, {"a": new, "b": new})


def test_a_restart_needs_the_weights_of_a_whole_version(tmp_path: Path) -> None:
    weights = states()
    publish_all(tmp_path, weights, max_depth=0)
    for wrong in (weights[2], {**weights[3], "a.bias": torch.zeros(34)}):
        with pytest.raises(ValueError, match="the base is not version 3"):
            Publisher(tmp_path, wrong, version=3)
    with pytest.raises(ValueError, match="max_depth must be"):
        Publisher(tmp_path, weights[3], version=3, max_depth=-1)


def test_a_dtype_that_whole_versions_cannot_hold(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(3, dtype=torch.complex128)}
    with pytest.raises(TypeError, match="complex128"):
        Publisher(tmp_path, weights)
    Publisher(tmp_path, weights, max_depth=None)


def test_padded_rows_that_only_receivers_have(tmp_path: Path) -> None:
    """A publisher that begins with the receivers' files keeps rows that the trainer never sees."""
    embedding = torch.randn(10, 8)
    served = torch.cat([embedding, torch.randn(6, 8)])
    ptsave.save_model({"embed": served, "head": torch.randn(4)}, tmp_path / "served")
    publisher = Publisher(tmp_path / "root", tmp_path / "served")
    base = ptsave.load(tmp_path / "served")
    new = {"embed": base["embed"].clone(), "head": base["head"] + 1}
    new["embed"][:10] += 1  # the trainer's rows
    publisher.publish(new)
    apply(tmp_path / "root", tmp_path / "served")
    assert_same_bits(read(tmp_path / "served"), new)
    assert torch.equal(read(tmp_path / "served")["embed"][10:], served[10:])


# -------------------------------------------------------------------------------------- appliers


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", ["1GB", "1KB"])
@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_a_whole_version_in_the_middle(
    encoding: str, in_files: bool, size: str, known: bool, tmp_path: Path
) -> None:
    weights, root, served = states(6), tmp_path / "root", tmp_path / "served"
    publish_all(root, weights, encoding=encoding)
    save_whole(root, 3, weights[3], size)
    targets = [*weights[:5], {name: torch.zeros_like(each) for name, each in weights[0].items()}]
    for begin, held in enumerate(targets):
        base = begin if known and begin < 5 else None
        for end in (3, 4, 5):
            if begin > end and begin < 5:
                continue
            if in_files:
                shutil.rmtree(served, ignore_errors=True)
                ptsave.save_model(held, served, max_shard_size="1KB")
                assert apply(root, served, end, base_version=base) == end
                assert_same_bits(ptsave.load(served), weights[end])  # compares CRCs
            else:
                model = copy_of(held)
                assert apply(root, model, end, base_version=base) == end
                assert_same_bits(model, weights[end])


def test_an_equal_target_stays(tmp_path: Path) -> None:
    weights, served = states(2), tmp_path / "served"
    save_whole(tmp_path / "root", 1, weights[1])
    ptsave.save_model(weights[1], served)
    before = (served / "model.safetensors").stat().st_mtime_ns
    model = nn.Linear(2, 2)
    assert apply(tmp_path / "root", served) == 1
    assert (served / "model.safetensors").stat().st_mtime_ns == before
    save_whole(tmp_path / "other", 1, model.state_dict())
    count = model.weight._version
    apply(tmp_path / "other", model)
    assert model.weight._version == count


@pytest.mark.parametrize("size", ["1GB", "1KB"])
def test_an_empty_directory(size: str, tmp_path: Path) -> None:
    weights, root, served = states(5), tmp_path / "root", tmp_path / "served"
    publish_all(root, weights)
    served.mkdir()
    with pytest.raises(FileNotFoundError, match="served"):
        apply(root, served)
    save_whole(root, 2, weights[2], size)
    (served / ".weight_sync" / "state.json").write_text('{"version": "000004"}')  # of lost files
    with pytest.raises(FileNotFoundError, match="served"):
        apply(root, served, 1)
    assert apply(root, served, 3) == 3
    assert_same_bits(ptsave.load(served), weights[3])
    assert apply(root, served) == 4
    assert_same_bits(ptsave.load(served), weights[4])
    with pytest.raises(FileNotFoundError):
        apply(root, tmp_path / "missing")
    assert not (tmp_path / ".weight_sync").exists()


@pytest.mark.usefixtures("_clean_file_systems")
def test_whole_versions_at_a_url(tmp_path: Path) -> None:
    weights = states()
    publisher = Publisher("memory://versions", weights[0], max_depth=1)
    for each in weights[1:]:
        publisher.publish(each)
    (tmp_path / "served").mkdir()
    assert apply("memory://versions", tmp_path / "served") == 3
    assert_same_bits(ptsave.load(tmp_path / "served"), weights[3])
    Publisher("memory://versions", weights[3], version=3, max_depth=1)


write_copy = payload_sources.write_copy


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_kill_while_an_empty_directory_is_filled(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, root, served = states(3), tmp_path / "root", tmp_path / "served"
    save_whole(root, 1, weights[1], "1KB")
    reference.publish(root, 2, weights[1], weights[2])
    served.mkdir()
    calls = 0

    def copy(*args: Any, **options: Any) -> None:
        nonlocal calls
        if calls == place:
            killed()
        calls += 1
        write_copy(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(applying, "write_copy", copy)
        if place == 3:
            patch.setattr(applying, "_apply_to_files", killed)
        in_killed_process(lambda: apply(root, served))
    assert apply(root, served) == 2
    assert_same_bits(ptsave.load(served), weights[2])


def test_whole_versions_that_do_not_fit(tmp_path: Path) -> None:
    weights, root = states(2), tmp_path / "root"
    scale, bias = weights[1]["b.scale"], weights[1]["a.bias"]
    for wrong, match in (
        ({"b.scale": scale[None]}, r"b\.scale is torch.float32 \[\] in the target, but .* \[1\]"),
        ({"a.bias": bias.view(torch.int32)}, r"torch.float32 \[33\] .*, but torch.int32 \[33\] in"),
        ({"more": scale.clone()}, "has no tensor more"),
    ):
        save_whole(root, 1, {**weights[1], **wrong})
        held = copy_of(weights[0])
        with pytest.raises(ValueError, match=match):
            apply(root, held)
        assert_same_bits(held, weights[0])


def test_damaged_whole_versions(tmp_path: Path) -> None:
    weights, root = states(2), tmp_path / "root"
    save_whole(root, 1, weights[1])
    path = root / "weight_v000001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    held = copy_of(weights[0])
    with pytest.raises(ptsave.CorruptCheckpointError, match="the checksum differs"):
        apply(root, held)
    path.write_bytes(data[:-1])
    with pytest.raises(ptsave.CorruptCheckpointError, match="incomplete"):
        apply(root, held)
    path.unlink()
    torch.save(weights[1], root / "weight_v000001" / "model.safetensors")
    with pytest.raises(ptsave.UnsupportedSourceError, match="only safetensors files"):
        apply(root, held)
    path.unlink()
    save_file({"a.bias": weights[1]["a.bias"]}, path.with_name("one.safetensors"))
    index = {"weight_map": {"a.bias": "one.safetensors", "a.weight": "one.safetensors"}}
    path.with_name(reference.INDEX).write_text(json.dumps(index))
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"a\.weight is not in this shard"):
        apply(root, held)
    assert_same_bits(held, weights[0])
