"""Every kind of source through every function that loads: as from the plain path of an archive."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import fsspec
import pytest
import torch
from _corruption import flipped
from safetensors import SafetensorError
from safetensors.torch import save
from stock_comparison import (
    assert_same_load_failure,
    assert_same_object,
    deflated,
    save_without_checksums,
    saved_bytes,
    stock_load,
    stock_save,
)
from torch import Tensor, nn

import ptsave

_numbers = itertools.count()
Opened = Callable[[str, bytes], Any]  # opens a kind of source that has these bytes


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))


STATE = {name: tensor.detach() for name, tensor in model().state_dict().items()}


KINDS: dict[str, bytes] = {
    "archive": saved_bytes(stock_save, STATE),
    "legacy": saved_bytes(stock_save, STATE, _use_new_zipfile_serialization=False),
    "compressed": deflated(saved_bytes(stock_save, STATE)),
    "safetensors": save(STATE),
}


class Subclass(io.BytesIO):
    """Which may do anything with its bytes, so that it is read through its methods."""


class OnlyWhatTorchNeeds:
    """A seekable file without a name, a descriptor, or `readinto`."""

    def __init__(self, data: bytes) -> None:
        stream = io.BytesIO(data)
        self._read, self.readline, self.seek, self.tell = (
            getattr(stream, name) for name in ("read", "readline", "seek", "tell")
        )
        self.largest_read = 0

    def read(self, nbytes: int = -1) -> bytes:
        piece: bytes = self._read(nbytes)
        self.largest_read = max(self.largest_read, len(piece))
        return piece


def gzipped(data: bytes, path: Path) -> Any:
    with gzip.open(path, "wb", 1) as stream:
        stream.write(data)
    return gzip.open(path, "rb")


def member_of_a_zip(data: bytes) -> Any:
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("model.pt", data)
    return zipfile.ZipFile(outer).open("model.pt")


def spooled(data: bytes, folder: Path, max_size: int = 0) -> Any:
    stream = tempfile.SpooledTemporaryFile(max_size)
    stream.write(data)
    stream.seek(0)
    return stream


def at(stream: Any, position: int) -> Any:
    stream.seek(position)
    return stream


def written(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def in_memory(data: bytes) -> str:
    name = f"/front_door/{next(_numbers)}"
    fsspec.filesystem("memory").pipe(name, data)
    return f"memory:/{name}"


SOURCES: dict[str, Callable[[bytes, Path], Any]] = {
    "path": lambda data, folder: str(written(data, folder / "model.pt")),
    "called .safetensors": lambda data, folder: str(written(data, folder / "model.safetensors")),
    "called .bin": lambda data, folder: str(written(data, folder / "model.bin")),
    "called nothing": lambda data, folder: str(written(data, folder / "model")),
    "pathlib.Path": lambda data, folder: written(data, folder / "model.safetensors"),
    "file URL": lambda data, folder: f"file://{written(data, folder / 'model.pt')}",
    "memory URL": lambda data, _: in_memory(data),
    "chained URL": lambda data, _: f"simplecache::{in_memory(data)}",
    "BytesIO": lambda data, _: io.BytesIO(data),
    "BytesIO, further on": lambda data, _: at(io.BytesIO(b"#" * 777 + data), 777),
    "subclass of BytesIO": lambda data, _: Subclass(data),
    "subclass, further on": lambda data, _: at(Subclass(b"#" * 777 + data), 777),
    "file": lambda data, folder: written(data, folder / "model.x").open("rb"),
    "file, further on": lambda data, folder: at(
        written(b"#" * 777 + data, folder / "model.x").open("rb"), 777
    ),
    "spooled in memory": lambda data, folder: spooled(data, folder, 1 << 30),
    "spooled on disk": lambda data, folder: spooled(data, folder, 1),
    "fsspec file": lambda data, _: fsspec.open(in_memory(data), "rb").open(),
    "fsspec cached file": lambda data, folder: fsspec.open(
        f"filecache::{in_memory(data)}", "rb", filecache={"cache_storage": str(folder / "cache")}
    ).open(),
    "gzip": lambda data, folder: gzipped(data, folder / "model.gz"),
    "member of a zip": lambda data, _: member_of_a_zip(data),
    "only what torch needs": lambda data, _: OnlyWhatTorchNeeds(data),
    "fsspec local file": lambda data, folder: fsspec.open(
        str(written(data, folder / "model.y")), "rb"
    ).open(),
}


def into_module(source: Any) -> Any:
    target = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    assert ptsave.load_into(source, target) == ([], [])
    return target.state_dict()


def into_dict(source: Any) -> Any:
    target = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    ptsave.load_into(source, target)
    return target


def into_assigned(source: Any) -> Any:
    target = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    ptsave.load_into(source, target, assign=True)
    return target.state_dict()


def into_model(source: Any) -> Any:
    target = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    assert ptsave.load_model(target, source) == ([], [], [], {})
    return target.state_dict()


LOADS: dict[str, Callable[[Any], Any]] = {
    "load": ptsave.load,
    "load, weights_only=False": lambda source: ptsave.load(source, weights_only=False),
    "load_into a module": into_module,
    "load_into a dict": into_dict,
    "load_into, assign": into_assigned,
    "load_checkpoint": ptsave.load_checkpoint,
    "load_model": into_model,
}


def check_state(found: Any) -> None:
    """Compare with stock torch's load of the plain archive, order and values."""
    expected = stock_load(io.BytesIO(KINDS["archive"]))
    assert list(found) == list(expected)
    assert_same_object({**found}, {**expected})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    streams = []

    def make(name: str, data: bytes) -> Any:
        source = SOURCES[name](data, tmp_path)
        streams.append(source)
        return source

    yield make
    for stream in streams:
        with suppress(BufferError):  # an exception that the test holds may hold its bytes
            getattr(stream, "close", int)()


# What loads and where the bytes come from are two decisions.
EVERYWHERE = ["load", "load_into a module", "load_model"]
DOORS = [
    (source, kind, load)
    for source in SOURCES
    for kind in KINDS
    for load in LOADS
    if load in EVERYWHERE or kind == "archive" or source in ("path", "memory URL", "BytesIO")
]


@pytest.mark.parametrize(("source", "kind", "load"), DOORS)
def test_every_source_through_every_door(opened: Opened, source: str, kind: str, load: str) -> None:
    if (source, kind) == ("only what torch needs", "legacy"):
        return  # which torch does not read either
    found = LOADS[load](opened(source, KINDS[kind]))
    if kind == "safetensors":  # which has an order of its own
        found = {name: found[name] for name in STATE}
    check_state(found)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("how", ["directory", "index", "Path", "directory URL", "index URL"])
def test_directories_of_shards(tmp_path: Path, suffix: str, how: str, load: str) -> None:
    ptsave.save_model(STATE, tmp_path / "shards", max_shard_size=3000, format=suffix)  # type: ignore[arg-type]
    (index,) = (tmp_path / "shards").glob("*.index.json")
    assert len(os.listdir(tmp_path / "shards")) > 2
    base = f"memory://front_door/{next(_numbers)}"
    fsspec.filesystem("memory").put(str(tmp_path / "shards"), base, recursive=True)
    source: Any = {
        "directory": str(tmp_path / "shards"),
        "index": str(index),
        "Path": tmp_path / "shards",
        "directory URL": base,
        "index URL": f"{base}/{index.name}",
    }[how]
    found = LOADS[load](source)
    check_state({name: found[name] for name in STATE})


def checkpoint() -> dict[str, Any]:
    shared = torch.arange(1000.0)
    return {
        "model": {"weight": torch.randn(300, 40), "view": shared[100:200], "whole": shared},
        "sparse": torch.eye(5).to_sparse(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(3)),
        "epoch": 7,
    }


@pytest.mark.parametrize("source", SOURCES)
def test_values_are_torchs(opened: Opened, source: str) -> None:
    obj = checkpoint()
    for location in (None, "cpu", "meta", lambda storage, _: storage):
        data = saved_bytes(stock_save, obj)
        for weights_only in (True, False):
            options: dict[str, Any] = {"weights_only": weights_only, "map_location": location}
            expected = stock_load(io.BytesIO(data), **options)
            with ptsave.installed():
                assert_same_object(torch.load(opened(source, data), **options), expected)
        obj.pop("sparse", None)


# ------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_map_location(opened: Opened, source: str, kind: str) -> None:
    if (source, kind) == ("only what torch needs", "legacy"):
        return
    locations: list[Any] = ["cpu", "meta", torch.device("cpu"), {"cpu": "meta"}]
    for location in (*locations, lambda storage, _: storage):
        found = ptsave.load(opened(source, KINDS[kind]), map_location=location)
        expected = stock_load(io.BytesIO(KINDS["legacy"]), map_location=location)
        for name, tensor in STATE.items():
            assert found[name].device == expected[name].device
            assert found[name].shape == expected[name].shape
            assert found[name].is_meta or torch.equal(found[name], tensor)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["archive", "safetensors"])
def test_mmap_is_for_local_paths(opened: Opened, source: str, kind: str) -> None:
    f = opened(source, KINDS[kind])
    if isinstance(f, (str, os.PathLike)) and "://" not in str(f):
        found = ptsave.load(f, mmap=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
        found["0.weight"].zero_()  # in memory only
        assert torch.equal(ptsave.load(f)["0.weight"], STATE["0.weight"])
    else:
        with pytest.raises(ValueError, match="mmap"):
            ptsave.load(f, mmap=True)


def test_tensors_of_a_safetensors_file_are_the_callers(tmp_path: Path) -> None:
    """They have memory of their own, which stays when the file is written to."""
    path = written(KINDS["safetensors"], tmp_path / "model.safetensors")
    found = ptsave.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    found["0.weight"].resize_(3)


def test_skipped_data(tmp_path: Path) -> None:
    path = written(KINDS["safetensors"], tmp_path / "model.safetensors")
    with torch.serialization.skip_data():
        found = ptsave.load(path)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in STATE.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["path", "memory URL", "BytesIO"])
def test_progress(
    opened: Opened,
    source: str,
    kind: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that stays
    ptsave.load(opened(source, KINDS[kind]), progress=True)
    if kind in ("archive", "safetensors"):
        assert "loading: 100%" in capfd.readouterr().err


@pytest.mark.parametrize("source", SOURCES)
def test_files_without_checksums_warn(opened: Opened, source: str) -> None:
    data = saved_bytes(save_without_checksums, [torch.ones(1000)])
    with pytest.warns(ptsave.CheckpointWarning, match="without checksums") as caught:
        ptsave.load(opened(source, data))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", KINDS)
def test_positions_afterwards(kind: str) -> None:
    """Behind the last storage, where torch leaves it."""
    data = KINDS[kind]
    for make in (io.BytesIO, Subclass):
        ours, stock = at(make(b"##" + data + b"##"[:0]), 2), at(make(b"##" + data), 2)
        ptsave.load(ours)
        if kind == "safetensors":
            assert ours.tell() == len(data) + 2
        else:
            stock_load(stock)
            assert ours.tell() == stock.tell()
        ours.seek(0, os.SEEK_END)
        ours.write(b"more")  # nothing holds its buffer


# ------------------------------------------------------------------------------------- damage


def damaged(data: bytes) -> bytes:
    return flipped(data, data.index(STATE["1.weight"].numpy().tobytes()) + 9, 2)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("source", SOURCES)
def test_damaged_records(opened: Opened, tmp_path: Path, source: str, load: str) -> None:
    data = damaged(KINDS["archive"])
    assert stock_load(io.BytesIO(data))  # which stock does not notice
    with pytest.raises(ptsave.CorruptCheckpointError) as expected:
        ptsave.load(written(data, tmp_path / "plain.pt"))
    with pytest.raises(ptsave.CorruptCheckpointError, match="CRC-32") as caught:
        LOADS[load](opened(source, data))
    assert caught.value.record == expected.value.record
    assert caught.value.offset == expected.value.offset
    assert caught.value.entries == expected.value.entries == ["1.weight"]


@pytest.mark.parametrize("source", SOURCES)
def test_damage_loads_if_asked(opened: Opened, source: str) -> None:
    data = damaged(KINDS["archive"])
    found = ptsave.load(opened(source, data), verify=False)
    assert not torch.equal(found["1.weight"], STATE["1.weight"])
    assert_same_object(found, stock_load(io.BytesIO(data)))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", ["archive", "safetensors"])
@pytest.mark.parametrize("source", SOURCES)
def test_files_that_are_cut_short(opened: Opened, source: str, kind: str, load: str) -> None:
    data = KINDS[kind]
    with pytest.raises(ptsave.CorruptCheckpointError):
        LOADS[load](opened(source, data[: len(data) * 3 // 4]))


@pytest.mark.parametrize("source", SOURCES)
def test_archives_that_are_cut_anywhere(opened: Opened, source: str) -> None:
    for n in (3, 100, 700, -400, -30, -1):
        with pytest.raises((RuntimeError, UnpicklingError, SafetensorError)):
            ptsave.load(opened(source, KINDS["archive"][:n]))


# ----------------------------------------------------------- sources that make no sense for a load


@pytest.mark.parametrize("source", ["BytesIO", "subclass, further on", "file", "fsspec file"])
@pytest.mark.parametrize("load", LOADS)
def test_an_index_without_its_directory(opened: Opened, source: str, load: str) -> None:
    index = b'{"weight_map": {"0.weight": "model-00001-of-00002.safetensors"}}'
    with pytest.raises(ptsave.UnsupportedSourceError, match="pass the path or the URL"):
        LOADS[load](opened(source, index))


@pytest.mark.parametrize("load", LOADS)
def test_directories_without_a_checkpoint(tmp_path: Path, load: str) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(OSError, match="directory"):
        LOADS[load](tmp_path)
    with pytest.raises(IsADirectoryError) as expected:
        stock_load(tmp_path)
    with pytest.raises(IsADirectoryError) as caught:
        ptsave.load(tmp_path)
    assert str(expected.value) in str(caught.value)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    ptsave.save_model(STATE, tmp_path, max_shard_size=3000)
    index = tmp_path / "model.safetensors.index.json"
    lost = min(tmp_path.glob("*.safetensors"))
    lost.unlink()
    for source in (tmp_path, index):
        with pytest.raises(FileNotFoundError, match="a shard is missing") as caught:
            ptsave.load(source)
        assert caught.value.filename == str(lost)


def test_a_directory_of_several_checkpoints(tmp_path: Path) -> None:
    """They are no shards: that shows at the second, and the others are not loaded."""
    for name in ("step-1.pt", "step-2.pt"):
        written(KINDS["archive"], tmp_path / name)
    written(b"damaged", tmp_path / "step-3.pt")
    with pytest.raises(ValueError, match=r"no index says which one to use: .* pass the path"):
        ptsave.load(tmp_path)


def test_an_index_that_names_itself(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"0.weight": "{index.name}"}}}}')
    with pytest.raises(Exception, match=r"index\.json"):
        ptsave.load(index)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("source", ["path", "memory URL", "BytesIO", "subclass of BytesIO"])
def test_torchscript(opened: Opened, source: str) -> None:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted()), stream)
    calls: list[Callable[[Any], Any]] = [
        lambda f: ptsave.load_into(f, model()),
        lambda f: ptsave.load_into(f, model(), weights_only=False),
        lambda f: ptsave.load_into(f, model(), assign=True),
        lambda f: ptsave.load_checkpoint(f, model=model()),
        lambda f: ptsave.load_model(model(), f),
    ]
    for call in calls:
        with pytest.raises(ptsave.NotCheckpointError, match=r"TorchScript.*torch\.jit\.load"):
            call(opened(source, stream.getvalue()))
    with pytest.warns(UserWarning, match="TorchScript") as caught:
        loaded = ptsave.load(opened(source, stream.getvalue()), weights_only=False)
    assert caught[0].filename == __file__
    assert loaded(torch.ones(1)).tolist() == [2]


@pytest.mark.parametrize("source", ["path", "memory URL", "BytesIO"])
def test_modules_that_were_saved_whole(opened: Opened, source: str) -> None:
    data = saved_bytes(stock_save, model())
    words = r"torch\.nn\.modules\.container\.Sequential.*module that was saved whole.*state_dict"
    with pytest.raises(ptsave.NotCheckpointError, match=words):
        ptsave.load_model(model(), opened(source, data))
    words = r"module that was saved whole \(Sequential\).*state_dict"
    with pytest.raises(TypeError, match=words):
        ptsave.load_into(opened(source, data), model(), weights_only=False)
    names: list[Any] = [nn.Sequential, nn.Linear, set]
    with torch.serialization.safe_globals(names), pytest.raises(TypeError, match=words):
        ptsave.load_model(model(), opened(source, data))


def test_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    """A directory whose shards are called by the suffix of another format."""
    ptsave.save_model(STATE, tmp_path / "a", max_shard_size=3000)
    for path in (tmp_path / "a").glob("*.safetensors"):
        stock_save(ptsave.load(path), path)
    for load in LOADS.values():
        found = load(tmp_path / "a")
        check_state({name: found[name] for name in STATE})
    shutil.rmtree(tmp_path / "a")


# ------------------------------------------------------------------------------------ streams


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

    error = assert_same_load_failure(Pipe)
    assert isinstance(error, io.UnsupportedOperation)


def test_a_stream_gives_fewer_bytes_than_it_has() -> None:
    class Shrinking(Subclass):
        def read(self, nbytes: int | None = -1) -> bytes:
            return super().read(nbytes) if self.tell() < 3000 or self.tell() > 40_000 else b""

    with pytest.raises(OSError, match="read 0 bytes"):
        ptsave.load(Shrinking(saved_bytes(stock_save, [torch.ones(1000) for _ in range(12)])))


def test_progress_counts_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    ptsave.load(Subclass(saved_bytes(stock_save, [torch.ones(1000)])), progress=True)
    assert "loading" in capsys.readouterr().err
