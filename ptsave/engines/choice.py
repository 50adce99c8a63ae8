"""Chooses the engine for the installed torch."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from ptsave._built import VERSION
from ptsave.engines.names import FILE_NAME, folder_name, series_of_folder


def own_folders() -> list[Path]:
    """Return the folders of engines compiled here: in the environment, and in the user's home.

    Beside the package's files, engines would stay there after the package is removed.
    """
    below = Path("share", "ptsave", "engines", VERSION)
    folders = [Path(sysconfig.get_path("data")) / below]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / below)
    return folders


def find(torch_version: str) -> Path:
    """Return the newest engine for this torch, so that one just compiled is used, wherever it is.

    If there is none, the ImportError names the remedy.
    """
    name = folder_name(torch_version)
    engines = [folder / name / FILE_NAME for folder in _folders()]
    engines = [engine for engine in engines if engine.is_file()]
    if engines:
        return max(engines, key=lambda engine: engine.stat().st_mtime_ns)
    known = ", ".join(_series_there()) or "none"
    raise ImportError(
        f"ptsave {VERSION} has engines for torch {known}, and torch {torch_version} is installed: "
        f"{_remedy()}"
    )


def load(torch_version: str) -> ModuleType:
    """Import ``ptsave._C`` from the engine for this torch; none that fits is an ImportError."""
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
    if engine.VERSION != VERSION:
        raise ImportError(f"{path} is of ptsave {engine.VERSION}, not {VERSION}: {_remedy()}")
    return engine


def _folders() -> list[Path]:
    return [*own_folders(), Path(__file__).parent]


def _series_there() -> list[str]:
    """Return the minor series of torch that have an engine."""
    found = set()
    for folder in filter(Path.is_dir, _folders()):
        for name in os.listdir(folder):
            series = series_of_folder(name)
            if series and (folder / name / FILE_NAME).is_file():
                found.add(series)
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _remedy() -> str:
    return f"compile one for it by `{sys.executable} -m ptsave.build_engine`"
