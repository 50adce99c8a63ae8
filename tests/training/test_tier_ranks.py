"""Checkpoints in several places of several ranks: real processes, on hosts that are simulated."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from rank_processes import Ranks
from s3_server import S3Server

import ptsave

# What all programs begin with.
MAKE = """
import shutil, warnings
texts = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, *rest, **more: texts.append(str(message))
os.environ["PTSAVE_FAILURE_DOMAIN"] = f"host{rank // per_host}"
local, slow = folder / f"host{rank // per_host}", folder / "slow"
place = slow
options = {} if in_group else {"rank": rank, "world_size": size}

def make(**more):
    return ptsave.AsyncCheckpointer(place, local=local, **{**options, **more})

def save(run, step, **more):
    run.save(step, x={"w": torch.full((300,), 100.0 * step + rank)}, step=step, **more).result()

def restore(run, *step, **more):
    target = {"w": torch.zeros(300)}
    rest = run.restore(*step, x=target, **more)
    (value,) = target["w"].unique().tolist()
    return [rest["step"], value - rank]

def forget(path):
    for file in path.glob("step-*"):
        file.unlink()

def damage(path, step):
    (file,) = path.glob(f"step-{step:08}.*.rank-0-of-{size}.pt")
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((9,), 100.0 * step).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)

def names(path):
    return sorted({int(name[5:13]) for name in os.listdir(path) if name.startswith("step-")})
"""


def run(
    folder: Path, program: str, size: int = 2, per_host: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Run a program on ranks, of which `per_host` share a host; return the findings of each."""
    return start(folder, program, size, per_host, **options).found()


def start(folder: Path, program: str, size: int, per_host: int, **options: Any) -> Ranks:
    return Ranks(folder, f"per_host = {per_host}\n{MAKE}{dedent(program)}", size, **options)


@pytest.mark.parametrize("in_group", [True, False])
def test_losses(tmp_path: Path, in_group: bool) -> None:
    """A host's directory is lost, then a host's directory and the slow place."""
    program = """
    keep = {"local": 2, "remote": 2}
    with make(every={"remote": 3}, peers=1, keep=keep) as run:
        for step in range(1, 9):
            save(run, step)
            run.wait()
        found["steps"], found["protected"] = run.steps(), run.protected()
        found["names"] = [names(local), names(slow)]
        found["restored"] = [restore(run), restore(run, 6)]
        run.wait()
        if rank == 0:
            shutil.rmtree(local)
            local.mkdir()
        run.wait()
        found["protected then"] = run.protected()
        attempt("latest", lambda: [run.latest().parent == local, run.latest().exists()])
        attempt("host lost", lambda: restore(run))
        save(run, 10)
        run.wait()
        found["protected again"] = run.protected()
        if rank == 0:
            forget(slow)
        if rank == size - 1:
            shutil.rmtree(local)
            local.mkdir()
        run.wait()
        attempt("host and slow place lost", lambda: restore(run))
        found["warnings"] = list(texts)
        run.remove(10)
        attempt("removed", lambda: restore(run, 10))
        attempt("removed twice", lambda: run.remove(10))
        found["steps then"] = run.steps()
    found["threads"] = [t.name for t in __import__("threading").enumerate() if "ptsave" in t.name]
    """
    for rank, found in enumerate(run(tmp_path, program, 4, 2, in_group=in_group)):
        assert found["steps"] == [3, 6, 7, 8]
        assert found["protected"] == 8
        assert found["names"] == [[7, 8], [3, 6]]
        assert found["restored"] == [[8, 800], [6, 600]]
        assert found["protected then"] == 6
        assert found["latest"] == [True, True]
        assert found["host lost"] == [8, 800]
        assert found["protected again"] == 10
        assert found["host and slow place lost"] == [10, 1000]
        assert found["warnings"] == []
        assert found["removed"].startswith("FileNotFoundError"), rank
        assert "no checkpoint of step 10" in found["removed twice"]
        assert 10 not in found["steps then"]
        assert found["threads"] == []


def test_damaged_copies(tmp_path: Path) -> None:
    """Each copy of one part is damaged in turn: own disk, other host, slow place."""
    program = """
    with make(peers=1) as run:
        for step in (1, 2, 3):
            save(run, step)
            run.wait()
        places = {0: [], 1: ["host0"], 2: ["host0", "host1"], 3: ["slow"]}
        for n, damaged in places.items():
            for name in damaged if rank == 0 else []:
                damage(folder / name, 3)
            run.wait()
            del texts[:]
            attempt(f"{n}", lambda: restore(run))
            found[f"{n} warned"] = list(texts)
            run.wait()
        del texts[:]
        attempt("fallback", lambda: restore(run, fallback=True))
        found["fallback warned"] = list(texts)
        attempt("different steps", lambda: restore(run, 2 - rank))
    """
    for rank, found in enumerate(run(tmp_path, program)):
        for n in range(3):
            assert found[f"{n}"] == [3, 300]
            assert len(found[f"{n} warned"]) == (n if rank == 0 else 0)
            assert all("restored from another copy" in text for text in found[f"{n} warned"])
        assert found["3"].startswith("CorruptCheckpointError")
        assert "used by x.w" in found["3"] or rank == 1
        assert found["fallback"] == [2, 200]
        assert ["step 2 is restored" in text for text in found["fallback warned"]] == [True]
        assert found["different steps"] == [2, 200]  # that of rank 0


def test_a_host_that_cannot_store_copies(tmp_path: Path) -> None:
    """No host removes the last protected step; the error is raised on all ranks."""
    program = """
    pwrite = os.pwrite
    def full(*_):
        raise OSError(28, "No space left on device")
    run = make(peers=1, keep={"local": 1, "remote": 9}, every={"remote": 100})
    save(run, 1)
    run.wait()
    os.pwrite = full if rank == 1 else pwrite
    for step in (2, 3):
        save(run, step)
    attempt("full", run.wait)
    attempt("once more", run.wait)
    found["full then"] = [run.steps(), run.protected(), names(local)]
    attempt("restored", lambda: restore(run))
    save(run, 4, on_error="warn")
    attempt("warned", run.wait)
    found["texts"] = list(texts)
    os.pwrite = pwrite
    save(run, 5)
    run.wait()
    found["end"] = [run.steps(), run.protected(), names(local)]
    run.close()
    """
    for rank, found in enumerate(run(tmp_path, program)):
        assert found["full"].startswith("SaveError"), found
        assert "No space left" in found["full"]
        assert found["full then"][1] == 1
        assert 1 in found["full then"][0]
        assert 1 in found["full then"][2]
        assert found["restored"] == [3, 300]
        assert sum("a copy was not" in text for text in found["texts"]) == (rank == 0)
        assert found["end"] == [[5], 5, [5]]


def test_fewer_hosts_than_peers(tmp_path: Path) -> None:
    program = """
    with make(peers=2) as run:
        save(run, 1)
        run.wait()
        found["protected"] = run.protected()
    with make(peers=1, every={"remote": 2}) as run:
        save(run, 3)
        run.wait()
        found["protected then"] = run.protected()
        attempt("restored", lambda: restore(run))
    found["texts"] = texts
    """
    for per_host in (1, 2):
        folder = tmp_path / f"{per_host}"
        folder.mkdir()
        for rank, found in enumerate(run(folder, program, 2, per_host)):
            assert found["protected"] == 1
            assert found["protected then"] == (3 if per_host == 1 else 1)
            assert found["restored"] == [3, 300]
            n = (1 if per_host == 1 else 2) if rank == 0 else 0
            words = f"peers=2, but only {2 - per_host} other hosts take part"
            assert len(found["texts"]) == n
            assert not n or words in found["texts"][0]


def test_only_rank_0_saves(tmp_path: Path) -> None:
    """Ranks of other hosts see only the slow place."""
    program = """
    run = make(rank=0, every={"remote": 2})
    for step in (1, 2, 3):
        if rank == 0:
            save(run, step)
            run.wait()
    dist.barrier()
    found["steps"], found["protected"] = run.steps(), run.protected()
    attempt("latest", lambda: run.latest().name)
    attempt("restored", lambda: restore(run)[0])
    if rank:
        attempt("refused", lambda: run.save(4))
    dist.barrier()
    run.close()
    """
    for per_host, step in ((1, 2), (2, 3)):
        folder = tmp_path / f"{per_host}"
        folder.mkdir()
        for rank, found in enumerate(run(folder, program, 2, per_host)):
            assert found["steps"] == ([2] if per_host == 1 else [1, 2, 3])
            assert found["protected"] == 2
            assert found["latest"] == f"step-{step:08}.pt"
            assert found["restored"] == step
            assert rank == 0 or found["refused"].startswith("RuntimeError")


@pytest.mark.parametrize("in_group", [True, False])
def test_a_rank_that_dies(tmp_path: Path, in_group: bool) -> None:
    """The others get errors soon, and the next job restores the newest complete step."""
    first = """
    run = make(peers=1)
    save(run, 1)
    run.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    save(run, 2)
    attempt("waited", run.wait)
    attempt("closed", run.close)
    found["s"] = time.monotonic() - start
    tell()
    os._exit(0)
    """
    ranks = start(tmp_path, first, 3, 1, in_group=in_group, timeout=8)
    for rank, found in enumerate(ranks.found(dead=(1,))):
        if rank != 1:
            assert found["waited"].startswith("RuntimeError"), found
            assert found["closed"].startswith("RuntimeError")
            assert found["s"] < 40
    second = """
    run = make(peers=1)
    attempt("restored", lambda: restore(run))
    save(run, 2)
    run.wait()
    found["then"] = [run.steps(), run.protected(), names(local), names(slow)]
    attempt("again", lambda: restore(run, 2))
    found["files"] = len([name for name in os.listdir(local) if name.endswith(".pt")])
    run.close()
    """
    for found in run(tmp_path, second, 3, in_group=in_group):
        assert found["restored"] == [1, 100]
        assert found["then"] == [[1, 2], 2, [1, 2], [1, 2]]
        assert found["again"] == [2, 200]
        assert found["files"] == 4  # its own parts and those of one other rank


def test_a_restart_without_a_process_group(tmp_path: Path, server: S3Server) -> None:
    """Each rank restores alone from the URL, but cannot save.  Another number of ranks cannot."""
    server.file_system().mkdir("bucket")
    program = f"""
    place = "s3://bucket/run"
    with make(peers=1, storage_options={server.options!r}) as run:
        for step in (1, 2, 3):
            save(run, step)
            run.wait()
        found["protected"] = run.protected()
    """
    assert [found["protected"] for found in run(tmp_path, program)] == [3, 3]
    options: dict[str, Any] = {"storage_options": server.options, "local": tmp_path / "new"}
    for rank in range(2):
        alone = ptsave.AsyncCheckpointer("s3://bucket/run", rank=rank, world_size=2, **options)
        assert alone.steps() == [1, 2, 3]
        assert alone.protected() == 3
        target = {"w": torch.zeros(300)}
        assert alone.restore(x=target) == {"step": 3}
        assert torch.equal(target["w"], torch.full((300,), 300.0 + rank))
        assert alone.restore(1, x=target, fallback=False) == {"step": 1}
        with pytest.raises(RuntimeError, match="init_process_group"):
            alone.save(4)
        alone.close()
    assert len([name for name in os.listdir(tmp_path / "new") if name.endswith(".pt")]) == 4
    for n in (1, 3):
        numbers: dict[str, Any] = {} if n == 1 else {"rank": 0, "world_size": n}
        other = ptsave.AsyncCheckpointer(
            "s3://bucket/run", **{**options, "local": tmp_path / f"{n}"}, **numbers
        )
        assert other.steps() == []
        with pytest.raises(FileNotFoundError, match="parts of checkpoints of 2 ranks"):
            other.restore()
        other.close()


def test_peers_of_one_rank(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="peers is for several ranks"):
        ptsave.AsyncCheckpointer(
            tmp_path / "slow", local=tmp_path / "fast", rank=0, world_size=1, peers=1
        )
