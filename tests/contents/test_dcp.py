"""ptsave.open, ls and verify of torch.distributed.checkpoint directories, against torch's tools."""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as _dcp
from _corruption import flip
from _system import nbytes_read
from command_line import run
from reports import verify_directory
from stock_comparison import Calls, assert_same_object
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import ptsave
from ptsave._C import unjustified_claim
from ptsave.dcp.metadata import load_metadata
from ptsave.distributed import StorageReader, StorageWriter
from ptsave.inspection.verification import verify_file

dcp: Any = _dcp  # a package that does not export its names to type checkers

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def state() -> dict[str, Any]:
    return {
        "model": {
            "large": torch.arange(300_000, dtype=torch.float32).view(300, 1000),
            "small": torch.arange(5.0),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, False]),
            "half": torch.arange(6).to(torch.bfloat16),
        },
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "list": [torch.ones(2), {"three": 3}, "text"],
        "step": torch.tensor(3.0),
        "epoch": 7,
        "note": "text",
        "blob": b"\x00\x01",
        "nothing": None,
        "tensors": (torch.ones(3), torch.zeros(2)),
    }


def write(folder: Path, kind: str, values: dict[str, Any] | None = None) -> Path:
    writer = StorageWriter if kind == "ours" else dcp.FileSystemWriter
    dcp.save(state() if values is None else values, storage_writer=writer(folder))
    return folder


def stock_object(folder: Path, tmp_path: Path) -> Any:
    """Return what torch's own tool makes of a directory."""
    path = tmp_path / "stock.pt"
    dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        copies = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (a, b)]
        bytes_of = [t.view(-1).view(torch.uint8) for t in copies]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bytes_of)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def rewrite(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = load_metadata(str(folder / ".metadata"))
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rank_file(folder: Path) -> Path:
    (file,) = folder.glob("*.distcp")
    return file


@pytest.fixture(params=["ours", "stock"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", request.param)


# --------------------------------------------------------------------------------------- opening


def test_the_object_is_the_one_of_torchs_tool(folder: Path, tmp_path: Path) -> None:
    expected = stock_object(folder, tmp_path)
    with ptsave.open(folder) as archive:
        found = {key: archive[key] for key in expected}
        assert same(found, expected)
        assert archive.metadata["format"] == "dcp"
        for name in archive:
            assert same(archive.get_tensor(name), archive.get_tensor(name, verify=True))


def test_the_metadata_names_the_checkpoint(folder: Path) -> None:
    with ptsave.open(folder / ".metadata") as archive:
        assert archive.get_tensor("model.small").tolist() == [0, 1, 2, 3, 4]
    with (
        (folder / ".metadata").open("rb") as stream,
        pytest.raises(ptsave.UnsupportedSourceError, match="pass the path"),
    ):
        ptsave.open(stream)


def test_a_relative_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for path in (".", ".metadata"):
        with ptsave.open(path) as archive:
            assert archive["epoch"] == 7
        assert not verify_file(path).problems


INDICES: list[Any] = [
    ...,
    0,
    -1,
    slice(10, 20),
    (slice(None), 3),
    (slice(1, 200, 7), slice(5, 900, 100)),
    (..., slice(0, 1)),
    (slice(299, None), None, -2),
    (slice(5, 5), ...),
    (None, 7, None, slice(None, None, 3)),
]


def test_slices_are_those_of_the_tensor(folder: Path) -> None:
    large = state()["model"]["large"]
    with ptsave.open(folder) as archive:
        for index in INDICES:
            assert same(archive.get_slice("model.large")[index], large[index]), index
            assert same(archive.get_slice("model.large", verify=True)[index], large[index]), index
        with pytest.raises(IndexError):
            archive.get_slice("model.large")[300]


def test_tensors_within_objects_can_be_read(folder: Path) -> None:
    with ptsave.open(folder) as archive:
        assert archive.get_tensor("tensors.0").tolist() == [1, 1, 1]
        assert archive.get_slice("tensors.0")[1:].tolist() == [1, 1]
        assert archive.info("tensors.0").chunks == ()


def test_a_slice_reads_its_bytes_only(tmp_path: Path) -> None:
    folder = write(tmp_path, "ours", {"x": torch.arange(8 << 20, dtype=torch.int64).view(8192, -1)})
    with ptsave.open(folder) as archive:
        part = archive.get_slice("x")
        before = nbytes_read()
        assert part[100:102].sum() == torch.arange(100 * 1024, 102 * 1024).sum()
        assert nbytes_read() - before < 1 << 20


# --------------------------------------------------------------------------------------- listing


def test_ls_names_the_chunks(folder: Path) -> None:
    found = run("ls", folder, "--json")
    assert found.exit_code == 0, found.output
    (file,) = json.loads(found.output)["files"]
    assert file["format"] == "dcp"
    tensors = {each["name"]: each for each in file["tensors"]}
    (chunk,) = tensors["model.large"]["chunks"]
    assert chunk["offsets"] == [0, 0]
    assert chunk["sizes"] == [300, 1000]
    assert chunk["file"] == rank_file(folder).name
    data = rank_file(folder).read_bytes()[chunk["offset"] : chunk["offset"] + chunk["nbytes"]]
    assert same(torch.load(io.BytesIO(data)), state()["model"]["large"])
    lines = run("ls", folder, "--chunks").output
    assert f"[0:300, 0:1000]  {rank_file(folder).name} at {chunk['offset']}" in lines
    assert "Traceback" not in run("ls", folder, "--stats").output


def test_other_tools_say_what_to_do(folder: Path) -> None:
    with pytest.raises(IsADirectoryError, match="ptsave convert"):
        ptsave.load(folder)
    with pytest.raises(IsADirectoryError, match=r"ptsave\.open"):
        ptsave.load_model(torch.nn.Linear(1, 1), folder)


# ------------------------------------------------------------------------------------- verifying


def test_the_file_of_a_rank_alone(folder: Path) -> None:
    """It is no damaged archive, of which `verify` finds the last."""
    (file,) = folder.glob("*.distcp")
    for command in (["ls"], ["verify"], ["convert", "--force"]):
        result = run(*command, file, *(["x.pt"] if "convert" in command else []))
        assert result.exit_code == 2
        words = " ".join(result.output.split())
        assert "one rank" in words, words
        assert f"pass the directory, {folder}" in words, words


def test_a_whole_checkpoint_is_whole(folder: Path) -> None:
    found = verify_directory(folder)
    assert not found.is_damaged
    (file,) = found.files
    assert file.path == str(folder)
    assert set(file.whole or ()) == set(file.tensors or ()) >= {"model.large", "step"}
    assert file.has_checksums
    assert run("verify", folder).exit_code == 0
    with ptsave.open(folder) as archive:
        archive.verify()


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_every_flipped_bit_is_found(tmp_path: Path, kind: str) -> None:
    """But for stock's metadata, which has no checksum, and for what its archives do not check."""
    values = {"x": torch.arange(3000.0), "y": torch.ones(4), "note": "text", "n": [1, 2]}
    folder = write(tmp_path, kind, values)
    files = [rank_file(folder)] + ([folder / ".metadata"] if kind == "ours" else [])
    for file in files:
        data = bytearray(file.read_bytes())
        step = max(len(data) // 200, 1)
        missed = []
        for position in range(0, len(data), step):
            data[position] ^= 1 << (position % 8)
            file.write_bytes(data)
            data[position] ^= 1 << (position % 8)
            if not verify_file(folder).problems:
                missed.append(position)
        file.write_bytes(data)
        if kind == "ours":
            assert not missed
        else:
            assert not set(missed) & payload_bytes(folder, file)
        assert not verify_file(folder).problems


def payload_bytes(folder: Path, file: Path) -> set[int]:
    """Return the positions that the elements of tensors take in a file of torch's writer."""
    data = file.read_bytes()
    found: set[int] = set()
    for values in (torch.arange(3000.0), torch.ones(4)):
        begin = data.index(values.numpy().tobytes())
        found |= set(range(begin, begin + values.nbytes))
    return found


def test_damage_names_the_entries(folder: Path) -> None:
    file = rank_file(folder)
    flip(file, state()["model"]["large"][7].numpy().tobytes())
    found = verify_file(folder)
    assert [each.entries for each in found.problems] == [["model.large"]]
    assert "model.large" not in (found.whole or ())
    assert "model.small" in (found.whole or ())
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "damaged: model.large" in result.output
    with ptsave.open(folder) as archive:
        with pytest.raises(ptsave.CorruptCheckpointError, match=file.name):
            archive.get_tensor("model.large")
        archive.get_tensor("model.large", verify=False)
        assert same(archive.get_tensor("model.small"), state()["model"]["small"])
        with pytest.raises(ptsave.CorruptCheckpointError, match=file.name):
            archive.verify()


def test_a_slice_of_a_damaged_tensor(folder: Path) -> None:
    """Ours compares the blocks that it reads; torch's has one checksum for all of a part."""
    file = rank_file(folder)
    flip(file, state()["model"]["large"][7].numpy().tobytes())
    with ptsave.open(folder) as archive:
        part = archive.get_slice("model.large", verify=True)
        with pytest.raises(ptsave.CorruptCheckpointError):
            part[7]
        assert same(archive.get_slice("model.large")[200], state()["model"]["large"][200])


def test_a_missing_file_is_named(folder: Path) -> None:
    file = rank_file(folder)
    os.rename(file, folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="missing") as caught:
        ptsave.open(folder)
    assert caught.value.filename == str(file)
    found = verify_file(folder / ".metadata")
    assert file.name in found.problems[0].reason
    assert found.whole == ["model.empty"]
    assert run("verify", folder).exit_code == 1
    os.rename(folder / "elsewhere", file)
    os.remove(folder / ".metadata")
    with pytest.raises(FileNotFoundError, match="the save has not ended"):
        ptsave.open(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = rank_file(folder)
    for nbytes in (file.stat().st_size - 1, 5000, 0):
        os.truncate(file, nbytes)
        with pytest.raises(ptsave.CorruptCheckpointError, match=file.name):
            ptsave.open(folder)
        assert file.name in verify_file(folder).problems[0].reason


def test_metadata_that_is_cut_short(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for nbytes in (0, 1, 20, len(data) // 2, len(data) - 1):
        (folder / ".metadata").write_bytes(data[:nbytes])
        problems = verify_file(folder).problems
        assert problems, nbytes
        assert ".metadata" in problems[0].reason


# ---------------------------------------------------------------------------------- bad metadata


def put(metadata: Metadata, **changes: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(changes)


def described(metadata: Metadata) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata["model.small"]
    assert isinstance(found, TensorStorageMetadata)
    return found


def resize(size: Any, metadata: Metadata) -> None:
    described(metadata).size = size


def rechunk(chunks: list[tuple[Any, Any]], metadata: Metadata) -> None:
    (info,) = (i for key, i in metadata.storage_data.items() if key.fqn == "model.small")
    described(metadata).chunks = [ChunkStorageMetadata(*chunk) for chunk in chunks]
    for chunk in described(metadata).chunks:
        metadata.storage_data[MetadataIndex("model.small", chunk.offsets)] = info


def put_at(path: Any, metadata: Metadata) -> None:
    metadata.planner_data["model.small"] = path


def as_object(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.small"] = BytesStorageMetadata()


HOSTILE: list[tuple[Callable[[Metadata], None], str]] = [
    (partial(put, relative_path="../outside"), "points outside"),
    (partial(put, relative_path="/etc/passwd"), "points outside"),
    (partial(put, relative_path=3), "in which file"),
    (partial(put, offset=-1), "does not say where"),
    (partial(put, length="x"), "does not say where"),
    (partial(put, length=1 << 62), "objects take|cut short"),
    (partial(resize, torch.Size([1 << 60])), "all files together"),
    (partial(resize, (1 << 60, 1 << 60, 1 << 60)), "out of bounds"),
    (partial(resize, (-1,)), "shape"),
    (partial(resize, [5]), "shape"),
    (partial(resize, None), "shape"),
    (partial(rechunk, [((0,), (6,))]), "out of bounds"),
    (partial(rechunk, [((0, 0), (5, 1))]), "out of bounds"),
    (partial(rechunk, [((0,), (3,)), ((2,), (3,))]), "overlaps"),
    (partial(rechunk, [((0,), (3,))]), "3 elements"),
    (partial(rechunk, []), "0 elements"),
    (partial(rechunk, [((0,), (-5,))]), "which parts"),
    (partial(put_at, ("list", 1 << 40)), "nearly empty"),
    (partial(put_at, ("list", "x")), "cannot be at"),
    (partial(put_at, ("step",)), "another entry"),
    (partial(put_at, ("step", "x")), "cannot be at"),
    (partial(put_at, ()), "path"),
    (partial(put_at, (1.5,)), "path"),
    (as_object, "does not say where"),
]


def test_metadata_that_says_what_cannot_be(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for change, words in HOSTILE:
        (folder / ".metadata").write_bytes(whole)
        rewrite(folder, change)
        error = pytest.raises(ptsave.CorruptCheckpointError, match=words)
        with error, ptsave.open(folder) as archive:
            archive.get_tensor("model.small")
        problems = verify_file(folder).problems
        if "cannot be at" not in words and words not in ("nearly empty", "another entry", "path"):
            assert problems, words


def test_hostile_pickles_run_nothing(folder: Path, tmp_path: Path) -> None:
    metadata = load_metadata(str(folder / ".metadata"))
    metadata.planner_data = Calls(os.mkdir, str(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ptsave.CorruptCheckpointError, match="mkdir"):
        ptsave.open(folder)
    assert verify_file(folder).problems
    assert not (tmp_path / "ran").exists()


def test_an_object_of_another_class_is_not_built(tmp_path: Path) -> None:
    day = datetime.timedelta(days=1)
    folder = write(tmp_path, "ours", {"x": torch.ones(1), "odd": random.Random(0), "day": day})
    with ptsave.open(folder) as archive:
        assert archive["x"].tolist() == [1]
        assert archive["day"] == day
        with pytest.raises(pickle.UnpicklingError, match=r"'odd' needs random\.Random"):
            archive["odd"]
    assert not verify_file(folder).problems


def test_random_flips_in_metadata_raise_documented_errors(folder: Path) -> None:
    """Whatever a flipped byte says, opening and reading does, or names the file."""
    data = (folder / ".metadata").read_bytes()
    data = data[: len(data) - 12] if data[-12:].startswith(b"ptsave") else data
    generator = random.Random(0)
    for _ in range(150):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] = generator.randrange(256)
        (folder / ".metadata").write_bytes(changed)
        error = error_of_reading(folder)
        assert error is None or str(folder) in str(error)


def error_of_reading(folder: Path) -> Exception | None:
    """Return the documented error of reading all tensors, if there is one."""
    try:
        with ptsave.open(folder) as archive:
            for name in archive:
                archive.get_tensor(name)
    except (ptsave.CorruptCheckpointError, FileNotFoundError) as error:
        return error
    return None


def test_ranks_that_saved_by_themselves(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    dcp.save(state(), storage_writer=writer, use_collectives=False)
    with ptsave.open(tmp_path) as archive:
        assert same(archive.get_tensor("model.large"), state()["model"]["large"])
    assert not verify_file(tmp_path).problems
    shutil.copy(tmp_path / "__0.metadata", tmp_path / "__1.metadata")
    with pytest.raises(ValueError, match="2 ranks"):
        ptsave.open(tmp_path)
    with ptsave.open(tmp_path / "__1.metadata") as archive:
        assert archive["epoch"] == 7


def test_the_writer_of_one_file_an_item(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False))
    with ptsave.open(tmp_path) as archive:
        assert same(archive.get_tensor("model.large"), state()["model"]["large"])
    assert not verify_file(tmp_path).problems


def test_metadata_of_megatron(folder: Path) -> None:
    """Its torch_dist directories are DCP's, but for the class of the metadata."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    kinds = {kind: type(kind, (Metadata,), {"__module__": name}) for kind in ["MCoreMetadata"]}
    metadata = load_metadata(str(folder / ".metadata"))
    theirs = kinds["MCoreMetadata"](**vars(metadata))
    theirs.mcore_data = {"x": {"nd_reformulated_orig_global_shape": (2, 3)}}
    module = types.ModuleType(name)
    vars(module).update(kinds)
    with pytest.MonkeyPatch.context() as patch:
        parts = name.split(".")
        for n in range(1, len(parts)):
            outer = ".".join(parts[:n])
            patch.setitem(sys.modules, outer, types.ModuleType(outer))
        patch.setitem(sys.modules, name, module)
        (folder / ".metadata").write_bytes(pickle.dumps(theirs))
    with ptsave.open(folder) as archive:
        assert same(archive.get_tensor("model.large"), state()["model"]["large"])
    with ptsave.open(folder / ".metadata") as archive:
        assert archive["epoch"] == 7
    assert not verify_file(folder).problems


def test_metadata_that_asks_for_memory(folder: Path) -> None:
    for data in (
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02Np4000000000\n.",
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
        b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
        b"\x80\x02T\xff\xff\xff\x7fx.",
        b"\x80\x02N",
    ):
        (folder / ".metadata").write_bytes(data)
        for read in (ptsave.open, lambda path: StorageReader(path).read_metadata()):
            with pytest.raises(ptsave.CorruptCheckpointError, match=r"\.metadata: damaged: it"):
                read(folder)


@pytest.mark.parametrize("n", [300, 30_000])
def test_whole_metadata_asks_for_nothing(n: int) -> None:
    values = {"k" * (i % 500) + str(i): (i, 1.5, b"x", 10 ** (i % 99), [None]) for i in range(n)}
    for protocol in range(6):
        assert unjustified_claim(pickle.dumps(values, protocol=protocol)) is None


def test_every_opcode_has_its_argument() -> None:
    arguments = {
        pickletools.TAKEN_FROM_ARGUMENT1: b"\1.",
        pickletools.TAKEN_FROM_ARGUMENT4: b"\1\0\0\0.",
        pickletools.TAKEN_FROM_ARGUMENT4U: b"\1\0\0\0.",
        pickletools.TAKEN_FROM_ARGUMENT8U: b"\1\0\0\0\0\0\0\0.",
    }
    for opcode in pickletools.opcodes:
        n = 0 if opcode.arg is None else opcode.arg.n
        words = b"1\n2\n" if opcode.name in ("GLOBAL", "INST") else b"1\n"
        data = opcode.code.encode("latin-1") + (bytes(n) if n >= 0 else arguments.get(n, words))
        assert (unjustified_claim(data) is None) == (opcode.name == "STOP"), opcode.name
        assert unjustified_claim(data + b".") is None, opcode.name


@pytest.mark.parametrize("size", [100, 70_000, 140_000, 17_000_000])
def test_numbers_as_large_as_the_metadata(size: int) -> None:
    for number, is_too_large in ((size - 1, False), (size, True), (size | 0xFFFF, True)):
        data = b"\x80\x02" + b"N0" * (size // 2 - 9)
        data += b"Nr" + number.to_bytes(4, "little") + b"."
        data = data.ljust(size, b".")
        claim = unjustified_claim(data)
        assert (claim is not None) == is_too_large
        assert claim is None or claim.startswith(f"it gives a value the number {number}, and has ")


def test_metadata_that_is_a_pipe(folder: Path) -> None:
    """Nobody waits for a writer."""
    (folder / ".metadata").unlink(missing_ok=True)
    os.mkfifo(folder / ".metadata")
    for read in (ptsave.open, lambda path: StorageReader(path).read_metadata()):
        with pytest.raises(OSError, match="this is a pipe"):
            read(folder)


def test_metadata_of_an_older_torch(tmp_path: Path) -> None:
    """It names the properties of ShardedTensor's, which have the same state."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    state = {"x": torch.arange(6.0)}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    path = tmp_path / "old" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["x"].properties = TensorProperties(dtype=torch.float32)
    path.write_bytes(pickle.dumps(metadata))
    assert b"sharded_tensor.metadata" in path.read_bytes()
    with ptsave.open(tmp_path / "old") as archive:
        assert_same_object(archive["x"], state["x"])
    target = {"x": torch.zeros(6)}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "old"), no_dist=True)
    assert_same_object(target, state)


def test_a_writer_has_the_id_of_its_save(tmp_path: Path) -> None:
    """As torch's FileSystemWriter; a new save has a new one."""
    writer = StorageWriter(tmp_path / "a")
    first = writer.save_id
    assert dcp.FileSystemWriter(tmp_path / "b").save_id != first
    writer.reset(tmp_path / "c")
    assert writer.save_id != first
