"""Wheels of one Python, and the pairs of it with a torch that are built and tested."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
from pathlib import Path

from environments import PLACE, ROOT, Environment, Tools

PLATFORM = f"manylinux_2_28_{platform.machine()}"  # that of torch's own wheels
MINIMUM_TORCH = (2, 9)
BUILD_PACKAGES = ("setuptools>=77", "wheel", "cmake", "ninja", "pybind11", "numpy")
TEST_PACKAGES = (
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "numpy",
    "dill",
    "expecttest",
    "xxhash",
    "zstandard",
    "blake3",
)
# What torch does differently in every release: its files, its state dicts, its pickles.
TESTS = (
    "tests/compatibility/test_compatibility_files.py",
    "tests/compatibility/test_compatibility_objects.py",
    "tests/compatibility/test_compatibility_options.py",
    "tests/compatibility/test_install.py",
    "tests/archive/test_unpickler.py",
    "tests/contents/test_archive.py",
    "tests/state",
    "tests/writing/test_pickler.py",
    "tests/test_preloading.py",
    "tests/test_public_api.py",
)


class SkippedError(Exception):
    """What cannot be had on this machine."""


class PythonWheel:
    """The wheel of one Python."""

    def __init__(self, tools: Tools, tree: Path, version: str) -> None:
        self.tools, self.tree, self.version = tools, tree, version
        python = tools.find_python(version)
        if python is None:
            raise SkippedError("no such Python on this machine")
        self.python = python
        self.folder = PLACE / f"python-{version}"
        self.engines = self.folder / "engines"
        self.path: Path | None = None

    def assemble(self, newest: Pair) -> Path:
        """Make the wheel out of all engines; auditwheel says whether it may have its name."""
        unchecked = self.folder / "unchecked"
        shutil.rmtree(unchecked, ignore_errors=True)
        newest.environment.run(
            *("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", unchecked, "."),
            cwd=self.tree,
            **newest.build_variables(),
            PTSAVE_ENGINES=str(self.engines),
        )
        (wheel,) = unchecked.glob("*.whl")
        command = ["-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
        for library in ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"):
            command += ["--exclude", library]
        checked = self.folder / "checked"
        shutil.rmtree(checked, ignore_errors=True)
        tools = Environment(self.tools.bin.parent)
        tools.run(*command, "--wheel-dir", checked, wheel)
        (repaired,) = checked.glob("*.whl")
        self.path = self.folder / repaired.name
        repaired.replace(self.path)
        return self.path


class Pair:
    """A Python and a minor series of torch."""

    environment: Environment
    versions: tuple[str, str]  # those that were tested, of Python and torch

    def __init__(self, wheel: PythonWheel, torch: str) -> None:
        self.wheel, self.torch = wheel, torch

    def build_variables(self) -> dict[str, str]:
        # One build folder for all torches of a Python: what needs no torch is compiled once.
        return {"PTSAVE_CMAKE_ARGS": "-DPTSAVE_PORTABLE=ON", "CCACHE_BASEDIR": str(ROOT)}

    def build(self) -> Path:
        """Compile the engine, if it is not there or its source has changed."""
        wheel = self.wheel
        stamp = wheel.engines / f"{self.torch}.stamp"
        self.environment = wheel.tools.environment(
            wheel.folder / f"build-{self.torch}",
            wheel.python,
            f"torch=={self.torch}.*",
            *BUILD_PACKAGES,
        )
        version = self.environment.ask("torch.__version__", "torch")
        digest = f"{version} {source_digest(wheel.tree)}"
        if stamp.exists() and stamp.read_text() == digest:
            return stamp
        out = wheel.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        self.environment.run(
            *("setup.py", "--quiet", "build_ext", "--build-lib", out),
            cwd=wheel.tree,
            **self.build_variables(),
        )
        (engine,) = out.glob("ptsave/engines/torch_*/_C*.so")
        target = wheel.engines / engine.parent.name / engine.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(engine, target)
        stamp.write_text(digest)
        return stamp

    def test(self) -> str:
        """Install the wheel into a fresh environment and run the short suite; its last line."""
        wheel = self.wheel
        assert wheel.path is not None
        folder = wheel.folder / f"test-{self.torch}"
        shutil.rmtree(folder, ignore_errors=True)
        packages = (f"torch=={self.torch}.*", f"{wheel.path}[safetensors,fsspec]", *TEST_PACKAGES)
        environment = wheel.tools.environment(folder, wheel.python, *packages)
        self.environment = environment
        self.versions = (
            environment.ask("sys.version.split()[0]"),
            environment.ask("torch.__version__", "torch"),
        )
        where = Path(environment.ask("ptsave._C.__file__", "ptsave._C"))
        if (
            folder not in where.parents
            or where.parent.name != f"torch_{self.torch.replace('.', '_')}"
        ):
            raise RuntimeError(f"the engine that is used is {where}")
        suite = wheel.folder / "suite"  # without the tree's ptsave, which programs would import
        shutil.rmtree(suite, ignore_errors=True)
        shutil.copytree(wheel.tree / "tests", suite / "tests")
        shutil.copy2(wheel.tree / "pyproject.toml", suite)
        output = environment.run(
            *("-m", "pytest", "-q", "--timeout", "600", "-p", "no:cacheprovider", *TESTS), cwd=suite
        )
        summary: str = output.strip().splitlines()[-1].strip("= ")
        shutil.rmtree(folder)
        return summary


def source_digest(tree: Path) -> str:
    """Return a digest of all that an engine is compiled from."""
    digest = hashlib.sha256()
    building = tree / "ptsave" / "engines" / "building.py"
    for path in (tree / "CMakeLists.txt", building, *sorted(tree.glob("csrc/**/*.[ch]*"))):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def torches_for(tools: Tools, wheel: PythonWheel) -> list[str]:
    """Return the minor series that the index has for a Python, the oldest first."""
    environment = tools.environment(wheel.folder / "index", wheel.python, "pip")
    listed = environment.run("-m", "pip", "index", "versions", "torch")
    versions = re.search(r"Available versions: (.*)", listed)
    if versions is None:
        raise RuntimeError("pip's index lists no torch")
    series = {tuple(map(int, each.split(".")[:2])) for each in versions[1].split(", ")}
    return [
        f"{major}.{minor}" for major, minor in sorted(series) if (major, minor) >= MINIMUM_TORCH
    ]
