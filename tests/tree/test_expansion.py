"""Small files whose tensors would be huge if each were written in full are refused unwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fail, succeed
from safetensors.torch import load_file
from stock_comparison import stock_load
from torch import Tensor, nn

import ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import read_entries, write_entries

N = 1 << 36
MIB = 1 << 20


def bombs() -> dict[str, dict[str, Tensor]]:
    storage = torch.zeros(MIB)
    return {
        "expanded": {"w": torch.zeros(1).expand(N)},
        "expanded twice": {"w": torch.zeros(1, 3).expand(N, 3)},
        "many views": {str(i): storage[i:] for i in range(3000)},
        "windows": {"w": storage.unfold(0, 1 << 19, 1)},
        "beside others": {"ok": torch.ones(3), "w": torch.zeros(1).expand(N)},
    }


@pytest.fixture(params=bombs())
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.save(bombs()[request.param], tmp_path / "bomb.pt")
    return tmp_path / "bomb.pt"


@pytest.fixture(autouse=True)
def _nothing_large_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.streaming import payload_sources

    def write_all(file: Any, data: Any) -> None:
        written[0] += len(data)
        assert written[0] < 64 * MIB, "the temporary file grows"
        original(file, data)

    written = [0]
    original = payload_sources.TemporaryFile.write_all
    monkeypatch.setattr(payload_sources.TemporaryFile, "write_all", write_all)


@pytest.mark.parametrize("target", ["x.safetensors", "shards/", "bin/"])
def test_convert_refuses_before_the_first_byte(bomb: Path, tmp_path: Path, target: str) -> None:
    before = sorted(os.listdir(tmp_path))
    form = ["--format", "pt"] if target == "bin/" else []
    said = fail("convert", bomb, f"{tmp_path}/{target}", *form)
    assert len(said.splitlines()) == 1
    assert "--max-size" in said
    assert str(bomb) in said
    assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(ValueError, match="max_size="):
        convert(bomb, f"{tmp_path}/{target}", format="pt" if form else None)


@pytest.mark.parametrize("output", ["x.safetensors", "x.npy"])
def test_extract_refuses_before_the_first_byte(tmp_path: Path, output: str) -> None:
    torch.save(bombs()["beside others"], tmp_path / "bomb.pt")
    before = sorted(os.listdir(tmp_path))
    said = fail("extract", tmp_path / "bomb.pt", "w", "-o", tmp_path / output)
    assert len(said.splitlines()) == 1
    assert "--max-size" in said
    assert sorted(os.listdir(tmp_path)) == before


def test_what_needs_no_memory_of_its_own_works(bomb: Path, tmp_path: Path) -> None:
    convert(bomb, tmp_path / "new.pt")
    compact(bomb, tmp_path / "compact.pt")
    names = list(stock_load(bomb))[:2]
    write_entries(read_entries(str(bomb), names), str(tmp_path / "part.pt"))
    for name in ("new.pt", "compact.pt", "part.pt"):
        assert (tmp_path / name).stat().st_size < 10 * MIB
    with ptsave.open(bomb) as archive:
        for name in names:
            assert archive.get_tensor(name).untyped_storage().nbytes() <= 4 * MIB
            assert archive.get_slice(name)[1:].untyped_storage().nbytes() <= 4 * MIB


def test_slices_of_files_that_are_loaded_as_a_whole(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(3.0).view(3, 1).expand(3, 1 << 34)}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with ptsave.open(tmp_path / "old.pt") as archive:
        part = archive.get_slice("w")[1:, 5:]
    assert part.shape == (2, (1 << 34) - 5)
    assert part[:, -1].tolist() == [1.0, 2.0]
    assert part.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("target", ["x.safetensors", "shards/"])
def test_what_is_honest_is_not_hindered(tmp_path: Path, target: str) -> None:
    shared = torch.randn(1000)
    tensors = {
        "mask": torch.ones(1, 1, 1024, 1024).expand(4, 2, 1024, 1024),  # 32 MiB of 4
        **{f"tied{i}": shared for i in range(100)},
    }
    torch.save(tensors, tmp_path / "honest.pt")
    convert(tmp_path / "honest.pt", f"{tmp_path}/{target}")
    path = tmp_path / target
    found = load_file(path / "model.safetensors" if path.is_dir() else path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_max_size_is_what_counts(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(2 * MIB)}, tmp_path / "w.pt")
    for size in (8 * MIB - 1, "8MB"):
        with pytest.raises(ValueError, match="8,388,608"):
            convert(tmp_path / "w.pt", tmp_path / "w.safetensors", max_size=size)
    with pytest.raises(ValueError, match="max_size must be a number of bytes"):
        convert(tmp_path / "w.pt", tmp_path / "w.safetensors", max_size="much")
    convert(tmp_path / "w.pt", tmp_path / "w.safetensors", max_size="8MiB")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], torch.ones(2 * MIB))
    output = tmp_path / "w.npy"
    fail("extract", tmp_path / "w.pt", "w", "-o", output, "--max-size", "1MB")
    succeed("extract", tmp_path / "w.pt", "w", "-o", output, "--max-size", "9MB")


def test_ties_count_once_where_they_stay(tmp_path: Path) -> None:
    shared = torch.randn(MIB)
    torch.save({str(i): shared for i in range(3000)}, tmp_path / "tied.pt")  # 12 GiB in full
    convert(tmp_path / "tied.pt", tmp_path / "shards", format="pt")
    assert (tmp_path / "shards" / "pytorch_model.bin").stat().st_size < 6 * MIB
    with pytest.raises(ValueError, match="share memory"):
        convert(tmp_path / "tied.pt", tmp_path / "tied.safetensors")


def test_diff_of_what_is_expanded_in_the_same_way(tmp_path: Path) -> None:
    torch.save(bombs()["beside others"], tmp_path / "bomb.pt")
    assert not compare(str(tmp_path / "bomb.pt"), str(tmp_path / "bomb.pt")).differences


def test_diff_of_what_is_expanded_in_different_ways(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 18, 1).expand(1 << 18, 1 << 18)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(1, 1 << 18).expand(1 << 18, 1 << 18)}, tmp_path / "b.pt")
    said = fail("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert said.startswith("ptsave: w is too large")
    assert "convert --max-size" in said


def test_weight_loaders_get_nothing_that_is_expanded_to_any_size(tmp_path: Path) -> None:
    def model() -> nn.Linear:
        def load(parameter: Tensor, tensor: Tensor) -> None:
            seen.append(tensor.shape)

        module = nn.Linear(2, 2)
        vars(module.weight)["weight_loader"] = load
        return module

    seen: list[torch.Size] = []
    torch.save({"weight": torch.zeros(1).expand(N), "bias": torch.ones(2)}, tmp_path / "bomb.bin")
    module = model()
    bias = module.bias.detach().clone()
    with pytest.raises(RuntimeError, match="is stored in 4"):
        ptsave.load_model(module, tmp_path / "bomb.bin")
    assert not seen
    assert torch.equal(module.bias, bias)
    torch.save({"weight": torch.zeros(1).expand(100), "bias": torch.ones(2)}, tmp_path / "ok.bin")
    ptsave.load_model(model(), tmp_path / "ok.bin")
    assert seen == [torch.Size([100])]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_save_model_looks_for_room_before_it_copies(tmp_path: Path, kind: Any) -> None:
    """Expanding its own tensor is the caller's wish; filling the disk before failing is not."""
    ptsave.save_model(nn.Linear(2, 2), tmp_path, format=kind)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ptsave.SaveError, match="No space left") as caught:
        ptsave.save_model({"w": torch.zeros(1).expand(1 << 50)}, tmp_path, format=kind)
    assert caught.value.filename == str(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", ["convert", "extract"])
def test_the_default_is_in_the_help(command: str) -> None:
    text = succeed(command, "--help").output
    assert "--max-size" in text
    assert "1GiB" in "".join(text.split())
