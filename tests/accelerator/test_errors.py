"""Errors of CUDA's runtime: nothing hangs, and neither a file nor a wrong value is left."""

from __future__ import annotations

import re
import shutil
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ptsave
from accelerator.test_fake import run_on_fake

MIB = 1 << 20


@pytest.fixture
def standin(fake: Any) -> Any:
    """Return what controls the stand-in for CUDA, every call of which can fail."""
    if not hasattr(fake, "fail"):
        pytest.skip("needs the stand-in for CUDA")
    return fake


class Work:
    """Calls of ptsave that move 9 MiB to or from a device, each with a check of what it did."""

    def __init__(self, folder: Path, device: str) -> None:
        torch.manual_seed(0)
        sizes = [MIB, 600_000, *range(1000, 1040)]
        self.host = {f"t{i}": torch.randn(n) for i, n in enumerate(sizes)}
        self.there = {name: tensor.to(device) for name, tensor in self.host.items()}
        self.device = device
        self.file = folder / "file.pt"
        self.shards = folder / "shards"
        self.saved = folder / "saved"
        self.target = self.saved / "target.pt"
        torch.save(self.host, self.file)
        ptsave.save_model(self.host, self.shards)
        self.result: dict[str, torch.Tensor] = {}

    def empty_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        for name, tensor in self.there.items():
            model.register_parameter(name, torch.nn.Parameter(torch.empty_like(tensor)))
        self.result = {name: tensor.detach() for name, tensor in model.named_parameters()}
        return model

    def save(self) -> None:
        ptsave.save(self.there, self.target)

    def async_save(self) -> None:
        ptsave.async_save(self.there, self.target).result()

    def background_save(self) -> None:
        ptsave.async_save(self.there, self.target, staging="background").result()

    def save_model(self) -> None:
        ptsave.save_model(self.there, self.saved)

    def load(self) -> None:
        self.result = ptsave.load(self.file, self.device)

    def load_into(self) -> None:
        ptsave.load_into(self.file, self.empty_model())

    def load_model(self) -> None:
        ptsave.load_model(self.empty_model(), self.shards)

    def load_by_loaders(self) -> None:
        def weight_loader(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
            parameter.data.copy_(tensor, non_blocking=True)

        model = self.empty_model()
        for parameter in model.parameters():
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
        ptsave.load_model(model, self.shards)
        torch.accelerator.synchronize(self.device)

    def found(self, name: str) -> dict[str, torch.Tensor]:
        if name == "save_model":
            return load_file(self.saved / "model.safetensors")
        return torch.load(self.target, "cpu") if name.endswith("save") else self.result

    def check(self, name: str) -> None:
        found = self.found(name)
        assert found.keys() == self.host.keys()
        for key, tensor in self.host.items():
            assert torch.equal(found[key].cpu(), tensor), key

    def start(self, name: str) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        self.saved.mkdir()
        self.result = {}
        getattr(self, name)()


SAVES = ["save", "async_save", "background_save", "save_model"]
NAMES = [*SAVES, "load", "load_into", "load_model", "load_by_loaders"]


def run_with_failure(work: Work, name: str, reason: str) -> bool:
    """Run a call that a planned failure may meet, and return whether it did.

    The error must match `reason`, and no file must be left, not even a temporary one.
    """
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about failures of destructors
        try:
            work.start(name)
        except RuntimeError as error:
            message = str(error)
    if message:
        assert re.search(reason, message), message
        assert not list(work.saved.iterdir())
    return bool(message)


def let_each_call_fail(standin: Any, folder: Path, name: str) -> None:
    """Let the first, middle and last call of each kind fail."""
    work = Work(folder, standin.LAST)
    work.start(name)  # what is kept for the next call is there
    standin.reset()
    work.start(name)
    n_calls = standin.calls()
    n_failures = 0
    for call, n in n_calls.items():
        for after in {0, n // 2, n - 1}:
            standin.fail(call, after)
            failed = run_with_failure(work, name, standin.FAILURE)
            if name != "load_by_loaders":  # whose copies are the loaders' own
                assert standin.operations_in_flight() == 0, call
            standin.reset()
            if not failed:
                work.check(name)
            n_failures += failed
    assert n_failures > 0
    work.start(name)
    work.check(name)


@pytest.mark.parametrize("name", NAMES)
def test_any_call_may_fail(standin: Any, tmp_path: Path, name: str) -> None:
    run_on_fake(
        f"""
        from pathlib import Path
        from accelerator.test_errors import let_each_call_fail
        let_each_call_fail(fake, Path({str(tmp_path)!r}), {name!r})
        """
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_call_succeeds_after_an_illegal_address(
    standin: Any, tmp_path: Path, name: str, late: bool
) -> None:
    """Torch's allocator, which cannot free pinned memory then, must not end the process."""
    run_on_fake(
        f"""
        from pathlib import Path
        from accelerator.test_errors import NAMES, Work, run_with_failure
        work = Work(Path({str(tmp_path)!r}), fake.LAST)
        error = fake.ILLEGAL_ADDRESS
        fake.fail("cudaMemcpyAsync", 1, error=error, extent="sticky", late={late})
        for name in [{name!r}, *NAMES]:
            assert run_with_failure(work, name, "illegal memory access"), name
        """
    )


@pytest.mark.parametrize("name", NAMES)
def test_forked_child(fake: Any, tmp_path: Path, name: str) -> None:
    """The child cannot use the device, and the parent can."""
    run_on_fake(
        f"""
        import os, sys
        from pathlib import Path
        from accelerator.test_errors import Work, run_with_failure
        work = Work(Path({str(tmp_path)!r}), fake.LAST)
        work.start({name!r})
        fake.fail_copy(0)
        pid = os.fork()
        if pid == 0:
            assert run_with_failure(work, {name!r}, f"{{fake.IN_A_CHILD}}|in forked subprocess")
            sys.exit()
        assert os.waitpid(pid, 0)[1] == 0
        fake.reset()
        work.start({name!r})
        work.check({name!r})
        """
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_exit_during_a_save_that_fails(fake: Any, tmp_path: Path, asynchronous: bool) -> None:
    result = run_on_fake(
        f"""
        from pathlib import Path
        import ptsave
        from accelerator.test_errors import Work
        work = Work(Path({str(tmp_path)!r}), fake.LAST)
        work.saved.mkdir()
        fake.set_delay(20_000, 30_000)
        fake.fail_copy(2, asynchronous={asynchronous})
        ptsave.async_save(work.there, work.target, staging="background")
        """
    )
    assert fake.FAILURE in result.stderr
    assert not list((tmp_path / "saved").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_no_call_while_a_graph_is_captured(
    devices: list[str], fake: Any, tmp_path: Path, name: str
) -> None:
    work = Work(tmp_path, devices[-1])
    with fake.capturing(torch.accelerator.current_stream(devices[-1])):
        assert run_with_failure(work, name, "captures a graph")
    work.start(name)
    work.check(name)


def test_a_capture_that_begins_during_a_background_save(
    devices: list[str], fake: Any, tmp_path: Path
) -> None:
    work = Work(tmp_path, devices[-1])
    stream = torch.accelerator.current_stream(devices[-1])
    work.saved.mkdir()
    fake.set_delay(50_000, 50_000)
    future = ptsave.async_save(work.there, work.target, staging="background")
    with fake.capturing(stream):
        future.result()
    fake.reset()
    work.check("background_save")


def result_while_pool_captures(future: Any, fake: Any, device: str) -> None:
    with ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(fake.capturing(torch.Stream(device=device)))
        future.result()


def test_a_capture_that_begins_on_a_stream_of_a_save(
    devices: list[str], fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's pool has given the stream to other code, too: no copy becomes a part of the graph."""
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "1")  # so that copies are queued one after the other
    work = Work(tmp_path, devices[-1])
    work.saved.mkdir()
    fake.set_delay(200_000, 200_000)
    future = ptsave.async_save(work.there, work.target, staging="background")
    while fake.operations_in_flight() == 0:
        time.sleep(0.001)
    time.sleep(0.05)  # the first chunk's copies are all queued, and the second chunk's are not
    n_copies = len(fake.stats()["d2h"])
    with pytest.raises(RuntimeError, match="before the capture begins"):
        result_while_pool_captures(future, fake, devices[-1])
    assert len(fake.stats()["d2h"]) == n_copies
    fake.reset()
    assert not list(work.saved.iterdir())
    work.start("background_save")
    work.check("background_save")


def test_a_failed_wait_for_the_caller_is_repeated(
    devices: list[str], tmp_path: Path, standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that follow on the same stream must wait, because the caller still reads the memory.

    Eight threads copy by four streams, and most of them are at work when the wait fails.
    """
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "8")
    path = tmp_path / "ones.pt"
    torch.save(torch.ones(1 << 23), path)
    ptsave.load(path, devices[-1])
    stream = torch.accelerator.current_stream(devices[-1])
    copy = torch.full((1 << 23,), 5.0).to(devices[-1])
    for _ in range(5):
        old = torch.zeros(1 << 23).to(devices[-1])
        standin.set_delay(200_000, 200_000, stream)
        copy.copy_(old)
        del old  # its memory is the target of the load
        standin.fail("cudaStreamWaitEvent")
        with pytest.raises(RuntimeError, match=standin.FAILURE):
            ptsave.load(path, devices[-1])
        standin.reset()
        assert copy.cpu().count_nonzero() == 0
