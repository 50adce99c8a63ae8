"""`load_into(process_group=)`: one rank reads a file, each restores what it has."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from forked_ranks import ForkedRanks
from stock_comparison import assert_same_object, failure_of
from torch import distributed, nn

import ptsave
from ptsave.archive import group_archive

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 1 << 14)


class Own(nn.Module):
    """Has code of its own in loading, which looks at the values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(70, 70))
        self.seen = -1.0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = float(state_dict[f"{prefix}weight"].detach().sum())
        super()._load_from_state_dict(state_dict, prefix, *args)


def _model() -> Any:
    model = nn.ModuleDict(
        {
            "first": nn.Linear(130, 129),
            "norm": nn.BatchNorm1d(7),
            "conv": nn.Conv2d(8, 9, 3),
            "own": Own(),
            "last": nn.Linear(130, 129, bias=False),
        }
    )
    model["last"].weight = model["first"].weight
    return model


def _filled(seed: int) -> Any:
    torch.manual_seed(seed)
    model = _model()
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randint(-50, 50, tensor.shape))
    return model


def _same(model: Any, other: Any) -> None:
    assert_same_object(dict(model.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("size", [1, 4])
def test_every_rank_restores_its_own(tmp_path: Path, size: int) -> None:
    path, run = tmp_path / "model.pt", tmp_path / "run.pt"
    saved = _filled(1)
    torch.save(saved.state_dict(), path)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved["first"](torch.ones(130)).sum().backward()
    optimizer.step()
    ptsave.save_checkpoint(run, model=saved, optimizer=optimizer, extra=torch.ones(5000), epoch=3)

    def variants(rank: int) -> tuple[Any, dict[str, Any]]:
        model = _filled(2)
        if rank == 1:  # another dtype, and targets that are not contiguous
            model = model.to(torch.bfloat16).to(memory_format=torch.channels_last)
            rows = torch.zeros(130, 129)
            model["first"].weight = model["last"].weight = nn.Parameter(rows.t())
        if rank == 2:  # a part of the model
            del model["own"], model["conv"]
            return model, {"strict": False}
        if rank == 3:
            return model, {"assign": True}
        return model, {}

    def restore(rank: int) -> None:
        group = distributed.group.WORLD
        model, options = variants(rank)
        stock = copy.deepcopy(model)
        expected = stock.load_state_dict(torch.load(path), **options)
        assert ptsave.load_into(path, model, process_group=group, **options) == expected
        _same(model, stock)
        if rank == 0:
            assert model["own"].seen == stock["own"].seen
        # Dicts, optimizers, and entries that are returned.
        state = {name: torch.zeros_like(t) for name, t in torch.load(path).items()}
        ptsave.load_into(path, state, process_group=group)
        assert all(torch.equal(state[name], t) for name, t in torch.load(path).items())
        model = _filled(3)
        mine = torch.optim.AdamW(model.parameters())
        rest = ptsave.load_checkpoint(run, model=model, optimizer=mine, process_group=group)
        stock_run = torch.load(run)
        assert_same_object(dict(rest), {"extra": torch.ones(5000), "epoch": 3})
        assert_same_object(dict(model.state_dict()), dict(stock_run["model"]))
        assert_same_object(mine.state_dict()["state"], stock_run["optimizer"]["state"])

    ForkedRanks(tmp_path, restore, size).join()


def test_nothing_changes_if_it_does_not_fit_on_one_rank(tmp_path: Path) -> None:
    path, damaged = tmp_path / "model.pt", tmp_path / "damaged.pt"
    weights = {"a": torch.ones(9000), "b": torch.ones(9000)}
    torch.save(weights, path)
    torch.save(weights, damaged)
    flip_middle(damaged, "data/1")

    def restore(rank: int) -> None:
        group = distributed.group.WORLD
        targets = {"a": torch.zeros(9000), "b": torch.zeros(9000 + rank)}

        def refused(action: Callable[[], object], kind: type[Exception], words: str) -> None:
            error = failure_of(action)
            assert isinstance(error, kind), repr(error)
            assert re.search(words, str(error), re.DOTALL), error
            assert not hasattr(error, "overwritten")
            assert targets["a"].eq(0).all()

        load = partial(ptsave.load_into, path, targets, process_group=group)
        on_one = f"{path}: rank 1 of 2 .*" if rank == 0 else ""
        refused(load, RuntimeError, f"{on_one}size mismatch")
        module = nn.Linear(1, 1)
        refused(
            lambda: ptsave.load_into(path, [targets, module][rank], process_group=group),
            RuntimeError,
            "" if rank == 1 else "rank 1 of 2 .*Missing key",
        )
        options: dict[str, Any] = {"match": "name"} if rank == 1 else {}
        refused(lambda: load(**options), TypeError, f"{on_one}match is for optimizers")
        targets["b"] = torch.zeros(9000)
        error = failure_of(lambda: ptsave.load_into(damaged, targets, process_group=group))
        assert isinstance(error, ptsave.CorruptCheckpointError)
        assert error.entries == ["b"]
        assert error.overwritten == ["a", "b"]  # type: ignore[attr-defined]
        load()
        assert_same_object(targets, weights)

    ForkedRanks(tmp_path, restore).join()


@pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage is deprecated)")
def test_targets_as_without_a_group(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    state: dict[str, Any] = {c: torch.full((6000,), float(i)) for i, c in enumerate("abcd")}
    state["conj"] = torch.randn(6000, dtype=torch.complex64).conj()
    state["column"] = torch.randn(900, 9)[:, 3]
    state["quantized"] = torch.quantize_per_tensor(torch.randn(9000), 0.5, 3, torch.qint8)
    state["eight"] = torch.randn(9000).to(torch.float8_e4m3fn)
    state["nested"] = [{"word": "new", "bool": torch.ones(9000, dtype=torch.bool)}]
    torch.save(state, path)

    def targets() -> dict[str, Any]:
        memory = torch.zeros(3, 8000)
        return {  # some overlap: their order counts
            "c": memory[0, :6000],
            "b": memory[0, 1000:7000],
            "a": memory[1, :6000],
            "d": memory[1, :6000],
            "conj": torch.zeros(6000, dtype=torch.complex128),
            "column": torch.zeros(900, dtype=torch.float64),
            "quantized": torch.quantize_per_tensor(torch.zeros(9000), 0.5, 3, torch.qint8),
            "eight": torch.zeros(9000),
            "nested": [{"word": "old", "bool": torch.zeros(9000)}],
        }

    def restore(rank: int) -> None:
        mine, alone = targets(), targets()
        for each in (mine, alone):
            group = distributed.group.WORLD if each is mine else None
            ptsave.load_into(path, each, process_group=group)
        assert_same_object(mine, alone)
        assert mine["nested"][0]["word"] == "new"

    ForkedRanks(tmp_path, restore).join()


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_archive, "CHUNK_NBYTES", 8 * MIB)
    path = tmp_path / "a.pt"
    torch.save({"large": torch.ones(4096, 8192), "small": torch.ones(9)}, path)

    def peak() -> int:
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("VmHWM:") + 1]) << 10

    def restore(rank: int) -> None:
        dtype = torch.bfloat16 if rank else torch.float32
        large = torch.zeros(8192, 4096, dtype=dtype).fill_(2).t()
        state = {"large": large, "small": torch.zeros(9)}
        small = {"large": torch.zeros(0)}
        failure_of(lambda: ptsave.load_into(path, small, process_group=distributed.group.WORLD))
        Path("/proc/self/clear_refs").write_text("5")  # begins to count anew
        before = peak()
        ptsave.load_into(path, state, process_group=distributed.group.WORLD)
        assert peak() - before <= 64 * MIB
        assert large[0, 0] == large[-1, -1] == 1

    ForkedRanks(tmp_path, restore).join()
