"""Children, other users and file systems, for tests that run as root."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root may mount or become another")
NOBODY = 65534


class Child:
    """A forked process that runs `action`; one of the methods has to wait for it."""

    def __init__(
        self, action: Callable[[], object], before: Callable[[], object] | None = None
    ) -> None:
        self._source, sink = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the parent may have threads
            self.pid = os.fork()
        if self.pid == 0:
            try:
                torch.set_num_threads(1)  # the threads of the parent's OpenMP pool are not here
                if before is not None:
                    before()
                action()
                os._exit(0)
            except BaseException:
                os.write(sink, traceback.format_exc().encode())
            os._exit(1)
        os.close(sink)

    def wait(self) -> tuple[int, str]:
        """Return its wait status, and the traceback if it has failed."""
        with os.fdopen(self._source) as messages:
            message = messages.read()
        return os.waitpid(self.pid, 0)[1], message

    def join(self) -> None:
        """Wait for it, and fail if it has failed."""
        status, message = self.wait()
        assert status == 0, message or f"wait status {status}"

    def kill(self) -> None:
        """Kill it, and fail if it has ended by itself."""
        os.kill(self.pid, signal.SIGKILL)
        status, message = self.wait()
        assert os.WIFSIGNALED(status), message or f"wait status {status}"


def in_child(action: Callable[[], object], before: Callable[[], object] | None = None) -> None:
    """Run `action` in a forked process and fail if it fails there."""
    Child(action, before).join()


def in_threads(action: Callable[[Any], Any], arguments: Collection[Any]) -> list[Any]:
    """Run `action` for all arguments at once; return the results, or raise the first error."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(action, arguments))


def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition holds, and fail if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.005)


class Gate(io.BytesIO):
    """A file to which nothing is written before it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.reached = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.reached.set()
        assert self.opened.wait(30)
        return super().write(data)


def run_python(
    code: str, *arguments: object, options: Sequence[str] = (), status: int | None = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own.

    `options` are the interpreter's, `more` those of `subprocess.run`; `status` is how it must end.
    """
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    defaults = {"capture_output": True, "text": True, "timeout": 120}
    result: subprocess.CompletedProcess[str]
    result = subprocess.run(command, check=False, **{**defaults, **more})
    assert status in (None, result.returncode), result.stderr
    return result


def become_nobody(groups: tuple[int, ...] = ()) -> None:
    """Give up all rights that root has in this process, but those of some groups."""
    os.setgroups(list(groups))
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def as_nobody(action: Callable[[], object]) -> None:
    """Run something as a user who owns nothing, and fail if it fails."""
    in_child(action, become_nobody)


@contextmanager
def mounted(target: Path, *arguments: str | Path) -> Iterator[Path]:
    """Mount something for a while: ``mounted(target, "-t", "tmpfs", "none")``."""
    command = ["mount", *map(str, arguments), str(target)]
    result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"mounting is not permitted: {result.stderr.decode().strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def nbytes_read() -> int:
    """Return how many bytes this process has asked files for."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
