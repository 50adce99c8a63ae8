"""Which checkpoints AsyncCheckpointer keeps beside the newest, and the signals that end a run."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import eventually, in_threads
from forked_ranks import ForkedRanks
from torch import nn
from warm_python import WarmProcess

import ptsave
from ptsave.background.saves import writes_held_back
from ptsave.training.directory import Retention


def save_all(directory: object, entries: dict[int, dict[str, Any]], **rules: Any) -> list[int]:
    with ptsave.AsyncCheckpointer(directory, fsync=False, **rules) as checkpointer:  # type: ignore[arg-type]
        for step, values in entries.items():
            checkpointer.save(step, weight=torch.ones(2), **values)
            checkpointer.wait()
        return checkpointer.steps()


@pytest.mark.parametrize("seed", range(4))
def test_all_rules(tmp_path: Path, seed: int) -> None:
    """A second process, which knows files only, goes by the same rules."""
    rng = random.Random(seed)
    rules: dict[str, Any] = {"keep": rng.randint(1, 3), "keep_every": rng.choice([None, 5])}
    rules["keep_marked"] = rng.choice([None, "milestone"])
    if rng.random() < 0.7:
        rules.update(keep_best=rng.randint(1, 3), metric="loss", mode=rng.choice(["min", "max"]))
    entries: dict[int, dict[str, Any]] = {}
    for step in range(16):
        number = rng.choice([rng.random(), 1, torch.tensor(rng.random()), math.nan])
        entries[step] = {"loss": number} if rng.random() < 0.8 else {}
        if rng.random() < 0.2:
            entries[step]["milestone"] = rng.choice([True, 1, "v2", False])
    for half in (range(8), range(8, 16)):
        kept = save_all(tmp_path, {step: entries[step] for step in half}, **rules)

    wanted = set(range(16 - rules["keep"], 16))
    if rules["keep_every"]:
        wanted |= {0, 5, 10, 15}
    if rules["keep_marked"]:
        wanted |= {step for step, values in entries.items() if values.get("milestone")}
    if "metric" in rules:
        sign = 1 if rules["mode"] == "min" else -1
        losses = {step: float(values.get("loss", math.nan)) for step, values in entries.items()}
        known = [step for step, loss in losses.items() if not math.isnan(loss)]
        known.sort(key=lambda step: (sign * losses[step], -step))
        wanted |= set(known[: rules["keep_best"]])
    assert set(kept) == wanted


@pytest.mark.parametrize("place", ["memory://retention", "directory"])
def test_at_a_url(tmp_path: Path, place: str) -> None:
    directory = place if "://" in place else tmp_path
    losses = dict(enumerate([3.0, 1.0, 2.0, 5.0, 4.0]))
    entries = {step: {"loss": loss} for step, loss in losses.items()}
    assert save_all(directory, entries, keep=1, keep_best=2, metric="loss") == [1, 2, 4]


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    entries: dict[int, Any] = {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}
    rules: dict[str, Any] = {"keep": 1, "keep_best": 1, "metric": "loss"}
    with ptsave.AsyncCheckpointer(tmp_path, fsync=False, **rules) as checkpointer:
        for step, values in entries.items():
            checkpointer.save(step, **values)
            checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
        with pytest.warns(ptsave.CheckpointWarning, match="a checkpoint of step 3"):
            checkpointer.save(1, loss=9.0)
        checkpointer.wait()
        checkpointer.save(4, loss=5.0)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]


def test_a_checkpoint_that_cannot_be_read_stays(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"keep": 1, "keep_marked": "milestone"}
    save_all(tmp_path, {1: {"milestone": True}}, **rules)
    os.truncate(tmp_path / "step-00000001.pt", 300)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert save_all(tmp_path, {2: {}, 3: {}}, **rules) == [1, 3]
    assert any("step 1 cannot be read, so it stays" in str(each.message) for each in caught)


def test_ranks_go_by_the_entries_of_rank_0(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"keep": 1, "keep_best": 1, "metric": "loss", "fsync": False}

    def run(rank: int) -> list[int]:
        options = {"rank": rank, "world_size": 2, **rules}
        with ptsave.AsyncCheckpointer(tmp_path, **options) as checkpointer:
            for step in range(5):
                checkpointer.save(step, loss=float(step if rank == 0 else -step))
                checkpointer.wait()
            return checkpointer.steps()

    assert in_threads(run, [0, 1]) == [[0, 4], [0, 4]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"keep_best": 2}, "keep_best and metric go together"),
        ({"metric": "loss"}, "keep_best and metric go together"),
        ({"keep_every": 0}, "keep_every must be at least 1, not 0"),
        ({"keep": None, "keep_every": 5}, "keep=None keeps all checkpoints: leave keep_every out"),
        ({"keep_best": 1, "metric": "loss", "mode": "low"}, "mode must be 'min' or 'max'"),
        ({"keep_marked": True}, "keep_marked must be the name of an entry, not True"),
    ],
)
def test_rules_that_do_not_go_together(tmp_path: Path, rules: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ptsave.AsyncCheckpointer(tmp_path, **rules)


@pytest.mark.parametrize("place", ["memory://replaced", "directory"])
def test_a_file_that_another_process_replaces(tmp_path: Path, place: str) -> None:
    directory = place if "://" in place else tmp_path
    with ptsave.AsyncCheckpointer(directory, 2, keep_marked="released") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, released=False)
            checkpointer.wait()
        ptsave.save_checkpoint(checkpointer.path(2), released=True)
        checkpointer.save(4, released=False)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]


def test_a_step_that_ranks_save_again(tmp_path: Path) -> None:
    """The part of rank 1 comes later: until then the step is the one that was saved before."""

    def make(rank: int) -> ptsave.AsyncCheckpointer:
        return ptsave.AsyncCheckpointer(
            tmp_path, 1, keep_marked="m", rank=rank, world_size=2, fsync=False
        )

    ranks = in_threads(make, [0, 1])
    saves = [(1, True, (0, 1)), (2, False, (0, 1)), (3, False, (0, 1))]
    for step, mark, order in [*saves, (3, True, (0, 1)), (4, False, (1, 0))]:
        for rank in order:
            ranks[rank].save(step, m=mark).result()
            with writes_held_back():
                pass  # the callback has run
    in_threads(ptsave.AsyncCheckpointer.wait, ranks)
    assert ranks[0].steps() == [1, 3, 4]
    in_threads(ptsave.AsyncCheckpointer.close, ranks)


@pytest.mark.parametrize(
    ("entries", "metric", "kept"),
    [
        ({i: {"v.l": float(abs(i - 3)), "v": {"l": float(i)}} for i in range(1, 6)}, "v.l", [3, 5]),
        ({1: {"m": 10**400}, 2: {"m": -(10**400)}, 3: {"m": 1}, 4: {}}, "m", [2, 4]),
    ],
    ids=["a name with a dot", "huge numbers"],
)
def test_odd_metrics(tmp_path: Path, entries: Any, metric: str, kept: list[int]) -> None:
    assert save_all(tmp_path, entries, keep=1, keep_best=1, metric=metric) == kept


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    """All that may go has gone before the warning is given."""
    (tmp_path / "step-00000001.pt").write_bytes(b"abc")
    with warnings.catch_warnings(), ptsave.AsyncCheckpointer(tmp_path, 2) as checkpointer:
        warnings.simplefilter("error", ptsave.CheckpointWarning)
        checkpointer._retention = Retention(2, keep_marked="m")
        for step in range(2, 6):
            checkpointer.save(step, m=False)
            checkpointer.wait()
        assert checkpointer.steps() == [1, 4, 5]


class _Number:
    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "value",
    [
        "0.3",
        b"3",
        [0.3],
        torch.ones(2),
        None,
        1j,
        Fraction(1),
        signal.SIGTERM,
        _Number(),
        nn.ReLU(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_that_is_no_number(tmp_path: Path, value: object) -> None:
    with ptsave.AsyncCheckpointer(tmp_path, keep_best=1, metric="loss") as checkpointer:
        with pytest.raises(TypeError, match="the metric 'loss' must be a number"):
            checkpointer.save(1, loss=value)
        checkpointer.save(2, loss=torch.tensor(0.3))


# -------------------------------------------------------------------------------- stop signals

_RUN = """
import sys, time
import signal, torch, ptsave
with ptsave.AsyncCheckpointer(sys.argv[1], stop_signals=[signal.SIGTERM, signal.SIGUSR1]) as run:
    step = run.restore()["step"] + 1 if run.latest() else 0
    print("ready", flush=True)
    while not run.stop_requested():
        time.sleep(0.01)
        step += 1
    run.save(step, step=step, weight=torch.full((1000,), float(step)))
print("ended", step)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_saves_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    steps = []
    for _ in range(2):
        run = WarmProcess(_RUN, tmp_path, stdout=subprocess.PIPE)
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(number)
        assert run.communicate(timeout=60)[0].startswith("ended ")
        assert run.returncode == 0
        steps.append(ptsave.AsyncCheckpointer(tmp_path).steps()[-1])
    assert steps[0] < steps[1]


@pytest.fixture
def before() -> Iterator[Any]:
    """The handler of SIGUSR1 before the test, which comes back behind it."""
    handler = signal.getsignal(signal.SIGUSR1)
    yield handler
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_at_once(tmp_path: Path, before: Any, order: tuple[int, int]) -> None:
    numbers = [signal.SIGUSR1, signal.SIGUSR1]
    both = [ptsave.AsyncCheckpointer(tmp_path / str(i), stop_signals=numbers) for i in range(2)]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [each.stop_requested() for each in both] == [True, True]
    for number in order:
        assert signal.getsignal(signal.SIGUSR1) != before
        both[number].close()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.usefixtures("before")
def test_closed_in_a_thread(tmp_path: Path) -> None:
    """The handler stays, and passes the next signal on."""
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, stop_signals=[signal.SIGUSR1])
    in_threads(ptsave.AsyncCheckpointer.close, [checkpointer])
    os.kill(os.getpid(), signal.SIGUSR1)
    eventually(lambda: came)
    assert not checkpointer.stop_requested()


@pytest.mark.usefixtures("before")
def test_a_handler_that_calls_the_one_before(tmp_path: Path) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, stop_signals=[signal.SIGUSR1])
    earlier: Any = signal.getsignal(signal.SIGUSR1)

    def chained(number: int, frame: Any) -> None:
        earlier(number, frame)

    signal.signal(signal.SIGUSR1, chained)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert checkpointer.stop_requested()
    checkpointer.close()
    os.kill(os.getpid(), signal.SIGUSR1)


def test_handlers_come_back(tmp_path: Path, before: Any) -> None:
    checkpointer = ptsave.AsyncCheckpointer(tmp_path, stop_signals=[signal.SIGUSR1])
    assert not checkpointer.stop_requested()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert checkpointer.stop_requested()
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(KeyError), ptsave.AsyncCheckpointer(tmp_path, stop_signals=[10]):
        raise KeyError
    assert signal.getsignal(signal.SIGUSR1) == before


def test_signals_that_cannot_be_taken(tmp_path: Path, before: Any) -> None:
    with pytest.raises(ValueError, match=r"stop_signals=.* cannot be handled: "):
        ptsave.AsyncCheckpointer(tmp_path, stop_signals=[signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(ValueError, match="main thread"):
        in_threads(
            lambda number: ptsave.AsyncCheckpointer(tmp_path, stop_signals=[number]),
            [signal.SIGUSR1],
        )


def test_a_forked_child_can_be_terminated(tmp_path: Path) -> None:
    with ptsave.AsyncCheckpointer(
        tmp_path, stop_signals=[signal.SIGTERM, signal.SIGUSR1]
    ) as checkpointer:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        child.start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGUSR1)
        time.sleep(0.2)
        assert child.is_alive()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert not checkpointer.stop_requested()


def test_signals_that_one_rank_cannot_take(tmp_path: Path) -> None:
    """The constructor is collective: the other rank fails, too."""

    def make(rank: int) -> str:
        numbers = [signal.SIGUSR1] if rank == 1 else []  # which a thread may not take
        with pytest.raises(ValueError) as caught:
            ptsave.AsyncCheckpointer(tmp_path, rank=rank, world_size=2, stop_signals=numbers)
        return str(caught.value)

    first, second = in_threads(make, [0, 1])
    assert "rank 1 could not handle signals" in first
    assert "main thread" in second


@pytest.mark.parametrize("options", [{}, {"rank": 0}], ids=str)
def test_processes_of_a_group_stop_at_the_same_step(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def run(rank: int) -> None:
        signals = [signal.SIGUSR1]
        with ptsave.AsyncCheckpointer(
            tmp_path / "run", stop_signals=signals, **options
        ) as checkpointer:
            step = 0
            while not checkpointer.stop_requested():
                step += 1
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
            assert step == 3
            if rank == 0 or not options:
                checkpointer.save(step, weight=torch.ones(2))

    ForkedRanks(tmp_path, run).join()
    assert len(list((tmp_path / "run").glob("step-00000003*.pt"))) == (1 if options else 2)


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    def run(rank: int) -> int:
        with ptsave.AsyncCheckpointer(tmp_path, rank=rank, world_size=2) as checkpointer:
            step = 0
            while True:
                checkpointer._stop_signals.came |= rank == 1 and step == 3
                if checkpointer.stop_requested():
                    return step
                step += 1

    assert in_threads(run, [0, 1]) == [3, 3]
