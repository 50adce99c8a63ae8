"""What the pages about memory and threads promise, measured in a process of its own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from _system import run_python
from doc_runner import ROOT

import ptsave

CONCEPTS = ROOT / "docs" / "concepts"
ROWS = dict(
    re.findall(r"^\| (.+?) \| (.+?) \|$", (CONCEPTS / "memory.md").read_text(), re.MULTILINE)
)

MEMORY = """
import gc, json
from pathlib import Path
import torch, ptsave

NBYTES = 192 << 20

def peak():
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) << 10

def state(value, dtype=torch.float32):
    tensor = torch.full((4 << 20,), value)
    return {str(i): tensor.to(dtype, copy=True) for i in range(NBYTES >> 24)}

def beside(action, kept=0):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begins to count anew
    before = peak()
    result = action()
    return (peak() - before - kept) / (1 << 20)

small, tensors = {"a": torch.ones(3)}, state(1.0)
ptsave.save(small, "small.pt", fsync=True)
ptsave.load_into("small.pt", ptsave.load("small.pt"))
ptsave.async_save(small, "small.pt").result()
target, half = state(2.0), state(2.0, torch.float16)
model = torch.nn.ParameterDict(state(3.0))
ptsave.convert("small.pt", "small.safetensors")
ptsave.load_model(torch.nn.ParameterDict(small), "small.safetensors")
print(json.dumps({
    "buffered": beside(lambda: ptsave.save(tensors, "a.pt")),
    "durable": beside(lambda: ptsave.save(tensors, "a.pt", fsync=True)),
    "load": beside(lambda: ptsave.load("a.pt"), NBYTES),
    "load_into": beside(lambda: ptsave.load_into("a.pt", target)),
    "converted": beside(lambda: ptsave.load_into("a.pt", half)),
    "convert": beside(lambda: ptsave.convert("a.pt", "a.safetensors")),
    "safetensors": beside(lambda: ptsave.load_into("a.safetensors", target), NBYTES),
    "load_model": beside(lambda: ptsave.load_model(model, "a.safetensors")),
    "open": beside(lambda: ptsave.open("a.pt")),
    "async_save": beside(lambda: ptsave.async_save(tensors, "b.pt").result(), NBYTES),
}))
"""

THREADS = """
import json, os, time
import torch

# Filling them starts torch's own threads, which stay.
tensors = {str(i): torch.full((8 << 20,), i, dtype=torch.uint8).clone() for i in range(8)}

def count():
    return len(os.listdir("/proc/self/task"))

def rest(before):
    for _ in range(100):  # the blocks of replaced files are being freed
        if count() <= before:
            break
        time.sleep(0.05)
    return count() - before

before = count()
import ptsave
found = {"import": count() - before}
ptsave.save(tensors, "a.pt")
ptsave.save(tensors, "a.pt", fsync=True)
found["save"] = rest(before)
ptsave.load_into("a.pt", ptsave.load("a.pt"))
found["load"] = rest(before)
ptsave.async_save(tensors, "b.pt").result()
with ptsave.AsyncCheckpointer("checkpoints") as checkpointer:
    checkpointer.save(1, **tensors)
with ptsave.ArchiveWriter("c.pt") as writer:
    writer.add("a", tensors["0"])
found["background"] = rest(before)
print(json.dumps(found))
"""


def measured(program: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ptsave.__file__).parent.parent)}
    done = run_python(program, cwd=folder, env=environment, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bound(row: str) -> int:
    """Return the MiB that a row of the page allows."""
    match = re.search(r"(\d+) MiB", ROWS[row])
    assert match is not None
    return int(match[1])


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks cannot be counted anew"
)
def test_memory(tmp_path: Path) -> None:
    found = measured(MEMORY, tmp_path)
    slack = 8  # modules that are imported, and what malloc keeps
    assert max(found["buffered"], found["durable"]) <= bound("`save` to a path") + slack
    assert found["load"] <= bound("`load`") + slack
    restores = "`load_checkpoint`, `load_into` of a local archive"
    assert max(found["load_into"], found["converted"]) <= bound(restores) + slack
    others = "the same from a URL, safetensors, several files"
    assert found["safetensors"] <= bound(others) + slack  # beside the file's tensors, once
    assert found["load_model"] <= bound("`load_model`") + slack
    assert found["convert"] <= 16 * len(os.sched_getaffinity(0)) + slack
    assert found["open"] <= 1
    assert found["async_save"] <= bound("`save` to a path") + slack  # beside the copy


def test_threads(tmp_path: Path) -> None:
    assert "no thread exists after the import" in (CONCEPTS / "threads.md").read_text()
    assert measured(THREADS, tmp_path) == {"import": 0, "save": 0, "load": 0, "background": 0}
