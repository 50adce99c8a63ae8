"""iter_weights, names of files, and sets of more files than may be open."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from _weights import assert_equal, write_file, write_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from warm_python import run_warm

import ptsave
from ptsave.models import iterating, shards

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

SUFFIXES = (".safetensors", ".bin", ".pt")


def some_tensors() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {f"large.{i}": torch.randn(300, 1000) for i in range(5)}
    tensors |= {f"small.{i}": torch.randn(i) for i in range(5)}
    tensors["half"] = torch.randn(3, 3).half()
    return tensors


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("index", [True, False])
def test_all_tensors_in_the_order_of_the_files(tmp_path: Path, suffix: str, index: bool) -> None:
    tensors = some_tensors()
    paths = write_shards(tmp_path, tensors, 3, suffix, index=index)
    found = list(ptsave.iter_weights(tmp_path))
    assert_equal(dict(found), tensors)
    assert len(found) == len(tensors)
    homes = {name: number for number, path in enumerate(paths) for name in ptsave.open(path)}
    order = [homes[name] for name, _ in found]
    assert order == sorted(order)


def test_names_are_selected_and_changed(tmp_path: Path) -> None:
    tensors = {"a.x": torch.ones(1), "a.y": torch.ones(2), "b": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = ptsave.iter_weights(tmp_path, prefix="a.", rename={"x": "z", "y": None})
    assert [(name, tensor.tolist()) for name, tensor in found] == [("z", [1.0])]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_is_bounded(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterating, "MAX_AHEAD_NBYTES", 4 << 20)
    tensors = {f"{i:02}": torch.full((1 << 18,), float(i)) for i in range(24)}  # of 1 MiB
    write_file(tmp_path / f"pytorch_model{suffix}", tensors)
    alive: list[Any] = []
    peak = 0
    for name, tensor in ptsave.iter_weights(tmp_path):
        assert torch.equal(tensor, tensors[name])
        alive.append(weakref.ref(tensor))
        peak = max(peak, sum(each() is not None for each in alive))
    assert peak <= 2  # the one before is the loop's until the next one is there


def test_a_path_of_bytes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [name for name, _ in ptsave.iter_weights(os.fsencode(tmp_path))] == ["a"]


def test_what_is_kept_stays(tmp_path: Path) -> None:
    tensors = {f"{i:02}": torch.full((1 << 18,), float(i)) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    kept = dict(ptsave.iter_weights(tmp_path))
    assert_equal(kept, tensors)
    kept["00"].zero_()
    assert_equal(dict(ptsave.iter_weights(tmp_path)), tensors)


def test_a_loop_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors")
    for _ in ptsave.iter_weights(tmp_path):
        break
    weights = ptsave.iter_weights(tmp_path)
    next(weights)
    weights.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "names",
    [
        ["consolidated.00.pth"],
        ["consolidated.00.pth", "consolidated.01.pth"],
        ["a.pth", "b.pth"],
        ["model.bin"],
        ["model-00001-of-00002.bin", "model-00002-of-00002.bin"],
    ],
)
def test_other_names_of_files(tmp_path: Path, names: list[str]) -> None:
    tensors = dict(nn.Linear(3, 3).state_dict())
    for name, part in zip(names, (["weight"], ["bias"]), strict=False):
        chosen = part if len(names) > 1 else ["weight", "bias"]
        torch.save({key: tensors[key] for key in chosen}, tmp_path / name)
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    model = nn.Linear(3, 3)
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    assert_equal(dict(ptsave.iter_weights(tmp_path)), tensors)
    assert_equal(ptsave.load(tmp_path), tensors)
    with ptsave.open(tmp_path) as archive:
        assert sorted(map(str, archive)) == ["bias", "weight"]
        assert torch.equal(archive["weight"], tensors["weight"])


@pytest.mark.parametrize("where", ["directory", "file"])
def test_gguf_is_refused_by_name(tmp_path: Path, where: str) -> None:
    path = tmp_path / "model-q4.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    place = tmp_path if where == "directory" else path
    for attempt in (
        lambda: ptsave.load_model(nn.Linear(2, 2), place),
        lambda: next(iter(ptsave.iter_weights(place))),
        lambda: ptsave.open(place),
    ):
        with pytest.raises(ptsave.NotCheckpointError, match=r"GGUF.*gguf package"):
            attempt()


# ----------------------------------------------------------------------------- more files than open

LIMITED = """
import resource, sys
import torch, ptsave
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
folder, n = sys.argv[1], int(sys.argv[2])
model = torch.nn.ParameterDict({f"{i:04}": torch.zeros(5) for i in range(n)})
if sys.argv[3] == "loader":
    for parameter in model.values():
        parameter.weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
assert ptsave.load_model(model, folder) == ([], [], [], {})
assert all(bool((model[f"{i:04}"] == i).all()) for i in range(n))
assert sum(1 for _ in ptsave.iter_weights(folder)) == n
with ptsave.open(folder) as archive:
    assert len(archive) == n
    assert all(bool((archive.get_tensor(name) == int(name)).all()) for name in archive)
    assert all(bool((archive.get_slice(name)[1:3] == int(name)).all()) for name in archive)
    assert len({name: archive[name] for name in archive}) == n
assert len(ptsave.load(folder)) == n
assert ptsave.compare(folder, folder).equal
ptsave.save_model(model, sys.argv[4], max_shard_size=20)
assert sum(1 for _ in ptsave.iter_weights(sys.argv[4])) == n
"""


@pytest.mark.parametrize(
    ("suffix", "n", "loader"),
    [(".safetensors", 150, "loader"), (".safetensors", 150, "none"), (".pt", 100, "none")],
)
def test_more_shards_than_files_may_be_open(
    tmp_path: Path, suffix: str, n: int, loader: str
) -> None:
    for i in range(n):
        write_file(tmp_path / f"{i:04}{suffix}", {f"{i:04}": torch.full((5,), float(i))})
    saved = tmp_path / "saved"
    run_warm(LIMITED, tmp_path, n, loader, saved)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_that_is_replaced_before_it_is_opened_again(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "n_files_to_hold", lambda: 1)
    for i in range(3):
        write_file(tmp_path / f"{i}{suffix}", {str(i): torch.full((5,), float(i))})
    model = nn.ParameterDict({str(i): torch.zeros(5) for i in range(3)})

    def replace_next(parameter: Tensor, tensor: Tensor) -> None:
        write_file(tmp_path / f"new{suffix}", {"2": torch.full((5,), 7.0)})
        (tmp_path / f"new{suffix}").rename(tmp_path / f"2{suffix}")

    model["0"].weight_loader = replace_next
    model["2"].weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
    monkeypatch.setattr(iterating.Bounds, "of", lambda *_: iterating.Bounds(1, 0, 1, 1))
    with pytest.raises(OSError, match="replaced"):
        ptsave.load_model(model, tmp_path)


def test_parts_for_ranks_are_refused(tmp_path: Path) -> None:
    """Both halves of a matrix have its name, and which dimension was divided is nowhere."""
    for number in range(2):
        torch.save({"wq.weight": torch.ones(2, 4)}, tmp_path / f"consolidated.{number:02}.pth")
    with pytest.raises(
        ValueError, match=r"consolidated\.00\.pth.*2 files are the parts.*by its path"
    ):
        list(ptsave.iter_weights(tmp_path))
    with ptsave.open(tmp_path) as parts:  # each by the rank
        assert parts.keys() == ["rank0.wq.weight", "rank1.wq.weight"]
    assert [n for n, _ in ptsave.iter_weights(tmp_path / "consolidated.01.pth")] == ["wq.weight"]
