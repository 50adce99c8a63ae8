"""examples/weight_sync.py, whose trainer and server are killed at random moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_runner import ROOT
from s3_server import S3Server

import ptsave
from ptsave.deltas import Publisher, apply, publishing
from ptsave.sources.url_locations import UrlLocation

_EXAMPLE = str(ROOT / "examples" / "weight_sync.py")
# Runs a role again and again, until it ends by itself.
_ROLE = """
import json, os, random, runpy, signal, sys, time

main = runpy.run_path(sys.argv[1])["main"]
import torch._dynamo  # which optimizers import
if "s3://" in sys.argv[2]:
    import s3fs
import ptsave
ptsave.preload()
arguments, longest = json.loads(sys.argv[2]), float(sys.argv[3])
random.seed(sys.argv[4])
n_kills, code = 0, -signal.SIGKILL
end = time.monotonic() + 180
while code == -signal.SIGKILL and time.monotonic() < end:
    child = os.fork()
    if child == 0:
        main(arguments)
        os._exit(0)
    time.sleep(random.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    n_kills += code == -signal.SIGKILL
    longest *= 1.05  # a longer chain takes longer to read
print(n_kills)
sys.exit(code)
"""


def run_roles(
    folder: Path, count: int, longest: float, server: Sequence[str] = (), **options: Any
) -> list[int]:
    """Publish and take over versions, compare all logits, and return how often each role died."""
    common = ["--folder", str(folder), "--count", str(count)]
    for name, value in options.items():
        common += [f"--{name.replace('_', '-')}", value]
    roles = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _ROLE,
                _EXAMPLE,
                json.dumps([*role, *common]),
                str(longest),
                "7",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for role in (["trainer"], ["server", *server])
    ]
    n_kills = [int(role.communicate(timeout=200)[0] or -1) for role in roles]
    assert [role.returncode for role in roles] == [0, 0]
    answers = set()
    for version in range(1, count + 1):
        expected = ptsave.load(folder / f"expected-{version}.pt")
        found = ptsave.load(folder / f"answer-{version}.pt")
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        answers.add(found.view(torch.int16).numpy().tobytes())
    # A trainer that was killed before its checkpoint repeats a step; in a short run, perhaps each.
    assert count < 10 or len(answers) > count // 3
    return n_kills


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_copy", [False, True])
def test_kills_with_a_directory(has_copy: bool, count: int, tmp_path: Path) -> None:
    copy = ["--copy", str(tmp_path / "copy" / "model.safetensors")] if has_copy else []
    print(run_roles(tmp_path, count, 0.15, copy))


@pytest.fixture(scope="module")
def bucket(server: S3Server) -> S3Server:
    """The S3 server, with a bucket."""
    server.file_system().mkdir("bucket")
    return server


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_with_s3(count: int, bucket: S3Server, tmp_path: Path) -> None:
    options = json.dumps(bucket.options)
    url = f"s3://bucket/run-{count}"
    print(run_roles(tmp_path, count, 1.0, versions=url, storage_options=options))


def test_two_publishers_at_s3(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second index is refused, even if both publishers look for it at the same time."""
    root = "s3://bucket/two"
    state = {"a": torch.arange(4096.0), "b": torch.zeros(4096)}
    first, second = (
        Publisher(root, state, max_depth=None, storage_options=bucket.options) for _ in range(2)
    )
    ours = {**state, "a": state["a"] + 1}
    first.publish(ours)
    monkeypatch.setattr(publishing, "newest_in", lambda root: None)
    monkeypatch.setattr(UrlLocation, "is_there", lambda self: False)
    with pytest.raises(FileExistsError, match="another publisher has written this version"):
        second.publish({**state, "b": state["b"] + 1})
    monkeypatch.undo()
    held = {name: tensor.clone() for name, tensor in state.items()}
    assert apply(root, held, storage_options=bucket.options) == 1
    assert all(torch.equal(held[name], ours[name]) for name in ours)
    assert second.version == 0


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_publisher_at_s3(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without its index is not there yet, and the next publisher writes it."""
    root = "s3://bucket/killed"
    states = [{"a": torch.arange(4096.0) + number} for number in range(3)]
    options: Any = {"max_depth": None, "storage_options": bucket.options}
    publisher = Publisher(root, states[0], **options)
    publisher.publish(states[1])
    with monkeypatch.context() as patch:
        patch.setattr(UrlLocation, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(states[2])
    held = {"a": states[0]["a"].clone()}
    with pytest.raises(FileNotFoundError, match="version 2 is missing, or its index is"):
        apply(root, held, 2, storage_options=bucket.options)
    assert apply(root, held, storage_options=bucket.options) == 1
    assert torch.equal(held["a"], states[1]["a"])
    Publisher(root, held, version=1, **options).publish(states[2])
    assert apply(root, held, storage_options=bucket.options) == 2
    assert torch.equal(held["a"], states[2]["a"])
    # A request that was sent twice finds its own index.
    UrlLocation.create(UrlLocation(f"{root}/x", bucket.options), b"own")
    monkeypatch.setattr(UrlLocation, "is_there", lambda self: False)
    UrlLocation.create(UrlLocation(f"{root}/x", bucket.options), b"own")
    with pytest.raises(FileExistsError):
        UrlLocation.create(UrlLocation(f"{root}/x", bucket.options), b"other")
