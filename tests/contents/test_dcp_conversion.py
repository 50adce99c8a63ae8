"""Conversion from and to torch.distributed.checkpoint directories, compare and extract."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip
from _system import run_python
from command_line import run
from safetensors.torch import load_file
from test_dcp import dcp, pytestmark, state, write  # noqa: F401 - the marks of both
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import ptsave
from ptsave.dcp.metadata import dump_metadata, load_metadata
from ptsave.distributed import StorageReader
from ptsave.inspection.verification import verify_file


@pytest.fixture(params=["ours", "stock"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", request.param)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# ------------------------------------------------------------------------------------ to a file


def test_a_pt_file_is_torchs_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    expected, found = tmp_path / "a" / "x.pt", tmp_path / "b" / "x.pt"
    for path in (expected, found):
        path.parent.mkdir()
    dcp_to_torch_save(folder, expected)
    conversion = ptsave.convert(folder, found)
    assert found.read_bytes() == expected.read_bytes()
    assert conversion.n_tensors == 9
    assert run("convert", folder, tmp_path / "c.pt").exit_code == 0


def test_safetensors_and_shards(folder: Path, tmp_path: Path) -> None:
    ptsave.convert(folder, tmp_path / "x.safetensors", drop=True)
    tensors = load_file(tmp_path / "x.safetensors")
    assert equal(tensors["model.large"], state()["model"]["large"])
    assert equal(tensors["tensors.0"], torch.ones(3))
    ptsave.convert(folder, tmp_path / "shards", max_shard_size="10KB", drop=True)
    with ptsave.open(tmp_path / "shards") as archive:
        assert len(archive) == len(tensors)
        assert all(equal(archive.get_tensor(name), tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match="cannot hold"):
        ptsave.convert(folder, tmp_path / "y.safetensors")


def test_a_damaged_block_leaves_no_target(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob("*.distcp")
    flip(file, state()["model"]["large"][7].numpy().tobytes())
    for target in ("x.pt", "x.safetensors"):
        with pytest.raises(ptsave.CorruptCheckpointError) as caught:
            ptsave.convert(folder, tmp_path / target, drop=True)
        assert caught.value.entries == ["model.large"]
        assert not (tmp_path / target).exists()


def test_a_source_is_not_replaced(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    for target in (file, folder / ".metadata"):
        with pytest.raises(FileExistsError):
            ptsave.convert(folder, target, format="pt", force=True)


def split(folder: Path, name: str, *chunks: tuple[slice, ...]) -> Tensor:
    """Make of one tensor of a checkpoint of ours several parts, in files of their own."""
    metadata = load_metadata(str(folder / ".metadata"))
    values = ptsave.open(folder).get_tensor(name)
    described = metadata.state_dict_metadata[name]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks = []
    for number, chunk in enumerate(chunks):
        offsets = torch.Size(part.start for part in chunk)
        part = values[chunk].contiguous()
        other = folder / f"part-{number}"
        dcp.save({"x": part}, storage_writer=dcp.FileSystemWriter(other))
        (info,) = load_metadata(str(other / ".metadata")).storage_data.values()
        info.relative_path = f"part-{number}/{info.relative_path}"
        described.chunks.append(ChunkStorageMetadata(offsets, part.shape))
        metadata.storage_data[MetadataIndex(name, offsets)] = info
    (folder / ".metadata").write_bytes(dump_metadata(metadata))
    return values


ROWS = ((slice(100, 300), slice(0, 1000)), (slice(0, 100), slice(0, 1000)))
COLUMNS = ((slice(0, 300), slice(0, 999)), (slice(0, 300), slice(999, 1000)))
BLOCKS = (
    (slice(0, 1), slice(0, 400)),
    (slice(0, 1), slice(400, 1000)),
    (slice(1, 300), slice(0, 1000)),
)


@pytest.mark.parametrize("chunks", [ROWS, COLUMNS, BLOCKS], ids=["rows", "columns", "blocks"])
def test_parts_of_many_ranks(folder: Path, tmp_path: Path, chunks: Any) -> None:
    values = split(folder, "model.large", *chunks)
    with ptsave.open(folder) as archive:
        assert len(archive.info("model.large").chunks) == len(chunks)
        assert equal(archive.get_tensor("model.large", verify=True), values)
        assert equal(archive.get_slice("model.large")[::3, 1::7], values[::3, 1::7])
    assert "parts by dimension" in run("ls", folder).output
    ptsave.convert(folder, tmp_path / "x.pt")
    assert equal(ptsave.load(tmp_path / "x.pt")["model"]["large"], values)
    assert not verify_file(folder).problems
    (file,) = (folder / "part-0").glob("*.distcp")
    flip(file, values[chunks[0]].contiguous()[0].numpy().tobytes())
    with pytest.raises(ptsave.CorruptCheckpointError, match=r"model\.large"):
        ptsave.convert(folder, tmp_path / "y.pt")
    assert [each.entries for each in verify_file(folder).problems] == [["model.large"]]


MEMORY = """
import torch.distributed.checkpoint.filesystem
import ptsave
from ptsave.contents import dcp
from ptsave.conversion import rank_writing

def peak():  # not getrusage, which begins with the parent's
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmHWM:") + 1])

ptsave.convert({source!r}, {first!r}, format={format!r})
before = peak()
ptsave.convert({large!r}, {target!r}, format={format!r})
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("kind", ["ours", "stock", "pt"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, kind: str) -> None:
    values = {f"layer{i}": torch.rand(1 << 23) for i in range(7)}  # of 32 MiB each
    small, large = tmp_path / f"small.{kind}", tmp_path / f"large.{kind}"
    if kind == "pt":
        ptsave.save({"x": torch.ones(4)}, small)
        ptsave.save(values, large)
    else:
        write(small, kind, {"x": torch.ones(4)})
        write(large, kind, values)
    to_directory = kind == "pt"
    suffix = "" if to_directory else ".pt"
    code = MEMORY.format(
        source=str(small),
        first=f"{tmp_path}/first{suffix}",
        large=str(large),
        target=f"{tmp_path}/target{suffix}",
        format="dcp" if to_directory else "pt",
    )
    found = run_python(code)
    assert int(found.stdout) <= 128, found.stdout


# --------------------------------------------------------------------------------- to a directory


@pytest.mark.parametrize("kind", ["pt", "safetensors", "ours", "stock"])
def test_torch_loads_what_was_converted(tmp_path: Path, kind: str) -> None:
    values: dict[str, Any] = state()
    source: Path = tmp_path / f"source.{kind}"
    if kind == "pt":
        ptsave.save(values, source)
    elif kind == "safetensors":
        values = dict(values["model"])
        ptsave.convert(write(tmp_path / "x", "ours", values), source)
    else:
        write(source, kind)
    target = tmp_path / "target"
    conversion = ptsave.convert(source, target, format="dcp")
    assert conversion.n_tensors == sum(isinstance(each, Tensor) for each in leaves(values))
    assert not verify_file(target).problems
    for reader in (dcp.FileSystemReader, StorageReader):
        loaded = emptied(values)
        dcp.load(loaded, storage_reader=reader(target))
        assert equal(loaded, values)
    with pytest.raises(FileExistsError):
        ptsave.convert(source, target, format="dcp")
    ptsave.convert(source, target, format="dcp", force=True)
    assert len(list(target.glob("*.distcp"))) == 1
    assert not verify_file(target).problems


def leaves(values: Any) -> list[Any]:
    """Return the leaves of a state dict as DCP flattens it."""
    if isinstance(values, dict):
        return [leaf for value in values.values() for leaf in leaves(value)]
    if isinstance(values, list) and any(isinstance(each, (Tensor, dict)) for each in values):
        return [leaf for value in values for leaf in leaves(value)]
    return [values]


def emptied(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: emptied(value) for key, value in values.items()}
    if isinstance(values, list) and any(isinstance(each, (Tensor, dict)) for each in values):
        return [emptied(value) for value in values]
    return torch.zeros_like(values) if isinstance(values, Tensor) else None


def test_a_view_and_a_tied_tensor(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    values = {"a": weight, "tied": weight, "t": weight.t(), "part": weight[1:, :2], 5: weight[0]}
    ptsave.save(values, tmp_path / "x.pt")
    conversion = ptsave.convert(tmp_path / "x.pt", tmp_path / "out", format="dcp")
    assert conversion.remarks == ["1 key of dicts became text, as in dcp.save"]
    loaded: Any = {str(key): torch.zeros(value.shape) for key, value in values.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert all(equal(loaded[str(key)], value) for key, value in values.items())


def test_what_such_a_directory_cannot_hold(tmp_path: Path) -> None:
    ptsave.save(torch.ones(3), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds a dict"):
        ptsave.convert(tmp_path / "x.pt", tmp_path / "out", format="dcp")
    ptsave.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "y.pt")
    with pytest.raises(ValueError, match=r"a\.b"):
        ptsave.convert(tmp_path / "y.pt", tmp_path / "out", format="dcp")
    ptsave.save({"a": torch.ones(3)}, tmp_path / "z.pt")
    with pytest.raises(ptsave.UnsupportedUrlError):
        ptsave.convert(tmp_path / "z.pt", "memory://out", format="dcp")
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_makes_no_directory(tmp_path: Path) -> None:
    values = torch.arange(5000.0)
    ptsave.save({"a": values}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", values[7:20].numpy().tobytes())
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.convert(tmp_path / "x.pt", tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------- diff and extract


def test_diff_of_a_directory_and_its_file(folder: Path, tmp_path: Path) -> None:
    ptsave.convert(folder, tmp_path / "x.pt")
    assert ptsave.compare(folder, tmp_path / "x.pt").equal
    assert run("diff", folder, tmp_path / "x.pt").exit_code == 0
    changed = state()
    changed["model"]["large"][17, 3] += 1
    other = write(tmp_path / "other", "ours", changed)
    found = ptsave.compare(folder, other)
    assert [(each.kind, each.name) for each in found.differences] == [("numbers", "model.large")]
    assert run("diff", folder, other).exit_code == 1


def test_extract_reads_entries(folder: Path, tmp_path: Path) -> None:
    result = run("extract", folder, "model.small", "-o", tmp_path / "small.pt")
    assert result.exit_code == 0, result.output
    assert equal(torch.load(tmp_path / "small.pt"), state()["model"]["small"])
    result = run("extract", folder, "optimizer", "-o", tmp_path / "optimizer.pt")
    assert equal(torch.load(tmp_path / "optimizer.pt"), state()["optimizer"])


# ---------------------------------------------------------------------------- other directories


def test_directories_of_other_libraries_are_named(tmp_path: Path) -> None:
    zero = tmp_path / "global_step5"
    zero.mkdir()
    for rank in range(2):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        ptsave.save({"optimizer_state_dict": {}}, zero / name)
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO.*zero_to_fp32"):
        ptsave.open(zero)
    assert run("verify", zero).exit_code == 0
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        for item in ("model", "optim"):
            ptsave.save({item: torch.ones(1)}, ranks / f"{item}_{rank}.pt")
    with ptsave.open(ranks) as archive:
        assert set(archive.keys()) == {
            f"{x}.rank{i}.{x}" for x in ("model", "optim") for i in (0, 1)
        }
    with pytest.raises(ValueError, match="torch_checkpointing"):
        ptsave.load(ranks)
    assert run("ls", ranks).exit_code == 0
    assert os.listdir(ranks)


def test_a_descriptor_for_each_file_is_not_kept(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    with ptsave.open(folder) as archive:
        archive.get_tensor("model.large")
        assert len(os.listdir("/proc/self/fd")) <= before
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
