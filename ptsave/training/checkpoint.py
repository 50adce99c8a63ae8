"""Saves objects that have a state under names, and restores them in place."""

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
    """Restore a state dict from a file straight into the tensors of `target`.

    The bytes go from the file into the existing parameters, buffers and states, without a second
    copy in memory.  Only conversions to another dtype or device need extra memory: 32 MiB, or one
    tensor, at a time.  Before the first byte is overwritten, ptsave checks the keys, the shapes,
    and the sizes and places of records.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        Any source of :func:`ptsave.load` that holds a bare state dict.
    target : torch.nn.Module, torch.optim.Optimizer or dict
        The object to restore.  In a dict, and in dicts and lists inside it, tensors are filled and
        other values are replaced.  Any other object with a ``load_state_dict`` gets the state dict.
    strict : bool, default True
        Whether missing and unexpected keys are an error.  For an optimizer, this has an effect only
        when parameters are matched by name.
    assign : bool, default False
        As for :meth:`torch.nn.Module.load_state_dict`: the module gets the loaded tensors.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`, but the target's tensors stay where they are.
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
        another shape keeps its present state.
    match : {"order", "name"}, optional
        For an optimizer, as for :func:`ptsave.load_optimizer_state_dict`.  None matches by name if
        the file has parameters' names where torch.optim puts numbers, and otherwise by order.
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` writes such names, with
        and without ``flatten_optimizer_state_dict``.  As with ``set_optimizer_state_dict``, such a
        file may lack a parameter that needs no gradient, and may have parameters that the optimizer
        does not have.
    key_mapping : callable or mapping, optional
        Changes names in the file to names of the module's entries or the optimizer's parameters,
        like `rename` of :func:`ptsave.load_model`.  It is a function of a name, or a mapping whose
        keys are whole names or some components of names.  The new name None leaves an entry out.
    named_parameters : iterable of (str, Tensor), optional
        Names for an optimizer's parameters, if the optimizer was made without names.  Names in the
        file may lack the components that FSDP, torch.compile and activation checkpointing add, and
        the ``module.`` of DistributedDataParallel.
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
        As from :meth:`torch.nn.Module.load_state_dict`, but nothing has been overwritten.  If a
        part of the checkpoint fits the target, the message names that part.
    KeyError
        The target is an optimizer, and the file does not hold the state dict of an optimizer.  If
        a part of the file is one, the message names that part.
    CorruptCheckpointError
        The file is damaged.  If part of the target has been overwritten already, the message names
        the entries that hold the file's values.  Any exception that stops a restore halfway also
        has these names in its attribute ``overwritten``.

    Notes
    -----
    Code of the model (hooks, an overridden ``_load_from_state_dict``, extra state, tensor
    subclasses) sees the same values as under torch.  When the code of a module runs, the module's
    entries are in memory, and the modules before it have been restored.

    An archive in a local file or in memory is read straight into the target.  Other sources are
    first loaded and then copied: URLs, other file objects, safetensors files, and checkpoints of
    several files.  With `process_group`, the contents of a URL also go straight into the target,
    and are converted on the way; this needs 40 MiB beside the target.  Tensors are also loaded
    first with ``assign=True``, or if unpickling the object may look at their values.

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
            if copier.is_shared:  # otherwise the load itself checks
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
    """Raise for arguments in the order of `load_model`, and for options unfit for the target."""
    if isinstance(target, (str, os.PathLike)) and hasattr(f, "state_dict"):
        raise TypeError("the arguments are in the wrong order: load_into(file, target)")
    is_module, is_optimizer = isinstance(target, nn.Module), isinstance(target, Optimizer)
    if options.assign and not is_module:
        raise TypeError("assign=True is for modules: nothing else assigns tensors")
    if options.match is not None and not is_optimizer:
        raise TypeError("match is for optimizers: everything else has names")
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
    **objects: Any,
) -> None:
    """Save named objects; an object that has a ``state_dict`` method is saved as its state dict.

    The file is a dict of these names, which :func:`torch.load` can read.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        File to write: a path, a URL or a file-like object.
    fsync, atomic, progress, storage_options, weights_only_check
        As for :func:`ptsave.save`.
    **objects : object
        Models, optimizers, schedulers, and anything that can be saved.  The names of options are
        not allowed.

    Raises
    ------
    TypeError
        An object has the name of an option, or an option of another function is among the objects
        (``pickle_protocol=4``).
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
    save_with(entries_of(objects), f, options)


class RestoredEntries(dict[str, Any]):
    """A dict of the checkpoint's entries that have no target, with a report on the targets.

    Attributes
    ----------
    report : dict of str to IncompatibleKeys
        The keys that did not match, for each restored module, optimizer and dict, by its name.
        The checkpoint lacks the ``missing_keys``, and the target lacks the ``unexpected_keys``.
        The ``mismatched_keys`` were left out because their shapes differ; each comes with the shape
        in the checkpoint and the shape in the target.  The keys of an optimizer are names of
        parameters, or their saved numbers if parameters were matched by order.  A module has no
        report if it overrides ``load_state_dict`` and that method returns no keys.

    Notes
    -----
    This dict is equal to a plain dict of its entries.  It is pickled as an `OrderedDict` without
    the report, so that ``weights_only=True`` can load it.

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
    """Restore objects in place from a checkpoint, and return its other entries.

    All targets are checked, as far as possible, before anything is overwritten.  Modules are
    restored first, then optimizers, then the other targets, each in the order of the arguments.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A file of :func:`ptsave.save_checkpoint`, or any other file that holds a dict with a state
        dict for each target, such as ``{"model_state_dict": ..., "epoch": 3}``.
    strict, map_location, weights_only, verify, progress, storage_options, process_group
        As for :func:`ptsave.load_into`.
    assign
        As for :func:`ptsave.load_into`, for the modules among the targets.
    ignore_mismatched_sizes, match, key_mapping, device, rename
        As for :func:`ptsave.load_into`, for the modules and optimizers among the targets.  The
        names of an optimizer's parameters come from the optimizer, or from the modules among the
        targets.  `key_mapping` may also map the name of each target to its own renaming:
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
        A target has the name of an option, or cannot be restored.  An option of another function
        is among the targets (``mmap=True``).
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
    """Load as :func:`load_checkpoint` does, for targets with any names."""
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
                    keys = IncompatibleKeys([], [])  # matched by order: all or nothing
                if keys is not None:
                    report[name] = keys
        finally:
            del obj
        names = set(rest)
        if moves:
            rest.clear()
    any_moves = bool(moves)  # on any rank
    if has_others(group):
        from ptsave.support.group_call import GroupCall

        any_moves = any(GroupCall(group).agree(any_moves))
    if any_moves:
        # These entries belong on another device: load them again, by torch's rules for devices.
        loading = LoadOptions(
            options.map_location, weights_only=options.weights_only, verify=False, wants_state=True
        )
        again = load_source(f, loading, options.storage_options, group)
        if moves:
            rest = {key: each for key, each in items_of(again) if key in names}
    return RestoredEntries(rest, report)


def _keys_of(result: Any) -> IncompatibleKeys | None:
    """Return the missing and unexpected keys in a load's result, or None if it has no such keys."""
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
    """An object to restore; `namings` are further names for an optimizer's parameters."""

    target: Any
    options: RestoreOptions
    renaming: Renaming | None
    namings: Sequence[Named]

    def check(self, state: Any, copier: Copier) -> None:
        """Raise the errors that `load` is certain to raise, and change nothing."""
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
        """Load a state dict into the target in place, and return the result of that load."""
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
    """Return each module's named parameters, and all modules' together, each also as bare names."""
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
    """Return the renaming of each module and optimizer among the targets.

    `key_mapping` is one renaming for all of them, or a mapping of targets' names to renamings.
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
    """Raise if the file holds a whole module where a state dict is expected."""
    if isinstance(state, nn.Module):
        raise TypeError(
            f"the file holds a module that was saved whole ({type(state).__name__}), not a state "
            "dict: get it with ptsave.load(), and load its state_dict()"
        )


@contextmanager
def part_named(obj: Any, target: Any) -> Iterator[None]:
    """Add advice to errors about keys: the name of the part of `obj` that fits `target`."""
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
        words = f"the file holds no state dict of an optimizer: it has no {missing!r}"
        raise KeyError(". ".join(filter(None, (words, optimizer_advice(obj, target))))) from None


def warn_if_nothing_fits(obj: Any, target: Any, keys: Any) -> None:
    """Warn if the file has none of the target's keys, but an entry of the file has them."""
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
