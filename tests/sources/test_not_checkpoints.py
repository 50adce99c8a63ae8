"""What ptsave.open says about files that are no checkpoints."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import doors
import pytest
import torch
from reports import verify_directory
from stock_comparison import failure_of, saved_bytes, stock_load

import ptsave

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 2147483648\n"
)


def saved() -> bytes:
    return saved_bytes(torch.save, {"weight": torch.arange(1000.0)})


def as_tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("weights")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    return stream.getvalue()


def as_zip(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"contents")
    return stream.getvalue()


FOREIGN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it is empty"),
    "lfs": (lambda: LFS_POINTER, r"git-lfs pointer to a file of 2147483648 bytes.*git lfs pull"),
    "html": (lambda: b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "an HTML page"),
    "html without doctype": (lambda: b"<html><head></head></html>", "an HTML page"),
    "json": (lambda: b'{"error": "Entry not found"}', r"it is text: '\{\"error"),
    "gzip": (lambda: gzip.compress(saved()), "gzip"),
    "bzip2": (lambda: bz2.compress(saved()), "bzip2"),
    "xz": (lambda: lzma.compress(saved()), "xz"),
    "tar": (as_tar, "a tar archive"),
    "numpy": (lambda: b"\x93NUMPY\x01\x00" + bytes(100), "numpy.load"),
    "npz": (lambda: as_zip("arr_0.npy"), "npz"),
    "document": (lambda: as_zip("[Content_Types].xml"), "office document"),
    "zip of files": (lambda: as_zip("notes.txt"), r"zip archive of other files \('notes.txt'"),
    "zip of folders": (lambda: as_zip("a/b", "a/c"), "no data.pkl"),
    "pickle": (lambda: pickle.dumps([1, 2]), "pickle"),
    "zeros": (lambda: bytes(5000), "begins with zeros"),
    "noise": (lambda: bytes(range(128, 256)), "no checkpoint begins like that"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("as_stream", [False, True], ids=["path", "stream"])
def test_says_what_it_is(name: str, as_stream: bool, tmp_path: Path) -> None:
    make, words = FOREIGN[name]
    path = tmp_path / "model.pt"
    path.write_bytes(make())
    with pytest.raises(ptsave.NotCheckpointError, match=words) as caught:
        ptsave.open(io.BytesIO(path.read_bytes()) if as_stream else path)
    assert isinstance(caught.value, ptsave.CorruptCheckpointError)
    if not as_stream:
        assert str(path) in str(caught.value)
        assert caught.value.path == str(path)


def test_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"model/{name}", b"3\n")
    with pytest.raises(ptsave.NotCheckpointError, match=r"torch\.jit\.load"):
        ptsave.open(path)


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.99])
def test_cut_short(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    whole = saved()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(ptsave.CorruptCheckpointError):
        ptsave.open(path)


def test_encrypted_member() -> None:
    data = bytearray(saved())
    begin = data.index(b"PK\x01\x02", data.index(b"data.pkl") + 100)
    for header in (0, begin):  # of data.pkl, both of them
        data[header + (8 if header else 6)] |= 1
    with pytest.raises(ptsave.CorruptCheckpointError, match="encrypt"):
        ptsave.open(io.BytesIO(bytes(data)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ptsave.open(tmp_path / "none.pt")
    assert caught.value.errno == errno.ENOENT


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(saved())

    def refuse(name: object, **options: object) -> None:  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr("ptsave.sources.ranges.io.FileIO", refuse)
    with pytest.raises(PermissionError) as caught:
        ptsave.open(path)
    assert str(path) in str(caught.value)


def test_neither_path_nor_file() -> None:
    with pytest.raises(TypeError, match="expected a path, a URL or a seekable file, not int"):
        ptsave.open(3)


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_failures_leave_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for make, _ in FOREIGN.values():
        path.write_bytes(make())
        with pytest.raises(ptsave.NotCheckpointError):
            ptsave.open(path)


# ------------------------------------------------------------------------------------- every door


FOREIGN_EVERYWHERE = {
    **{
        name: FOREIGN[name]
        for name in (
            *("empty", "lfs", "html", "html without doctype", "json", "gzip", "bzip2", "xz"),
            *("numpy", "zeros"),
        )
    },
    "gguf": (lambda: b"GGUF\3\0\0\0" + bytes(100), r"GGUF model.*gguf package"),
    "hdf5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5.*h5py"),
    "onnx": (lambda: b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:" + bytes(100), "ONNX model"),
}


# Of all others torch's words follow, as programs may look for them.
OF_ANOTHER_PROGRAM = {"gguf", "hdf5", "onnx", "numpy", "gzip", "bzip2", "xz"}


DOORS: dict[str, Callable[[Path], object]] = {
    **doors.LOADS,
    "open": ptsave.open,
    "load, a file": lambda path: ptsave.load(io.BytesIO(path.read_bytes())),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FOREIGN_EVERYWHERE)
def test_every_door_says_what_it_is(name: str, door: str, tmp_path: Path) -> None:
    make, words = FOREIGN_EVERYWHERE[name]
    for suffix in (".pt", ".gguf", ".safetensors", ".bin"):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(make())
        with pytest.raises(ptsave.NotCheckpointError, match=words) as caught:
            DOORS[door](path)
        # Whoever is told that it is a GGUF model need not be told how to trust a pickle.
        assert "weights_only" not in str(caught.value) or name not in OF_ANOTHER_PROGRAM
        assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


def test_programs_that_expect_torchs_types(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for contents in (b"", b"GGUF" + bytes(100), b"<html><head></head></html>"):
        path.write_bytes(contents)
        expected = failure_of(lambda: stock_load(path))
        assert isinstance(failure_of(lambda: ptsave.load(path)), type(expected))


@pytest.mark.parametrize("name", sorted(OF_ANOTHER_PROGRAM))
def test_other_programs_files_in_a_directory_are_not_damaged(name: str, tmp_path: Path) -> None:
    ptsave.save(torch.ones(2), tmp_path / "whole.pt")
    (tmp_path / "other.pt").write_bytes(FOREIGN_EVERYWHERE[name][0]())
    assert not verify_directory(tmp_path).is_damaged
