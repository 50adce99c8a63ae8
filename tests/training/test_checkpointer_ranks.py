"""AsyncCheckpointer in jobs of several ranks, of which one saves; see also test_rank_parts.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks
from torch import distributed

import ptsave

ENVIRONMENT = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    yield
    assert not distributed.is_initialized()


def launched(monkeypatch: pytest.MonkeyPatch, rank: int | str | None, n_ranks: int | str) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(n_ranks))
    if rank is not None:
        monkeypatch.setenv("RANK", str(rank))


def restored(folder: Path, **options: Any) -> Any:
    target = {"x": torch.zeros(3)}
    ptsave.AsyncCheckpointer(folder, **options).restore(value=target)
    return target["x"]


RANK_OF_SEVERAL = """
import warnings
warnings.simplefilter("error")
folder = str(folder)

def save(checkpointer, step):
    checkpointer.save(step, value={"x": torch.full((3,), float(rank))}).result()
    return checkpointer.steps()

def restore(*args, **options):
    target = {"x": torch.full((3,), -1.0)}
    ptsave.AsyncCheckpointer(*args, **options).restore(value=target)
    return target["x"].tolist()

before = ptsave.AsyncCheckpointer(folder + f"/early-{rank}")  # there is no process group yet
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
attempt("unnamed", lambda: ptsave.AsyncCheckpointer(folder + "/unnamed").latest())
attempt("early", lambda: save(before, 1))
found["early files"] = os.listdir(folder + f"/early-{rank}")
shared = ptsave.AsyncCheckpointer(folder + "/shared", rank=0)
attempt("shared", lambda: save(shared, 1))
own = ptsave.AsyncCheckpointer(folder + f"/own/rank-{rank}", rank=rank)
attempt("own", lambda: save(own, 1))
dist.barrier()
attempt("restore shared", lambda: restore(folder + "/shared", rank=0))
attempt("restore own", lambda: restore(folder + f"/own/rank-{rank}", rank=rank))
attempt("restore other", lambda: restore(folder + f"/own/rank-{1 - rank}", rank=1 - rank))
dist.barrier()
dist.destroy_process_group()
after = ptsave.AsyncCheckpointer(folder + f"/after-{rank}")
attempt("after", lambda: save(after, 1))
"""


def test_two_ranks(tmp_path: Path) -> None:
    """Real processes, with a process group over gloo and nothing in the environment."""
    zero, one = ranks = Ranks(tmp_path, RANK_OF_SEVERAL, 2, in_group=False).found()
    for rank, found in enumerate(ranks):
        assert found["unnamed"] is None  # a part of each, see test_rank_parts.py
        early = f"RuntimeError: {tmp_path}/early-{rank}: this job has 2 ranks"
        assert found["early"].startswith(early)
        assert found["early files"] == []
        assert found["own"] == [1]
        assert found["restore shared"] == [0, 0, 0]
        assert found["restore own"] == [rank] * 3
        assert found["restore other"] == [1 - rank] * 3
        assert found["after"] == [1]
    assert zero["shared"] == [1]
    refused = f"RuntimeError: {tmp_path}/shared: this process is rank 1, and the checkpoints"
    assert one["shared"].startswith(refused)


def test_the_environment_says_how_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, 1, 4)
    with pytest.raises(RuntimeError, match="this job has 4 ranks, and each"):
        ptsave.AsyncCheckpointer(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match=f"{tmp_path}: this job has 4 ranks"):
        ptsave.AsyncCheckpointer(os.fsencode(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"this process is rank 1, .* belong to rank 0"):
        ptsave.AsyncCheckpointer(tmp_path, rank=0).save(1, value=1)
    assert os.listdir(tmp_path) == []
    ptsave.AsyncCheckpointer(tmp_path, rank=1).save(1, value={"x": torch.ones(3)}).result()
    monkeypatch.setenv("RANK", "2")
    assert torch.equal(restored(tmp_path, rank=1), torch.ones(3))


def test_set_after_the_checkpointer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path)
    checkpointer.save(1, value={"x": torch.ones(3)}).result()
    launched(monkeypatch, 0, 2)
    with pytest.raises(RuntimeError, match="this job has 2 ranks"):
        checkpointer.save(2, value=2)
    assert checkpointer.steps() == [1]
    target = {"x": torch.zeros(3)}
    checkpointer.restore(value=target)
    assert torch.equal(target["x"], torch.ones(3))


@pytest.mark.parametrize(("rank", "world_size"), [(None, None), (0, ""), (3, "1")])
def test_a_process_on_its_own_needs_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None, world_size: str | None
) -> None:
    if world_size is not None:
        launched(monkeypatch, 0, world_size)
    with ptsave.AsyncCheckpointer(tmp_path, rank=rank) as checkpointer:
        checkpointer.save(1, value={"x": torch.ones(3)})
    assert torch.equal(restored(tmp_path), torch.ones(3))


def test_a_process_that_does_not_know_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, None, 2)
    ptsave.AsyncCheckpointer(tmp_path, rank=1).save(1, value=1).result()
    assert ptsave.AsyncCheckpointer(tmp_path, rank=1).steps() == [1]


@pytest.mark.parametrize("world_size", ["two", "0", "-2", "1.0", " 2"])
def test_malformed_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str
) -> None:
    launched(monkeypatch, "first", world_size)
    message = f"WORLD_SIZE must be a positive integer, not {world_size!r}"
    with pytest.raises(ValueError, match=message):
        ptsave.AsyncCheckpointer(tmp_path / "new")
    with pytest.raises(ValueError, match=message):
        ptsave.AsyncCheckpointer(tmp_path, rank=0).save(1, value=1)
    launched(monkeypatch, "first", 2)
    with pytest.raises(ValueError, match="RANK must be an integer of at least 0, not 'first'"):
        ptsave.AsyncCheckpointer(tmp_path, rank=0).save(1, value=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank", [True, "0", 1.0])
def test_what_is_no_rank(tmp_path: Path, rank: Any) -> None:
    with pytest.raises(TypeError, match="rank must be an int"):
        ptsave.AsyncCheckpointer(tmp_path / "new", rank=rank)
    with pytest.raises(ValueError, match="rank must be at least 0"):
        ptsave.AsyncCheckpointer(tmp_path / "new", rank=-1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("world_size", [None, "many", "2"])
def test_a_group_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str | None
) -> None:
    """A process may make a group for itself; the launcher knows that there are others."""
    if world_size is not None:
        launched(monkeypatch, 1, world_size)
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        if world_size == "2":
            with pytest.raises(RuntimeError, match="this job has 2 ranks"):
                ptsave.AsyncCheckpointer(tmp_path / "new")
        elif world_size == "many":
            with pytest.raises(ValueError, match="WORLD_SIZE must be a positive integer"):
                ptsave.AsyncCheckpointer(tmp_path / "new")
        else:
            ptsave.AsyncCheckpointer(tmp_path / "new").save(1, value=1).result()
    finally:
        distributed.destroy_process_group()
