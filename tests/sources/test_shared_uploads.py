"""Saves to S3 with a base: the server copies unchanged parts."""

from __future__ import annotations

import io
import uuid

import pytest
import torch
from s3_server import S3Server

import ptsave

MIB = 1 << 20
_N_TENSORS = 3


@pytest.fixture
def bucket(server: S3Server) -> str:
    name = f"bucket-{uuid.uuid4().hex}"
    server.file_system().mkdir(name)
    return f"s3://{name}"


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.randn(4 << 20) for i in range(_N_TENSORS)}  # 16 MiB each


def bytes_at(url: str, server: S3Server) -> bytes:
    data = server.file_system().cat_file(url)
    assert isinstance(data, bytes)
    return data


def whole(obj: object) -> bytes:
    stream = io.BytesIO()
    ptsave.save(obj, stream)
    return stream.getvalue()


def put(obj: object, url: str, base: str, server: S3Server) -> ptsave.SavedBytes:
    saved = ptsave.save(obj, url, base=base, storage_options=server.options)
    assert saved is not None
    assert saved.written + saved.shared == len(bytes_at(url, server))
    return saved


def assert_at(url: str, obj: dict[str, torch.Tensor], server: S3Server) -> None:
    found = ptsave.load(url, storage_options=server.options)
    assert found.keys() == obj.keys()
    assert all(torch.equal(found[name], obj[name]) for name in obj)


def test_unchanged_parts_are_copied(bucket: str, server: S3Server) -> None:
    state = tensors()
    first, second, third = (f"{bucket}/step-{i}.pt" for i in range(3))
    ptsave.save(state, first, storage_options=server.options)
    assert put(state, second, first, server).shared == 0  # the hashes of `first` are unknown
    state["layer2"].add_(1)
    saved = put(state, third, second, server)
    assert saved.shared == 2 * (16 - 5) * MIB - 5 * MIB  # the first part is too small alone
    assert_at(third, state, server)
    ptsave.save(state, f"{bucket}/plain/step-2.pt", storage_options=server.options)
    assert bytes_at(third, server) == bytes_at(f"{bucket}/plain/step-2.pt", server)


def test_source_equal_to_target(bucket: str, server: S3Server) -> None:
    state, url = tensors(), f"{bucket}/last.pt"
    ptsave.save(state, url, storage_options=server.options)
    for i in range(3):
        state["layer2"].add_(1)
        saved = put(state, url, url, server)
        assert (saved.shared > 16 * MIB) == (i > 0)
        assert_at(url, state, server)


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_base_that_is_no_longer_there(change: str, bucket: str, server: S3Server) -> None:
    state = tensors()
    first, second, third = (f"{bucket}/step-{i}.pt" for i in range(3))
    ptsave.save(state, first, storage_options=server.options)
    put(state, second, first, server)
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    files = server.file_system()
    if change == "replaced":
        files.pipe_file(second, whole(other))
        assert put(state, third, second, server).shared == 0
    else:
        files.rm_file(second)
        with pytest.raises(FileNotFoundError, match="step-1"):
            put(state, third, second, server)
        return
    assert_at(third, state, server)


def test_a_checkpointer(bucket: str, server: S3Server) -> None:
    state = tensors()
    options = server.options
    with ptsave.AsyncCheckpointer(
        f"{bucket}/run", keep=2, incremental=True, storage_options=options
    ) as checkpointer:
        for step in range(4):
            state["layer0"].add_(1)
            future = checkpointer.save(step, model=state)
            future.result()
            assert (future.nbytes_shared > 16 * MIB) == (step > 0)
            assert future.nbytes_written + future.nbytes_shared == future.nbytes
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpointer.remove(3)  # the base of the next step
        state["layer0"].add_(1)
        future = checkpointer.save(4, model=state)
        future.result()
        assert future.nbytes_shared == 0
        checkpointer.restore(model=found)
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("query", ["partNumber", "uploads", "uploadId"])
def test_a_failing_server(query: str, bucket: str, server: S3Server) -> None:
    state = tensors()
    url = f"{bucket}/last.pt"
    ptsave.save(state, url, storage_options=server.options)
    old = bytes_at(url, server)
    method = "PUT" if query == "partNumber" else "POST"
    with server.failing(method, query, 403), pytest.raises(ptsave.SaveError, match=r"last\.pt"):
        ptsave.save(tensors(), url, base=url, storage_options=server.options)
    assert bytes_at(url, server) == old
    uploads = server.file_system().call_s3(
        "list_multipart_uploads", Bucket=bucket.removeprefix("s3://")
    )
    assert not uploads.get("Uploads")
