"""transformers' Trainer with ptsave's checkpoints: resumed exactly, complete or not there."""

from __future__ import annotations

import io
import os
import shutil
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip_middle
from client_checkpoints import (
    assert_same_state,
    killed_by_itself,
    names_written_by_the_engine,
    share_of_the_engine,
)
from tiny_trainers import (
    N_STEPS,
    assert_same_checkpoint,
    imported_transformers,
    make_trainer,
    state_of,
)

import ptsave
from ptsave.integrations import staged_folders
from ptsave.integrations.staged_folders import FolderSaves, StagedFolder, writes_in_background

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return imported_transformers()


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


def test_folder_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, exchanges in enumerate((True, False)):
        if not exchanges:
            monkeypatch.setattr(staged_folders, "_exchange", lambda *_: False)
        folder = StagedFolder(str(tmp_path / "c"), fsync=True)
        os.makedirs(folder.path)
        Path(folder.path, f"new-{number}").touch()
        folder.publish()
        assert os.listdir(tmp_path) == ["c"]
        assert os.listdir(tmp_path / "c") == [f"new-{number}"]


def remove_leftovers(folder: Path) -> None:
    for leftover in FolderSaves().leftovers(str(folder), "checkpoint-"):
        leftover.discard_leftover()


def test_leftovers_of_others_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-3.ptsave" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / ".other").mkdir()
    remove_leftovers(tmp_path)
    assert FolderSaves().leftovers(str(tmp_path / "none"), "checkpoint-") == []
    assert os.listdir(tmp_path) == [".other"]


def test_killed_save(tmp_path: Path) -> None:
    script = """
import os, signal, sys, torch
from ptsave.integrations.staged_folders import *
from ptsave.integrations.staged_folders import *
folder = StagedFolder(sys.argv[1], fsync=False)
saves = FolderSaves()
for number in range(2):
    os.makedirs(folder.path)
    with writes_in_background(folder, fsync=False) as futures:
        for name in "ab":
            torch.save({"n": number, "w": torch.ones(1 << 22)}, f"{folder.path}/{name}")
    assert len(futures) == 2
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    saves.commit(folder, futures, lambda: None)
    saves.wait()
"""
    killed_by_itself(script, tmp_path / "c")
    assert {ptsave.load(tmp_path / "c" / name)["n"] for name in "ab"} == {0}


def test_files_are_written_after_all_copies(tmp_path: Path) -> None:
    folder = StagedFolder(str(tmp_path / "c"), fsync=False)
    os.makedirs(folder.path)
    with writes_in_background(folder, fsync=False) as futures:
        for name in "ab":
            torch.save({"w": torch.ones(1000)}, f"{folder.path}/{name}")
        other = ptsave.async_save(torch.ones(1), io.BytesIO())  # written in the order of the calls
        with ThreadPoolExecutor(1) as thread, pytest.raises(FutureTimeoutError):
            thread.submit(other.exception, 0.2).result()
        assert os.listdir(folder.path) == []
    for future in futures:
        future.result(20)
    assert sorted(os.listdir(folder.path)) == ["a", "b"]


def test_without_room_files_are_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 4 << 20
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", str(nbytes + (1 << 16)))
    folder = StagedFolder(str(tmp_path / "c"), fsync=False)
    os.makedirs(folder.path)
    with writes_in_background(folder, fsync=False) as futures:
        for name in "abc":
            torch.save({"w": torch.ones(nbytes // 4)}, f"{folder.path}/{name}")
        assert len(futures) == 3
        assert futures[0].done()
    saves = FolderSaves()
    saves.commit(folder, futures, lambda: None)
    saves.wait()
    assert sorted(os.listdir(tmp_path / "c")) == ["a", "b", "c"]


def test_wait_in_the_block_lets_files_be_written(tmp_path: Path) -> None:
    folder = StagedFolder(str(tmp_path / "c"), fsync=False)
    with writes_in_background(folder, fsync=False):
        ptsave.async_save(torch.ones(1), tmp_path / "other").result(20)


def test_cancelled_save_is_no_checkpoint(tmp_path: Path) -> None:
    folder = StagedFolder(str(tmp_path / "c"), fsync=False)
    os.makedirs(folder.path)
    saves = FolderSaves()
    with writes_in_background(folder, fsync=False) as futures:
        torch.save({"w": torch.ones(1000)}, f"{folder.path}/a")
        saves.commit(folder, futures, lambda: None)
        assert futures[0].cancel()
    with pytest.raises(CancelledError):
        saves.wait()
    assert os.listdir(tmp_path) == []


def test_error_in_the_block_ends_its_saves(tmp_path: Path) -> None:
    folder = StagedFolder(str(tmp_path / "c"), fsync=False)
    os.makedirs(folder.path)
    begun: list[ptsave.SaveFuture] = []

    def save_and_fail() -> None:
        with writes_in_background(folder, fsync=False) as futures:
            for name in "ab":
                torch.save({"w": torch.ones(1 << 22)}, f"{folder.path}/{name}")
            begun.extend(futures)
            raise KeyError

    with pytest.raises(KeyError):
        save_and_fail()
    assert [future.done() for future in begun] == [True, True]


def test_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_folders, "_exchange", lambda *_: False)
    folder = StagedFolder(str(tmp_path / "checkpoint-1"), fsync=False)
    os.makedirs(folder.path)
    os.makedirs(folder.final)
    Path(folder.final, "old").touch()
    rename = os.rename

    def killed(path: str, other: str) -> None:
        if folder.final in (path, other) and not os.path.exists(folder.final):
            os._exit(9)
        rename(path, other)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "rename", killed)
        folder.publish()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not os.path.exists(folder.final)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert os.listdir(folder.final) == ["old"]
