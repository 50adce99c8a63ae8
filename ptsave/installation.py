"""Puts ptsave behind ``torch.save`` and ``torch.load``, for code that one cannot edit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from ptsave import serialization
from ptsave.support import torch_serialization as stock

__all__ = ["install", "installed", "uninstall"]

_lock = threading.Lock()
_depth = 0
_NAMES = {
    "save": (stock.save, serialization.save),
    "load": (stock.load, serialization.load),
}


def install() -> None:
    """Put ptsave behind ``torch.save`` and ``torch.load``.

    Both ``torch`` and ``torch.serialization`` are changed, so callers inside torch and in
    libraries use ptsave, too.  To TorchScript they stay the operators that torch's are: scripted
    code calls those.  Calls nest: each needs its own :func:`uninstall`.  Safe to call from any
    thread; the change is seen by all.

    Examples
    --------
    >>> import torch, ptsave
    >>> ptsave.install()
    >>> torch.save is ptsave.save
    True
    >>> ptsave.uninstall()
    >>> torch.save is ptsave.save
    False
    """
    global _depth  # noqa: PLW0603
    with _lock:
        _depth += 1
        if _depth == 1:
            for old, new in _NAMES.values():
                stock.register_builtin(new, stock.find_builtin(old))
            _replace({name: (old, new) for name, (old, new) in _NAMES.items()})


def uninstall() -> None:
    """Undo one :func:`install`; the last one restores torch's own functions.

    Raises
    ------
    RuntimeError
        If ptsave is not installed.
    """
    global _depth  # noqa: PLW0603
    with _lock:
        if _depth == 0:
            raise RuntimeError("ptsave is not installed: call ptsave.install() first")
        _depth -= 1
        if _depth == 0:
            _replace({name: (new, old) for name, (old, new) in _NAMES.items()})
            for _, new in _NAMES.values():
                stock.builtin_operators().pop(id(new), None)


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of a ``with`` block.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> with ptsave.installed():
    ...     torch.save(torch.ones(2), io.BytesIO())
    """
    install()
    try:
        yield
    finally:
        uninstall()


def _replace(names: dict[str, tuple[object, object]]) -> None:
    modules: list[ModuleType] = [torch, torch.serialization]
    for module in modules:
        for name, (old, new) in names.items():
            # Whoever patched over it meanwhile keeps their patch.
            if getattr(module, name) is old:
                setattr(module, name, new)
