"""Ranks that do not answer, and jobs that share a directory: errors, no hang, whole checkpoints."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import QUIET, dcp
from forked_ranks import ForkedRanks
from torch.distributed.checkpoint import utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

import ptsave
from ptsave.distributed import StorageReader, StorageWriter

TIMEOUT_S = 1.5
pytestmark = QUIET


def state(rank: int, step: float) -> dict[str, Any]:
    return {f"a-{rank}": torch.full((5000,), step), f"step-{rank}": step, "same": torch.ones(3)}


def steps_in(folder: Path, n_ranks: int) -> set[float]:
    """Return the steps of a checkpoint's values, all of which have to be there."""
    target: dict[str, Any] = {}
    for rank in range(n_ranks):
        target.update(state(rank, 0.0))
    dcp.load(target, storage_reader=StorageReader(folder), no_dist=True)
    found: set[float] = set()
    for name, value in target.items():
        if name != "same":
            found |= {float(x) for x in value.unique()} if name[0] == "a" else {value}
    return found


class SlowWriter(StorageWriter):
    """Writes after the group has given up."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(2 * TIMEOUT_S)
        return super().write_data(plan, planner)


class SlowReader(StorageReader):
    """Reads after the group has given up."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(2 * TIMEOUT_S)
        return super().read_data(plan, planner)


def test_ranks_that_do_not_answer(tmp_path: Path) -> None:
    """An error on every rank in the group's time, and the old checkpoint stays."""

    def run(slow: int, saves: bool) -> tuple[Path, ForkedRanks]:
        """Begin two ranks of which one is slow."""
        folder = tmp_path / f"{slow}-{saves}"
        folder.mkdir()

        def call(rank: int) -> None:
            if saves:
                writer = (SlowWriter if rank == slow else StorageWriter)(folder / "checkpoint")
                dcp.save(state(rank, 2.0), storage_writer=writer)
            else:
                reader = (SlowReader if rank == slow else StorageReader)(folder / "checkpoint")
                dcp.load(state(rank, 0.0), storage_reader=reader)

        def act(rank: int) -> None:
            dcp.save(state(rank, 1.0), storage_writer=StorageWriter(folder / "checkpoint"))
            begin = time.monotonic()
            with pytest.raises((RuntimeError, CheckpointException)):
                call(rank)
            assert time.monotonic() - begin < 3 * TIMEOUT_S + 30  # a busy machine
            os._exit(0)  # the group is broken, and would be waited for

        return folder, ForkedRanks(folder, act, timeout_s=TIMEOUT_S)

    for folder, ranks in [run(slow, saves) for slow in (0, 1) for saves in (True, False)]:
        ranks.join()
        assert steps_in(folder / "checkpoint", 2) == {1.0}


def test_two_jobs_save_to_one_path(tmp_path: Path) -> None:
    """Whoever loads finds one job's step, whole; a job that loses is told so on all its ranks."""
    folder = tmp_path / "checkpoint"

    def run(job: int) -> ForkedRanks:
        def act(rank: int) -> None:
            for step in range(10):
                try:
                    writer = StorageWriter(folder, fsync=False)
                    dcp.save(state(rank, job * 100.0 + step), storage_writer=writer)
                except CheckpointException as error:
                    (cause,) = (each for each, _ in error.failures.values())
                    assert isinstance(cause, ptsave.SaveError), cause
                    assert "another save to this directory" in str(cause)

        store = tmp_path / str(job)
        store.mkdir()
        return ForkedRanks(store, act)

    for job in [run(job) for job in range(2)]:
        job.join()
    assert len(steps_in(folder, 2)) == 1
    assert len(list(folder.iterdir())) == 3


def test_collectives_that_fail_under_install(tmp_path: Path) -> None:
    """The error has the type that it had, and names the checkpoint, the rank and the step."""

    class Ending(Stateful):
        """Ends its process where a save asks for the state."""

        def state_dict(self) -> dict[str, Any]:
            os._exit(0)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            os._exit(0)

    def run(lost: int, saves: bool) -> ForkedRanks:
        folder = tmp_path / f"{lost}-{saves}"
        folder.mkdir()
        where = folder / "checkpoint"

        def act(rank: int) -> None:
            ptsave.install(distributed=True)
            dcp.save(state(rank, 1.0), checkpoint_id=where)
            target: dict[str, Any] = state(rank, 2.0)
            if rank == lost:
                target["ending"] = Ending()
            with pytest.raises(RuntimeError) as caught:
                (dcp.save if saves else dcp.load)(target, checkpoint_id=where)
            assert type(caught.value) is type(caught.value.__cause__)
            step = "'plan'|'write'|'read'|'planning'"
            words = rf"{where}: rank {rank} of 3 could not go on( in the step ({step}))?: .*gloo"
            assert re.search(words, str(caught.value)), caught.value
            os._exit(0)  # the group is broken, and would be waited for

        return ForkedRanks(folder, act, 3, timeout_s=TIMEOUT_S)

    for ranks in [run(lost, saves) for lost, saves in ((0, True), (2, True), (1, False))]:
        ranks.join()


def test_other_errors_under_install_are_those_of_torch(tmp_path: Path) -> None:
    ptsave.install(distributed=True)
    try:
        assert dcp.state_dict_saver._DistWrapper.__mro__[1] is utils._DistWrapper
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path / "missing", no_dist=True)
        assert "could not go on" not in str(caught.value)
        alone: dict[str, Any] = {"no_dist": True, "use_collectives": False}
        writer = StorageWriter(tmp_path / "alone", overwrite=False)
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, **alone)
        with pytest.raises(RuntimeError, match=r"^Checkpoint already exists"):
            dcp.save({"a": torch.ones(2)}, storage_writer=writer, **alone)
    finally:
        ptsave.uninstall()
    assert dcp.state_dict_saver._DistWrapper is utils._DistWrapper
