"""Finds and imports the engine, the compiled extension for the installed torch."""

from __future__ import annotations

import importlib
import os
import re
import site
import sys
import sysconfig
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

FILE_NAME = f"_C{EXTENSION_SUFFIXES[0]}"


def series_of(torch_version: str) -> str:
    """Return the minor series of a version, such as "2.13" for "2.13.1+cpu"."""
    return ".".join(torch_version.split(".")[:2])


def folder_name(torch_version: str) -> str:
    """Return the name of the engine's folder for this torch."""
    return f"torch_{series_of(torch_version).replace('.', '_')}"


def series_of_folder(name: str) -> tuple[int, int] | None:
    """Return the minor series in the name of an engine's folder; None for any other name."""
    match = re.fullmatch(r"torch_(\d+)_(\d+)", name)
    return (int(match[1]), int(match[2])) if match else None


def _own_version() -> str:
    from ptsave._built import VERSION  # not above: setup.py imports this module before it builds

    return VERSION


def own_folders() -> list[Path]:
    """Return the folders for engines that `ptsave.build_engine` compiles.

    These folders are outside the package's folder, because pip would not uninstall engines there.
    """
    below = Path("share", "ptsave", "engines", _own_version())
    folders = [Path(sysconfig.get_path("data")) / below]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / below)
    return folders


def find(torch_version: str) -> Path:
    """Return the newest engine for this torch, or raise an ImportError that names a remedy."""
    name = folder_name(torch_version)
    engines = [folder / name / FILE_NAME for folder in _folders()]
    engines = [engine for engine in engines if engine.is_file()]
    if engines:
        return max(engines, key=lambda engine: engine.stat().st_mtime_ns)
    known = ", ".join(_series_there()) or "none"
    raise ImportError(
        f"ptsave {_own_version()} has engines for torch {known}, but torch {torch_version} is "
        f"installed: {_remedy()}"
    )


@cache
def require() -> None:
    """Raise ImportError if there is no engine for this torch; check only until one is found."""
    find(importlib.import_module("torch").__version__)


def load(torch_version: str) -> ModuleType:
    """Import ``ptsave._C`` from the engine for this torch; raise ImportError if none fits."""
    path = find(torch_version)
    loader = ExtensionFileLoader("ptsave._C", str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        engine = module_from_spec(spec)
        loader.exec_module(engine)
    except ImportError as error:
        raise ImportError(
            f"{path} does not fit torch {torch_version}, which is installed ({error}): {_remedy()}"
        ) from error
    if (own := _own_version()) != engine.VERSION:
        raise ImportError(f"{path} belongs to ptsave {engine.VERSION}, not {own}: {_remedy()}")
    return engine


def _folders() -> list[Path]:
    return [*own_folders(), Path(__file__).parent]


def _series_there() -> list[str]:
    """Return the minor series of torch for which there is an engine."""
    found = set()
    for folder in filter(Path.is_dir, _folders()):
        for name in os.listdir(folder):
            series = series_of_folder(name)
            if series and (folder / name / FILE_NAME).is_file():
                found.add(series)
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _remedy() -> str:
    return f"compile an engine with `{sys.executable} -m ptsave.build_engine`"
