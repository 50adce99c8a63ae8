"""Fixtures of all Python tests: nothing that a test changes in torch outlives it."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config as _config

from ptsave import _C

config: Any = _config  # a module with methods, which type checkers do not know

pytest.register_assert_rewrite("stock_comparison")

# Background jobs of a shell have interrupts ignored, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch warns once in a process if nobody has said whether it should check them.
torch.sparse.check_sparse_tensor_invariants.disable()

# `make accelerator` does not need hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ptsave",
        deadline=None,  # the first example pays for imports and page faults
        max_examples=int(os.environ.get("PTSAVE_HYPOTHESIS_EXAMPLES", "50")),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("ptsave")

_ENVIRONMENT = (
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "TORCH_SERIALIZATION_DEBUG",
    "PTSAVE_NUM_THREADS",
    "PTSAVE_MAX_PINNED_BYTES",
    "PTSAVE_MAX_STAGED_BYTES",
    "PTSAVE_INSTALL",
    "PTSAVE_VERIFY",
    "PTSAVE_VERDICTS",
    "PTSAVE_DIRECT_IO",
    "COLUMNS",  # which pytest-xdist sets
    "FORCE_COLOR",
    "NO_COLOR",
)


def pytest_collection_finish() -> None:
    """Leave the tests out of later garbage collections: one would copy all pages in a fork."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _torch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate tests: seeds, safe globals, device registry, options, environment, installation."""
    for variable in _ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    _C.finish_releases()  # of files that the test before has replaced
    torch.manual_seed(0)
    serialization = torch.serialization
    functions = (torch.save, torch.load, serialization.save, serialization.load)
    safe_globals = serialization.get_safe_globals()
    packages = list(serialization._package_registry)
    options = config.get_config_copy()
    yield
    config.load_config(options)
    serialization.clear_safe_globals()
    serialization.add_safe_globals(safe_globals)
    serialization._package_registry[:] = packages
    now = (torch.save, torch.load, serialization.save, serialization.load)
    assert now == functions, "the test has left ptsave installed"
    assert not serialization._serialization_tls.skip_data
    serialization._serialization_tls.map_location = None  # torch forgets to when a load fails


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Keep small models on one thread: a pool waits for processors, and does not outlive a fork."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can reach too."""
    path = Path(tempfile.mkdtemp(prefix="ptsave-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the test's own that is not there yet."""
    return tmp_path / "run.pt"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """An S3 server of the module's own, without buckets: see `s3_server.S3Server`."""
    pytest.importorskip("moto", reason="the S3 server of these tests is moto's: pip install moto")
    pytest.importorskip("s3fs", reason="fsspec reaches S3 by s3fs: pip install s3fs")
    from s3_server import running_server

    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def _sharing_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from sharing_disks import sharing_disk

    with sharing_disk(tmp_path_factory.mktemp("sharing")) as disk:
        yield disk


@pytest.fixture
def shared(_sharing_disk: Path) -> Iterator[Path]:
    """A folder whose files can share blocks; the test is skipped if there is none."""
    path = Path(tempfile.mkdtemp(prefix="ptsave-test-", dir=_sharing_disk))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def _clean_file_systems() -> Iterator[None]:
    """Give tests file systems in memory without files, those of their own included."""
    import url_file_systems

    url_file_systems.register()
    url_file_systems.clear()
    yield
    url_file_systems.clear()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of what has been fetched of fsspec's memory; ``memory://fetched`` is removed."""
    import fsspec

    memory = fsspec.filesystem("memory")
    sizes: list[int] = []
    cat_ranges = type(memory).cat_ranges

    def counting(self: Any, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        sizes.extend(end - start for start, end in zip(starts, ends, strict=True))
        return cat_ranges(self, paths, starts, ends, **options)

    monkeypatch.setattr(type(memory), "cat_ranges", counting)
    memory.mkdirs("/fetched", exist_ok=True)
    yield sizes
    memory.rm("/fetched", recursive=True)


@pytest.fixture
def _leaves_nothing_open() -> Iterator[None]:
    """Fail if the test leaves file descriptors or threads behind."""
    gc.collect()  # what earlier tests have left may have files
    descriptors, threads = _n_descriptors(), set(threading.enumerate())
    yield
    assert _n_descriptors() == descriptors
    # Threads of earlier tests may end meanwhile: counts of them would compare the wrong thing.
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def _everything_ends() -> Iterator[None]:
    """Fail if a test of background saves leaves threads, files, writers or staged bytes behind."""
    from _system import eventually

    from ptsave.appending import archive_writer
    from ptsave.background import saves

    gc.collect()  # what earlier tests have left may have files
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    eventually(lambda: not any(t.name.startswith("ptsave") for t in threading.enumerate()))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert _C.staging_statistics()["used_nbytes"] == 0
    assert saves._budget._held == {}
    assert not archive_writer._open_writers
    eventually(lambda: not saves._unfinished)


def _n_descriptors() -> int:
    _C.finish_releases()  # of files that were replaced
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def accelerate() -> Any:
    from client_checkpoints import imported

    return imported("accelerate")


@pytest.fixture(scope="session")
def transformers() -> Any:
    from tiny_trainers import imported_transformers

    return imported_transformers()
