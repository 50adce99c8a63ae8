"""The hardware's limits, measured by ``cpp/io_limits.cpp``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks" / "cpp" / "io_limits.cpp"
# Where CMake puts it too (PTSAVE_BUILD_BENCHMARKS, `make benchmark`).
PROGRAM = ROOT / "build" / "benchmark" / "io_limits"
THREAD_COUNTS = (1, 2, 4)


def build() -> Path:
    """Return the compiled program, compiled now if it is missing or older than its source."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime >= SOURCE.stat().st_mtime:
        return PROGRAM
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++, or set CXX")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-std=c++20", "-O2", "-pthread", SOURCE, "-o", PROGRAM], check=True)
    return PROGRAM


def measure(mode: str, path: Path, nbytes: int) -> tuple[int, dict[str, float]]:
    """Return the bytes moved, and the seconds by thread count."""
    threads = [str(count) for count in THREAD_COUNTS]
    command = [str(build()), mode, str(path), str(nbytes), *threads]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(result.stdout)
    return answer["nbytes"], answer["seconds"]
