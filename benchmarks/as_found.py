"""Calls as users meet them, beside torch's, and beside those of another commit.

    python -m benchmarks.as_found                           all works, 3 rounds
    python -m benchmarks.as_found nosync over --states cold
    python -m benchmarks.as_found --base HEAD~3             or: make compare BASE=HEAD~3
    python -m benchmarks.as_found --gib 0.1 --rest 1        in minutes

In each round every work is done once by torch, by ptsave, and by ptsave of the commit --base, in a
shuffled order, each in a fresh process that has imported torch and ptsave only.  "As found" is its
first call, after a rest of --rest seconds in which a virtual machine's host takes free memory back;
"warmed up" is the second call of the same process.  "Cold" is a first call for which free memory
has been put together in large blocks before the rest, all of which a host takes back: the state of
a machine that has just started, for which root is needed.  Ratios are medians of the ratios within
a round.  The exit status is 1 where ptsave is slower than the other commit: by more than 5 %, each
median being outside of the other's spread.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import works
from benchmarks._program import (
    ROOT,
    add_report_options,
    add_state_options,
    check_options,
    compile_modules,
    state_options,
    states_of,
    table,
    write_report,
)
from ptsave.bench.system import AS_FOUND, COLD, WARMED_UP, describe_machine, settle

TORCH, BASE, HERE = works.TORCH, "base", "ptsave"
BUILDS = ROOT / "build" / "compare"
MAX_SLOWER = 1.05
LACKING = "-"

Seconds = dict[str, list[float]]  # by contender, one per round


# -------------------------------------------------------------------------------- the other commit


def build_commit(commit: str) -> Path:
    """Return the folder of an installed commit, built now if it is not there."""
    name = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    folder = BUILDS / name
    if folder.exists():
        return folder
    source = BUILDS / f"{name}-source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    print(f"Building {name[:12]} ...", file=sys.stderr)
    subprocess.run(["tar", "-x", "-C", source], input=_git("archive", name), check=True)
    environment = os.environ | {"PTSAVE_CMAKE_ARGS": ""}  # it may warn, with newer compilers
    if shutil.which("ccache"):
        environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        environment.setdefault("CCACHE_BASEDIR", str(source))
        environment.setdefault("CCACHE_NOHASHDIR", "1")
    with tempfile.TemporaryDirectory(dir=BUILDS) as target:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--no-build-isolation", "--target", target, str(source)]
        subprocess.run([*pip, *options], env=environment, check=True)
        shutil.rmtree(source)
        Path(target).rename(folder)
        Path(target).mkdir()  # for the end of the block to remove
    return folder


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


# ------------------------------------------------------------------------------------- the figures


class LacksError(Exception):
    """A build does not have the functions of a work."""


@dataclass(frozen=True)
class Machine:
    """Starts the processes that make the calls.

    Attributes
    ----------
    folder : Path
        Where their files are.
    gib : float
        The size of their tensors.
    rest : float
        Seconds between the preparation and the call.
    builds : dict of str to Path
        Folders of ptsave, by contender.
    """

    folder: Path
    gib: float
    rest: float
    builds: dict[str, Path]

    def make_files(self) -> None:
        subprocess.run(self._command(works.MAKE, works.MAKE, 0), check=True)

    def measure(self, who: str, work: str, states: Collection[str]) -> dict[str, float]:
        """Return the seconds of the calls of one process, by state.

        Raises
        ------
        LacksError
            If the build does not have what the work needs.
        """
        first = COLD if COLD in states else AS_FOUND
        order = [first, WARMED_UP] if WARMED_UP in states else [first]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                self._command(who, work, len(order)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": str(self.builds.get(who, ROOT))},
            )
            seconds = dict(zip(order, self._calls(process, first), strict=False))
            if process.wait() == 0:
                return {state: seconds[state] for state in states}
            errors.seek(0)
            said = (errors.read().decode().strip() or "no message").splitlines()[-1]
        if process.returncode == works.LACKS:
            raise LacksError(said)
        raise RuntimeError(f"{work} by {who} has failed: {said}")

    def _calls(self, process: subprocess.Popen[str], first: str) -> Iterator[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        is_first = True
        with process.stdin, process.stdout:
            for line in process.stdout:
                if line.strip() != "ready":
                    yield float(line)
                    continue
                if is_first:
                    settle(first, rest=self.rest)
                else:  # its memory is that which the first call has freed
                    os.sync()
                is_first = False
                process.stdin.write("\n")
                process.stdin.flush()

    def _command(self, who: str, work: str, n_calls: int) -> list[str]:
        program = [sys.executable, "-W", "ignore", str(Path(works.__file__).resolve())]
        return [*program, who, work, str(self.folder), f"{self.gib:g}", str(n_calls)]


@dataclass
class Rounds:
    """The figures of one work in one state."""

    seconds: Seconds = field(default_factory=dict)

    def ratio(self, other: str) -> float | None:
        """Return how many times as long another contender takes."""
        mine, others = self.seconds.get(HERE), self.seconds.get(other)
        if not mine or not others:
            return None
        return median(b / a for a, b in zip(mine, others, strict=True))

    def is_slower(self) -> bool:
        """Whether ptsave has become slower than the other commit, beyond the spread."""
        mine, base = self.seconds.get(HERE), self.seconds.get(BASE)
        if not mine or not base:
            return False
        by_far = median(mine) > MAX_SLOWER * median(base)
        return by_far and median(mine) > max(base) and min(mine) > median(base)


def measure_rounds(
    machine: Machine, work: str, states: Collection[str], rounds: int
) -> dict[str, Rounds]:
    """Return the figures of a work by state; the states are those of one process."""
    whos = [TORCH, *machine.builds]
    found = {state: Rounds() for state in states}
    for _ in range(rounds):
        for who in random.sample(whos, len(whos)):
            try:
                calls = machine.measure(who, work, states)
            except LacksError as error:
                if who != BASE:
                    raise
                print(f"{work}: the other commit lacks it: {error}", file=sys.stderr)
                whos.remove(BASE)
                continue
            for state, seconds in calls.items():
                found[state].seconds.setdefault(who, []).append(seconds)
    return found


# --------------------------------------------------------------------------------------- reporting


def header(whos: list[str]) -> list[str]:
    figures = [column for who in whos for column in (f"{who} s", "min - max")]
    ratios = [f"\N{MULTIPLICATION SIGN} {who}" for who in whos if who != HERE]
    return ["work", "state", *figures, *ratios]


def row(work: str, state: str, rounds: Rounds, whos: list[str]) -> list[str]:
    cells = [work, state]
    for who in whos:
        if seconds := rounds.seconds.get(who):
            cells += [f"{median(seconds):.3f}", f"{min(seconds):.3f} - {max(seconds):.3f}"]
        else:
            cells += [LACKING, LACKING]
    for who in whos:
        if who != HERE:
            ratio = rounds.ratio(who)
            mark = " **slower**" if who == BASE and rounds.is_slower() else ""
            cells.append(LACKING if ratio is None else f"{ratio:.2f}{mark}")
    return cells


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.as_found",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "works", nargs="*", metavar="work", help=f"default: all of {', '.join(works.WORKS)}"
    )
    parser.add_argument("--base", metavar="COMMIT", help="build and measure that commit, too")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    add_state_options(parser, rest=12.0)
    parser.add_argument("--gib", type=float, default=1.0, help="tensors to move, default: 1")
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to measure")
    add_report_options(parser)
    options = parser.parse_args(arguments)
    check_options(options)
    if unknown := set(options.works) - set(works.WORKS):
        parser.error(f"unknown work: {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    builds = {HERE: ROOT}
    if options.base:
        builds = {BASE: build_commit(options.base), HERE: ROOT}
    states = states_of(options)
    whos = [TORCH, *builds]
    rows, slower = [], []
    with tempfile.TemporaryDirectory(prefix="ptsave-benchmark-", dir=options.dir) as scratch:
        machine = Machine(Path(scratch).resolve(), options.gib, options.rest, builds)
        command = ["python", "-m", "benchmarks.as_found", *options.works]
        command += ["--base", options.base] if options.base else []
        command += ["--gib", f"{options.gib:g}", "--rounds", str(options.rounds)]
        facts = describe_machine(machine.folder, [*command, *state_options(options)])
        compile_modules()
        machine.make_files()
        print(table(header(whos), [], 2), flush=True)
        # Cold ones are last: they put together the memory of all that follows.
        for group in ([each for each in states if each != COLD], [COLD] * (COLD in states)):
            for work in (options.works or works.WORKS) if group else ():
                for state, found in measure_rounds(machine, work, group, options.rounds).items():
                    rows.append(row(work, state, found, whos))
                    print(f"| {' | '.join(rows[-1])} |", flush=True)
                    slower += [f"{work}, {state}"] * found.is_slower()
    notes = (__doc__ or "").partition("In each round")
    rows.sort(key=lambda cells: [*works.WORKS].index(cells[0]))
    parts = [f"# Calls as users meet them\n\n{facts}", table(header(whos), rows, 2)]
    if options.output is not None:
        text = "\n\n".join([*parts, "".join(notes[1:]).rstrip()]) + "\n"
        write_report(text, options.output, options.plots)
    if slower:
        sys.exit(f"slower than {options.base}: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
