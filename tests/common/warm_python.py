"""Python processes that begin with torch and ptsave imported: forks of one that has done no more.

They end as every interpreter does.  What is read before the first line of a program, as
``PYTHONPATH`` or ``LD_PRELOAD``, has no effect: such tests start ``sys.executable``.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# Forks twice for each request: the first child waits for the second and reports how it ended.
_SERVER = """
import array, gc, json, os, socket, sys
import torch, torch.distributed, ptsave
ptsave.preload()
gc.collect()
gc.freeze()  # or the end of a child takes a second, for copies of all pages
parent, path = int(sys.argv[1]), sys.argv[2]
server = socket.socket(socket.AF_UNIX)
server.bind(path + ".new")
server.listen(64)
server.settimeout(1)
os.rename(path + ".new", path)
request = None
while os.getppid() == parent:
    try:
        connection, _ = server.accept()
    except TimeoutError:
        continue
    data, messages, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12))
    streams = array.array("i", messages[0][2])
    if os.fork() == 0:
        server.close()
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(data, "little")))
        child = os.fork()
        if child:
            os.setsid()
            for stream in (0, 1, 2, *streams):
                os.close(stream)
            connection.sendall(child.to_bytes(8, "little"))
            status = os.waitpid(child, 0)[1]
            try:
                connection.sendall(status.to_bytes(8, "little"))
            finally:
                os._exit(0)
        break
    connection.close()
    for stream in streams:
        os.close(stream)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
if request is None:
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
else:
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = ["-c", *request["arguments"]]
    program = compile(request["program"], "<string>", "exec")
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
"""

_lock = threading.Lock()
_server: tuple[int, Path] | None = None


def _address() -> Path:
    """Return the address of the server of this process, which is started with the first request."""
    global _server
    with _lock:
        if _server is None or _server[0] != os.getpid():
            path = Path(tempfile.mkdtemp(prefix="ptsave-warm-")) / "server"
            command = [sys.executable, "-c", _SERVER, str(os.getpid()), str(path)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            while not path.exists():
                assert process.poll() is None, "the server has ended"
                time.sleep(0.01)
            process.returncode = 0  # nobody waits for it: it ends after this process
            _server = os.getpid(), path
        return _server[1]


class WarmProcess:
    """A program in a process of its own, with the interface of `subprocess.Popen`.

    All lines of the program may be indented; the arguments are texts or become texts.
    """

    def __init__(
        self,
        program: str,
        *arguments: object,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        request = {
            "program": textwrap.dedent(program),
            "arguments": [
                os.fspath(each) if isinstance(each, os.PathLike) else str(each)
                for each in arguments
            ],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
        }
        theirs: list[int] = []
        ours: list[IO[str] | None] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            own: IO[str] | None = None
            if given == subprocess.PIPE:
                source, sink = os.pipe()
                theirs.append(source if number == 0 else sink)
                own = open(sink, "w") if number == 0 else open(source)
            elif given == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            elif given == subprocess.STDOUT:
                theirs.append(os.dup(theirs[1]))
            else:
                assert not isinstance(given, int)
                theirs.append(os.dup(number if given is None else given.fileno()))
            ours.append(own)
        self.stdin, self.stdout, self.stderr = ours
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.fspath(_address()))
        data = json.dumps(request).encode()
        header = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))]
        self._connection.sendmsg([len(data).to_bytes(4, "little")], header)
        self._connection.sendall(data)
        for each in theirs:
            os.close(each)
        self.pid = self._number(None)

    def _number(self, timeout: float | None) -> int:
        self._connection.settimeout(timeout)
        data = self._connection.recv(8, socket.MSG_WAITALL)
        assert len(data) == 8, "the process could not be started"
        return int.from_bytes(data, "little")

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(self._number(timeout))
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from error
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close its input and return what it writes to pipes, when it has ended."""
        found = {}

        def read(name: str, stream: IO[str]) -> None:
            found[name] = stream.read()
            stream.close()

        if self.stdin is not None and not self.stdin.closed:
            self.stdin.close()
        pipes = [("stdout", self.stdout), ("stderr", self.stderr)]
        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in pipes
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return found.get("stdout", ""), found.get("stderr", "")

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


def run_warm(
    program: str,
    *arguments: object,
    check: bool = True,
    timeout: float | None = 240,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` with ``capture_output``.

    A status that is not 0 fails with what the program has said, unless ``check`` is false.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = WarmProcess(program, *arguments, **{**pipes, **options})
    try:
        output, errors = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    status = process.wait()
    assert not check or status == 0, f"status {status}: {errors}"
    return subprocess.CompletedProcess(list(map(str, arguments)), status, output, errors)
