"""Faults of ranks: errors, full disks, kills; the old checkpoint or the new one is whole."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_states import QUIET, dcp, differences, state_of
from forked_ranks import ForkedRanks
from kill_rounds import ROUNDS, SEED
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ptsave
from ptsave.distributed import StorageReader, StorageWriter

pytestmark = QUIET

N_RANKS = 2


def state(*, filled: bool = True) -> dict[str, Any]:
    return state_of("flat-rows", N_RANKS, filled=filled)


def save_state(folder: Path, **options: Any) -> None:
    dcp.save(state(), storage_writer=StorageWriter(folder), **options)


def check(folder: Path) -> None:
    target = state(filled=False)
    dcp.load(target, storage_reader=StorageReader(folder))
    assert not differences(target, state())


def fail_to_end(folder: Path) -> None:
    class Failing(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError(errno.EIO, "it cannot end")

    with pytest.raises(CheckpointException, match="it cannot end"):
        dcp.save({"x": torch.ones(9)}, storage_writer=Failing(folder), no_dist=True)


def test_files_of_failed_saves(tmp_path: Path) -> None:
    """They go with the next save of the process, unless another thread may still be at theirs."""
    dcp.save({"x": torch.zeros(9)}, storage_writer=StorageWriter(tmp_path), no_dist=True)
    (old,) = tmp_path.glob("*.distcp")
    for _ in range(3):
        fail_to_end(tmp_path)
        assert len(list(tmp_path.glob("*.distcp"))) == 2
    thread = threading.Thread(target=fail_to_end, args=(tmp_path,))
    thread.start()
    thread.join()
    assert len(list(tmp_path.glob("*.distcp"))) == 3  # one of the main thread, which may be saving
    fail_to_end(tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert old.exists()


def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def fail_on_last_rank(rank: int) -> None:
        save_state(folder)
        before = (folder / ".metadata").read_bytes()
        dist.barrier()
        if rank == N_RANKS - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        for _ in range(3):
            with pytest.raises(CheckpointException) as caught:
                save_state(folder)
            dist.barrier()
            # The old file and that of the last save, which the others' errors have made useless.
            assert len(list(folder.glob("__0_*.distcp"))) == 2
            dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ((failed, (error, _)),) = caught.value.failures.items()
        assert failed == N_RANKS - 1
        assert isinstance(error, ptsave.SaveError)
        assert error.errno == errno.EFBIG
        assert f"__{failed}_" in str(error.filename)
        dist.barrier()
        assert (folder / ".metadata").read_bytes() == before
        check(folder)
        dist.barrier()
        save_state(folder)
        check(folder)
        dist.barrier()
        assert len(list(folder.glob("*.distcp"))) == N_RANKS
        assert not list(folder.glob(".*.ptsave"))

    ForkedRanks(tmp_path, fail_on_last_rank).join()


def test_a_missing_file_is_an_error_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    ForkedRanks(tmp_path, lambda _: save_state(folder)).join()
    (file,) = folder.glob("__1_*.distcp")
    file.unlink()

    def load(_: int) -> None:
        with pytest.raises(CheckpointException) as caught:
            check(folder)
        assert any(file.name in str(error) for error, _ in caught.value.failures.values())

    ForkedRanks(tmp_path, load).join()


def test_ranks_that_save_by_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def save_apart(_: int) -> None:
        for _ in range(2):
            save_state(folder, use_collectives=False)
            dist.barrier()
            check(folder)
            dist.barrier()

    ForkedRanks(tmp_path, save_apart).join()
    names = {path.name for path in folder.iterdir()}
    assert {f"__{rank}.metadata" for rank in range(N_RANKS)} <= names
    assert len(names) == 2 * N_RANKS


def test_saves_in_the_background(tmp_path: Path) -> None:
    def save_in_background(_: int) -> None:
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            folder = tmp_path / kind.value
            for _ in range(2):
                future: Any = dcp.async_save(
                    state(), storage_writer=StorageWriter(folder), async_checkpointer_type=kind
                )
                getattr(future, "upload_completion", future).result()
            dist.barrier()
            check(folder)

    ForkedRanks(tmp_path, save_in_background).join()


# -------------------------------------------------------------------------------------------- kills

GROUP_TIMEOUT_S = 20


def step_of_rank(rank: int, step: int) -> dict[str, Any]:
    sizes = {"a": 7, "b": 300_000, "c": 5_000}
    tensors = {f"{name}-{rank}": torch.full((n,), float(step)) for name, n in sizes.items()}
    return {**tensors, f"step-{rank}": step}


def kill_one(folder: Path, n_ranks: int, first: int, chance: random.Random) -> None:
    """Let ranks save step after step, and kill one: the others end with an error."""
    ready = [folder / f"ready-{rank}" for rank in range(n_ranks)]

    def save_on(rank: int) -> None:
        ready[rank].touch()
        for step in itertools.count(first):
            writer = StorageWriter(folder / "checkpoint", fsync=False)
            dcp.save(step_of_rank(rank, step), storage_writer=writer)

    def act(rank: int) -> None:
        with pytest.raises((CheckpointException, RuntimeError)):
            save_on(rank)
        os._exit(0)  # the group is broken, and would be waited for

    for path in ready:
        path.unlink(missing_ok=True)
    ranks = ForkedRanks(folder, act, n_ranks, timeout_s=GROUP_TIMEOUT_S)
    while not all(path.exists() for path in ready):
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.25))
    victim = ranks.children.pop(chance.randrange(n_ranks))
    victim.kill()
    begin = time.monotonic()
    ranks.join()
    took = time.monotonic() - begin
    assert took < 2 * GROUP_TIMEOUT_S + 60, took  # (the machine may stop us for a while)


def saved_step(folder: Path) -> int:
    """Return the step of all values of a checkpoint; 0 if there is none."""
    if not (folder / ".metadata").exists():
        return 0
    steps = set()
    metadata = StorageReader(folder).read_metadata()
    ranks = {int(name.rpartition("-")[2]) for name in metadata.state_dict_metadata}
    for reader in (StorageReader, dcp.FileSystemReader):
        target: dict[str, Any] = {}
        for rank in ranks:
            target |= step_of_rank(rank, 0)
        dcp.load(target, storage_reader=reader(folder), no_dist=True)
        for value in target.values():
            steps |= {value} if isinstance(value, int) else {int(x) for x in value.unique()}
    (step,) = steps
    return step


@pytest.mark.kill
@pytest.mark.timeout(0)
def test_killed_ranks(tmp_path: Path) -> None:
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    chance, last = random.Random(SEED), 0
    folder = tmp_path / "checkpoint"
    for _ in range(ROUNDS):
        kill_one(tmp_path, chance.choice((2, 4)), last + 1, chance)
        step = saved_step(folder)
        assert step >= last
        last = step
    assert last > 0
    # A save that ends leaves nothing of those that were killed.
    dcp.save(step_of_rank(0, last + 1), storage_writer=StorageWriter(folder), no_dist=True)
    metadata, _file = sorted(path.name for path in folder.iterdir())
    assert metadata == ".metadata"
