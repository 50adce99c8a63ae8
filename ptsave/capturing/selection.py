"""Selects the modules of a model that are captured, and names them by their paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from ptsave.support.torch_capture import WRAPPED_ATTRIBUTE

# The attributes in which wrappers hold their module: torch.compile, FSDP, checkpointing.
_WRAPPING_NAMES = {WRAPPED_ATTRIBUTE, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def class_name(obj: object) -> str:
    """Return the full name of an object's class."""
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by path, without wrappers: ``module.layers.0`` is ``layers.0``."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found[_without_wrappers(path, model)] = module  # a wrapped module comes after its wrapper
    return found


def selected(paths: Iterable[str], include: Iterable[str], exclude: Iterable[str]) -> Iterator[str]:
    """Yield the paths that match a pattern of `include` and no pattern of `exclude`."""
    include, exclude = list(include), list(exclude)
    for path in paths:
        if any(fnmatchcase(path, pattern) for pattern in include) and not any(
            fnmatchcase(path, pattern) for pattern in exclude
        ):
            yield path


def unmatched(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match no path."""
    paths = list(paths)
    return [each for each in patterns if not any(fnmatchcase(path, each) for path in paths)]


def _without_wrappers(path: str, model: nn.Module) -> str:
    parts = path.split(".") if path else []
    if isinstance(model, _WRAPPERS) and parts:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPING_NAMES)


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module is TorchScript, whose calls run no Python hooks."""
    return isinstance(module, torch.jit.ScriptModule)
