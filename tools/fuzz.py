"""Run every libFuzzer target of a build folder for an equal share of a number of seconds.

The corpus is kept in the build folder and starts from small files that ``torch.save`` wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shared = torch.arange(6)
    objects = {
        "empty": None,
        "plain": {"step": 3, "names": ["a", "b"]},
        "tensors": {"a": torch.ones(3), "b": torch.zeros(0), "views": [shared, shared[2:]]},
        "many": [torch.full((1,), float(i)) for i in range(20)],
    }
    for name, value in objects.items():
        torch.save(value, folder / f"{name}.pt")


def fuzz(program: Path, seeds: Path, seconds: int) -> None:
    corpus = program.parent / "corpus" / program.name
    corpus.mkdir(parents=True, exist_ok=True)
    print(f"{program.name}: {seconds} s", flush=True)
    command = [
        str(program),
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={program.parent}/",
        str(corpus),
        str(seeds),
    ]
    environment = os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"}
    subprocess.run(command, check=True, env=environment)


def main() -> None:
    build, seconds = Path(sys.argv[1]), int(sys.argv[2])
    programs = sorted(path for path in build.glob("*_fuzzer") if path.is_file())
    if not programs:
        sys.exit(f"no fuzzers in {build}")
    seeds = build / "seeds"
    write_seeds(seeds)
    for program in programs:
        fuzz(program, seeds, max(1, seconds // len(programs)))
    print(f"{len(programs)} fuzzers found nothing in {seconds} s")


if __name__ == "__main__":
    main()
