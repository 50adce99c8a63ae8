"""transformers' Trainer with ptsave's checkpoints: resumed exactly, complete or not there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from client_checkpoints import assert_same_state, names_written_by_the_engine, share_of_the_engine
from forked_ranks import ForkedRanks
from tiny_trainers import N_STEPS, assert_same_checkpoint, make_trainer, state_of

import ptsave
from ptsave.integrations.staged_folders import StagedFolder
from ptsave.writing.targets import FileWriter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]
KINDS = ("blocking", "background")
BEST_MODEL: dict[str, Any] = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "save_total_limit": 1,
}


@pytest.fixture(scope="module")
def stock(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stock")
    trained = make_trainer(transformers, "stock", folder)
    trained.train()
    return {"state": state_of(trained), "folder": folder}


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_exactly(kind: str, transformers: Any, stock: Any, tmp_path: Path) -> None:
    trained = make_trainer(transformers, kind, tmp_path)
    trained.train()
    assert_same_state(state_of(trained), stock["state"])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-4", "checkpoint-6"]
    assert_same_checkpoint(tmp_path / "checkpoint-6", stock["folder"] / "checkpoint-6")
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = make_trainer(transformers, kind, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same_state(state_of(resumed), stock["state"])
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-6")
    assert_same_state(read.state_dict(), stock["state"]["model"])


def test_stock_trainer_resumes_from_it(transformers: Any, stock: Any, tmp_path: Path) -> None:
    make_trainer(transformers, "background", tmp_path, max_steps=N_STEPS).train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = make_trainer(transformers, "stock", tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_state(state_of(resumed), stock["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_best_model(kind: str, transformers: Any, tmp_path: Path) -> None:
    trained = make_trainer(transformers, kind, tmp_path, **BEST_MODEL)
    trained.train()
    best = trained.state.best_model_checkpoint
    assert os.path.dirname(best) == str(tmp_path)
    assert os.listdir(tmp_path) == [os.path.basename(best)]
    read = transformers.GPT2LMHeadModel.from_pretrained(best)
    assert_same_state(read.state_dict(), trained.model.state_dict())
    state = transformers.TrainerState.load_from_json(os.path.join(best, "trainer_state.json"))
    assert state.best_model_checkpoint == best


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_damaged_file(name: str, transformers: Any, tmp_path: Path) -> None:
    make_trainer(transformers, "blocking", tmp_path, max_steps=2).train()
    flip_middle(tmp_path / "checkpoint-2" / name, "data/0")
    resumed = make_trainer(transformers, "blocking", tmp_path)
    with pytest.raises(ptsave.CorruptCheckpointError, match=name.replace(".", r"\.")):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_save(
    kind: str, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = make_trainer(transformers, kind, tmp_path)
    publish = StagedFolder.publish

    def fail(folder: StagedFolder) -> None:
        if folder.final.endswith("-4"):
            raise OSError(28, "No space left on device")
        publish(folder)

    monkeypatch.setattr(StagedFolder, "publish", fail)
    with pytest.raises(OSError, match="No space left"):
        trained.train()
    assert "checkpoint-4" not in os.listdir(tmp_path)
    assert "checkpoint-2" in os.listdir(tmp_path)
    assert torch.save is not ptsave.save


def test_all_bytes_go_through_the_engine(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = names_written_by_the_engine(monkeypatch)
    for kind in ("blocking", "background"):
        written.clear()
        make_trainer(transformers, kind, tmp_path, max_steps=2).train()
        assert sorted(written) == [
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
            "training_args.bin",
        ]
        assert share_of_the_engine(tmp_path / "checkpoint-2", written) >= 0.99


# ------------------------------------------------------------------------------------- the folders


@pytest.mark.parametrize("kind", ["stock", "blocking", "background"])
def test_file_of_that_name_stays(kind: str, transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").write_text("mine")
    with pytest.raises(FileExistsError, match="checkpoint-2"):
        make_trainer(transformers, kind, tmp_path).train()
    assert (tmp_path / "checkpoint-2").read_text() == "mine"
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_process_saves_there(kind: str, transformers: Any, tmp_path: Path) -> None:
    """Its folders stay, and of the same checkpoint there is one."""
    others = [StagedFolder(str(tmp_path / f"checkpoint-{n}"), fsync=False) for n in (2, 3)]
    for other in others:
        other.claim()
        os.makedirs(other.path)
    trainer = make_trainer(transformers, kind, tmp_path, max_steps=2)
    with pytest.raises(ptsave.SaveError, match=r"another process is saving there.*checkpoint-2"):
        trainer.train()
    assert all(os.path.isdir(other.path) for other in others)
    others[0].discard()
    make_trainer(transformers, kind, tmp_path, max_steps=2).train()
    assert os.path.isdir(others[1].path)
    others[1].discard()
    assert os.listdir(tmp_path) == ["checkpoint-2"]


# -------------------------------------------------------------------------------- two ranks (DDP)


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
def stock_ranks(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = Job(transformers, "stock", tmp_path_factory.mktemp("stock"))
    return {"states": job.run(), "folder": job.folder}


def assert_same_states(found: list[Any], expected: list[Any]) -> None:
    for rank, (each, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_state(each, other, f"rank {rank}")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_resume_exactly(
    kind: str, transformers: Any, stock_ranks: Any, tmp_path: Path
) -> None:
    job = Job(transformers, kind, tmp_path)
    assert_same_states(job.run(), stock_ranks["states"])
    assert job.names() == ["checkpoint-4", "checkpoint-6"]
    for name in job.names():
        assert_same_checkpoint(job.folder / name, stock_ranks["folder"] / name)
    shutil.rmtree(job.folder / "checkpoint-6")
    assert_same_states(job.run(resume=True), stock_ranks["states"])
    assert job.names() == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("kind", KINDS)
def test_best_model_of_ranks(kind: str, transformers: Any, tmp_path: Path) -> None:
    job = Job(transformers, kind, tmp_path)
    states = job.run(**BEST_MODEL)
    assert_same_state(states[0]["model"], states[1]["model"])
    assert len(states[0]["model"]) > 20
    (name,) = job.names()
    read = transformers.GPT2LMHeadModel.from_pretrained(job.folder / name)
    assert_same_state(read.state_dict(), states[0]["model"])


def failing_with(rank: int, name: str, fail: Callable[[], object]) -> Callable[[int], None]:
    """Return what lets a rank fail to write a file of the checkpoint of step 4."""

    def begin(this_rank: int) -> None:
        write = FileWriter.write_file

        def write_file(writer: FileWriter, path: str) -> None:
            if "checkpoint-4" in path and os.path.basename(path) == name:
                fail()
            write(writer, path)

        if this_rank == rank:
            FileWriter.write_file = write_file  # type: ignore[method-assign, assignment]

    return begin


def raise_full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_error_of_one_rank(
    kind: str, rank: int, transformers: Any, stock_ranks: Any, tmp_path: Path
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
        assert_same_states(job.run(resume=True), stock_ranks["states"])


def test_rank_that_dies(transformers: Any, stock_ranks: Any, tmp_path: Path) -> None:
    """The others' next exchange fails, and the checkpoint that lacks its part does not count."""
    job = Job(transformers, "background", tmp_path)
    die = failing_with(1, "rng_state_1.pth", lambda: os.kill(os.getpid(), signal.SIGKILL))
    found = job.run(before=die)
    assert isinstance(found[0], str)
    assert found[1] is None
    assert job.names() == ["checkpoint-2"]
    assert_same_states(job.run(resume=True), stock_ranks["states"])
