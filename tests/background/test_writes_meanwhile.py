"""Saves whose copies are slow: they are written while they are made."""

from __future__ import annotations

import io
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _system import Child, eventually, mounted, needs_root
from safetensors.torch import save_file
from stock_comparison import stock_save

import ptsave
from ptsave import _C
from ptsave.background import save_future
from ptsave.background import saves as background
from ptsave.background.async_safetensors import async_save_safetensors
from ptsave.background.save_future import SaveFuture

MIB = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Return 40 MiB: a large tensor, small ones before and after it, and some that share."""
    large = torch.randn(10 * MIB)
    small = {f"small {i}": torch.full((7,), float(i)) for i in range(1000)}
    views = {"view": large[5:99:2], "expanded": torch.ones(1).expand(9), "empty": torch.empty(0)}
    return {"first": torch.arange(9.0), "large": large, **small, **views}


def stock_bytes(obj: object, folder: Path) -> bytes:
    """Return the file that stock torch writes."""
    (folder / "stock").mkdir()
    stock_save(obj, folder / "stock" / "file.pt")
    return (folder / "stock" / "file.pt").read_bytes()


def begin(kind: str, values: Any, path: Path, *, fsync: bool = False) -> SaveFuture:
    """Begin to save values as a torch archive or as a safetensors file."""
    if kind == "pt":
        return ptsave.async_save(values, path, fsync=fsync)
    return async_save_safetensors(apart(values), os.fspath(path), {"format": "pt"}, fsync=fsync)


def apart(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of which each is all of its own storage, as a safetensors file needs them."""
    return {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()
    }


def file_bytes(kind: str, values: Any, folder: Path) -> bytes:
    """Return the file that the library of this kind writes."""
    if kind == "pt":
        return stock_bytes(values, folder)
    save_file(apart(values), folder / "stock", {"format": "pt"})
    return (folder / "stock").read_bytes()


class Slow:
    """How the next copy goes: called when it has turned out to be slow."""

    def __init__(self) -> None:
        self.is_written: Callable[[], bool] = lambda: True
        self.has_writer = True  # what the copy is told
        self.error: BaseException | None = None

    def __call__(self) -> None:
        eventually(self.is_written)


@pytest.fixture
def slow(_everything_ends: None, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Let each copy begin after the write."""
    slow = Slow()

    class SlowSnapshot(_C.Snapshot):  # type: ignore[misc]
        def copy(
            self, *, n_threads: int, progress: Any, when_slow: Callable[[], bool] | None = None
        ) -> None:
            assert when_slow is not None
            assert when_slow() is slow.has_writer
            slow()

            def progress_or_error(nbytes: int) -> None:
                progress(nbytes)
                if slow.error is not None:
                    raise slow.error

            if slow.error is not None:
                n_threads = 0  # then it looks after each piece
            super().copy(n_threads=n_threads, progress=progress_or_error)

    monkeypatch.setattr(_C, "Snapshot", SlowSnapshot)
    return slow


@pytest.fixture(params=["pt", "safetensors"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of file that is saved."""
    return str(request.param)


def has_begun(folder: Path) -> Callable[[], bool]:
    """Return whether a new file is being written beside others."""
    before = set(os.listdir(folder))
    return lambda: bool(set(os.listdir(folder)) - before)


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_the_file_has_what_there_was_at_the_call(tmp_path: Path, slow: Slow, staging: Any) -> None:
    values = tensors()
    expected = stock_bytes(values, tmp_path)
    slow.is_written = has_begun(tmp_path)
    for _ in range(2):
        future = ptsave.async_save(values, tmp_path / "file.pt", staging=staging)
        future.wait_staged(30)
        kept = {name: value.clone() for name, value in values.items()}
        values["large"].zero_()
        values["small 3"].zero_()
        future.result(30)
        assert (tmp_path / "file.pt").read_bytes() == expected
        (tmp_path / "file.pt").unlink()
        values["large"].copy_(kept["large"])
        values["small 3"].copy_(kept["small 3"])


@pytest.mark.parametrize("error", [RuntimeError("no copy"), KeyboardInterrupt()])
def test_a_copy_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, slow: Slow, kind: str, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    slow.is_written = has_begun(tmp_path)
    slow.error = error
    with pytest.raises(type(error)):
        begin(kind, tensors(), path)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"before"
    assert save_future._unseen_failures == {}


def test_a_copy_that_fails_before_its_turn(tmp_path: Path, slow: Slow) -> None:
    free = threading.Event()

    def wait() -> None:
        free.wait(30)

    background._writing.put(wait)
    slow.error = RuntimeError("no copy")
    try:
        with pytest.raises(RuntimeError, match="no copy"):
            ptsave.async_save(tensors(), tmp_path / "file.pt")
        assert os.listdir(tmp_path) == []
    finally:
        free.set()


def test_a_write_that_fails_is_told_by_the_future(tmp_path: Path, slow: Slow, kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    has_begun_there = has_begun(folder)

    def is_written() -> bool:
        if not has_begun_there():
            return False
        subprocess.run(["rm", "-r", str(folder)], check=True)
        return True

    slow.is_written = is_written
    future = begin(kind, tensors(), folder / "file")
    with pytest.raises(ptsave.SaveError) as caught:
        future.result(30)
    descriptors = os.scandir("/proc/self/fd")
    open_files = {os.readlink(entry) for entry in descriptors if os.path.islink(entry)}
    assert not any(str(folder) in name for name in open_files), "the disk keeps what was written"
    assert caught.value.__traceback__ is not None  # which refers to the save


@needs_root
def test_a_file_that_can_only_be_overwritten(tmp_path: Path, slow: Slow, kind: str) -> None:
    slow.is_written = has_begun(tmp_path)
    path, behind = tmp_path / "file.pt", tmp_path / "behind"
    path.touch()
    behind.write_bytes(b"before")
    values = tensors()
    with mounted(path, "--bind", behind):
        begin(kind, values, path).result(30)
    assert behind.read_bytes() == file_bytes(kind, values, tmp_path)


@pytest.mark.parametrize("target", ["in place", "stream", "url", "small"])
def test_other_targets_are_written_after_the_copy(tmp_path: Path, slow: Slow, target: str) -> None:
    values = tensors() if target != "small" else {"a": torch.ones(3)}
    path = tmp_path / "file.pt"
    stream = io.BytesIO()
    files = {"stream": stream, "url": "memory://written meanwhile/file.pt"}
    file: Any = files.get(target, path)
    path.write_bytes(b"before")

    def is_as_before() -> bool:
        time.sleep(0.1)
        return os.listdir(tmp_path) == ["file.pt"] and path.read_bytes() == b"before"

    slow.is_written = is_as_before
    slow.has_writer = False
    ptsave.async_save(values, file, atomic=target != "in place").result(30)
    if target == "stream":
        path.write_bytes(stream.getvalue())
    elif target == "url":
        fsspec.filesystem("memory").get(file, os.fspath(path))
    loaded = torch.load(path)
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_a_safetensors_file_has_what_there_was_at_the_call(tmp_path: Path, slow: Slow) -> None:
    small = {f"z{i}": torch.full((7,), i, dtype=torch.int16) for i in range(1000)}
    values = {
        **small,
        "b": torch.randn(6 * MIB),
        "a": torch.randn(1025, 4097).bfloat16(),
        "c": torch.zeros(3, 0),
        "d": torch.arange(5),
    }
    save_file(values, tmp_path / "stock", {"format": "pt"})
    slow.is_written = has_begun(tmp_path)
    future = async_save_safetensors(values, f"{tmp_path}/file.safetensors", {"format": "pt"})
    for value in values.values():
        value.zero_()
    future.result(30)
    assert (tmp_path / "file.safetensors").read_bytes() == (tmp_path / "stock").read_bytes()


def test_a_source_may_be_the_target(tmp_path: Path, slow: Slow) -> None:
    path = tmp_path / "file.pt"
    values = tensors()
    stock_save(values, path)
    expected = path.read_bytes()
    mapped = torch.load(path, mmap=True)
    slow.is_written = has_begun(tmp_path)
    ptsave.async_save(mapped, path).result(30)
    assert path.read_bytes() == expected
    assert torch.equal(mapped["large"], values["large"])


def test_fsync_reaches_a_write_that_has_begun(
    tmp_path: Path, slow: Slow, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plan_type: Any = _C.WritePlan if kind == "pt" else _C.PackedPlan
    write_file = plan_type.write_file

    def watched(plan: Any, *args: Any, durable: bool, **others: Any) -> None:
        seen.append(durable)
        write_file(plan, *args, durable=durable, **others)

    monkeypatch.setattr(plan_type, "write_file", watched)
    slow.is_written = has_begun(tmp_path)
    begin(kind, tensors(), tmp_path / "file", fsync=True).result(30)
    assert seen == [True]


@needs_root
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, slow: Slow, kind: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    values = {"a": torch.randn(10 * MIB)}
    with mounted(folder, "-t", "tmpfs", "-o", "size=20m", "none"):
        path = folder / "file"
        path.write_bytes(b"before")
        future = begin(kind, values, path)
        with pytest.raises(ptsave.SaveError, match="No space left"):
            future.result(30)
        assert os.listdir(folder) == ["file"]
        assert path.read_bytes() == b"before"
        del future


def test_saves_are_written_in_their_order(tmp_path: Path, slow: Slow, kind: str) -> None:
    futures = []
    ended: list[int] = []
    values = tensors()
    for i in range(4):
        values["first"].fill_(i)
        future = begin(kind, values, tmp_path / "file")
        future.add_done_callback(lambda _, i=i: ended.append(i))  # type: ignore[misc]
        futures.append(future)
    for future in futures:
        future.result(30)
    assert ended == [0, 1, 2, 3]
    assert (tmp_path / "file").read_bytes() == file_bytes(kind, values, tmp_path)


def test_a_folder_is_refused(tmp_path: Path, slow: Slow, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"before")
    slow.has_writer = False
    with pytest.raises(ptsave.SaveError, match="directory"):
        begin(kind, tensors(), tmp_path / "folder").result(30)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_a_process_may_fork_while_a_writer_waits_for_the_copy(
    tmp_path: Path, slow: Slow, kind: str
) -> None:
    values = tensors()
    expected = file_bytes(kind, values, tmp_path)
    is_begun = has_begun(tmp_path)

    def fork_then() -> bool:
        if not is_begun():
            return False
        Child(lambda: ptsave.save(values, tmp_path / "child.pt")).join()
        return True

    slow.is_written = fork_then
    begin(kind, values, tmp_path / "file").result(30)
    assert (tmp_path / "file").read_bytes() == expected
    assert torch.equal(ptsave.load(tmp_path / "child.pt")["large"], values["large"])


def test_a_save_of_a_callback_is_written_after_its_copy(tmp_path: Path, slow: Slow) -> None:
    """The thread that would write it makes the copy."""
    (tmp_path / "again").mkdir()
    values = tensors()
    later: list[SaveFuture] = []

    def save_again(_: object) -> None:
        slow.is_written = lambda: True
        slow.has_writer = False
        later.append(ptsave.async_save(values, tmp_path / "again" / "file.pt"))

    future = ptsave.async_save(values, tmp_path / "file.pt")
    future.add_done_callback(save_again)
    future.result(30)
    eventually(lambda: later, 30)
    later[0].result(30)
    assert (tmp_path / "again" / "file.pt").read_bytes() == stock_bytes(values, tmp_path)


def test_without_a_thread_the_call_writes_after_the_copy(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    values = tensors()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    slow.has_writer = False
    future = ptsave.async_save(values, tmp_path / "file.pt")
    assert future.done()
    future.result()
    monkeypatch.undo()
    loaded = torch.load(tmp_path / "file.pt")
    assert torch.equal(loaded["large"], values["large"])
