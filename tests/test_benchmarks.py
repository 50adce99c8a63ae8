"""Benchmarks measure calls as users meet them, and say which have become slower."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import _limits, as_found, demo, sharing, works
from benchmarks._program import ROOT, Program
from benchmarks._tables import by_state
from benchmarks.as_found import BASE, HERE, TORCH, LacksError, Machine, Rounds
from ptsave.bench import system
from ptsave.bench.system import AS_FOUND, COLD, WARMED_UP, available_states, settle

GIB = 0.001
FEW = ("nosync", "async", "statedict")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    machine = Machine(tmp_path_factory.mktemp("works"), GIB, 0.0, {HERE: ROOT})
    machine.make_files()
    return machine


@pytest.mark.parametrize("who", [TORCH, HERE])
@pytest.mark.parametrize(
    "work",
    [work if work in FEW else pytest.param(work, marks=pytest.mark.slow) for work in works.WORKS],
)
def test_works(machine: Machine, who: str, work: str) -> None:
    if work.startswith("trainer"):
        pytest.importorskip("transformers")
    before = set(os.listdir(machine.folder))
    seconds = machine.measure(who, work, [AS_FOUND, WARMED_UP])
    assert list(seconds) == [AS_FOUND, WARMED_UP]
    assert all(each > 0 for each in seconds.values())
    kept = {f"run-{who}", f"training-{GIB:g}.pt", f"ptsave-benchmark-{who}.pt"}
    assert set(os.listdir(machine.folder)) - before <= kept


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gib", str(GIB), "--rest", "0", "--rounds", "1", "--dir", str(tmp_path)]
    as_found.main(["statedict", *options, "--output", str(tmp_path / "report.md")])
    rows = [line for line in capsys.readouterr().out.splitlines() if "statedict" in line]
    assert [row.split(" | ")[1] for row in rows] == available_states(system.STATES)
    report = (tmp_path / "report.md").read_text()
    assert all(row in report for row in rows)
    assert str(tmp_path) not in report
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_commit_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the other commit lacks is no failure, and what has become slower is one."""

    def measure(_: Machine, who: str, work: str, states: Collection[str]) -> dict[str, float]:
        if (who, work) == (BASE, "parts-save"):
            raise LacksError("ModuleNotFoundError: No module named 'ptsave.distributed'")
        seconds = {TORCH: 1.0, BASE: 0.1, HERE: 0.2 if work == "nosync" else 0.1}
        return dict.fromkeys(states, seconds[who])

    monkeypatch.setattr(Machine, "measure", measure)
    monkeypatch.setattr(Machine, "make_files", lambda _: None)
    monkeypatch.setattr(as_found, "build_commit", lambda commit: tmp_path / commit)
    options = ["--base", "HEAD", "--states", "as-found", "--rounds", "2", "--dir", str(tmp_path)]
    as_found.main(["warm", "parts-save", *options])
    spread = "0.100 - 0.100"
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0].endswith(f"| 0.100 | {spread} | 0.100 | {spread} | 10.00 | 1.00 |")
    assert rows[1].endswith(f"| - | - | 0.100 | {spread} | 10.00 | - |")
    with pytest.raises(SystemExit, match="slower than HEAD: nosync, as found"):
        as_found.main(["nosync", *options])
    assert "| 0.50 **slower** |" in capsys.readouterr().out


def test_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its table is of first calls of processes, which read the file that it has checked."""

    def measure(machine: Machine, who: str, work: str, states: Collection[str]) -> dict[str, float]:
        assert [*states] == [AS_FOUND]
        assert works.FILE in os.listdir(machine.folder)
        return {AS_FOUND: 1.0 if who == TORCH else 0.25}

    monkeypatch.setattr(Machine, "measure", measure)
    for name, value in {"VOCABULARY": 64, "CONTEXT": 64, "WIDTH": 24, "LAYERS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    assert demo.run(tmp_path, 2)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  yes  ") for line in lines) == 3
    table = [line.split() for line in lines if line.endswith("4.0x")]
    assert [row[0] for row in table] == ["save", "save", "load"]
    assert "First calls of processes, medians of 2 rounds" in lines[-1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_sharing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows say which part of a file was written; the image of XFS is gone afterwards."""
    tensor_nbytes = 512 << 10
    monkeypatch.setattr(sharing, "TENSOR_NBYTES", tensor_nbytes)
    monkeypatch.setattr(sharing, "NBYTES", tensor_nbytes * sharing.N_TENSORS)
    monkeypatch.setattr(sharing, "IMAGE_NBYTES", 400 << 20)
    monkeypatch.setattr(Program, "run_task", lambda _, task: sharing.measure(**asdict(task)))
    monkeypatch.setattr(_limits, "measure", lambda _, path, nbytes: (nbytes, {"1": 1.0}))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    text = sharing.report([*sharing.CONTENDERS], 1, tmp_path)
    assert not any(path.is_file() or path.is_mount() for path in tmp_path.iterdir())
    if "frozen" not in text:
        pytest.skip("XFS cannot be mounted")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    written = {(row[0], row[1]): float(row[4].removesuffix(" %")) for row in rows}
    shared = {("frozen", "hashes known"), ("frozen", "hashes unknown")}
    assert {key for key, percent in written.items() if percent < 100} == shared
    assert all(10 <= written[key] <= 12 for key in shared)


def test_sharing_without_xfs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert len(sharing.report(["frozen"], 1, tmp_path).splitlines()) == 2
    assert re.match(r"not measured, as .*: frozen\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("base", "here", "is_slower"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], True),
        ([1.0, 1.1, 1.2], [1.05, 1.4, 1.5], False),  # one of its rounds was as fast
        ([1.0, 1.1, 1.9], [1.3, 1.4, 1.5], False),  # within the spread of the other
        ([1.0, 1.0, 1.0], [1.03, 1.04, 1.05], False),
        ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5], False),
    ],
)
def test_slower(base: list[float], here: list[float], is_slower: bool) -> None:
    assert Rounds({BASE: base, HERE: here}).is_slower() == is_slower


def test_states_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compact = tmp_path / "compact_memory"
    done: list[float] = []
    compact.touch()
    monkeypatch.setattr(system, "_COMPACT_MEMORY", compact)
    monkeypatch.setattr(system, "fetch_free_memory", done.append)
    monkeypatch.setattr(time, "sleep", done.append)
    settle(WARMED_UP, 7)
    assert (done, compact.read_text()) == ([7], "")
    settle(AS_FOUND, 7, rest=1.5)
    assert (done, compact.read_text()) == ([7, 1.5], "")
    settle(COLD, 7, rest=2.5)
    assert (done, compact.read_text()) == ([7, 1.5, 2.5], "1")


def test_cold_memory_needs_a_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "_COMPACT_MEMORY", tmp_path / "missing")
    assert available_states(system.STATES) == [AS_FOUND, WARMED_UP]
    (tmp_path / "missing").touch()
    assert available_states(system.STATES) == [AS_FOUND, WARMED_UP, COLD]


def test_tables_of_states() -> None:
    """Rows of a workload stay together; text that is the same is said once."""

    def report(seconds: str) -> str:
        table = ["| workload |  | s |", "| --- | --- | ---: |"]
        table += [f"| {name} | {who} | {seconds} |" for name in "ab" for who in ("x", "")]
        rates = f"| rate | met |\n| --- | ---: |\n| {seconds} |  |"
        return "\n\n".join(["\n".join(table), rates, "A remark.", f"The limit is {seconds}."])

    assert by_state({AS_FOUND: report("1")}) == report("1")
    assert (
        by_state({AS_FOUND: report("1"), COLD: report("2")})
        == """\
| workload | state |  | s |
| --- | --- | --- | ---: |
| a | as found | x | 1 |
| a | as found |  | 1 |
| a | cold | x | 2 |
| a | cold |  | 2 |
| b | as found | x | 1 |
| b | as found |  | 1 |
| b | cold | x | 2 |
| b | cold |  | 2 |

| state | rate | met |
| --- | --- | ---: |
| as found | 1 |  |
| cold | 2 |  |

A remark.

- as found: The limit is 1.
- cold: The limit is 2."""
    )
