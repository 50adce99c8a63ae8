"""python -m ptsave.build_engine: where engines are put, and what is said where it cannot be done.

That it really compiles one is a test of `make wheels`, and of test_compiles below, which is slow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import run_python
from click.testing import CliRunner, Result

import ptsave
from ptsave import build_engine
from ptsave.engines import building, choice
from ptsave.engines.choice import FILE_NAME, folder_name, series_of, series_of_folder

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
    assert "the engine cannot be written to any folder" in str(done.exception)
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
    with pytest.raises(SystemExit, match=r"C\+\+ files are missing in .*: install ptsave again"):
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
    assert "set CXX to use another" in last
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.glob("**/*.so")]


@pytest.mark.slow
def test_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ptsave.build_engine", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip().splitlines()[-1]).stat().st_size > 1 << 20


# ---------------------------------------------------------------------------- which engine is taken


def folder_of(name: str, folder: Path) -> Path:
    """Return a folder that has an engine of that name, which cannot be loaded."""
    (folder / name).mkdir(parents=True)
    (folder / name / FILE_NAME).write_bytes(b"no engine")
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the engines that were compiled here be in a folder without any."""
    monkeypatch.setattr(choice, "own_folders", lambda: [tmp_path / "absent", tmp_path])
    return tmp_path


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("2.13.0+cpu", "2.13"),
        ("2.9.1", "2.9"),
        ("2.16.0.dev20261101+cu130", "2.16"),
        ("3.0", "3.0"),
    ],
)
def test_names(version: str, series: str) -> None:
    assert series_of(version) == series
    found = series_of_folder(folder_name(version))
    assert found is not None
    assert ".".join(map(str, found)) == series


@pytest.mark.parametrize("name", ["torch", "torch_2", "source", "torch_2_x", "torch_2_13.bak"])
def test_other_folders_are_no_engines(name: str, own: Path) -> None:
    assert series_of_folder(name) is None
    folder_of(name, own)
    choice.find(torch.__version__)


def test_the_newest_goes_first(own: Path) -> None:
    """One that was compiled here, or that of a package that was installed later."""
    assert choice.find(torch.__version__) == ENGINE
    folder_of(folder_name(torch.__version__), own)
    found = choice.find(torch.__version__)
    assert found.parent.parent == own
    os.utime(found, (0, 0))
    assert choice.find(torch.__version__) == ENGINE


def test_a_folder_without_this_pythons_engine_is_none(own: Path) -> None:
    folder = own / folder_name(torch.__version__)
    folder.mkdir()
    (folder / "_C.cpython-27-x86_64-linux-gnu.so").write_bytes(b"")
    assert choice.find(torch.__version__) == ENGINE


def test_unmatched_torch(own: Path) -> None:
    folder_of("torch_2_99", own)
    with pytest.raises(ImportError) as caught:
        choice.find("2.98.1+cu130")
    known = re.search(r"engines for torch (.*), but torch 2.98.1\+cu130 is", str(caught.value))
    assert known is not None
    assert known[1].split(", ")[-1] == "2.99"
    assert series_of(torch.__version__) in known[1].split(", ")
    assert f"`{sys.executable} -m ptsave.build_engine`" in str(caught.value)


def test_engine_that_does_not_fit(own: Path) -> None:
    """As after torch was replaced by one that was built differently."""
    folder_of(folder_name(torch.__version__), own)
    with pytest.raises(
        ImportError, match=r"does not fit torch .*: compile an engine with `"
    ) as caught:
        choice.load(torch.__version__)
    assert str(own) in str(caught.value)


def test_engine_of_another_release() -> None:
    code = "import ptsave._built; ptsave._built.VERSION = '9.9.9'; import ptsave._C"
    done = run_python(code, status=1)
    assert f"belongs to ptsave {ptsave.__version__}, not 9.9.9: compile an engine" in done.stderr


PROGRAM = """
import torch
torch.__version__ = {version!r}
try:
    import ptsave
except ImportError as error:
    print(error)
"""


def test_import_is_refused_at_once(tmp_path: Path) -> None:
    code = PROGRAM.format(version="2.98.0")
    home = str(Path(ptsave.__file__).parent.parent)
    done = run_python(code, cwd=home)
    assert "torch 2.98.0 is installed: compile an engine with" in done.stdout


def test_the_command_needs_no_engine(tmp_path: Path) -> None:
    """A copy without any lists files."""
    home = Path(ptsave.__file__).parent
    shutil.copytree(home, tmp_path / "ptsave", ignore=shutil.ignore_patterns("torch_*_*"))
    torch.save(torch.ones(3), tmp_path / "a.pt")
    code = "import sys; from ptsave.__main__ import main; sys.exit(main())"
    listed = run_python(code, "ls", "a.pt", cwd=tmp_path)
    assert "float32" in listed.stdout, listed.stderr
    refused = run_python("import ptsave; ptsave.save", cwd=tmp_path, status=1)
    assert "has engines for torch none, but torch" in refused.stderr
