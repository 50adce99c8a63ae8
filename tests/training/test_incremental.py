"""AsyncCheckpointer(incremental=True): each checkpoint is whole, and shares unchanged bytes."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import Child, in_child, run_python
from stock_comparison import assert_same_object, stock_load, stock_save

import ptsave

pytestmark = pytest.mark.usefixtures("_everything_ends")

MIB = 1 << 20
FROZEN_NBYTES = 8 * MIB
MIN_SHARED = FROZEN_NBYTES - (64 << 10)


class Run:
    """Frozen weights, and an adapter that changes in each step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.frozen = torch.randn(FROZEN_NBYTES // 4, generator=generator)
        self.adapter = torch.zeros(MIB // 4)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of a step; pickles of all steps below 256 have the same size."""
        self.adapter.fill_(step)
        return {"frozen": self.frozen, "adapter": self.adapter, "step": step}

    def save(self, run: ptsave.AsyncCheckpointer, step: int) -> int:
        """Save, check the file and the future, and return the number of shared bytes."""
        future = run.save(step, model=self.state(step))
        future.result()
        run.wait()
        path = run.latest()
        assert path is not None
        self.check(Path(path), step)
        assert future.nbytes_written + future.nbytes_shared == os.path.getsize(path)
        return future.nbytes_shared

    def check(self, path: Path, step: int) -> None:
        """Compare with what stock torch writes."""
        expected = path.parent.parent / "stock" / path.name
        expected.parent.mkdir(exist_ok=True)
        stock_save({"model": self.state(step)}, expected)
        assert path.read_bytes() == expected.read_bytes()
        assert_same_object(stock_load(path)["model"], self.state(step))
        shutil.rmtree(expected.parent)


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.mark.parametrize("keep", [1, 3, None])
@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_steps(shared: Path, run: Run, keep: int | None, staging: Any) -> None:
    with ptsave.AsyncCheckpointer(
        shared / "run", keep, staging=staging, incremental=True
    ) as checkpointer:
        assert run.save(checkpointer, 1) == 0
        for step in range(2, 7):
            assert MIN_SHARED <= run.save(checkpointer, step) <= FROZEN_NBYTES
        assert len(os.listdir(shared / "run")) == (6 if keep is None else keep)
        assert checkpointer.restore()["model"]["step"] == 6


def test_without_incremental(shared: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(shared / "run") as checkpointer:
        assert run.save(checkpointer, 1) == run.save(checkpointer, 2) == 0


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_bool(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="incremental"):
        ptsave.AsyncCheckpointer(tmp_path, incremental=value)


def test_a_save_has_no_base_of_its_own(tmp_path: Path) -> None:
    with (
        ptsave.AsyncCheckpointer(tmp_path) as checkpointer,
        pytest.raises(TypeError, match=r"base='old\.pt' is an option of"),
    ):
        checkpointer.save(1, x=1, base="old.pt")


def test_many_saves_are_pending(shared: Path, run: Run) -> None:
    """The base of a save is the file of the save before, which is not written yet at the call."""
    with ptsave.AsyncCheckpointer(shared / "run", None, incremental=True) as checkpointer:
        futures = [checkpointer.save(step, model=run.state(step)) for step in range(1, 8)]
        for future in futures:
            future.result()
    assert futures[0].nbytes_shared == 0
    for step, future in enumerate(futures[1:], 2):
        assert future.nbytes_shared >= MIN_SHARED
        run.check(shared / "run" / f"step-{step:08d}.pt", step)


def test_a_step_is_saved_again(shared: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as checkpointer:
        assert run.save(checkpointer, 1) == 0
        assert run.save(checkpointer, 1) > FROZEN_NBYTES  # all is the same


def test_a_process_that_restarts(shared: Path, run: Run) -> None:
    code = """if True:
        import ptsave, sys, torch
        generator = torch.Generator().manual_seed(1)
        state = {"frozen": torch.randn(1 << 21, generator=generator)}
        state |= {"adapter": torch.zeros(1 << 18), "step": int(sys.argv[2])}
        state["adapter"].fill_(state["step"])
        with ptsave.AsyncCheckpointer(sys.argv[1], keep=1, incremental=True) as run:
            future = run.save(state["step"], model=state)
            future.result()
        print(future.nbytes_shared >= (1 << 23) - (1 << 16))
    """
    for step in range(1, 4):
        assert run_python(code, shared / "run", step).stdout.strip() == str(step > 1)
        run.check(shared / "run" / f"step-{step:08d}.pt", step)


def test_after_a_fork(shared: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as checkpointer:
        run.save(checkpointer, 1)

    def child() -> None:
        with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as own:
            assert run.save(own, 2) >= MIN_SHARED

    in_child(child)


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _another_format(path: Path) -> None:
    stock_save({"x": 1}, path, _use_new_zipfile_serialization=False)


def _a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


@pytest.mark.parametrize("spoil", [_damage, _another_format, _a_directory, Path.unlink])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.filterwarnings("ignore::ptsave.CheckpointWarning")  # of a directory that is kept
def test_the_last_checkpoint_is_spoilt(shared: Path, run: Run, spoil: Any, restarts: bool) -> None:
    """The save succeeds without it, and is the base of the next."""
    checkpointer = ptsave.AsyncCheckpointer(shared / "run", incremental=True)
    run.save(checkpointer, 1)
    path = checkpointer.latest()
    assert path is not None
    spoil(Path(path))
    if restarts:
        checkpointer.close()
        checkpointer = ptsave.AsyncCheckpointer(shared / "run", incremental=True)
    assert run.save(checkpointer, 2) == 0
    assert run.save(checkpointer, 3) >= MIN_SHARED
    checkpointer.close()


def test_a_payload_of_the_last_checkpoint_is_damaged(shared: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as checkpointer:
        for step in range(1, 5):
            run.save(checkpointer, step)
            with open(shared / "run" / f"step-{step:08d}.pt", "r+b") as file:
                file.seek(3 * MIB + step)
                file.write(b"damaged")


def test_a_save_that_fails_is_no_base(shared: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as checkpointer:
        run.save(checkpointer, 1)
        (shared / "run").rename(shared / "away")
        with pytest.raises(OSError, match="run"):
            checkpointer.save(2, model=run.state(2)).result()
        (shared / "away").rename(shared / "run")
        assert run.save(checkpointer, 3) >= MIN_SHARED


def test_ranks_have_bases_of_their_own(shared: Path, run: Run) -> None:
    def rank(number: int) -> None:
        run.frozen += number
        with ptsave.AsyncCheckpointer(
            shared / "run", rank=number, world_size=2, incremental=True
        ) as checkpointer:
            for step in range(1, 4):
                future = checkpointer.save(step, model=run.state(step))
                future.result()
                assert (future.nbytes_shared >= MIN_SHARED) == (step > 1)
            checkpointer.wait()

    children = [Child(partial(rank, number)) for number in range(2)]
    for child in children:
        child.join()
    for number in range(2):
        (path,) = (shared / "run").glob(f"step-00000003*rank*{number}*.pt")
        model = stock_load(path)["model"]
        assert torch.equal(model["frozen"], run.frozen + number)
        assert torch.equal(model["adapter"], torch.full((MIB // 4,), 3.0))


def test_the_local_one_of_two_places(shared: Path, tmp_path: Path, run: Run) -> None:
    with ptsave.AsyncCheckpointer(
        tmp_path / "slow", local=shared / "run", incremental=True
    ) as checkpointer:
        assert run.save(checkpointer, 1) == 0
        for step in range(2, 4):
            assert run.save(checkpointer, step) >= MIN_SHARED
        assert checkpointer.protected() is not None
    for step in range(1, 4):
        name = f"step-{step:08d}.pt"
        assert (tmp_path / "slow" / name).read_bytes() == (shared / "run" / name).read_bytes()


def test_kills(shared: Path, run: Run) -> None:
    """After any kill, the newest checkpoint is whole, and the next process shares with it."""

    def save_steps() -> None:
        with ptsave.AsyncCheckpointer(
            shared / "run", keep=2, incremental=True, fsync=False
        ) as checkpointer:
            newest = checkpointer.latest()
            first = 1 if newest is None else stock_load(newest)["model"]["step"] + 1
            for step in range(first, 2000):
                checkpointer.save(step, model=run.state(step)).result()
        raise RuntimeError("the kill was too late")

    (shared / "run").mkdir()
    for i in range(12):
        child = Child(save_steps)
        time.sleep(0.05 + 0.01 * i)
        child.kill()
        for path in (shared / "run").glob("step-*.pt"):
            step = stock_load(path)["model"]["step"]
            assert path.name == f"step-{step:08d}.pt"
            run.check(path, step)
    with ptsave.AsyncCheckpointer(shared / "run", incremental=True) as checkpointer:
        assert run.save(checkpointer, 2001) >= MIN_SHARED
