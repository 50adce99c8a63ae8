"""Copies between hosts: servers and clients against hostile ones, and manifests of any bytes."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from _system import eventually, in_child, in_threads

import ptsave
from ptsave.sources.locations import LocalFolder
from ptsave.sources.ranges import LocalFile
from ptsave.training import peers
from ptsave.training.directory import MANIFEST, PartsOfHosts
from ptsave.training.manifests import Manifest, digest_of, manifest_of

xxhash: Any = pytest.importorskip("xxhash", reason="manifests have digests of the xxhash library")

TOKEN = "t" * 64
TIMEOUT_S, SHORT_S = 20.0, 0.3
DATA = bytes(range(256)) * 4000
NAME = "step-00000003.0123456789abcdef-0.rank-1-of-4.pt"


def manifest(data: bytes = DATA, name: str = NAME, **fields: Any) -> Manifest:
    digest = xxhash.xxh3_128(data).hexdigest()
    return Manifest(name, len(data), digest, "0123", ("a",))._replace(**fields)


def files_in(folder: Path) -> list[str]:
    """Return the names of all files, temporary ones too."""
    return sorted(os.listdir(folder))


@pytest.fixture(autouse=True)
def _everything_is_closed() -> Iterator[None]:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    eventually(lambda: threading.active_count() <= threads)


class Server:
    """A server of the directory ``served``; `reports` has what ranks have told it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "served"
        self.path.mkdir()
        self.reports: list[Any] = []
        naming = PartsOfHosts(0, 4, "0" * 16)
        self.server = peers.PeerServer(
            LocalFolder(str(self.path)),
            TOKEN,
            TIMEOUT_S,
            fsync=False,
            accepts=naming.is_checkpoint,
            report=self._report,
        )
        self.address = peers.Address("127.0.0.1", self.server.port)

    def _report(self, rank: int, save: list[Any]) -> list[Any]:
        step, session, repeat = save
        self.reports.append((int(rank), int(step), str(session), int(repeat)))
        return [[1, "ab", 0]]

    def put(self, folder: Path, data: bytes = DATA, **fields: Any) -> None:
        source = folder / "source"
        source.write_bytes(data)
        file = LocalFile.open(str(source))
        try:
            peers.put(self.address, TOKEN, TIMEOUT_S, file, manifest(data, **fields))
        finally:
            file.close()

    def get(self, folder: Path, name: str = NAME) -> bytes:
        target = LocalFolder(str(folder))
        wanted = Manifest(name, 0, None)
        path = peers.get(self.address, TOKEN, TIMEOUT_S, wanted, target, fsync=False)
        assert path == str(folder / name)
        return Path(path).read_bytes()

    def tell_done(self, save: list[Any]) -> list[Any]:
        return peers.tell_done(self.address, TOKEN, TIMEOUT_S, 2, save)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.server.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, len(DATA), (8 << 20) + 4096, (17 << 20) + 1])
def test_a_file_goes_there_and_back(server: Server, tmp_path: Path, nbytes: int) -> None:
    data = (DATA * (nbytes // len(DATA) + 1))[:nbytes]
    server.put(tmp_path, data)
    assert files_in(server.path) == [NAME, NAME + MANIFEST]
    assert (server.path / NAME).read_bytes() == data
    assert manifest_of(LocalFolder(str(server.path)), NAME) == manifest(data)
    other = tmp_path / "other"
    other.mkdir()
    assert server.get(other) == data
    assert files_in(other) == [NAME, NAME + MANIFEST]
    assert (other / (NAME + MANIFEST)).read_bytes() == (
        server.path / (NAME + MANIFEST)
    ).read_bytes()


def test_names_of_hosts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["localhost", socket.gethostname(), *(["::1"] if socket.has_dualstack_ipv6() else [])]
    for host in hosts:
        monkeypatch.setenv("MASTER_ADDR", host)
        server.address = peers.Address(peers.own_host(), server.server.port)
        server.put(tmp_path)
    assert peers.seen_from_here(peers.Address("127.0.0.1", 5)).host == hosts[-1]
    assert peers.seen_from_here(peers.Address("10.1.2.3", 5)).host == "10.1.2.3"
    assert peers.seen_from_here(peers.Address("node7", 5)).host == "node7"
    monkeypatch.setenv("PTSAVE_PEER_ADDRESS", "node8")
    assert peers.own_host() == "node8"


def test_reports(server: Server) -> None:
    assert server.tell_done([3, "cd", 1]) == [[1, "ab", 0]]
    assert server.reports == [(2, 3, "cd", 1)]
    for save in ([3, "cd"], ["x", "cd", 1], [], [[3], "cd", 1]):
        with pytest.raises(OSError, match=r".") as caught:
            server.tell_done(save)
        assert caught.value.errno == errno.EBADMSG
    assert len(server.reports) == 1


def test_several_at_once(server: Server, tmp_path: Path) -> None:
    """Two copies of one file, and many clients: each file is whole at any time."""

    def put(number: int) -> None:
        folder = tmp_path / f"client-{number}"
        folder.mkdir()
        server.put(folder)
        name = f"step-00000004.0123456789abcdef-0.rank-{number % 2}-of-4.pt"
        server.put(folder, DATA * (1 + number % 2), name=name)
        assert server.get(folder, name) == DATA * (1 + number % 2)
        assert server.get(folder) == DATA

    in_threads(put, range(8))
    assert len(files_in(server.path)) == 6


# ------------------------------------------------------------------------------- hostile clients


def framed(message: object) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data


def request(kind: str = "put", *, token: object = TOKEN, **fields: Any) -> bytes:
    entries = {**manifest().fields(), **fields}
    return framed({"token": token, "request": kind, "manifest": entries})


NOT_ANSWERED: dict[str, bytes] = {
    "wrong token": request(token="t" * 63 + "u"),
    "no token": framed({"request": "put", "manifest": manifest().fields()}),
    "token of another type": request(token=[TOKEN]),
    "huge length": struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
    "garbage": struct.pack(">I", 100) + os.urandom(100),
    "not a dict": framed([TOKEN]),
    "deep": struct.pack(">I", 500_000) + b"[" * 500_000,
    "long number": struct.pack(">I", 50_000) + b"1" * 50_000,
    "an error": framed({"error": [TOKEN]}),
    "half a character": framed({"token": "\ud800"}),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}
REFUSED: dict[str, bytes] = {
    "path": request(file="../" + NAME),
    "absolute path": request(file="/tmp/" + NAME),
    "another run's file": request(file="step-00000003.pt"),
    "any file": request(file="model.safetensors"),
    "file with NUL": request(file=NAME + "\0"),
    "long name": request(file=f"step-{'1' * 5000}.0123456789abcdef-0.rank-1-of-4.pt"),
    "no file": request(file=None),
    "negative size": request(nbytes=-1),
    "size of a float": request(nbytes=1e300),
    "huge size": request(nbytes=1 << 62),
    "no digest": request(digest=None),
    "digest of an int": request(digest=int("1" * 32)),
    "no manifest": framed({"token": TOKEN, "request": "put"}),
    "no request": framed({"token": TOKEN}),
    "done without a rank": framed({"token": TOKEN, "request": "done"}),
    "done of a list": framed({"token": TOKEN, "request": "done", "rank": [], "save": {}}),
    "get of a missing file": request("get"),
    "get of a path": request("get", file="../served/" + NAME),
}


@contextmanager
def raw(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, 10) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """Return all that the other side sends until it ends the connection."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:  # it has left bytes of ours unread
        pass
    return found


@pytest.mark.parametrize("kind", NOT_ANSWERED)
def test_clients_that_get_no_answer(server: Server, tmp_path: Path, kind: str) -> None:
    with raw(server) as connection:
        connection.sendall(NOT_ANSWERED[kind])
        if kind == "http":
            with suppress(OSError):  # the server has ended the connection already
                connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == b""
    assert files_in(server.path) == []
    server.put(tmp_path)  # it still serves


@pytest.mark.parametrize("kind", REFUSED)
def test_requests_that_are_refused(server: Server, tmp_path: Path, kind: str) -> None:
    with raw(server) as connection:
        connection.sendall(REFUSED[kind])
        with pytest.raises(OSError, match=r".") as caught:
            peers.receive(connection)
    assert isinstance(caught.value.errno, int)
    assert files_in(server.path) == []
    assert files_in(tmp_path) == ["served"]
    server.put(tmp_path)


SENT: dict[str, bytes] = {
    "nothing": b"",
    "short": DATA[:-1],
    "damaged": b"x" + DATA[1:],
    "another file": bytes(len(DATA)),
}


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("is_there", [False, True])
def test_bytes_that_do_not_match(server: Server, tmp_path: Path, kind: str, is_there: bool) -> None:
    """Nothing appears, a file of that name stays, and no temporary file is left."""
    if is_there:
        server.put(tmp_path)
    before = {name: (server.path / name).read_bytes() for name in files_in(server.path)}
    with raw(server) as connection:
        connection.sendall(request())
        assert peers.receive(connection) == {}
        connection.sendall(SENT[kind])
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=NAME if len(SENT[kind]) == len(DATA) else "ends before"):
            peers.receive(connection)
    assert {name: (server.path / name).read_bytes() for name in files_in(server.path)} == before


def test_bytes_behind_the_file(server: Server) -> None:
    with raw(server) as connection:
        connection.sendall(request())
        assert peers.receive(connection) == {}
        connection.sendall(DATA + b"more")
        assert peers.receive(connection) == {}
    assert (server.path / NAME).read_bytes() == DATA


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.999])
def test_connections_that_are_cut(server: Server, part: float) -> None:
    whole = request() + DATA
    with raw(server) as connection:
        connection.sendall(whole[: int(part * len(whole))])
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # closes with a reset
    eventually(lambda: not [t for t in threading.enumerate() if "process_request" in t.name])
    assert files_in(server.path) == []


@pytest.mark.parametrize("n_sent", [0, 2, 20, len(request()), len(request()) + 1000])
def test_clients_that_stop(server: Server, n_sent: int) -> None:
    """The server waits for the timeout, and no longer."""
    server.server.timeout_s = SHORT_S
    with raw(server) as connection:
        connection.sendall((request() + DATA)[:n_sent])
        begin = time.monotonic()
        everything(connection)
        assert 0.5 * SHORT_S < time.monotonic() - begin < TIMEOUT_S / 2
    assert files_in(server.path) == []


def test_a_client_that_does_not_read(server: Server, tmp_path: Path) -> None:
    server.put(tmp_path, DATA * 20)
    server.server.timeout_s = SHORT_S
    with raw(server) as connection:
        connection.sendall(request("get"))
        handlers = [t for t in threading.enumerate() if "process_request" in t.name]
        eventually(lambda: not any(thread.is_alive() for thread in handlers))
    server.server.timeout_s = TIMEOUT_S
    assert server.get(tmp_path) == DATA * 20


def test_a_full_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        server.put(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert files_in(server.path) == []


# ------------------------------------------------------------------------------- hostile servers


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[peers.Address]:
    """Serve one connection with `answer`, on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the other side has gone
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield peers.Address("127.0.0.1", listener.getsockname()[1])
        finally:
            thread.join()


def found(**fields: Any) -> bytes:
    return framed({"manifest": {**manifest().fields(), **fields}})


ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "part of a length": b"\0\0",
    "huge length": struct.pack(">I", 0xFFFFFFFF),
    "garbage": struct.pack(">I", 4) + b"\xff\xfe{}",
    "deep": struct.pack(">I", 500_000) + b"[" * 500_000,
    "a list": framed([1]),
    "no manifest": framed({}),
    "a manifest of another type": framed({"manifest": 5}),
    "another file": found(file=NAME.replace("rank-1", "rank-2")) + DATA,
    "a path": found(file="../" + NAME) + DATA,
    "negative size": found(nbytes=-5) + DATA,
    "huge size": found(nbytes=1 << 62) + DATA,
    "cut": found() + DATA[:1000],
    "cut before the file": found(),
    "too short": found(nbytes=len(DATA) - 1) + DATA,
    "too long": found(nbytes=len(DATA) + 1) + DATA,
    "damaged": found() + DATA[:-1] + b"x",
    "an error of an int": framed({"error": 5}),
    "an error without words": framed({"error": [5]}),
    "an error of lists": framed({"error": [[], [], []]}),
    "an error of dicts": framed({"error": [{}, None, {}]}),
    "an error of none": framed({"error": None}),
    "an error": framed({"error": [errno.EACCES, "no", "there"]}),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_servers_that_answer_anything(tmp_path: Path, kind: str) -> None:
    def answer(connection: socket.socket) -> None:
        connection.settimeout(5)
        peers.receive(connection)
        connection.sendall(ANSWERS[kind])
        connection.shutdown(socket.SHUT_WR)
        everything(connection)

    calls: dict[str, Callable[[peers.Address], object]] = {
        "get": lambda address: peers.get(
            address,
            TOKEN,
            TIMEOUT_S,
            Manifest(NAME, 0, None),
            LocalFolder(str(tmp_path)),
            fsync=False,
        ),
        "done": lambda address: peers.tell_done(address, TOKEN, TIMEOUT_S, 1, [1, "a", 0]),
    }
    for call in calls.values():
        with (
            answering(answer) as address,
            pytest.raises((OSError, ptsave.CorruptCheckpointError)) as caught,
        ):
            call(address)
        error: Any = caught.value
        name = error.filename if isinstance(error, OSError) else error.path
        assert isinstance(name, str)
        if isinstance(error, OSError):
            assert isinstance(error.errno, int)
        assert files_in(tmp_path) == []


def test_servers_that_do_not_answer(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA * 20)
    file = LocalFile.open(str(tmp_path / "source"))
    whole = manifest()._replace(nbytes=20 * len(DATA), digest=digest_of(file))
    folder = LocalFolder(str(tmp_path))
    ended = threading.Event()

    def silent(connection: socket.socket) -> None:
        ended.wait(30)

    def deaf(connection: socket.socket) -> None:
        peers.receive(connection)
        peers.send(connection, {})
        ended.wait(30)

    def slow(connection: socket.socket) -> None:
        peers.receive(connection)
        connection.sendall(found() + DATA[:10])
        ended.wait(30)

    calls: list[tuple[Any, Callable[[peers.Address], object]]] = [
        (silent, lambda at: peers.put(at, TOKEN, SHORT_S, file, whole)),
        (deaf, lambda at: peers.put(at, TOKEN, SHORT_S, file, whole)),
        (slow, lambda at: peers.get(at, TOKEN, SHORT_S, whole, folder, fsync=False)),
        (silent, lambda at: peers.tell_done(at, TOKEN, SHORT_S, 1, [])),
    ]
    for answer, call in calls:
        ended.clear()
        begin = time.monotonic()
        with answering(answer) as address:
            with pytest.raises(TimeoutError, match="does not answer") as caught:
                call(address)
            ended.set()
        assert str(address.port) in str(caught.value.filename)
        assert time.monotonic() - begin < TIMEOUT_S / 2
    file.close()
    assert files_in(tmp_path) == ["source"]


def test_no_server_at_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = peers.Address("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConnectionRefusedError, match=f":{address.port}"):
        peers.tell_done(address, TOKEN, TIMEOUT_S, 1, [])
    with pytest.raises(OSError, match=r"nowhere\.invalid"):
        peers.tell_done(peers.Address("nowhere.invalid", 1), TOKEN, TIMEOUT_S, 1, [])
    with warnings.catch_warnings(record=True) as seen:  # before Python 3.11, notes are warnings
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="refused") as caught, peers.advising():
            peers.tell_done(address, TOKEN, TIMEOUT_S, 1, [])
    notes = getattr(caught.value, "__notes__", None) or [str(each.message) for each in seen]
    assert "PTSAVE_PEER_ADDRESS" in notes[0]


def test_a_fork(server: Server, tmp_path: Path) -> None:
    """The child has no server, so it does not keep the port, and closing it does not wait."""
    in_child(server.server.close)
    server.put(tmp_path)


# -------------------------------------------------------------------------------------- manifests


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\xff\xfe\x00",
    "a number": b"5",
    "a list": b"[]",
    "deep": b"[" * 500_000,
    "deep dicts": b'{"a":' * 100_000,
    "long number": b'{"nbytes": ' + b"1" * 10_000 + b"}",
    "huge": json.dumps(manifest().fields()).encode() + b" " * (2 << 20),
    "another file": json.dumps(manifest(name="other.pt").fields()).encode(),
    "negative": json.dumps(manifest(nbytes=-1).fields()).encode(),
    "digest of a list": json.dumps(manifest(digest=["a" * 32]).fields()).encode(),
    "short digest": json.dumps(manifest(digest="ab").fields()).encode(),
    "places of numbers": json.dumps({**manifest().fields(), "places": [1]}).encode(),
    "no fields": b"{}",
    "NaN": json.dumps(manifest(nbytes=float("nan")).fields()).encode(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_manifests_of_any_bytes(tmp_path: Path, kind: str) -> None:
    (tmp_path / (NAME + MANIFEST)).write_bytes(HOSTILE[kind])
    assert manifest_of(LocalFolder(str(tmp_path)), NAME) is None


def test_manifests_that_are_no_files(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    assert manifest_of(folder, NAME) is None
    os.mkfifo(tmp_path / (NAME + MANIFEST))
    assert manifest_of(folder, NAME) is None
    os.unlink(tmp_path / (NAME + MANIFEST))
    (tmp_path / (NAME + MANIFEST)).mkdir()
    assert manifest_of(folder, NAME) is None
    with open(tmp_path / (NAME[:-1] + "x" + MANIFEST), "wb") as stream:
        stream.truncate(1 << 40)  # sparse
    assert manifest_of(folder, NAME[:-1] + "x") is None


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = LocalFolder(str(tmp_path))
    for written in (manifest(), manifest(places=("a", "s3://b\u00fc\n")), manifest(digest=None)):
        written.write(folder, fsync=True)
        assert manifest_of(folder, NAME) == written
