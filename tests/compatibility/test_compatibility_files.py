"""Paths and file-like objects: what they must offer, where an archive begins, and what fails."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import mmap
import os
import pickle
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import fsspec
import pytest
import torch
from _system import run_python
from stock_comparison import (
    assert_same_bytes,
    assert_same_failure,
    assert_same_load_failure,
    assert_same_object,
    assert_same_save_failure,
    failure_of,
    saved_bytes,
    stock_load,
    stock_save,
    typed_storage,
)

import ptsave

Obj = dict[str, Any]


@pytest.fixture
def obj() -> Obj:
    """Small tensors, one larger than any buffer on the way, and a tie."""
    weight = torch.arange(40_000, dtype=torch.float64)
    return {"weight": weight, "tied": weight, "bias": torch.ones(3), "epoch": 7}


@pytest.fixture
def data(obj: Obj) -> bytes:
    return saved_bytes(stock_save, obj)


class Stream:
    """A file-like object with only the methods it is given, which notes what is called."""

    def __init__(self, data: bytes, methods: str) -> None:
        self.bytes_io = io.BytesIO(data)
        self.calls: list[str] = []
        for name in methods.split():
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return getattr(self.bytes_io, name)(*args)

        return call


class StreamWithoutDescriptor(Stream):
    """Has ``fileno``, as io.IOBase does, which says that there is none."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


# ------------------------------------------------------------- what is asked of file-like objects


@pytest.mark.parametrize("kind", [Stream, StreamWithoutDescriptor])
@pytest.mark.parametrize("others", ["read readline seek tell ", ""])
def test_save_needs_only_write_and_flush(
    kind: type[Stream], others: str, obj: Obj, data: bytes
) -> None:
    stream = kind(b"", f"{others}write flush")
    ptsave.save(obj, stream)
    assert set(stream.calls) <= {"write", "flush"}
    assert stream.calls[-1] == "flush"
    assert stream.bytes_io.getvalue() == data


@pytest.mark.parametrize("kind", [Stream, StreamWithoutDescriptor])
def test_load_needs_only_read_readline_seek_tell(kind: type[Stream], obj: Obj, data: bytes) -> None:
    stream = kind(data, "read readline seek tell write flush")
    assert_same_object(ptsave.load(stream), stock_load(io.BytesIO(data)))
    assert set(stream.calls) <= {"read", "readline", "seek", "tell"}


def test_load_prefers_readinto(data: bytes) -> None:
    """Without it every read makes a copy."""
    stream = StreamWithoutDescriptor(data, "read readline readinto seek tell")
    assert_same_object(ptsave.load(stream), stock_load(io.BytesIO(data)))
    assert "readinto" in stream.calls


@pytest.mark.parametrize("methods", ["read readline seek tell", "read readinto readline seek tell"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_large_tensor_through_file_like_object(methods: str, weights_only: bool) -> None:
    """More than any single read brings."""
    tensor = torch.randn(11 * 512 + 1, 5 * 128)
    sink = Stream(b"", "write flush")
    ptsave.save(tensor, sink)
    source = Stream(sink.bytes_io.getvalue(), methods)
    assert torch.equal(ptsave.load(source, weights_only=weights_only), tensor)


def test_bytes_io_methods_that_are_overridden_are_called(obj: Obj, data: bytes) -> None:
    """A subclass may count, encrypt or hash: its methods must not be bypassed."""

    class Inverting(io.BytesIO):
        def write(self, chunk: Any) -> int:
            return super().write(bytes(byte ^ 0xFF for byte in bytes(chunk)))

        def read(self, nbytes: int | None = -1, /) -> bytes:
            return bytes(byte ^ 0xFF for byte in super().read(nbytes))

        readinto = None  # type: ignore[assignment]

    obj["weight"] = obj["tied"] = torch.arange(100)
    stream = Inverting()
    ptsave.save(obj, stream)
    expected = saved_bytes(stock_save, obj)
    assert bytes(byte ^ 0xFF for byte in stream.getvalue()) == expected


def test_object_with_a_descriptor_that_is_not_its_data(tmp_path: Path, obj: Obj) -> None:
    """``fileno`` of a wrapper (gzip has it too) leads past what the wrapper does to the bytes."""

    class Wrapper:
        def __init__(self, stream: IO[bytes]) -> None:
            self.stream = stream
            self.fileno = stream.fileno
            self.flush = stream.flush
            self.tell = stream.tell
            self.seek = stream.seek
            self.readline = stream.readline

        def write(self, chunk: Any) -> int:
            return self.stream.write(bytes(255 - byte for byte in bytes(chunk)))

        def read(self, nbytes: int = -1) -> bytes:
            return bytes(255 - byte for byte in self.stream.read(nbytes))

    obj["weight"] = obj["tied"] = torch.arange(100)
    with (tmp_path / "inverted").open("w+b") as stream:
        ptsave.save(obj, Wrapper(stream))
        stream.seek(0)
        assert stream.read(4) == bytes(255 - byte for byte in b"PK\x03\x04")
        stream.seek(0)
        assert_same_object(ptsave.load(Wrapper(stream)), obj)


@pytest.mark.parametrize("answer", [None, "nothing", -1, 10**9])
def test_what_write_returns_is_not_always_a_count(answer: object, obj: Obj, data: bytes) -> None:
    class Sink:
        content = b""

        def write(self, chunk: Any) -> object:
            self.content += bytes(chunk)
            return answer

        def flush(self) -> None:
            pass

    sink = Sink()
    ptsave.save(obj, sink)
    assert sink.content == data


def test_short_writes_are_continued(obj: Obj, data: bytes) -> None:
    """Raw files and sockets may take less than they are given; stock torch loses the rest."""

    class Short(io.RawIOBase):
        content = b""

        def write(self, chunk: Any) -> int:
            piece = bytes(chunk[:1000])
            self.content += piece
            return len(piece)

        def writable(self) -> bool:
            return True

    sink = Short()
    ptsave.save(obj, sink)
    assert sink.content == data


def test_chunks_given_to_write_are_bytes_like(obj: Obj) -> None:
    kinds = set()

    class Sink:
        def write(self, chunk: Any) -> int:
            kinds.add(type(chunk))
            assert memoryview(chunk).itemsize == 1
            return len(chunk)

        def flush(self) -> None:
            pass

    ptsave.save(obj, Sink())
    assert kinds <= {bytes, memoryview}


def test_buffered_file_over_a_raw_file_that_is_not_the_data(tmp_path: Path) -> None:
    """What Python's buffer classes wrap may have a descriptor, and do something else with bytes."""

    class Inverting(io.FileIO):
        def write(self, chunk: Any) -> int:
            return super().write(bytes(255 - byte for byte in bytes(chunk)))

        def readinto(self, buffer: Any) -> int:
            chunk = super().read(len(buffer))
            buffer[: len(chunk)] = bytes(255 - byte for byte in chunk)
            return len(chunk)

    path = tmp_path / "inverted"
    with io.BufferedWriter(Inverting(path, "w")) as sink:
        ptsave.save([torch.arange(100)], sink)
    inverted = bytes(255 - byte for byte in path.read_bytes())
    assert inverted == saved_bytes(stock_save, [torch.arange(100)])
    with io.BufferedReader(Inverting(path, "r")) as source:
        assert_same_object(ptsave.load(source), [torch.arange(100)])


# ----------------------------------------------------------------------- kinds of file-like object


OPENERS: dict[str, Callable[[Path, str], Any]] = {
    "gzip": gzip.open,
    "bz2": bz2.open,
    "lzma": lzma.open,
    "plain": Path.open,
    "raw": lambda path, mode: path.open(mode, buffering=0),
    "fsspec, local": lambda path, mode: fsspec.open(f"file://{path}", mode).open(),
    "fsspec, memory": lambda path, mode: fsspec.filesystem("memory").open(str(path), mode),
}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
@pytest.mark.parametrize("header", [b"", b"header"])
def test_kinds_of_file_objects(
    opener: Callable[[Path, str], Any], header: bytes, tmp_path: Path, obj: Obj, data: bytes
) -> None:
    """An archive may begin anywhere in any of them, and can be followed by more."""
    path = tmp_path / "file"
    with opener(path, "wb") as stream:
        stream.write(header)
        ptsave.save(obj, stream)
        assert not stream.closed
        assert stream.tell() == len(header) + len(data)
    with opener(path, "rb") as stream:
        assert stream.read() == header + data
    for load in (ptsave.load, stock_load):
        with opener(path, "rb") as stream:
            assert stream.read(len(header)) == header
            assert_same_object(load(stream), obj)
            assert not stream.closed


@pytest.mark.parametrize(
    "factory",
    [
        io.BytesIO,
        tempfile.NamedTemporaryFile,
        tempfile.TemporaryFile,
        tempfile.SpooledTemporaryFile,
        lambda: tempfile.SpooledTemporaryFile(max_size=1000),
        lambda: tempfile.TemporaryFile(buffering=0),
    ],
)
def test_objects_that_read_and_write(factory: Callable[[], Any], obj: Obj, data: bytes) -> None:
    """Python's buffer and what is written past it must not get out of step."""
    with factory() as stream:
        stream.write(b"before")
        ptsave.save(obj, stream)
        assert stream.tell() == 6 + len(data)
        stream.write(b"after")
        stream.seek(0)
        assert stream.read() == b"before" + data + b"after"
        stream.seek(6)
        assert_same_object(ptsave.load(stream), obj)
        stream.seek(6)
        assert_same_object(stock_load(stream), obj)


def test_file_objects_that_only_read(tmp_path: Path, obj: Obj, data: bytes) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    with zipfile.ZipFile(tmp_path / "outer.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "inner.pt")
    with tarfile.open(tmp_path / "outer.tar", "w") as tar:
        tar.add(path, "inner.pt")
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(zipfile.ZipFile(tmp_path / "outer.zip"))
        tarball = stack.enter_context(tarfile.open(tmp_path / "outer.tar"))
        plain = stack.enter_context(path.open("rb"))
        streams: list[Any] = [
            stack.enter_context(outer.open("inner.pt")),
            tarball.extractfile("inner.pt"),
            stack.enter_context(mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ)),
            io.BufferedReader(io.BytesIO(data)),
            io.BufferedRandom(io.BytesIO(data)),  # type: ignore[arg-type]
        ]
        for stream in streams:
            assert_same_object(ptsave.load(stream), obj)


def test_file_objects_that_only_write(tmp_path: Path, obj: Obj, data: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        with archive.open("inner.pt", "w") as stream:
            ptsave.save(obj, stream)
        assert archive.read("inner.pt") == data
    memory = io.BytesIO()
    buffered = io.BufferedWriter(memory)
    ptsave.save(obj, buffered)
    assert memory.getvalue() == data
    buffered.detach()


def test_save_to_socket(obj: Obj, data: bytes) -> None:
    ours, theirs = socket.socketpair()
    received = bytearray()

    def drain() -> None:
        while chunk := theirs.recv(65536):
            received.extend(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    with ours, ours.makefile("wb") as stream:
        ptsave.save(obj, stream)
        ours.shutdown(socket.SHUT_WR)
    reader.join()
    theirs.close()
    assert bytes(received) == data


def test_save_to_pipe_object_and_fifo_path(tmp_path: Path, obj: Obj, data: bytes) -> None:
    """What cannot seek is streamed."""
    (tmp_path / "stock").mkdir()
    stock_save(obj, tmp_path / "stock" / "fifo")
    named = (tmp_path / "stock" / "fifo").read_bytes()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for target in ("object", "path"):
        process = subprocess.Popen(
            ["cat", str(fifo)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            received: list[bytes] = []
            reader = threading.Thread(target=lambda: received.append(process.stdout.read()))  # type: ignore[union-attr] # noqa: B023
            reader.start()
            if target == "path":
                ptsave.save(obj, fifo)
            else:
                with fifo.open("wb") as stream:
                    ptsave.save(obj, stream)
            reader.join()
        finally:
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        # The root folder of the archive is the stem of a path, and "archive" for an object.
        assert received[0] == (named if target == "path" else data)
    assert fifo.is_fifo()


def test_save_to_dev_null(obj: Obj) -> None:
    ptsave.save(obj, "/dev/null")
    with Path("/dev/null").open("wb") as stream:
        ptsave.save(obj, stream)
    assert Path("/dev/null").is_char_device()


# -------------------------------------------------------------------------------- file positions


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("mode", ["wb", "w+b", "xb", "ab", "a+b"])
def test_open_modes(mode: str, buffering: int, tmp_path: Path, obj: Obj, data: bytes) -> None:
    """In append mode the archive goes to the end, wherever the position is."""
    path = tmp_path / "file"
    if "a" in mode:
        path.write_bytes(b"old")
    with path.open(mode, buffering=buffering) as stream:
        stream.write(b"header")
        ptsave.save(obj, stream)
        stream.write(b"trailer")
    old = b"old" if "a" in mode else b""
    assert path.read_bytes() == old + b"header" + data + b"trailer"


@pytest.mark.parametrize("kind", ["buffered", "raw", "memory"])
def test_save_in_the_middle(kind: str, tmp_path: Path, obj: Obj, data: bytes) -> None:
    """Overwrites, and does not truncate."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (len(data) + 5000))
    openers: dict[str, Callable[[], IO[bytes]]] = {
        "buffered": lambda: path.open("r+b"),
        "raw": lambda: path.open("r+b", buffering=0),
        "memory": lambda: io.BytesIO(path.read_bytes()),
    }
    with openers[kind]() as stream:
        assert stream.read(3) == b"xxx"  # fills Python's buffer
        stream.seek(100)
        ptsave.save(obj, stream)
        assert stream.tell() == 100 + len(data)
        stream.seek(0)
        assert stream.read() == b"x" * 100 + data + b"x" * 4900


def test_save_behind_the_end_of_bytes_io(obj: Obj, data: bytes) -> None:
    stream = io.BytesIO(b"x")
    stream.seek(10)
    ptsave.save(obj, stream)
    assert stream.getvalue() == b"x" + b"\0" * 9 + data


def test_failed_save_leaves_bytes_io_usable(obj: Obj) -> None:
    stream = io.BytesIO(b"old content")
    with pytest.raises(AttributeError):
        ptsave.save({**obj, "not": lambda: None}, stream)
    stream.close()  # fails if a view of the buffer is left


def test_bytes_io_is_not_needed_after_load(obj: Obj, data: bytes) -> None:
    """What was loaded neither keeps the buffer locked nor changes with it."""
    stream = io.BytesIO(data)
    loaded = ptsave.load(stream)
    stream.seek(0)
    stream.write(b"\0" * len(data))
    stream.truncate(0)
    stream.close()
    assert_same_object(loaded, obj)


@pytest.mark.parametrize("buffering", [-1, 0])
def test_archive_at_an_offset_of_a_real_file(
    buffering: int, tmp_path: Path, obj: Obj, data: bytes
) -> None:
    path = tmp_path / "file"
    for offset in (1, 63, 4096, 10_001):
        path.write_bytes(b"h" * offset + data)
        with path.open("rb", buffering=buffering) as stream:
            stream.seek(offset)
            assert_same_object(ptsave.load(stream), obj)


def test_pickles_before_the_archive(tmp_path: Path, obj: Obj) -> None:
    """Python's buffer has read ahead when the archive's turn comes."""
    path = tmp_path / "file"
    with path.open("wb") as stream:
        pickle.dump(41, stream)
        ptsave.save(obj, stream)
    with gzip.open(tmp_path / "file.gz", "wb") as packed:
        packed.write(path.read_bytes())
    for opener in (Path.open, gzip.open):
        source = path if opener is Path.open else tmp_path / "file.gz"
        with opener(source, "rb") as stream:
            assert pickle.load(stream) == 41
            assert_same_object(ptsave.load(stream), obj)


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("of", ["storages", "numbers", "nothing"])
def test_position_after_a_load(of: str, buffering: int, tmp_path: Path, obj: Obj) -> None:
    """Behind the last storage, as under torch: programs that load until it fails come to an end."""
    path = tmp_path / "file"
    stock_save({"storages": obj, "numbers": [1, 2], "nothing": {}}[of], path)
    path.write_bytes(b"header" + path.read_bytes())

    class Stream(io.BytesIO):
        """Read through its methods, as a subclass may have its own."""

    streams: list[Callable[[], IO[bytes]]] = [
        lambda: path.open("rb", buffering=buffering),
        lambda: io.BytesIO(path.read_bytes()),
        lambda: Stream(path.read_bytes()),
    ]
    for opened in streams:
        positions = []
        for load in (ptsave.load, stock_load):
            with opened() as stream:
                stream.seek(6)
                load(stream)
                positions.append(stream.tell())
                with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
                    load(stream)
        assert positions[0] == positions[1]


@pytest.mark.parametrize("trailer", [b"t", b"trailer" * 1000])
def test_bytes_behind_the_archive(trailer: bytes, data: bytes, tmp_path: Path) -> None:
    """Torch looks for the end of the archive from the end of the file, and so finds it."""
    path = tmp_path / "file"
    path.write_bytes(data + trailer)
    expected = stock_load(path)
    assert_same_object(ptsave.load(path), expected)
    assert_same_object(ptsave.load(io.BytesIO(data + trailer)), expected)


def test_two_archives_in_one_stream(data: bytes, tmp_path: Path) -> None:
    """The second one is readable at its position; the first is not, as torch sees the wrong end."""
    first = saved_bytes(stock_save, {"another": torch.arange(1000)})
    both = first + data
    stream = io.BytesIO(both)
    stream.seek(len(first))
    assert_same_object(ptsave.load(stream), stock_load(io.BytesIO(data)))
    path = tmp_path / "file"
    path.write_bytes(both)
    assert_same_load_failure(path)
    assert_same_load_failure(both)


@pytest.mark.usefixtures("_leaves_nothing_open")
def test_nothing_is_left_open(tmp_path: Path, obj: Obj) -> None:
    path = tmp_path / "file.pt"
    for _ in range(3):
        ptsave.save(obj, path)
        ptsave.load(path)
        with pytest.raises(AttributeError):
            ptsave.save(lambda: None, path)
        with pytest.raises(FileNotFoundError):
            ptsave.load(tmp_path / "none.pt")
        (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:-100])
        with pytest.raises(RuntimeError):
            ptsave.load(tmp_path / "cut.pt")


# ----------------------------------------------------------------------------------------- paths


class FsPath(os.PathLike[Any]):
    """A path-like object that is no pathlib.Path."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


NAMES = [
    "plain.pt",
    "no_suffix",
    "two.dots.pt",
    ".hidden",
    ".hidden.pt",
    "dot_at_end.",
    "with space.pt",
    "back\\slash.pt",
    "archive",
    "data",
    "-",
    "100%.pt",
    "l" * 200 + ".pt",
    "'\"$*?.pt",
    "line\nbreak.pt",
    "ünïcode.pt",
    "\u975e.pt",
    "\U0001f525",
]


@pytest.mark.parametrize("kind", [str, Path, FsPath])
@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, kind: Callable[[str], Any], tmp_path: Path, obj: Obj) -> None:
    """The file's name is in the file: as root folder, with torch's rules for what that is."""
    for folder in ("stock", "ptsave"):
        (tmp_path / folder).mkdir()
    expected, path = tmp_path / "stock" / name, tmp_path / "ptsave" / name
    try:
        stock_save(obj, str(expected))
    except RuntimeError:
        with pytest.raises(RuntimeError, match="invalid file name"):
            ptsave.save(obj, kind(str(path)))
        return
    ptsave.save(obj, kind(str(path)))
    assert path.read_bytes() == expected.read_bytes()
    assert_same_object(ptsave.load(kind(str(path))), obj)
    assert_same_object(stock_load(str(path)), obj)
    assert os.listdir(path.parent) == [name]


def test_folder_with_a_name_that_is_not_ascii(tmp_path: Path, obj: Obj) -> None:
    """Torch then writes through Python, and the root folder becomes "archive"."""
    assert_same_bytes(obj, tmp_path / "\u975eASCII")
    path = tmp_path / "\u975eASCII" / "ptsave" / "file.pt"
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist()[0] == "archive/data.pkl"
    assert_same_object(ptsave.load(path), obj)


def test_relative_paths(tmp_path: Path, obj: Obj, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("file.pt", "./file.pt", "sub/../file.pt", "sub/file.pt"):
        ptsave.save(obj, path)
        mine = Path(path).read_bytes()
        stock_save(obj, path)
        assert Path(path).read_bytes() == mine
        assert_same_object(ptsave.load(path), obj)


def test_existing_file_is_replaced_whatever_its_size(tmp_path: Path, obj: Obj) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(b"x" * 5_000_000)
    ptsave.save(obj, path)
    mine = path.read_bytes()
    stock_save(obj, path)
    assert path.read_bytes() == mine


def test_other_zip_readers_accept_the_file(tmp_path: Path, obj: Obj) -> None:
    path = tmp_path / "file.pt"
    ptsave.save(obj, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "extracted")
    extracted = (tmp_path / "extracted" / "file" / "data" / "0").read_bytes()
    assert extracted == obj["weight"].numpy().tobytes()
    if (unzip := shutil.which("unzip")) is not None:
        subprocess.run([unzip, "-t", str(path)], check=True, capture_output=True)


# ---------------------------------------------------------------------------------------- errors


def _with_attributes(**attributes: object) -> object:
    tensor = torch.rand(3)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


NOT_FILES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.rand(3),
    "storage": lambda: typed_storage(torch.zeros(3, dtype=torch.int8)),
    "array": lambda: torch.zeros(2).numpy(),
    "write is no function": lambda: _with_attributes(write="bar", flush="baz"),
    "write is the wrong function": lambda: _with_attributes(write=str.__add__, flush=str.__mul__),
    "none": lambda: None,
    "number": lambda: 3,
    "list": list,
    "bytes": lambda: b"path",
    "path of bytes": lambda: FsPath(b"path"),
    "text": lambda: io.StringIO("x"),
    "object": object,
}


@pytest.mark.parametrize("name", NOT_FILES)
def test_saving_to_what_is_no_file(name: str) -> None:
    assert_same_save_failure("foo", NOT_FILES[name], ignore="0x[0-9a-f]+")


@pytest.mark.parametrize("name", ["none", "number", "list", "bytes", "object", "text"])
def test_loading_from_what_is_no_file(name: str) -> None:
    assert_same_load_failure(NOT_FILES[name], ignore="0x[0-9a-f]+")


def test_write_without_flush() -> None:
    assert_same_save_failure([1], lambda: Stream(b"", "write"))


@pytest.mark.parametrize("missing", ["seek", "tell", "seek tell"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_source_that_cannot_seek(missing: str, weights_only: bool, data: bytes) -> None:
    methods = " ".join({"read", "readline", "seek", "tell"} - set(missing.split()))
    error = assert_same_load_failure(lambda: Stream(data, methods), weights_only=weights_only)
    assert "You can only torch.load from a file that is seekable" in str(error)


def test_source_that_says_it_cannot_seek(data: bytes) -> None:
    def load(engine: Callable[..., object]) -> object:
        read_end, write_end = os.pipe()
        with open(read_end, "rb") as stream, open(write_end, "wb") as sink:
            sink.write(data[:100])
            return engine(stream)

    assert_same_failure(lambda: load(ptsave.load), lambda: load(stock_load))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("no"), KeyError("k")])
@pytest.mark.parametrize("after", [0, 1000])
def test_error_raised_by_write_comes_through(error: Exception, after: int, obj: Obj) -> None:
    class Failing:
        nbytes = 0

        def write(self, chunk: Any) -> int:
            self.nbytes += len(chunk)
            if self.nbytes > after:
                raise error
            return len(chunk)

        def flush(self) -> None:
            raise AssertionError("nothing to flush")

    assert failure_of(lambda: ptsave.save(obj, Failing())) is error


def test_error_raised_by_flush_comes_through(obj: Obj) -> None:
    class Failing(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.EIO, "flush")

    with pytest.raises(OSError, match="flush"):
        ptsave.save(obj, Failing())


@pytest.mark.parametrize(("methods", "n_good"), [("read readinto", 3), ("seek", 3), ("tell", 1)])
def test_error_raised_while_loading_comes_through(methods: str, n_good: int, data: bytes) -> None:
    class Failing(io.BytesIO):
        n_calls = 0

    def failing(name: str) -> Callable[..., Any]:
        def call(self: Failing, *args: Any) -> Any:
            self.n_calls += 1
            if self.n_calls > n_good:
                raise OSError(errno.EIO, "the disk is gone")
            return getattr(io.BytesIO, name)(self, *args)

        return call

    for name in methods.split():
        setattr(Failing, name, failing(name))
    assert_same_load_failure(lambda: Failing(data))


def _closed(stream: Any) -> Any:
    stream.close()
    return stream


# Streams of a checkpoint's file, or of another one beside it.
UNUSABLE: dict[str, tuple[Callable[..., object], Callable[[Path], Any]]] = {
    "save to closed file": (assert_same_save_failure, lambda path: _closed(path.open("r+b"))),
    "save to closed memory": (assert_same_save_failure, lambda path: _closed(io.BytesIO())),
    "save to file that is read": (assert_same_save_failure, lambda path: path.open("rb")),
    "save to text": (assert_same_save_failure, lambda path: Path(f"{path}.new").open("w")),
    "load from closed file": (assert_same_load_failure, lambda path: _closed(path.open("rb"))),
    "load from closed memory": (assert_same_load_failure, lambda path: _closed(io.BytesIO())),
    "load from written file": (
        assert_same_load_failure,
        lambda path: Path(f"{path}.new").open("wb"),
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_closed_files_and_wrong_modes(name: str, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    assert_fails, opened = UNUSABLE[name]
    with contextlib.ExitStack() as stack:

        def stream() -> Any:
            made = opened(path)
            stack.callback(made.close)
            return made

        saved = [[1]] if assert_fails is assert_same_save_failure else []
        error = assert_fails(*saved, stream, ignore=r"\.$")
    assert isinstance(error, ValueError) or "closed" not in name
    assert path.read_bytes() == data


def test_missing_parent(tmp_path: Path) -> None:
    """Torch's type and wording, and OSError's errno and file name."""
    path = str(tmp_path / "none" / "file.pt")
    error = assert_same_save_failure([1], path)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ENOENT, path)
    path = str(tmp_path / "nöne" / "file.pt")
    error = failure_of(lambda: ptsave.save([1], path))
    assert isinstance(error, (FileNotFoundError, OSError))
    assert (error.errno, error.filename) == (errno.ENOENT, path)


def test_saving_to_a_folder(tmp_path: Path) -> None:
    path = str(tmp_path)
    stock = failure_of(lambda: stock_save([1], path))
    says_why = "strerror" in str(stock)  # torch 2.9 does not
    error = assert_same_save_failure([1], path, ignore="" if says_why else "cannot be opened.*")
    assert "strerror: Is a directory" in str(error)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.EISDIR, path)


def test_empty_name() -> None:
    assert_same_save_failure([1], "")
    assert_same_load_failure("")


def test_nul_in_the_name(tmp_path: Path) -> None:
    """Torch cuts the name there, and writes to a file that was not named."""
    with pytest.raises(ValueError, match="embedded null byte"):
        ptsave.save([1], str(tmp_path / "a\0b"))
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="embedded null byte"):
        ptsave.load(str(tmp_path / "a\0b"))


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none.pt", "none/file.pt", "file/below", ""):
        error = assert_same_load_failure(tmp_path / name)
        assert isinstance(error, OSError)
        assert str(error.filename) == str(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_no_permission(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    path.chmod(0)
    with pytest.raises(PermissionError):
        ptsave.load(path)
    with pytest.raises(OSError, match=re.escape(str(path))):
        ptsave.save([1], path)


def test_loading_a_cut_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    for nbytes in (30, 1000, len(data) // 2, len(data) - 23, len(data) - 22, len(data) - 1):
        path.write_bytes(data[:nbytes])
        expected = failure_of(lambda: stock_load(path))
        memory = io.BytesIO(path.read_bytes())
        for error in (
            failure_of(lambda: ptsave.load(path)),
            failure_of(partial(ptsave.load, memory)),
        ):
            assert isinstance(error, ptsave.CorruptCheckpointError)
            assert str(expected) in str(error)


@pytest.mark.parametrize("as_path", [True, False])
def test_object_that_cannot_be_pickled(as_path: bool, tmp_path: Path, data: bytes) -> None:
    """Torch has emptied the file by then; here the old one stays."""
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    if as_path:
        assert_same_failure(
            lambda: ptsave.save([torch.ones(5), lambda: None], path),
            lambda: stock_save([torch.ones(5), lambda: None], tmp_path / "stock.pt"),
        )
        assert path.read_bytes() == data
        assert sorted(os.listdir(tmp_path)) == ["file.pt", "stock.pt"]
    else:
        with path.open("r+b") as stream, pytest.raises(AttributeError):
            ptsave.save([torch.ones(5), lambda: None], stream)
        assert path.read_bytes() == data


@pytest.mark.parametrize("protocol", [6, 99, "2", 2.0, 2**40])
def test_unknown_pickle_protocol(protocol: Any, obj: Obj, tmp_path: Path) -> None:
    for target in (tmp_path / "a.pt", io.BytesIO):
        assert_same_save_failure(obj, target, pickle_protocol=protocol)


def test_unknown_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        ptsave.save([1], tmp_path / "file.pt", True, 2, True, False, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ptsave.load(tmp_path / "file.pt", None, None, True)  # type: ignore[call-arg]


def test_standard_streams_are_not_special(obj: Obj, data: bytes) -> None:
    """``python script.py > file.pt`` is a pipe or a file: what Python says it is."""
    script = "import sys, torch, ptsave; ptsave.save({'a': torch.arange(9)}, sys.stdout.buffer)"
    result = run_python(script, text=False)
    written: Any = result.stdout
    assert written == saved_bytes(stock_save, {"a": torch.arange(9)})
