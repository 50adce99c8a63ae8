"""Ranks of a job as children of the test, which has imported what they need: over gloo."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from _system import Child

from ptsave.archive.spans import EngineSpans


class ForkedRanks:
    """Processes that run one function, each with its rank, as launchers start them.

    They meet in a directory, and wait for each other for `timeout_s` seconds.
    """

    def __init__(
        self, folder: Path, action: Callable[[int], object], size: int = 2, *, timeout_s: float = 60
    ) -> None:
        store = folder / ".store"
        store.unlink(missing_ok=True)
        timeout = datetime.timedelta(seconds=timeout_s)

        def run(rank: int) -> None:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})  # of the file
            # Or accelerate asks for a thread a core, of the parent's OpenMP pool that is not here.
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.distributed.init_process_group(
                "gloo", f"file://{store}", timeout=timeout, rank=rank, world_size=size
            )
            action(rank)
            torch.distributed.destroy_process_group()

        self.children = [
            Child(lambda rank=rank: run(rank))  # type: ignore[misc]
            for rank in range(size)
        ]

    def join(self) -> None:
        """Wait for them, and fail if one has failed."""
        outcomes = [child.wait() for child in self.children]
        for status, message in outcomes:
            assert status == 0, message or f"wait status {status}"

    def kill(self) -> None:
        """Kill them, and fail if one has ended by itself."""
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        for child in self.children:
            status, message = child.wait()
            assert os.WIFSIGNALED(status), message or f"wait status {status}"


def fail_read(monkeypatch: pytest.MonkeyPatch, number: int, path: Path) -> None:
    """Let one of the engine's reads of this process fail, as those of a disk do."""
    read, n_reads = EngineSpans.read, 0

    def fail(*args: Any, **options: Any) -> None:
        nonlocal n_reads
        n_reads += 1
        if n_reads == number:
            raise OSError(5, "Input/output error", str(path))
        read(*args, **options)

    monkeypatch.setattr(EngineSpans, "read", fail)
