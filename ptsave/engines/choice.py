"""Chooses the engine for the torch that is installed."""

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

__all__ = ["find", "load", "own_folders"]


def own_folders() -> list[Path]:
    """Return where engines are that are compiled here: below the environment, or the user's home.

    They are not beside the package's files, or they would outlive it there.
    """
    below = Path("share", "ptsave", "engines", VERSION)
    folders = [Path(sysconfig.get_path("data")) / below]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / below)
    return folders


def find(torch_version: str) -> Path:
    """Return the engine for this torch, the newest where there are several.

    So one that was just compiled is used, wherever it is.

    Raises
    ------
    ImportError
        There is none.
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
    """Return ``ptsave._C`` out of the engine for this torch.

    Raises
    ------
    ImportError
        There is none, or it does not fit.
    """
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
    """Return the minor series of torch for which there is an engine."""
    found = set()
    for folder in filter(Path.is_dir, _folders()):
        for name in os.listdir(folder):
            series = series_of_folder(name)
            if series and (folder / name / FILE_NAME).is_file():
                found.add(series)
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _remedy() -> str:
    return f"compile one for it by `{sys.executable} -m ptsave.build_engine`"
