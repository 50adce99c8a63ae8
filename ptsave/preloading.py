"""Imports all of ptsave in advance, for programs that cannot read ptsave's files later."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from importlib import import_module

import ptsave

# Not preloaded: they need other libraries, or are programs.
_OTHERS = ("ptsave.__main__", "ptsave.bench", "ptsave.cli", "ptsave.integrations", "ptsave.startup")
# Optional libraries of ptsave.
_OPTIONAL = ("blake3", "fsspec.core", "numpy.lib.format", "safetensors.torch", "tqdm", "zstandard")


def preload() -> None:
    """Import all modules of ptsave now, and the installed libraries that they use.

    Otherwise each module is imported at its first use, and again in every forked process. Such an
    import fails if the program can no longer read ptsave's files, because it has given up rights
    (``os.setuid``), changed its root (``os.chroot``) or entered another mount namespace.
    `preload` imports neither `ptsave.integrations` nor fsspec's file systems. For safetensors
    files, ptsave also needs ``/proc`` in the new root.

    Raises
    ------
    ImportError
        If an import fails, for example because ptsave has no engine for the installed torch.

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
