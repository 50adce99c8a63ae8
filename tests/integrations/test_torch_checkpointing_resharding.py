"""torch_checkpointing loads checkpoints of another sharding by ptsave's Resharder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRanks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ptsave
from ptsave.integrations import torch_checkpointing

integration: Any = torch_checkpointing  # whose classes also are the library's

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = ((9, 6), (33, 1025), (700, 513), (3,), (0, 4))
ROWS, COLUMNS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


def gather(self: Any, data: Any, group: Any) -> dict[int, Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, data, group=group)
    return dict(enumerate(found))


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch_checkpointing", reason="pip install torch_checkpointing")
        from torch_checkpointing import default_resharder, metadata_manager, schema

        # It gathers by CUDA, whatever the group is.
        kind: Any = next(
            each
            for each in vars(metadata_manager).values()
            if hasattr(each, "_all_gather_pickled_data")
        )
        kind._all_gather_pickled_data = gather
        integration.Resharder()  # made, before ranks are forked
        return {"module": default_resharder, "ItemSpec": schema.ItemSpec}


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def state(size: int, placement: tuple[Any, ...], *, filled: bool = True) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, Any] = {}
    for shape in SHAPES:
        whole = values(shape) if filled else torch.zeros(shape)
        fits = getattr(placement[0], "dim", 0) < len(shape)
        placed = placement if fits else WHOLE
        name = "x".join(map(str, shape))
        found[name] = distribute_tensor(whole, mesh, placed, src_data_rank=None)
    # Another dtype than was saved, and columns of a larger tensor, are no place for bytes.
    half = found["9x6"].to_local().to(torch.float64 if not filled else torch.float32)
    found["half"] = DTensor.from_local(half, mesh, found["9x6"].placements, run_check=False)
    return found


def manager(library: Any, **options: Any) -> Any:
    from torch_checkpointing import CheckpointManager

    resharder = library["ItemSpec"](resharder=integration.Resharder(**options))
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = integration.StorageConfig(fsync=False)
    config.items = {"model": resharder}
    return CheckpointManager(config)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the library reads by itself")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((4, ROWS), (2, COLUMNS)), ((2, COLUMNS), (4, ROWS)), ((2, ROWS), (1, WHOLE))],
    ids=["columns-of-rows", "rows-of-columns", "whole"],
)
def test_every_rank_gets_its_part(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Any, loaded: Any
) -> None:
    path = tmp_path / "checkpoint"

    def save(rank: int) -> None:
        manager(library).save(str(path), {"model": state(*saved)})

    def load(rank: int) -> None:
        target = state(*loaded, filled=False)
        expected = state(*loaded)
        manager(library).load(str(path), into={"model": target})
        for name, value in expected.items():
            found = target[name].to_local()
            assert torch.equal(found, value.to_local().to(found.dtype)), name

    ForkedRanks(tmp_path, save, saved[0]).join()
    monkeypatch.setattr(
        library["module"].DefaultResharder, "_read_source_slices_with_offset_reads", refuse
    )
    monkeypatch.setattr(
        library["module"].DefaultResharder, "_read_source_slices_with_full_file_read", refuse
    )
    ForkedRanks(tmp_path, load, loaded[0]).join()
    if loaded[1] is not WHOLE:
        return
    (file,) = path.rglob("model_1.pt")  # of which all is wanted now
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    def find_damage(rank: int) -> None:
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"model_1\.pt"):
            load(rank)

    ForkedRanks(tmp_path, find_damage, 1).join()


def test_damage_beside_the_parts_that_are_read(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part has no checksum: it is unverified, unless all of its record is read for it."""
    path = tmp_path / "checkpoint"
    whole = torch.arange(64.0).view(8, 8)

    def state_of(size: int, values: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (size,))
        return {"x": distribute_tensor(values, mesh, ROWS, src_data_rank=None)}

    ForkedRanks(
        tmp_path, lambda rank: manager(library).save(str(path), {"model": state_of(1, whole)}), 1
    ).join()
    (file,) = path.rglob("model_0.pt")
    data = bytearray(file.read_bytes())
    data[data.index(whole.numpy().tobytes()) + 8 * 8 * 4 - 1] ^= 1  # in the last of the rows
    for is_damaged in (False, True):
        if is_damaged:
            file.write_bytes(data)

        def load(rank: int, *, is_damaged: bool = is_damaged) -> None:
            for verify_parts in (False, True):
                target = state_of(2, torch.zeros(8, 8))
                caplog.clear()
                with caplog.at_level("INFO", "ptsave"):
                    reading = manager(library, verify_parts=verify_parts)
                    if verify_parts and is_damaged:
                        with pytest.raises(
                            ptsave.CorruptCheckpointError,
                            match=r"model_0\.pt: the .* at offset 1984 .*",
                        ):
                            reading.load(str(path), into={"model": target})
                        continue
                    reading.load(str(path), into={"model": target})
                assert ("128 bytes, are unverified" in caplog.text) is not verify_parts
                found = target["x"].to_local()
                assert torch.equal(found, whole[4 * rank : 4 * rank + 4]) is (
                    rank == 0 or not is_damaged
                )

        ForkedRanks(tmp_path, load, 2).join()


def test_what_the_library_has_to_read(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of views of other numbers the bytes alone are not the values."""
    path = tmp_path / "checkpoint"
    number = torch.arange(8.0).view(4, 2) * (1 + 2j)

    def tensor(size: int, placement: Any, whole: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (size,))
        part = distribute_tensor(whole, mesh, placement, src_data_rank=None).to_local()
        if whole is number:
            part = part.conj()
        return {"x": DTensor.from_local(part, mesh, placement, run_check=False)}

    def save(rank: int) -> None:
        manager(library).save(str(path), {"model": tensor(2, ROWS, number)})

    def load(rank: int) -> None:
        for strategy in library["module"].ReshardingReadStrategy:
            if strategy.name == "OFFSET":
                continue
            target = tensor(2, COLUMNS, torch.zeros(4, 2, dtype=torch.complex64))
            manager(library, read_strategy=strategy).load(str(path), into={"model": target})
            assert torch.equal(target["x"].to_local(), number.conj()[:, rank : rank + 1])

    ForkedRanks(tmp_path, save, 2).join()
    ForkedRanks(tmp_path, load, 2).join()
