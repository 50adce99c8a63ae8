"""Memory or threads run out anywhere in a call: it is an error or succeeds, and never hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from _system import run_python

from ptsave.support.threads import Thread, ThreadPool

# Each attempt is a forked process in which one call fails, and which then ends as Python's do. It
# prints the attempts that went wrong; a hanging one is ended by SIGALRM.
SCRIPT = """
import atexit, ctypes, os, signal, sys, threading, time, traceback
import torch, ptsave
from ptsave.comparison.compare import compare

torch.set_num_threads(1)
calls = ctypes.CDLL(sys.argv[1])
folder, operation = sys.argv[2:]
tensors = {"a": torch.full((1 << 20,), 7.0), "b": torch.full((1 << 18,), 7.0)}
others = {"a": tensors["a"] + 1, "b": tensors["b"]}
model, halves = (torch.nn.Linear(1 << 10, 1 << 10) for _ in range(2))
halves.half()
ptsave.save(tensors, f"{folder}/a.pt")
ptsave.save(others, f"{folder}/b.pt")
ptsave.save_model(model, f"{folder}/model", max_shard_size="1MB")

def async_save(staging):
    ptsave.async_save(tensors, f"{folder}/c.pt", staging=staging).result()
    assert ptsave.load(f"{folder}/c.pt")["a"].eq(7).all()

def append():
    with ptsave.ArchiveWriter(f"{folder}/d.pt") as writer:
        writer.add("a", tensors["a"])
    assert ptsave.load(f"{folder}/d.pt")["a"].eq(7).all()

run = {
    "append": append,
    "async_save": lambda: async_save("blocking"),
    "async_save in the background": lambda: async_save("background"),
    "save": lambda: ptsave.save(tensors, f"{folder}/c.pt"),
    "load": lambda: ptsave.load(f"{folder}/a.pt"),
    "save_model": lambda: ptsave.save_model(model, f"{folder}/model2", max_shard_size="1MB"),
    "load_model": lambda: ptsave.load_model(halves, f"{folder}/model"),
    "compare": lambda: compare(f"{folder}/a.pt", f"{folder}/b.pt"),
}[operation]

def attempt(function, n):
    calls.fail_after(function, n)
    try:
        run()
    except MemoryError:
        pass
    n_calls = calls.stop_failing(function)
    run()
    threading._shutdown()
    atexit._run_exitfuncs()
    return n_calls

def in_a_child(function, n):
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os.write(sink, str(attempt(function, n)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(sink)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(source) as answer:
        n_calls = int(answer.read() or 0)
    if status:
        print(f"{operation}: exit status {status} where call {n} of {function} fails", flush=True)
    return n_calls

def in_children():
    for function in range(2):
        for n in range(1, 2 + in_a_child(function, 0)):
            in_a_child(function, n)

in_children()
run()  # what it leaves is there in the next ones
while threading.active_count() > 1:
    time.sleep(0.01)
in_children()
"""


@pytest.fixture(scope="session")
def failing_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes calls fail."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("failing-calls") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


@pytest.mark.parametrize(
    "operation",
    [
        "append",
        "async_save",
        "async_save in the background",
        "save",
        "load",
        "save_model",
        "load_model",
        "compare",
    ],
)
def test_nothing_hangs(operation: str, failing_calls: Path, tmp_path: Path) -> None:
    result = run_python(
        SCRIPT,
        *(failing_calls, tmp_path, operation),
        options=["-W", "ignore"],
        timeout=500,
        env={**os.environ, "LD_PRELOAD": str(failing_calls)},
    )
    assert result.stdout == "", result.stderr


# ----------------------------------------------------------------------------------------- threads


def out_of_memory(*_: object) -> None:
    raise MemoryError("none left")


@pytest.mark.parametrize("step", ["_set_ident", "_set_native_id", "_bootstrap_inner", "run"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_leaves_nothing_open")
def test_a_thread_that_ends_before_it_has_begun(step: str) -> None:
    failing = type("Failing", (Thread,), {step: out_of_memory})
    before = threading.enumerate()
    for _ in range(3):
        with pytest.raises(MemoryError, match="thread"):
            failing(lambda begun: begun()).start()
    assert threading.enumerate() == before


def test_a_thread_is_one_of_pythons() -> None:
    seen: list[threading.Thread] = []

    def work(begun: Callable[[], None]) -> None:
        begun()
        seen.append(threading.current_thread())

    thread = Thread(work, "somebody")
    thread.start()
    thread.join(30)
    assert seen == [thread]
    assert not thread.is_alive()
    assert not thread.daemon
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_workers() -> None:
    barrier = threading.Barrier(3, timeout=30)
    with ThreadPool(3) as workers:
        assert sorted(workers.map(lambda _: barrier.wait(), range(6))) == [0, 0, 1, 1, 2, 2]
        assert list(workers.map(abs, range(-500, 0))) == list(range(500, 0, -1))
        failed = workers.submit(divmod, 1, 0)
        assert isinstance(failed.exception(30), ZeroDivisionError)
        opened = threading.Event()
        running = [workers.submit(opened.wait, 30) for _ in range(3)]
        waiting = [workers.submit(abs, -1) for _ in range(3)]
        workers.shutdown(wait=False, cancel_futures=True)
        opened.set()
        assert [future.result(30) for future in running] == [True] * 3
        assert all(future.cancelled() for future in waiting)
    with pytest.raises(RuntimeError, match="shutdown"):
        workers.submit(abs, -1)
