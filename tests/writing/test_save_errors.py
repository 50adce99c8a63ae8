"""The types of errors of saving: SaveError, and what Python's own `open` would raise."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_child

import ptsave
from ptsave import errors

STATE = {"weight": torch.arange(10.0)}


SAVES: dict[str, Callable[[Path], object]] = {
    "save": lambda path: ptsave.save(STATE, path),
    "save in place": lambda path: ptsave.save(STATE, path, atomic=False),
    "async_save": lambda path: ptsave.async_save(STATE, path).result(),
    "save_checkpoint": lambda path: ptsave.save_checkpoint(path, model=STATE),
}
every_save = pytest.mark.parametrize("save", SAVES)


def error_of_open(path: Path) -> OSError:
    """Return what Python raises for a file that cannot be written."""
    with pytest.raises(OSError) as caught:
        path.open("wb")
    return caught.value


def assert_like(error: BaseException, expected: OSError, path: Path) -> None:
    assert isinstance(error, type(expected)), type(error).__mro__
    assert isinstance(error, ptsave.SaveError)
    assert isinstance(error, OSError)
    assert isinstance(error, RuntimeError)  # what torch.save raises
    assert (error.errno, error.filename) == (expected.errno, str(path))


@every_save
@pytest.mark.parametrize("name", ["missing/model.pt", "directory", "n" * 256, "loop"])
def test_types_are_those_of_open(tmp_path: Path, save: str, name: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("round")
    (tmp_path / "round").symlink_to("loop")
    path = tmp_path / name
    with pytest.raises(type(error_of_open(path))) as caught:
        SAVES[save](path)
    assert_like(caught.value, error_of_open(path), path)
    with pytest.raises(RuntimeError):
        torch.save(STATE, path)
    assert sorted(os.listdir(tmp_path)) == ["directory", "loop", "round"]


@every_save
def test_a_file_in_place_of_the_directory(path: Path, save: str) -> None:
    """torch says that there is no such directory, and so do we."""
    path.touch()
    with pytest.raises(ptsave.SaveError):
        SAVES[save](path / "model.pt")
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set the attribute")
@every_save
def test_missing_permission(tmp_path: Path, save: str) -> None:
    # An attribute that root has to respect, too.
    path = tmp_path / "model.pt"
    path.write_bytes(b"before")
    chattr = shutil.which("chattr")
    if chattr is None or subprocess.run([chattr, "+i", path], check=False).returncode != 0:
        pytest.skip("no immutable files here")
    try:
        with pytest.raises(PermissionError) as caught:
            SAVES[save](path)
        assert_like(caught.value, error_of_open(path), path)
    finally:
        subprocess.run([chattr, "-i", path], check=True)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_save_model(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(FileExistsError) as caught:
        ptsave.save_model(STATE, path)
    assert isinstance(caught.value, ptsave.SaveError)
    with pytest.raises(NotADirectoryError) as below:
        ptsave.save_model(STATE, path / "below")
    assert isinstance(below.value, ptsave.SaveError)


def test_checkpointer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError) as caught:
        ptsave.AsyncCheckpointer(path)
    assert isinstance(caught.value, ptsave.SaveError)
    checkpointer = ptsave.AsyncCheckpointer(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-00000001.pt").mkdir()
    checkpointer.save(1, model=STATE)
    with pytest.raises(IsADirectoryError) as later:
        checkpointer.close()
    assert isinstance(later.value, ptsave.SaveError)


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_number(number: int) -> None:
    """Pickling, copying and printing keep all that an OSError has."""
    every = (number, "message", "file", None, "other")
    for arguments in (every[:2], every[:3], every):
        error = ptsave.SaveError(*arguments)
        expected = OSError(*arguments)
        assert isinstance(error, type(expected))
        assert isinstance(error, ptsave.SaveError)
        for each in (
            error,
            pickle.loads(pickle.dumps(error)),
            copy.copy(error),
            copy.deepcopy(error),
        ):
            assert type(each) is type(error)
            assert str(each) == str(expected)
            fields = ("errno", "strerror", "filename", "filename2", "args")
            assert all(getattr(each, name) == getattr(expected, name) for name in fields)


def test_translation_keeps_the_second_file() -> None:
    error = ptsave.SaveError.from_os_error(PermissionError(errno.EPERM, "no", "a", None, "b"), "c")
    assert isinstance(error, PermissionError)
    assert (error.errno, error.filename, error.filename2) == (errno.EPERM, "c", "b")


def test_errors_of_malformed_pickles_can_be_pickled() -> None:
    for kind in errors._MALFORMED.values():
        error = kind("message", path="a.pt", record="data.pkl", offset=3, entries=["x"])
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == "message"
        assert vars(again) == vars(error)


@every_save
def test_a_deleted_working_directory(tmp_path: Path, save: str) -> None:
    """As with torch.save an absolute path needs none; of a relative one the error says why."""

    def without_directory() -> None:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        SAVES[save](tmp_path / "file.pt")
        with pytest.raises(ptsave.SaveError) as caught:
            SAVES[save](Path("file.pt"))
        assert caught.value.errno == errno.ENOENT
        assert "working directory" in str(caught.value) or save == "save in place"

    in_child(without_directory)
    assert torch.load(tmp_path / "file.pt")


# ----------------------------------------------------------------------- names of safetensors files


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
