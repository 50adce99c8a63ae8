"""ptsave.open on safetensors files, wherever they are: values, what is fetched, hostile headers."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from url_file_systems import nbytes_of

import ptsave

WEIGHT = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)  # 4 MiB
TENSORS = {
    "weight": WEIGHT,
    "half": torch.arange(24).bfloat16().reshape(2, 3, 4),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 2),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
}
SAVED = save(TENSORS, {"made": "by hand"})
INDICES: list[Any] = [
    *(5, -1, slice(10, 12), slice(None, None, 300), (slice(3, 500, 7), slice(1, None, 100)), ...),
    *((..., 7), (None, 3, slice(2, 4)), slice(5, 5), (1023, 1023)),
]


Source = Callable[[bytes, ExitStack, Path], Any]


class Stream(io.BytesIO):
    """A file object of a kind that is read with its methods."""


def as_url(data: bytes, stack: ExitStack, folder: Path) -> str:
    fsspec.filesystem("memory").pipe("/fetched/model.safetensors", data)
    return "memory://fetched/model.safetensors"


def as_path(data: bytes, stack: ExitStack, folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(data)
    return folder / "model.safetensors"


def at_offset(n: int) -> Source:
    """Return what makes a real file in which the data begins at byte n."""

    def as_file(data: bytes, stack: ExitStack, folder: Path) -> Any:
        (folder / "model").write_bytes(b"x" * n + data)
        file = stack.enter_context((folder / "model").open("rb"))
        file.seek(n)
        return file

    return as_file


def as_stream(kind: type[io.BytesIO]) -> Source:
    def as_file(data: bytes, stack: ExitStack, folder: Path) -> Any:
        file = kind(b"x" * 10 + data)
        file.seek(10)
        return file

    return as_file


SOURCES: dict[str, Source] = {
    "path": as_path,
    "url": as_url,
    "file": at_offset(0),
    "file at an offset": at_offset(4096),
    "file at an odd offset": at_offset(1),
    "BytesIO": as_stream(io.BytesIO),
    "stream": as_stream(Stream),
}


@pytest.fixture(params=SOURCES)
def source(
    request: pytest.FixtureRequest, fetched: list[int], tmp_path: Path
) -> Iterator[Callable[[bytes], Any]]:
    """What makes something to open of bytes."""
    with ExitStack() as stack:
        yield lambda data: SOURCES[request.param](data, stack, tmp_path)


def test_values(source: Callable[[bytes], Any]) -> None:
    expected = load(SAVED)
    with ptsave.open(source(SAVED)) as archive:
        assert set(archive) == set(expected)
        assert archive.metadata == {"format": "safetensors", "made": "by hand"}
        for name, tensor in expected.items():
            assert_same(archive.get_tensor(name), tensor)
            info = archive.info(name)
            assert (info.dtype, info.shape) == (tensor.dtype, tensor.shape)
            assert info.offset is not None
            assert SAVED[info.offset :].startswith(
                tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        with pytest.raises(ValueError, match="no checksums"):
            archive.verify()
        everything = archive[""]
        for name, tensor in expected.items():
            assert_same(everything[name], tensor)


def test_slices(source: Callable[[bytes], Any]) -> None:
    with ptsave.open(source(SAVED)) as archive:
        for index in INDICES:
            assert_same(archive.get_slice("weight")[index], WEIGHT[index])
        assert_same(archive.get_slice("half")[:, 1, ::2], TENSORS["half"][:, 1, ::2])
        assert_same(archive.get_slice("flag")[None], TENSORS["flag"][None])
        assert_same(archive.get_slice("none")[:, 1:], TENSORS["none"][:, 1:])


def test_tensors_outlive_what_they_came_from(source: Callable[[bytes], Any]) -> None:
    opened = source(SAVED)
    with ptsave.open(opened) as archive:
        weight = archive.get_tensor("weight")
        weight += 1
        assert_same(archive.get_tensor("weight"), WEIGHT)
    del archive
    if hasattr(opened, "close"):
        opened.close()
    assert_same(weight, WEIGHT + 1)


def assert_same(tensor: Tensor, expected: Tensor) -> None:
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, expected)]
    assert torch.equal(*as_bytes)


def test_only_what_is_asked_for(fetched: list[int], tmp_path: Path) -> None:
    url = as_url(SAVED, ExitStack(), tmp_path)
    with ptsave.open(url) as archive:
        assert archive.info("weight").shape == (1024, 1024)
        assert nbytes_of(fetched) < 100_000
        assert_same(archive.get_tensor("weight"), WEIGHT)
        assert nbytes_of(fetched) == WEIGHT.nbytes
        assert_same(archive.get_slice("weight")[100:102], WEIGHT[100:102])
        assert nbytes_of(fetched) == WEIGHT[100:102].nbytes
        assert_same(archive.get_slice("weight")[:0], WEIGHT[:0])
        assert nbytes_of(fetched) == 0


def test_a_header_that_is_long(fetched: list[int], tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.tensor(i) for i in range(2000)}
    data = save(tensors)
    assert struct.unpack_from("<Q", data)[0] > 64 << 10
    with ptsave.open(as_url(data, ExitStack(), tmp_path)) as archive:
        assert all(archive.get_tensor(name) == tensor for name, tensor in tensors.items())


# ------------------------------------------------------------------------------------------ hostile


def with_header(header: object, nbytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "cut short": SAVED[:-10],
    "cut in the header": SAVED[:50],
    "length beyond the end": struct.pack("<Q", 1 << 20) + SAVED[8:2000],
    "length of 99 MB": struct.pack("<Q", 99_000_000) + SAVED[8:],
    "huge length": struct.pack("<Q", (1 << 63) + 5) + SAVED[8:],
    "largest length": b"\xff" * 8 + SAVED[8:],
    "header is no JSON": with_header(b"{" + b"x" * 100, 100),
    "header is a list": with_header(b"{}"[:1] + b"[]", 0),
    "nested too deep": with_header(b'{"a":' * 10_000, 16),
    "entry is no dict": with_header({"a": 3}, 0),
    "overlap": with_header({"a": entry(0, 16), "b": entry(8, 24)}, 24),
    "the same place": with_header({"a": entry(0, 16), "b": entry(0, 16)}, 16),
    "hole": with_header({"a": entry(0, 16), "b": entry(20, 36)}, 36),
    "beyond the end": with_header({"a": entry(0, 16)}, 15),
    "bytes that are no tensor's": with_header({"a": entry(0, 16)}, 17),
    "backwards": with_header({"a": entry(16, 0)}, 16),
    "negative": with_header({"a": entry(-16, 0)}, 16),
    "offsets of 2^64": with_header({"a": entry(0, 1 << 64)}, 16),
    "hole at the beginning": with_header({"a": entry(4, 20)}, 20),
    "bytes of no tensor": with_header({}, 4),
    "negative shape": with_header({"a": entry(0, 16, shape=(-4,))}, 16),
    "shape does not fit": with_header({"a": entry(0, 16, shape=(5,))}, 16),
    "shape overflows": with_header({"a": entry(0, 16, shape=(1 << 62, 1 << 62, 4))}, 16),
    "huge shape": with_header({"a": entry(0, 1 << 60, "U8", (1 << 60,))}, 16),
    "unknown dtype": with_header({"a": entry(0, 16, "Q77")}, 16),
    "dtype that torch has not": with_header({"a": entry(0, 3, "F6_E2M3", (4,))}, 3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, source: Callable[[bytes], Any]) -> None:
    with pytest.raises((SafetensorError, AttributeError, KeyError)):
        load(HOSTILE[name])
    opened = source(HOSTILE[name])
    if isinstance(opened, Path):
        model = torch.nn.ParameterDict({"a": torch.zeros(4)})
        with pytest.raises(ptsave.CorruptCheckpointError):
            ptsave.load_model(model, opened)
        assert not model["a"].any()
    tracemalloc.start()
    try:
        with pytest.raises(ptsave.CorruptCheckpointError):
            ptsave.open(opened)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(HOSTILE[name]) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_what_is_cut_off_is_named(source: Callable[[bytes], Any]) -> None:
    data = save({"a": torch.ones(100), "b": torch.ones(100)})
    with pytest.raises(ptsave.CorruptCheckpointError, match="ends before tensor b") as caught:
        ptsave.open(source(data[:-10]))
    assert caught.value.entries == ["b"]


def test_file_that_shrinks(tmp_path: Path) -> None:
    for opened in (as_path(SAVED, ExitStack(), tmp_path), Stream(SAVED)):
        with ptsave.open(opened) as archive:
            if isinstance(opened, Path):
                with opened.open("r+b") as file:
                    file.truncate(1000)
            else:
                opened.truncate(1000)
            for read in (archive.get_tensor, lambda name: archive.get_slice(name)[5]):
                with pytest.raises((OSError, ptsave.CorruptCheckpointError)):
                    read("weight")


def test_larger_than_memory(tmp_path: Path) -> None:
    """Only what is looked at takes memory, and nothing is put by for the rest."""
    n = 1 << 42
    head = with_header({"a": entry(0, n, "U8", (1 << 21, 1 << 21)), "b": entry(n, n + 16)}, 0)
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(head)
        try:
            file.truncate(len(head) + n + 16)
        except OSError:
            pytest.skip("the file system has no such large files")
    for opened in (str(path), f"file://{path}"):
        with ptsave.open(opened) as archive:
            assert archive.get_slice("a")[-1, -3:].tolist() == [0, 0, 0]
            assert archive.get_tensor("b").tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_leaves_nothing_open(tmp_path: Path) -> None:
    for data in (SAVED, SAVED[:-10]):
        for make in SOURCES.values():
            with ExitStack() as stack:
                try:
                    with ptsave.open(make(data, stack, tmp_path)) as archive:
                        archive[""]
                        del archive
                except ptsave.CorruptCheckpointError:
                    pass


def test_small_tensors_need_no_mappings(tmp_path: Path) -> None:
    """Of which a process may have 65,530 by default: they are copied."""
    numbers = torch.arange(3000)
    (tmp_path / "many.safetensors").write_bytes(
        save(dict(zip(map(str, numbers.tolist()), numbers, strict=True)))
    )
    with ptsave.open(tmp_path / "many.safetensors") as archive:
        before = Path("/proc/self/maps").read_text().count("\n")
        found = dict(archive.tensors())
        assert Path("/proc/self/maps").read_text().count("\n") < before + 100
    assert torch.equal(torch.stack([found[str(i)] for i in range(len(numbers))]), numbers)
