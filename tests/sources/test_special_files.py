"""Pipes, sockets, devices and directories in place of files: refused at once, by every reader."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doors
import pytest
import torch
from _system import run_python

import ptsave
from ptsave.sources import kinds as not_checkpoints

READERS: dict[str, Callable[[Any], Any]] = {
    **doors.LOADS,
    **doors.INSPECTIONS,
    "load mapped": lambda path: ptsave.load(path, mmap=True),
    "load pathlib": lambda path: ptsave.load(Path(path)),
}


@pytest.fixture(autouse=True)
def _without_waiting() -> Iterator[None]:
    """Interrupt what waits for somebody to write to a pipe."""

    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["pipe", "pipe called .safetensors", "socket", "device"])
def special(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tmp_path / "model.pt"
    if request.param == "device":
        yield "/dev/null"
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            monkeypatch.chdir(tmp_path)  # its name may not be long
            bound.bind("model.pt")
            yield "model.pt"
    else:
        path = path if request.param == "pipe" else path.with_suffix(".safetensors")
        os.mkfifo(path)
        yield str(path)


@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_refused(special: str, reader: str) -> None:
    if special == "/dev/null" and reader.startswith("load"):
        pytest.skip("fails as with torch: test_hostile.py")
    with pytest.raises(OSError, match="which does not support seeking: copy its output") as caught:
        READERS[reader](special)
    assert (caught.value.errno, caught.value.filename) == (errno.ESPIPE, special)


@pytest.mark.parametrize("reader", READERS)
def test_directories_are_refused(tmp_path: Path, reader: str) -> None:
    with pytest.raises(OSError, match=r"directory|one at a time") as caught:
        READERS[reader](str(tmp_path))
    assert caught.value.errno in (errno.EISDIR, errno.ENOENT)
    assert caught.value.filename == str(tmp_path)


def test_a_pipe_keeps_its_writer(tmp_path: Path) -> None:
    """It is not even opened, which would end the wait of who opens it for writing."""
    path = tmp_path / "model.pt"
    os.mkfifo(path)
    with pytest.raises(OSError, match="this is a pipe"):
        ptsave.load(path)
    with pytest.raises(OSError) as caught:
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    assert caught.value.errno == errno.ENXIO  # nobody has it open for reading


def test_a_file_that_becomes_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and the open: that does not wait, and nothing stays open."""
    path = tmp_path / "model.pt"
    os.mkfifo(path)
    monkeypatch.setattr(not_checkpoints, "refuse_special_file", lambda path: None)
    n_open = len(os.listdir("/proc/self/fd"))
    for reader in ("load", "open", "verify_file", "required_globals"):
        with pytest.raises(OSError, match="this is a pipe"):
            READERS[reader](str(path))
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize("read", [ptsave.load, ptsave.open])
def test_an_open_pipe(read: Callable[[Any], Any]) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb"):
        with pytest.raises(OSError, match="this is a pipe") as caught:
            read(stream)
        assert caught.value.filename


def test_standard_input(tmp_path: Path) -> None:
    """/dev/stdin, as of a process substitution: a file is read, what comes out of a pipe is not."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    code = "import ptsave; print(list(ptsave.load('/dev/stdin')))"
    with (tmp_path / "a.pt").open("rb") as file:
        assert run_python(code, stdin=file).stdout == "['a']\n"
    refused = run_python(code, input="", status=1)
    assert "this is a pipe, which does not support seeking" in refused.stderr


# Readers of torch's own: they refuse a file object in torch's words.
TORCHS = {each for each in READERS if each.startswith("load")} - {"load_model"}


def _spooled_text(_: Path) -> Any:
    stream = tempfile.SpooledTemporaryFile(mode="w+")
    stream.write("abc")
    stream.seek(0)
    return stream


STREAMS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.open(errors="replace"),
    "StringIO": lambda path: io.StringIO("abc"),
    "spooled text": _spooled_text,
    "pipe": lambda path: os.fdopen(os.pipe()[0], "rb"),
    "socket": lambda path: socket.socketpair()[0].makefile("rb"),
}


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reader", [each for each in READERS if each not in TORCHS])
@pytest.mark.parametrize("kind", STREAMS)
def test_file_objects_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reader: str
) -> None:
    """The error says which one it is and how to open it."""
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "model.pt")
    is_text = kind not in ("pipe", "socket")
    error: type[Exception] = TypeError if is_text else OSError
    words = "is open for text: open it with mode 'rb'" if is_text else "Illegal seek: this"
    monkeypatch.chdir(tmp_path)
    with STREAMS[kind](Path("model.pt")) as stream, pytest.raises(error, match=words) as caught:
        READERS[reader](stream)
    if isinstance(caught.value, OSError):
        assert caught.value.errno == errno.ESPIPE
        assert caught.value.filename is not None
    assert os.listdir(tmp_path) == ["model.pt"]


def test_mapping_a_legacy_file_under_another_name(tmp_path: Path) -> None:
    """torch's message names the file that was given."""
    path = tmp_path / "model.safetensors"
    torch.save([1], path, _use_new_zipfile_serialization=False)
    with pytest.raises(RuntimeError, match="mmap can only be used") as caught:
        ptsave.load(path, mmap=True)
    assert str(path) in str(caught.value)
    assert "/proc/" not in str(caught.value)
