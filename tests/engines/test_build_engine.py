"""python -m ptsave.build_engine: where engines are put, and what is said where it cannot be done.

That it really compiles one is a test of `make wheels`, and of test_compiles below, which is slow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ptsave
from ptsave import build_engine
from ptsave.engines import building, choice
from ptsave.engines.choice import FILE_NAME, folder_name

ENGINE = choice.find(torch.__version__)
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command; the engine of this process stands in for one that is compiled."""

    def build(build_dir: Path, *_: Any) -> list[Path]:
        return [Path(shutil.copy(ENGINE, build_dir))]

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(
        choice, "own_folders", lambda: [tmp_path / "environment", tmp_path / "user"]
    )
    return lambda *arguments: CliRunner().invoke(build_engine.main, arguments)


def test_it_is_used_from_then_on(run: Run, tmp_path: Path) -> None:
    done = run()
    target = tmp_path / "environment" / folder_name(torch.__version__) / FILE_NAME
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{target}\n"
    assert choice.find(torch.__version__) == target
    assert os.listdir(target.parent) == [FILE_NAME]


def test_environment_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("")
    done = run()
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "user")


def test_no_folder_can_be_written(run: Run, tmp_path: Path) -> None:
    for name in ("environment", "user"):
        (tmp_path / name).write_text("")
    done = run()
    assert done.exit_code != 0
    assert "no folder for the engine" in str(done.exception)
    assert str(tmp_path / "user") in str(done.exception)


def test_folder(run: Run, tmp_path: Path) -> None:
    done = run("--folder", str(tmp_path / "elsewhere"))
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "elsewhere")
    assert choice.find(torch.__version__) == ENGINE


def test_failed_build_leaves_the_older_engine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path(run().stdout.strip())
    monkeypatch.setattr(shutil, "copy", lambda *_: pytest.fail("not reached"))

    def fail(*_: Any) -> Path:
        raise SystemExit("ptsave: the build failed: cmake")

    monkeypatch.setattr(building, "build", fail)
    assert run().exit_code != 0
    assert choice.find(torch.__version__) == before


@pytest.mark.parametrize("tool", ["cmake", "ninja"])
def test_missing_tool(tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == tool else name)
    with pytest.raises(SystemExit, match=f"ptsave needs {tool} to build: pip install {tool}"):
        building.build(tmp_path, ["_C"], "PTSAVE_BUILD_PYTHON", "0")


def test_sources_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "_PACKAGE", tmp_path / "ptsave")
    with pytest.raises(SystemExit, match=r"C\+\+ files are missing in .*: install it again"):
        building.source_folder()


def test_missing_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **__: str(tmp_path))
    with pytest.raises(SystemExit, match=r"needs Python's headers to build, .* python3-dev"):
        building.build(tmp_path, ["_C"], "PTSAVE_BUILD_PYTHON", "0")


def test_missing_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", fail)
    done = run()
    assert f"and {sys.prefix} has none: install torch first" in str(done.exception)
    assert "pip" not in str(done.exception)


def test_compiler_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ptsave.build_engine", "--folder", str(tmp_path)]
    environment = {
        **os.environ,
        "CXX": "/bin/false",
        "PYTHONPATH": str(Path(ptsave.__file__).parent.parent),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ptsave: the build failed, for the reason above: it needs gcc 12")
    assert "the variable CXX names another" in last
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.glob("**/*.so")]


@pytest.mark.slow
def test_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ptsave.build_engine", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip().splitlines()[-1]).stat().st_size > 1 << 20
