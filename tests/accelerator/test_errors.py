"""Errors of CUDA's runtime: nothing hangs, and neither a file nor a wrong value is left."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

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
        self.target = folder / "target.pt"
        self.shards = folder / "shards"
        torch.save(self.host, self.file)
        ptsave.save_model(self.host, self.shards)
        self.result: dict[str, torch.Tensor] = {}

    def empty_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        for name, tensor in self.there.items():
            model.register_buffer(name, torch.empty_like(tensor))
        self.result = dict(model.named_buffers())
        return model

    def save(self) -> None:
        ptsave.save(self.there, self.target)

    def async_save(self) -> None:
        ptsave.async_save(self.there, self.target).result()

    def background_save(self) -> None:
        ptsave.async_save(self.there, self.target, staging="background").result()

    def load(self) -> None:
        self.result = ptsave.load(self.file, self.device)

    def load_into(self) -> None:
        ptsave.load_into(self.file, self.empty_model())

    def load_model(self) -> None:
        ptsave.load_model(self.empty_model(), self.shards)

    def check(self, name: str) -> None:
        found = torch.load(self.target, "cpu") if name.endswith("save") else self.result
        assert found.keys() == self.host.keys()
        for key, tensor in self.host.items():
            assert torch.equal(found[key].cpu(), tensor), key

    def start(self, name: str) -> None:
        self.target.unlink(missing_ok=True)
        self.result = {}
        getattr(self, name)()


NAMES = ["save", "async_save", "background_save", "load", "load_into", "load_model"]


def run_with_failure(work: Work, name: str, reason: str) -> bool:
    """Run a call that a planned failure may meet, and return whether it did."""
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about failures of destructors
        try:
            work.start(name)
        except RuntimeError as error:
            message = str(error)
    assert not message or (reason in message and not work.target.exists())
    return bool(message)


# Torch makes these calls while it frees pinned memory, where an error ends the process.  ptsave
# records its own events by cudaEventRecord.
_CALLS_OF_FREE = {"cudaEventRecordWithFlags", "cudaSetDevice", "cudaStreamIsCapturing"}


def let_each_call_fail(standin: Any, folder: Path, name: str) -> None:
    """Let the first, middle and last call of each kind fail."""
    work = Work(folder, standin.LAST)
    work.start(name)  # what is kept for the next call is there
    standin.reset()
    work.start(name)
    n_calls = standin.calls()
    n_failures = 0
    for call in n_calls.keys() - _CALLS_OF_FREE:
        for after in {0, n_calls[call] // 2, n_calls[call] - 1}:
            standin.fail(call, after)
            failed = run_with_failure(work, name, standin.FAILURE)
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
    result = run_on_fake(
        f"""
        from pathlib import Path
        from accelerator.test_errors import Work, run_with_failure
        work = Work(Path({str(tmp_path)!r}), fake.LAST)
        error = fake.ILLEGAL_ADDRESS
        fake.fail("cudaMemcpyAsync", 1, error=error, extent="sticky", late={late})
        assert run_with_failure(work, {name!r}, "illegal memory access")
        """,
        status=None,
    )
    if "Exception in pinned allocator free()" in result.stderr:
        pytest.xfail("torch 2.14 ends the process when it cannot free pinned memory")
    assert result.returncode == 0, result.stderr
