"""Build of the extension module: asks torch and Python where they are, then runs CMake.

Targets and flags are CMakeLists.txt's, metadata is pyproject.toml's; only what depends on the torch
that is installed is decided here.

Environment: MAX_JOBS (compilers at once, default: usable cores), PTSAVE_CMAKE_ARGS (further CMake
arguments, for example ``-DPTSAVE_WERROR=OFF``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 9)


def torch_requirement() -> str:
    """Return the requirement on torch: the minor series of the one found here."""
    needed = "ptsave is compiled against an installed torch >= {}.{}".format(*MINIMUM_TORCH)
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"{needed}, and there is none in {sys.prefix}: "
            "install torch first, and build with --no-build-isolation"
        ) from None
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|rc|\.dev)?", version)
    if match is None:
        raise SystemExit(f"{needed}; cannot read its version {version!r}")
    major, minor = int(match[1]), int(match[2])
    if (major, minor) < MINIMUM_TORCH:
        raise SystemExit(f"{needed}; found {version}")
    prerelease = ".dev0" if match[3] else ""
    return f"torch>={major}.{minor}{prerelease},<{major}.{minor + 1}"


def tool(name: str, bin_dir_attribute: str) -> str:
    """Return the path of a program, from the Python package of that name or from PATH."""
    search = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    if importlib.util.find_spec(name) is not None:
        bin_dir = getattr(importlib.import_module(name), bin_dir_attribute, None)
        search = f"{bin_dir}:{search}" if bin_dir else search
    path = shutil.which(name, path=search)
    if path is None:
        raise SystemExit(f"ptsave needs {name} to build: pip install {name}")
    return path


def pybind11_include_dirs(torch_include_dirs: list[str]) -> list[str]:
    """Return where pybind11 is: torch ships the version it was built with, which wins."""
    if any((Path(folder) / "pybind11" / "pybind11.h").is_file() for folder in torch_include_dirs):
        return []
    import pybind11

    return [pybind11.get_include()]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def run(command: list[str]) -> None:
    """Run a build command; what went wrong is on its own output, so no traceback adds to it."""
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"ptsave: the build failed: {shlex.join(command)}")


def torch_definitions() -> dict[str, str]:
    """Return the CMake definitions that say where torch and Python are."""
    import torch
    from torch.utils import cpp_extension

    torch_include_dirs = cpp_extension.include_paths()
    include_dirs = torch_include_dirs + pybind11_include_dirs(torch_include_dirs)
    return {
        "PTSAVE_TORCH_INCLUDE_DIRS": ";".join(include_dirs),
        "PTSAVE_TORCH_LIB_DIR": str(Path(torch.__file__).parent / "lib"),
        "PTSAVE_TORCH_CXX11_ABI": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
        "PTSAVE_PYTHON_INCLUDE_DIRS": sysconfig.get_path("include"),
        "PTSAVE_PYTHON_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }


def run_cmake(build_dir: Path, option: str, target: str) -> None:
    """Configure with ``option`` turned on, and build ``target``."""
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tool("ninja", "BIN_DIR"),
        option: "ON",
        **torch_definitions(),
    }
    cmake = tool("cmake", "CMAKE_BIN_DIR")
    run(
        [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        + [f"-D{name}={value}" for name, value in definitions.items()]
        + shlex.split(os.environ.get("PTSAVE_CMAKE_ARGS", ""))
    )
    jobs = os.environ.get("MAX_JOBS") or str(usable_cores())
    run([cmake, "--build", str(build_dir), "--target", target, "--parallel", jobs])


class CMakeBuildExt(build_ext):
    """Build the modules with CMake and record the torch that ``ptsave._C`` was built against."""

    def build_extension(self, ext: Extension) -> None:
        import torch

        build_dir = ROOT / "build" / f"python-{sys.implementation.cache_tag}"
        name = ext.name.rpartition(".")[2]
        run_cmake(build_dir, "PTSAVE_BUILD_PYTHON", name)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        built = build_dir / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        self.copy_file(str(built), str(target))
        self.write_torch_build(target.parent, torch.__version__)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        name = Path("ptsave") / "_torch_build.py"
        self.copy_file(str(Path(self.build_lib) / name), str(ROOT / name))

    def write_torch_build(self, folder: Path, torch_version: str) -> None:
        (folder / "_torch_build.py").write_text(
            '"""The torch that this copy of ptsave was built against; written by setup.py."""\n\n'
            f'VERSION = "{self.distribution.get_version()}"\n'
            f'TORCH_VERSION = "{torch_version}"\n'
        )


class BuildFakeAccelerator(Command):
    """Build the backend that tests/accelerator registers in place of real hardware."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        build_dir = ROOT / "build" / "fake-accelerator"
        run_cmake(build_dir, "PTSAVE_BUILD_FAKE_ACCELERATOR", "fake_accelerator")


class CleanBuildPy(build_py):
    """Leave no module of an earlier build in the wheel."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "ptsave", ignore_errors=True)
        super().run()


setup(
    license="MIT",
    install_requires=[torch_requirement(), "click>=8.1", "tqdm"],
    extras_require={
        "safetensors": ["safetensors>=0.4"],  # load_model, save_model
        "fsspec": ["fsspec"],  # URLs; a file system may need a library of its own (s3fs, gcsfs)
        "plot": ["matplotlib>=3.7"],  # ptsave bench --plot
        # ptsave.integrations
        "lightning": ["lightning>=2.6"],
        "pytorch-lightning": ["pytorch-lightning>=2.6"],
        "accelerate": ["accelerate>=1.1", "safetensors>=0.4"],
        "deepspeed": ["deepspeed>=0.18"],
        "ignite": ["pytorch-ignite>=0.5"],
        "torch-checkpointing": ["torch_checkpointing>=0.1.1", "safetensors>=0.4"],
        "transformers": ["transformers>=5", "accelerate>=1.1", "safetensors>=0.4"],
    },
    ext_modules=[Extension("ptsave._C", sources=[]), Extension("ptsave._core", sources=[])],
    cmdclass={
        "build_ext": CMakeBuildExt,
        "build_fake_accelerator": BuildFakeAccelerator,
        "build_py": CleanBuildPy,
    },
)
