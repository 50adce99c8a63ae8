"""Build of the extension modules and of the wheel.

Targets and flags are CMakeLists.txt's, metadata is pyproject.toml's; how to find torch and to run
CMake is `ptsave.engines.building`'s.

Environment: as there, and PTSAVE_ENGINES (a folder with the engines that the wheel is to have, from
tools/wheels; otherwise one is compiled for the torch that is installed).
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def unbuilt_package() -> ModuleType:
    """Return a package ptsave whose modules can be imported before there is anything built."""
    package = ModuleType("ptsave")
    package.__path__ = [str(ROOT / "ptsave")]
    return package


sys.modules.setdefault("ptsave", unbuilt_package())
building = importlib.import_module("ptsave.engines.building")
choice = importlib.import_module("ptsave.engines.choice")


def long_description() -> str:
    """Return README.md for an index page, which has no other file of the repository.

    Links to files lead into the repository if pyproject.toml has its address, as the project's URL
    "Repository"; if not, their text stays.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^Repository = "(.+?)/?"$', project, re.MULTILINE)
    link = rf"[\1]({address[1]}/blob/HEAD/\2)" if address else r"\1"
    return re.sub(r"\[([^\]\n]+)\]\((?!\w+:)([^)\s]+)\)", link, text)


class CMakeBuildExt(build_ext):
    """Build the modules with CMake, and note the version that they are of."""

    def build_extensions(self) -> None:
        build_dir = ROOT / "build" / f"python-{sys.implementation.cache_tag}"
        modules = [ext.name.rpartition(".")[2] for ext in self.extensions]
        version = self.distribution.get_version()
        built = building.build(build_dir, modules, "PTSAVE_BUILD_PYTHON", version)
        for ext, path in zip(self.extensions, built, strict=True):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(path), str(target))

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            Path(*ext.name.split(".")[:-1]).mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def run(self) -> None:
        super().run()
        package = ROOT / "ptsave" if self.inplace else Path(self.build_lib) / "ptsave"
        package.mkdir(parents=True, exist_ok=True)
        (package / "_built.py").write_text(
            '"""The version of this copy of ptsave; written by setup.py."""\n\n'
            f'VERSION = "{self.distribution.get_version()}"\n'
        )
        if not self.inplace and "PTSAVE_ENGINES" in os.environ:
            others = Path(os.environ["PTSAVE_ENGINES"])
            for path in sorted(others.glob(f"torch_*/{choice.FILE_NAME}")):
                target = package / "engines" / path.relative_to(others)
                target.parent.mkdir(exist_ok=True)
                self.copy_file(str(path), str(target))


class PlainCommand(Command):
    """A command without options."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...


class BuildFakeAccelerator(PlainCommand):
    """Build the backend that tests/accelerator registers in place of real hardware."""

    def run(self) -> None:
        build_dir = ROOT / "build" / "fake-accelerator"
        version = self.distribution.get_version()
        building.build(build_dir, ["_fake_accelerator"], "PTSAVE_BUILD_FAKE_ACCELERATOR", version)


class BuildStandin(PlainCommand):
    """Build the stand-in for CUDA, and an engine for its torch into the environment."""

    def run(self) -> None:
        build_dir = ROOT / "build" / "standin"
        version = self.distribution.get_version()
        [engine] = building.build(build_dir, ["_C"], "PTSAVE_BUILD_PYTHON", version)
        target = choice.own_folders()[0] / choice.folder_name(building.installed_torch(""))
        target.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(engine), str(target / choice.FILE_NAME))
        building.build(build_dir, ["standin", "standin_kernels"], "PTSAVE_BUILD_STANDIN", version)


class BuildPyWithSource(build_py):
    """Leave no module of an earlier build in the wheel; add what `ptsave.build_engine` compiles."""

    def run(self) -> None:
        package = Path(self.build_lib) / "ptsave"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for path in (ROOT / "CMakeLists.txt", *sorted(ROOT.glob("csrc/**/*.[ch]*"))):
            target = package / "engines" / "source" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(path), str(target), preserve_mode=False)


def modules() -> list[Extension]:
    """Return the modules to build, of which a source distribution has none."""
    core = Extension("ptsave._core", sources=[])
    if "sdist" in sys.argv or "egg_info" in sys.argv:
        return [core]
    building.check_platform()
    engine = choice.folder_name(building.installed_torch(building.OF_PIP))
    if "PTSAVE_ENGINES" in os.environ:
        return [core]
    return [Extension(f"ptsave.engines.{engine}._C", sources=[]), core]


setup(
    license="MIT",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=modules(),
    cmdclass={
        "build_ext": CMakeBuildExt,
        "build_fake_accelerator": BuildFakeAccelerator,
        "build_standin": BuildStandin,
        "build_py": BuildPyWithSource,
    },
)
