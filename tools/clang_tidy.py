"""Run clang-tidy over csrc and the fake accelerator; say how many files are clean.

Files that are compiled together are read together: most of the time goes into torch's headers.
What was clean is not read again until one of its files, one of the headers, or .clang-tidy changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
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
        return CORE_BUILD, CORE / "pipeline" / "pipeline.cpp"
    if BACKEND in source.parents:
        return FAKE_BUILD, BACKEND / "host_allocator.cpp"
    return PYTHON_BUILD, ROOT / "csrc" / "module.cpp"


def compiled_together(sources: list[Path]) -> list[list[Path]]:
    """Return ``sources`` in the groups that the builds compile as one file."""
    unities = [
        unity for build in (PYTHON_BUILD, FAKE_BUILD) for unity in build.rglob("unity_*.cxx")
    ]
    groups = []
    left = set(sources)
    for unity in sorted(unities):
        group = [Path(name) for name in re.findall('#include "(.*)"', unity.read_text())]
        if left.issuperset(group):
            groups.append(group)
            left.difference_update(group)
    return groups + [[source] for source in sorted(left)]


def compile_command(source: Path, group: list[Path]) -> dict[str, str]:
    """Return the command that compiles ``source``, which holds the files of ``group``."""
    build, other = compiled_alone(group[0])
    entries = {
        Path(entry["file"]): entry
        for entry in json.loads((build / "compile_commands.json").read_text())
    }
    entry = entries.get(source) or entries[other]
    command = entry["command"].replace(entry["file"], str(source))
    return {**entry, "file": str(source), "command": f"{command} -iquote {group[0].parent}"}


def concatenated(group: list[Path]) -> str:
    """Return the files of ``group`` as one, line by line; what is included again is left out."""
    included: set[str] = set()
    lines = []
    for path in group:
        own = path.read_text().splitlines()
        lines += ["" if line in included else line for line in own]
        included.update(line for line in own if line.startswith("#include"))
    return "\n".join(lines) + "\n"


def place(group: list[Path], line: int) -> str:
    """Return where ``line`` of ``concatenated(group)`` is, as clang-tidy writes it."""
    for path in group:
        n_lines = len(path.read_text().splitlines())
        if line <= n_lines:
            return f"{path}:{line}"
        line -= n_lines
    raise ValueError(f"{group} have fewer lines")


def digest(source: Path, shared: bytes) -> str:
    return hashlib.sha256(shared + bytes(source) + source.read_bytes()).hexdigest()


def check(source: Path, group: list[Path]) -> str:
    """Return what clang-tidy has to say about ``source``, which holds the files of ``group``."""
    result = subprocess.run(
        [CLANG_TIDY, "--quiet", "-p", COMMANDS, source],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return ""
    report = result.stdout + result.stderr
    return re.sub(
        rf"{re.escape(str(source))}:(\d+)", lambda found: place(group, int(found[1])), report
    )


def main() -> None:
    sources = sorted(path for folder in FOLDERS for path in folder.rglob("*.cpp"))
    headers = sorted(path for folder in FOLDERS for path in folder.rglob("*.h"))
    COMMANDS.mkdir(exist_ok=True)
    groups = {}
    for group in compiled_together(sources):
        source = group[0]
        if len(group) > 1:
            source = COMMANDS / f"{group[0].parent.name}.cpp"
            source.write_text(concatenated(group))
        groups[source] = group
    commands = [compile_command(source, group) for source, group in groups.items()]
    (COMMANDS / "compile_commands.json").write_text(json.dumps(commands))
    shared = b"".join(path.read_bytes() for path in [ROOT / ".clang-tidy", *headers])
    shared += "".join(sorted(entry["command"] for entry in commands)).encode()
    clean = set(CLEAN.read_text().split()) if CLEAN.exists() else set()
    digests = {source: digest(source, shared) for source in groups}
    stale = [source for source in groups if digests[source] not in clean]

    jobs = int(os.environ.get("JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(jobs) as pool:
        reports = list(pool.map(check, stale, [groups[source] for source in stale]))
    bad = [source for source, report in zip(stale, reports, strict=True) if report]
    CLEAN.write_text("\n".join(digests[source] for source in groups if source not in bad))
    print("\n".join(filter(None, reports)))
    n_bad = sum(len(groups[source]) for source in bad)
    print(f"clang-tidy: {len(sources) - n_bad} of {len(sources)} files clean")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
