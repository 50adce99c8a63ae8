"""torch_checkpointing over ptsave's storage; and what it asks of one, in words of our own."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_child
from client_checkpoints import imported
from forked_ranks import ForkedRanks
from stock_comparison import assert_same_object, saved_bytes, stock_save
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ptsave
from ptsave.integrations import torch_checkpointing

integration: Any = torch_checkpointing  # whose classes also are the library's

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def library() -> Any:
    return imported("torch_checkpointing")


@pytest.fixture(params=["ours", "theirs"])
def storage(request: pytest.FixtureRequest, library: Any) -> Any:
    """The library's own, too: what both do alike is what it asks for."""
    if request.param == "ours":
        return integration.StorageConfig().create_storage()
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    return LocalFileSystemStorageConfig(use_direct_io=False).create_storage()


@pytest.fixture
def ours(library: Any) -> Any:
    return integration.StorageConfig().create_storage()


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"w": torch.randn(300, 70), "h": torch.randn(9).half(), "note": ["x", 3, None]}


# ------------------------------------------------------------------------------- the contract


def test_files_and_directories(storage: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    storage.mkdir(folder)
    storage.mkdir(folder)
    with pytest.raises(FileExistsError):
        storage.mkdir(folder, recursive=False)
    for data in (b"", b"x", bytearray(b"y" * 70_000), memoryview(b"z" * 5), bytes(10 << 20)):
        storage.write(folder / "file", data)
        assert storage.read(folder / "file") == bytes(data)
        assert storage.getsize(folder / "file") == len(data)
    assert storage.exists(folder / "file")
    assert storage.exists(folder)
    assert storage.isdir(folder)
    assert not storage.isdir(folder / "file")
    assert storage.ls(folder) == ["file"]
    assert storage.glob(str(folder / "f*")) == [str(folder / "file")]
    assert storage.remap_path(folder) == str(folder)
    with storage.stream_write(folder / "streamed") as stream:
        stream.write(b"one ")
        stream.write(memoryview(b"two"))
    assert storage.read(folder / "streamed") == b"one two"
    storage.delete(folder / "file")
    assert not storage.exists(folder / "file")
    for call in (storage.read, storage.getsize, storage.stream_read, storage.delete):
        with pytest.raises(FileNotFoundError):
            call(folder / "file")
    storage.rmdir(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("whole_first", [None, True, False])
def test_reading_parts(storage: Any, tmp_path: Path, whole_first: bool | None) -> None:
    from torch_checkpointing.storage.base_storage import ReadArgs

    data = os.urandom(100_000)
    (tmp_path / "file").write_bytes(data)
    arguments = None if whole_first is None else ReadArgs(pre_read_full_file=whole_first)
    with storage.stream_read(tmp_path / "file", arguments) as stream:
        assert stream.readable()
        assert stream.seekable()
        assert stream.seek(70_000) == stream.tell() == 70_000
        target = bytearray(10)
        assert stream.readinto(target) == 10
        assert bytes(target) == data[70_000:70_010]
        assert stream.seek(-5, os.SEEK_END) == 99_995
        assert stream.read() == data[-5:]
        assert stream.readinto(target) == 0
        stream.seek(0)
        target = bytearray(200_000)
        n = 0
        while got := stream.readinto(memoryview(target)[n:]):
            n += got
        assert bytes(target[:n]) == data
    assert stream.closed


def test_renaming(storage: Any, tmp_path: Path) -> None:
    """The table in the library's own words: contents land at the name, nothing is merged."""

    def make(name: str, kind: str) -> Path:
        path = tmp_path / name
        if kind == "file":
            path.write_text(name)
        elif kind != "absent":
            path.mkdir()
            if kind == "populated":
                (path / "inside").write_text(name)
        return path

    cases = {
        ("populated", "absent"): True,
        ("populated", "empty"): True,
        ("populated", "populated"): False,
        ("populated", "file"): False,
        ("file", "absent"): True,
        ("file", "file"): True,
        ("file", "empty"): False,
        ("file", "populated"): False,
    }
    for number, ((source, target), allowed) in enumerate(cases.items()):
        a, b = make(f"a{number}", source), make(f"b{number}", target)
        before = sorted(b.rglob("*")) if b.is_dir() else None
        if not allowed:
            with pytest.raises(OSError, match="b"):
                storage.rename(a, b, is_directory=source != "file")
            assert a.exists()
            assert before == (sorted(b.rglob("*")) if b.is_dir() else None)
            continue
        storage.rename(a, b, is_directory=source != "file")
        assert not a.exists()
        assert (b if source == "file" else b / "inside").read_text() == f"a{number}"
        assert source == "file" or sorted(b.rglob("*")) == [b / "inside"]


# ------------------------------------------------------------------------------- the engine


def save(storage: Any, path: Path, obj: object) -> None:
    """Save an object as the library does."""
    with storage.get_write_stream(path, obj) as stream:
        torch.save(obj, stream)


def test_objects_go_to_the_engine(ours: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    expected = tmp_path / "stock" / path.name
    expected.parent.mkdir()
    stock_save(state(), expected)
    save(ours, path, state())
    assert sorted(os.listdir(tmp_path)) == ["state.pt", "stock"]
    assert path.read_bytes() == expected.read_bytes()
    with ours.get_write_stream(path, state()) as stream:
        stream.write(b"bytes")
    assert path.read_bytes() == b"bytes"
    with pytest.raises(ptsave.SaveError, match="does not exist"):
        save(ours, tmp_path / "none" / "x.pt", 1)


def test_what_fails_leaves_the_file_as_it_was(ours: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    stream = ours.stream_write(path)
    with suppress(KeyError), stream:
        stream.write(b"new")
        raise KeyError
    assert stream.closed
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save(ours, path, lambda: 0)
    stream = ours.stream_write(path)
    stream.write(b"never closed")
    del stream

    def fill_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        large = torch.zeros(100_000)
        with pytest.raises(OSError, match="too large") as caught:
            save(ours, path, large)
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="too large"):
            ours.write(path, bytes(200_000))
        with pytest.raises(OSError, match="too large"), ours.stream_write(path) as stream:
            stream.write(bytes(200_000))

    in_child(fill_disk)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("nbytes", [5_000, 20 << 20])
def test_damage_is_found(ours: Any, tmp_path: Path, nbytes: int) -> None:
    from torch_checkpointing.storage import torch_serialization

    load_whole: Any = torch_serialization.load_torch_serialized_from_storage

    path = tmp_path / "state.pt"
    saved = {"w": torch.randint(0, 255, (nbytes,), dtype=torch.uint8)}
    data = bytearray(saved_bytes(stock_save, saved))
    path.write_bytes(data)
    assert_same_object(load_whole(path, ours), saved)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    calls: list[Any] = [lambda: load_whole(path, ours), lambda: ours.read(path)]
    for read in calls:
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"record data/0 .* is damaged"):
            read()
    trusting = integration.StorageConfig(verify=False).create_storage()
    assert trusting.read(path) == bytes(data)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RuntimeError):
        load_whole(path, ours)


def test_the_configuration_reaches_other_processes(library: Any) -> None:
    config = integration.StorageConfig(fsync=False, verify=False)
    again: Any = pickle.loads(pickle.dumps(config))
    assert again == config
    assert repr(again) == "StorageConfig(fsync=False, verify=False)"
    from torch_checkpointing.storage import base_storage

    assert isinstance(config, base_storage.StorageConfig)
    assert isinstance(again.create_storage(), base_storage.Storage)


# ------------------------------------------------------------------------------- the library


@pytest.mark.parametrize("in_background", [False, True])
def test_saves_and_loads(library: Any, tmp_path: Path, in_background: bool) -> None:
    kind = library.CheckpointManager.Config
    options = kind.with_async_save() if in_background else kind.with_sync_save()
    options.storage_config = integration.StorageConfig()
    manager = library.CheckpointManager(options)
    try:
        for step in (1, 2):
            future = manager.save(str(tmp_path / f"step-{step}"), {"model": state(), "step": step})
            if future is not None:
                future.result()
        for step in (1, 2):
            loaded = manager.load(
                str(tmp_path / f"step-{step}"), into={"model": None, "step": None}
            )
            assert_same_object(loaded["model"], state())
            assert loaded["step"] == step
    finally:
        manager.close()
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    files = sorted(name.name for name in (tmp_path / "step-2").rglob("*.pt"))
    assert files == ["model_0.pt", "step_0.pt"]
    assert_same_object(torch.load(tmp_path / "step-2" / "model_0.pt"), state())


# ----------------------------------------------------------------------------- another sharding

SHAPES = ((9, 6), (33, 1025), (700, 513), (3,), (0, 4))
ROWS, COLUMNS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


@pytest.fixture(scope="module")
def resharding(library: Any) -> Any:
    """The library's module, for ranks on CPUs."""
    from torch_checkpointing import default_resharder, metadata_manager

    def gather(self: Any, data: Any, group: Any) -> dict[int, Any]:
        found: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(found, data, group=group)
        return dict(enumerate(found))

    # It gathers by CUDA, whatever the group is.
    kind: Any = next(
        each
        for each in vars(metadata_manager).values()
        if hasattr(each, "_all_gather_pickled_data")
    )
    kind._all_gather_pickled_data = gather
    integration.Resharder()  # made, before ranks are forked
    return default_resharder


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def sharded(size: int, placement: tuple[Any, ...], *, filled: bool = True) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, Any] = {}
    for shape in SHAPES:
        whole = values(shape) if filled else torch.zeros(shape)
        fits = getattr(placement[0], "dim", 0) < len(shape)
        placed = placement if fits else WHOLE
        name = "x".join(map(str, shape))
        found[name] = distribute_tensor(whole, mesh, placed, src_data_rank=None)
    # Another dtype than was saved, and columns of a larger tensor, are no place for bytes.
    half = found["9x6"].to_local().to(torch.float64 if not filled else torch.float32)
    found["half"] = DTensor.from_local(half, mesh, found["9x6"].placements, run_check=False)
    return found


def manager(**options: Any) -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec

    resharder = ItemSpec(resharder=integration.Resharder(**options))
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = integration.StorageConfig(fsync=False)
    config.items = {"model": resharder}
    return CheckpointManager(config)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("the library reads by itself")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((4, ROWS), (2, COLUMNS)), ((2, COLUMNS), (4, ROWS)), ((2, ROWS), (1, WHOLE))],
    ids=["columns-of-rows", "rows-of-columns", "whole"],
)
def test_every_rank_gets_its_part(
    resharding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Any, loaded: Any
) -> None:
    path = tmp_path / "checkpoint"

    def save(rank: int) -> None:
        manager().save(str(path), {"model": sharded(*saved)})

    def load(rank: int) -> None:
        target = sharded(*loaded, filled=False)
        expected = sharded(*loaded)
        manager().load(str(path), into={"model": target})
        for name, value in expected.items():
            found = target[name].to_local()
            assert torch.equal(found, value.to_local().to(found.dtype)), name

    ForkedRanks(tmp_path, save, saved[0]).join()
    for name in ("offset_reads", "full_file_read"):
        method = f"_read_source_slices_with_{name}"
        monkeypatch.setattr(resharding.DefaultResharder, method, refuse)
    ForkedRanks(tmp_path, load, loaded[0]).join()
    if loaded[1] is not WHOLE:
        return
    (file,) = path.rglob("model_1.pt")  # of which all is wanted now
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    def find_damage(rank: int) -> None:
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"model_1\.pt"):
            load(rank)

    ForkedRanks(tmp_path, find_damage, 1).join()


def test_damage_beside_the_parts_that_are_read(
    resharding: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part has no checksum: it is unverified, unless all of its record is read for it."""
    path = tmp_path / "checkpoint"
    whole = torch.arange(64.0).view(8, 8)

    def state_of(size: int, values: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (size,))
        return {"x": distribute_tensor(values, mesh, ROWS, src_data_rank=None)}

    ForkedRanks(
        tmp_path, lambda rank: manager().save(str(path), {"model": state_of(1, whole)}), 1
    ).join()
    (file,) = path.rglob("model_0.pt")
    data = bytearray(file.read_bytes())
    data[data.index(whole.numpy().tobytes()) + 8 * 8 * 4 - 1] ^= 1  # in the last of the rows
    for is_damaged in (False, True):
        if is_damaged:
            file.write_bytes(data)

        def load(rank: int, *, is_damaged: bool = is_damaged) -> None:
            for verify_parts in (False, True):
                target = state_of(2, torch.zeros(8, 8))
                caplog.clear()
                with caplog.at_level("INFO", "ptsave"):
                    reading = manager(verify_parts=verify_parts)
                    if verify_parts and is_damaged:
                        with pytest.raises(
                            ptsave.CorruptCheckpointError,
                            match=r"model_0\.pt: the .* at offset 1984 .*",
                        ):
                            reading.load(str(path), into={"model": target})
                        continue
                    reading.load(str(path), into={"model": target})
                assert ("128 bytes, were not verified" in caplog.text) is not verify_parts
                found = target["x"].to_local()
                assert torch.equal(found, whole[4 * rank : 4 * rank + 4]) is (
                    rank == 0 or not is_damaged
                )

        ForkedRanks(tmp_path, load, 2).join()


def test_what_the_library_has_to_read(
    resharding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of views of other numbers the bytes alone are not the values."""
    path = tmp_path / "checkpoint"
    number = torch.arange(8.0).view(4, 2) * (1 + 2j)

    def tensor(size: int, placement: Any, whole: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (size,))
        part = distribute_tensor(whole, mesh, placement, src_data_rank=None).to_local()
        if whole is number:
            part = part.conj()
        return {"x": DTensor.from_local(part, mesh, placement, run_check=False)}

    def save(rank: int) -> None:
        manager().save(str(path), {"model": tensor(2, ROWS, number)})

    def load(rank: int) -> None:
        for strategy in resharding.ReshardingReadStrategy:
            if strategy.name == "OFFSET":
                continue
            target = tensor(2, COLUMNS, torch.zeros(4, 2, dtype=torch.complex64))
            manager(read_strategy=strategy).load(str(path), into={"model": target})
            assert torch.equal(target["x"].to_local(), number.conj()[:, rank : rank + 1])

    ForkedRanks(tmp_path, save, 2).join()
    ForkedRanks(tmp_path, load, 2).join()
