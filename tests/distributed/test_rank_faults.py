"""Faults of ranks: errors, full disks, kills; the old checkpoint or the new one is whole."""

from __future__ import annotations

import errno
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as _dcp
from dcp_states import differences, state_of
from forked_ranks import ForkedRanks
from kill_rounds import ROUNDS, SEED
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from warm_python import run_warm

import ptsave
from ptsave.distributed import StorageReader, StorageWriter

dcp: Any = _dcp  # a package that does not export its names to type checkers


N_RANKS = 2


def state(*, filled: bool = True) -> dict[str, Any]:
    return state_of("flat-rows", N_RANKS, filled=filled)


def save_state(folder: Path, **options: Any) -> None:
    dcp.save(state(), storage_writer=StorageWriter(folder), **options)


def check(folder: Path) -> None:
    target = state(filled=False)
    dcp.load(target, storage_reader=StorageReader(folder))
    assert not differences(target, state())


def fail_to_end(folder: Path) -> None:
    class Failing(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError(errno.EIO, "it cannot end")

    with pytest.raises(CheckpointException, match="it cannot end"):
        dcp.save({"x": torch.ones(9)}, storage_writer=Failing(folder), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_files_of_failed_saves(tmp_path: Path) -> None:
    """They go with the next save of the process, unless another thread may still be at theirs."""
    dcp.save({"x": torch.zeros(9)}, storage_writer=StorageWriter(tmp_path), no_dist=True)
    (old,) = tmp_path.glob("*.distcp")
    for _ in range(3):
        fail_to_end(tmp_path)
        assert len(list(tmp_path.glob("*.distcp"))) == 2
    thread = threading.Thread(target=fail_to_end, args=(tmp_path,))
    thread.start()
    thread.join()
    assert len(list(tmp_path.glob("*.distcp"))) == 3  # one of the main thread, which may be saving
    fail_to_end(tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert old.exists()


def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def fail_on_last_rank(rank: int) -> None:
        save_state(folder)
        before = (folder / ".metadata").read_bytes()
        dist.barrier()
        if rank == N_RANKS - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        for _ in range(3):
            with pytest.raises(CheckpointException) as caught:
                save_state(folder)
            dist.barrier()
            # The old file and that of the last save, which the others' errors have made useless.
            assert len(list(folder.glob("__0_*.distcp"))) == 2
            dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ((failed, (error, _)),) = caught.value.failures.items()
        assert failed == N_RANKS - 1
        assert isinstance(error, ptsave.SaveError)
        assert error.errno == errno.EFBIG
        assert f"__{failed}_" in str(error.filename)
        dist.barrier()
        assert (folder / ".metadata").read_bytes() == before
        check(folder)
        dist.barrier()
        save_state(folder)
        check(folder)
        dist.barrier()
        assert len(list(folder.glob("*.distcp"))) == N_RANKS
        assert not list(folder.glob(".*.ptsave"))

    ForkedRanks(tmp_path, fail_on_last_rank).join()


def test_a_missing_file_is_an_error_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    ForkedRanks(tmp_path, lambda _: save_state(folder)).join()
    (file,) = folder.glob("__1_*.distcp")
    file.unlink()

    def load(_: int) -> None:
        with pytest.raises(CheckpointException) as caught:
            check(folder)
        assert any(file.name in str(error) for error, _ in caught.value.failures.values())

    ForkedRanks(tmp_path, load).join()


def test_ranks_that_save_by_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def save_apart(_: int) -> None:
        for _ in range(2):
            save_state(folder, use_collectives=False)
            dist.barrier()
            check(folder)
            dist.barrier()

    ForkedRanks(tmp_path, save_apart).join()
    names = {path.name for path in folder.iterdir()}
    assert {f"__{rank}.metadata" for rank in range(N_RANKS)} <= names
    assert len(names) == 2 * N_RANKS


def test_saves_in_the_background(tmp_path: Path) -> None:
    def save_in_background(_: int) -> None:
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            folder = tmp_path / kind.value
            for _ in range(2):
                future: Any = dcp.async_save(
                    state(), storage_writer=StorageWriter(folder), async_checkpointer_type=kind
                )
                getattr(future, "upload_completion", future).result()
            dist.barrier()
            check(folder)

    ForkedRanks(tmp_path, save_in_background).join()


# -------------------------------------------------------------------------------------------- kills

KILLED = """
import datetime, itertools, os, random, signal, sys, time, warnings
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from ptsave.distributed import StorageReader, StorageWriter
warnings.simplefilter("ignore")
folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
torch.set_num_threads(1)
GROUP_TIMEOUT_S = 20

def state(rank, step):
    own = {f"{name}-{rank}": torch.full((n,), float(step)) for name, n in
           (("a", 7), ("b", 300_000), ("c", 5_000))}
    return {**own, f"step-{rank}": step}

def save_on(rank, n_ranks, store, first):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks,
                            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    (folder / f"ready-{rank}").touch()
    for step in itertools.count(first):
        writer = StorageWriter(folder / "checkpoint", fsync=False)
        dcp.save(state(rank, step), storage_writer=writer)

def round_of(number, n_ranks, first):
    store = folder / f"store-{number}"
    children = []
    for rank in range(n_ranks):
        (folder / f"ready-{rank}").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = 1
            try:
                save_on(rank, n_ranks, store, first)
            except dcp.api.CheckpointException:
                code = 3
            except RuntimeError:  # of the group: the other one is gone
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    while not all((folder / f"ready-{rank}").exists() for rank in range(n_ranks)):
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.25))
    victim = chance.choice(children)
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    took = time.monotonic() - begin
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {3}, codes  # an error on every rank
    assert took < 2 * GROUP_TIMEOUT_S + 60, took  # (the machine may stop us for a while)
    store.unlink(missing_ok=True)
    return check()

def check():
    if not (folder / "checkpoint" / ".metadata").exists():
        return 0
    steps = set()
    metadata = StorageReader(folder / "checkpoint").read_metadata()
    ranks = {name.rpartition("-")[2] for name in metadata.state_dict_metadata}
    for reader in (StorageReader, dcp.FileSystemReader):
        target = {}
        for rank in ranks:
            target.update(state(rank, 0))
        dcp.load(target, storage_reader=reader(folder / "checkpoint"), no_dist=True)
        for name, value in target.items():
            steps |= {value} if isinstance(value, int) else {int(x) for x in value.unique()}
    assert len(steps) == 1, steps
    return steps.pop()

last = 0
for number in range(rounds):
    step = round_of(number, chance.choice((2, 4)), last + 1)
    assert step >= last, (step, last)
    last = step
# A save that ends leaves nothing of those that were killed.
dcp.save(state(0, last + 1), storage_writer=StorageWriter(folder / "checkpoint"), no_dist=True)
names = sorted(path.name for path in (folder / "checkpoint").iterdir())
assert len(names) == 2 and names[0] == ".metadata", names
print("steps:", last)
"""


@pytest.mark.kill
@pytest.mark.timeout(0)
def test_killed_ranks(tmp_path: Path) -> None:
    result = run_warm(KILLED, tmp_path, ROUNDS, SEED, check=False, timeout=None)
    assert result.returncode == 0, f"seed {SEED}: {result.stderr[-3000:]}"
    assert int(result.stdout.rpartition("steps: ")[2]) > 0
