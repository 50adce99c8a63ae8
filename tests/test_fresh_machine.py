"""System packages that are missing are named at once, before anything is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OF_PYTHON = ["python3-dev", "python3-venv"]
OF_TESTS = ["libgtest-dev", "zlib1g-dev"]


def _stub(folder: Path, name: str) -> str:
    """Return a command that exists and can do nothing: an interpreter or compiler on its own."""
    path = folder / name
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare() -> Iterator[dict[str, str]]:
    """Return the environment of somebody who may not install packages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # pytest's own folders are closed to everybody else
        folder.chmod(0o755)
        stubs = {"PYTHON": _stub(folder, "python3"), "CXX": _stub(folder, "c++")}
        _stub(folder, "sudo")
        yield {"PATH": f"{folder}:{os.environ['PATH']}", **stubs}


def _check(environment: dict[str, str], *needs: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-s", "--", *needs]  # from standard input, as nobody may not read the file
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to be somebody else")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    script = (ROOT / "tools" / "system_packages.sh").read_text()
    return subprocess.run(
        command, env=environment, input=script, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("needs", "packages"),
    [
        (["python"], OF_PYTHON),
        (["tests"], OF_TESTS),
        (["python", "tests"], OF_PYTHON + OF_TESTS),
        (["python", "tests", "benchmark"], [*OF_PYTHON, *OF_TESTS, "libdeflate-dev"]),
    ],
)
def test_one_message_names_all(bare: dict[str, str], needs: list[str], packages: list[str]) -> None:
    done = _check(bare, *needs)
    assert done.returncode == 1, done.stderr
    what, how = done.stderr.splitlines()
    assert what.startswith("make needs these system packages: ")
    assert what.split(": ")[1].split() == packages
    assert how.endswith(f"apt-get install -y --no-install-recommends {' '.join(packages)}'")


def test_a_command_that_is_missing_is_named_once(bare: dict[str, str]) -> None:
    done = _check({**bare, "CXX": "/nowhere/c++"}, "python", "tests")
    packages = done.stderr.splitlines()[0].split(": ")[1].split()
    assert packages == [*OF_PYTHON, "g++", *OF_TESTS]


@pytest.mark.parametrize(
    ("goal", "needs"),
    [
        ("demo", "python"),
        ("test-python", "python"),
        ("test", "python tests"),
        ("lint", "python tests"),
        ("asan", "python tests"),
        ("fuzz", "python fuzz"),
        ("benchmark", "python benchmark"),
    ],
)
def test_it_comes_before_every_download(tmp_path: Path, goal: str, needs: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # A make above this one must not say how this one is to run.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", goal],
        cwd=ROOT,
        env={k: v for k, v in kept.items() if k not in {"MFLAGS", "VENV"}},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == f"tools/system_packages.sh {needs}"
