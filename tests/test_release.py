"""The metadata of what is released, and the words of builds that cannot go on."""

from __future__ import annotations

import importlib.metadata
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ptsave.engines import choice

ROOT = Path(__file__).resolve().parent.parent


def setup(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Return what setup.py passes on."""
    found: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: found.update(options))
    monkeypatch.setattr(sys, "argv", ["setup.py", *arguments])
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_only_a_source_distribution_can_be_made_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    assert (
        engine_of(setup(monkeypatch, "bdist_wheel")) == choice.find(torch.__version__).parent.name
    )
    monkeypatch.setattr(importlib.metadata, "version", fail)
    assert engine_of(setup(monkeypatch, "sdist")) is None
    with pytest.raises(SystemExit, match=r"hides an installed torch.*--no-build-isol"):
        setup(monkeypatch, "bdist_wheel")


def engine_of(options: dict[str, Any]) -> str | None:
    """Return the folder of the engine that is built."""
    names = [each.name.split(".") for each in options["ext_modules"]]
    return next((str(name[2]) for name in names if name[-1] == "_C"), None)


def test_a_wheel_of_many_engines_compiles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSAVE_ENGINES", "somewhere")
    assert engine_of(setup(monkeypatch, "bdist_wheel")) is None


def test_pip_never_replaces_torch() -> None:
    """A torch that is newer than all engines stays, and gets a sentence."""
    assert '\ndependencies = ["torch>=2.9", ' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", ["2.8.1", "1.13.0", "what"])
def test_other_torches_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(SystemExit, match=f"installed torch >= 2.9.*{version}"):
        setup(monkeypatch, "bdist_wheel")


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="ptsave is for Linux on x86_64 and aarch64, not darwin"):
        setup(monkeypatch, "bdist_wheel")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SystemExit, match="not linux on riscv64"):
        setup(monkeypatch, "bdist_wheel")


def test_the_source_distribution(tmp_path: Path) -> None:
    """All but what its maker has to decide is there."""
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    checked = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "release_check.py"), str(archive)],
        check=False,
        capture_output=True,
        text=True,
    )
    left = [
        line
        for line in checked.stdout.splitlines()
        if "[project.urls]" not in line and "not the day of the release" not in line
    ]
    assert left in ([], ["ready for a release"]), checked.stderr


def test_what_is_compiled_in_has_its_license_here() -> None:
    """Of headers of other projects that the extension modules include."""
    assert "pybind11" in (ROOT / "NOTICE").read_text()
    assert "Redistributions in binary form" in (ROOT / "NOTICE").read_text()


def test_the_page_of_tested_releases_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools" / "wheels")
    report = runpy.run_path(str(ROOT / "tools" / "wheels" / "report.py"))
    assert report["PAGE"].read_text() == report["Report"]().page()
