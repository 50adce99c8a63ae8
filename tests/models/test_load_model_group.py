"""`load_model(process_group=)`: one rank reads the files, each fills a model of its own."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from _weights import Engine, assert_equal, engine_checkpoint, packed, write_file, write_shards
from forked_ranks import ForkedRanks
from stock_comparison import failure_of
from torch import Tensor, distributed, nn

import ptsave
from ptsave.archive import group_archive
from ptsave.models import group_weights

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 1 << 15)


class Own(nn.Module):
    """Has code of its own in loading, which looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(90, 91))
        self.seen = -1.0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = float(state_dict[f"{prefix}weight"].detach().sum())
        super()._load_from_state_dict(state_dict, prefix, *args)


class Counting(nn.Linear):
    """Has extra state with a tensor in it."""

    count: Any = None

    def get_extra_state(self) -> Any:
        return {"count": 3, "mask": torch.ones(300)}

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def _checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = engine_checkpoint()
    tensors["large"] = torch.randn(130, 129)  # of three chunks
    tensors["rows"] = torch.randn(64, 70)
    tensors["scale"] = torch.randn(())
    tensors["none"] = torch.empty(0, 4)
    tensors["own.weight"] = torch.randn(90, 91)
    return tensors


def _written(folder: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    if kind in (".safetensors", ".bin"):
        write_shards(folder, tensors, 3, kind, index=kind == ".bin")
        return folder
    if kind == "old":
        torch.save(tensors, folder / "model.pt", _use_new_zipfile_serialization=False)
    elif kind == "views":  # of one storage
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        views = zip(tensors.items(), parts, strict=True)
        torch.save({n: part.view(t.shape) for (n, t), part in views}, folder / "model.pt")
    else:
        write_file(folder / f"model{kind}", tensors)
    return next(folder.iterdir())


def _model(variant: int) -> Any:
    """Return a model whose parameters are filled in one of several ways."""
    model: Any = Engine()
    model.large = nn.Parameter(torch.zeros(130, 129))
    model.rows = nn.Parameter(torch.zeros(64, 70))
    model.scale = nn.Parameter(torch.zeros(1))
    model.none = nn.Parameter(torch.zeros(0, 4))
    model.own = nn.ParameterDict({"weight": torch.zeros(90, 91)})
    if variant == 1:  # conversions, and targets that are not contiguous
        model.to(torch.bfloat16)
        model.large = nn.Parameter(torch.zeros(129, 130, dtype=torch.bfloat16).t())
        model.rows.weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
    if variant == 2:  # code of its own, which asks for values
        model.own = Own()
    if variant == 3:  # a part, and memory that two share

        def load(parameter: Tensor, weight: ptsave.WeightSlice) -> None:
            parameter.copy_(weight.narrow(0, 32, 32))

        load.takes_slices = True  # type: ignore[attr-defined]
        model.rows = nn.Parameter(torch.zeros(32, 70))
        model.rows.weight_loader = load
        memory = torch.zeros(20000)
        model.large = nn.Parameter(memory[: 130 * 129].view(130, 129))
        model.own.weight = nn.Parameter(memory[16000 : 16000 + 910].view(10, 91))
        model.own.weight.weight_loader = lambda parameter, tensor: parameter.copy_(tensor[:10])
    return model


@pytest.mark.parametrize("kind", [".safetensors", ".bin", ".pt", "old", "views"])
def test_every_rank_fills_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tensors = _checkpoint()
    path = _written(tmp_path / "model", kind, tensors)

    def load(rank: int) -> None:
        group = distributed.group.WORLD
        alone, mine = _model(rank), _model(rank)
        expected = ptsave.load_model(alone, path)
        if rank > 0:  # which opens nothing
            monkeypatch.setattr(group_weights, "find_files", None)
        assert ptsave.load_model(mine, path, process_group=group) == expected
        assert_equal(dict(mine.named_parameters()), dict(alone.named_parameters()))
        if rank == 0:
            whole = {**packed(tensors), "scale": tensors["scale"].view(1)}
            assert_equal(dict(mine.named_parameters()), whole)
        if rank == 2:
            assert mine.own.seen == alone.own.seen
        if kind != ".safetensors":
            return
        # Options of one rank.
        choices: dict[int, Any] = {1: {"dtype": torch.float64}, 2: {"assign": True}}
        mine = _model(rank)
        ptsave.load_model(
            mine, path, process_group=group, progress=rank == 1, **choices.get(rank, {})
        )
        dtypes = {torch.float64} if rank == 1 else {p.dtype for p in alone.parameters()}
        assert {parameter.dtype for parameter in mine.parameters()} == dtypes
        variant = rank % 2 * 2  # without loaders, which a parameter loses on its way to "meta"
        mine, alone = _model(variant).to("meta"), _model(variant)
        ptsave.load_model(mine, path, process_group=group, device="cpu")
        ptsave.load_model(alone, path)
        assert_equal(dict(mine.named_parameters()), dict(alone.named_parameters()))

    ForkedRanks(tmp_path, load, 4).join()


@pytest.mark.parametrize("kind", [".safetensors", ".pt"])
def test_parts_of_distributed_tensors(tmp_path: Path, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    saved = nn.Sequential(nn.Linear(100, 101), nn.Linear(101, 3))
    write_file(tmp_path / f"model{kind}", saved.state_dict())
    expected = saved.state_dict()

    def load(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows: Any = nn.Sequential(nn.Linear(100, 101), nn.Linear(101, 3))
        fully_shard(rows, mesh=mesh)
        columns: Any = nn.Sequential(nn.Linear(100, 101), nn.Linear(101, 3)).double()
        weight = distribute_tensor(torch.zeros(101, 100).double(), mesh, [Shard(1)])
        columns[0].weight = nn.Parameter(weight)
        for model in (rows, columns):
            ptsave.load_model(model, tmp_path, process_group=mesh.get_group())
            for name, value in model.state_dict().items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                assert torch.equal(whole, expected[name].to(whole.dtype)), name

    ForkedRanks(tmp_path, load).join()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_extra_state(tmp_path: Path, suffix: str) -> None:
    saved = Counting(50, 51)
    if suffix == ".bin":
        torch.save(saved.state_dict(), tmp_path / "model.bin")
    else:
        ptsave.save_model(saved, tmp_path)

    def load(rank: int) -> None:
        model = Counting(50, 51)
        ptsave.load_model(model, tmp_path, process_group=distributed.group.WORLD)
        assert torch.equal(model.weight, saved.weight)
        assert model.count["mask"].sum() == 300

    ForkedRanks(tmp_path, load).join()


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(9000), "b": torch.ones(9000)}
    good, damaged, lost = tmp_path / "good", tmp_path / "damaged", tmp_path / "lost"
    for folder in (good, damaged, lost):
        folder.mkdir()
        paths = write_shards(folder, tensors, 2, ".bin", index=True)
    (lost / paths[1].name).unlink()
    flip_middle(damaged / paths[1].name, "data/0")

    def load(rank: int) -> None:
        model = nn.ParameterDict({name: torch.zeros(9000) for name in tensors})
        world = distributed.group.WORLD

        def refused(kind: type[Exception], words: str, path: Any, **options: Any) -> Exception:
            call = partial(ptsave.load_model, model, path, process_group=world, **options)
            error = failure_of(call)
            assert isinstance(error, kind), repr(error)
            assert re.search(words, str(error), re.DOTALL), error
            return error

        on_one = "" if rank == 1 else f"{good}: rank 1 of 2 could not go on: .*"
        error = refused(FileNotFoundError, "00002.*is missing|a shard is missing", lost)
        assert getattr(error, "filename", "").endswith(paths[1].name)
        rename = {"b": "c"} if rank == 1 else None
        refused(RuntimeError, f"{on_one}.*Missing key.*b", good, rename=rename)
        refused(TypeError, f"{on_one}.*dtype must be", good, dtype=[None, 3][rank])
        refused(ValueError, "different files: rank 1", [good, lost][rank])
        refused(ValueError, "same path", [good, open(paths[0], "rb")][rank])
        assert not any(each.any() for each in model.values())
        error = refused(ptsave.CorruptCheckpointError, "00002-of-.*used by b", damaged)
        assert getattr(error, "entries", None) == ["b"]

        def fail(parameter: Tensor, tensor: Tensor) -> None:
            assert rank == 0, "rank 1 has no place for it"
            parameter.copy_(tensor)

        model["a"].weight_loader = fail
        refused(Exception, f"{on_one}.*rank 1 has no place", good)
        if rank:
            del model["a"].weight_loader
        ptsave.load_model(model, good, process_group=world)
        assert_equal(dict(model.items()), tensors)

    ForkedRanks(tmp_path, load).join()


def test_a_rank_that_ends_is_no_hang(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a": torch.ones(50_000)})

    def load(rank: int) -> None:
        model = nn.ParameterDict({"a": torch.zeros(50_000)})
        if rank == 1:
            model["a"].weight_loader = lambda *_: os._exit(0)
        call = partial(ptsave.load_model, model, tmp_path, process_group=distributed.group.WORLD)
        error = failure_of(call)
        assert isinstance(error, RuntimeError)
        assert re.search(f"{tmp_path}: rank 0 of 2 .*has ended or does not answer", str(error))
        os._exit(0)  # the group cannot be ended any more

    ForkedRanks(tmp_path, load).join()


def test_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    tensors = {name: torch.randn(3000) for name in "abcd"}
    for suffix in (".safetensors", ".bin"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        write_shards(folder, tensors, 2, suffix, index=True)
        url = f"memory://test_load_model_group/{suffix[1:]}"
        fsspec.filesystem("memory").put(str(folder), url, recursive=True)

    def load(rank: int) -> None:
        if rank:
            fsspec.filesystem("memory").rm("/test_load_model_group", recursive=True)
        for kind in ("safetensors", "bin"):
            model = nn.ParameterDict({name: torch.zeros(3000) for name in tensors})
            url = f"memory://test_load_model_group/{kind}"
            ptsave.load_model(model, url, process_group=distributed.group.WORLD)
            assert_equal(dict(model.items()), tensors)

    ForkedRanks(tmp_path, load).join()
    fsspec.filesystem("memory").rm("/test_load_model_group", recursive=True)


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 8 * MIB)
    tensors = {str(i): torch.ones(4 * MIB) for i in range(3)}
    write_shards(tmp_path, tensors, 3, ".bin", index=True)

    def peak() -> int:
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("VmHWM:") + 1]) << 10

    def measured(action: Callable[[], object]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # begins to count anew
        before = peak()
        action()
        return peak() - before

    def load(rank: int) -> None:
        model = nn.ParameterDict({name: torch.full((4 * MIB,), 2.0) for name in tensors})
        other = copy.deepcopy(model).half()
        for each in other.values():
            each.weight_loader = lambda parameter, tensor: parameter.copy_(tensor)
        for each in [model, other] if rank else [model, model]:
            group = distributed.group.WORLD
            nbytes = measured(partial(ptsave.load_model, each, tmp_path, process_group=group))
            assert nbytes <= 64 * MIB, nbytes
            assert all(tensor[-1] == 1 for tensor in each.values())

    ForkedRanks(tmp_path, load).join()
