"""save_model, convert and extract to URLs: the files of a local directory, one model at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import flip
from torch import Tensor, nn
from url_file_systems import MEMORY, PLAIN, contents, failing

import ptsave
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import write_entries
from ptsave.models import save_model
from ptsave.streaming.payload_sources import write_bytes

REMOTE = [MEMORY, PLAIN]
FORMATS = ["safetensors", "pt"]


pytestmark = pytest.mark.usefixtures("_clean_file_systems")


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}": torch.rand(50, 50, generator=generator) for i in range(4)}
    return {**tensors, "transposed": tensors["layer.0"].t(), "tied": tensors["layer.1"]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {f"/{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("protocol", REMOTE)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_files_of_a_local_directory(tmp_path: Path, protocol: str, kind: Any, size: str) -> None:
    options: dict[str, Any] = {"format": kind, "max_shard_size": size, "fsync": True}
    ptsave.save_model(weights(), tmp_path / "model", **options)
    ptsave.save_model(weights(), f"{protocol}://model", **options)
    assert contents(protocol) == files_of(tmp_path / "model")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_old_set_is_removed(kind: Any) -> None:
    url = "plain://model"
    for size, n_files in (("20KB", 4), ("1GB", 1), ("20KB", 4), ("15KB", 6)):
        ptsave.save_model(weights(), url, format=kind, max_shard_size=size)
        assert len(contents(PLAIN)) == n_files
    ptsave.save([1], f"{url}/other.pt")
    ptsave.save_model(nn.Linear(2, 2), url, format=kind)
    assert len(contents(PLAIN)) == 2  # the other file, and the model


@pytest.mark.parametrize("method", ["open", "write", "mv"])
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_failures_leave_the_old_set(method: str, size: str) -> None:
    ptsave.save_model(weights(1), "plain://model", max_shard_size="20KB")
    old = contents(PLAIN)
    error = ConnectionResetError("gone")
    with failing(method, error), pytest.raises(ptsave.SaveError) as caught:
        ptsave.save_model(weights(2), "plain://model", max_shard_size=size)
    assert str(caught.value.filename).startswith("plain://model/model")
    assert contents(PLAIN) == old


def test_nothing_is_undone_once_the_index_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ptsave.save_model(weights(1), "plain://model", max_shard_size="20KB")

    def write(*args: Any, **kwargs: Any) -> None:
        write_bytes(*args, **kwargs)
        raise ConnectionResetError("gone")  # the server has the file, and its answer is lost

    monkeypatch.setattr(save_model, "write_bytes", write)
    with pytest.raises(ptsave.SaveError):
        ptsave.save_model(weights(2), "plain://model", max_shard_size="20KB")
    loaded = dict(ptsave.iter_weights("plain://model"))
    assert torch.equal(loaded["layer.3"], weights(2)["layer.3"])


@pytest.mark.parametrize("protocol", REMOTE)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "shards", "shards/"])
def test_conversions(tmp_path: Path, protocol: str, name: str) -> None:
    ptsave.save({"model": weights()}, tmp_path / "source.pt")
    (tmp_path / "out").mkdir()
    options: dict[str, Any] = {"max_shard_size": "20KB"} if "shards" in name else {}
    local = convert(tmp_path / "source.pt", f"{tmp_path}/out/{name}", **options)
    url = f"{protocol}://out/{name}"
    done = convert(tmp_path / "source.pt", url, **options)
    assert done.path == url
    assert (done.n_tensors, done.nbytes) == (local.n_tensors, local.nbytes)
    folder = tmp_path / "out"
    expected = {
        f"/out/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert contents(protocol) == expected
    with pytest.raises(FileExistsError, match="exists already"):
        convert(tmp_path / "source.pt", url, **options)
    convert(tmp_path / "source.pt", url, force=True, **options)
    assert len(contents(protocol)) == len(expected)


def test_conversions_from_url_to_url(tmp_path: Path) -> None:
    ptsave.save(weights(), "plain://a/model.pt")
    convert(
        "plain://a/model.pt",
        "memory://b/model.safetensors",
        storage_options={"x": 1},
        target_storage_options={},
    )
    ptsave.save(weights(), tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    expected = (tmp_path / "model.safetensors").read_bytes()
    assert contents(MEMORY) == {"/b/model.safetensors": expected}
    with pytest.raises(FileExistsError, match="the target is the source itself"):
        convert("plain://a/model.pt", "plain://a/model.pt", force=True)


def test_damaged_sources_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "source.pt"
    ptsave.save(weights(), path)
    flip(path, path.stat().st_size // 2)
    for name in ("model.pt", "model.safetensors", "shards"):
        with pytest.raises(ptsave.CorruptCheckpointError):
            convert(path, f"plain://{name}")
        assert contents(PLAIN) == {}


@pytest.mark.parametrize("protocol", REMOTE)
@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npy"])
def test_entries(tmp_path: Path, protocol: str, suffix: str) -> None:
    entries = {"weight": torch.rand(300, 100).t()}
    write_entries(entries, str(tmp_path / f"a.{suffix}"))
    url = f"{protocol}://a.{suffix}"
    write_entries(entries, url)
    assert contents(protocol) == {f"/a.{suffix}": (tmp_path / f"a.{suffix}").read_bytes()}
    with pytest.raises(FileExistsError):
        write_entries(entries, url)
    write_entries(entries, url, overwrite=True)


@pytest.mark.parametrize("protocol", REMOTE)
def test_compacted_files(tmp_path: Path, protocol: str) -> None:
    ptsave.save({"row": torch.rand(1000, 100)[3]}, tmp_path / "model.pt")
    (tmp_path / "small").mkdir()
    compact(tmp_path / "model.pt", tmp_path / "small" / "model.pt")
    expected = (tmp_path / "small" / "model.pt").read_bytes()
    url = f"{protocol}://a/model.pt"
    done = compact(tmp_path / "model.pt", url)
    assert (done.path, done.nbytes) == (url, len(expected))
    assert contents(protocol) == {"/a/model.pt": expected}
    with pytest.raises(FileExistsError, match="exists already"):
        compact(tmp_path / "model.pt", url)
    ptsave.save({"row": torch.rand(1000, 100)[3]}, f"{protocol}://b/model.pt")
    before = contents(protocol)["/b/model.pt"]
    assert not compact(f"{protocol}://b/model.pt", dry_run=True).is_written
    assert contents(protocol)["/b/model.pt"] == before
    assert compact(f"{protocol}://b/model.pt").is_written
    assert len(contents(protocol)["/b/model.pt"]) == len(expected)


def test_local_urls(tmp_path: Path) -> None:
    ptsave.save_model(weights(), f"file://{tmp_path}/a")
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    convert(tmp_path / "a", f"file://{tmp_path}/b.pt")
    convert(f"{tmp_path}/b.pt", f"file://{tmp_path}/shards/", max_shard_size="20KB")
    assert len(os.listdir(tmp_path / "shards")) == 4
