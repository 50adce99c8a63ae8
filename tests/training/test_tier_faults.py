"""Runs in several places that are killed at random moments, and copies with damaged bytes.

`make tier-faults` does both many times.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
import urllib.request
import warnings
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRanks
from kill_rounds import ROUNDS, SEED
from rank_processes import Ranks
from s3_server import S3Server, running_server

import ptsave

N_RANKS, PER_HOST = 4, 2
LIMIT_S = 60  # for the start of a job, with its restore
N_DAMAGED = int(os.environ.get("PTSAVE_MUTATIONS", "300"))


# ------------------------------------------------------------------------------------------ kills


def values_of(step: int, rank: int) -> torch.Tensor:
    return torch.full((500,), float(100 * step + rank))


def train(folder: Path, server: S3Server | None, job: int, rank: int) -> None:
    """Go on from the newest step until killed, and write all that happens to a file."""
    descriptor = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(*words: object) -> None:
        line = " ".join(map(str, [time.monotonic(), *words])).replace("\n", " ")
        os.write(descriptor, f"{line}\n".encode())

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        log("warned", message)

    warnings.simplefilter("always")
    warnings.showwarning = show
    os.environ["PTSAVE_FAILURE_DOMAIN"] = f"host{rank // PER_HOST}"
    try:
        run = ptsave.AsyncCheckpointer(
            folder / "slow" if server is None else "s3://bucket/run",
            keep=2,
            fsync=False,
            local=folder / f"host{rank // PER_HOST}",
            every={"remote": 3},
            peers=1,
            on_error="warn",
            storage_options=None if server is None else server.options,
        )
        target, first = {"w": torch.zeros(500)}, 0
        if run.steps():
            rest = run.restore(x=target)
            first = rest["step"]
            assert torch.equal(target["w"], values_of(first, rank))
            log("restored", first, rest["job"])
        log("protected", run.protected())
        log("ready")
        for step in itertools.count(first + 1):
            x = {"w": values_of(step, rank)}
            run.save(step, x=x, step=step, job=job).result()
            log("durable", step)
            if step % 4 == 0:
                run.wait()
                log("protected", run.protected())
    except (OSError, RuntimeError) as error:  # another rank has been killed
        log("ended", type(error).__name__, error)
        time.sleep(LIMIT_S)


class Job:
    """The files that the ranks of one job have written."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[list[list[str]]] = []
        for rank in range(N_RANKS):
            path = folder / f"log-{rank}"
            text = path.read_text() if path.exists() else ""
            self.lines.append([line.split(" ") for line in text.splitlines()])

    def said(self, word: str) -> list[list[list[str]]]:
        """Return for each rank the words behind `word` in its lines."""
        return [[line[2:] for line in lines if line[1] == word] for lines in self.lines]

    def is_ready(self) -> bool:
        return all(self.said("ready"))

    def restored(self) -> int:
        """Return the step that all ranks have restored; 0 if there was none."""
        found = {tuple(each[0]) if each else ("0", "") for each in self.said("restored")}
        assert len(found) == 1, found
        return int(found.pop()[0])

    def durable(self) -> int:
        """Return the newest step that is durable on all ranks."""
        return min(max((int(step) for (step,) in each), default=0) for each in self.said("durable"))

    def protected(self) -> int:
        """Return the newest step that a rank knew to be protected."""
        steps = [step for each in self.said("protected") for (step,) in each]
        return max((int(step) for step in steps if step != "None"), default=0)

    def complaints(self, before: float) -> list[str]:
        """Return warnings and errors before a moment."""
        return [
            " ".join(line)
            for lines in self.lines
            for line in lines
            if line[1] in ("warned", "ended") and float(line[0]) < before
        ]


class Rounds:
    """Jobs one after another, each of which is killed; `least` is the step that must be there.

    The slow place is a directory, or with `in_bucket` a server that is killed, too.
    """

    def __init__(self, folder: Path, chance: random.Random, *, in_bucket: bool) -> None:
        self.folder, self.chance = folder, chance
        self.least = self.highest = 0
        self.stack = ExitStack()
        self.server: S3Server | None = None
        if in_bucket:
            self._serve(0)

    def _serve(self, port: int) -> None:
        self.server = self.stack.enter_context(running_server(port))
        request = urllib.request.Request(f"{self.server.endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request).close()

    def run(self, number: int) -> str:
        """Run one job until it is killed, and return the way in which it was."""
        for rank in range(N_RANKS):
            (self.folder / f"log-{rank}").unlink(missing_ok=True)
        kinds = ["rank", "host", "lost host", "start"]
        if self.server is not None:
            kinds = ["rank", "lost host", "server"]
        kind = self.chance.choice(kinds)
        host = self.chance.randrange(N_RANKS // PER_HOST)
        victims = range(host * PER_HOST, (host + 1) * PER_HOST)
        if kind in ("rank", "start"):
            victims = range(first := self.chance.randrange(N_RANKS), first + 1)
        ranks = ForkedRanks(
            self.folder,
            lambda rank: train(self.folder, self.server, number, rank),
            N_RANKS,
            timeout_s=LIMIT_S / 2,
        )
        begin = time.monotonic()
        if kind == "start":
            time.sleep(self.chance.uniform(0, 0.5))
        else:
            while not Job(self.folder).is_ready():
                if time.monotonic() > begin + LIMIT_S:
                    ranks.kill()
                    raise AssertionError(f"round {number}: no restore: {Job(self.folder).lines}")
                time.sleep(0.005)
            time.sleep(self.chance.uniform(0, 0.4))
        killed = time.monotonic()
        if kind == "server" and self.server is not None:
            self.server.process.kill()
            time.sleep(self.chance.uniform(0, 0.2))
        for victim in victims if kind != "server" else []:
            os.kill(ranks.children[victim].pid, 9)
        time.sleep(self.chance.uniform(0, 0.05))
        ranks.kill()
        self._check(kind, host, Job(self.folder), killed)
        return kind

    def _check(self, kind: str, host: int, job: Job, killed: float) -> None:
        assert job.complaints(killed) == []
        if job.is_ready():
            restored = job.restored()
            assert restored >= self.least, (kind, restored, self.least)
            self.least = max(restored, job.durable())
            self.highest = max(self.highest, restored)
        if kind == "lost host":
            self.least = job.protected()
            shutil.rmtree(self.folder / f"host{host}")
        elif kind == "server" and self.server is not None:
            self._serve(self.server.port)


@pytest.mark.kill
@pytest.mark.timeout(0)
@pytest.mark.parametrize("in_bucket", [False, True])
def test_killed_ranks_hosts_and_servers(tmp_path: Path, in_bucket: bool) -> None:
    """With a bucket a round takes three times as long, so there are fewer."""
    if in_bucket:
        pytest.importorskip("moto", reason="the S3 server is moto's: pip install moto")
        pytest.importorskip("s3fs", reason="fsspec reaches S3 by s3fs: pip install s3fs")
    print(f"PTSAVE_KILL_SEED={SEED}")  # shown if the test fails
    rounds = Rounds(tmp_path, random.Random(SEED), in_bucket=in_bucket)
    kinds = []
    with rounds.stack:
        for number in range(ROUNDS // 4 if in_bucket else ROUNDS):
            kinds.append(rounds.run(number))
    print({kind: kinds.count(kind) for kind in kinds})
    assert rounds.highest > 0


# --------------------------------------------------------------------------------- damaged bytes

DAMAGE = """
import random, warnings
warnings.simplefilter("ignore", ptsave.CheckpointWarning)
os.environ["PTSAVE_FAILURE_DOMAIN"] = f"host{rank}"
places = [folder / "host0", folder / "host1", folder / "slow"]
chance, bits = random.Random(seed), random.Random(seed)
run = ptsave.AsyncCheckpointer(places[2], local=places[rank], peers=1, fsync=False)
for step in (1, 2):
    run.save(step, x={"w": torch.full((100,), 10.0 * step + rank)}, step=step)
    run.wait()
whole = {path: path.read_bytes() for place in places for path in place.glob("step-*")}
files = sorted(whole)
assert len(files) == 24
found.update(steps=[], wrong=[], n=0)

def hurt(path):
    data = bytearray(whole[path])
    kind = bits.randrange(8)
    at = bits.randrange(len(data))
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at:at] = bytes([bits.randrange(256)])
    else:
        data[at] ^= 1 << bits.randrange(8)
    path.write_bytes(data)

while found["n"] < n_damaged:
    hit = chance.choices(files, k=chance.choice((1, 1, 2, 4, 6)))
    if chance.random() < 0.3:  # all copies of one part, or of one part of each step
        name = chance.choice(files).name.removesuffix(".json")
        names = {name, *([chance.choice(files).name] if chance.random() < 0.5 else [])}
        hit += [path for path in files if path.name in names]
    found["n"] += len(hit)
    dist.barrier()
    if rank == 0:
        for path in hit:
            hurt(path)
    dist.barrier()
    target = {"w": torch.zeros(100)}
    try:
        step = run.restore(x=target, fallback=True)["step"]
    except (ptsave.CorruptCheckpointError, OSError) as error:
        step = 0
    value = target["w"].unique().tolist()
    # Of each rank's part of a step one copy is whole, with its manifest.
    parts = {}
    for path in whole:
        if path.suffix == ".pt":
            is_whole = path not in hit and path.with_name(path.name + ".json") not in hit
            key = path.name.split("-")[1][7], path.name.split("rank-")[1][0]
            parts[key] = parts.get(key, False) or is_whole
    least = 2 if parts["2", "0"] and parts["2", "1"] else 1
    least = least if parts["1", "0"] and parts["1", "1"] or least == 2 else 0
    if value != [10.0 * step + rank if step else 0.0] or step < least:
        found["wrong"].append([step, least, value, [str(path) for path in hit]])
    found["steps"].append(step)
    dist.barrier()
    if rank == 0:
        for path, data in whole.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
dist.barrier()
run.close()
"""


@pytest.mark.timeout(0)
def test_damaged_bytes(tmp_path: Path) -> None:
    """No damaged value is restored; a step with a whole copy of each part always is."""
    program = f"seed, n_damaged = {SEED}, {N_DAMAGED}\n{dedent(DAMAGE)}"
    first, second = Ranks(tmp_path, program, 2).found(limit=3600)
    assert first["wrong"] == second["wrong"] == []
    assert first["steps"] == second["steps"]
    assert {1, 2} <= {*first["steps"]}
    print(first["n"], {step: first["steps"].count(step) for step in first["steps"]})
