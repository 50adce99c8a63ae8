"""Saves in the background: the file holds what there was at the call, and the future tells all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import io
import itertools
import os
import resource
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pickling import PICKLED, QUIET, cycles
from _system import Gate, eventually, in_threads
from stock_comparison import assert_same_failure, saved_bytes, stock_load, stock_save

import ptsave
from ptsave import _C
from ptsave.background import save_future
from ptsave.background import saves as background

pytestmark = [*QUIET, pytest.mark.usefixtures("_everything_ends")]

MIB = 1 << 20
STAGINGS: list[Any] = ["blocking", "background"]
ANSWERS_TO_FULL: list[Any] = ["wait", "raise"]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Hold up all saves after the one to this file."""
    gate = Gate()
    yield gate
    gate.opened.set()


def hold_up_staging() -> threading.Event:
    """Let nothing be staged in the background before the event is set."""
    free = threading.Event()

    def wait() -> None:
        free.wait(30)

    background._staging.put(wait)
    return free


def staged_copy(obj: object, staging: Any = "blocking", **options: Any) -> bytes:
    """Save to memory in the background."""
    stream = io.BytesIO()
    ptsave.async_save(obj, stream, staging=staging, **options).result(30)
    return stream.getvalue()


# ------------------------------------------------------------------------------- the same as stock


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("name", PICKLED)
def test_same_bytes(name: str, staging: Any, tmp_path: Path) -> None:
    obj = PICKLED[name]()
    path, stock_path = tmp_path / "a" / "file.pt", tmp_path / "b" / "file.pt"
    for each in (path, stock_path):
        each.parent.mkdir()
    stock_save(obj, stock_path)
    expected = saved_bytes(stock_save, obj)
    gc.collect()  # torch 2.9's own save leaves storages, and so their files, to the collector
    future = ptsave.async_save(obj, path, staging=staging)
    future.result(30)
    assert path.read_bytes() == stock_path.read_bytes()
    assert future.nbytes == future.nbytes_written == path.stat().st_size
    assert staged_copy(obj, staging) == expected


@pytest.mark.parametrize("number", range(12))
def test_cycles(number: int) -> None:
    obj = list(cycles())[number]
    assert staged_copy(obj) == saved_bytes(stock_save, obj)


@pytest.mark.parametrize("options", [{"pickle_protocol": 4}, {"_disable_byteorder_record": True}])
def test_options_of_torch(options: dict[str, Any]) -> None:
    obj = {"tensor": torch.arange(100), "bytes": b"abc"}
    assert staged_copy(obj, **options) == saved_bytes(stock_save, obj, **options)


def test_options_count_as_they_were(gate: Gate) -> None:
    """Everything that torch lets one set is looked at in the call."""
    obj = {"tensor": torch.arange(10_000)}
    first = ptsave.async_save(obj, gate)
    stream, expected = io.BytesIO(), io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        with torch.serialization.skip_data():
            future = ptsave.async_save(obj, stream)
            stock_save(obj, expected)
    finally:
        torch.serialization.set_crc32_options(True)
    gate.opened.set()
    future.result(30)
    assert stream.getvalue() == expected.getvalue()
    first.result(30)
    assert gate.getvalue() == saved_bytes(stock_save, obj)


def test_kinds_of_memory(tmp_path: Path) -> None:
    stock_save({"t": torch.arange(50_000)}, tmp_path / "source.pt")
    base = torch.arange(3 * MIB, dtype=torch.uint8)
    obj = {
        "mapped": stock_load(tmp_path / "source.pt", mmap=True),
        "numpy": torch.from_numpy(np.arange(1000)),
        "views": [base, base[5:], base.view(3, -1).t(), base[:1].expand(7)],
        "many": [torch.full((i,), i) for i in range(200)],
        "large": torch.arange(9 * MIB, dtype=torch.int32),
        "empty": [torch.zeros(0), torch.zeros(3, 0)],
        "loaded": ptsave.load(tmp_path / "source.pt"),
    }
    for staging in STAGINGS:
        assert staged_copy(obj, staging) == saved_bytes(stock_save, obj)


def test_storages_that_cannot_be_saved() -> None:
    storage = torch.UntypedStorage(3, device="meta")
    assert_same_failure(
        lambda: ptsave.async_save(storage, io.BytesIO()), lambda: stock_save(storage, io.BytesIO())
    )


# -------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("staging", STAGINGS)
def test_small_tensors_are_overwritten_at_once(staging: Any) -> None:
    saves = []
    for i in range(2000 if staging == "blocking" else 300):
        tensor, values = torch.full((1 + i % 100,), i), [i]
        obj = {"tensor": tensor, "view": tensor[::2], "values": values}
        expected, stream = saved_bytes(stock_save, obj), io.BytesIO()
        future = ptsave.async_save(obj, stream, staging=staging)
        values.append(-1)
        future.wait_staged(30)
        tensor.fill_(-1)
        saves.append((future, stream, expected))
    for future, stream, expected in saves:
        future.result(30)
        assert stream.getvalue() == expected


@pytest.mark.parametrize("staging", STAGINGS)
def test_large_tensors_are_overwritten_at_once(staging: Any, tmp_path: Path) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (40 * MIB, 3, 5 * MIB, 12345)]
    futures = []
    for i in range(4):
        for tensor in tensors:
            tensor.fill_(i)
        future = ptsave.async_save(tensors, tmp_path / f"{i}.pt", staging=staging)
        future.wait_staged(30)
        futures.append(future)
    for tensor in tensors:
        tensor.fill_(99)
    for i, future in enumerate(futures):
        future.result(30)
        for tensor in ptsave.load(tmp_path / f"{i}.pt"):
            assert tensor.eq(i).all()


@pytest.mark.parametrize("staging", STAGINGS)
def test_nothing_of_the_caller_is_kept(staging: Any, gate: Gate) -> None:
    first = ptsave.async_save([1], gate)
    memory = np.arange(100_000)
    tensor = torch.from_numpy(memory)
    alive = weakref.ref(memory)
    del memory
    obj = {"tensor": tensor, "empty": torch.zeros(0)}
    future = ptsave.async_save(obj, io.BytesIO(), staging=staging)
    future.wait_staged(30)
    del obj, tensor
    gc.collect()
    assert alive() is None
    assert not future.done()
    gate.opened.set()
    concurrent.futures.wait([first, future])


@pytest.mark.parametrize("end", ["written", "cancelled"])
def test_the_target_is_not_kept(end: str, gate: Gate) -> None:
    """It may be as large as the file, and nobody asks the garbage collector to come by."""

    class Target(io.BytesIO): ...

    first = ptsave.async_save([1], gate)
    target = Target()
    alive = weakref.ref(target)
    gc.disable()
    try:
        future = ptsave.async_save([1], target)
        del target
        if end == "cancelled":
            assert future.cancel()
        gate.opened.set()
        first.result(30)
        concurrent.futures.wait([future])
        eventually(lambda: alive() is None)
    finally:
        gc.enable()


def test_memory_is_used_again(tmp_path: Path) -> None:
    obj = [torch.ones(5 * MIB), torch.ones(MIB)]
    ptsave.release_staging_memory()
    assert _C.staging_statistics()["mapped_nbytes"] == 0
    futures, statistics = [], []
    for i in range(5):
        futures.append(ptsave.async_save(obj, tmp_path / f"{i}.pt"))
        futures[-1].result(30)  # which are kept
        statistics.append(_C.staging_statistics())
    ptsave.async_save(torch.ones(6 * MIB - 3), tmp_path / "other.pt").result(30)
    before = _C.staging_statistics()
    assert statistics == [before] * 5
    assert before["used_nbytes"] == 0
    assert 24 * MIB <= before["mapped_nbytes"] <= 25 * MIB
    ptsave.release_staging_memory()
    assert _C.staging_statistics()["mapped_nbytes"] == 0


# ----------------------------------------------------------------------------------- the future


def test_future(gate: Gate) -> None:
    future = ptsave.async_save(torch.ones(1000), gate)
    assert isinstance(future, concurrent.futures.Future)
    assert future.staged()
    assert not future.done()
    assert future.nbytes_written == 0
    assert gate.reached.wait(30)
    assert future.running()
    assert not future.cancel()
    for call in (future.result, future.exception):
        with pytest.raises(concurrent.futures.TimeoutError):
            call(0.01)
    gate.opened.set()
    done, _ = concurrent.futures.wait([future], 30)
    assert done == {future}
    assert list(concurrent.futures.as_completed([future])) == [future]
    assert future.exception() is None
    future.result()
    assert future.nbytes_written == future.nbytes == len(gate.getvalue())


def test_cancel(gate: Gate, tmp_path: Path) -> None:
    first = ptsave.async_save(1, gate)
    assert gate.reached.wait(30)
    called: list[object] = []
    future = ptsave.async_save(torch.ones(MIB), tmp_path / "file.pt")
    future.add_done_callback(called.append)
    assert _C.staging_statistics()["used_nbytes"] >= 4 * MIB
    assert future.cancel()
    assert future.cancel()
    assert _C.staging_statistics()["used_nbytes"] == 0
    assert called == [future]
    assert concurrent.futures.wait([future], 1).done == {future}
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    future.wait_staged()
    gate.opened.set()
    first.result(30)
    assert not (tmp_path / "file.pt").exists()


def test_cancel_before_and_while_staging(gate: Gate) -> None:
    free = hold_up_staging()
    first = ptsave.async_save(1, gate)
    assert gate.reached.wait(30)
    future = ptsave.async_save(torch.ones(MIB), io.BytesIO(), staging="background")
    assert not future.staged()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.wait_staged(0.01)
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.wait_staged()
    assert not future.staged()
    free.set()
    large = torch.empty(64 * MIB)  # takes longer than the threads to start
    futures = [ptsave.async_save(large, io.BytesIO(), staging="background") for _ in range(3)]
    assert all(each.cancel() for each in futures)
    assert _C.staging_statistics()["used_nbytes"] == 0
    gate.opened.set()
    first.result(30)
    ptsave.release_staging_memory()


def test_order() -> None:
    """Those to one path included: the last call's contents stay."""
    finished: list[int] = []
    futures = []
    for i in range(50):
        size = MIB if i % 7 == 0 else 10
        staging = STAGINGS[i % 2]
        futures.append(ptsave.async_save(torch.zeros(size), io.BytesIO(), staging=staging))
        futures[-1].add_done_callback(lambda _, i=i: finished.append(i))  # type: ignore[misc]
    for future in futures:
        future.result(30)
    eventually(lambda: len(finished) == 50)
    assert finished == list(range(50))


def test_order_on_one_path(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for i in range(30):
        future = ptsave.async_save({"i": i, "t": torch.full((1000 * (30 - i),), i)}, path)
    future.result(30)
    assert ptsave.load(path)["i"] == 29
    assert os.listdir(tmp_path) == ["file.pt"]


def test_many_threads(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for i in range(20):
            tensor = torch.full((10_000,), number * 100 + i)
            path = tmp_path / f"{number}-{i}.pt"
            future = ptsave.async_save(
                tensor, path, staging=STAGINGS[i % 2], max_staged_bytes=300_000
            )
            future.wait_staged(30)
            tensor.zero_()
            if i % 5 == 0:
                future.result(30)

    in_threads(work, range(6))
    ptsave.async_save(0, io.BytesIO()).result(30)
    for number, i in itertools.product(range(6), range(20)):
        assert ptsave.load(tmp_path / f"{number}-{i}.pt").eq(number * 100 + i).all()


def test_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may save again, or raise; neither stops the thread."""
    path = tmp_path / "second.pt"
    again: list[ptsave.SaveFuture] = []

    def save_again(_: object) -> None:
        again.append(ptsave.async_save("second", path))

    def raise_something(_: object) -> None:
        raise ValueError("of a callback")

    def leave(_: object) -> None:
        sys.exit(3)

    first = ptsave.async_save("first", io.BytesIO())
    for callback in (raise_something, save_again, leave):
        first.add_done_callback(callback) if not first.done() else None
    first.result(30)
    gate = Gate()
    held = ptsave.async_save("held", gate)
    for callback in (raise_something, save_again, leave):
        held.add_done_callback(callback)
    gate.opened.set()
    held.result(30)
    eventually(lambda: len(again) >= 1)
    for future in again:
        future.result(30)
    assert ptsave.load(path) == "second"
    ptsave.async_save("last", path).result(30)
    eventually(lambda: "of a callback" in caplog.text)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    ptsave.async_save(torch.ones(MIB), io.BytesIO(), progress=True).result(30)
    assert "saving: 100%" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ errors


def test_arguments_are_checked_in_the_call(tmp_path: Path) -> None:
    def call(**options: Any) -> None:
        ptsave.async_save(torch.ones(3), tmp_path / "file.pt", **options)

    for options in ({"staging": "no"}, {"when_full": "no"}, {"max_staged_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            call(**options)
    with pytest.raises(TypeError):
        call(max_staged_bytes=1.5)
    with pytest.raises(ValueError, match=r"use ptsave\.save"):
        call(_use_new_zipfile_serialization=False)
    missing = tmp_path / "no" / "file.pt"
    targets: list[Any] = [missing, tmp_path, "a\0b", 5, object(), "x/.pt/"]
    for target in targets:
        assert_same_failure(
            lambda target=target: ptsave.async_save(1, target),  # type: ignore[misc]
            lambda target=target: ptsave.save(1, target),  # type: ignore[misc]
        )
    obj = [torch.ones(3), lambda: None]
    assert_same_failure(
        lambda: ptsave.async_save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
    )
    assert os.listdir(tmp_path) == []


def test_relative_paths_are_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = ptsave.async_save(1, gate)
    monkeypatch.chdir(tmp_path / "a")
    future = ptsave.async_save(1, "file.pt")
    monkeypatch.chdir(tmp_path / "b")
    gate.opened.set()
    concurrent.futures.wait([first, future])
    assert os.listdir() == []
    stock_save(1, "file.pt")
    assert (tmp_path / "a" / "file.pt").read_bytes() == Path("file.pt").read_bytes()


def test_the_current_directory_is_not_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not ASCII names no folder in the archive; only what was given counts."""
    folder = tmp_path / "größe"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ptsave.async_save(1, "file.pt").result(30)
    written = Path("file.pt").read_bytes()
    stock_save(1, "file.pt")
    assert written == Path("file.pt").read_bytes()


@pytest.fixture
def _small_files() -> Iterator[None]:
    """Let the system refuse to write files of more than 1 MiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("staging", STAGINGS)
def test_failure(staging: Any, tmp_path: Path) -> None:
    """It is in the future, the old file is as it was, and the memory is free though it is kept."""
    path = tmp_path / "file.pt"
    ptsave.save("old", path)
    future = ptsave.async_save(torch.ones(2 * MIB), path, staging=staging)
    with pytest.raises(ptsave.SaveError) as caught:
        future.result(30)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert future.exception() is caught.value
    assert _C.staging_statistics()["used_nbytes"] == 0
    assert os.listdir(tmp_path) == ["file.pt"]
    assert ptsave.load(path) == "old"
    assert not save_future._unseen_failures
    ptsave.async_save("new", path).result(30)
    assert ptsave.load(path) == "new"


def test_failure_of_staging() -> None:
    """Out of memory, as an example: in the call, or in the future."""
    with pytest.raises(MemoryError, match=r"35184372088832 bytes.*ptsave\.save"):
        ptsave.async_save(_claims_to_be_huge(), io.BytesIO(), max_staged_bytes=1 << 62)
    free = hold_up_staging()
    storage = torch.UntypedStorage(5000)
    future = ptsave.async_save(storage, io.BytesIO(), staging="background")
    storage.resize_(10)
    free.set()
    with pytest.raises(RuntimeError, match="resized"):
        future.wait_staged(30)
    assert not future.staged()
    with pytest.raises(RuntimeError, match="resized"):
        future.result(30)


def _claims_to_be_huge() -> torch.Tensor:
    import mmap

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, 1 << 45, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.usefixtures("_small_files")
def test_unseen_failures(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    obj = torch.ones(2 * MIB)

    def failed() -> ptsave.SaveFuture:
        future = ptsave.async_save(obj, path)
        eventually(future.done)
        return future

    failed()
    with pytest.warns(ptsave.CheckpointWarning, match="File too large") as caught:
        save_future.report_failures()
    assert str(path) in str(caught[0].message)
    free = hold_up_staging()
    storage = torch.UntypedStorage(5000)
    future = ptsave.async_save(storage, path, staging="background")
    storage.resize_(10)
    free.set()
    eventually(future.done)
    with pytest.warns(ptsave.CheckpointWarning, match="resized"):
        save_future.report_failures()
    failed().exception()
    failed().add_done_callback(lambda _: None)
    future = ptsave.async_save(obj, path)
    future.add_done_callback(lambda _: None)
    eventually(future.done)
    save_future.report_failures()


# ------------------------------------------------------------------------------------------ budget


def test_too_large() -> None:
    for when_full in ANSWERS_TO_FULL:
        with pytest.raises(ptsave.StagingFullError, match=r"4000 bytes.*3999") as caught:
            ptsave.async_save(
                torch.ones(1000), io.BytesIO(), max_staged_bytes=3999, when_full=when_full
            )
        assert (caught.value.nbytes, caught.value.max_staged_bytes) == (4000, 3999)
        assert "ptsave.save" in str(caught.value)


def test_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", "100")
    with pytest.raises(ptsave.StagingFullError):
        ptsave.async_save(torch.ones(1000), io.BytesIO())
    ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=4000).result(30)
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", "many")
    with pytest.raises(ValueError, match="PTSAVE_MAX_STAGED_BYTES"):
        ptsave.async_save(torch.ones(1000), io.BytesIO())


def test_no_room(gate: Gate) -> None:
    first = ptsave.async_save(torch.ones(1000), gate, max_staged_bytes=5000)
    with pytest.raises(ptsave.StagingFullError, match=r"4000 bytes.*hold 4000.*5000") as caught:
        ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=5000, when_full="raise")
    assert caught.value.staged_nbytes == 4000
    ptsave.async_save(torch.ones(250), io.BytesIO(), max_staged_bytes=5000, when_full="raise")
    gate.opened.set()
    first.result(30)


@pytest.mark.parametrize("end", ["written", "failed", "cancelled"])
def test_waiting_for_room(end: str, gate: Gate) -> None:
    """Errors of a file object are in the future as they were raised."""

    class Broken(io.RawIOBase):
        def write(self, _: Any) -> int:
            raise ConnectionError("gone")

    before = ptsave.async_save(0, gate)
    assert gate.reached.wait(30)
    target = Broken() if end == "failed" else io.BytesIO()
    first = ptsave.async_save(torch.ones(1000), target, max_staged_bytes=5000)
    waiting: list[ptsave.SaveFuture] = []

    def save() -> None:
        waiting.append(ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=5000))

    thread = threading.Thread(target=save)
    thread.start()
    time.sleep(0.1)
    assert waiting == []
    if end == "cancelled":
        assert first.cancel()
    else:
        gate.opened.set()
    thread.join(30)
    assert len(waiting) == 1
    gate.opened.set()
    waiting[0].result(30)
    before.result(30)
    eventually(first.done)
    assert first.cancelled() or isinstance(first.exception(), ConnectionError) == (end == "failed")


def test_room_is_given_in_turn(gate: Gate) -> None:
    """A large save is not passed by small ones for ever."""
    first = ptsave.async_save(torch.ones(1000), gate, max_staged_bytes=5000)
    order: list[int] = []

    def save(size: int) -> None:
        ptsave.async_save(torch.ones(size), io.BytesIO(), max_staged_bytes=5000)
        order.append(size)

    threads = []
    for size in (1100, 10, 11):
        threads.append(threading.Thread(target=save, args=(size,)))
        threads[-1].start()
        time.sleep(0.05)
    assert order == []
    gate.opened.set()
    for thread in threads:
        thread.join(30)
    assert sorted(order) == [10, 11, 1100]
    first.result(30)


def test_interrupted_while_waiting(gate: Gate) -> None:
    first = ptsave.async_save(torch.ones(1000), gate, max_staged_bytes=5000)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=5000)
    timer.join()
    gate.opened.set()
    first.result(30)
    ptsave.async_save(torch.ones(1250), io.BytesIO(), max_staged_bytes=5000).result(30)


def test_callback_that_needs_room() -> None:
    """The thread that makes room must not wait for it."""
    gate = Gate()
    outcome: list[object] = []

    def save_again(_: object) -> None:
        try:
            outcome.append(ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=5000))
        except BaseException:
            outcome.append(traceback.format_exc())

    first = ptsave.async_save(0, gate)
    first.add_done_callback(save_again)
    second = ptsave.async_save(torch.ones(1000), io.BytesIO(), max_staged_bytes=5000)
    gate.opened.set()
    first.result(30)
    second.result(30)
    eventually(lambda: len(outcome) == 1)
    assert isinstance(outcome[0], ptsave.SaveFuture), outcome[0]
    outcome[0].result(30)


def test_callbacks_that_need_room_within_each_other() -> None:
    """The inner one must not wait for the outer one, which goes on only after it."""
    gate = Gate()
    futures: list[ptsave.SaveFuture] = []

    def save(size: int, stream: io.BytesIO | None = None) -> ptsave.SaveFuture:
        stream = stream or io.BytesIO()
        futures.append(ptsave.async_save(torch.ones(size), stream, max_staged_bytes=12_000))
        return futures[-1]

    save(1000, gate).add_done_callback(lambda _: save(2000))
    save(1000).add_done_callback(lambda _: save(1000))
    save(1000)
    gate.opened.set()
    eventually(lambda: len(futures) == 5)
    for future in futures:
        future.result(30)


def test_interrupted_while_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends, and so does the copying, before its memory is given back."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    tensor = torch.ones(10_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(background._writing, "put", interrupted)
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt):
                ptsave.async_save(tensor, io.BytesIO(), staging="background")
            assert _C.staging_statistics()["used_nbytes"] == 0
    ptsave.async_save(tensor, io.BytesIO(), staging="background").result(30)


@pytest.mark.parametrize("staging", STAGINGS)
def test_interrupted_before_the_thread_has_begun(
    staging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> bool:
        raise KeyboardInterrupt

    for lane in (background._writing, background._staging):
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(lane, "_start", interrupted)
            ptsave.async_save(torch.ones(10), io.BytesIO(), staging=staging).result(30)
    ptsave.async_save(torch.ones(10), io.BytesIO(), staging=staging).result(30)


def test_interrupted_while_cancelling(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save ends all the same, and whoever waits for it learns that."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    first = ptsave.async_save(0, gate)
    future = ptsave.async_save(torch.ones(10_000_000), io.BytesIO(), staging="background")
    with monkeypatch.context() as patch:
        patch.setattr(future, "join_staging", interrupted)
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
    gate.opened.set()
    first.result(30)
    with contextlib.suppress(concurrent.futures.CancelledError):
        future.result(30)
