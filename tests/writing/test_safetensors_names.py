"""Torch's format is not written under the name of a safetensors file, which torch.load expects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave


class _OtherPath(os.PathLike[str]):
    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


TENSORS = {"weight": torch.ones(3)}


def _grow(path: Any) -> None:
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("weight", TENSORS["weight"])


WAYS: dict[str, Callable[[Any], object]] = {
    "save": lambda path: ptsave.save(TENSORS, path),
    "save_checkpoint": lambda path: ptsave.save_checkpoint(path, weight=TENSORS["weight"]),
    "async_save": lambda path: ptsave.async_save(TENSORS, path).result(),
    "ArchiveWriter": _grow,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [str, Path, _OtherPath, "memory://names/{}".format])
def test_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*ptsave\.save_model"):
        WAYS[way](kind("model.safetensors"))
    assert os.listdir(tmp_path) == []


def test_a_file_object_is_written_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as stream:
        ptsave.save(TENSORS, stream)
    assert torch.equal(ptsave.load(tmp_path / "a.safetensors")["weight"], TENSORS["weight"])


@pytest.mark.skipif(
    "safetensors.torch" not in torch.load.__code__.co_names, reason="this torch does not read them"
)
def test_the_advice_is_good(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ptsave.save_model(TENSORS, path)
    assert torch.equal(torch.load(path)["weight"], TENSORS["weight"])


@pytest.mark.parametrize("defaults", [{}, {"fsync": True}])
def test_installed_it_is_torch_save(tmp_path: Path, defaults: dict[str, bool]) -> None:
    torch.save(TENSORS, tmp_path / "stock.safetensors")
    with ptsave.installed(**defaults):
        torch.save(TENSORS, tmp_path / "ours.safetensors")
    assert ptsave.compare(tmp_path / "stock.safetensors", tmp_path / "ours.safetensors").equal
