"""transformers' Trainer on two ranks (DDP) with ptsave's checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import assert_same_state
from forked_ranks import ForkedRanks
from tiny_trainers import (
    assert_same_checkpoint,
    make_trainer,
    state_of,
)

from ptsave.writing.targets import FileWriter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]
KINDS = ("blocking", "background")


class Job:
    """A training on two ranks, each of which tells what came of it."""

    def __init__(self, transformers: Any, kind: str, folder: Path) -> None:
        self._transformers, self._kind = transformers, kind
        self.folder = folder / "run"
        self._told = folder / "told"
        self._told.mkdir(parents=True)

    def run(
        self,
        *,
        resume: bool = False,
        before: Callable[[int], object] = lambda _: None,
        **options: Any,
    ) -> list[Any]:
        """Return the states of both ranks at the end, or their errors."""
        ranks = ForkedRanks(self._told, lambda rank: self._train(rank, resume, before, options))
        for child in ranks.children:
            status, message = child.wait()
            assert status == 0 or os.WIFSIGNALED(status), message
        told = [self._told / f"{rank}.pt" for rank in range(2)]
        found = [torch.load(path, weights_only=False) if path.exists() else None for path in told]
        for path in told:
            path.unlink(missing_ok=True)
        return found

    def _train(
        self, rank: int, resume: bool, before: Callable[[int], object], options: dict[str, Any]
    ) -> None:
        trainer = make_trainer(self._transformers, self._kind, self.folder, **options)
        before(rank)
        try:
            trainer.train(resume_from_checkpoint=True if resume else None)
            found: Any = state_of(trainer)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        torch.save(found, self._told / f"{rank}.pt")

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture(scope="module")
def stock(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = Job(transformers, "stock", tmp_path_factory.mktemp("stock"))
    return {"states": job.run(), "folder": job.folder}


def assert_same_states(found: list[Any], expected: list[Any]) -> None:
    for rank, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_state(each, other, f"rank {rank}")


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_exactly(kind: str, transformers: Any, stock: Any, tmp_path: Path) -> None:
    job = Job(transformers, kind, tmp_path)
    assert_same_states(job.run(), stock["states"])
    assert job.names() == ["checkpoint-4", "checkpoint-6"]
    for name in job.names():
        assert_same_checkpoint(job.folder / name, stock["folder"] / name)
    shutil.rmtree(job.folder / "checkpoint-6")
    assert_same_states(job.run(resume=True), stock["states"])
    assert job.names() == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("kind", KINDS)
def test_best_model(kind: str, transformers: Any, tmp_path: Path) -> None:
    job = Job(transformers, kind, tmp_path)
    states = job.run(
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        save_total_limit=1,
    )
    assert_same_state(states[0]["model"], states[1]["model"])
    assert len(states[0]["model"]) > 20
    (name,) = job.names()
    read = transformers.GPT2LMHeadModel.from_pretrained(job.folder / name)
    assert_same_state(read.state_dict(), states[0]["model"])


def failing_with(rank: int, name: str, fail: Callable[[], object]) -> Callable[[int], None]:
    """Return what lets a rank fail to write a file of the checkpoint of step 4."""

    def begin(this_rank: int) -> None:
        write = FileWriter.write_path

        def write_path(writer: FileWriter, path: str) -> None:
            if "checkpoint-4" in path and os.path.basename(path) == name:
                fail()
            write(writer, path)

        if this_rank == rank:
            FileWriter.write_path = write_path  # type: ignore[method-assign, assignment]

    return begin


def raise_full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_error_of_one_rank(
    kind: str, rank: int, transformers: Any, stock: Any, tmp_path: Path
) -> None:
    name = ("optimizer.pt", "rng_state_1.pth")[rank]
    job = Job(transformers, kind, tmp_path)
    errors = job.run(before=failing_with(rank, name, raise_full))
    assert "No space left on device" in errors[rank]
    assert errors[1 - rank].startswith("SaveError: ")
    assert f"rank {rank} could not" in errors[1 - rank]
    assert "No space left on device" in errors[1 - rank]
    assert "checkpoint-2" in job.names()
    assert not {"checkpoint-4", ".checkpoint-4.ptsave"} & set(job.names())
    if rank:
        shutil.rmtree(job.folder / "checkpoint-6", ignore_errors=True)
        assert_same_states(job.run(resume=True), stock["states"])


def test_rank_that_dies(transformers: Any, stock: Any, tmp_path: Path) -> None:
    """The others' next exchange fails, and the checkpoint that lacks its part does not count."""
    job = Job(transformers, "background", tmp_path)
    die = failing_with(1, "rng_state_1.pth", lambda: os.kill(os.getpid(), signal.SIGKILL))
    found = job.run(before=die)
    assert isinstance(found[0], str)
    assert found[1] is None
    assert job.names() == ["checkpoint-2"]
    assert_same_states(job.run(resume=True), stock["states"])
