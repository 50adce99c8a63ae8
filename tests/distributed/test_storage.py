"""StorageWriter and StorageReader in one process: formats, options, damage, hostile metadata."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import QUIET, dcp
from stock_comparison import Calls
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import ptsave
from ptsave import _C
from ptsave.dcp import metadata as dcp_metadata
from ptsave.dcp.metadata import load_metadata
from ptsave.distributed import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from ptsave.distributed.directory import CheckpointDirectory, head_of

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def save(state: dict[str, Any], folder: Any, **options: Any) -> Metadata:
    saved: Metadata = dcp.save(state, storage_writer=StorageWriter(folder, **options))
    return saved


def load(state: dict[str, Any], folder: Any, reader: Any = StorageReader, **options: Any) -> Any:
    dcp.load(state, storage_reader=reader(folder, **options))
    return state


def state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "large": torch.arange(300_000, dtype=torch.float32).view(300, 1000) * scale,
        "small": torch.arange(5.0) * scale,
        "step": torch.tensor(3.0 * scale),
        "list": [1, "two", {"three": scale}],
    }


def zeros() -> dict[str, Any]:
    return {
        "large": torch.zeros(300, 1000),
        "small": torch.zeros(5),
        "step": torch.tensor(0.0),
        "list": [0, "", {"three": 0.0}],
    }


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def error_of_load(target: dict[str, Any], folder: Path, **options: Any) -> BaseException | None:
    """Return the error in the one that names the rank; None if there is none."""
    try:
        load(target, folder, **options)
    except CheckpointException as error:
        ((found, _),) = error.failures.values()
        return found
    return None


# ------------------------------------------------------------------------------------ the format


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 0, 3), (4, 1, 5)], ids=str)
def test_torch_reads_an_item(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,)).to(torch.uint8)
    file = head_of(dtype, torch.Size(shape)) + data.numpy().tobytes()
    tensor = torch.load(io.BytesIO(file), weights_only=True)
    assert tensor.dtype == dtype
    assert tensor.shape == torch.Size(shape)
    assert tensor.is_contiguous()
    assert tensor.reshape(-1).view(torch.uint8).tolist() == data.tolist()


def test_a_head_is_what_torch_writes() -> None:
    """But for the name of the storage, which is an address there."""
    tensor = torch.arange(6.0).view(2, 3)
    stream = io.BytesIO()
    torch.save(tensor, stream, _use_new_zipfile_serialization=False)
    expected = pickles(stream.getvalue())
    found = pickles(head_of(tensor.dtype, tensor.shape) + tensor.numpy().tobytes())
    assert len(found) == len(expected) == 5
    assert found[:4] == expected[:4]


def pickles(data: bytes) -> list[Any]:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return pid[0], pid[1], pid[3:]

        def find_class(self, module: str, name: str) -> Any:
            if name.startswith("_rebuild"):
                return lambda *args: args
            return super().find_class(module, name)

    stream = io.BytesIO(data)
    return [Unpickler(stream).load() for _ in range(5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_read_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (7, 5)).to(dtype)
    save({"x": values}, tmp_path)
    for reader in (StorageReader, dcp.FileSystemReader):
        target = {"x": torch.zeros(7, 5).to(dtype)}
        load(target, tmp_path, reader)
        same = target["x"].view(-1).view(torch.uint8)
        assert torch.equal(same, values.view(-1).view(torch.uint8))


class Derived(torch.Tensor):
    """A class whose instances lose it with every operation."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("planner", [None, SavePlanner])
def test_values_that_become_plain_tensors(tmp_path: Path, planner: Any) -> None:
    """Of different sizes, beside others that are written as they are."""
    values: dict[str, Any] = {
        **state(),
        **{str(n): torch.arange(n).as_subclass(Derived) for n in (1, 3000, 2)},
        "columns": torch.arange(12.0).view(3, 4).t(),
        "view": torch.arange(100.0)[10:90:4],
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "gradient": torch.ones(5, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "ordered": OrderedDict(a=1),
    }
    dcp.save(values, storage_writer=StorageWriter(tmp_path), planner=planner and planner())
    for reader in (StorageReader, dcp.FileSystemReader):
        target: dict[str, Any] = {
            name: torch.zeros(value.shape, dtype=value.dtype)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        target |= {"parameter": torch.nn.Parameter(torch.zeros(3)), "ordered": OrderedDict(a=0)}
        load(target, tmp_path, reader)
        assert target.pop("ordered") == values["ordered"]
        assert all(torch.equal(target[name], values[name]) for name in target)


def test_targets_of_other_kinds(tmp_path: Path) -> None:
    save({"x": torch.arange(12.0).view(3, 4)}, tmp_path)
    for target in (
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(3, 8)[:, :4],
        torch.zeros(12, dtype=torch.int32).view(3, 4),
    ):
        load({"x": target}, tmp_path)
        assert torch.equal(target.double(), torch.arange(12.0).view(3, 4).double())


def test_small_tensors_take_less_than_a_kibibyte(tmp_path: Path) -> None:
    save({str(i): torch.full((16,), float(i)) for i in range(1000)}, tmp_path)
    (file,) = rank_files(tmp_path)
    assert file.stat().st_size < 1000 * 512
    target = {str(i): torch.zeros(16) for i in range(1000)}
    load(target, tmp_path)
    assert all(torch.equal(target[str(i)], torch.full((16,), float(i))) for i in range(1000))


# ------------------------------------------------------------------------- one save after another


def test_an_older_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    dcp.save(state(1.0), checkpoint_id=tmp_path)
    old = rank_files(tmp_path)
    save(state(2.0), tmp_path)
    first = rank_files(tmp_path)
    save(state(3.0), tmp_path)
    assert not set(old) & set(first)
    assert not set(first) & set(rank_files(tmp_path))
    assert len(rank_files(tmp_path)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".metadata",
        rank_files(tmp_path)[0].name,
    ]
    assert torch.equal(load(zeros(), tmp_path)["large"], state(3.0)["large"])


def test_overwriting_can_be_refused(tmp_path: Path) -> None:
    save(state(1.0), tmp_path)
    with pytest.raises(CheckpointException, match="already exists"):
        save(state(2.0), tmp_path, overwrite=False)
    assert torch.equal(load(zeros(), tmp_path)["large"], state(1.0)["large"])


def test_without_collectives(tmp_path: Path) -> None:
    for scale in (1.0, 2.0):
        writer = StorageWriter(tmp_path)
        dcp.save(state(scale), storage_writer=writer, use_collectives=False)
    assert (tmp_path / "__0.metadata").exists()
    assert len(rank_files(tmp_path)) == 1
    for reader in (StorageReader, dcp.FileSystemReader):
        assert torch.equal(load(zeros(), tmp_path, reader)["large"], state(2.0)["large"])


def test_without_collectives_beside_a_checkpoint_of_all_ranks(tmp_path: Path) -> None:
    """Which loads would take for the new one."""
    save(state(1.0), tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ptsave.SaveError, match="rank 0 saves by itself") as caught:
        dcp.save(state(2.0), storage_writer=StorageWriter(tmp_path), use_collectives=False)
    assert caught.value.filename == str(tmp_path / ".metadata")
    assert sorted(tmp_path.iterdir()) == before
    assert torch.equal(load(zeros(), tmp_path)["large"], state(1.0)["large"])


def test_cached_plans(tmp_path: Path) -> None:
    for scale in (1.0, 2.0, 3.0):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state(scale), storage_writer=StorageWriter(tmp_path), planner=planner)
        for reader in (StorageReader, dcp.FileSystemReader):
            assert torch.equal(load(zeros(), tmp_path, reader)["large"], state(scale)["large"])


def test_a_writer_serves_many_saves_and_directories(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "0", fsync=False)))
    for i in range(3):
        dcp.save(state(float(i)), storage_writer=writer, checkpoint_id=tmp_path / str(i))
    for i in range(3):
        assert torch.equal(load(zeros(), tmp_path / str(i))["small"], state(float(i))["small"])


def test_an_old_save_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "__0_0123456789abcdef.distcp").write_bytes(b"of nobody")
    (tmp_path / ".__0_0123456789abcdee.distcp.0123456789abcdef.ptsave").write_bytes(b"of nobody")
    (tmp_path / "notes.txt").write_text("mine")
    save(state(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(rank_files(tmp_path)) == 1


def test_saving_two_jobs_to_one_path(tmp_path: Path) -> None:
    """The second to finish finds its file gone, and the first one's checkpoint stays."""
    first, second = StorageWriter(tmp_path), StorageWriter(tmp_path)

    class Interrupted(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            dcp.save(state(2.0), storage_writer=second)
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="another save to this directory"):
        dcp.save(state(1.0), storage_writer=Interrupted(tmp_path))
    assert torch.equal(load(zeros(), tmp_path)["large"], state(2.0)["large"])
    dcp.save(state(3.0), storage_writer=first)
    assert torch.equal(load(zeros(), tmp_path)["large"], state(3.0)["large"])


@pytest.mark.parametrize("rank", [None, 0])
def test_a_rank_that_writes_after_its_job_has_lost(rank: int | None, tmp_path: Path) -> None:
    """The save fails for the file that another job removed, and removes the one written later."""
    save(state(), tmp_path)
    before = sorted(tmp_path.iterdir())
    directory = CheckpointDirectory(str(tmp_path))
    removed, late = directory.new_name(0), directory.new_name(1)
    (tmp_path / late).write_bytes(b"late")
    with pytest.raises(ptsave.SaveError, match="another save to this directory"):
        directory.publish(Metadata({}), {removed: 4, late: 4}, rank, fsync=False)
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_another_rank_does_not_see(tmp_path: Path) -> None:
    """As on a host of its own: torch's writer calls that a checkpoint."""

    class Elsewhere(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            (tmp_path / "of-0").mkdir()
            self.reset(tmp_path / "of-0")
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="all ranks must save to one directory"):
        dcp.save(state(1.0), storage_writer=Elsewhere(tmp_path / "of-1"))
    assert not list((tmp_path / "of-0").iterdir())


def test_names_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("", "one/", "./two//deep/", Path("three"), str(tmp_path / "four")):
        save(state(2.0), path)
        for reader in (StorageReader, dcp.FileSystemReader):
            assert torch.equal(load(zeros(), path, reader)["large"], state(2.0)["large"])
    assert (tmp_path / ".metadata").exists()
    kinds: tuple[Any, ...] = (StorageReader, StorageWriter)
    for kind in kinds:
        assert kind(b"bytes").checkpoint_id == "bytes"
        with pytest.raises(TypeError):
            kind(5)


# ----------------------------------------------------------------------------------- asynchronous


def test_async_save_copies_first(tmp_path: Path) -> None:
    values = state()
    values["shared"] = values["large"]
    future = dcp.async_save(values, storage_writer=StorageWriter(tmp_path), no_dist=True)
    for name in ("large", "small", "step"):
        values[name].fill_(-1)
    values["list"].append("later")
    future.result()
    target = {**zeros(), "shared": torch.zeros(300, 1000)}
    load(target, tmp_path)
    assert torch.equal(target["large"], state()["large"])
    assert torch.equal(target["shared"], state()["large"])
    assert torch.equal(target["step"], state()["step"])
    assert target["list"] == state()["list"]


def test_a_save_takes_the_memory_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that begins as soon as that has ended."""
    monkeypatch.setattr("ptsave.distributed.writer._MAX_WAIT_SECONDS", 60.0)
    monkeypatch.setattr("ptsave.distributed.writer._FRESH_NBYTES_A_SECOND", 1.0)
    writer, values = StorageWriter(tmp_path), {"x": torch.ones(3 << 20)}
    n_mappings = []
    for _ in range(4):
        dcp.async_save(values, storage_writer=writer, no_dist=True).result()
        n_mappings.append(_C.staging_statistics()["n_mappings"])
    assert n_mappings == [n_mappings[0]] * 4


def test_async_saves_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy is made when the first save has ended, and one too large never."""
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", "2000000")
    entered, go_on = threading.Event(), threading.Event()

    class Slow(StorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            entered.set()
            assert go_on.wait(60)
            return super().write_data(plan, planner)

    def begin(number: int, values: dict[str, Any]) -> Any:
        return dcp.async_save(values, storage_writer=Slow(tmp_path / str(number)), no_dist=True)

    first = begin(0, {"x": torch.ones(300_000)})
    assert entered.wait(60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(begin, 1, {"x": torch.full((300_000,), 2.0)})
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        go_on.set()
        first.result(60)
        waiting.result(60).result(60)
    target = {"x": torch.zeros(300_000)}
    assert torch.equal(load(target, tmp_path / "1")["x"], torch.full((300_000,), 2.0))
    with pytest.raises(ptsave.StagingFullError, match="2400000"):
        begin(3, {"x": torch.ones(600_000)})


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("verify", [True, False])
def test_every_flipped_byte_is_found(tmp_path: Path, verify: bool) -> None:
    save({"x": torch.arange(3000.0), "y": torch.ones(4)}, tmp_path)
    (file,) = rank_files(tmp_path)
    data = bytearray(file.read_bytes())
    found = 0
    positions = range(0, len(data), 101)
    for position in positions:
        data[position] ^= 1
        file.write_bytes(data)
        data[position] ^= 1
        target = {"x": torch.zeros(3000), "y": torch.zeros(4)}
        error = error_of_load(target, tmp_path, verify=verify)
        found += isinstance(error, ptsave.CorruptCheckpointError) and error.path == str(file)
    assert found == (len(positions) if verify else 0)


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    save(state(), tmp_path)
    (file,) = rank_files(tmp_path)
    changes: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: os.truncate(file, file.stat().st_size - 1), ptsave.CorruptCheckpointError),
        (file.unlink, FileNotFoundError),
        (file.mkdir, IsADirectoryError),
    ]
    for change, kind in changes:
        change()
        error = error_of_load(zeros(), tmp_path)
        assert isinstance(error, kind)
        assert file.name in str(error)


def test_damage_in_a_checkpoint_by_torch(tmp_path: Path) -> None:
    dcp.save({"x": torch.arange(3000.0)}, checkpoint_id=tmp_path)
    (file,) = rank_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged, words in ((data, ""), (data[:100], "cut short")):
        file.write_bytes(damaged)
        error = error_of_load({"x": torch.zeros(3000)}, tmp_path)
        assert isinstance(error, ptsave.CorruptCheckpointError)
        assert words in str(error)


# ---------------------------------------------------------------------------- what metadata may say


def error_of_places(folder: Path, **attributes: Any) -> BaseException | None:
    """Return the error of loading a checkpoint whose items are said to be elsewhere."""
    save({"x": torch.ones(3)}, folder)
    metadata = load_metadata(str(folder / ".metadata"))
    for info in metadata.storage_data.values():
        vars(info).update(attributes)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return error_of_load({"x": torch.zeros(3)}, folder)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "", ".", "a\0b", "a//b"]
)
def test_metadata_that_points_outside(tmp_path: Path, name: str) -> None:
    assert "points outside" in str(error_of_places(tmp_path, relative_path=name))


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 10), (0, 1 << 40), (1 << 62, 1 << 62), (0, 3), (0, -1), ("0", 3), (None, None)],
)
def test_metadata_with_impossible_places(tmp_path: Path, offset: Any, length: Any) -> None:
    error = error_of_places(tmp_path, offset=offset, length=length)
    assert isinstance(error, ptsave.CorruptCheckpointError)


@pytest.mark.parametrize("kind", [(torch.float32, [-1]), (torch.float32, (1 << 70,)), (3, (3,)), 3])
def test_metadata_with_impossible_kinds(tmp_path: Path, kind: Any) -> None:
    error = error_of_places(tmp_path, ptsave_tensor=kind)
    assert isinstance(error, ptsave.CorruptCheckpointError)
    assert "what kind of tensor x is" in str(error)


HOSTILE = [
    pickle.dumps(Calls(os.system, "touch ran")),
    pickle.dumps([Calls(os.system, "touch ran")]),
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N}S'offset'\nI7\nstb.",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'anything'\nI7\nstb.",
    b"ctorch\nload\n(S'x'\ntR.",
    b"ctorch.serialization\n_get_layout\n(S'torch.load'\ntR.",
    b"ctorch.serialization\n_get_layout\n(N}S'__defaults__'\n(S'torch.strided'\ntstb.",
    b"cpathlib\nPath.cwd\n(tR.",
    b"",
    b"\x80",
    b"N.",
    pickle.dumps({}),
    pickle.dumps(Metadata({}, None, None)),
    pickle.dumps(Metadata([], None, {})),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    before = {kind: dict(vars(kind)) for kind in (Metadata, MetadataIndex)}
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError):
        StorageReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()
    assert before == {kind: dict(vars(kind)) for kind in (Metadata, MetadataIndex)}
    assert dcp_metadata._layout.__defaults__ is None


def test_metadata_by_torch_keeps_its_paths(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path)
    metadata = StorageReader(tmp_path).read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == str(tmp_path)


class Harmless:
    """A class that restricted unpickling does not know."""


@pytest.mark.parametrize("writer", [StorageWriter, dcp.FileSystemWriter])
def test_objects_that_may_run_code(tmp_path: Path, writer: Any) -> None:
    """They are refused on demand, before DCP's planner sees them; by default they load."""
    values = {"fine": [1, "two"], "other": Harmless(), "code": Calls(os.system, "touch ran")}
    dcp.save(values, storage_writer=writer(tmp_path))
    assert type(load({"other": None}, tmp_path)["other"]) is Harmless
    fine = {"fine": None}
    assert load(fine, tmp_path, weights_only=True)["fine"] == values["fine"]
    for name in ("other", "code"):
        error = error_of_load({name: None}, tmp_path, weights_only=True)
        assert isinstance(error, pickle.UnpicklingError)
        assert f": {name}: " in str(error)
        assert ".distcp" in str(error)
    assert not Path("ran").exists()


# -------------------------------------------------------------------------------------------- names


def test_nothing_is_written_to_urls() -> None:
    with pytest.raises(ptsave.UnsupportedUrlError):
        StorageWriter("s3://bucket/checkpoint")
    for storage in (StorageWriter, StorageReader):
        assert not storage.validate_checkpoint_id("s3://bucket/checkpoint")


def test_importing_ptsave_does_not_import_dcp() -> None:
    code = "import sys, ptsave; print('torch.distributed.checkpoint.metadata' in sys.modules); "
    code += "print(ptsave.distributed.StorageWriter.__name__)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert result.stdout.split() == ["False", "StorageWriter"]


def planners() -> list[Any]:
    """Return the classes that DCP makes planners of where a call names none."""
    saver: Any = dcp.state_dict_saver
    return [saver.DefaultSavePlanner, dcp.state_dict_loader.DefaultLoadPlanner]


def test_install_puts_both_behind_torchs_names(tmp_path: Path) -> None:
    stock = dcp.FileSystemWriter, dcp.FileSystemReader
    with ptsave.installed(distributed=True):
        assert issubclass(dcp.FileSystemWriter, StorageWriter)
        dcp.save(state(), checkpoint_id=tmp_path)
        named: Any = dcp.FileSystemWriter(tmp_path, thread_count=4)
        assert named.path == tmp_path
        assert isinstance(named, StorageWriter)
        assert isinstance(pickle.loads(pickle.dumps(named)), StorageWriter)
        assert isinstance(stock[0](tmp_path), dcp.FileSystemWriter)
        assert type(dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)) is stock[0]
        for arguments in ({}, {"path": tmp_path, "bogus": 1}):
            with pytest.raises(TypeError, match=r"FileSystemWriter\.__init__\(\)"):
                dcp.FileSystemWriter(**arguments)
        dcp.load(zeros(), checkpoint_id=tmp_path)
        with ptsave.installed():
            assert issubclass(dcp.FileSystemReader, StorageReader)
        assert planners() == [SavePlanner, LoadPlanner]
    assert planners() == [dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner]
    assert (dcp.FileSystemWriter, dcp.FileSystemReader) == stock
    assert load_metadata(str(tmp_path / ".metadata")).storage_meta is not None
    assert rank_files(tmp_path)[0].name != "__0_0.distcp"
    dcp.load(zeros(), checkpoint_id=tmp_path)
