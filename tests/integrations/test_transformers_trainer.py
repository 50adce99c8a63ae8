"""transformers' Trainer with ptsave's checkpoints: resumed exactly, complete or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from client_checkpoints import (
    assert_same_state,
    names_written_by_the_engine,
    share_of_the_engine,
)
from tiny_trainers import (
    N_STEPS,
    assert_same_checkpoint,
    make_trainer,
    state_of,
)

import ptsave
from ptsave.integrations.staged_folders import StagedFolder

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(scope="module")
def stock(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stock")
    trained = make_trainer(transformers, "stock", folder)
    trained.train()
    return {"state": state_of(trained), "folder": folder}


@pytest.mark.parametrize("kind", ["blocking", "background"])
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


@pytest.mark.parametrize("kind", ["blocking", "background"])
def test_best_model(kind: str, transformers: Any, tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    }
    trained = make_trainer(transformers, kind, tmp_path, **options)
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


@pytest.mark.parametrize("kind", ["blocking", "background"])
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


@pytest.mark.parametrize("kind", ["blocking", "background"])
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
