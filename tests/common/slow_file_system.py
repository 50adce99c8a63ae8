"""A file system of FUSE's that answers each request late, and not faster than a given bandwidth.

It speaks the kernel's protocol over ``/dev/fuse`` by itself, so that nothing has to be installed;
the mount needs root.  It runs in a process of its own, because a thread that waits for a page of it
may hold the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_READ_NBYTES = 128 << 10
_N_THREADS = 16
_ROOT = 1
_IN_HEADER = struct.Struct("<IIQQIIII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 25, 26, 27, 28, 29
_INTERRUPT, _BATCH_FORGET = 36, 42
_ANSWERED_WITH_NOTHING = (_RELEASE, _FLUSH, _RELEASEDIR)
_ASYNC_READ = 1


@contextmanager
def slow_file_system(
    source: Path, mountpoint: Path, *, delay: float, bandwidth: float
) -> Iterator[Path]:
    """Mount a folder's files; yields a file that says which requests to read there were.

    Each request takes `delay` seconds, and all together get `bandwidth` bytes per second.  Raises
    an OSError if the system does not let us mount.
    """
    log = mountpoint.with_suffix(".log")
    command = [sys.executable, __file__, str(source), str(mountpoint), str(delay), str(bandwidth)]
    with subprocess.Popen([*command, str(log)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        answer = server.stdout.readline().strip()
        if answer != b"mounted":
            server.wait()
            raise OSError(errno.EPERM, answer.decode())
        try:
            yield log
        finally:
            _libc().umount2(os.fsencode(mountpoint), 2)  # MNT_DETACH
            server.wait(20)


def reads_in(log: Path) -> list[int]:
    """Return the sizes of the requests to read that were answered."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class _Server:
    def __init__(self, source: Path, delay: float, bandwidth: float, log: Path) -> None:
        self._source = source
        self._names = sorted(os.listdir(source))
        self._files = [os.open(source / name, os.O_RDONLY) for name in self._names]
        self._delay = delay
        self._bandwidth = bandwidth
        self._log = open(log, "w", buffering=1)
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the wire has carried all that was asked for

    def mount(self, mountpoint: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        options = (
            f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},"
            f"allow_other,max_read={MAX_READ_NBYTES}"
        )
        done = _libc().mount(
            b"ptsave-slow", os.fsencode(mountpoint), b"fuse", 7, options.encode()
        )  # 7: MS_RDONLY, MS_NOSUID, MS_NODEV
        if done != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def serve(self) -> None:
        threads = [threading.Thread(target=self._answer_requests) for _ in range(_N_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _answer_requests(self) -> None:
        while True:
            select.select([self._device], [], [])
            try:
                request = os.read(self._device, (1 << 20) + 4096)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # ENODEV: it is not mounted any more
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                error_number, body = 0, self._answer(opcode, node, request[_IN_HEADER.size :])
            except OSError as error:
                error_number, body = error.errno or errno.EIO, b""
            head = struct.pack("<IiQ", 16 + len(body), -error_number, unique)
            with suppress(OSError):  # it was interrupted
                os.write(self._device, head + body)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == _INIT:
            major, minor, readahead, _ = struct.unpack_from("<IIII", body)
            limits = (_ASYNC_READ, 64, 48, 1 << 17, 1, 0, 0, 0)
            return struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), readahead, *limits)
        if opcode == _READ:
            return self._read(node, body)
        time.sleep(self._delay)
        if opcode == _LOOKUP:
            name = body.rstrip(b"\0").decode()
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, name)
            found = self._names.index(name) + 2
            return struct.pack("<QQQQII", found, 0, 60, 60, 0, 0) + self._attributes(found)
        if opcode == _GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", node, 0, 0)
        if opcode == _READDIR:
            return self._entries(struct.unpack_from("<QQI", body)[1])
        if opcode == _STATFS:
            return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if opcode in _ANSWERED_WITH_NOTHING:
            return b""
        raise OSError(errno.ENOSYS, "")

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        data = os.pread(self._files[node - 2], nbytes, offset)
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + len(data) / self._bandwidth
            wait = max(self._free_at - now, self._delay)
            self._log.write(f"{len(data)}\n")
        time.sleep(wait)
        return data

    def _entries(self, begin: int) -> bytes:
        result = b""
        for number, name in list(enumerate(self._names, 1))[begin:]:
            encoded = name.encode()
            entry = struct.pack("<QQII", number + 1, number, len(encoded), 8) + encoded
            result += entry + bytes(-len(entry) % 8)
        return result[:4096]

    def _attributes(self, node: int) -> bytes:
        is_root = node == _ROOT
        nbytes = 0 if is_root else os.fstat(self._files[node - 2]).st_size
        mode = 0o40755 if is_root else 0o100644
        blocks = (nbytes + 511) // 512
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, nbytes, blocks, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )


def _main() -> None:
    source, mountpoint, delay, bandwidth, log = sys.argv[1:]
    try:
        server = _Server(Path(source), float(delay), float(bandwidth), Path(log))
        server.mount(Path(mountpoint))
    except OSError as error:
        print(f"no mount: {error}", flush=True)
        return
    print("mounted", flush=True)
    server.serve()


if __name__ == "__main__":
    _main()
