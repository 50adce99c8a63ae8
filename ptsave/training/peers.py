"""Copies the files of checkpoints between ranks on different hosts, over TCP.

Each rank has a `PeerServer` for its local directory.  Another rank puts copies of its parts there,
and gets them back after a failure.  The server of rank 0 also counts the ranks that have saved
their part of a step.  A connection makes one request: a JSON object, with its length in front.
Every request has the job's secret token.  A file gets its name only after its digest was compared.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import mmap
import os
import socket
import socketserver
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ptsave import _C
from ptsave.errors import CorruptCheckpointError, add_note
from ptsave.sources.locations import LocalFolder, name_for
from ptsave.sources.ranges import LocalFile
from ptsave.support import config
from ptsave.support.threads import ThreadPool
from ptsave.training.manifests import Manifest, manifest_of

_LENGTH = struct.Struct(">I")
_MAX_MESSAGE_NBYTES = 1 << 20
_BUFFER_NBYTES = 8 << 20  # received by one call, so that the GIL is seldom needed
_N_BUFFERS = 8  # one is received, and others are hashed and written at the same time
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # seconds, seconds, probes
_DIRECT_ALIGNMENT = 4096
_POLL_S = 0.1  # how long `PeerServer.close` may take


class Address(NamedTuple):
    """Where a rank's `PeerServer` listens."""

    host: str
    port: int


def own_host() -> str:
    """Return the address of the interface that leads to the other hosts of the job.

    That is ``PTSAVE_PEER_ADDRESS``, or the interface from which ``MASTER_ADDR`` is reached.
    """
    given = os.environ.get("PTSAVE_PEER_ADDRESS")
    if given:
        return given
    target = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def advising() -> Iterator[None]:
    """Add advice to an OSError of the block: the address of a host may be wrong."""
    try:
        yield
    except OSError as error:
        add_note(error, "if a host has another address, set PTSAVE_PEER_ADDRESS there")
        raise


def seen_from_here(address: Address) -> Address:
    """Return an address as this host has to use it.

    The host of ``MASTER_ADDR`` may know itself only by a loopback address.
    """
    master = os.environ.get("MASTER_ADDR")
    try:
        is_loopback = ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name, not a number
        is_loopback = False
    return address._replace(host=master) if master and is_loopback else address


# ------------------------------------------------------------------------------------- messages


@contextmanager
def connected(address: Address, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to a server; an error of the connection becomes an OSError that names the address."""
    place = f"{address.host}:{address.port}"
    try:
        with socket.create_connection(address, timeout_s) as connection:
            _limit(connection, timeout_s)
            yield connection
    except (TimeoutError, BlockingIOError):  # the latter from the kernel's own timeout
        message = "the rank of another host does not answer"
        raise TimeoutError(errno.ETIMEDOUT, message, place) from None
    except OSError as error:
        if error.filename is None:
            error.filename = place
        raise
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"the answer of another rank cannot be read: {type(error).__name__}: {error}"
        raise OSError(errno.EPROTO, message, place) from None


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """Let each call on a connection end after `timeout_s` seconds, or when the other host is gone.

    The kernel measures the time.  With Python's own timeout, a call would receive less at a time.
    """
    connection.settimeout(None)
    timeout = struct.pack("ll", int(timeout_s), max(int(timeout_s % 1 * 1e6), 1))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a JSON object."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive a JSON object; raise the OSError that it describes."""
    (nbytes,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if nbytes > _MAX_MESSAGE_NBYTES:
        raise OSError(errno.EPROTO, f"a message of {nbytes} bytes was announced")
    message = json.loads(_exactly(connection, nbytes))
    if not isinstance(message, dict):
        raise TypeError("a message is not a JSON object")
    if "error" in message:
        number, reason, name = message["error"]
        raise OSError(int(number), str(reason), str(name))
    return message


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    if _fill(connection, memoryview(data)) != nbytes:
        raise OSError(errno.ECONNRESET, "the connection has ended")
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> int:
    """Receive into all of `view`; return a smaller number of bytes if the connection ends."""
    done = 0
    while done < len(view):
        n = connection.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)
        if n == 0:
            break
        done += n
    return done


# ---------------------------------------------------------------------------------------- files


def send_file(connection: socket.socket, file: LocalFile) -> None:
    """Send all bytes of a file, without a copy in this process."""
    done = 0
    while done < file.nbytes:
        n = os.sendfile(connection.fileno(), file.descriptor, file.begin + done, file.nbytes - done)
        if n == 0:
            raise OSError(errno.ESTALE, "the file has become shorter", file.name)
        done += n


def store(
    folder: LocalFolder, manifest: Manifest, fill: Callable[[memoryview], int], *, fsync: bool
) -> str:
    """Write a file that `fill` delivers, compare its digest, and return the path.

    `fill` writes the next bytes into a buffer, and returns their number: fewer only at the end.
    Meanwhile, one thread writes full buffers, and another one computes the digest.  The file gets
    its name at the end, so a process that ends leaves at most a temporary file.
    """
    folder.check_room(manifest.nbytes)
    path, temporary = folder.join(manifest.file), folder.join(name_for(manifest.file))
    descriptor = _new_locked_file(temporary)
    try:
        digest = _write(descriptor, manifest.nbytes, fill)
        if manifest.digest is not None and digest != manifest.digest:
            raise CorruptCheckpointError(
                f"{path}: the copy that arrived does not match the digest of the saved file",
                path=path,
            )
        if fsync:
            os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    if fsync:
        folder.sync()
    return path


def _new_locked_file(path: str) -> int:
    """Make a file and lock it, so that other processes know that it is being written."""
    import fcntl

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else another process removed it before the lock
            return descriptor
        os.close(descriptor)


def _write(descriptor: int, nbytes: int, fill: Callable[[memoryview], int]) -> str:
    """Write `nbytes` that `fill` delivers to a new file, and return their digest."""
    if config.current().direct_io and nbytes >= _BUFFER_NBYTES:
        _set_direct(descriptor, True)
    digest = _C.Xxh3()
    buffers = [memoryview(mmap.mmap(-1, _BUFFER_NBYTES)) for _ in range(_N_BUFFERS)]
    using: deque[tuple[Future[None], Future[None]]] = deque()
    with ThreadPool(4, "ptsave-writing") as writing, ThreadPool(1, "ptsave-hashing") as hashing:
        for number, begin in enumerate(range(0, nbytes, _BUFFER_NBYTES)):
            if len(using) == _N_BUFFERS:
                _finish(using)
            view = buffers[number % _N_BUFFERS][: min(_BUFFER_NBYTES, nbytes - begin)]
            if fill(view) != len(view):
                raise OSError(errno.ECONNRESET, f"the file ends before its {nbytes} bytes")
            written = writing.submit(_write_all, descriptor, begin, view)
            using.append((written, hashing.submit(digest.update, view)))
        while using:
            _finish(using)
    return str(digest.hexdigest())


def _finish(using: deque[tuple[Future[None], Future[None]]]) -> None:
    """Wait until the oldest buffer is written and hashed."""
    for each in using.popleft():
        each.result()


def _write_all(descriptor: int, offset: int, view: memoryview) -> None:
    while view:
        if len(view) % _DIRECT_ALIGNMENT:  # the end of the file
            _set_direct(descriptor, False)
        try:
            n = os.pwrite(descriptor, view, offset)
        except OSError as error:
            # Another thread may have seen the same error.
            if error.errno != errno.EINVAL or offset % _DIRECT_ALIGNMENT:
                raise
            _set_direct(descriptor, False)
            n = os.pwrite(descriptor, view, offset)
        view, offset = view[n:], offset + n


def _set_direct(descriptor: int, on: bool) -> None:
    """Let writes bypass the page cache, or not; some file systems have no direct I/O."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


# --------------------------------------------------------------------------------------- server

_servers: weakref.WeakSet[PeerServer] = weakref.WeakSet()


class PeerServer:
    """Serves a rank's local directory to the other ranks.

    `accepts` returns whether a file name belongs to this job.  `report` gets the rank and the save
    (a list) of a "done" message, and returns the saves that all ranks have reported.
    """

    def __init__(
        self,
        folder: LocalFolder,
        token: str,
        timeout_s: float,
        *,
        fsync: bool,
        accepts: Callable[[str], bool],
        report: Callable[[int, list[Any]], list[Any]],
    ) -> None:
        self.folder = folder
        self.token = token
        self.timeout_s = timeout_s
        self.fsync = fsync
        self.accepts = accepts
        self.report = report
        self.pid = os.getpid()
        self._server = _Server(("", 0), _Handler, bind_and_activate=True)
        self._server.owner = self
        self.port: int = self._server.server_address[1]
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_S,), name="ptsave-peers", daemon=True).start()
        _servers.add(self)

    def close(self) -> None:
        """Serve no more requests."""
        if self.pid == os.getpid():  # a forked child has no thread that could end
            self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: PeerServer

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # takes IPv4, too
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the other side has gone."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        owner = self.server.owner
        _limit(self.request, owner.timeout_s)
        message = receive(self.request)
        if not hmac.compare_digest(str(message.get("token", "")).encode(), owner.token.encode()):
            return
        try:
            answer = self._answer(owner, message)
        except OSError as error:
            reason = error.strerror or str(error)
            name = error.filename if isinstance(error.filename, str) else owner.folder.path
            answer = {"error": [error.errno or errno.EIO, reason, name]}
        except (CorruptCheckpointError, KeyError, TypeError, ValueError) as error:
            answer = {"error": [errno.EBADMSG, str(error), owner.folder.path]}
        send(self.request, answer)

    def _answer(self, owner: PeerServer, message: dict[str, Any]) -> dict[str, Any]:
        if message["request"] == "done":
            return {"complete": owner.report(message["rank"], message["save"])}
        manifest = Manifest.parse(message["manifest"])
        if manifest is None or not owner.accepts(manifest.file):
            raise ValueError("the request names no file of this job")
        if message["request"] == "put":
            if manifest.digest is None:
                raise ValueError("the request has no digest of the file")
            owner.folder.check_room(manifest.nbytes)
            send(self.request, {})
            store(owner.folder, manifest, lambda v: _fill(self.request, v), fsync=owner.fsync)
            manifest.write(owner.folder, fsync=owner.fsync)
            return {}
        path = owner.folder.join(manifest.file)
        file = LocalFile.open(path)
        try:
            known = manifest_of(owner.folder, manifest.file) or manifest
            send(self.request, {"manifest": known._replace(nbytes=file.nbytes).fields()})
            send_file(self.request, file)
        finally:
            file.close()
        return {}


def put(
    address: Address, token: str, timeout_s: float, file: LocalFile, manifest: Manifest
) -> None:
    """Store a copy of a file in the directory of another rank; return when it is verified there."""
    with connected(address, timeout_s) as connection:
        send(connection, {"token": token, "request": "put", "manifest": manifest.fields()})
        receive(connection)
        send_file(connection, file)
        receive(connection)


def get(
    address: Address,
    token: str,
    timeout_s: float,
    manifest: Manifest,
    folder: LocalFolder,
    *,
    fsync: bool,
) -> str:
    """Fetch a file from the directory of another rank into `folder`, and return its path."""
    with connected(address, timeout_s) as connection:
        send(connection, {"token": token, "request": "get", "manifest": manifest.fields()})
        found = Manifest.parse(receive(connection)["manifest"])
        if found is None or found.file != manifest.file:
            raise OSError(errno.EPROTO, "another file was sent")
        path = store(folder, found, lambda view: _fill(connection, view), fsync=fsync)
        if found.digest is not None:
            with suppress(OSError):  # the file is whole without it
                found.at(*manifest.places).write(folder, fsync=fsync)
        return path


def tell_done(
    address: Address, token: str, timeout_s: float, rank: int, save: list[Any]
) -> list[Any]:
    """Report a save of this rank to rank 0; return the saves that all ranks have reported."""
    with connected(address, timeout_s) as connection:
        send(connection, {"token": token, "request": "done", "rank": rank, "save": save})
        found = receive(connection)["complete"]
    return list(found)


def _forget_servers() -> None:
    for server in list(_servers):
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)
