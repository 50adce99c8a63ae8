"""Engines for several torches: which one is taken, and what is said where none fits."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from _system import run_python

import ptsave
from ptsave.engines import choice
from ptsave.engines.choice import FILE_NAME, folder_name, series_of, series_of_folder

ENGINE = choice.find(torch.__version__)


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
    known = re.search(r"engines for torch (.*), and torch 2.98.1\+cu130 is", str(caught.value))
    assert known is not None
    assert known[1].split(", ")[-1] == "2.99"
    assert series_of(torch.__version__) in known[1].split(", ")
    assert f"`{sys.executable} -m ptsave.build_engine`" in str(caught.value)


def test_engine_that_does_not_fit(own: Path) -> None:
    """As after torch was replaced by one that was built differently."""
    folder_of(folder_name(torch.__version__), own)
    with pytest.raises(
        ImportError, match=r"does not fit torch .*: compile one for it by `"
    ) as caught:
        choice.load(torch.__version__)
    assert str(own) in str(caught.value)


def test_engine_of_another_release() -> None:
    code = "import ptsave._built; ptsave._built.VERSION = '9.9.9'; import ptsave._C"
    done = run_python(code, status=1)
    assert f"is of ptsave {ptsave.__version__}, not 9.9.9: compile one" in done.stderr


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
    assert "torch 2.98.0 is installed: compile one for it by" in done.stdout


def test_the_command_needs_no_engine(tmp_path: Path) -> None:
    """A copy without any lists files."""
    home = Path(ptsave.__file__).parent
    shutil.copytree(home, tmp_path / "ptsave", ignore=shutil.ignore_patterns("torch_*_*"))
    torch.save(torch.ones(3), tmp_path / "a.pt")
    code = "import sys; from ptsave.cli.main import main; sys.exit(main())"
    listed = run_python(code, "ls", "a.pt", cwd=tmp_path)
    assert "float32" in listed.stdout, listed.stderr
    refused = run_python("import ptsave; ptsave.save", cwd=tmp_path, status=1)
    assert "has engines for torch none, and torch" in refused.stderr
