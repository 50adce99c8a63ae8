"""Installs ptsave in a program and in its child processes, as soon as torch is imported.

``ptsave run`` puts this folder first in PYTHONPATH, and Python imports `sitecustomize` when it
starts.  A program that never imports torch loses no time.  Another `sitecustomize` in the path is
imported, too.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).resolve().parent


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs ptsave after the first import of torch or ptsave; other finders find both packages.

    If ptsave is imported first, this finder does not wait for torch's import, because ptsave's
    own modules import torch before they are complete.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("torch", "ptsave"):
            return None
        others = [each for each in sys.meta_path if each is not self]
        specs = (each.find_spec(fullname, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader, self)
        return spec


class _InstallingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _AfterTorch) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Here and not in find_spec: libraries look for torch's spec without importing torch.
        is_first = self._finder in sys.meta_path
        if is_first:
            sys.meta_path.remove(self._finder)
        try:
            self._loader.exec_module(module)
        except BaseException:
            if is_first:
                sys.meta_path.insert(0, self._finder)
            raise
        if is_first:
            _install()


def _install() -> None:
    root = str(_FOLDER.parent.parent)
    if importlib.util.find_spec("ptsave") is None and root not in sys.path:
        sys.path.append(root)  # ptsave is not installed, but run from its directory
    from ptsave.installation import install_while_importing
    from ptsave.support.config import install_options

    install_while_importing(install_options())


def _import_the_next_one() -> None:
    """Import the next `sitecustomize` in the path, which this module hides."""
    path = list(sys.path)
    sys.path[:] = [each for each in path if not each or Path(each).resolve() != _FOLDER]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        sys.path[:] = path


if __name__ == "sitecustomize":
    if os.environ.get("PTSAVE_INSTALL", "0") not in ("", "0"):
        sys.meta_path.insert(0, _AfterTorch())
    _import_the_next_one()
