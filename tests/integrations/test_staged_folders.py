"""Directories that appear complete under their name, and what ranks tell each other about one."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child, in_child
from client_checkpoints import killed_by_itself

import ptsave
from ptsave.integrations import staged_folders
from ptsave.integrations.staged_folders import (
    FolderParts,
    FolderSaves,
    StagedFolder,
    in_place_of,
    writes_in_background,
)


@pytest.fixture
def folder(tmp_path: Path) -> StagedFolder:
    made = StagedFolder(str(tmp_path / "checkpoint-4"), fsync=False)
    os.makedirs(made.path)
    return made


def test_old_files_do_not_go_through_a_link_of_the_new_checkpoint(tmp_path: Path) -> None:
    for name in ("state/part", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "state" / "part" / "old").touch()
    folder = StagedFolder(str(tmp_path / "state"), fsync=False, keeps_others=True)
    folder.claim()
    os.makedirs(folder.path)
    os.symlink(tmp_path / "elsewhere", os.path.join(folder.path, "part"))
    folder.publish()
    assert (tmp_path / "state" / "part").is_symlink()
    assert not os.listdir(tmp_path / "elsewhere")


def test_a_replacement_made_in_the_block_stays() -> None:
    functions: list[Any] = [torch.save, torch.load]  # the latter for any other function
    save, another = functions
    with in_place_of(save, lambda: None):
        torch.save = another
    found, torch.save = torch.save, save
    assert found is another


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


def test_files_are_written_after_all_copies(folder: StagedFolder, tmp_path: Path) -> None:
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
    folder: StagedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 4 << 20
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", str(nbytes + (1 << 16)))
    with writes_in_background(folder, fsync=False) as futures:
        for name in "abc":
            torch.save({"w": torch.ones(nbytes // 4)}, f"{folder.path}/{name}")
        assert len(futures) == 3
        assert futures[0].done()
    saves = FolderSaves()
    saves.commit(folder, futures, lambda: None)
    saves.wait()
    assert sorted(os.listdir(folder.final)) == ["a", "b", "c"]


def test_wait_in_the_block_lets_files_be_written(folder: StagedFolder, tmp_path: Path) -> None:
    with writes_in_background(folder, fsync=False):
        ptsave.async_save(torch.ones(1), tmp_path / "other").result(20)


def test_cancelled_save_is_no_checkpoint(folder: StagedFolder, tmp_path: Path) -> None:
    saves = FolderSaves()
    with writes_in_background(folder, fsync=False) as futures:
        torch.save({"w": torch.ones(1000)}, f"{folder.path}/a")
        saves.commit(folder, futures, lambda: None)
        assert futures[0].cancel()
    with pytest.raises(CancelledError):
        saves.wait()
    assert os.listdir(tmp_path) == []


def test_error_in_the_block_ends_its_saves(folder: StagedFolder) -> None:
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


def test_killed_between_two_renames(
    folder: StagedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_folders, "_exchange", lambda *_: False)
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
    assert os.listdir(tmp_path) == ["checkpoint-4"]
    assert os.listdir(folder.final) == ["old"]


# ----------------------------------------------------------------- parts of ranks, without a call


def test_waits_for_all_others(folder: StagedFolder) -> None:
    main, *others = (FolderParts(folder, rank, 3) for rank in range(3))
    waiting = threading.Thread(target=main.wait)
    waiting.start()
    others[0].tell(None)
    waiting.join(0.2)
    assert waiting.is_alive()
    others[1].tell(None)
    waiting.join(20)
    assert not waiting.is_alive()


def test_error_is_quoted_when_all_have_ended(folder: StagedFolder) -> None:
    main, *others = (FolderParts(folder, rank, 3) for rank in range(3))
    others[1].tell(OSError(28, "No space left on device", "über" * 5000))
    others[0].tell(None)
    expected = r"checkpoint-4: rank 2 could not write its part of the checkpoint: OSError: .*space"
    with pytest.raises(ptsave.SaveError, match=expected):
        main.wait()


def test_rank_that_has_died(folder: StagedFolder) -> None:
    in_child(lambda: FolderParts(folder, 1, 2))
    main = FolderParts(folder, 0, 2)
    with pytest.raises(ptsave.SaveError, match=r"rank 1 .* has ended"):
        main.wait()


def test_child_of_a_rank_holds_nothing(folder: StagedFolder) -> None:
    """A worker that is forked meanwhile lives on, and the rank has ended all the same."""
    main, other = (FolderParts(folder, rank, 2) for rank in range(2))
    child = Child(threading.Event().wait)
    other._lock.close()  # as the end of its process does
    with pytest.raises(ptsave.SaveError, match=r"rank 1 .* has ended"):
        main.wait()
    child.kill()


def test_two_processes_of_one_rank(folder: StagedFolder) -> None:
    parts = FolderParts(folder, 1, 2)
    with pytest.raises(RuntimeError, match="saves as rank 1 of 2"):
        FolderParts(folder, 1, 2)
    parts.tell(None)
