"""Saves in the background when their process exits, forks or is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from _system import Child, Gate, in_child, run_python
from kill_rounds import ROUNDS, SEED

import ptsave
from ptsave import _C

MIB = 1 << 20

SAVES = """
import atexit, os, resource, sys, threading, time
import torch, ptsave
folder = sys.argv[1]
def save(name, n=1 << 20, **options):
    return ptsave.async_save(torch.full((n,), 7.0), f"{folder}/{name}.pt", **options)
class Slow:
    # Holds up the saves after it.
    def write(self, data): time.sleep(0.3)
    def flush(self): pass
def hold_up():
    ptsave.async_save(0, Slow())
def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def run(script: str, folder: Path, *options: str, status: int = 0) -> str:
    """Run a script in a fresh process; returns what it wrote to stderr."""
    return run_python(SAVES + script, folder, options=options, status=status).stderr


def assert_complete(path: Path, n: int = 1 << 20) -> None:
    loaded = ptsave.load(path)
    assert loaded.shape == (n,)
    assert loaded.eq(7).all()


# -------------------------------------------------------------------------------------------- exit


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)])
def test_exit_waits(end: str, status: int, tmp_path: Path) -> None:
    script = f"""
hold_up()
for i in range(3):
    save(i, staging=("blocking", "background")[i % 2])
threading.Thread(target=save, args=("thread",), daemon=True).start()
save("last").add_done_callback(lambda _: save("of a callback"))
{end}
"""
    errors = run(script, tmp_path, status=status)
    for name in (0, 1, 2, "last", "of a callback"):
        assert_complete(tmp_path / f"{name}.pt")
    assert "CheckpointWarning" not in errors


def test_exit_that_does_not_wait(tmp_path: Path) -> None:
    """As the process asked for."""
    run("save('file'); hold_up(); save('second'); os._exit(0)", tmp_path)
    assert not (tmp_path / "second.pt").exists()


@pytest.mark.parametrize("limited", [False, True])
def test_saves_of_atexit_callbacks(limited: bool, tmp_path: Path) -> None:
    """Before ptsave's own callback (those registered later) and after it."""
    script = f"""
import atexit, sys
def leave():
    if {limited}: limit()
    save("after").result() if not {limited} else save("too large")
    save("background", 9, staging="background").result()
atexit.register(leave)
{SAVES}
hold_up()
atexit.register(save, "before")
"""
    result = run_python(script, tmp_path)
    assert_complete(tmp_path / "before.pt")
    assert_complete(tmp_path / "background.pt", 9)
    if limited:
        assert "too large.pt" in result.stderr
        assert "CheckpointWarning" in result.stderr
    else:
        assert result.stderr == ""
        assert_complete(tmp_path / "after.pt")


def test_failures_are_seen_at_exit(tmp_path: Path) -> None:
    script = "limit(); save('a'); save('b'); f = save('known'); f.exception(); save('c', 9)"
    for options in ([], ["-W", "error"]):
        errors = run(script, tmp_path, *options)
        assert "CheckpointWarning" in errors
        assert f"{tmp_path}/a.pt" in errors
        assert f"{tmp_path}/b.pt" in errors
        assert "File too large" in errors
        assert "known.pt" not in errors
        assert os.listdir(tmp_path) == ["c.pt"]


def test_threads(tmp_path: Path) -> None:
    """None at import and none that stays; where none can be started, the call writes the file."""
    script = """
assert threading.active_count() == 1
save("file").result()
end = time.monotonic() + 10
while threading.active_count() > 1 and time.monotonic() < end: time.sleep(0.01)
assert threading.active_count() == 1
def refuse(self): raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
for staging in ("blocking", "background"):
    future = save(staging, staging=staging)
    assert future.done() and future.staged() and future.result() is None
"""
    run(script, tmp_path)
    assert_complete(tmp_path / "blocking.pt")
    assert_complete(tmp_path / "background.pt")


# -------------------------------------------------------------------------------------------- fork


def test_fork_with_pending_saves(tmp_path: Path) -> None:
    gate = Gate()
    called: list[int] = []
    tensor = torch.full((3 * MIB,), 7.0)
    futures = [ptsave.async_save(tensor, gate, max_staged_bytes=24 * MIB)]
    futures.append(ptsave.async_save(tensor, tmp_path / "blocking.pt", max_staged_bytes=24 * MIB))
    for future in futures:
        future.add_done_callback(lambda _: called.append(os.getpid()))

    def child() -> None:
        for future in futures:
            for call in (future.result, future.exception):
                if call == future.exception:
                    assert isinstance(future.exception(1), RuntimeError)
                    continue
                with pytest.raises(RuntimeError, match="forked"):
                    call(1)
            assert not future.cancel()
            future.wait_staged(1)
        assert called == []
        assert _C.staging_statistics()["used_nbytes"] == 0
        for staging in ("blocking", "background"):
            mine = torch.full((4 * MIB,), 7.0)
            future = ptsave.async_save(
                mine, tmp_path / f"child-{staging}.pt", staging=staging, max_staged_bytes=16 * MIB
            )
            future.wait_staged(10)
            mine[:] = 0
            future.result(10)
        ptsave.release_staging_memory()
        assert _C.staging_statistics()["mapped_nbytes"] == 0

    in_child(child, lambda: signal.alarm(30))
    tensor.zero_()
    gate.opened.set()
    for future in futures:
        future.result(30)
    assert_complete(tmp_path / "blocking.pt", 3 * MIB)
    for staging in ("blocking", "background"):
        assert_complete(tmp_path / f"child-{staging}.pt", 4 * MIB)
    assert called == [os.getpid()] * 2


def test_forks_at_any_moment(tmp_path: Path) -> None:
    """While threads are staging, writing, waiting and asking."""
    stop = threading.Event()
    failures: list[str] = []

    def keep_saving(number: int) -> None:
        try:
            i = 0
            while not stop.is_set():
                i += 1
                future = ptsave.async_save(
                    torch.full((50_000,), 7.0),
                    tmp_path / f"{number}.pt",
                    staging=("blocking", "background")[i % 2],
                    max_staged_bytes=500_000,
                )
                future.result(30)
        except BaseException:
            failures.append(traceback.format_exc())

    def child() -> None:
        path = tmp_path / f"child-{os.getpid()}.pt"
        ptsave.async_save(torch.full((50_000,), 7.0), path, max_staged_bytes=500_000).result(20)
        assert_complete(path, 50_000)

    threads = [threading.Thread(target=keep_saving, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(ROUNDS):
        in_child(child, lambda: signal.alarm(30))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures, failures[0]


def test_exit_of_a_forked_process(tmp_path: Path) -> None:
    """multiprocessing's children end without the interpreter's usual exit."""
    script = """
import multiprocessing
def work():
    torch.set_num_threads(1)  # the threads of the OpenMP pool of the parent are not here
    hold_up()
    save("child")
hold_up()
save("parent")
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(30)
assert process.exitcode == 0
"""
    run(script, tmp_path, "-W", "ignore::DeprecationWarning")
    assert_complete(tmp_path / "parent.pt")
    assert_complete(tmp_path / "child.pt")


# -------------------------------------------------------------------------------------------- kill


def test_kill(tmp_path: Path) -> None:
    """The file is an old one or a new one, whole."""
    path = tmp_path / "file.pt"
    versions = [torch.full((2 * MIB + version,), float(version)) for version in range(2)]

    def keep_saving() -> None:
        while True:
            for version in versions:
                ptsave.async_save(version, path, max_staged_bytes=20 * MIB)

    ptsave.save(versions[0], path)
    whole = []
    for version in versions:
        ptsave.save(version, path)
        whole.append(path.read_bytes())
    generator = random.Random(SEED)
    for _ in range(ROUNDS):
        child = Child(keep_saving)
        time.sleep(generator.uniform(0.01, 0.1))
        child.kill()
        assert path.read_bytes() in whole
    ptsave.save(versions[0], path)
    assert os.listdir(tmp_path) == ["file.pt"]
