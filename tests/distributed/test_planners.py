"""`SavePlanner` and `LoadPlanner` plan as torch's planners do; metadata pickles as by pickle."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import QUIET, dcp, layouts, state_of
from forked_ranks import ForkedRanks
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from ptsave.dcp.metadata import load_metadata, pickled_metadata
from ptsave.distributed import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from ptsave.distributed.planners import ItemList, flattened, with_item_list
from ptsave.support import torch_dcp

pytestmark = QUIET


def state(*, filled: bool = True, extra: str = "") -> dict[str, Any]:
    """Return a state dict with values of many kinds; one more tensor if a name is given."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        return values if filled else torch.zeros_like(values)

    values: dict[str, Any] = {
        "model": {f"layer.{i}": tensor(3, 2) for i in range(5)},
        "other": {
            "half": tensor(4, dtype=torch.bfloat16),
            "empty": tensor(0, 3),
            "scalar": tensor(),
            "parameter": Parameter(tensor(2)),
            "columns": tensor(4, 3).t(),
            3: tensor(1),
        },
        "list": [tensor(2), {"x": 1.5 if filled else 0.0}, [tensor(3), "text"]],
        "plain": [1, "two"] if filled else [],
        "tuple": (1, 2) if filled else (),
        "ordered": OrderedDict(a=1 if filled else 0),
        "none": None,
        "step": 1 << 70 if filled else 0,
        "blob": b"\0\1" if filled else b"",
        "nothing": {},
    }
    return {**values, **({extra: tensor(5)} if extra else {})}


def planned(kind: Any, values: dict[str, Any], **options: Any) -> tuple[Any, SavePlan]:
    planner = kind(**options)
    planner.set_up_planner(values, None, True)
    return planner, planner.create_local_plan()


LOAD_PLANNERS = (dcp.DefaultLoadPlanner, LoadPlanner)


def load_plan(kind: Any, values: Any, metadata: Metadata, is_coordinator: bool = True) -> Any:
    planner = kind()
    planner.set_up_planner(values, metadata, is_coordinator)
    return planner.create_local_plan()


def hints(plan: Any) -> list[Any]:
    return [item.index.index for item in plan.items]


def test_flat_names_are_torchs() -> None:
    values = {**state(), "tuple": ({"a": torch.ones(1)},), "l": [[], [[1]], [[{"b": 2}]]]}
    expected, paths = torch_dcp.flatten_state_dict(values)
    found = flattened(values)
    assert [*found.values] == [*expected]
    assert all(found.values[name] is expected[name] for name in expected)
    assert found.paths == paths
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
        flattened({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
        flattened({"a": {"b": 2}, "a.b": torch.ones(1)})


@pytest.mark.parametrize("options", [{}, {"flatten_sharded_tensors": False}], ids=str)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_plans_of_saves_are_torchs(n_ranks: int, options: dict[str, Any]) -> None:
    """Ranks have all values in common but one tensor each."""
    found: list[Any] = []
    for kind in (default_planner.DefaultSavePlanner, SavePlanner):
        each = [planned(kind, state(extra=f"rank-{i}"), **options) for i in range(n_ranks)]
        planner = each[0][0]
        local = [plan for _, plan in each]
        found.append([copy.deepcopy(local), *planner.create_global_plan(copy.deepcopy(local))])
    (local, plans, metadata), (our_local, our_plans, our_metadata) = found
    assert our_local == local
    assert our_plans == plans
    assert list(map(hints, our_plans)) == list(map(hints, plans))
    assert our_metadata == metadata
    assert [*our_metadata.state_dict_metadata] == [*metadata.state_dict_metadata]
    assert [*our_metadata.planner_data] == [*metadata.planner_data]


def test_plans_that_ranks_exchange() -> None:
    """They stay what they are, and the garbage collector goes on."""
    _, plan = planned(SavePlanner, state())
    sent = with_item_list(plan)
    received = pickle.loads(pickle.dumps(sent))
    assert received == sent == plan == copy.deepcopy(sent)
    assert hints(received) == hints(plan)
    assert with_item_list(received) is received
    assert type(received.items) is ItemList
    assert gc.isenabled()


def shard(begin: int, n: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([begin]), torch.Size([n]))
    _, plan = planned(SavePlanner, {"x": torch.ones(1)})
    data: Any = plan.items[0].tensor_data
    return WriteItem(
        MetadataIndex("x", [begin]),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, data.properties, torch.Size([size])),
    )


@pytest.mark.parametrize(
    "items",
    [[shard(0, 3, 6), shard(3, 3, 6)], [shard(0, 4, 6), shard(3, 3, 6)], [shard(0, 3, 5)] * 2],
    ids=["whole", "overlap", "hole"],
)
def test_parts_of_ranks_are_validated(items: list[WriteItem]) -> None:
    plans = [SavePlan([item], planner_data={"x": ("x",)}) for item in items]
    outcomes: list[Any] = []
    for kind in (default_planner.DefaultSavePlanner, SavePlanner):
        try:
            outcomes.append(kind().create_global_plan(copy.deepcopy(plans)))
        except ValueError as error:
            outcomes.append(str(error))
    expected, found = outcomes
    logged = f"{expected}: chunks overlap or leave gaps, as torch has logged"  # torch 2.9
    assert found in (expected, logged)


def test_plans_of_distributed_tensors_are_torchs(tmp_path: Path) -> None:
    """Also of several of one kind, of ranks that are outside a mesh, and of other sizes."""

    def plan(rank: int) -> None:
        values = {layout: state_of(layout, 2, filled=True)["model"] for layout in layouts(2)}
        alone = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))["x"]
        outside = DeviceMesh("cpu", [0])
        whole = torch.arange(12.0).view(4, 3)
        values["more"] = {
            str(i): distribute_tensor(whole + i, mesh, [Shard(0)], src_data_rank=None)
            for i, mesh in enumerate((alone, alone, outside, outside))
        }
        plans = [planned(kind, values) for kind in (dcp.DefaultSavePlanner, SavePlanner)]
        assert plans[0][1] == plans[1][1]
        folder = tmp_path / "checkpoint"
        dcp.save(values, storage_writer=StorageWriter(folder), planner=SavePlanner())
        metadata = StorageReader(folder).read_metadata()
        found = [load_plan(kind, values, metadata, rank == 0) for kind in LOAD_PLANNERS]
        assert found[0] == found[1]
        other = distribute_tensor(torch.ones(5, 3), alone, [Shard(0)], src_data_rank=None)
        for kind in LOAD_PLANNERS:
            with pytest.raises(ValueError, match=r"Size mismatch.*more\.0"):
                load_plan(kind, {**values, "more": {"0": other}}, metadata, rank == 0)

    ForkedRanks(tmp_path, plan).join()


def test_plans_of_loads_are_torchs(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=StorageWriter(tmp_path), no_dist=True)
    metadata = StorageReader(tmp_path).read_metadata()
    wanted: dict[str, Any]
    for wanted in (state(filled=False), {"model": state()["model"]}, {"list": state()["list"]}):
        plans = [load_plan(kind, copy.deepcopy(wanted), metadata) for kind in LOAD_PLANNERS]
        assert plans[0] == plans[1]
        pairs = zip(plans[0].items, plans[1].items, strict=True)
        assert all(
            (a.dest_index.index, a.storage_index.index)
            == (b.dest_index.index, b.storage_index.index)
            for a, b in pairs
        )
    resized = {**state(), "model": {f"layer.{i}": torch.ones(9) for i in range(5)}}
    for wanted, message in (({"x": torch.ones(1)}, "Missing key"), (resized, "Size mismatch")):
        for kind in LOAD_PLANNERS:
            with pytest.raises((RuntimeError, ValueError), match=message):
                load_plan(kind, wanted, metadata)


@pytest.mark.parametrize("ours_saves", [True, False])
@pytest.mark.parametrize("ours_loads", [True, False])
def test_all_storages_take_them(tmp_path: Path, ours_saves: bool, ours_loads: bool) -> None:
    writer = (StorageWriter if ours_saves else dcp.FileSystemWriter)(tmp_path)
    dcp.save(state(), storage_writer=writer, planner=SavePlanner(), no_dist=True)
    for planner in (LoadPlanner(), None, LoadPlanner(allow_partial_load=True)):
        target = state(filled=False)
        reader = (StorageReader if ours_loads else dcp.FileSystemReader)(tmp_path)
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
        expected, found = flattened(state()).values, flattened(target).values
        assert [*found] == [*expected]
        for name, value in expected.items():
            same = torch.equal(found[name], value) if isinstance(value, Tensor) else None
            assert same if same is not None else found[name] == value, name


def test_derived_planners_are_asked(tmp_path: Path) -> None:
    """What they change is saved and loaded, as with torch's."""

    class Halves(SavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return value.half() if isinstance(value, Tensor) else value

    class Doubling(LoadPlanner):
        def lookup_tensor(self, index: Any) -> Tensor:
            self.names = [*getattr(self, "names", []), index.fqn]
            return super().lookup_tensor(index)

    values = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    dcp.save(values, storage_writer=StorageWriter(tmp_path), planner=Halves(), no_dist=True)
    target = {"a": torch.zeros(3), "b": torch.zeros(4)}
    planner = Doubling()
    dcp.load(target, storage_reader=StorageReader(tmp_path), planner=planner, no_dist=True)
    assert sorted(planner.names) == ["a", "b"]
    assert all(torch.equal(target[name], values[name]) for name in values)
    metadata: Any = StorageReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata["a"].properties.dtype == torch.float16


# ----------------------------------------------------------------------------------- the metadata


def details(metadata: Metadata) -> list[Any]:
    """Return what is compared beside the dataclasses' fields: order, hints, attributes of ours."""
    places = [(vars(key), info.__getstate__()) for key, info in metadata.storage_data.items()]
    paths = [*metadata.planner_data.items()] if metadata.planner_data else None
    return [*metadata.state_dict_metadata, places, paths, vars(metadata.storage_meta or metadata)]


def test_metadata_pickles_as_by_pickle(tmp_path: Path) -> None:
    values = {
        **state(),
        "\ud800 name": torch.ones(2),
        "size": torch.ones(1),
        "offsets": torch.ones(4),
    }
    for number, writer in enumerate((dcp.FileSystemWriter, StorageWriter)):
        folder = tmp_path / str(number)
        if number == 1:
            values["sparse"] = torch.eye(3).to_sparse()
        dcp.save(values, storage_writer=writer(folder), no_dist=True)
        metadata = load_metadata(str(folder / ".metadata"))
        data = pickled_metadata(metadata)
        assert data is not None
        expected = pickle.loads(pickle.dumps(metadata))
        for found in (pickle.loads(data), pickle.loads(memoryview(data))):
            assert found == expected == metadata
            assert details(found) == details(expected)


def test_unusual_metadata_is_left_to_pickle(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=StorageWriter(tmp_path), no_dist=True)
    metadata = load_metadata(str(tmp_path / ".metadata"))
    metadata.planner_data = {"a": ("a",), "far": (1 << 100, -5, True, None, 2.5)}
    assert pickled_metadata(metadata) is None  # of a number with a fraction
    metadata.planner_data = {"a": ("a",), "far": (1 << 100, -5, True, None)}
    info = next(iter(metadata.storage_data.values()))
    info.offset, info.length = 1 << 40, (1 << 33) + 1
    data = pickled_metadata(metadata)
    assert data is not None
    assert pickle.loads(data) == metadata
    info.transform_descriptors = ["zstd"]
    assert pickle.loads(pickled_metadata(metadata) or b"") == metadata
    assert pickled_metadata(replace(metadata, storage_data=None)) is None
