"""Saving to an S3 server on the loopback interface, which also fails in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import run_python
from command_line import succeed
from s3_server import S3Server
from stock_comparison import stock_save
from torch import nn

import ptsave
from ptsave.sources import url_locations

pytest.importorskip("moto", reason="the S3 server of these tests is moto's: pip install moto")
s3fs = pytest.importorskip("s3fs", reason="fsspec reaches S3 by s3fs: pip install s3fs")

MIB = 1 << 20
SMALL = {"weight": torch.arange(300_000.0), "step": 3}
# More than two parts, which are as small here as S3 lets them be.
LARGE = {"weight": torch.arange(3 * MIB, dtype=torch.int32), "step": 3}
URL = "s3://bucket/run/model.pt"


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system, with an empty bucket."""
    monkeypatch.setattr(url_locations, "_PART_NBYTES", 5 * MIB)
    fs = s3fs.S3FileSystem(**server.options)
    fs.mkdir("bucket")
    yield fs
    assert uploads(fs) == []
    fs.invalidate_cache()
    fs.rm("bucket", recursive=True)


def uploads(fs: Any) -> list[Any]:
    """Return the uploads that are neither completed nor discarded."""
    return list(fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []))


def objects(fs: Any) -> dict[str, bytes]:
    fs.invalidate_cache()
    return {path: fs.cat_file(path) for path in fs.find("bucket")}


def stock_bytes(folder: Path, obj: object, name: str = "model.pt") -> bytes:
    stock_save(obj, folder / name)
    return (folder / name).read_bytes()


def save(obj: object, options: dict[str, Any]) -> None:
    ptsave.save(obj, URL, storage_options=options)


SAVES: list[Callable[[object, dict[str, Any]], object]] = [
    save,
    lambda obj, options: ptsave.async_save(obj, URL, storage_options=options).result(),
]


@pytest.mark.parametrize("action", SAVES)
@pytest.mark.parametrize("obj", [SMALL, LARGE], ids=["small", "large"])
def test_bytes(tmp_path: Path, server: S3Server, bucket: Any, action: Any, obj: Any) -> None:
    for each in (obj, [1]):
        action(each, server.options)
        assert objects(bucket) == {"bucket/run/model.pt": stock_bytes(tmp_path, each)}
    assert not bucket.transaction.files


# Requests of an upload in parts: begin, a part, completion, and of one that needs only one.
FAILURES = [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId"), ("PUT", "")]


@pytest.mark.parametrize("how", [403, 500, "close"])
@pytest.mark.parametrize("failed", FAILURES, ids="-".join)
def test_failures(
    server: S3Server,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    failed: tuple[str, str],
    how: Any,
) -> None:
    method, query = failed
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    obj = LARGE if query else SMALL
    for before, action in zip(([], [1]), SAVES if how == 403 else reversed(SAVES), strict=True):
        if before:
            ptsave.save(before, URL, storage_options=server.options)
        old = objects(bucket)
        with server.failing(method, query, how), pytest.raises(ptsave.SaveError) as caught:
            action(obj, server.options)
        assert caught.value.filename == URL
        assert isinstance(caught.value, PermissionError) == (how == 403)
        assert objects(bucket) == old
        assert uploads(bucket) == []


def test_passing_failures_are_tried_again(tmp_path: Path, server: S3Server, bucket: Any) -> None:
    """A server that fails for a moment makes no save fail."""
    with server.failing("PUT", "partNumber=2", 500, times=1):
        save(LARGE, server.options)
    assert objects(bucket) == {"bucket/run/model.pt": stock_bytes(tmp_path, LARGE)}


def test_an_upload_that_cannot_be_discarded(
    server: S3Server, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    server._set_rules(
        [
            {"method": "PUT", "query": "partNumber=2", "action": 403},
            {"method": "DELETE", "query": "", "action": 500},
        ]
    )
    try:
        with pytest.raises(PermissionError) as caught:
            save(LARGE, server.options)
    finally:
        server._set_rules([])
    notes = getattr(caught.value, "__notes__", [""])
    assert "could not be discarded" in notes[0]
    assert objects(bucket) == {}
    (upload,) = uploads(bucket)
    bucket.abort_mpu("bucket", "run/model.pt", upload["UploadId"])


def test_interrupts(server: S3Server, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_chunk = s3fs.core.S3File._upload_chunk
    parts: list[bool] = []

    def interrupted(self: Any, final: bool = False) -> Any:
        parts.append(final)
        if len(parts) == 2:
            raise KeyboardInterrupt
        return upload_chunk(self, final)

    monkeypatch.setattr(s3fs.core.S3File, "_upload_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(LARGE, server.options)
    assert objects(bucket) == {}
    assert len(parts) == 2


def test_missing_bucket(server: S3Server, bucket: Any) -> None:
    for url in ("s3://other/model.pt", "s3://other/a/b/model.pt"):
        for obj in (SMALL, LARGE):
            with pytest.raises(FileNotFoundError) as caught:
                ptsave.save(obj, url, storage_options=server.options)
            assert isinstance(caught.value, ptsave.SaveError)
            assert caught.value.filename == url
    for url in ("s3://bucket", "s3://bucket/", "s3://bucket/run/"):
        with pytest.raises(IsADirectoryError):
            ptsave.save(SMALL, url, storage_options=server.options)


def test_nobody_there(bucket: Any, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    options = {**server.options, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(ptsave.SaveError, match="Could not connect") as caught:
        save(SMALL, options)
    assert caught.value.filename == URL


MEMORY = """
import resource, sys, json, torch, ptsave
options = json.loads(sys.argv[1])
kind = sys.argv[2]
value = {"weight": torch.ones(200 << 18)}
ptsave.save([1], "s3://bucket/first.pt", storage_options=options)
if kind == "async_save":  # whose copy is there afterwards, too
    ptsave.async_save(value, "/dev/null").result()
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
if kind == "async_save":
    ptsave.async_save(value, "s3://bucket/model.pt", storage_options=options).result()
else:
    ptsave.save(value, "s3://bucket/model.pt", storage_options=options)
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["save", "async_save"])
def test_memory(server: S3Server, bucket: Any, kind: str) -> None:
    """A save of 200 MiB takes a few parts, beside the copy of a save in the background."""
    found = run_python(MEMORY, json.dumps(server.options), kind)
    assert int(found.stdout) < 80 * MIB
    assert objects(bucket)["bucket/model.pt"][:4] == b"PK\3\4"


EXIT = """
import json, sys, torch, ptsave
options = json.loads(sys.argv[1])
value = {"weight": torch.ones(10 << 18)}
ptsave.async_save(value, "s3://bucket/a/model.pt", storage_options=options)
ptsave.async_save(value, "s3://bucket/b/model.pt", storage_options=options)
"""


def test_exit_waits(server: S3Server, bucket: Any) -> None:
    """The interpreter waits for uploads, and their connections still work meanwhile."""
    options = {**server.options, "endpoint_url": server.endpoint.replace("127.0.0.1", "localhost")}
    found = run_python(EXIT, json.dumps(options), options=["-W", "error"])
    assert found.stderr == ""
    assert sorted(objects(bucket)) == ["bucket/a/model.pt", "bucket/b/model.pt"]


def test_checkpointer(tmp_path: Path, server: S3Server, bucket: Any) -> None:
    model = nn.Linear(3, 3)
    directory = "s3://bucket/run"
    options: dict[str, Any] = {"storage_options": server.options}
    with ptsave.AsyncCheckpointer(directory, keep=2, **options) as checkpointer:
        assert checkpointer.latest() is None
        for step in (1, 2, 3):
            checkpointer.save(step, model=model, step=step)
    assert checkpointer.steps() == [2, 3]
    assert checkpointer.latest() == "s3://bucket/run/step-00000003.pt"
    name = "step-00000003.pt"
    expected = stock_bytes(tmp_path, {"model": model.state_dict(), "step": 3}, name)
    assert objects(bucket)[f"bucket/run/{name}"] == expected
    weight = model.weight.clone()
    with torch.no_grad():
        model.weight.zero_()
    again = ptsave.AsyncCheckpointer(directory, **options)
    assert again.restore(model=model) == {"step": 3}
    assert torch.equal(model.weight, weight)
    with server.failing("PUT", "", 403):
        future = again.save(4, model=model)
        with pytest.raises(PermissionError):
            future.result()
    assert again.steps() == [2, 3]
    with server.failing("GET", "prefix=run", 403):
        with pytest.raises(PermissionError, match="cannot be listed") as caught:
            again.steps()
        assert str(caught.value.filename) == directory


def test_models(tmp_path: Path, server: S3Server, bucket: Any) -> None:
    weights = {f"layer.{i}": torch.rand(50, 50) for i in range(4)}
    url = "s3://bucket/model"
    options: dict[str, Any] = {"storage_options": server.options, "max_shard_size": "20KB"}
    for each in ({"old": torch.ones(3)}, weights):
        ptsave.save_model(each, url, **options)
    ptsave.save_model(weights, tmp_path / "model", max_shard_size="20KB")
    expected = {
        f"bucket/model/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()
    }
    assert objects(bucket) == expected
    with server.failing("PUT", "", 403), pytest.raises(PermissionError):
        ptsave.save_model({"new": torch.ones(3)}, url, **options)
    assert objects(bucket) == expected


def test_conversions(tmp_path: Path, server: S3Server, bucket: Any) -> None:
    """A file of more than one part, from one URL to another."""
    save(LARGE, server.options)
    options: dict[str, Any] = {"storage_options": server.options, "drop": True}
    ptsave.convert(
        URL, "s3://bucket/a/model.safetensors", target_storage_options=server.options, **options
    )
    ptsave.convert(URL, tmp_path / "model.safetensors", **options)
    expected = (tmp_path / "model.safetensors").read_bytes()
    assert objects(bucket)["bucket/a/model.safetensors"] == expected


def test_commands(tmp_path: Path, server: S3Server, bucket: Any) -> None:
    save(SMALL, server.options)
    options = json.dumps(server.options)
    small, copy = tmp_path / "model.pt", "s3://bucket/copy/model.pt"
    for words in (
        ["verify", URL, "--storage-options", options],
        ["convert", URL, str(small), "--storage-options", options],
        ["convert", str(small), copy, "--target-storage-options", options],
        ["diff", URL, copy, "--a-storage-options", options, "--b-storage-options", options],
    ):
        succeed(*words)
    assert objects(bucket)["bucket/copy/model.pt"] == small.read_bytes()
