"""load_model of parts of tensors: slices for tensor parallelism, and DTensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import nbytes_read
from _weights import assert_equal, write_file
from forked_ranks import ForkedRanks
from torch import Tensor, nn

import ptsave
from ptsave.bench.system import make_cold

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

SUFFIXES = (".safetensors", ".pt")
N_RANKS = 4
WIDTH = 1024


def loader_of(dim: int, rank: int) -> Callable[[Tensor, ptsave.WeightSlice], None]:
    """Return a loader as inference engines have them, which takes a rank's part."""

    def load(parameter: Tensor, weight: ptsave.WeightSlice) -> None:
        n = parameter.shape[dim]
        ptsave.default_weight_loader(parameter, weight.narrow(dim, rank * n, n))

    load.takes_slices = True  # type: ignore[attr-defined]
    return load


def parallel_model(rank: int) -> nn.ParameterDict:
    """Return the parameters that a rank has: of columns, of rows, and one that all have."""
    n = WIDTH // N_RANKS
    model = nn.ParameterDict(
        {
            "embed": torch.zeros(4 * n, WIDTH),
            "up": torch.zeros(2 * n, WIDTH),
            "down": torch.zeros(WIDTH, 2 * n),
            "norm": torch.zeros(WIDTH),
        }
    )
    for name, dim in (("embed", 0), ("up", 0), ("down", 1)):
        model[name].weight_loader = loader_of(dim, rank)
    return model


def parallel_checkpoint() -> dict[str, Tensor]:
    return {
        "embed": torch.randn(4 * WIDTH, WIDTH),
        "up": torch.randn(2 * WIDTH, WIDTH),
        "down": torch.randn(WIDTH, 2 * WIDTH),
        "norm": torch.randn(WIDTH),
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("is_cold", [True, False])
def test_a_rank_of_four_reads_a_quarter(tmp_path: Path, suffix: str, is_cold: bool) -> None:
    path = tmp_path / f"model{suffix}"
    tensors = parallel_checkpoint()
    write_file(path, tensors)
    if is_cold:
        make_cold(path, drop_all=False)
    model = parallel_model(0)
    small = tmp_path / f"small{suffix}"
    write_file(small, {"weight": torch.ones(2)})
    parameters = nn.ParameterDict({"weight": torch.ones(1)})
    parameters["weight"].weight_loader = loader_of(0, 0)
    ptsave.load_model(parameters, small)
    before = nbytes_read()  # all modules are imported by now
    ptsave.load_model(model, path)
    nbytes = nbytes_read() - before
    assert nbytes <= 0.27 * path.stat().st_size, nbytes / path.stat().st_size
    n = WIDTH // N_RANKS
    assert torch.equal(model["embed"], tensors["embed"][: 4 * n])
    assert torch.equal(model["up"], tensors["up"][: 2 * n])
    assert torch.equal(model["down"], tensors["down"][:, : 2 * n])
    assert torch.equal(model["norm"], tensors["norm"])


INDICES: list[Any] = [
    ...,
    3,
    -1,
    slice(2, 5),
    (slice(None), slice(1, 4)),
    (slice(None, None, 2), 0),
    (..., slice(1, 3)),
    (slice(None), slice(None), None, slice(2, 4)),
    (0, 1, 2),
    (slice(0, 0), ...),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("order", ["slices first", "slices last"])
def test_slices_are_those_of_the_tensor(tmp_path: Path, suffix: str, order: str) -> None:
    whole = torch.randn(6, 5, 4)
    other = torch.randn(700, 700)
    tensors = {"a": whole, "b": other} if order == "slices first" else {"b": whole, "a": other}
    sliced = "a" if order == "slices first" else "b"
    write_file(tmp_path / f"model{suffix}", tensors)
    seen: list[ptsave.WeightSlice] = []

    def load(parameter: Tensor, weight: ptsave.WeightSlice) -> None:
        seen.append(weight)
        for index in INDICES:
            assert torch.equal(weight[index], whole[index]), index
        assert torch.equal(weight.narrow(-1, 1, 2), whole.narrow(-1, 1, 2))
        assert torch.equal(weight.narrow(1, -2, 2), whole.narrow(1, -2, 2))
        assert (weight.shape, weight.dtype, weight.ndim) == (whole.shape, whole.dtype, 3)
        assert (weight.size(), weight.size(1), weight.dim()) == (whole.shape, 5, 3)
        assert (weight.get_shape(), weight.numel(), len(weight)) == ([6, 5, 4], 120, 6)
        with pytest.raises(TypeError):
            weight[torch.tensor([0])]
        with pytest.raises(IndexError):
            weight.narrow(0, 5, 2)
        parameter.copy_(weight[...])

    load.takes_slices = True  # type: ignore[attr-defined]
    model = nn.ParameterDict({name: torch.zeros_like(each) for name, each in tensors.items()})
    model[sliced].weight_loader = load
    rest = next(name for name in tensors if name != sliced)
    model[rest].weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
    ptsave.load_model(model, tmp_path)
    assert_equal(model.state_dict(), tensors)
    with pytest.raises(ValueError, match="had returned"):
        seen[0][0]


# ------------------------------------------------------------------------------------------ DTensor


def shard_and_load(folder: str) -> None:
    """Load sharded models on one of two ranks, and compare with the whole one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    expected = torch.load(os.path.join(folder, "expected.pt"))
    mesh = init_device_mesh("cpu", (2,))

    def is_whole(model: nn.Module, dtype: torch.dtype) -> None:
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor), name
            assert torch.equal(value.full_tensor(), expected[name].to(dtype)), name

    for suffix in SUFFIXES:
        path = os.path.join(folder, f"model{suffix}")
        for dtype in (torch.float32, torch.float64):
            model: Any = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3)).to(dtype)
            fully_shard(model, mesh=mesh)
            before = nbytes_read()
            assert ptsave.load_model(model, path) == ([], [], [], {})
            if suffix == ".safetensors" and dtype == torch.float64:  # after all imports
                assert nbytes_read() - before < 0.55 * os.path.getsize(path)
            is_whole(model, dtype)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3))
        fully_shard(model, mesh=mesh)
        ptsave.load_model(model, path, device="cpu")
        is_whole(model, torch.float32)
        by_columns: Any = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3))
        for layer in by_columns:
            placements: dict[str, Any] = {"weight": [Shard(1)], "bias": [Replicate()]}
            for name, placement in placements.items():
                tensor = distribute_tensor(torch.zeros_like(getattr(layer, name)), mesh, placement)
                setattr(layer, name, nn.Parameter(tensor))
        ptsave.load_model(by_columns, path)
        is_whole(by_columns, torch.float32)
        fused: Any = nn.Linear(1000, 1001, bias=False)
        fully_shard(fused, mesh=mesh)
        ptsave.load_model(
            fused,
            os.path.join(folder, f"parts{suffix}"),
            packed_modules_mapping={"weight": ["first", "second"]},
        )
        assert torch.equal(fused.weight.full_tensor(), expected["0.weight"])


def test_ranks_read_their_parts_of_distributed_tensors(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3)).state_dict()
    for suffix in SUFFIXES:
        write_file(tmp_path / f"model{suffix}", saved)
        first, second = saved["0.weight"].split([400, 601])
        write_file(tmp_path / f"parts{suffix}", {"first": first.clone(), "second": second.clone()})
    torch.save(dict(saved), tmp_path / "expected.pt")
    ForkedRanks(tmp_path, lambda rank: shard_and_load(str(tmp_path))).join()


def test_slices_are_not_compared(tmp_path: Path) -> None:
    def load(parameter: Tensor, weight: ptsave.WeightSlice) -> None:
        with pytest.raises(TypeError, match="compare"):
            _ = weight == 0
        with pytest.raises(TypeError, match="compare"):
            _ = weight != parameter
        assert {weight: 1}[weight] == 1
        parameter.copy_(weight[...])

    load.takes_slices = True  # type: ignore[attr-defined]
    model = nn.Linear(2, 2, bias=False)
    ptsave.save_model(model, tmp_path)
    model.weight.weight_loader = load  # type: ignore[attr-defined]
    ptsave.load_model(model, tmp_path)
