"""``ptsave bench``: what it measures, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import json_of, run

from ptsave.bench import limits, rounds, system, worker
from ptsave.bench.rounds import LIMIT, MIN_NBYTES, SPEED_HEADER, Results, plan_disk
from ptsave.bench.system import Figure, Task, filesystem_of

MIB = 1 << 20


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Return the tasks of processes that measure, without the seconds in which each starts."""
    tasks: list[Task] = []

    def run_worker(task: Task) -> Figure:
        tasks.append(task)
        if task.action == "save":
            Path(task.path).write_bytes(b"a file")
        seconds = {"torch": 4.0, "safetensors": 2.0, "ptsave": 1.0}[task.contender]
        return Figure(seconds, 10**9, 0, 7)

    monkeypatch.setattr(rounds, "_run_worker", run_worker)
    monkeypatch.setattr(limits, "measure", lambda mode, path, nbytes: (10**9, {"1": 1.0, "2": 0.5}))
    return tasks


bench = partial(run, "bench")


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path
    if request.param == "memory":
        place = Path("/dev/shm") / f"ptsave-test-{os.getpid()}"
        place.mkdir()
    if filesystem_of(place).startswith("tmpfs") != (request.param == "memory"):
        pytest.skip(f"{place} is of the other kind")
    yield place
    shutil.rmtree(place)


def test_table(tasks: list[Task], folder: Path) -> None:
    result = bench(str(folder), "--size", "32MiB", "--rounds", "2")
    assert result.exit_code == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert all(name in header for name in SPEED_HEADER)
    titles = [workload.title for workload in rounds.WORKLOADS.values()]
    if filesystem_of(folder).startswith("tmpfs"):
        titles = ["save", "load, warm"]
        assert "nothing there is durable or cold" in result.stderr
    assert len(lines) == 4 * len(titles)
    for title in titles:
        mine = [line for line in lines if line.startswith(f"{title}  ")]
        assert [line.split()[-2:] for line in mine] == [
            ["1.00", "0.12"],
            ["2.00", "0.25"],
            ["4.00", "0.50"],
            ["8.00", "1.00"],
        ]
    assert os.listdir(folder) == []


def test_says_beforehand_what_is_written(tasks: list[Task], tmp_path: Path) -> None:
    result = bench(str(tmp_path), "--size", "1GiB", "--rounds", "3")
    plan = plan_disk(str(tmp_path), 1 << 30, 3)
    written = sum(task.action == "save" for task in tasks) + 3 * 3 * sum(
        workload.action == "save" for workload in plan.workloads.values()
    )
    assert plan.nbytes_written == written << 30
    assert f"writes {written}.0 GiB in all to {tmp_path}, 3.00 GiB at a time" in result.stderr
    assert bench(str(tmp_path), "--quiet").stderr == ""


def test_json_and_markdown(tasks: list[Task], tmp_path: Path) -> None:
    found = json_of("bench", tmp_path, "--size", "40M")
    assert (found["nbytes"], found["state"]) == (40 * MIB, "as found")
    assert found["workloads"]["load-warm"]["ptsave"]["times_torch"] == 4.0
    assert found["workloads"]["save"]["ptsave"]["seconds"] == [1.0] * 3
    text = bench(str(tmp_path), "--markdown").stdout
    assert "| load, warm | ptsave | 1.000 | 1.000 - 1.000 | 1.00 | 4.00 | 0.50 |" in text
    assert str(tmp_path) not in text


def test_states(tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*arguments: str) -> set[str]:
        tasks.clear()
        assert bench(str(tmp_path), "--size", "32MiB", *arguments).exit_code == 0
        return {task.state for task in tasks if "loaded" not in task.path or task.nbytes == 0}

    assert states() == {"as found"}
    assert states("--state", "warmed-up") == {"warmed up"}
    monkeypatch.setattr(system, "_COMPACT_MEMORY", tmp_path / "nothing")
    result = bench(str(tmp_path), "--state", "cold")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "only root can make memory cold" in result.stderr


def test_plot(tasks: list[Task], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench(str(tmp_path), "--plot", str(tmp_path / "speeds.svg"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "speeds.svg").read_bytes().startswith(b"<?xml")


def test_plot_without_matplotlib(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = bench(str(tmp_path), "--plot", str(tmp_path / "x.png"))
    assert (result.exit_code, tasks) == (2, [])
    assert result.stderr == (
        "ptsave: plots need matplotlib: pip install 'ptsave[plot]', or pip install matplotlib\n"
    )


def test_what_cannot_be_measured(tasks: list[Task], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {
        ("nowhere",): "nowhere: No such file or directory",
        (str(tmp_path / "file"),): "file: Not a directory",
        (str(tmp_path), "--size", "1000T"): "choose a smaller size",
        (str(tmp_path), "--size", "1M"): "at least 32 MiB",
        (str(tmp_path), "--size", "much"): "is not a size, such as 512MiB",
        (str(tmp_path), "--plot", "x.doc"): "matplotlib cannot write .doc",
        (str(tmp_path), "--plot", "/nowhere/x.png"): "/nowhere/x.png: No such file",
        (str(tmp_path), "--plot", "/nowhere/x"): "/nowhere/x.png: No such file",
    }
    for arguments, message in cases.items():
        result = bench(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert message in result.stderr
        assert "Error" in result.stderr or result.stderr.count("\n") == 1
    assert tasks == []
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = bench(str(tmp_path))
    assert (result.exit_code, result.stderr) == (2, f"ptsave: {tmp_path}: Permission denied\n")


def test_too_little_memory(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "available_nbytes", lambda: 200 * MIB)
    assert "choose a smaller size" in bench(str(tmp_path), "--size", "100M").stderr
    assert plan_disk(str(tmp_path)).nbytes == 50 * MIB


def test_a_failing_worker(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, workload: Any, contender: str, results: Results) -> None:
        raise RuntimeError(f"save with {contender} has failed: OSError: No space left on device")

    monkeypatch.setattr(rounds.Bench, "run", fail)
    result = bench(str(tmp_path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 2)
    assert "No space left on device" in result.stderr
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------- real processes


def test_worker_figures(tmp_path: Path) -> None:
    """What a worker measures, here in this process; and that a failure of one is one line."""
    path = tmp_path / "model.pt"
    saved = worker.measure_save(Task("save", "ptsave", str(path), MIN_NBYTES, fsync=True))
    loaded = worker.measure_load(Task("load", "torch", str(path)))
    assert saved.checksum == loaded.checksum
    assert loaded.nbytes >= MIN_NBYTES
    with pytest.raises(RuntimeError, match="load with torch has failed: FileNotFoundError"):
        rounds._run_worker(Task("load", "torch", str(tmp_path / "nothing")))


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    nbytes = 20 * MIB + 4096
    for mode in ("direct-write", "buffered-write", "tmpfs-write"):
        limits.main([mode, str(path), str(nbytes), "1", "3"])
        assert not path.exists()
    path.write_bytes(bytes(nbytes - 5))
    for mode in ("direct-read", "cached-read"):
        limits.main([mode, str(path), "0", "2"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["nbytes"] for answer in answers] == [nbytes] * 5
    assert [[*answer["seconds"]] for answer in answers] == [["1", "3"]] * 3 + [["2"]] * 2
    assert all(s > 0 for answer in answers for s in answer["seconds"].values())
    with pytest.raises(RuntimeError, match=r"limit \(cached-read\) has failed: FileNotFoundError"):
        limits.measure("cached-read", tmp_path / "nothing", 0)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "ptsave", "bench", str(tmp_path), "--size", "32MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".ptsave-bench-*/loaded/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert said.count("\n") == (2 if number == signal.SIGINT else 1), said
    assert os.listdir(tmp_path) == []


def test_limit_is_one_number_of_threads_in_all_rounds() -> None:
    results = Results()
    for one, two in ((1.0, 2.0), (3.0, 2.0), (4.0, 2.1)):
        results.add_limit(10**9, {"1": one, "2": two})
    assert results.best_threads() == "2"
    assert [figure.seconds for figure in results.figures[LIMIT]] == [2.0, 2.0, 2.1]
