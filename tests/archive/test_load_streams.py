"""Loads through file objects that are no real files: as torch loads them, and verified."""

from __future__ import annotations

import gzip
import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import fsspec
import pytest
import torch
from stock_comparison import (
    assert_same_object,
    deflated,
    save_without_checksums,
    saved_bytes,
    stock_load,
    stock_save,
)

import ptsave

_NUMBERS = count()  # a cache would know a name again


class OnlyWhatTorchNeeds:
    """A seekable file without a name, a descriptor, or `readinto`."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)
        self.largest_read = 0

    def read(self, nbytes: int = -1) -> bytes:
        piece = self._stream.read(nbytes)
        self.largest_read = max(self.largest_read, len(piece))
        return piece

    def readline(self) -> bytes:
        return self._stream.readline()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


class Subclass(io.BytesIO):
    """May do anything with its bytes."""


def _spooled(max_size: int) -> Callable[[bytes, Path], Any]:
    def opened(data: bytes, _: Path) -> Any:
        stream = tempfile.SpooledTemporaryFile(max_size)
        stream.write(data)
        stream.seek(0)
        return stream

    return opened


def _url(folder: Path) -> str:
    return f"memory://{folder.name}/{next(_NUMBERS)}.ckpt"


def _fsspec_local(data: bytes, folder: Path) -> Any:
    (folder / "model.ckpt").write_bytes(data)
    return fsspec.open(str(folder / "model.ckpt"), "rb").open()


def _fsspec_memory(data: bytes, folder: Path) -> Any:
    url = _url(folder)
    fsspec.filesystem("memory").pipe(url, data)
    return fsspec.open(url, "rb").open()


def _fsspec_cached(data: bytes, folder: Path) -> Any:
    url = _url(folder)
    fsspec.filesystem("memory").pipe(url, data)
    cache = str(folder / "cache")
    return fsspec.open(f"filecache::{url}", "rb", filecache={"cache_storage": cache}).open()


def _gzipped(data: bytes, folder: Path) -> Any:
    with gzip.open(folder / "model.gz", "wb", 1) as stream:
        stream.write(data)
    return gzip.open(folder / "model.gz", "rb")


def _zipped(data: bytes, _: Path) -> Any:
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("model.pt", data)
    return zipfile.ZipFile(outer).open("model.pt")


OPENED: dict[str, Callable[[bytes, Path], Any]] = {
    "fsspec, local": _fsspec_local,
    "fsspec, memory": _fsspec_memory,
    "fsspec, cached": _fsspec_cached,
    "gzip": _gzipped,
    "member of a zip": _zipped,
    "subclass of BytesIO": lambda data, _: Subclass(data),
    "spooled in memory": _spooled(1 << 30),
    "spooled on disk": _spooled(1),
    "only what torch needs": lambda data, _: OnlyWhatTorchNeeds(data),
    "behind other bytes": lambda data, _: _advanced(Subclass(b"#" * 777 + data), 777),
}


def _advanced(stream: Any, position: int) -> Any:
    stream.seek(position)
    return stream


@pytest.fixture(params=list(OPENED.values()), ids=list(OPENED))
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[[bytes, Path], Any]]:
    with ExitStack() as stack:

        def open_closed_later(data: bytes, folder: Path) -> Any:
            stream = request.param(data, folder)
            stack.callback(getattr(stream, "close", int))
            return stream

        yield open_closed_later


def _checkpoint() -> dict[str, Any]:
    shared = torch.arange(1000.0)
    return {
        "model": {"weight": torch.randn(300, 40), "view": shared[100:200], "whole": shared},
        "sparse": torch.eye(5).to_sparse(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "epoch": 7,
    }


def _flipped(data: bytes) -> bytes:
    """Damage the payload of the first record of at least a kilobyte."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = next(m for m in archive.infolist() if "/data/" in m.filename and m.file_size > 999)
    at = data.index(member.filename.encode()) + len(member.filename) + 600
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("map_location", [None, "cpu", "meta", lambda storage, _: storage])
def test_values_are_torchs(
    opened: Callable[[bytes, Path], Any], tmp_path: Path, weights_only: bool, map_location: Any
) -> None:
    data = saved_bytes(
        stock_save,
        {k: v for k, v in _checkpoint().items() if k != "sparse" or map_location is None},
    )
    options: dict[str, Any] = {"weights_only": weights_only, "map_location": map_location}
    expected = stock_load(io.BytesIO(data), **options)
    with ptsave.installed():
        assert_same_object(torch.load(opened(data, tmp_path), **options), expected)


def test_damage_is_an_error_that_names_the_entry(
    opened: Callable[[bytes, Path], Any], tmp_path: Path
) -> None:
    data = _flipped(saved_bytes(stock_save, {"layers": [torch.ones(10), torch.ones(1000)]}))
    assert stock_load(io.BytesIO(data))  # which stock does not notice
    path = tmp_path / "whole.pt"
    path.write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError) as of_path:
        ptsave.load(path)
    with pytest.raises(ptsave.CorruptCheckpointError) as of_stream:
        ptsave.load(opened(data, tmp_path))
    assert of_stream.value.entries == of_path.value.entries == ["layers.1"]
    assert of_stream.value.record == of_path.value.record == "data/1"
    assert of_stream.value.offset == of_path.value.offset
    assert "CRC-32" in str(of_stream.value)


def test_damage_loads_if_asked(opened: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    data = _flipped(saved_bytes(stock_save, [torch.ones(1000)]))
    assert_same_object(
        ptsave.load(opened(data, tmp_path), verify=False), stock_load(io.BytesIO(data))
    )


def test_files_without_checksums_warn(opened: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    data = saved_bytes(save_without_checksums, [torch.ones(1000)])
    with pytest.warns(ptsave.CheckpointWarning, match="without checksums") as caught:
        ptsave.load(opened(data, tmp_path))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("n", [3, 100, 700, -400, -30, -1])
def test_cut_files_are_damaged(
    opened: Callable[[bytes, Path], Any], tmp_path: Path, n: int
) -> None:
    data = saved_bytes(stock_save, [torch.ones(1000)])[:n]
    with pytest.raises((RuntimeError, UnpicklingError)):
        ptsave.load(opened(data, tmp_path))


def test_other_formats_are_torchs(opened: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save([torch.ones(3)], stream, _use_new_zipfile_serialization=False)
    legacy = opened(stream.getvalue(), tmp_path)
    if isinstance(legacy, OnlyWhatTorchNeeds):
        return  # which torch does not read either
    assert_same_object(ptsave.load(legacy), [torch.ones(3)])


def test_compressed_archives_are_verified(
    opened: Callable[[bytes, Path], Any], tmp_path: Path
) -> None:
    data = deflated(saved_bytes(stock_save, [torch.ones(1000)]))
    assert_same_object(ptsave.load(opened(data, tmp_path)), [torch.ones(1000)])


def test_load_into_is_verified(opened: Callable[[bytes, Path], Any], tmp_path: Path) -> None:
    data = saved_bytes(stock_save, {"weight": torch.ones(1000)})
    target = {"weight": torch.zeros(1000)}
    ptsave.load_into(opened(data, tmp_path), target)
    assert_same_object(target["weight"], torch.ones(1000))
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.load_into(opened(_flipped(data), tmp_path), {"weight": torch.zeros(1000)})


def test_storages_are_read_one_at_a_time() -> None:
    stream = OnlyWhatTorchNeeds(saved_bytes(stock_save, [torch.ones(3 << 20), torch.ones(3 << 20)]))
    ptsave.load(stream)
    assert stream.largest_read <= 8 << 20  # of 24 MiB


def test_what_the_stream_raises_is_passed_on() -> None:
    class Failing(Subclass):
        n_left = 12

        def read(self, nbytes: int | None = -1) -> bytes:
            self.n_left -= 1
            if self.n_left == 0:
                raise ConnectionResetError("gone")
            return super().read(nbytes)

    with pytest.raises(ConnectionResetError, match="gone"):
        ptsave.load(Failing(saved_bytes(stock_save, [torch.ones(10) for _ in range(30)])))


def test_what_cannot_seek_is_torchs_to_refuse() -> None:
    class Pipe(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return 0

    with pytest.raises(io.UnsupportedOperation) as by_torch:
        torch.load(Pipe())  # type: ignore[arg-type]
    with pytest.raises(io.UnsupportedOperation) as by_ptsave:
        ptsave.load(Pipe())
    assert str(by_ptsave.value) == str(by_torch.value)


def test_a_stream_gives_fewer_bytes_than_it_has() -> None:
    class Shrinking(Subclass):
        def read(self, nbytes: int | None = -1) -> bytes:
            return super().read(nbytes) if self.tell() < 3000 or self.tell() > 40_000 else b""

    with pytest.raises(OSError, match="got 0 bytes"):
        ptsave.load(Shrinking(saved_bytes(stock_save, [torch.ones(1000) for _ in range(12)])))


def test_progress_counts_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    ptsave.load(Subclass(saved_bytes(stock_save, [torch.ones(1000)])), progress=True)
    assert "loading" in capsys.readouterr().err
