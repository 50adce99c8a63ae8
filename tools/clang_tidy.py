"""Run clang-tidy over csrc and the fake accelerator, several files at once; say how many are clean.

A file that was clean is not read again until it, one of the headers, or .clang-tidy changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLANG_TIDY = Path(sys.executable).parent / "clang-tidy"
CLEAN = ROOT / "build" / "clang-tidy-clean"
PYTHON_BUILD = ROOT / "build" / f"python-{sys.implementation.cache_tag}"
CORE_BUILD = ROOT / "build" / "core"
FAKE_BUILD = ROOT / "build" / "fake-accelerator"
CORE = ROOT / "csrc" / "core"
BACKEND = ROOT / "tests" / "accelerator" / "backend"
PORTABLE = ROOT / "csrc" / "portable"  # compiled for wheels only
FOLDERS = (ROOT / "csrc", BACKEND)
COMMANDS = ROOT / "build" / "clang-tidy"


def compiled_alone(source: Path) -> tuple[Path, Path]:
    """Return a build folder, and a file that it compiles alone with the flags for ``source``."""
    if CORE in source.parents or PORTABLE in source.parents:
        return CORE_BUILD, CORE / "base" / "error.cpp"
    if BACKEND in source.parents:
        return FAKE_BUILD, BACKEND / "host_allocator.cpp"
    return PYTHON_BUILD, ROOT / "csrc" / "module.cpp"


def compile_commands(sources: list[Path]) -> list[dict[str, str]]:
    """Return a command for each file alone, also for files that are compiled together."""
    entries = {
        (build, Path(entry["file"])): entry
        for build in (CORE_BUILD, PYTHON_BUILD, FAKE_BUILD)
        for entry in json.loads((build / "compile_commands.json").read_text())
    }
    commands = []
    for source in sources:
        build, other = compiled_alone(source)
        entry = entries.get((build, source)) or entries[build, other]
        command = entry["command"].replace(entry["file"], str(source))
        commands.append({**entry, "file": str(source), "command": command})
    return commands


def digest(source: Path, shared: bytes) -> str:
    return hashlib.sha256(shared + bytes(source) + source.read_bytes()).hexdigest()


def check(source: Path) -> str:
    """Return what clang-tidy has to say about ``source``: nothing if it is clean."""
    result = subprocess.run(
        [CLANG_TIDY, "--quiet", "-p", COMMANDS, source],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return ""
    return result.stdout + result.stderr


def main() -> None:
    sources = sorted(path for folder in FOLDERS for path in folder.rglob("*.cpp"))
    headers = sorted(path for folder in FOLDERS for path in folder.rglob("*.h"))
    commands = compile_commands(sources)
    COMMANDS.mkdir(exist_ok=True)
    (COMMANDS / "compile_commands.json").write_text(json.dumps(commands))
    shared = b"".join(path.read_bytes() for path in [ROOT / ".clang-tidy", *headers])
    shared += "".join(sorted(entry["command"] for entry in commands)).encode()
    clean = set(CLEAN.read_text().split()) if CLEAN.exists() else set()
    digests = {source: digest(source, shared) for source in sources}
    stale = [source for source in sources if digests[source] not in clean]

    jobs = int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(jobs) as pool:
        reports = dict(zip(stale, pool.map(check, stale), strict=True))
    bad = {source for source, report in reports.items() if report}
    CLEAN.write_text("\n".join(digests[source] for source in sources if source not in bad))
    for source in sorted(bad):
        print(reports[source])
    print(f"clang-tidy: {len(sources) - len(bad)} of {len(sources)} files clean")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
