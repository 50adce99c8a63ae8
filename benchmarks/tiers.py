"""Checkpoints in several places: the stall of a save, and the rate of each copy.

    python -m benchmarks.tiers                     all workloads, 3 rounds
    python -m benchmarks.tiers peer --rounds 9
    python -m benchmarks.tiers --output benchmarks/results/tiers.md

In each round every workload runs once with each contender, in turn, each in a fresh process.

stall: the call of AsyncCheckpointer.save on two ranks, for 256 MiB on each; the slower rank counts.
"one place" is a directory; "tiers" is a local directory, a slow directory and a copy on the other
rank, which counts as another host.  As found, the call is the first of a process; warmed up, the
second, after all copies of the first were made.

local: 1 GiB from the call of save until its future is done, with fsync, into one place and into the
local one of two.  The limit writes as many
bytes past the page cache, with the number of threads that is fastest.

peer: a file of 1 GiB to the server of another process, which writes and syncs it and compares its
digest.  "loopback" sends the file to a process that drops the bytes.  "loopback and disk" does so
while a program writes as many bytes past the page cache, which a copy has to do as well: the limit.

remote: a file of 256 MiB to moto's S3 server.  The limit sends the same bytes from memory with
s3fs, in parts of the same size.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import _limits
from benchmarks._program import ROOT, WITHOUT_COLD, Program, is_warmed_up, settle_memory, table
from benchmarks.archive import yes_or_no
from ptsave.bench.system import MIB

# Workload -> contenders; the one before the last is the limit, or ptsave with one place.
CONTENDERS = {
    "stall": ("one place", "tiers"),
    "local": ("one place", "disk", "tiers"),
    "peer": ("loopback", "loopback and disk", "tiers"),
    "remote": ("s3fs", "tiers"),
}
NBYTES = {"stall": 256 * MIB, "local": 1024 * MIB, "peer": 1024 * MIB, "remote": 256 * MIB}
MAX_STALL = 1.1  # times the stall without several places
MIN_RATES = {"local": 0.9, "peer": 0.8, "remote": 0.8}  # of the limit
TOKEN = "benchmark"
NAME = "step-00000001.pt"
DRAIN_NBYTES = 16 * MIB


def measure(workload: str, contender: str, folder: str) -> float:
    """Return the seconds of one figure."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch)
        if contender == "disk":
            settle_memory(0, is_limit=True)
            return min(
                _limits.measure("direct-write", path / "limit", NBYTES[workload])[1].values()
            )
        call: dict[str, Callable[[str, Path], float]]
        call = {"stall": _stall, "local": _local, "peer": _peer, "remote": _remote}
        return call[workload](contender, path)


def _state(nbytes: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.ones(nbytes // 4)}


# ---------------------------------------------------------------------------------------- stall


def _stall(contender: str, folder: Path) -> float:
    results, report = os.pipe()
    for rank in range(2):
        if os.fork() == 0:
            try:
                os.write(report, f"{_stall_of(contender, folder, rank)}\n".encode())
            finally:
                os._exit(0)
    os.close(report)
    with open(results) as stream:
        seconds = [float(line) for line in stream]
    if len(seconds) != 2:
        raise RuntimeError("a rank has failed")
    return max(seconds)


def _stall_of(contender: str, folder: Path, rank: int) -> float:
    import ptsave

    os.environ |= {"PTSAVE_FAILURE_DOMAIN": f"host {rank}", "LOCAL_WORLD_SIZE": "2"}
    several: dict[str, Any] = {"local": folder / f"local-{rank}", "peers": 1}
    options = several if contender == "tiers" else {}
    state = _state(NBYTES["stall"])
    with ptsave.AsyncCheckpointer(folder / "slow", rank=rank, world_size=2, **options) as run:
        for step in range(1 + is_warmed_up()):
            settle_memory(NBYTES["stall"])
            begin = time.perf_counter()
            run.save(step, state=state)
            seconds = time.perf_counter() - begin
            run.wait()
    return seconds


# ---------------------------------------------------------------------------------------- rates


def _local(contender: str, folder: Path) -> float:
    import ptsave

    state = _state(NBYTES["local"])
    options: dict[str, Any] = {"local": folder / "local"} if contender == "tiers" else {}
    with ptsave.AsyncCheckpointer(folder / "slow", **options) as run:
        if is_warmed_up():
            run.save(0, state=state)
            run.wait()
        settle_memory(NBYTES["local"])
        begin = time.perf_counter()
        run.save(1, state=state).result()
        return time.perf_counter() - begin


def _peer(contender: str, folder: Path) -> float:
    from ptsave.sources.locations import LocalFolder
    from ptsave.sources.ranges import LocalFile
    from ptsave.training import peers
    from ptsave.training.manifests import Manifest, digest_of

    is_limit = contender != "tiers"
    ports, tell = os.pipe()
    end, ended = os.pipe()
    if (child := os.fork()) == 0:
        os.close(ended)
        if is_limit:
            _drain(tell, NBYTES["peer"])
        else:
            (folder / "other").mkdir()
            server = peers.PeerServer(
                LocalFolder(str(folder / "other")),
                TOKEN,
                60,
                fsync=True,
                accepts=lambda name: name.startswith(NAME),
                report=lambda *_: [],
            )
            os.write(tell, str(server.port).encode())
            os.read(end, 1)
        os._exit(0)
    address = peers.Address("127.0.0.1", int(os.read(ports, 16)))
    (folder / NAME).write_bytes(secrets.token_bytes(MIB) * (NBYTES["peer"] // MIB))
    file = LocalFile.open(str(folder / NAME))
    digest = digest_of(file)
    seconds = 0.0
    for step in range(1 if is_limit else 1 + is_warmed_up()):
        settle_memory(NBYTES["peer"], is_limit=is_limit)
        begin = time.perf_counter()
        if is_limit:
            with ThreadPoolExecutor() as pool:
                if contender == "loopback and disk":
                    pool.submit(_limits.measure, "direct-write", folder / "limit", file.nbytes, [2])
                with peers.connected(address, 60) as connection:
                    peers.send_file(connection, file)
                    connection.recv(1)
                    seconds = time.perf_counter() - begin
            break
        manifest = Manifest(f"{NAME}-{step}", file.nbytes, digest)
        peers.put(address, TOKEN, 60, file, manifest)
        seconds = time.perf_counter() - begin
    os.close(ended)
    os.waitpid(child, 0)
    return seconds


def _drain(tell: int, nbytes: int) -> None:
    """Receive bytes and drop them, as fast as the system can."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(tell, str(listener.getsockname()[1]).encode())
    connection, _ = listener.accept()
    buffer = bytearray(DRAIN_NBYTES)
    while nbytes:
        nbytes -= connection.recv_into(buffer, min(nbytes, DRAIN_NBYTES), socket.MSG_WAITALL)
    connection.sendall(b".")


def _remote(contender: str, folder: Path) -> float:
    from ptsave.sources.ranges import LocalFile
    from ptsave.streaming.payload_sources import write_copy
    from ptsave.writing.targets import resolve_file

    sys.path.insert(0, str(ROOT / "tests" / "common"))
    from s3_server import running_server

    data = secrets.token_bytes(MIB) * (NBYTES["remote"] // MIB)
    (folder / NAME).write_bytes(data)
    with running_server() as server:
        target: Any = resolve_file(f"s3://bucket/{NAME}", server.options)
        target.file_system.mkdir("bucket")
        file = LocalFile.open(str(folder / NAME))
        for _ in range(1 + is_warmed_up()):
            settle_memory(0)
            begin = time.perf_counter()
            if contender == "tiers":
                write_copy(file, target, fsync=False)
            else:
                with target.file_system.open(target.key, "wb", block_size=16 * MIB) as stream:
                    stream.write(data)
            seconds = time.perf_counter() - begin
    return seconds


# ------------------------------------------------------------------------------------- the rounds


def report(names: list[str], rounds: int, folder: Path) -> str:
    figures = PROGRAM.measured(CONTENDERS, names, rounds, folder)

    def rows() -> Iterator[list[str]]:
        for name in names:
            limits, tiers = (figures[name, contender] for contender in CONTENDERS[name][-2:])
            ratio = median(limit / mine for limit, mine in zip(limits, tiers, strict=True))
            for contender in CONTENDERS[name]:
                found = figures[name, contender]
                spread = f"{min(found):.3f} - {max(found):.3f}"
                row = [name, contender, f"{median(found):.3f}", spread]
                if contender != "tiers":
                    yield [*row, "", ""]
                elif name == "stall":
                    yield [*row, f"{1 / ratio:.2f} of the time", yes_or_no(1 / ratio <= MAX_STALL)]
                else:
                    yield [*row, f"{ratio:.2f} of the rate", yes_or_no(ratio >= MIN_RATES[name])]

    return table(["", "", "seconds", "min - max", "of the limit", "goal met"], rows())


PROGRAM = Program(
    "tiers",
    "Checkpoints in several places",
    __doc__ or "",
    measure,
    report,
    [*CONTENDERS],
    states=WITHOUT_COLD,
)

if __name__ == "__main__":
    PROGRAM.main()
