"""Make one wheel for each Python, with an engine for each torch; install and test every pair.

    .venv/bin/python tools/wheels [--python 3.11]... [--torch 2.13]...

Everything is below build/wheels (some GB: pip's index has torch for CUDA only), the wheels are
copied to dist/; what is there already is used again. docs/tested.json gets the results, and
docs/tested.md says what ran, and why anything did not.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from environments import ROOT, Tools, copy_tree
from pairs import Pair, PythonWheel, SkippedError, torches_for
from report import PAGE, Report, number

T = TypeVar("T")

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", help="only this one (3.11); may be repeated")
    parser.add_argument("--torch", action="append", help="only this minor series (2.13); the like")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels go")
    options = parser.parse_args()
    tools = Tools()
    report = Report()
    tree = copy_tree()
    wheels: dict[PythonWheel, list[str]] = {}
    for version in PYTHONS:
        if options.python and version not in options.python:
            report.left_out(version, "")
            continue
        step = functools.partial(PythonWheel, tools, tree, version)
        if wheel := attempt(report, version, "", step):
            wheels[wheel] = torches_for(tools, wheel)
    every = sorted({torch for there in wheels.values() for torch in there}, key=number)
    for wheel, there in wheels.items():
        wanted = [torch for torch in every if not options.torch or torch in options.torch]
        for torch in [each for each in every if each not in wanted]:
            report.left_out(wheel.version, torch)
        for torch in [each for each in wanted if each not in there]:
            report.skipped(wheel.version, torch, "the index has none for this Python")
        make(
            report, options.dist, wheel, [Pair(wheel, torch) for torch in wanted if torch in there]
        )
    PAGE.write_text(report.page())
    return 1 if report.failures else 0


def make(report: Report, dist: Path, wheel: PythonWheel, pairs: list[Pair]) -> None:
    """Compile the engines of a Python, make the wheel, and test it with each torch."""
    built = [pair for pair in pairs if attempt(report, wheel.version, pair.torch, pair.build)]
    if not built:
        return
    assemble = functools.partial(wheel.assemble, built[-1])
    if not attempt(report, wheel.version, "", assemble):
        return
    dist.mkdir(exist_ok=True)
    shutil.copy2(wheel.path, dist)
    for pair in built:
        if result := attempt(report, wheel.version, pair.torch, pair.test):
            report.tested(pair, result)


def attempt(report: Report, python: str, torch: str, step: Callable[[], T]) -> T | None:
    """Return what a step returns; one that cannot be done, or fails, is in the report."""
    try:
        return step()
    except SkippedError as reason:
        report.skipped(python, torch, str(reason))
    except Exception as error:
        traceback.print_exc()
        report.failed(python, torch, str(error))
    return None


if __name__ == "__main__":
    sys.exit(main())
