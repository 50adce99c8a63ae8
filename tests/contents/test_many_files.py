"""ptsave.open of sets with more files than the process may have open."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from _corruption import flip
from _system import run_python
from _weights import write_file

import ptsave
from ptsave.contents import opening

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_each_is_open_while_it_is_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{i}": torch.full((300, 700), float(i)) for i in range(5)}
    for name, tensor in tensors.items():
        write_file(tmp_path / f"model-{name}{suffix}", {name: tensor})
    before = n_descriptors()
    monkeypatch.setattr(opening, "n_files_to_hold", lambda: 4)
    with ptsave.open(tmp_path) as archive:
        assert n_descriptors() == before
        names = [str(i % 5) for i in range(100)]
        with ThreadPoolExecutor(8) as threads:
            for name, tensor in zip(names, threads.map(archive.get_tensor, names), strict=True):
                assert torch.equal(tensor, tensors[name])
            rows = threads.map(lambda name: archive.get_slice(name)[100:200, 3:5], names)
            assert all(map(torch.equal, rows, (tensors[name][100:200, 3:5] for name in names)))
        assert n_descriptors() == before


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_that_is_another_one_by_then(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        write_file(tmp_path / f"model-{i}{suffix}", {f"{i}": torch.full((5,), float(i))})
    monkeypatch.setattr(opening, "n_files_to_hold", lambda: 1)
    with ptsave.open(tmp_path) as archive:
        write_file(tmp_path / f"new{suffix}", {"0": torch.full((5,), 7.0)})
        (tmp_path / f"new{suffix}").rename(tmp_path / f"model-0{suffix}")
        (tmp_path / f"model-1{suffix}").unlink()
        for name, reason in (("0", "replaced"), ("1", "No such file")):
            with pytest.raises(OSError, match=reason) as caught:
                archive.get_tensor(name)
            assert caught.value.filename == str(tmp_path / f"model-{name}{suffix}")
        assert archive.get_tensor("2").tolist() == [2.0] * 5


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    for name in "ab":
        torch.save({name: values}, tmp_path / f"model-{name}.pt")
    flip(tmp_path / "model-b.pt", values[500:510].numpy().tobytes())
    monkeypatch.setattr(opening, "n_files_to_hold", lambda: 1)
    with ptsave.open(tmp_path) as archive:
        assert torch.equal(archive.get_tensor("a"), values)
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by b"):
            archive.get_tensor("b")
        with pytest.raises(ptsave.CorruptCheckpointError, match="used by b"):
            archive.verify()


def test_files_that_have_to_be_open_together(tmp_path: Path) -> None:
    for i in range(50):
        torch.save({f"{i}": torch.ones(3)}, tmp_path / f"model-{i}.pt")
    code = (
        "import resource, sys, torch, ptsave\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "ptsave.convert(sys.argv[1], sys.argv[2])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = run_python(code, tmp_path, tmp_path / "all.safetensors", env=environment, status=1)
    assert "has to read 50 files at the same time. Raise the limit (ulimit -n)" in done.stderr
    assert not (tmp_path / "all.safetensors").exists()
