"""ptsave behind torch.save and torch.load: for all callers, and without a trace afterwards."""

from __future__ import annotations

import _thread
import copy
import io
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _system import in_threads, run_python
from stock_comparison import (
    assert_same_object,
    saved_bytes,
    stock_load,
    stock_save,
    storage_bytes,
    typed_storage,
)

import ptsave
from ptsave.archive.unpickling import unpickle


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which of ptsave's functions are called while it is installed."""
    seen: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        return call

    pickle_object = ptsave.serialization.pickle_object  # type: ignore[attr-defined]
    monkeypatch.setattr(ptsave.serialization, "pickle_object", noting("save", pickle_object))
    monkeypatch.setattr("ptsave.archive.loading.unpickle", noting("load", unpickle))
    return seen


@pytest.fixture
def _installed() -> Iterator[None]:
    with ptsave.installed():
        yield


def functions() -> tuple[object, ...]:
    return torch.save, torch.load, torch.serialization.save, torch.serialization.load


STOCK = (stock_save, stock_load, stock_save, stock_load)
OURS = (ptsave.save, ptsave.load, ptsave.save, ptsave.load)


def test_nesting() -> None:
    assert functions() == STOCK
    ptsave.install()
    assert functions() == OURS
    with ptsave.installed():
        with ptsave.installed():
            assert functions() == OURS
        assert functions() == OURS
    ptsave.install()
    ptsave.uninstall()
    assert functions() == OURS
    ptsave.uninstall()
    assert functions() == STOCK


def test_installed_is_undone_after_an_error() -> None:
    with pytest.raises(KeyError), ptsave.installed():
        raise KeyError
    assert functions() == STOCK


@pytest.mark.usefixtures("_installed")
def test_both_names_in_both_modules(calls: list[str], tmp_path: Path) -> None:
    obj = {"t": torch.arange(9)}
    for module in (torch, torch.serialization):
        path = tmp_path / "file.pt"
        module.save(obj, path)
        assert_same_object(module.load(path), obj)
    assert calls == ["save", "load"] * 2


@pytest.mark.usefixtures("_installed")
def test_positional_and_keyword_arguments(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save([1], f=stream, pickle_module=pickle, pickle_protocol=2)
    stream.seek(0)
    assert torch.load(f=stream, map_location="cpu", pickle_module=None, weights_only=True) == [1]
    torch.save([2], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "old.pt", "cpu") == [2]


@pytest.mark.usefixtures("_installed")
def test_download_of_torch_hub(calls: list[str], tmp_path: Path) -> None:
    """Code inside torch that nobody can edit."""
    source = tmp_path / "served.pt"
    torch.save({"weight": torch.arange(5.0)}, source)
    loaded = torch.hub.load_state_dict_from_url(
        source.as_uri(), model_dir=str(tmp_path / "hub"), progress=False, map_location="cpu"
    )
    assert torch.equal(loaded["weight"], torch.arange(5.0))
    assert calls == ["save", "load"]


@pytest.mark.usefixtures("_installed")
def test_copies_and_pickles_of_storages(calls: list[str]) -> None:
    """A storage pickles itself with torch.save, in the legacy format, and so does a module."""
    storage = typed_storage(torch.arange(6.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the type
        copies = [copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))]
    for each in copies:
        assert each.dtype == storage.dtype
        assert storage_bytes(each._untyped_storage) == storage_bytes(storage._untyped_storage)
        assert each._data_ptr() != storage._data_ptr()
    tensor = torch.arange(6.0).view(2, 3)[1:]
    for again in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), copy.copy(tensor)):
        assert_same_object(again, tensor)
    module = torch.nn.Linear(2, 3)
    assert_same_object(copy.deepcopy(module).state_dict(), module.state_dict())
    assert calls == []


def test_pickles_are_the_same_as_without() -> None:
    objects = [typed_storage(torch.arange(6.0)), torch.nn.Linear(2, 3), torch.ones(3)[1:]]
    for obj in objects:
        expected = pickle.dumps(obj)
        with ptsave.installed():
            assert pickle.dumps(obj) == expected
            again = pickle.loads(expected)
        assert_same_object(again, pickle.loads(expected))


@pytest.mark.usefixtures("_installed")
def test_torch_package_and_distributed_checkpoint_helpers(calls: list[str], tmp_path: Path) -> None:
    """Modules that have imported the module, not the function, see the change."""
    from torch.distributed.checkpoint import format_utils

    checkpoint = tmp_path / "file.pt"
    torch.save({"weight": torch.arange(5.0)}, checkpoint)
    format_utils.torch_save_to_dcp(checkpoint, tmp_path / "dcp")
    assert "load" in calls


@pytest.mark.usefixtures("_installed")
def test_wrappers_made_while_installed(calls: list[str]) -> None:
    """What wraps torch.save keeps ptsave's, as it would keep torch's."""
    wrapped, original = torch.save, torch.save

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    torch.save = wrapper
    try:
        data = saved_bytes(torch.save, [1])
    finally:
        torch.save = original
    assert data == saved_bytes(stock_save, [1])
    assert calls == ["save"]


def other(*args: Any, **kwargs: Any) -> Any:
    """Stands for what somebody else has in place of torch.save."""
    return stock_save(*args, **kwargs)


def test_patch_from_before_is_not_lost() -> None:
    """Whoever patched torch.save before us is there again afterwards."""

    torch.save = other
    try:
        with ptsave.installed():
            torch.save([1], io.BytesIO())
        assert torch.save is other
    finally:
        torch.save = stock_save


def test_threads() -> None:
    """The count stays right, and no thread ever sees a half of the change."""
    begin = threading.Barrier(8)

    def work(_: int) -> None:
        begin.wait()
        for _ in range(200):
            with ptsave.installed():
                assert functions() == OURS
                stream = io.BytesIO()
                torch.save([1], stream)
                stream.seek(0)
                assert torch.load(stream) == [1]

    in_threads(work, range(8))
    assert functions() == STOCK


def test_import_changes_nothing() -> None:
    script = """
import torch
names = [(module, name) for module in (torch, torch.serialization) for name in ("save", "load")]
before = [getattr(module, name) for module, name in names]
registry = list(torch.serialization._package_registry)
safe_globals = torch.serialization.get_safe_globals()
import ptsave
assert [getattr(module, name) for module, name in names] == before
assert torch.serialization._package_registry == registry
assert torch.serialization.get_safe_globals() == safe_globals
assert not torch.cuda.is_initialized()
"""
    run_python(script)


def test_install_before_anything_else() -> None:
    """In a fresh process, with names bound before and after the installation."""
    script = """
import ptsave
ptsave.install()
import io, torch
from torch import save, load
stream = io.BytesIO()
save({"t": torch.arange(3)}, stream)
stream.seek(0)
assert load(stream)["t"].tolist() == [0, 1, 2]
assert save is ptsave.save and load is ptsave.load
ptsave.uninstall()
assert torch.save is not ptsave.save
"""
    run_python(script)


def test_in_forked_processes(tmp_path: Path) -> None:
    """As in data loader workers: the parent's threads are not there, and what they held is held."""
    path, copied = tmp_path / "file.pt", tmp_path / "copied.pt"
    ptsave.save({"t": torch.arange(2_000_000)}, path)
    ptsave.load(path)

    def work() -> None:
        ptsave.save(ptsave.load(path), copied)  # and no arithmetic: OpenMP does not survive a fork

    process = torch.multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0
    assert_same_object(stock_load(copied), stock_load(path))


# -------------------------------------------------------------------------------------- TorchScript


def saving(x: torch.Tensor, name: str) -> None:
    torch.save(x, name)


def saving_by_module(x: torch.Tensor, name: str) -> None:
    torch.serialization.save(x, name)


def loading(name: str) -> torch.Tensor:
    return torch.load(name)  # type: ignore[no-any-return]


class Saving(torch.nn.Module):
    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        torch.save(x, name)
        return x + 1


def outcome(code: Any) -> str:
    try:
        torch.jit.script(code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "succeeds"


SCRIPTED = (saving, saving_by_module, loading, Saving())
quiet_scripts = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)


@quiet_scripts
def test_scripts(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    # Whether compiling works, and if not, what it says, is torch's, before, while and after.
    stock = [outcome(code) for code in SCRIPTED]
    assert (stock[0], stock[3]) == ("succeeds", "succeeds")
    before = torch.jit.script(saving)
    with ptsave.installed(), ptsave.installed():
        while_installed = [outcome(code) for code in SCRIPTED]
        during = torch.jit.script(saving)
        module = torch.jit.script(Saving())
        before(torch.full((2,), 1.0), path)
        assert torch.load(path).tolist() == [1, 1]
        assert module(torch.zeros(2), path).tolist() == [1, 1]
        during(torch.full((2,), 2.0), path)
    assert while_installed == stock
    assert [outcome(code) for code in SCRIPTED] == stock
    assert stock_load(path).tolist() == [2, 2]
    during(torch.full((2,), 3.0), path)
    assert stock_load(path).tolist() == [3, 3]
    # Not installed, ptsave's functions are Python's, which scripts cannot call.
    find_operator: Any = torch.jit._builtins._find_builtin
    assert find_operator(ptsave.save) is find_operator(ptsave.load) is None


@quiet_scripts
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces(tmp_path: Path) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.save({"x": x}, tmp_path / "a.pt")
        return x + 1

    stock: Any = torch.jit.trace(run, torch.ones(2))
    stock_file = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").unlink()
    with ptsave.installed():
        traced: Any = torch.jit.trace(run, torch.ones(2))
    assert str(traced.graph) == str(stock.graph)
    assert (tmp_path / "a.pt").read_bytes() == stock_file


# ------------------------------------------------------------------------------------------ options


def test_defaults_for_code_that_one_cannot_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        "ptsave.serialization.TargetWriter.__init__",
        lambda self, plan, **options: seen.append((options["fsync"], options["atomic"])),
    )
    monkeypatch.setattr("ptsave.serialization.TargetWriter.write", lambda *_: None)
    monkeypatch.setattr(
        "ptsave.contents.loading.load_source", lambda f, options, *_: seen.append(options.verify)
    )
    path = tmp_path / "x"

    def calls() -> list[Any]:
        seen.clear()
        torch.save([1], path)
        torch.serialization.save([1], path, fsync=False)  # type: ignore[call-arg]
        torch.load(path)
        return list(seen)

    with ptsave.installed(fsync=True, verify=False):
        assert calls() == [(True, True), (False, True), False]
        with ptsave.installed(atomic=False, fsync=False):
            assert calls() == [(False, False), (False, False), False]
            with ptsave.installed():
                assert calls() == [(False, False), (False, False), False]
        assert calls() == [(True, True), (False, True), False]
        with ptsave.installed(verify=True, fsync=False):
            assert calls() == [(False, True), (False, True), True]
            assert functions() != OURS
    assert functions() == STOCK


def test_signatures_with_defaults() -> None:
    import inspect

    with ptsave.installed(fsync=True, verify=True):
        assert inspect.signature(torch.save) == inspect.signature(ptsave.save)
        assert torch.load.__doc__ == ptsave.load.__doc__


@quiet_scripts
def test_scripts_with_defaults() -> None:
    stock = [outcome(code) for code in SCRIPTED]
    with ptsave.installed(fsync=True, verify=False), ptsave.installed(verify=True):
        assert [outcome(code) for code in SCRIPTED] == stock
    assert [outcome(code) for code in SCRIPTED] == stock


def test_a_patch_over_options_is_kept() -> None:
    ptsave.install(fsync=True)
    torch.save = other
    try:
        with ptsave.installed(fsync=False):
            assert torch.save is other
        ptsave.uninstall()
        assert torch.save is other
        assert functions()[1:] == STOCK[1:]
    finally:
        torch.save = stock_save


def test_blocks_that_overlap() -> None:
    """Each ends its own call, as blocks of several threads do that end in any order."""
    first, second = ptsave.installed(verify=False), ptsave.installed(fsync=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    try:
        assert torch.load is ptsave.load
        assert torch.save is not ptsave.save  # which is not durable by default
    finally:
        second.__exit__(None, None, None)


def test_rebound_name_of_a_safetensors_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was looked at before, and has had a name of that number of names since."""
    library = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    module = ModuleType("rebinding")
    vars(module)["write"] = None
    monkeypatch.setitem(sys.modules, "rebinding", module)
    stock = library.save_file
    with ptsave.installed(safetensors=True):
        vars(module)["write"] = library.save_file
    assert vars(module)["write"] is stock


@pytest.mark.parametrize("option", ["safetensors", "fsync", "verify", "weights_only_check"])
def test_options_are_true_or_false(option: str) -> None:
    """A refused call leaves nothing behind."""
    before = functions()
    values: tuple[Any, ...] = ("no", 1, [])
    for value in values:
        with pytest.raises(TypeError, match=f"{option} must be True, False or None, not"):
            ptsave.install(**{option: value})
    assert functions() == before
    with pytest.raises(RuntimeError, match="not installed"):
        ptsave.uninstall()


@pytest.mark.parametrize("n_exchanges", range(6))
def test_interrupted(n_exchanges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers of signals may raise while functions are exchanged."""
    before, exchange, seen = functions(), ptsave.installation._exchange, []

    def interrupted_exchange(*args: Any) -> None:
        exchange(*args)
        seen.append(args)
        if len(seen) == n_exchanges + 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ptsave.installation, "_exchange", interrupted_exchange)

    def block() -> None:
        with ptsave.installed(safetensors=True):
            pass
        with ptsave.installed():
            pass

    with pytest.raises(KeyboardInterrupt):
        block()
    assert functions() == before
    with pytest.raises(RuntimeError, match="not installed"):
        ptsave.uninstall()


def test_without_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ptsave.installation, "start_new_thread", start)
    before = functions()
    with ptsave.installed():
        assert torch.save is ptsave.save
    assert functions() == before


def test_a_thread_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it has called anything, or amid the step."""
    start = _thread.start_new_thread
    before = functions()
    monkeypatch.setattr(ptsave.installation, "start_new_thread", lambda *_: None)
    with ptsave.installed():
        assert torch.save is ptsave.save
    assert functions() == before

    def begin(job: Any, *_: object) -> None:
        job.set_running_or_notify_cancel()

    monkeypatch.setattr(
        ptsave.installation, "start_new_thread", lambda _, arguments: start(begin, arguments)
    )
    with pytest.raises(MemoryError, match="a thread ran out of memory"), ptsave.installed():
        pass
    monkeypatch.undo()
    assert functions() == before


def test_a_handler_that_raises_while_the_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, the step is done once."""
    n_steps = []

    def step() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.1)
        n_steps.append(1)

    def handle(*_: object) -> None:
        raise RuntimeError("a handler's")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(RuntimeError, match="a handler's"):
            ptsave.installation._to_the_end(step)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert n_steps == [1]


def test_imports_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that imports torch has the lock of that, for which others would wait."""
    monkeypatch.setattr(ptsave.installation, "start_new_thread", pytest.fail)
    before = functions()
    ptsave.installation.install_while_importing({"safetensors": True, "fsync": True})
    assert torch.save is not before[0]
    monkeypatch.undo()
    ptsave.uninstall()
    assert functions() == before
