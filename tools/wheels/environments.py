"""Virtual environments, made by uv, which keeps one copy of what they share."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "wheels"


def system_id() -> str:
    """Return the name of the distribution and its version: "debian12"."""
    release = platform.freedesktop_os_release()
    return release["ID"] + release.get("VERSION_ID", "")


PLACE = BUILD / system_id()  # the same files may be seen from a chroot, where all else differs


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Run a program and return its output; what went wrong is in the exception."""
    inherited = {name: each for name, each in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**inherited, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        sys.stdout.write(done.stdout)
        last = done.stdout.strip().splitlines()[-3:]
        raise RuntimeError(
            f"{Path(command[0]).name} ended with {done.returncode}: {' / '.join(last)}"
        )
    return done.stdout


class Tools:
    """Programs that make environments and check wheels, pinned in requirements-wheels.txt."""

    def __init__(self) -> None:
        folder = PLACE / "tools" / sys.implementation.cache_tag
        self.bin = folder / "bin"
        if not (folder / ".complete").exists():
            run(sys.executable, "-m", "venv", "--clear", folder)
            requirements = ROOT / "requirements-wheels.txt"
            run(self.bin / "python", "-m", "pip", "install", "-r", requirements)
            (folder / ".complete").touch()

    def uv(self, *arguments: str | Path) -> str:
        cache = str(BUILD / "uv-cache")  # on the same file system, for hard links
        return run(self.bin / "uv", "--no-python-downloads", *arguments, UV_CACHE_DIR=cache)

    def find_python(self, version: str) -> Path | None:
        """Return an interpreter of this minor version."""
        try:
            found = self.uv("python", "find", "--system", version)
            return Path(found.strip().splitlines()[-1])
        except RuntimeError:
            return None

    def environment(self, folder: Path, python: Path, *packages: str) -> Environment:
        """Return an environment with these packages; one that was completed is used again."""
        wanted = "\n".join(packages)
        stamp = folder / ".packages"
        if not stamp.exists() or stamp.read_text() != wanted:
            self.uv("venv", "--clear", "--seed", "--python", python, folder)
            self.uv("pip", "install", "--python", folder / "bin" / "python", *packages)
            stamp.write_text(wanted)
        return Environment(folder)


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def run(self, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return run(self.python, *arguments, cwd=cwd, PATH=path, **environment)

    def ask(self, expression: str, imports: str = "sys") -> str:
        # Not where this was started: that may have modules of these names.
        printed = self.run("-c", f"import {imports}; print({expression})", cwd=self.folder)
        return printed.strip().splitlines()[-1]


def copy_tree() -> Path:
    """Return a copy of the files that git knows or does not ignore; what is as before stays."""
    tree = PLACE / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        name = str(path.relative_to(tree))
        if not name.startswith("build/") and name not in names:
            path.unlink()
    for name in names:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return tree
