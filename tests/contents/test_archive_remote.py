"""ptsave.open on what is no local file: only what is asked for is fetched."""

from __future__ import annotations

import errno
import io
import zipfile
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from stock_comparison import assert_same_object, saved_bytes

import ptsave

WEIGHT = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)  # 4 MiB


def checkpoint() -> dict[str, Any]:
    small = {f"layer.{i}": torch.full((100,), float(i)) for i in range(50)}
    return {"model": {"weight": WEIGHT, **small}, "other": torch.ones(1 << 20), "step": 3}


@pytest.fixture(scope="module")
def saved() -> bytes:
    return saved_bytes(ptsave.save, checkpoint())


URL = "memory://fetched/model.pt"


@pytest.fixture(autouse=True)
def _model(fetched: list[int], saved: bytes) -> None:
    fsspec.filesystem("memory").pipe("/fetched/model.pt", saved)


OVERHEAD = 100_000  # the end of the file, where its directory is, and the pickle


def test_only_what_is_asked_for(fetched: list[int]) -> None:
    with ptsave.open(URL) as archive:
        assert len(archive) == 52
        assert archive.info("model.weight").shape == (1024, 1024)
        assert archive["step"] == 3
        assert sum(fetched) < OVERHEAD
        fetched.clear()
        assert torch.equal(archive.get_tensor("model.weight"), WEIGHT)
        assert WEIGHT.nbytes <= sum(fetched) <= WEIGHT.nbytes + 1000
        fetched.clear()
        rows = archive.get_slice("model.weight")[10:12]
        assert torch.equal(rows, WEIGHT[10:12])
        assert sum(fetched) <= rows.nbytes + 1000


def test_small_tensors_come_in_few_requests(fetched: list[int]) -> None:
    with ptsave.open(URL) as archive:
        fetched.clear()
        assert_same_object(archive["model"], checkpoint()["model"])
        assert len(fetched) <= 3
        assert sum(fetched) < WEIGHT.nbytes + OVERHEAD
        assert_same_object(archive["other"], checkpoint()["other"])
        archive.verify()


def test_numpy_beside_tensors(fetched: list[int]) -> None:
    """What NumPy's objects are made of holds no tensor, so tensors stay unread."""
    extra = {"loss": np.float64(0.5), "state": np.random.RandomState(0).get_state()}
    obj = {**checkpoint(), **extra}
    stream = io.BytesIO()
    torch.save(obj, stream)
    fsspec.filesystem("memory").pipe("/fetched/numpy.pt", stream.getvalue())
    with ptsave.open("memory://fetched/numpy.pt") as archive:
        for name, value in extra.items():
            assert_same_object(archive[name], value)
        assert sum(fetched) < OVERHEAD
    functions: list[Any] = [np.float64(0).__reduce__()[0], np.ones(1).__reduce__()[0]]
    dtypes = [np.dtypes.Float64DType, np.dtypes.UInt32DType]
    with torch.serialization.safe_globals([*functions, *dtypes, np.dtype, np.ndarray]):
        fetched.clear()
        with ptsave.open("memory://fetched/numpy.pt") as archive:
            stream.seek(0)
            expected = torch.load(stream, weights_only=True)
            for name in extra:
                assert_same_object(archive[name], expected[name])
            assert sum(fetched) < OVERHEAD
            assert_same_object(archive["model"], expected["model"])
        model = {"model": {"weight": torch.zeros_like(WEIGHT)}}
        stream.seek(0)
        ptsave.load_into(stream, model, strict=False)
        assert torch.equal(model["model"]["weight"], WEIGHT)


class Stream(io.BytesIO):
    """A file object of a kind that the engine does not read."""


def test_damage_is_found(saved: bytes) -> None:
    data = bytearray(saved)
    data[data.index(WEIGHT[500].numpy().tobytes())] ^= 1
    with ptsave.open(Stream(data)) as archive:
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"data/0.*CRC-32"):
            archive.get_tensor("model.weight")
        with pytest.raises(ptsave.CorruptCheckpointError):
            archive.get_slice("model.weight", verify=True)[0]
        with pytest.raises(ptsave.CorruptCheckpointError):
            archive.verify()
        assert torch.equal(archive.get_slice("model.weight")[0], WEIGHT[0])
        assert not torch.equal(archive.get_tensor("model.weight", verify=False), WEIGHT)
        assert archive["other"].sum() == 1 << 20


def test_headers_as_torch_does_not_write_them() -> None:
    """Another zip writer puts payloads elsewhere than the directory lets expect."""
    stream = io.BytesIO(saved_bytes(torch.save, {"weight": torch.arange(1000.0)}))
    repacked = Stream()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(repacked, "w") as new:
        for info in old.infolist():
            copied = zipfile.ZipInfo(info.filename)
            copied.extra = b"\x99\x99\x04\x00abcd"
            new.writestr(copied, old.read(info))
    repacked.seek(0)
    with ptsave.open(repacked) as archive:
        assert torch.equal(archive["weight"], torch.arange(1000.0))


def test_missing_and_foreign_files(fetched: list[int]) -> None:
    memory = fsspec.filesystem("memory")
    with pytest.raises(FileNotFoundError, match="No such file or directory") as caught:
        ptsave.open("memory://nowhere/none.pt")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "memory://nowhere/none.pt")
    memory.pipe("/fetched/page.pt", b"<!doctype html><p>no")
    with pytest.raises(ptsave.NotCheckpointError, match="HTML"):
        ptsave.open("memory://fetched/page.pt")
    memory.pipe("/fetched/half.pt", b"PK\x03\x04" + bytes(5000))
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.open("memory://fetched/half.pt")


def test_file_that_shrinks(saved: bytes) -> None:
    stream = Stream(saved)
    with ptsave.open(stream) as archive:
        stream.truncate(1000)
        with pytest.raises(OSError, match="the file has changed"):
            archive.get_tensor("other")


@pytest.mark.parametrize("kind", ["legacy", "sparse"])
def test_files_that_load_as_a_whole(kind: str, fetched: list[int]) -> None:
    obj = {"weight": WEIGHT[:10], "sparse": torch.eye(3).to_sparse()}
    stream = Stream(b"x" * 10)
    stream.seek(10)
    torch.save(obj, stream, _use_new_zipfile_serialization=kind != "legacy")
    stream.seek(10)
    with ptsave.open(stream) as archive:
        assert torch.equal(archive["weight"], WEIGHT[:10])
    assert not stream.closed
    fsspec.filesystem("memory").pipe("/fetched/whole.pt", stream.getvalue()[10:])
    with ptsave.open("memory://fetched/whole.pt") as archive:
        assert torch.equal(archive["sparse"].to_dense(), torch.eye(3))


def test_damage_that_torch_does_not_expect() -> None:
    whole = saved_bytes(torch.save, {"weight": torch.ones(3)})
    for old, new in ((b"little", b"middle"), (b"weight", b"w\xffight")):
        data = whole.replace(old, new)
        for damaged in (io.BytesIO(data), Stream(data)):
            with pytest.raises(ptsave.CorruptCheckpointError):
                ptsave.open(damaged, verify=False)


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_leaves_nothing_open(saved: bytes) -> None:
    for _ in range(3):
        with ptsave.open(Stream(saved)) as archive:
            archive["model"]
