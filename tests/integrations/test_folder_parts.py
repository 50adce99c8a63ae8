"""What ranks tell each other about one folder, without a collective call."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from _system import Child, in_child

import ptsave
from ptsave.integrations.staged_folders import FolderParts, StagedFolder


@pytest.fixture
def folder(tmp_path: Path) -> StagedFolder:
    return StagedFolder(str(tmp_path / "checkpoint-4"), fsync=False)


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
    other._lock._close()  # as the end of its process does
    with pytest.raises(ptsave.SaveError, match=r"rank 1 .* has ended"):
        main.wait()
    child.kill()


def test_two_processes_of_one_rank(folder: StagedFolder) -> None:
    parts = FolderParts(folder, 1, 2)
    with pytest.raises(RuntimeError, match="another process saves as rank 1 of 2"):
        FolderParts(folder, 1, 2)
    parts.tell(None)
