"""Another save replaces a checkpoint while it is read: the old one, the new one, or an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import QUIET, dcp
from forked_ranks import ForkedRanks
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

import ptsave
from ptsave.contents import dcp as dcp_contents
from ptsave.dcp import rank_files
from ptsave.dcp.metadata import load_metadata
from ptsave.distributed import StorageReader, StorageWriter

pytestmark = QUIET


def save(folder: Path, value: float, *, stock: bool = False) -> None:
    state = {"a": torch.full((5000,), value), "step": value}
    writer = dcp.FileSystemWriter(folder) if stock else StorageWriter(folder, fsync=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


class Replacing:
    """Saves again, so many times, whenever something is called."""

    def __init__(self, folder: Path, times: int = 1) -> None:
        self._folder = folder
        self._left = times
        self.last = 1.0
        save(folder, self.last)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._left:
                self._left -= 1
                self.last += 1
                save(self._folder, self.last)
            return function(*args, **options)

        return call


def is_replaced(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def zeros() -> dict[str, Any]:
    return {"a": torch.zeros(5000), "step": 0.0}


def errors_of_load(
    target: dict[str, Any], folder: Path, reader: Any = StorageReader, **options: Any
) -> list[BaseException]:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=reader(folder), **options)
    return [error for error, _ in caught.value.failures.values()]


def test_a_load_of_what_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    replacing = Replacing(folder)
    monkeypatch.setattr(StorageReader, "read_data", replacing.before(StorageReader.read_data))
    target = zeros()
    (error,) = errors_of_load(target, folder, no_dist=True)
    assert is_replaced(error)
    assert str(folder) in str(error)
    assert target["a"].eq(0).all()
    dcp.load(target, storage_reader=StorageReader(folder), no_dist=True)
    assert target["a"].eq(replacing.last).all()
    # A file that is missing without a replacement is missing.
    next(folder.glob("*.distcp")).unlink()
    (error,) = errors_of_load(target, folder, no_dist=True)
    assert isinstance(error, FileNotFoundError)


def test_files_of_torch_that_are_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, 1.0, stock=True)
    read = rank_files.RankFiles.read

    def replace(files: Any, boxes: Any) -> None:
        read(files, boxes)
        save(folder, 2.0, stock=True)

    monkeypatch.setattr(rank_files.RankFiles, "read", replace)
    assert all(map(is_replaced, errors_of_load(zeros(), folder, no_dist=True)))


def test_ranks_that_have_read_different_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, 1.0)

    class Late(StorageReader):
        """Of the second rank: reads when another save has ended."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            first = distributed.get_rank() == 0
            metadata = super().read_metadata(*args, **kwargs) if first else None
            distributed.barrier()
            if first:
                return metadata
            save(folder, 2.0)
            return super().read_metadata(*args, **kwargs)

    def load(rank: int) -> None:
        target = zeros()
        assert all(map(is_replaced, errors_of_load(target, folder, Late)))
        assert target["a"].eq(0).all()
        distributed.barrier()
        dcp.load(target, storage_reader=StorageReader(folder))
        assert target["a"].eq(2).all()

    ForkedRanks(tmp_path, load).join()


def test_tools_go_on_with_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    replacing = Replacing(folder, 3)
    load = replacing.before(load_metadata)

    def late(*args: Any, **options: Any) -> Any:  # what is old by the time it has been read
        metadata = load_metadata(*args, **options)
        load(*args, **options)
        return metadata

    monkeypatch.setattr("ptsave.dcp.checkpoint.load_metadata", late)
    with ptsave.open(folder) as archive:
        assert archive["a"].eq(replacing.last).all()
        assert archive["step"] == replacing.last == 4.0
        monkeypatch.undo()
        save(folder, 5.0)
        with pytest.raises(OSError, match="replaced the checkpoint") as caught:
            archive.get_tensor("a")
        assert is_replaced(caught.value)
        assert caught.value.filename == os.fspath(folder)


def test_tools_open_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    replacing = Replacing(folder, 2)
    objects = replacing.before(dcp_contents.DcpContents._objects)
    monkeypatch.setattr(dcp_contents.DcpContents, "_objects", objects)
    with ptsave.open(folder) as archive:
        assert archive["a"].eq(3).all()
    replacing = Replacing(folder, 99)
    objects = replacing.before(dcp_contents.DcpContents._objects)
    monkeypatch.setattr(dcp_contents.DcpContents, "_objects", objects)
    with pytest.raises(OSError, match="replaced the checkpoint"):
        ptsave.open(folder)
