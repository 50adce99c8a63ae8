"""Saving to URLs: the bytes of a local file, complete or absent, errors that name the URL."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_threads
from stock_comparison import stock_load, stock_save
from url_file_systems import MEMORY, PLAIN, PlainFileSystem, contents, failing

import ptsave

OBJECT = {
    "weight": torch.arange(300_000.0),
    "views": [torch.ones(10)[2:4], torch.zeros(0)],
    "step": 3,
}
REMOTE = [MEMORY, PLAIN]


@pytest.fixture(autouse=True)
def _nothing_is_local(
    _clean_file_systems: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    yield
    assert os.listdir() == []


def stock_bytes(folder: Path, obj: object, name: str = "model.pt", **options: Any) -> bytes:
    stock_save(obj, folder / name, **options)
    return (folder / name).read_bytes()


SAVES: dict[str, Callable[[object, str], object]] = {
    "save": ptsave.save,
    "save in place": lambda obj, url: ptsave.save(obj, url, atomic=False, fsync=True),
    "async_save": lambda obj, url: ptsave.async_save(obj, url).result(),
}


@pytest.mark.parametrize("protocol", REMOTE)
@pytest.mark.parametrize("action", SAVES)
def test_bytes_of_a_local_file(tmp_path: Path, action: str, protocol: str) -> None:
    SAVES[action](OBJECT, f"{protocol}://run/model.pt")
    assert contents(protocol) == {"/run/model.pt": stock_bytes(tmp_path, OBJECT)}
    SAVES[action]([1], f"{protocol}://run/model.pt")
    assert contents(protocol) == {"/run/model.pt": stock_bytes(tmp_path, [1])}


@pytest.mark.parametrize("protocol", REMOTE)
@pytest.mark.parametrize("name", ["model.pt", "model", "a.b.pt", "mod\u00e8le.pt", "a b%20c.pt"])
def test_names(tmp_path: Path, protocol: str, name: str) -> None:
    expected = stock_bytes(tmp_path, OBJECT, name)
    ptsave.save(OBJECT, f"{protocol}://folder/{name}")
    assert contents(protocol) == {f"/folder/{name}": expected}


def test_larger_than_a_part(tmp_path: Path) -> None:
    obj = torch.arange(6 << 20)
    expected = stock_bytes(tmp_path, obj)
    for protocol in REMOTE:
        ptsave.save(obj, f"{protocol}://model.pt")
        assert contents(protocol) == {"/model.pt": expected}


def test_formats_that_torch_writes(tmp_path: Path) -> None:
    old: dict[str, Any] = {"_use_new_zipfile_serialization": False}
    ptsave.save(OBJECT, "memory://model.pt", **old)
    assert contents(MEMORY) == {"/model.pt": stock_bytes(tmp_path, OBJECT, **old)}
    ptsave.save(OBJECT, "plain://model.pt", **old)
    assert contents(PLAIN) == contents(MEMORY)


def test_without_data(tmp_path: Path) -> None:
    with torch.serialization.skip_data():
        expected = stock_bytes(tmp_path, OBJECT)
        ptsave.save(OBJECT, "memory://model.pt")
    assert contents(MEMORY) == {"/model.pt": expected}


def test_installed(tmp_path: Path) -> None:
    with ptsave.installed():
        torch.save(OBJECT, "memory://model.pt")
    assert contents(MEMORY) == {"/model.pt": stock_bytes(tmp_path, OBJECT)}


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    ptsave.save(OBJECT, "plain://model.pt", progress=True)
    assert "saving" in capsys.readouterr().err


def test_from_a_thread(tmp_path: Path) -> None:
    in_threads(lambda i: ptsave.save(OBJECT, f"plain://{i}/model.pt"), range(4))
    assert set(contents(PLAIN).values()) == {stock_bytes(tmp_path, OBJECT)}
    assert len(contents(PLAIN)) == 4


# ---------------------------------------------------------------------------------- the local path


@pytest.mark.parametrize("scheme", ["file", "local"])
@pytest.mark.parametrize("action", SAVES)
def test_urls_of_local_files(tmp_path: Path, action: str, scheme: str) -> None:
    expected = stock_bytes(tmp_path, OBJECT)
    (tmp_path / "new").mkdir()
    SAVES[action](OBJECT, f"{scheme}://{tmp_path}/new/model.pt")
    assert (tmp_path / "new" / "model.pt").read_bytes() == expected
    assert os.listdir(tmp_path / "new") == ["model.pt"]


def test_missing_local_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/missing/model.pt"
    with pytest.raises(FileNotFoundError, match="Parent directory") as caught:
        ptsave.save(OBJECT, url)
    assert isinstance(caught.value, ptsave.SaveError)
    ptsave.save(OBJECT, url, storage_options={"auto_mkdir": True})
    assert stock_load(tmp_path / "missing" / "model.pt")["step"] == 3


# ------------------------------------------------------------------------------------------ failing


def failures() -> list[tuple[str, BaseException, type[BaseException]]]:
    return [
        ("open", PermissionError("run"), PermissionError),
        ("write", ConnectionResetError(errno.ECONNRESET, "gone"), ConnectionError),
        ("write", ValueError("no"), ptsave.SaveError),
        ("close", TimeoutError(), TimeoutError),
        ("mv", OSError(errno.ENOSPC, "full"), ptsave.SaveError),
        ("mv", FileNotFoundError("run/model.pt"), FileNotFoundError),
    ]


@pytest.mark.parametrize("action", SAVES)
@pytest.mark.parametrize("number", range(len(failures())))
def test_failures_leave_the_old_file(action: str, number: int) -> None:
    method, error, expected = failures()[number]
    url = "plain://run/model.pt"
    for before in ([], [1]):
        if before:
            ptsave.save(before, url)
        old = contents(PLAIN)
        with failing(method, error), pytest.raises(expected) as caught:
            SAVES[action](OBJECT, url)
        assert isinstance(caught.value, ptsave.SaveError)
        assert caught.value.filename == url
        assert url in str(caught.value)
        assert "file write failed" in str(caught.value)  # as torch says
        assert contents(PLAIN) == old


@contextmanager
def unchanged(protocol: str = PLAIN) -> Iterator[None]:
    """A failure in the block leaves the file that was there."""
    ptsave.save([1], f"{protocol}://model.pt")
    old = contents(protocol)
    yield
    assert contents(protocol) == old


@pytest.mark.parametrize("method", ["write", "close", "mv"])
def test_interrupts(method: str) -> None:
    with unchanged(), failing(method, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        ptsave.save(OBJECT, "plain://model.pt")


def test_bytes_that_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with unchanged():
        monkeypatch.setattr(PlainFileSystem, "lost_nbytes", 10**7)
        with pytest.raises(ptsave.SaveError, match="were written, but 0 have arrived"):
            ptsave.save(OBJECT, "plain://model.pt")


def test_old_format_that_fails() -> None:
    error = OSError(errno.EIO, "no")
    with unchanged(), failing("mv", error), pytest.raises(ptsave.SaveError):
        ptsave.save(OBJECT, "plain://model.pt", _use_new_zipfile_serialization=False)
    with unchanged(), pytest.raises(AttributeError):
        ptsave.save(lambda: 1, "plain://model.pt", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("protocol", REMOTE)
def test_objects_that_cannot_be_saved(protocol: str) -> None:
    with unchanged(protocol), pytest.raises(AttributeError):
        ptsave.save(lambda: 1, f"{protocol}://model.pt")


@pytest.mark.parametrize("url", ["memory://", "memory://run/", "plain://"])
def test_directories(url: str) -> None:
    for action in SAVES.values():
        with pytest.raises(IsADirectoryError) as caught:
            action(OBJECT, url)
        assert caught.value.filename == url


def test_names_that_torch_refuses(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as expected:
        stock_save(OBJECT, tmp_path / ".pt")
    with pytest.raises(RuntimeError, match="invalid file name") as caught:
        ptsave.save(OBJECT, "memory://run/.pt")
    assert "invalid file name" in str(expected.value)
    assert type(caught.value) is type(expected.value)


def test_a_file_in_the_way() -> None:
    ptsave.save([1], "memory://run")
    with pytest.raises(FileExistsError) as caught:
        ptsave.save([1], "memory://run/model.pt")
    assert caught.value.filename == "memory://run/model.pt"
