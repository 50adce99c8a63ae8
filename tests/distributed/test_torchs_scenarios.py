"""The scenarios of torch's own tests of DCP, by torch's names: stock and installed do the same."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dcp_states import QUIET, dcp
from forked_ranks import ForkedRanks
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard import sharding_spec as _specs
from torch.distributed.checkpoint import _version, state_dict_loader
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.futures import Future

import ptsave

specs: Any = _specs  # a package that does not export its names to type checkers
load_keys: Any = state_dict_loader._load_state_dict_from_keys

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed")]


def plain(value: Any) -> Any:
    """Return a value in which equal means equal."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value)


def outcome(scenario: Callable[[Path], Any], folder: Path) -> Any:
    """Return the result of a scenario, or its failure, with the folder's name left out."""
    try:
        found = plain(scenario(folder))
    except dcp.CheckpointException as error:
        found = {
            rank: (type(failure[0]).__name__, str(failure[0]))
            for rank, failure in error.failures.items()
        }
    except Exception as error:
        found = [type(error).__name__, str(error)]
    return repr(found).replace(str(folder), "FOLDER")


class Swapped(StreamTransformExtension):
    """An extension that a registry has to know: it exchanges the halves of each byte."""

    @staticmethod
    def registry_name() -> str:
        return "stream.swapped"

    @staticmethod
    def from_descriptor(version: str) -> Swapped:
        return Swapped()

    def get_descriptor(self) -> str:
        return "stream.swapped/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                output.write(swapped(bytes(data)))
                return len(data)

            def flush(self) -> None:
                output.flush()

        return Writer()

    def transform_from(self, input: Any) -> Any:  # noqa: A002 - torch's name
        return io.BytesIO(swapped(input.read()))


def swapped(data: bytes) -> bytes:
    return bytes((byte >> 4) | (byte & 15) << 4 for byte in data)


class KnowsSwapped(ExtensionRegistry):
    """A registry of torch's that knows one more."""

    def __init__(self) -> None:
        super().__init__()
        self.register(Swapped)


class Stateful:
    """An object with a state of any kind."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class WithExtraState(nn.Module):
    """A module that brings a value of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


# ------------------------------------------------------------------------------------- one process


def extensions(folder: Path, registry: Any = None) -> Any:
    values = {"x": torch.arange(5.0), "none": torch.zeros(0), "object": Stateful(b"some")}
    dcp.save(values, storage_writer=dcp.FileSystemWriter(folder, _extensions=[Swapped()]))
    target: Any = {"x": torch.zeros(5), "none": torch.ones(0), "object": Stateful(b"")}
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder, _extension_registry=registry))
    return target["x"], target["none"], target["object"].state


def extensions_of_a_registry(folder: Path) -> Any:
    return extensions(folder, KnowsSwapped())


def extensions_that_torch_knows(folder: Path) -> Any:
    """As ZStandard, if its library is there: the reader has no registry."""
    with patch.object(dcp.filesystem, "ExtensionRegistry", KnowsSwapped):
        return extensions(folder), load_keys("x", checkpoint_id=folder)


def derived_classes(folder: Path) -> Any:
    class Writer(dcp.FileSystemWriter):  # type: ignore[misc]
        def __init__(self, verbose: bool, steps: list[str]) -> None:
            super().__init__(folder, sync_files=verbose)
            self.steps = steps

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.steps.append("write")
            return super().write_data(plan, planner)

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def __init__(self, path: Path, steps: list[str]) -> None:
            super().__init__(path)
            self.steps = steps

        def read_data(self, plan: Any, planner: Any) -> Any:
            self.steps.append("read")
            return super().read_data(plan, planner)

    steps: list[str] = []
    dcp.save({"x": torch.ones(2)}, storage_writer=Writer(False, steps))
    target = {"x": torch.zeros(2)}
    dcp.load(target, storage_reader=Reader(folder, steps))
    return target, steps


def ids_of_the_metadata(folder: Path) -> Any:
    writer = dcp.FileSystemWriter(folder)
    dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    reader = dcp.FileSystemReader(folder)
    meta = reader.read_metadata().storage_meta
    return str(meta.checkpoint_id), meta.save_id == writer.save_id, meta.load_id == reader.load_id


def stateful_objects_stay(folder: Path) -> Any:
    set_keys: list[str] = []

    class Noting(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            set_keys.append(key)
            super().__setitem__(key, value)

    values = Noting(object=Stateful([1]), plain={"x": torch.ones(2), "n": [1, 2]})
    before = values["object"]
    dcp.save(values, checkpoint_id=folder)
    dcp.load(values, checkpoint_id=folder)
    return values["object"] is before, set_keys


def parts_by_key(folder: Path) -> Any:
    values = {
        "model": {"w": torch.arange(3.0), "b": torch.ones(2)},
        "optimizer": {"state": {"w": {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]},
        "epoch": 3,
    }
    dcp.save(values, checkpoint_id=folder)
    keys: list[Any] = ["model", "optimizer.state", {"epoch", "model.w"}, None, "absent"]
    return [load_keys(each, checkpoint_id=folder) for each in keys]


def extra_states(folder: Path) -> Any:
    found = []
    for new, old in [({"n": 1, "t": torch.ones(1)}, {"n": 0, "t": torch.zeros(1)}), (b"a", b"")]:
        dcp.save({"model": WithExtraState(new)}, checkpoint_id=folder)
        module = WithExtraState(old)
        dcp.load({"model": module}, checkpoint_id=folder)
        found.append(module.extra)
    return found


def names_of_torch_2_3(folder: Path) -> Any:
    """Torch's writer has written them: lists were then left as they are."""
    values = {"groups": [{"lr": 0.1, "params": [0, 1]}], "x": torch.ones(1)}
    with patch.object(_version, "_derived_version", "2_3"):
        planner, writer = dcp.DefaultSavePlanner(), dcp.filesystem.FileSystemWriter(folder)
        dcp.save(values, storage_writer=writer, planner=planner)
    target = {"groups": [{"lr": 0.0, "params": [9, 9]}], "x": torch.zeros(1)}
    dcp.load(target, checkpoint_id=folder)
    return target


def planners_that_change_values(folder: Path) -> Any:
    class Halves(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).half()

    class Doubles(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        def resolve_tensor(self, read_item: Any) -> Any:
            return super().resolve_tensor(read_item).double()

        def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
            self.lookup_tensor(read_item.dest_index).copy_(tensor * 2)

    dcp.save({"x": torch.arange(3.0)}, checkpoint_id=folder, planner=Halves())
    target = {"x": torch.zeros(3)}
    dcp.load(target, checkpoint_id=folder, planner=Doubles())
    return target, load_keys(None, checkpoint_id=folder)


def a_scheme_that_is_unknown(folder: Path) -> Any:
    dcp.save({"x": torch.ones(1)}, checkpoint_id="abc://abc.abc")


def no_place(folder: Path) -> Any:
    dcp.load({"x": torch.ones(1)})


def a_name_that_is_missing(folder: Path) -> Any:
    dcp.save({"x": torch.ones(1)}, checkpoint_id=folder)
    target = {"x": torch.zeros(1), "y": torch.zeros(1), "n": 5}
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, checkpoint_id=folder, planner=partial)
    assert plain(target) == plain({"x": torch.ones(1), "y": torch.zeros(1), "n": 5})
    dcp.load(target, checkpoint_id=folder)


def another_shape(folder: Path) -> Any:
    dcp.save({"x": torch.ones(3)}, checkpoint_id=folder)
    dcp.load({"x": torch.ones(1, 3)}, checkpoint_id=folder)


@pytest.mark.parametrize(
    "scenario",
    [
        extensions,
        extensions_of_a_registry,
        extensions_that_torch_knows,
        derived_classes,
        ids_of_the_metadata,
        stateful_objects_stay,
        parts_by_key,
        extra_states,
        names_of_torch_2_3,
        planners_that_change_values,
        a_scheme_that_is_unknown,
        no_place,
        a_name_that_is_missing,
        another_shape,
    ],
)
def test_one_process(scenario: Callable[[Path], Any], tmp_path: Path) -> None:
    expected = outcome(scenario, tmp_path / "stock")
    with ptsave.installed(distributed=True):
        assert outcome(scenario, tmp_path / "ours") == expected


def test_a_derived_writer_asks_for_extensions(tmp_path: Path) -> None:
    """Or a checkpoint that should be encrypted is not."""
    with ptsave.installed(distributed=True):

        class Encrypting(dcp.FileSystemWriter):  # type: ignore[misc]
            def __init__(self, path: Path) -> None:
                super().__init__(path, _extensions=[Swapped()])

        with pytest.raises(NotImplementedError, match="Encrypting: ptsave has no extensions"):
            Encrypting(tmp_path)


# ------------------------------------------------------------------------------------- many ranks


def chunks(*ranks: int, dim: int = 0) -> Any:
    return specs.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def parts(*rows_of_ranks: tuple[int, int]) -> Any:
    """Return a spec of so many rows for each, of tensors of 20 columns."""
    shards, begin = [], 0
    for rank, n_rows in rows_of_ranks:
        shards.append(specs.ShardMetadata([begin, 0], [n_rows, 20], f"rank:{rank}/cpu"))
        begin += n_rows
    return specs.EnumerableShardingSpec(shards)


def sharded(spec: Any, values: Tensor) -> Any:
    made = sharded_tensor.zeros(spec, *values.shape)
    for shard in made.local_shards():
        begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        rows, columns = (slice(b, b + n) for b, n in zip(begin, size, strict=True))
        shard.tensor.copy_(values[rows, columns])
    return made


def whole(tensor: Any) -> Tensor:
    """Return a sharded tensor, on rank 0."""
    gathered = torch.zeros(tensor.shape)
    tensor.gather(out=gathered if dist.get_rank() == 0 else None)
    return gathered


def former_class_of_sharded_tensors(folder: Path) -> Any:
    """Of every spec into every other, and into plain tensors and back."""
    kinds = [
        chunks(0, 1),
        chunks(0, 1, 1, 0),
        chunks(0, 1, dim=1),
        parts((0, 2), (1, 1), (0, 3), (1, 3), (0, 1)),
        parts((1, 8), (0, 2)),
    ]
    values, other = torch.arange(200.0).view(10, 20), torch.rand(10, 20)
    found = []
    for saved in kinds:
        dcp.save_state_dict(
            {"a": sharded(saved, values), "b": sharded(saved, values), "plain": values, "n": [1]},
            dcp.FileSystemWriter(folder),
        )
        dist.barrier()
        for wanted in kinds:
            target = {
                "a": sharded(wanted, other),
                "b": torch.zeros(10, 20),
                "plain": sharded(wanted, other),
                "n": [0],
            }
            dcp.load_state_dict(target, dcp.FileSystemReader(folder))
            found += [whole(target["a"]), target["b"], whole(target["plain"]), target["n"]]
            dist.barrier()
    return found


def training(folder: Path, shard: Callable[[nn.Module], Any]) -> Any:
    """Train, save, load into another model, and go on."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        torch.manual_seed(1)
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = make(), make()
    train(*first)
    dcp.save(dict(zip("mo", get_state_dict(*first), strict=True)), checkpoint_id=folder)
    target: Any = dict(zip("mo", get_state_dict(*second), strict=True))
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(*second, model_state_dict=target["m"], optim_state_dict=target["o"])
    train(*first)
    train(*second)
    full = StateDictOptions(full_state_dict=True)
    expected, found = (plain(get_state_dict(*each, options=full)) for each in (first, second))
    assert found == expected
    return found


def replicas(folder: Path) -> Any:
    return training(folder, nn.parallel.DistributedDataParallel)


def fully_sharded(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    return training(folder, lambda module: fully_shard(module, mesh=mesh))


def tensor_parallel(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return training(folder, lambda module: parallelize_module(module, mesh, plan))


def experts_of_ranks(folder: Path) -> Any:
    """Names that one rank has and another has not."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    values = {
        "dense": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
        f"expert.{rank}": torch.arange(6.0) + rank,
        f"own.{rank}": rank,
    }
    dcp.save(values, checkpoint_id=folder)
    target = {"dense": torch.zeros(5), "expert.0": torch.zeros(6), "expert.1": torch.zeros(6)}
    dcp.load(target, checkpoint_id=folder)
    return target, load_keys({"own.0", "own.1"}, checkpoint_id=folder)


def keys_in_another_order(folder: Path) -> Any:
    """Objects whose loads are collective calls."""

    class Gathers(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            dist.all_reduce(self.state)

    values = {"a": Gathers(torch.ones(1)), "b": Gathers(torch.ones(2))}
    if dist.get_rank():
        values = dict(reversed(values.items()))
    dcp.save(values, checkpoint_id=folder)
    dcp.load(values, checkpoint_id=folder)
    return {name: values[name].state for name in "ab"}


def another_coordinator(folder: Path) -> Any:
    own = {"x": torch.ones(2) + dist.get_rank(), "n": dist.get_rank()}
    dcp.save_state_dict(own, dcp.FileSystemWriter(folder), coordinator_rank=1)
    target = {"x": torch.zeros(2), "n": -1}
    dcp.load_state_dict(target, dcp.FileSystemReader(folder), coordinator_rank=1)
    return target


class Failing:
    """The steps of storages, one of which fails on a rank; the results of others are empty."""

    def __init__(self, step: str, rank: int, metadata: Any = None) -> None:
        self.fails = step if dist.get_rank() == rank else ""
        self.metadata = metadata

    def _do(self, step: str, result: Any = None) -> Any:
        if self.fails == step:
            raise ValueError(f"{step} fails on {dist.get_rank()}")
        return result

    def _later(self, step: str, result: Any = None) -> Any:
        future: Any = Future()
        if self.fails == f"{step} later":
            future.set_exception(ValueError(f"{step} fails later"))
        else:
            future.set_result(result)
        return self._do(step, future)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._do("local plan", plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self._do("global plan", plans)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class FailingWriter(Failing, dcp.StorageWriter):  # type: ignore[misc]
    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self._do("set up")

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._later("write", [])

    def finish(self, metadata: Any, results: Any) -> None:
        self._do("finish")


class FailingReader(Failing, dcp.StorageReader):  # type: ignore[misc]
    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        self._do("set up")

    def read_metadata(self) -> Any:
        return self._do("metadata", self.metadata)

    def read_data(self, plan: Any, planner: Any) -> Any:
        return self._later("read")


STEPS = ("set up", "local plan", "global plan", "write", "write later", "finish")
STEPS_OF_LOADS = ("metadata", *STEPS[:3], "read", "read later")


def storages_that_fail(folder: Path) -> Any:
    """Of other libraries: every step, on every rank, for every coordinator."""
    values = {"x": torch.ones(2), "n": [1]}
    dcp.save(values, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = []
    for rank in (0, 1):
        for coordinator in (0, 1):
            for step in STEPS:
                writer = FailingWriter(step, rank)
                save: Any = lambda _, w=writer, c=coordinator: dcp.save_state_dict(  # noqa: E731
                    values, w, coordinator_rank=c
                )
                found.append(outcome(save, folder))
            for step in STEPS_OF_LOADS:
                reader = FailingReader(step, rank, metadata)
                load: Any = lambda _, r=reader, c=coordinator: dcp.load_state_dict(  # noqa: E731
                    dict(values), r, coordinator_rank=c
                )
                found.append(outcome(load, folder))
    return found


def test_ranks(tmp_path: Path) -> None:
    def run_scenarios(_: int) -> None:
        for scenario in (
            former_class_of_sharded_tensors,
            replicas,
            fully_sharded,
            tensor_parallel,
            experts_of_ranks,
            keys_in_another_order,
            another_coordinator,
            storages_that_fail,
        ):
            expected = outcome(scenario, tmp_path / f"stock-{scenario.__name__}")
            assert not expected.startswith("['AssertionError"), expected
            with ptsave.installed(distributed=True):
                found = outcome(scenario, tmp_path / f"ours-{scenario.__name__}")
            assert found == expected, scenario.__name__

    ForkedRanks(tmp_path, run_scenarios).join()
