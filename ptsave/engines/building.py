"""Compiles extension modules with CMake, for the running Python and its torch.

setup.py also uses this module, before ptsave can be imported.  The environment variable MAX_JOBS
sets the number of compilers that run at once (default: one for each usable core).
PTSAVE_CMAKE_ARGS adds CMake arguments, for example ``-DPTSAVE_WERROR=ON``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

MINIMUM_TORCH = (2, 9)
# Advice for an install from source: pip builds in a separate environment, which has no torch.
OF_PIP = (
    "this build sees none. Without --no-build-isolation, pip hides an installed torch: run "
    "`pip install torch pybind11 ninja cmake setuptools wheel`, "
    "and then `pip install --no-build-isolation PACKAGE`"
)
_MACHINES = ("x86_64", "aarch64")
_PACKAGE = Path(__file__).resolve().parent.parent


def source_folder() -> Path:
    """Return the folder of CMakeLists.txt and csrc, in a wheel or a checkout."""
    for folder in (_PACKAGE / "engines" / "source", _PACKAGE.parent):
        if (folder / "CMakeLists.txt").is_file() and (folder / "csrc").is_dir():
            return folder
    raise SystemExit(f"ptsave's C++ files are missing in {_PACKAGE}: install ptsave again")


def check_platform() -> None:
    """Raise SystemExit on a platform where ptsave cannot be built."""
    if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
        raise SystemExit(
            f"ptsave is for Linux on {' and '.join(_MACHINES)}, not {sys.platform} on "
            f"{platform.machine()}: use torch.save and torch.load there"
        )


def installed_torch(remedy: str) -> str:
    """Return torch's version; raise SystemExit if torch is missing (with `remedy`) or too old."""
    needed = "ptsave is compiled against an installed torch >= {}.{}".format(*MINIMUM_TORCH)
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{needed}, and {remedy}") from None
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise SystemExit(f"{needed}, but the version {version!r} cannot be read")
    if (int(match[1]), int(match[2])) < MINIMUM_TORCH:
        raise SystemExit(f"{needed}, but torch {version} is installed")
    return version


def build(
    build_dir: Path, targets: Sequence[str], option: str, version: str, jobs: int | None = None
) -> list[Path]:
    """Build CMake targets with `option` turned on; return the built files, or raise SystemExit."""
    definitions = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": _tool("ninja", "BIN_DIR"),
        option: "ON",
        "PTSAVE_VERSION": version,
        **_torch_definitions(),
    }
    cmake = _tool("cmake", "CMAKE_BIN_DIR")
    _check_python_headers()
    _run(
        [cmake, "-S", str(source_folder()), "-B", str(build_dir), "-G", "Ninja"]
        + [f"-D{name}={value}" for name, value in definitions.items()]
        + shlex.split(os.environ.get("PTSAVE_CMAKE_ARGS", "")),
        "it needs gcc 12 or clang 14 (or later); set CXX to use another compiler than c++",
    )
    n_jobs = str(jobs or os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    _run(
        [cmake, "--build", str(build_dir), "--target", *targets, "--parallel", n_jobs],
        "it needs gcc 12 or clang 14 (or later; CXX sets the compiler), and enough memory for "
        f"{n_jobs} compilers at the same time (MAX_JOBS=1 runs only one)",
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [build_dir / f"{target}{suffix}" for target in targets]


def _tool(name: str, bin_dir_attribute: str) -> str:
    """Return the path of a program in the Python package of the same name, or in PATH."""
    search = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    if importlib.util.find_spec(name) is not None:
        bin_dir = getattr(importlib.import_module(name), bin_dir_attribute, None)
        search = f"{bin_dir}:{search}" if bin_dir else search
    path = shutil.which(name, path=search)
    if path is None:
        raise SystemExit(f"ptsave needs {name} to build: pip install {name}")
    return path


def _check_python_headers() -> None:
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise SystemExit(
            f"ptsave needs Python's headers to build, and {folder} has none: install them "
            "(python3-dev on Debian, python3-devel on Fedora), or use a Python that has them"
        )


def _run(command: list[str], needs: str) -> None:
    """Run a build command, which prints its errors; raise SystemExit if the command fails."""
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            f"ptsave: this command failed: {shlex.join(command)}\n"
            f"ptsave: the build failed, for the reason above: {needs}"
        )


def _torch_definitions() -> dict[str, str]:
    """Return the CMake definitions for the paths of torch and Python."""
    import torch
    from torch.utils import cpp_extension

    torch_include_dirs = cpp_extension.include_paths()
    include_dirs = torch_include_dirs + _pybind11_include_dirs(torch_include_dirs)
    return {
        "PTSAVE_TORCH_INCLUDE_DIRS": ";".join(include_dirs),
        "PTSAVE_TORCH_LIB_DIR": str(Path(torch.__file__).parent / "lib"),
        "PTSAVE_TORCH_CXX11_ABI": str(int(torch._C._GLIBCXX_USE_CXX11_ABI)),
        "PTSAVE_PYTHON_INCLUDE_DIRS": sysconfig.get_path("include"),
        "PTSAVE_PYTHON_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }


def _pybind11_include_dirs(torch_include_dirs: list[str]) -> list[str]:
    """Return a list with pybind11's include folder; an empty list if torch contains pybind11."""
    if any((Path(folder) / "pybind11" / "pybind11.h").is_file() for folder in torch_include_dirs):
        return []
    if importlib.util.find_spec("pybind11") is None:
        raise SystemExit("ptsave needs pybind11 to build: pip install pybind11")
    import pybind11

    return [pybind11.get_include()]
