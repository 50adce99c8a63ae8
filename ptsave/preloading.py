"""Imports all of ptsave ahead, for programs that cannot read its files later."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from importlib import import_module

import ptsave

__all__ = ["preload"]

# These need other libraries, or are programs.
_OTHERS = ("ptsave.__main__", "ptsave.bench", "ptsave.cli", "ptsave.integrations", "ptsave.startup")
# Libraries that ptsave can do without.
_OPTIONAL = ("fsspec.core", "numpy.lib.format", "safetensors.torch", "tqdm")


def preload() -> None:
    """Import every module of ptsave now, and the libraries that they use, as far as they are there.

    Otherwise each is imported when it is used first. That fails in a program that cannot read
    ptsave's files any more, because it has given up rights (``os.setuid``), changed its root
    (``os.chroot``) or entered another mount namespace; and it is done again in each process that
    is forked before. Not imported are `ptsave.integrations`, and fsspec's file systems. A new root
    needs ``/proc`` for safetensors files.

    Raises
    ------
    ImportError
        As of any import, for example under a torch for which there is no engine.

    Examples
    --------
    >>> import sys, ptsave
    >>> ptsave.preload()
    >>> "ptsave.conversion.converting" in sys.modules
    True
    """
    modules = [f"ptsave.{name}" for name in ("_core", "_C")]
    modules += _modules_in(ptsave.__path__, "ptsave.")
    for name in modules:
        import_module(name)
    for name in _OPTIONAL:
        with suppress(ModuleNotFoundError):
            import_module(name)


def _modules_in(path: list[str], prefix: str) -> list[str]:
    found = []
    for module in pkgutil.iter_modules(path, prefix):
        if module.name.startswith(_OTHERS) or "._" in module.name:
            continue
        found.append(module.name)
        if module.ispkg:
            found += _modules_in(list(import_module(module.name).__path__), f"{module.name}.")
    return found
