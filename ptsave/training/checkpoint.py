"""Saves objects with a state under names, and restores them in place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ptsave.serialization import load, save
from ptsave.state.copying import Copier, tensors_in
from ptsave.state.mappings import check_mapping, load_mapping
from ptsave.state.modules import check_module, load_module
from ptsave.state.nested_state import advice
from ptsave.state.optimizers import check_optimizer, load_optimizer
from ptsave.training.named_options import check_restoring, check_saving
from ptsave.training.restoring import check_locations, restoring
from ptsave.tree.containers import items_of

__all__ = ["entries_of", "load_checkpoint", "load_into", "restore_entries", "save_checkpoint"]


def load_into(
    f: Any,
    target: Any,
    *,
    strict: bool = True,
    assign: bool = False,
    map_location: Any = None,
    weights_only: bool | None = None,
    verify: bool = True,
    progress: bool = False,
    ignore_mismatched_sizes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Restore a state dict from a file straight into the tensors of `target`.

    The bytes go from the file into the parameters, buffers and states that exist already: no second
    copy is ever in memory, but for tensors that are converted on the way (32 MiB, or one tensor, at
    a time).  Before the first byte is overwritten everything that can be checked is: keys, shapes,
    sizes and places of records.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        What :func:`ptsave.load` takes, if it holds a state dict and nothing around it.
    target : torch.nn.Module, torch.optim.Optimizer or dict
        The object to restore.  The tensors of a dict (or of dicts and lists in it) are filled and
        its other values replaced.  Anything else with a ``load_state_dict`` gets the state dict.
    strict : bool, default True
        Whether missing and unexpected keys are an error.  Not for optimizers, which take no part.
    assign : bool, default False
        As for :meth:`torch.nn.Module.load_state_dict`: the module gets the tensors that are loaded.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`, where it matters: the target's tensors stay where they are.
    weights_only : bool or None
        As for :func:`torch.load`.
    verify : bool, default True
        As for :func:`ptsave.load`.
    progress : bool, default False
        Whether to show a progress bar.
    ignore_mismatched_sizes : bool, default False
        As for :func:`ptsave.load_state_dict`.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Returns
    -------
    torch.nn.modules.module._IncompatibleKeys or None
        The keys ``(missing_keys, unexpected_keys)`` for a module or a dict.

    Raises
    ------
    RuntimeError
        As from :meth:`torch.nn.Module.load_state_dict`, but nothing has been overwritten then.
    CorruptCheckpointError
        The file is damaged.  If that shows while the target is being overwritten, the message says
        which entries hold the file's values; so does ``overwritten``, an attribute of this and any
        other exception that stops a restore halfway.

    Notes
    -----
    Where code of the model's own takes part (hooks, an overridden ``_load_from_state_dict``, extra
    state, tensor subclasses), it sees the same values as under torch: the entries of its part of
    the model are in memory then, and the parts before it have been restored.

    A local archive, and one in memory, is read straight into the target.  The contents of a URL, of
    a file object of another kind, of a safetensors file or of several files are loaded first, and
    copied.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> model = torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     ptsave.save(model.state_dict(), path)
    ...     ptsave.load_into(path, model)
    <All keys matched successfully>
    """
    is_module = isinstance(target, nn.Module)
    if assign and not is_module:
        raise TypeError("assign=True is for modules: nothing else assigns tensors")
    options: dict[str, Any] = {"weights_only": weights_only, "verify": verify, "progress": progress}
    options["storage_options"] = storage_options
    in_place = not assign  # assigned tensors are those of the file: their own place is their last
    with restoring(f, map_location, deferred=in_place, **options) as (obj, copier, _):
        try:
            _refuse_module(obj)
            return _load_state(
                target,
                obj,
                copier,
                strict,
                assign=assign,
                ignore_mismatched_sizes=ignore_mismatched_sizes,
            )
        except RuntimeError as error:
            if is_module and type(error) is RuntimeError and not hasattr(error, "overwritten"):
                _add_advice(error, obj, target)
            raise
        finally:
            del obj  # drop our reference: the copier reads only storages that are still referenced


def _refuse_module(state: Any) -> None:
    """Raise for a module that was saved whole, in the place of its state dict."""
    if isinstance(state, nn.Module):
        raise TypeError(
            f"the file holds a module that was saved whole ({type(state).__name__}), not a state "
            "dict: get it with ptsave.load(), and load its state_dict()"
        )


def _add_advice(error: RuntimeError, obj: Any, module: nn.Module) -> None:
    """Name in an error about keys the part of the file that was probably meant."""
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    message = str(error)
    if "key(s) in state_dict" in message and (sentence := advice(obj, names)):
        error.args = (f"{message}\n\t{sentence}",)


def _load_state(
    target: Any,
    state: Any,
    copier: Copier,
    strict: bool,
    *,
    assign: bool = False,
    ignore_mismatched_sizes: bool = False,
) -> Any:
    if isinstance(target, nn.Module):
        return load_module(
            target,
            state,
            strict,
            assign,
            copier,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            check_first=True,
        )
    if isinstance(target, Optimizer):
        return load_optimizer(target, state, copier, in_place=True)
    if isinstance(target, Mapping):
        return load_mapping(target, state, strict, copier)
    _check_type(target)
    copier.show({"": state})
    return target.load_state_dict(state)


def _check_state(
    target: Any, state: Any, strict: bool, copier: Copier, *, ignore_mismatched_sizes: bool = False
) -> None:
    """Raise the errors that `_load_state` is certain to raise, changing nothing."""
    if isinstance(target, nn.Module):
        ignore = ignore_mismatched_sizes
        check_module(target, state, strict, copier, ignore_mismatched_sizes=ignore)
    elif isinstance(target, Optimizer):
        check_optimizer(target, state)
    elif isinstance(target, Mapping):
        check_mapping(target, state, strict)
    else:
        _check_type(target)


def _check_type(target: Any) -> None:
    if isinstance(target, type) or not callable(getattr(target, "load_state_dict", None)):
        name = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(
            f"cannot restore into {name}: expected a module, an optimizer, a dict or an object "
            "with load_state_dict()"
        )


def save_checkpoint(
    f: Any,
    /,
    *,
    fsync: bool = False,
    atomic: bool = True,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **objects: Any,
) -> None:
    """Save objects under names, each with a ``state_dict`` method as its state dict.

    The file is a dict that :func:`torch.load` reads.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        File to write: a path, a URL or a file-like object.
    fsync, atomic, progress, storage_options
        As for :func:`ptsave.save`.
    **objects : object
        Models, optimizers, schedulers, and anything that can be saved, under any names but those of
        the options.

    Raises
    ------
    TypeError
        An object has the name of an option, or an option of another function is among the objects
        (``pickle_protocol=4``).
    SaveError
        As from :func:`ptsave.save`.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> stream = io.BytesIO()
    >>> ptsave.save_checkpoint(stream, model=model, optimizer=optimizer, epoch=3)
    >>> _ = stream.seek(0)
    >>> ptsave.load_checkpoint(stream, model=model, optimizer=optimizer)
    {'epoch': 3}
    """
    options: dict[str, Any] = {"fsync": fsync, "atomic": atomic, "progress": progress}
    options["storage_options"] = storage_options
    check_saving("ptsave.save_checkpoint", objects, **options)
    save(entries_of(objects), f, **options)


def entries_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint of `objects`: their state dicts, or they themselves."""
    return {name: _state_of(obj) for name, obj in objects.items()}


def _state_of(obj: Any) -> Any:
    state_dict = getattr(obj, "state_dict", None)
    return state_dict() if callable(state_dict) and not isinstance(obj, type) else obj


def load_checkpoint(
    f: Any,
    /,
    *,
    strict: bool = True,
    assign: bool = False,
    map_location: Any = None,
    weights_only: bool | None = None,
    verify: bool = True,
    progress: bool = False,
    ignore_mismatched_sizes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Restore objects in place from a checkpoint, and return its other entries.

    Everything that can be checked is checked for all of them before anything is overwritten.
    Modules come first, then optimizers, then the rest; within each kind the order is that of the
    arguments.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A file of :func:`ptsave.save_checkpoint`, or any other that holds a dict with a state dict
        for each target, as ``{"model_state_dict": ..., "epoch": 3}``.
    strict, map_location, weights_only, verify, progress, storage_options
        As for :func:`ptsave.load_into`.
    assign, ignore_mismatched_sizes
        As for :func:`ptsave.load_into`, for the modules among the targets.
    **targets : object
        The objects to restore, under the names of the file's entries.

    Returns
    -------
    dict
        The entries that are no target's.

    Raises
    ------
    KeyError
        If the file has no entry of a target's name.
    TypeError
        If a target has the name of an option, cannot be restored into, or is an option of another
        function (``mmap=True``).
    RuntimeError, CorruptCheckpointError
        As from :func:`ptsave.load_into`.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> model = torch.nn.Linear(1, 1)
    >>> stream = io.BytesIO()
    >>> torch.save({"model_state_dict": model.state_dict(), "epoch": 3}, stream)
    >>> _ = stream.seek(0)
    >>> ptsave.load_checkpoint(stream, model_state_dict=model)
    {'epoch': 3}
    """
    options: dict[str, Any] = {"weights_only": weights_only, "verify": verify, "progress": progress}
    options.update(strict=strict, map_location=map_location, storage_options=storage_options)
    options.update(assign=assign, ignore_mismatched_sizes=ignore_mismatched_sizes)
    check_restoring("ptsave.load_checkpoint", targets, **options)
    return restore_entries(f, targets, **options)


def restore_entries(
    f: Any,
    targets: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    map_location: Any = None,
    weights_only: bool | None = None,
    verify: bool = True,
    progress: bool = False,
    ignore_mismatched_sizes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load as :func:`load_checkpoint` does, for targets of any name."""
    options: dict[str, Any] = {"weights_only": weights_only, "verify": verify, "progress": progress}
    options["storage_options"] = storage_options
    ignore = ignore_mismatched_sizes
    # Tensors that are assigned are those of the file: their own place is their last.
    with restoring(f, map_location, deferred=not assign, **options) as (obj, copier, locations):
        try:
            _check_entries(obj, targets)
            for name in targets:
                _refuse_module(obj[name])
            rest = {name: value for name, value in items_of(obj) if name not in targets}
            moves = locations if tensors_in(rest) else set()
            if moves:
                check_locations(moves)
            for name, target in targets.items():
                _check_state(target, obj[name], strict, copier, ignore_mismatched_sizes=ignore)
            for name in sorted(targets, key=lambda name: _rank(targets[name])):
                _load_state(
                    targets[name],
                    obj[name],
                    copier,
                    strict,
                    assign=assign,
                    ignore_mismatched_sizes=ignore,
                )
        finally:
            del obj
        if not moves:
            return rest
        names = set(rest)
        rest.clear()
    # They belong on another device: torch's rules say which, when they are loaded by themselves.
    again = load(
        f,
        map_location,
        weights_only=weights_only,
        verify=False,
        storage_options=storage_options,
    )
    return {name: value for name, value in items_of(again) if name in names}


def _rank(target: Any) -> int:
    return 0 if isinstance(target, nn.Module) else 1 if isinstance(target, Optimizer) else 2


def _check_entries(obj: Any, targets: Mapping[str, Any]) -> None:
    if not isinstance(obj, dict):
        raise TypeError(
            f"the file holds {type(obj).__name__}, not a dict with an entry for each target: "
            "ptsave.load_into() restores a bare state dict"
        )
    for name in targets:
        if name not in obj:
            near = difflib.get_close_matches(name, [str(key) for key in obj], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(repr(key) for key in list(obj)[:8])
            raise KeyError(f"the checkpoint has no entry {name!r}, only {known}{hint}")
