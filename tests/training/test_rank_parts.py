"""AsyncCheckpointer where each rank saves a part: real processes, over gloo or without."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from _system import in_threads
from rank_processes import Ranks

import ptsave
from ptsave.support.rank_groups import FileRanks
from ptsave.training.directory import Parts, WholeFiles

# What all programs begin with.
MAKE = """
options = {} if in_group else {"rank": rank, "world_size": size}

def make(**more):
    return ptsave.AsyncCheckpointer(folder / "run", **options, **more)

def values(step):
    return {"x": torch.full((300,), float(100 * step + rank)), "note": f"{step} of {rank}"}

def restore(checkpointer, step=None):
    target = {"x": torch.zeros(300), "note": ""}
    checkpointer.restore(*([] if step is None else [step]), value=target)
    return [target["x"].unique().tolist(), target["note"]]
"""


def run(folder: Path, program: str, size: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Run a program on several ranks, and return what each rank has found."""
    return Ranks(folder, MAKE + dedent(program), size, **options).found()


def part_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("step-"))


@pytest.mark.parametrize(("size", "in_group"), [(2, False), (3, True)])
def test_each_rank_has_its_part(tmp_path: Path, size: int, in_group: bool) -> None:
    program = """
    with make(keep=2) as checkpointer:
        attempt("none", checkpointer.latest)
        attempt("nothing to restore", lambda: restore(checkpointer))
        for step in range(5):
            checkpointer.save(step, value=values(step))
        checkpointer.wait()
        found["steps"] = checkpointer.steps()
        found["latest"] = checkpointer.latest().name
        attempt("restored", lambda: restore(checkpointer))
        attempt("an older one", lambda: restore(checkpointer, 3))
        attempt("one that is gone", lambda: restore(checkpointer, 1))
        checkpointer.save(3, value=values(9)).result()
        checkpointer.wait()
        attempt("saved again", lambda: restore(checkpointer, 3))
    again = make()
    attempt("another job", lambda: restore(again))
    again.save(6, value=values(6))
    again.close()
    found["all"] = again.steps()
    """
    for rank, found in enumerate(run(tmp_path, program, size, in_group=in_group)):
        assert found["none"] is None
        assert found["nothing to restore"].startswith("FileNotFoundError")
        assert found["steps"] == [3, 4]
        assert found["latest"].startswith("step-00000004.")
        assert found["latest"].endswith(f"-0.rank-{rank}-of-{size}.pt")
        assert found["restored"] == [[400 + rank], f"4 of {rank}"]
        assert found["an older one"] == [[300 + rank], f"3 of {rank}"]
        assert "there is no checkpoint of step 1, only of 3, 4" in found["one that is gone"]
        assert found["saved again"] == [[900 + rank], f"9 of {rank}"]
        assert found["another job"] == [[400 + rank], f"4 of {rank}"]
        assert found["all"] == [3, 4, 6]
    names = part_names(tmp_path / "run")
    assert len(names) == 3 * size  # the first save of step 3 has gone
    for name in names:
        assert torch.load(tmp_path / "run" / name)["value"]["x"].numel() == 300
    left = {name for name in os.listdir(tmp_path / "run") if name.startswith(".")}
    assert not {name for name in left if "rank-" in name or name.endswith(".ptsave")}


@pytest.mark.parametrize("in_group", [True, False])
def test_a_rank_that_dies_leaves_the_step_before(tmp_path: Path, in_group: bool) -> None:
    first = """
    checkpointer = make()
    checkpointer.save(1, value=values(1))
    checkpointer.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(2, value=values(2)).result()
    start = time.monotonic()
    attempt("waited", checkpointer.wait)
    found["s"] = time.monotonic() - start
    found["steps"] = checkpointer.steps()
    tell()
    os._exit(0)
    """
    ranks = Ranks(tmp_path, MAKE + dedent(first), 3, in_group=in_group, timeout=10)
    for rank, found in enumerate(ranks.found(dead=(1,))):
        if rank != 1:
            assert found["waited"].startswith("RuntimeError")
            assert found["s"] < 20
            assert found["steps"] == [1]
            words = f"rank {rank} of 3 could not go on" if in_group else "rank 1 of 3 has ended"
            assert words in found["waited"]
    left = part_names(tmp_path / "run")
    assert len(left) == 5
    second = """
    checkpointer = make()
    attempt("latest", lambda: restore(checkpointer))
    checkpointer.save(2, value=values(7))
    checkpointer.wait()
    attempt("again", lambda: restore(checkpointer, 2))
    """
    for rank, found in enumerate(run(tmp_path, second, 3)):
        assert found["latest"] == [[100 + rank], f"1 of {rank}"]
        assert found["again"] == [[700 + rank], f"7 of {rank}"]
    assert len(part_names(tmp_path / "run")) == 6  # the two that never had a third have gone


def test_a_rank_is_killed_while_it_writes_a_value(tmp_path: Path) -> None:
    program = """
    import resource
    checkpointer = make()
    checkpointer.save(1, value=values(1)).result()
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
    attempt("waited", checkpointer.wait)
    tell()
    os._exit(0)
    """
    ranks = Ranks(tmp_path, MAKE + dedent(program), 3, in_group=False, timeout=10)
    for rank, found in enumerate(ranks.found(dead=(1,), by=signal.SIGXFSZ)):
        if rank != 1:
            assert "rank 1 of 3 has ended" in found["waited"]
    (half,) = (tmp_path / "run").glob(".ranks-*.new")
    assert half.stat().st_size == 20
    run(tmp_path, "make().close()", 3, in_group=False)
    assert not half.exists()


@pytest.mark.parametrize("text", ["", "[1]", "[[]]", "[" * 100_000, "\udcff"])
def test_values_that_no_rank_wrote(text: str, tmp_path: Path) -> None:
    ranks = in_threads(lambda rank: FileRanks(tmp_path, rank, 2, timeout=20), range(2))
    values = tmp_path / f".ranks-{ranks[0].session}.1"
    values.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RuntimeError, match=r"\.1 does not hold values of rank 1"):
        ranks[0].gather(7)


@pytest.mark.parametrize("in_group", [True, False])
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, in_group: bool) -> None:
    program = """
    import resource
    checkpointer = make()
    checkpointer.save(1, value=values(1))
    checkpointer.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    checkpointer.save(2, value=torch.zeros(10_000))
    attempt("full", checkpointer.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["steps"] = checkpointer.steps()
    attempt("once", checkpointer.wait)
    if rank == 0:
        checkpointer.save(3, value=1).result()
    attempt("on one only", checkpointer.wait)
    if rank == 1:
        os.truncate(checkpointer.latest(), 100)
    else:
        checkpointer.latest()
    checkpointer.wait()
    attempt("damaged", lambda: restore(checkpointer))
    checkpointer.save(4, value=values(4))
    checkpointer.wait()
    attempt("goes on", lambda: restore(checkpointer))
    """
    zero, one = run(tmp_path, program, in_group=in_group)
    assert zero["full"].startswith("SaveError: ")
    assert "The part of rank 1, step-00000002." in zero["full"]
    assert "File too large" in zero["full"]
    assert one["full"].startswith("SaveError: ")
    assert "File too large" in one["full"]
    for rank, found in enumerate((zero, one)):
        assert found["steps"] == [1]
        assert found["once"] is None
        assert "was saved on rank 0 and not on rank 1" in found["on one only"]
        assert found["goes on"] == [[400 + rank], f"4 of {rank}"]
    assert one["damaged"].startswith("CorruptCheckpointError")
    assert zero["damaged"].startswith("CorruptCheckpointError")
    assert "rank 1 could not restore its part: " in zero["damaged"]
    assert len(part_names(tmp_path / "run")) == 4


def test_a_part_that_is_there_after_an_error_stays(tmp_path: Path) -> None:
    program = """
    import ptsave.training.checkpointer as module
    checkpointer = make(keep=1)
    checkpointer.save(1, value=values(1))
    checkpointer.wait()
    if rank == 1:
        save = module.async_save_with

        def complete_it_and_fail(objects, path, options):
            save(objects, path, options).result()
            return module._failed_save(path, OSError(5, "cannot sync the directory"))

        module.async_save_with = complete_it_and_fail
        checkpointer.save(2, value=values(2))
    else:
        while not list((folder / "run").glob("step-00000002.*")):
            time.sleep(0.01)
        checkpointer.save(2, value=values(2)).result()  # both parts are there: step 1 goes
    attempt("waited", checkpointer.wait)
    attempt("restored", lambda: restore(checkpointer))
    """
    for rank, found in enumerate(run(tmp_path, program)):
        assert "cannot sync the directory" in found["waited"]
        assert found["restored"] == [[200 + rank], f"2 of {rank}"]


@pytest.mark.parametrize("in_group", [True, False])
def test_all_ranks_go_back_to_the_newest_whole_checkpoint(tmp_path: Path, in_group: bool) -> None:
    program = """
    checkpointer = make()
    for step in (1, 2, 3):
        checkpointer.save(step, value=values(step))
    checkpointer.wait()
    if rank == 1:
        part = checkpointer.path(3)
        content = bytearray(part.read_bytes())
        content[content.find(bytes(torch.full((4,), 301.0).view(torch.uint8).tolist()))] ^= 1
        part.write_bytes(content)
        os.truncate(checkpointer.path(2), 100)
    checkpointer.latest()  # waits for the others
    found["damage"] = []
    while True:
        step = checkpointer.steps()[-1]
        try:
            found["restored"] = restore(checkpointer, step)
            break
        except ptsave.CorruptCheckpointError as error:
            found["damage"].append([step, error.rank, error.path, error.entries])
            checkpointer.remove(step)
    attempt("removed", lambda: checkpointer.remove(3))
    attempt("no step", lambda: checkpointer.remove(-1))
    """
    for rank, found in enumerate(run(tmp_path, program, in_group=in_group)):
        assert found["restored"] == [[100 + rank], f"1 of {rank}"]
        newest, second = found["damage"]
        assert newest[:2] == [3, 1]
        assert newest[2].endswith(".rank-1-of-2.pt")
        assert newest[3] == ["value.x"]
        assert second[:2] == [2, 1]
        assert found["removed"].startswith("FileNotFoundError: ")
        assert found["no step"].startswith("ValueError: ")
    assert len(part_names(tmp_path / "run")) == 2


def test_directories_that_are_not_shared(tmp_path: Path) -> None:
    program = """
    checkpointer = ptsave.AsyncCheckpointer(folder / f"of-{rank}", **options)
    checkpointer.save(1, value=values(1))
    attempt("wait", checkpointer.wait)
    """
    for rank, found in enumerate(run(tmp_path, program)):
        words = f"part of rank {1 - rank}.*not in this directory of rank {rank}: all ranks have to"
        assert re.search(words, str(found["wait"])), found
        assert f"of-{rank}" in str(found["wait"])


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    waiting = """
    checkpointer = make()
    checkpointer.save(1, value=values(1)).result()
    (folder / f"saved-{rank}").touch()
    while not (folder / "done").exists():
        time.sleep(0.01)
    checkpointer.close()
    """
    first = Ranks(tmp_path, MAKE + dedent(waiting), 2)
    while not all((tmp_path / f"saved-{rank}").exists() for rank in range(2)):
        assert all(process.poll() is None for process in first.processes)
    (tmp_path / "other").mkdir()
    program = f"""
    folder = Path({str(tmp_path)!r})
    checkpointer = make()
    attempt("restores", lambda: restore(checkpointer))
    attempt("saves", lambda: checkpointer.save(2, value=values(2)))
    """
    found = run(tmp_path / "other", program)
    (tmp_path / "done").touch()
    first.found()
    for rank, each in enumerate(found):
        assert each["restores"] == [[100 + rank], f"1 of {rank}"]
        assert f"saves as rank {rank} of 2 here" in each["saves"]
    without = f"""
    folder = Path({str(tmp_path)!r})
    attempt("first", make)
    """
    for each in run(tmp_path / "other", without, in_group=False):
        assert "AsyncCheckpointer" in each["first"]


@pytest.mark.parametrize("in_group", [True, False])
def test_who_only_restores_leaves_the_directory_to_others(tmp_path: Path, in_group: bool) -> None:
    program = """
    with make() as checkpointer:
        checkpointer.save(1, value=values(1))
    kept = []
    for _ in range(2):
        kept.append(make())
        attempt("restored", lambda: restore(kept[-1]))
        kept[-1].close()
    with make() as checkpointer:
        checkpointer.save(2, value=values(2))
    found["steps"] = checkpointer.steps()
    """
    for rank, found in enumerate(run(tmp_path, program, in_group=in_group)):
        assert found["restored"] == [[100 + rank], f"1 of {rank}"]
        assert found["steps"] == [1, 2]


def test_other_numbers_of_ranks_are_named(tmp_path: Path) -> None:
    save = """
    with make() as checkpointer:
        checkpointer.save(1, value=values(1))
    """
    run(tmp_path, save)
    program = """
    checkpointer = make()
    attempt("restore", lambda: restore(checkpointer))
    """
    for found in run(tmp_path, program, 3):
        assert "but parts of checkpoints of 2 ranks, not 3" in found["restore"]
    with pytest.raises(FileNotFoundError, match="parts of checkpoints of 2 ranks"):
        ptsave.AsyncCheckpointer(tmp_path / "run").restore(value={})
    ptsave.AsyncCheckpointer(tmp_path / "whole").save(1, value=1).result()
    os.rename(tmp_path / "whole" / "step-00000001.pt", tmp_path / "run" / "step-00000001.pt")
    assert ptsave.AsyncCheckpointer(tmp_path / "run").steps() == [1]


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    program = """
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"process_group": halves[rank % 2]}
    folder = folder / str(rank % 2)
    with make() as checkpointer:
        checkpointer.save(1, value=values(1))
    attempt("restored", lambda: restore(make()))
    """
    for rank, found in enumerate(run(tmp_path, program, 4)):
        assert found["restored"] == [[100 + rank], f"1 of {rank}"]
    for half in "01":
        assert {name[-11:] for name in part_names(tmp_path / half / "run")} == {
            "k-0-of-2.pt",
            "k-1-of-2.pt",
        }


def test_a_forked_process_is_no_rank(tmp_path: Path) -> None:
    program = """
    checkpointer = make()
    checkpointer.save(1, value=values(1))
    checkpointer.wait()
    child = os.fork()
    if child == 0:
        try:
            checkpointer.save(2, value=1)
        except RuntimeError as error:
            os._exit(7 if "forked from a rank" in str(error) else 1)
        os._exit(2)
    found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    checkpointer.save(2, value=values(2))
    attempt("close", checkpointer.close)
    """
    for found in run(tmp_path, program, in_group=False):
        assert found["child"] == 7
        assert found["close"] is None


def test_a_group_ends_when_it_is_destroyed(tmp_path: Path) -> None:
    """Its threads would outlive the interpreter otherwise, and one of them abort the process."""
    program = """
    import weakref
    checkpointer = make()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    in_group = False
    found["is alive"] = group() is not None
    attempt("goes on", checkpointer.latest)
    """
    for found in run(tmp_path, program):
        assert not found["is alive"]
        assert "has been destroyed" in found["goes on"]


def test_at_a_url(tmp_path: Path) -> None:
    program = """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
    class Remote(LocalFileSystem):
        protocol = "remote"
        @classmethod
        def _strip_protocol(cls, path):
            return LocalFileSystem._strip_protocol(str(path).removeprefix("remote://"))
    fsspec.register_implementation("remote", Remote)
    def make(**more):
        return ptsave.AsyncCheckpointer(f"remote://{folder}/run", **options, **more)
    with make(keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, value=values(step))
        checkpointer.wait()
        found["steps"] = checkpointer.steps()
        attempt("restored", lambda: restore(checkpointer))
    options = {"rank": rank, "world_size": 2}
    attempt("without a group", make)
    """
    for rank, found in enumerate(run(tmp_path, program)):
        assert found["steps"] == [3]
        assert found["restored"] == [[300 + rank], f"3 of {rank}"]
        assert found["without a group"].startswith("ValueError")
        assert "cannot save to a URL" in found["without a group"]


def test_sharded_module(tmp_path: Path) -> None:
    """FSDP2: DTensors are restored in place, and training goes on the same."""
    program = """
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        fully_shard(model[0])
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model, optimizer, n):
        for step in range(n):
            model(torch.full((4, 5), 1.0 + rank + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.to_local().tolist() for p in model.parameters()]

    model, optimizer = build()
    train(model, optimizer, 2)
    with make() as checkpointer:
        checkpointer.save(2, model=model, optimizer=optimizer)
    found["went on"] = train(model, optimizer, 2)
    model, optimizer = build()
    found["others"] = make().restore(model=model, optimizer=optimizer)
    found["resumed"] = train(model, optimizer, 2)
    """
    for found in run(tmp_path, program):
        assert found["resumed"] == found["went on"]
        assert found["others"] == {}


# ------------------------------------------------------------------------------- arguments, names


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="world_size=2 needs a rank"):
        ptsave.AsyncCheckpointer(tmp_path / "new", world_size=2)
    with pytest.raises(ValueError, match=r"rank must be less than world_size \(2\), not 2"):
        ptsave.AsyncCheckpointer(tmp_path / "new", rank=2, world_size=2)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        ptsave.AsyncCheckpointer(tmp_path / "new", rank=0, world_size=0)
    with pytest.raises(TypeError, match="leave them out"):
        ptsave.AsyncCheckpointer(tmp_path / "new", rank=0, process_group=object())
    assert os.listdir(tmp_path) == []
    with ptsave.AsyncCheckpointer(tmp_path, rank=0, world_size=1) as checkpointer:
        checkpointer.save(1, value=1)
    assert os.listdir(tmp_path) == ["step-00000001.pt"]


def test_parts_of_different_saves_are_never_one_checkpoint() -> None:
    old, new = "019a0000000a0000", "019b0000000b0000"
    naming = Parts(0, 2, new)
    names = [naming.new_name(7, [])]
    assert names[0] == f"step-00000007.{new}-0.rank-0-of-2.pt"
    names.append(f"step-00000007.{old}-0.rank-1-of-2.pt")
    assert naming.checkpoints(names) == {}
    assert naming.dead(names) == []
    names.append(Parts(1, 2, new).new_name(7, []))
    assert naming.checkpoints(names) == {7: [names[0], names[2]]}
    assert naming.dead(names) == [names[1]]
    second = naming.new_name(7, [])
    assert second == f"step-00000007.{new}-1.rank-0-of-2.pt"
    assert naming.checkpoints([*names, second])[7][0] == names[0]
    assert second not in naming.dead([*names, second])
    other = f"step-00000007.{new}-1.rank-1-of-2.pt"
    assert naming.checkpoints([*names, second, other])[7][:2] == [second, other]
    assert set(naming.dead([*names, second, other])) == set(names)


@pytest.mark.parametrize(
    "name",
    [
        "step-7.019b0000000b0000-0.rank-0-of-2.pt",
        "step-00000007.019b0000000b0000-00.rank-0-of-2.pt",
        "step-00000007.019b0000000b000-0.rank-0-of-2.pt",
        "step-00000007.019b0000000b0000-0.rank-0-of-2.pt.bak",
        "step-00000007.019b0000000b0000-0.rank-0-of-2.pt\n",
        "step-00000007.pt",
        "",
    ],
)
def test_names_that_are_no_parts(name: str) -> None:
    naming = Parts(0, 2, "019b0000000b0000")
    assert not naming.is_checkpoint(name)
    assert naming.dead([name]) == []
    assert WholeFiles().is_checkpoint(name) == (name == "step-00000007.pt")


def test_a_part_that_fails_with_a_warning(tmp_path: Path) -> None:
    """`wait` raises on no rank, and each rank warns once."""
    program = """
    import resource, warnings
    run = make(on_error="warn")
    run.save(1, value=values(1))
    run.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        run.save(2, value=torch.ones(1 << 20)).exception()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        run.wait()
    found["texts"] = [str(each.message) for each in caught]
    found["steps"] = run.steps()
    run.close()
    """
    zero, one = run(tmp_path, program, 2)
    assert zero["steps"] == one["steps"] == [1]
    assert len(zero["texts"]) == len(one["texts"]) == 1
    assert "The part of rank 1" in zero["texts"][0]
    assert "step 2 was not saved" in one["texts"][0]
    assert len(part_names(tmp_path / "run")) == 2
