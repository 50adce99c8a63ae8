"""Runs a program on several ranks: real processes, over gloo or without a process group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from warm_python import WarmProcess

_HEAD = """
import datetime, json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import ptsave
torch.set_num_threads(1)
rank, size, folder, in_group, timeout = json.loads(sys.argv[1])
folder = Path(folder)
if in_group:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
found = {}

def attempt(name, call):
    try:
        found[name] = call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    return found[name]

def tell():
    print("found: " + json.dumps(found, default=str), flush=True)

"""
_TAIL = """
tell()
if in_group:
    dist.destroy_process_group()
"""


class Ranks:
    """Processes that run one program, which may use what `_HEAD` defines and fills ``found``.

    They meet in a directory, in a process group unless `in_group` is false.
    """

    def __init__(
        self, folder: Path, program: str, size: int, *, in_group: bool = True, timeout: float = 60
    ) -> None:
        (folder / ".store").unlink(missing_ok=True)
        text = _HEAD + textwrap.dedent(program) + _TAIL
        known = [(rank, size, str(folder), in_group, timeout) for rank in range(size)]
        environment = {name: value for name, value in os.environ.items() if "RANK" not in name}
        self.processes = [
            WarmProcess(
                text,
                json.dumps(arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
            for arguments in known
        ]

    def found(
        self, *, dead: tuple[int, ...] = (), by: int = signal.SIGKILL, limit: float = 120
    ) -> list[dict[str, Any]]:
        """Return what each rank has found, but for those that a signal has killed."""
        found: list[dict[str, Any]] = []
        for rank, process in enumerate(self.processes):
            try:
                output, errors = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                for each in self.processes:
                    each.kill()
                raise
            if rank in dead:
                assert process.returncode == -by, errors
                found.append({})
                continue
            assert process.returncode == 0, errors
            lines = [line for line in output.splitlines() if line.startswith("found: ")]
            found.append(json.loads(lines[-1].removeprefix("found: ")))
        return found
