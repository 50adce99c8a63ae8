"""Checkpoints of torch.distributed.checkpoint at URLs: open, ls, verify, diff, convert, load."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as _dcp
from command_line import run
from forked_ranks import ForkedRanks
from stock_comparison import assert_same_object
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ptsave
from ptsave.dcp import rank_files
from ptsave.distributed import StorageReader, StorageWriter
from ptsave.sources.ranges import FsspecFile

fsspec: Any = pytest.importorskip("fsspec")
dcp: Any = _dcp  # a package that does not export its names to type checkers
URL = "memory://test_dcp_url"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "rows": torch.randn(300, 200),
            "half": torch.randn(7).half(),
            "empty": torch.empty(0, 3),
            "one": torch.tensor(3.5),
        },
        "optimizer": [torch.arange(4), {"step": 4}],
        "words": "epoch",
    }


def sharded(dim: int, *, filled: bool = True) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(90_000.0).view(300, 300)
    values = whole if filled else torch.zeros_like(whole)
    return {"x": distribute_tensor(values, mesh, [Shard(dim)], src_data_rank=None)}


@pytest.fixture(params=["ours", "stock"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a directory, which is at `URL` as well."""
    folder = tmp_path / "local"
    is_ours = request.param == "ours"
    writer = StorageWriter(folder) if is_ours else dcp.FileSystemWriter(folder)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    fsspec.filesystem("memory").put(f"{folder}/", f"{URL}/", recursive=True)
    yield folder
    fsspec.filesystem("memory").rm(URL, recursive=True)


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be fetched in several pieces."""
    monkeypatch.setattr(rank_files, "_BATCH_NBYTES", 20_000)
    monkeypatch.setattr(rank_files, "_REQUEST_NBYTES", 8192)


@pytest.mark.usefixtures("few_bytes")
def test_what_a_local_directory_gives(folder: Path, tmp_path: Path) -> None:
    for where in (URL, f"{URL}/.metadata"):
        with ptsave.open(where) as archive, ptsave.open(folder) as local:
            assert [*archive] == [*local]
            for name in local:
                assert torch.equal(archive.get_tensor(name), local.get_tensor(name))
                assert archive.info(name) == local.info(name)
            part = archive.get_slice("model.rows")[3:9, 5:7]
            assert torch.equal(part, state()["model"]["rows"][3:9, 5:7])
            assert archive["words"] == "epoch"
            archive.verify()
    assert run("verify", URL).exit_code == 0
    assert run("diff", URL, folder).exit_code == 0
    listed = [run("ls", each, "--chunks").output.splitlines()[1:] for each in (URL, folder)]
    assert listed[0] == listed[1]
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    ptsave.convert(URL, tmp_path / "far" / "model.pt")
    ptsave.convert(folder, tmp_path / "near" / "model.pt")
    assert (tmp_path / "far" / "model.pt").read_bytes() == (
        tmp_path / "near" / "model.pt"
    ).read_bytes()
    ptsave.convert(f"{URL}", tmp_path / "far" / "weights.safetensors", drop=True)
    assert run("extract", URL, "model.rows", "-o", tmp_path / "rows.pt").exit_code == 0


@pytest.mark.usefixtures("few_bytes")
def test_the_reader_of_dcp(folder: Path) -> None:
    target = state()
    for name in ("rows", "half"):
        target["model"][name].zero_()
    target["optimizer"][0].zero_()
    reader = StorageReader(URL, storage_options={})
    assert reader.checkpoint_id == URL
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same_object(target, state())
    with pytest.raises(TypeError, match="storage_options"):
        StorageReader(folder, storage_options={"anon": True})
    named = r"memory://nowhere/\.metadata|assert metadata is not None"  # the latter is torch 2.9's
    with pytest.raises(CheckpointException, match=named):
        dcp.load(target, storage_reader=StorageReader("memory://nowhere"), no_dist=True)


def test_damage_and_files_that_are_missing(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    (name,) = (each.name for each in folder.glob("*.distcp"))
    data = bytearray((folder / name).read_bytes())
    payload = state()["model"]["rows"].numpy().tobytes()
    data[data.index(payload) + 100_000] ^= 1
    memory.pipe(f"{URL}/{name}", bytes(data))
    result = run("verify", URL)
    assert result.exit_code == 1
    assert "model.rows" in result.output
    assert name in result.output
    with ptsave.open(URL) as archive, pytest.raises(ptsave.CorruptCheckpointError) as caught:
        archive.get_tensor("model.rows")
    assert caught.value.entries == ["model.rows"]
    with pytest.raises(CheckpointException, match=rf"{name}: .*model\.rows"):
        dcp.load(state(), storage_reader=StorageReader(URL), no_dist=True)
    memory.pipe(f"{URL}/{name}", bytes(data[:5000]))
    with pytest.raises(ptsave.CorruptCheckpointError, match=name):
        ptsave.open(URL)
    memory.rm(f"{URL}/{name}")
    with pytest.raises(FileNotFoundError, match=name):
        ptsave.open(URL)
    assert run("verify", URL).exit_code == 1


def test_metadata_by_itself(folder: Path) -> None:
    stream = io.BytesIO((folder / ".metadata").read_bytes())
    with pytest.raises(ptsave.UnsupportedSourceError, match="lie beside it"):
        ptsave.open(stream)


def test_ranks_load_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is no more than the blocks around it; columns are fetched by rows."""
    folder = tmp_path / "local"
    folder.mkdir()
    url = "memory://test_dcp_url_ranks"
    fetched = 0
    read = FsspecFile.read

    def count(self: FsspecFile, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal fetched
        fetched += sum(end - begin for begin, end in ranges)
        return read(self, ranges)

    monkeypatch.setattr(FsspecFile, "read", count)

    def load(rank: int) -> None:
        dcp.save(sharded(0), storage_writer=StorageWriter(folder))
        distributed.barrier()
        fsspec.filesystem("memory").put(f"{folder}/", f"{url}/", recursive=True)
        for dim in (0, 1):
            nonlocal fetched
            fetched = 0
            target = sharded(dim, filled=False)
            dcp.load(target, storage_reader=StorageReader(url))
            assert torch.equal(target["x"].to_local(), sharded(dim)["x"].to_local())
            assert fetched < (200_000 if dim == 0 else 400_000)

    ForkedRanks(tmp_path, load).join()
