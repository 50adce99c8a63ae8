"""ptsave.open over HTTP: what is transferred, and servers that do not do what is asked."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import fsspec
import pytest
import torch
from safetensors.torch import save as save_safetensors
from stock_comparison import assert_same_object, saved_bytes

import ptsave

WEIGHT = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)  # 4 MiB
OBJ = {"weight": WEIGHT, "bias": torch.ones(1024)}
OVERHEAD = 150_000  # headers, the archive's directory, the pickle, the beginning of the file


FILES = {
    "/model.pt": saved_bytes(torch.save, OBJ),
    "/model.safetensors": save_safetensors(OBJ),
    "/legacy.pt": saved_bytes(torch.save, OBJ, _use_new_zipfile_serialization=False),
}
SHARDS = {
    "/model/weight.safetensors": save_safetensors({"weight": WEIGHT}),
    "/model/bias.bin": save_safetensors({"bias": OBJ["bias"]}),
    "/model/model.safetensors.index.json": json.dumps(
        {"weight_map": {"weight": "weight.safetensors", "bias": "bias.bin"}}
    ).encode(),
    "/broken/model.safetensors.index.json": b'{"weight_map": {"weight": "none.safetensors"}}',
}


class Handler(BaseHTTPRequestHandler):
    """Serves `FILES` as the server's `behaviour` says."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        behaviour = self.server.behaviour
        if behaviour == "silent" or (behaviour == "silent for ranges" and self.headers["Range"]):
            self.server.released.wait(10)
            self.close_connection = True
            return
        if isinstance(behaviour, int):
            self.send_error(behaviour)
            return
        data = {**FILES, **SHARDS}.get(self.path.partition("?")[0])
        if data is None:
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        body = data[int(wanted[1]) : int(wanted[2]) + 1] if wanted else data
        if behaviour in ("ignores ranges", "refuses ranges"):
            wanted, body = None, data
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{len(data)}")
        if behaviour == "refuses ranges":
            self.send_header("Accept-Ranges", "none")
        if behaviour != "no size":
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if with_body:
            body = body[: len(body) // 2] if behaviour == "hangs up" else body
            self.server.nbytes_sent += len(body)
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Be silent."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour: str | int = ""
        self.nbytes_sent = 0
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent: clients hang up when they have waited long enough."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as result:
        thread = threading.Thread(target=result.serve_forever, args=(0.01,))
        thread.start()
        yield result
        result.released.set()
        result.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _sessions_are_closed() -> Iterator[None]:
    """Close what would otherwise be closed by the garbage collector, during some other test."""
    yield
    kind = type(fsspec.filesystem("http"))
    for file_system in kind._cache.values():
        if file_system._session is not None:
            fsspec.asyn.sync(file_system.loop, file_system._session.close)
    kind.clear_instance_cache()
    gc.collect()


@pytest.mark.parametrize("path", ["/model.pt", "/model.safetensors"])
def test_only_what_is_asked_for(path: str, server: Server) -> None:
    with ptsave.open(server.url(path)) as archive:
        assert archive.info("weight").shape == (1024, 1024)
        assert server.nbytes_sent < OVERHEAD
        server.nbytes_sent = 0
        assert torch.equal(archive.get_slice("weight")[100:102], WEIGHT[100:102])
        assert server.nbytes_sent < 2 * 4096 + 1000
        server.nbytes_sent = 0
        assert_same_object(archive.get_tensor("weight"), WEIGHT)
        assert WEIGHT.nbytes <= server.nbytes_sent < WEIGHT.nbytes + 1000


@pytest.mark.parametrize("path", FILES)
def test_same_object(path: str, server: Server) -> None:
    with ptsave.open(server.url(path)) as archive:
        assert_same_object({name: archive[name] for name in OBJ}, OBJ)
    assert server.nbytes_sent < len(FILES[path]) + OVERHEAD


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("behaviour", ["ignores ranges", "refuses ranges"])
def test_servers_without_ranges(path: str, behaviour: str, server: Server) -> None:
    server.behaviour = behaviour
    with pytest.raises(OSError, match="does not serve ranges") as caught:
        ptsave.open(server.url(path))
    assert server.url(path) in str(caught.value)


@pytest.mark.parametrize("path", ["/model.pt", "/model.safetensors"])
def test_server_that_forgets_ranges_later(path: str, server: Server) -> None:
    with ptsave.open(server.url(path)) as archive:
        server.behaviour = "ignores ranges"
        for read in readers(archive):
            with pytest.raises(OSError, match="does not serve ranges"):
                read()
        server.behaviour = ""
        assert_same_object(archive.get_tensor("weight"), WEIGHT)


def readers(archive: ptsave.Archive) -> list[Callable[[], Any]]:
    return [lambda: archive.get_tensor("weight"), lambda: archive.get_slice("weight")[5]]


def test_server_that_tells_no_size(server: Server) -> None:
    server.behaviour = "no size"
    with pytest.raises(OSError, match="does not tell the file's size"):
        ptsave.open(server.url("/model.pt"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((404, FileNotFoundError), (410, FileNotFoundError), (403, PermissionError)),
        *((401, PermissionError), (500, OSError), (503, OSError)),
    ],
)
def test_what_the_server_answers(status: int, kind: type[OSError], server: Server) -> None:
    server.behaviour = status
    with pytest.raises(kind, match=f"{status}") as caught:
        ptsave.open(server.url("/model.pt"))
    assert type(caught.value) is kind
    assert server.url("/model.pt") in str(caught.value)
    server.behaviour = ""
    with ptsave.open(server.url("/model.pt")) as archive:
        server.behaviour = status
        for read in readers(archive):
            with pytest.raises(kind, match=server.url("/model.pt")) as caught:
                read()
            assert type(caught.value) is kind


@pytest.mark.parametrize("path", FILES)
def test_server_that_hangs_up(path: str, server: Server) -> None:
    server.behaviour = "hangs up"
    with pytest.raises(OSError, match=server.url(path)):
        ptsave.open(server.url(path))


@pytest.mark.parametrize("behaviour", ["silent", "silent for ranges"])
def test_timeout(behaviour: str, server: Server) -> None:
    server.behaviour = behaviour
    timeout = aiohttp.ClientTimeout(total=0.2)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer in time") as caught:
        ptsave.open(
            server.url("/model.pt"), storage_options={"client_kwargs": {"timeout": timeout}}
        )
    assert server.url("/model.pt") in str(caught.value)
    assert time.monotonic() - begin < 5


def test_nobody_there() -> None:
    with Server() as closed:
        url = closed.url("/model.pt")
    with pytest.raises(ConnectionError, match=url):
        ptsave.open(url)


def test_what_is_no_url_of_a_file() -> None:
    with pytest.raises(ptsave.UnsupportedUrlError, match="Protocol not known: nothing"):
        ptsave.open("nothing://model.pt")


@pytest.mark.parametrize("query", ["", "?download=true", "?path=a/b"])
def test_an_index_of_shards(server: Server, query: str) -> None:
    with ptsave.open(server.url("/model/model.safetensors.index.json") + query) as archive:
        tensors = archive.tensors()
        assert_same_object({name: tensors[name] for name in OBJ}, OBJ)
        server.nbytes_sent = 0
        assert archive.get_slice("weight")[5, :3].tolist() == WEIGHT[5, :3].tolist()
    assert server.nbytes_sent < OVERHEAD
    with pytest.raises(FileNotFoundError, match=r"/broken/none\.safetensors"):
        ptsave.open(server.url("/broken/model.safetensors.index.json") + query)


def restored(load: Callable[[torch.nn.Module], object]) -> dict[str, Any]:
    target = torch.nn.ParameterDict({name: torch.zeros_like(each) for name, each in OBJ.items()})
    load(target)
    return target.state_dict()


LOADS: dict[str, Callable[[str], Any]] = {
    "load": ptsave.load,
    "load_checkpoint": ptsave.load_checkpoint,
    "load_into": lambda url: restored(lambda target: ptsave.load_into(url, target)),
    "load_model": lambda url: restored(lambda target: ptsave.load_model(target, url)),
}


@pytest.mark.parametrize("path", [*FILES, "/model/model.safetensors.index.json"])
@pytest.mark.parametrize("load", LOADS)
def test_loads_fetch_everything_once(load: str, path: str, server: Server) -> None:
    found = LOADS[load](server.url(path))
    assert all(torch.equal(found[name], tensor) for name, tensor in OBJ.items())
    assert server.nbytes_sent < WEIGHT.nbytes + 4096 + 2 * OVERHEAD


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("load", LOADS)
def test_loads_from_servers_without_ranges(load: str, path: str, server: Server) -> None:
    server.behaviour = "ignores ranges"
    with pytest.raises(OSError, match="does not serve ranges"):
        LOADS[load](server.url(path))


@pytest.mark.parametrize("load", LOADS)
def test_loads_of_what_is_not_there(load: str, server: Server) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        LOADS[load](server.url("/none.pt"))
