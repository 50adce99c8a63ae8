"""Checkpoints of DCP by ptsave and by torch, read by both, over changes of mesh and placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import dcp, differences, layouts, state_of
from forked_ranks import ForkedRanks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ptsave
from ptsave.conversion.converting import convert
from ptsave.distributed import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from ptsave.inspection.verification import verify_file
from ptsave.tree.tree import EntryNames

WORLD_SIZES = (1, 2, 4)


def save_all(world_size: int, folder: Path) -> None:
    for number, layout in enumerate(layouts(world_size)):
        state = state_of(layout, world_size, filled=True)
        planner = SavePlanner() if number % 2 else None
        for name, writer in (("ours", StorageWriter), ("stock", dcp.FileSystemWriter)):
            path = folder / f"{world_size}-{layout}-{name}"
            dcp.save(state, storage_writer=writer(path), planner=planner)


def load_all(world_size: int, folder: Path, step: int) -> None:
    wrong: list[str] = []
    paths = sorted(folder.glob("*-ours")) + sorted(folder.glob("*-stock"))
    for number, layout in enumerate(layouts(world_size)):
        expected = state_of(layout, world_size, filled=True)
        for path in paths[number % step :: step]:
            readers: list[Any] = [StorageReader]
            if path.name.endswith("ours"):
                readers.append(dcp.FileSystemReader)
            for reader in readers:
                state = state_of(layout, world_size, filled=False)
                planner = LoadPlanner() if number % 2 else None
                dcp.load(state, storage_reader=reader(path), planner=planner)
                wrong += [
                    f"{path.name} -> {layout} of {world_size} by {reader.__name__}: {each}"
                    for each in differences(state, expected)
                ]
    assert not wrong, wrong[:20]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for world_size in WORLD_SIZES:
        ForkedRanks(folder, lambda _, n=world_size: save_all(n, folder), world_size).join()  # type: ignore[misc]
    return folder


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_meshes_load_checkpoints_of_others(saved: Path, world_size: int) -> None:
    """Every mesh loads some, and every checkpoint is loaded by some."""
    ForkedRanks(saved, lambda _: load_all(world_size, saved, 5), world_size).join()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_mesh_loads_every_checkpoint(saved: Path, world_size: int) -> None:
    ForkedRanks(saved, lambda _: load_all(world_size, saved, 1), world_size).join()


# --------------------------------------------------------------------- tools, against torch's own


def test_tools_make_of_every_mesh_what_torchs_do(saved: Path, tmp_path: Path) -> None:
    """`open`, `convert` and `verify`, of what either writer has written of each mesh."""
    for name in ("stock", "ours"):
        (tmp_path / name).mkdir()
    for path in sorted([*saved.glob("*-ours"), *saved.glob("*-stock")]):
        stock, ours = tmp_path / "stock" / "all.pt", tmp_path / "ours" / "all.pt"
        dcp_to_torch_save(path, stock)
        convert(path, ours, force=True)
        expected = torch.load(stock, weights_only=True)
        assert ours.read_bytes() == stock.read_bytes(), path
        found = verify_file(path)
        assert not found.problems, (path, found.problems)
        assert found.has_checksums
        with ptsave.open(path) as archive:
            assert [*archive] == [*ptsave.open(stock)]
            for key, info in zip(archive, archive.infos(), strict=True):
                whole = archive.get_tensor(key)
                assert not differences(whole, entry(expected, key)), (path, key)
                assert sum(chunk.nbytes for chunk in info.chunks) >= info.nbytes
                index = tuple(slice(n // 3, n - n // 4, 1 + n % 2) for n in whole.shape)
                part = whole[index]
                part = torch.empty(part.shape, dtype=part.dtype).copy_(part)
                assert not differences(archive.get_slice(key)[index], part)


def entry(values: Any, name: Any) -> Any:
    return EntryNames(values, "").find(name)
