"""Saves named objects in one file, and restores objects in place, without a second copy."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ptsave.archive.loading import LoadOptions
from ptsave.contents.loading import load_source
from ptsave.errors import CheckpointWarning
from ptsave.sources.locations import describe
from ptsave.state.copying import Copier, Mismatch, tensors_in
from ptsave.state.modules import IncompatibleKeys, check_module, load_module
from ptsave.support.calls import check_flags, failing_together, has_others, warn_user
from ptsave.training.options import RestoreOptions, check_named, entries_of
from ptsave.training.restoring import check_locations, restoring
from ptsave.tree.containers import items_of

if TYPE_CHECKING:
    from ptsave.state.optimizer_matching import Matching, Named
    from ptsave.state.renaming import Rename, Renaming
    from ptsave.training.options import KeyMapping, Match
    from ptsave.writing.sharing import SavedBytes


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
    match: Match = None,
    key_mapping: Rename | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    device: Any = None,
    rename: Rename | None = None,
) -> Any:
    """Restore a state dict from a file directly into the tensors of `target`.

    The bytes go from the file into the existing parameters, buffers and states, without a second
    copy in memory.  Only conversions to another dtype or device need extra memory: at most 32 MiB,
    or the size of one tensor.  Before the first byte is overwritten, ptsave checks the keys,
    the shapes, and the sizes and offsets of the records in the archive.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A file that :func:`ptsave.load` can load.  It holds one state dict, not a dict of several.
    target : torch.nn.Module, torch.optim.Optimizer or dict
        The object to restore.  In a dict, and in dicts and lists inside it, tensors are filled and
        other values are replaced.  For any other object, ptsave calls its ``load_state_dict``.
    strict : bool, default True
        Whether missing and unexpected keys are an error.  For an optimizer, this has an effect only
        when parameters are matched by name.
    assign : bool, default False
        As for :meth:`torch.nn.Module.load_state_dict`: new tensors replace the module's tensors.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`, except that the target's tensors stay on their devices.
    weights_only : bool or None
        As for :func:`torch.load`, but a restore also accepts some harmless types that
        :func:`torch.load` refuses: NumPy's numbers, dtypes and arrays of numbers, paths, dates,
        `Decimal`, `range`, `slice`, `frozenset`, `deque` and `defaultdict`.
    verify : bool, default True
        As for :func:`ptsave.load`.
    progress : bool, default False
        Whether to show a progress bar.
    ignore_mismatched_sizes : bool, default False
        As for :func:`ptsave.load_state_dict`.  In an optimizer, a parameter whose saved state has
        a different shape keeps its present state.
    match : {"order", "name"}, optional
        For an optimizer, as for :func:`ptsave.load_optimizer_state_dict`.  None matches by name if
        the file has names of parameters in place of torch.optim's numbers, or else by order.
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` writes such names, with
        and without ``flatten_optimizer_state_dict``.  Like
        ``set_optimizer_state_dict``, ptsave accepts such a file if it lacks a parameter that needs
        no gradient, or has parameters that the optimizer does not have.
    key_mapping : callable or mapping, optional
        Changes names in the file to names of the module's entries or the optimizer's parameters.
        A function returns the new name.  The keys of a mapping are full names or components of
        names, and the values are their replacements.  :func:`ptsave.load_model` calls this
        argument `rename`.  An entry whose new name is None is left out.
    named_parameters : iterable of (str, Tensor), optional
        Names for an optimizer's parameters, if the optimizer was made without names.  If FSDP,
        torch.compile, activation checkpointing or DistributedDataParallel adds components to these
        names (such as ``module.``), the names in the file may lack the components.
    storage_options : mapping, optional
        Arguments for fsspec's file system, if `f` is a URL.
    process_group : torch.distributed.ProcessGroup, optional
        As for :func:`ptsave.load`: one rank reads an archive for all ranks.  Each rank restores its
        own target, which may be a part of the model.  All ranks check their targets before any rank
        overwrites anything.
    device : torch.device, str or int, optional
        Another name of `map_location`.
    rename : callable or mapping, optional
        Another name of `key_mapping`.

    Returns
    -------
    torch.nn.modules.module._IncompatibleKeys or None
        The keys ``(missing_keys, unexpected_keys)`` for a module or a dict; an `IncompatibleKeys`
        for an optimizer that was matched by name.

    Raises
    ------
    RuntimeError
        As from :meth:`torch.nn.Module.load_state_dict`, but before anything is overwritten.  If
        a part of the checkpoint fits the target, the message names that part.
    KeyError
        The target is an optimizer, and the file does not hold the state dict of an optimizer.  If
        a part of the file is such a state dict, the message names that part.
    CorruptCheckpointError
        The file is damaged.  If a part of the target has been overwritten already, the message
        names the entries that have new values.  Every exception that stops a restore halfway
        has these names in its attribute ``overwritten``, too.

    Notes
    -----
    Code of the model (hooks, an overridden ``_load_from_state_dict``, extra state, tensor
    subclasses) sees the same values as with torch.  When code of a module runs, the module's saved
    values are in memory, and all modules before it have been restored.

    An archive in a local file or in memory is read directly into the target.  Other sources are
    first loaded and then copied: URLs, other file objects, safetensors files, and checkpoints of
    several files.  But with `process_group`, an archive at a URL goes directly into the target,
    and is converted while it arrives; this needs 40 MiB besides the target's memory.  With
    ``assign=True``, tensors are loaded into new memory and then assigned.  If
    unpickling may read values of tensors, the tensors are loaded into new memory and then copied.

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
    with failing_together(process_group, describe(f)):
        check_flags(verify=verify)
        options = RestoreOptions.of(locals())
        _check_arguments(f, target, options)
        renaming = key_mappings(options.key_mapping, {"": target}).get("")
        namings: list[Named] = []
        if named_parameters is not None:
            from ptsave.state.optimizer_matching import ways_of_naming

            namings += ways_of_naming(named_parameters)
        whole = Target(target, options, renaming, namings)
    with restoring(f, options) as (obj, copier, _):
        try:
            refuse_module(obj)
            if copier.is_shared:  # if not, `whole.load` makes this check
                with part_named(obj, target):
                    whole.check(obj, copier)
                copier.agree()
            with part_named(obj, target):
                result = whole.load(obj, copier)
            warn_if_nothing_fits(obj, target, result)
            return result
        finally:
            del obj  # drop our reference: the copier reads only storages that are still referenced


def _check_arguments(f: Any, target: Any, options: RestoreOptions) -> None:
    """Raise a TypeError if `f` and `target` are swapped, or if an option does not fit `target`."""
    if isinstance(target, (str, os.PathLike)) and hasattr(f, "state_dict"):
        raise TypeError("the arguments are in the wrong order: call load_into(file, target)")
    is_module, is_optimizer = isinstance(target, nn.Module), isinstance(target, Optimizer)
    if options.assign and not is_module:
        raise TypeError("assign=True is for modules, and has no meaning for other targets")
    if options.match is not None and not is_optimizer:
        raise TypeError("match is for optimizers: other targets always match by name")
    if options.key_mapping is not None and not (is_module or is_optimizer):
        raise TypeError("key_mapping is for modules and optimizers")


def save_checkpoint(
    f: Any,
    /,
    *,
    fsync: bool = False,
    atomic: bool = True,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    weights_only_check: bool = False,
    base: str | os.PathLike[str] | None = None,
    **objects: Any,
) -> SavedBytes | None:
    """Save named objects; an object that has a ``state_dict`` method is saved as its state dict.

    The file holds a dict from the names to the saved objects.  :func:`torch.load` can read it.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        File to write: a path, a URL or a file-like object.
    fsync, atomic, progress, storage_options, weights_only_check, base
        As for :func:`ptsave.save`.
    **objects : object
        Models, optimizers, schedulers, and any other objects that can be saved.  No object
        may have the name of an option.

    Returns
    -------
    SavedBytes or None
        As from :func:`ptsave.save`.

    Raises
    ------
    TypeError
        An object has the name of an option.  Or the call has an option that only other functions
        have (``pickle_protocol=4``).
    SaveError, ValueError
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
    from ptsave.serialization import save_with
    from ptsave.writing.planning import SaveOptions

    options = SaveOptions.of(locals())
    check_named("ptsave.save_checkpoint", options, objects)
    return save_with(entries_of(objects), f, options)


class RestoredEntries(dict[str, Any]):
    """The entries of a checkpoint that no target was given for, and a report on the targets.

    Attributes
    ----------
    report : dict of str to IncompatibleKeys
        For each restored module, optimizer and dict, by its name: the keys that did not match.
        The checkpoint lacks the ``missing_keys``, and the target lacks the ``unexpected_keys``.
        The ``mismatched_keys`` were left out because their shapes differ; each has the name, the
        shape in the checkpoint and the shape in the target.  The keys of an optimizer are names of
        parameters, or the saved numbers if parameters were matched by order.  There is no report
        on a module whose own ``load_state_dict`` returns no keys.

    Notes
    -----
    This dict is equal to a plain dict with the same entries.  It is pickled as an `OrderedDict`,
    without the report, so that :func:`torch.load` with ``weights_only=True`` accepts it.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> stream = io.BytesIO()
    >>> ptsave.save_checkpoint(stream, model=torch.nn.Linear(1, 1, bias=False), epoch=3)
    >>> _ = stream.seek(0)
    >>> rest = ptsave.load_checkpoint(stream, model=torch.nn.Linear(1, 1), strict=False)
    >>> rest, rest.report["model"].missing_keys
    ({'epoch': 3}, ['bias'])
    """

    report: dict[str, IncompatibleKeys]

    def __init__(
        self, entries: Mapping[str, Any], report: Mapping[str, IncompatibleKeys] | None = None
    ) -> None:
        super().__init__(entries)
        self.report = dict(report or {})

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


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
    match: Match = None,
    key_mapping: KeyMapping | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    device: Any = None,
    rename: KeyMapping | None = None,
    **targets: Any,
) -> RestoredEntries:
    """Restore objects in place from a checkpoint, and return the entries that have no target.

    Before anything is overwritten, all targets are checked as far as possible.  Modules are
    restored first, then optimizers, then the other targets, each in the order of the arguments.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A file that :func:`ptsave.save_checkpoint` wrote, or another file with a dict that has a
        state dict for each target, such as ``{"model_state_dict": ..., "epoch": 3}``.
    strict, map_location, weights_only, verify, progress, storage_options, process_group
        As for :func:`ptsave.load_into`.
    assign
        As for :func:`ptsave.load_into`; it has an effect only on the modules among the targets.
    ignore_mismatched_sizes, match, key_mapping, device, rename
        As for :func:`ptsave.load_into`; they affect only modules and optimizers among the targets.
        An optimizer made without names of parameters gets the parameter names of the modules among
        the targets.  `key_mapping` may also map a target's name to a `key_mapping` for this target:
        ``{"model": {"gamma": "weight"}, "ema": rename}``.
    **targets : object
        The objects to restore, under the names of the file's entries.

    Returns
    -------
    RestoredEntries
        A dict of the entries that have no target.  Its attribute `report` has the missing,
        unexpected and mismatched keys of each module, optimizer and dict, by its name.

    Raises
    ------
    KeyError
        The file has no entry with the name of a target.
    TypeError
        A target has the name of an option, or cannot be restored.  Or the call has an option that
        only other functions have (``mmap=True``).
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
    with failing_together(process_group, describe(f)):
        options = RestoreOptions.of(locals())
        check_named("ptsave.load_checkpoint", options, targets)
    return restore_entries(f, targets, options)


def restore_entries(f: Any, targets: Mapping[str, Any], options: RestoreOptions) -> RestoredEntries:
    """Do what :func:`load_checkpoint` does; here a target may have the name of an option."""
    group = options.process_group
    with failing_together(group, describe(f)):
        renamings = key_mappings(options.key_mapping, targets)
    modules = [name for name, each in targets.items() if isinstance(each, nn.Module)]
    optimizers = [name for name, each in targets.items() if isinstance(each, Optimizer)]
    named = names_of_modules([targets[name] for name in modules]) if optimizers else []
    parts = {
        name: Target(target, options, renamings.get(name), named)
        for name, target in targets.items()
    }
    report: dict[str, IncompatibleKeys] = {}
    with restoring(f, options) as (obj, copier, locations):
        try:
            _check_entries(obj, targets)
            for name in targets:
                refuse_module(obj[name])
            rest = {name: value for name, value in items_of(obj) if name not in targets}
            moves = locations if tensors_in(rest) else set()
            check_locations(moves)
            for name, part in parts.items():
                try:
                    part.check(obj[name], copier)
                except KeyError as error:
                    message = f"the entry {name!r} cannot be restored: {error.args[0]}"
                    raise KeyError(message) from None
            copier.agree()
            for name in dict.fromkeys([*modules, *optimizers, *targets]):
                keys = _keys_of(parts[name].load(obj[name], copier))
                if keys is None and name in optimizers:
                    keys = IncompatibleKeys([], [])  # matched by order, so no key is left over
                if keys is not None:
                    report[name] = keys
        finally:
            del obj
        names = set(rest)
        if moves:
            rest.clear()
    any_moves = bool(moves)  # True on a rank: all ranks load again
    if has_others(group):
        from ptsave.support.group_call import GroupCall

        any_moves = any(GroupCall(group).agree(any_moves))
    if any_moves:
        # The entries without target are for other devices: load them again, as torch does.
        loading = LoadOptions(
            options.map_location, weights_only=options.weights_only, verify=False, wants_state=True
        )
        again = load_source(f, loading, options.storage_options, group)
        if moves:
            rest = {key: each for key, each in items_of(again) if key in names}
    return RestoredEntries(rest, report)


def _keys_of(result: Any) -> IncompatibleKeys | None:
    """Return the keys that `load_state_dict` returned, or None if it returned no keys."""
    if isinstance(result, IncompatibleKeys):
        return result
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(missing, list) or not isinstance(unexpected, list):
        return None
    return IncompatibleKeys(missing, unexpected, getattr(result, "mismatched_keys", None))


def _check_entries(obj: Any, targets: Mapping[str, Any]) -> None:
    if not isinstance(obj, dict):
        raise TypeError(
            f"the file holds {type(obj).__name__}, not a dict with an entry for each target: "
            "ptsave.load_into() restores a bare state dict"
        )
    for name in targets:
        if name not in obj:
            import difflib

            near = difflib.get_close_matches(name, [str(key) for key in obj], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(repr(key) for key in list(obj)[:8])
            raise KeyError(f"the checkpoint has no entry {name!r}, only {known}{hint}")


# ------------------------------------------------------------------------------- the targets


class Target(NamedTuple):
    """An object to restore; each of `namings` may have the names of an optimizer's parameters."""

    target: Any
    options: RestoreOptions
    renaming: Renaming | None
    namings: Sequence[Named]

    def check(self, state: Any, copier: Copier) -> None:
        """Raise each error of `load` that can be foreseen, without any change to the target."""
        target, options = self.target, self.options
        if isinstance(target, nn.Module):
            check_module(
                target,
                self._renamed(state),
                options.strict,
                copier,
                ignore_mismatched_sizes=options.ignore_mismatched_sizes,
            )
        elif isinstance(target, Optimizer):
            from ptsave.state.optimizers import check_optimizer

            check_optimizer(target, state, copier, self._matching(state, []))
        elif isinstance(target, Mapping):
            from ptsave.state.nested_state import check_mapping

            check_mapping(target, state, options.strict)
        else:
            _check_type(target)

    def load(self, state: Any, copier: Copier) -> Any:
        """Load a state dict into the target, and return what ``load_state_dict`` would return."""
        target, options = self.target, self.options
        if isinstance(target, nn.Module):
            return load_module(
                target,
                self._renamed(state),
                options.strict,
                options.assign,
                copier,
                ignore_mismatched_sizes=options.ignore_mismatched_sizes,
                check_first=True,
            )
        if isinstance(target, Optimizer):
            return self._load_optimizer(target, state, copier)
        if isinstance(target, Mapping):
            from ptsave.state.nested_state import load_mapping

            return load_mapping(target, state, options.strict, copier)
        _check_type(target)
        copier.show({"": state})
        return target.load_state_dict(state)

    def _load_optimizer(self, target: Optimizer, state: Any, copier: Copier) -> Any:
        from ptsave.state.optimizer_matching import UnmatchedParameters
        from ptsave.state.optimizers import load_optimizer

        mismatched: list[Mismatch] = []
        result = load_optimizer(
            target, state, copier, self._matching(state, mismatched), in_place=True
        )
        if isinstance(result, UnmatchedParameters):
            return IncompatibleKeys(result.missing, result.unexpected, mismatched)
        return IncompatibleKeys([], [], mismatched) if mismatched else result

    def _matching(self, state: Any, mismatched: list[Mismatch]) -> Matching:
        from ptsave.state.optimizer_matching import Matching, is_name_keyed

        match = self.options.match
        by_name = match == "name" or (match is None and is_name_keyed(state))
        return Matching(
            match,
            namings=self.namings if by_name else None,
            rename=self.renaming if by_name else None,
            strict=self.options.strict,
            mismatched=mismatched if self.options.ignore_mismatched_sizes else None,
        )

    def _renamed(self, state: Any) -> Any:
        if self.renaming is None or not isinstance(state, Mapping):
            return state
        from ptsave.state.renaming import renamed

        return renamed(state, self.renaming)


def _check_type(target: Any) -> None:
    if isinstance(target, type) or not callable(getattr(target, "load_state_dict", None)):
        name = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(
            f"cannot restore into {name}: expected a module, an optimizer, a dict or an object "
            "with load_state_dict()"
        )


def names_of_modules(modules: Iterable[nn.Module]) -> list[Named]:
    """Return each module's named parameters twice: with the components of wrappers, and without."""
    from ptsave.state.optimizer_matching import bare_name

    found: list[Named] = []
    all_named: list[tuple[str, Tensor]] = []
    all_bare: list[tuple[str, Tensor]] = []
    for module in modules:
        named = [*module.named_parameters(remove_duplicate=False)]
        bare = [(bare_name(module, name), param) for name, param in named]
        found += [named, bare]
        all_named += named
        all_bare += bare
    return [*found, all_named, all_bare] if len(found) > 2 else found


def key_mappings(key_mapping: KeyMapping | None, targets: Mapping[str, Any]) -> dict[str, Renaming]:
    """Return the `Renaming` for each module and optimizer among the targets.

    `key_mapping` applies to all of them, or maps the names of targets to one mapping for each.
    """
    if key_mapping is None:
        return {}
    from ptsave.state.renaming import Renaming

    def renaming(rename: Any) -> Renaming:
        if not (callable(rename) or isinstance(rename, Mapping)):
            raise TypeError(
                f"key_mapping must be a function or a mapping of names, not {type(rename).__name__}"
            )
        return Renaming(rename)

    named = {name for name, each in targets.items() if isinstance(each, (nn.Module, Optimizer))}
    by_target: Any = key_mapping
    if not isinstance(by_target, Mapping) or not any(
        isinstance(value, Mapping) or callable(value) for value in by_target.values()
    ):
        return dict.fromkeys(named, renaming(key_mapping))
    for name in by_target:
        if name not in named:
            raise TypeError(
                f"key_mapping names {name!r}, which is neither a module nor an optimizer among the "
                "targets"
            )
    return {name: renaming(rename) for name, rename in by_target.items()}


# ---------------------------------------------------- advice: the part that fits the target


def refuse_module(state: Any) -> None:
    """Raise TypeError if `state` is a module itself, and not its state dict."""
    if isinstance(state, nn.Module):
        raise TypeError(
            f"the file holds a module that was saved whole ({type(state).__name__}), not a state "
            "dict: load the module with ptsave.load(), and use its state_dict()"
        )


@contextmanager
def part_named(obj: Any, target: Any) -> Iterator[None]:
    """If the `with` block raises an error about keys, add which part of `obj` fits `target`."""
    try:
        yield
    except RuntimeError as error:
        is_plain = type(error) is RuntimeError and not hasattr(error, "overwritten")
        message = str(error)
        if is_plain and "key(s) in state_dict" in message:
            sentence = _advice(obj, target)
            if sentence:
                error.args = (f"{message}\n\t{sentence}",)
        raise
    except KeyError as error:
        if not isinstance(target, Optimizer) or error.args not in [("param_groups",), ("state",)]:
            raise
        from ptsave.state.nested_state import optimizer_advice

        missing = error.args[0]
        words = f"the file does not hold an optimizer's state dict: it has no {missing!r}"
        raise KeyError(". ".join(filter(None, (words, optimizer_advice(obj, target))))) from None


def warn_if_nothing_fits(obj: Any, target: Any, keys: Any) -> None:
    """Warn if `obj` has none of the target's keys, but a dict inside `obj` has them."""
    missing = getattr(keys, "missing_keys", None)
    if not missing or not isinstance(obj, Mapping) or not isinstance(target, (nn.Module, Mapping)):
        return
    if not {*obj}.intersection(_names_of(target)):
        sentence = _advice(obj, target)
        if sentence:
            message = f"nothing was loaded: the file has none of the target's keys. {sentence}"
            warn_user(message, CheckpointWarning)


def _advice(obj: Any, target: Any) -> str:
    if not isinstance(target, (nn.Module, Mapping)):
        return ""
    from ptsave.state.nested_state import advice

    return advice(obj, _names_of(target), "model" if isinstance(target, nn.Module) else "target")


def _names_of(target: Any) -> Iterable[str]:
    if isinstance(target, nn.Module):
        return [*dict(target.named_parameters()), *dict(target.named_buffers())]
    return [key for key in target if isinstance(key, str)]
