"""Loads state dicts into modules in linear time, and finds tensors that state dicts lack.

torch searches a module's state dict once for each child. ptsave divides the dict among the children
in one pass. It copies a module's own entries itself if torch would run no user code, and would
only call ``copy_``. Otherwise it calls the module's own method, so that errors, warnings and calls
are the same as in torch.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from ptsave.state.copying import (
    Copier,
    LookOnly,
    Mismatch,
    ModulePlan,
    Replacement,
    are_plain,
    differ,
    mismatch_message,
    no_mapping_error,
    no_tensor_message,
    plan_module,
    raise_load_errors,
    tensors_in,
)
from ptsave.state.lazy_buffers import lazy_buffer_hooks, new_buffer
from ptsave.state.trusted_loading import (
    assigns_plainly,
    begin_plainly,
    gives_lists_away,
    hooks_that_look,
    may_run_others_code,
    overrides_load_state_dict,
    own_tensors,
    run_trusted_code,
    runs_torchs_method,
    sets_extra_state,
)
from ptsave.support.torch_modules import (
    EXTRA_STATE_KEY_SUFFIX,
    METADATA,
    buffers_of,
    children_of,
    load_method_of,
    post_hooks_of,
    pre_hooks_of,
    register_pre_hook,
)
from ptsave.support.torch_modules import IncompatibleKeys as TorchsIncompatibleKeys
from ptsave.support.torch_names import modes_are_active, storage_id_of
from ptsave.tree.containers import is_container, items_of, walk, walk_entries


class IncompatibleKeys(TorchsIncompatibleKeys):
    """torch's ``(missing_keys, unexpected_keys)`` with a list of the keys whose shapes differ.

    Attributes
    ----------
    mismatched_keys : list of (str, torch.Size, torch.Size)
        Key, shape in the state dict and shape in the module.
    """

    mismatched_keys: list[Mismatch]

    def __new__(
        cls,
        missing_keys: list[str],
        unexpected_keys: list[str],
        mismatched_keys: list[Mismatch] | None = None,
    ) -> IncompatibleKeys:
        keys: IncompatibleKeys = super().__new__(cls, missing_keys, unexpected_keys)
        keys.mismatched_keys = [] if mismatched_keys is None else mismatched_keys
        return keys

    def __repr__(self) -> str:
        if not self.mismatched_keys:
            return super().__repr__()
        return (
            f"IncompatibleKeys(missing_keys={self.missing_keys!r}, "
            f"unexpected_keys={self.unexpected_keys!r}, mismatched_keys={self.mismatched_keys!r})"
        )

    __str__ = __repr__


def load_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
    *,
    ignore_mismatched_sizes: bool = False,
) -> TorchsIncompatibleKeys:
    """Load a state dict into a module as ``module.load_state_dict`` does, but in linear time.

    Hooks, overridden methods, extra state, metadata, warnings and messages work as in torch.

    Parameters
    ----------
    module : torch.nn.Module
        The module to load into.
    state_dict : Mapping of str to object
        A state dict, as from :meth:`torch.nn.Module.state_dict`.  It is not changed.
    strict : bool, default True
        Whether missing and unexpected keys are an error.
    assign : bool, default False
        Whether the module gets the tensors themselves instead of copies of their values.
    ignore_mismatched_sizes : bool, default False
        Whether to skip entries whose shape differs from the module's.  The module's parameters and
        buffers keep their values then, and the result names the skipped entries.

    Returns
    -------
    torch.nn.modules.module._IncompatibleKeys
        The keys ``(missing_keys, unexpected_keys)``; with `ignore_mismatched_sizes`, an
        `IncompatibleKeys`, which has ``mismatched_keys`` too.

    Raises
    ------
    RuntimeError
        Shapes differ, entries are not tensors, or, with `strict`, keys are missing or unexpected.
        As in torch, all other entries are loaded before the error is raised, with torch's message.
    TypeError
        If `state_dict` is not a mapping.
    ValueError
        If `ignore_mismatched_sizes` is used with a module that overrides ``load_state_dict``.

    Notes
    -----
    If `module` overrides ``load_state_dict``, its method is called, with the argument `assign` only
    if `assign` is True.  `ignore_mismatched_sizes` has no effect on a ``_load_from_state_dict``
    that does not call the method of its base class.

    Examples
    --------
    >>> import torch, ptsave
    >>> pretrained, model = torch.nn.Linear(3, 10), torch.nn.Linear(3, 2)
    >>> keys = ptsave.load_state_dict(
    ...     model, pretrained.state_dict(), ignore_mismatched_sizes=True
    ... )
    >>> keys.mismatched_keys[1]
    ('bias', torch.Size([10]), torch.Size([2]))
    """
    skips = ignore_mismatched_sizes
    return load_module(module, state_dict, strict, assign, Copier(), ignore_mismatched_sizes=skips)


def load_module(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool,
    assign: bool,
    copier: Copier,
    *,
    ignore_mismatched_sizes: bool = False,
    check_first: bool = False,
) -> TorchsIncompatibleKeys:
    """Load as `load_state_dict` does; `copier` decides when the values arrive.

    With `check_first`, the errors that are sure to occur are raised before user code runs, because
    reading values for that code may overwrite targets.
    """
    if overrides_load_state_dict(module):
        if ignore_mismatched_sizes:
            raise ValueError(
                f"{type(module).__name__} has its own load_state_dict, which does not support "
                "ignore_mismatched_sizes: remove the entries with other shapes from the state dict"
            )
        copier.show(state_dict)
        options = {"assign": assign} if assign else {}
        result: TorchsIncompatibleKeys = module.load_state_dict(state_dict, strict, **options)
        return result
    if not isinstance(state_dict, Mapping):
        raise no_mapping_error(state_dict)
    entries: OrderedDict[str, Any] = OrderedDict(items_of(state_dict))  # user code may edit it
    metadata = getattr(state_dict, METADATA, None)
    if metadata is not None:
        setattr(entries, METADATA, metadata)
    loading = Loading(metadata, assign, copier, ignore_mismatched_sizes)
    if check_first:

        def check() -> None:
            checking = Checking(metadata, LookOnly(copier), ignore_mismatched_sizes)
            checking.copies = not assign
            _check(module, entries, strict, checking)
            if tensors_in(metadata):  # hooks and overrides get the metadata of their module
                copier.show({METADATA: metadata})

        loading.check = check
        # Tensors are assigned at once, and the effects of user code cannot be undone.
        if assign or may_run_others_code(module):
            loading.check_first()
    loading.load(module, entries, "")
    loading.raise_errors(module, strict)
    if ignore_mismatched_sizes:
        return IncompatibleKeys(loading.missing, loading.unexpected, loading.mismatched)
    return TorchsIncompatibleKeys(loading.missing, loading.unexpected)


def check_module(
    module: nn.Module,
    state_dict: Any,
    strict: bool,
    copier: Copier,
    *,
    ignore_mismatched_sizes: bool = False,
) -> None:
    """Raise the errors that `load_module` is sure to raise, and change nothing."""
    if overrides_load_state_dict(module):
        return
    if not isinstance(state_dict, Mapping):
        raise no_mapping_error(state_dict)
    metadata = getattr(state_dict, METADATA, None)
    checking = Checking(metadata, LookOnly(copier), ignore_mismatched_sizes)
    _check(module, state_dict, strict, checking)


def _check(module: nn.Module, entries: Mapping[str, Any], strict: bool, checking: Checking) -> None:
    """Raise the errors that no hook or override can prevent."""
    checking.load(module, OrderedDict(items_of(entries)), "")
    if not (checking.errors or checking.missing or checking.unexpected):
        return
    # Hooks and overrides may edit the lists of keys, but they cannot change shapes.
    keys_are_final = not any(
        post_hooks_of(each) or gives_lists_away(each) for each in module.modules()
    )
    certain = strict and keys_are_final
    if not (checking.errors or certain):
        return
    if not (checking.is_complete and keys_are_final):
        report = Report(checking.metadata, checking.copier, checking.skip_mismatched)
        report.run(module, entries, strict)
    checking.raise_errors(module, certain)


# ------------------------------------------------------------------------- unsaved tensors


def unsaved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that its state dict does not contain, so a save loses them.

    These are:

    * tensors in plain attributes, also in attributes that are lists, tuples or dicts;
    * parameters and buffers of modules in such containers, for example in a list that should be a
      :class:`torch.nn.ModuleList`;
    * buffers that are not persistent;
    * parameters that a hook removes from the state dict.

    Parameters
    ----------
    module : torch.nn.Module
        The module, whose ``state_dict()`` is called once.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors themselves, not copies, by dotted name, in the order of the modules.  A tensor
        that shares memory with a tensor in the state dict is left out, because its values are
        saved.  Each tensor occurs once, under its first name.

    Raises
    ------
    TypeError
        If `module` is not a module.

    Notes
    -----
    Not every such tensor is a mistake: a mask or a table that ``__init__`` computes again need not
    be saved.  Tensors in objects of other types are not found.

    Examples
    --------
    >>> import torch, ptsave
    >>> class Memory(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = torch.nn.Parameter(torch.ones(2))
    ...         self.seen = torch.zeros(2)
    ...         self.heads = [torch.nn.Linear(2, 1, bias=False)]
    >>> list(ptsave.unsaved_tensors(Memory()))
    ['seen', 'heads.0.weight']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(module).__name__}")
    values = walk(module.state_dict(keep_vars=True))  # kept alive, so that no `id` is reused
    saved = {mark for value in values if isinstance(value, Tensor) for mark in _marks_of(value)}
    found: dict[str, Tensor] = {}
    for name, tensor in _tensors_of(module, "", set()):
        if not _marks_of(tensor) & saved:
            found[name] = tensor
            saved.add(id(tensor))
    return found


def _marks_of(tensor: Tensor) -> set[int]:
    """Return the numbers that identify a tensor: its `id`, and the id of its storage."""
    storage = None if is_lazy(tensor) else storage_id_of(tensor)
    return {id(tensor)} if storage is None else {id(tensor), storage}


def _tensors_of(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a module and of the modules below it; visit each module once."""
    of_torch = vars(nn.Module())  # tables of parameters, buffers, hooks
    for path, part in module.named_modules(seen, prefix):
        dot = f"{path}." if path else ""
        yield from part.named_parameters(path, recurse=False)
        yield from part.named_buffers(path, recurse=False)
        attributes = {key: value for key, value in vars(part).items() if key not in of_torch}
        for _, between, key, value, _, _ in walk_entries(attributes, is_container):
            name = f"{dot}{between}{key}"
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, nn.Module):
                yield from _tensors_of(value, name, seen)


# ------------------------------------------------------------------------------ one load


class StateDictPart:
    """The entries of a state dict for one module, and the groups of entries for its children.

    A hook may keep the dict of entries and edit it before a later child loads; in torch, that child
    sees the change. So a kept dict is divided into groups again whenever user code has run.
    """

    __slots__ = ("_grouped_at", "_groups", "entries", "is_kept", "prefix")

    _groups: dict[str, dict[str, Any]] | None

    def __init__(self, entries: dict[str, Any], prefix: str) -> None:
        self.entries = entries
        self.prefix = prefix
        self.is_kept = False  # whether user code refers to the dict, and may edit it
        self._grouped_at = -1

    def groups(self, foreign_runs: int) -> dict[str, dict[str, Any]] | None:
        """Return the entries of the children, grouped by the child's name.

        `foreign_runs` counts the runs of user code. Returns None if a key is not a plain string.
        """
        if self._grouped_at < 0 or (self.is_kept and self._grouped_at != foreign_runs):
            self._groups = _group(self.entries, self.prefix)
            self._grouped_at = foreign_runs
        return self._groups

    def own_entries(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the module's entries with these `names`, by name without the prefix."""
        entries, prefix = self.entries, self.prefix
        return {name: entries[prefix + name] for name in names if prefix + name in entries}

    def of_child(self, name: str, child_prefix: str, foreign_runs: int) -> dict[str, Any]:
        """Return the entries under `child_prefix` as a new dict, in the order of `entries`."""
        groups = self.groups(foreign_runs)
        if groups is None or type(name) is not str or "." in name:
            items = getattr(self.entries, "unread_items", self.entries.items)()
            return {key: entry for key, entry in items if key.startswith(child_prefix)}
        return groups.pop(name, {})  # removed, so that the child can free the group


def _group(entries: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]] | None:
    groups: dict[str, dict[str, Any]] = {}
    start = len(prefix)
    # A dict that reads entries on demand passes entries to the children without reading them.
    for key, entry in getattr(entries, "unread_items", entries.items)():
        if type(key) is not str:
            return None
        end = key.find(".", start)
        if end >= 0 and key.startswith(prefix):
            name = key[start:end]
            group = groups.get(name)
            if group is None:
                groups[name] = {key: entry}
            else:
                group[key] = entry
    return groups


# Makes the new tensor of a lazy buffer, from the module, the present tensor and the saved one.
_MakeBuffer = Callable[[nn.Module, "Tensor | None", Tensor], Tensor]


def _like(module: nn.Module, present: Tensor | None, saved: Tensor) -> Tensor:
    """Return the saved tensor, which has the shape that the buffer will have."""
    return saved


class Loading:
    """One load: its options, and the missing, unexpected and mismatched keys found so far.

    This class never reads values, because a `Copier` decides when values arrive. Before user code
    runs (hooks, overrides, extra state, tensor subclasses), this class calls `Copier.show` with the
    entries that the code can reach.
    """

    copies = True  # whether entries will be copied into the present tensors
    calls_others = True  # whether the load calls hooks and overridden methods
    _new_buffer: _MakeBuffer = staticmethod(new_buffer)

    def __init__(self, metadata: Any, assign: bool, copier: Copier, skip_mismatched: bool) -> None:
        self.metadata = metadata
        self.assign = assign
        self.copier = copier
        self.skip_mismatched = skip_mismatched
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self.mismatched: list[Mismatch] = []
        # Counts the runs of user code: each run may edit dicts, and change torch's behavior.
        self.foreign_runs = 0
        self._copies = True
        self._asked_after = -1
        self.check: Callable[[], None] | None = None  # called before user code first runs
        # The future tensors of lazy buffers, by the module's id.
        self._lazy_buffers: dict[int, dict[str, Tensor | None]] = {}

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Load a module and its children, with one Python frame per level, as in torch."""
        part = StateDictPart(entries, prefix)
        if not self._load_own(module, part, self._metadata_at(prefix)):
            return
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                self.load(child, part.of_child(name, child_prefix, self.foreign_runs), child_prefix)
        if self.calls_others and post_hooks_of(module):
            self._run_post_hooks(module)

    def raise_errors(self, module: nn.Module, strict: bool) -> None:
        """Raise torch's error for all problems that were found, if there are any."""
        raise_load_errors(module, self.errors, self.missing, self.unexpected, strict=strict)

    # ---------------------------------------------------------------------- one module's own part

    def _metadata_at(self, prefix: str) -> dict[str, Any]:
        """Return the metadata of the module at a prefix, as torch passes it to the module."""
        metadata: dict[str, Any]
        metadata = {} if self.metadata is None else self.metadata.get(prefix[:-1], {})
        if self.assign:
            metadata["assign_to_params_buffers"] = self.assign
        return metadata

    def _load_own(self, module: nn.Module, part: StateDictPart, metadata: dict[str, Any]) -> bool:
        """Load a module's own entries, and return whether to load its children next."""
        entries, prefix = part.entries, part.prefix
        found = begin_plainly(module, entries, prefix, metadata)
        if found is None or (found[1] and not self.calls_others):
            return self._load_by_others(module, part, metadata)
        own, has_extra_state = found
        assigns = metadata.get("assign_to_params_buffers", False)
        make = _like if assigns else self._new_buffer
        lazy_buffers = self._plan_lazy_buffers(module, entries, prefix, make)
        if lazy_buffers:
            own = own_tensors(module, lazy_buffers)
        plan, plainly = None, False
        if self._copies_itself() and assigns:
            plainly = assigns_plainly(module)
        elif self._copies_itself():
            plan = plan_module(
                own, entries, prefix, skip_mismatched=self.skip_mismatched, copies=self.copies
            )
        if plan is None:
            self._load_by_torch(module, own, part, metadata, has_extra_state, plainly=plainly)
            return True
        if lazy_buffers:
            self._copy_lazy_buffers(module, lazy_buffers, plan)
        if plan.copies:
            self.copier.copy(plan.copies)
        self.missing += plan.missing
        self.mismatched += plan.mismatched
        self.errors += plan.errors
        n_found = len(own) - len(plan.missing)
        n_found += self._load_extra_state(module, own, part, has_extra_state)
        self._find_unexpected(module, own, part, n_found)
        return True

    def _plan_lazy_buffers(
        self, module: nn.Module, entries: dict[str, Any], prefix: str, make: _MakeBuffer
    ) -> dict[str, Tensor | None]:
        """Return the future tensors of the module's lazy buffers that will change.

        If a module occurs several times in the model, later calls start from the earlier plan.
        """
        if not pre_hooks_of(module):
            return {}
        planned = self._lazy_buffers.setdefault(id(module), {})
        for hook in lazy_buffer_hooks(module):
            name = hook.name
            present = planned[name] if name in planned else buffers_of(module).get(name)
            saved = hook.wanted(entries, prefix + name, present)
            if saved is not present:
                planned[name] = None if saved is None else make(module, present, saved)
        return planned

    def _copy_lazy_buffers(
        self, module: nn.Module, lazy_buffers: dict[str, Tensor | None], plan: ModulePlan
    ) -> None:
        """Move the copies into new lazy buffers from `plan.copies` to `Copier.replace`."""
        sources = {id(target): source for target, source in plan.copies}
        for name, new in lazy_buffers.items():
            if new is None or id(new) in sources:
                source = None if new is None else sources[id(new)]
                self.copier.replace(Replacement(buffers_of(module), name, new, source))
        new_ones = {id(new) for new in lazy_buffers.values()}
        plan.copies = [each for each in plan.copies if id(each[0]) not in new_ones]

    def _copies_itself(self) -> bool:
        """Return whether no torch mode or option changes copies, so that ptsave may make them."""
        if self._asked_after != self.foreign_runs:
            self._asked_after = self.foreign_runs
            swaps = torch.__future__.get_swap_module_params_on_conversion()
            self._copies = not (swaps or modes_are_active())
        return self._copies

    def _load_by_torch(
        self,
        module: nn.Module,
        own: dict[str, Tensor],
        part: StateDictPart,
        metadata: dict[str, Any],
        has_extra_state: bool,
        *,
        plainly: bool,
    ) -> None:
        """Let torch's code load the module; first `show` entries that user code may see."""
        names = [*own, EXTRA_STATE_KEY_SUFFIX] if has_extra_state else [*own]
        found = part.own_entries(names)
        seen = {part.prefix + name: entry for name, entry in found.items()}
        # Without `assign`, values may still be unread: show them, even if `metadata` says assign.
        plainly &= self.assign
        plainly &= all(are_plain(own.get(name), entry) for name, entry in found.items())
        if seen and not plainly:
            self._show(seen)
        elif seen:
            self.copier.note_assigned(seen)
        part.entries.update(seen)  # values replace stand-ins
        self._lazy_buffers.pop(id(module), None)  # torch calls the buffers' hooks
        self._call_torch(module, part, metadata)

    def _load_extra_state(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, is_set: bool
    ) -> int:
        """Load a module's extra state; return 1 if `part` has a separate entry for it, else 0."""
        key = part.prefix + EXTRA_STATE_KEY_SUFFIX
        found = key in part.entries
        if is_set:
            if found:
                seen = {key: part.entries[key]}
                self._show(seen)
                module.set_extra_state(seen[key])
            else:
                self.missing.append(key)
        elif found:
            self.unexpected.append(key)
        return int(found and EXTRA_STATE_KEY_SUFFIX not in own)

    def _find_unexpected(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, n_found: int
    ) -> None:
        """Note the unexpected keys; `n_found` counts the entries that the module itself loads."""
        entries, prefix = part.entries, part.prefix
        if len(entries) == n_found:
            return
        groups = part.groups(self.foreign_runs)
        modules = children_of(module)
        if groups is not None and all(name in modules for name in groups):
            n_found += sum(map(len, groups.values()))
            if len(entries) == n_found:
                return
        extra_state_key = prefix + EXTRA_STATE_KEY_SUFFIX
        for key in entries:
            if key.startswith(prefix) and key != extra_state_key:
                name, dot, _ = key[len(prefix) :].partition(".")
                if name not in (modules if dot else own):
                    self.unexpected.append(key)

    # ---------------------------------------------------------------------------------- user code

    def check_first(self) -> None:
        """Raise the errors that are sure to occur; later calls do nothing."""
        if self.check is not None:
            self.check()
            self.check = None

    def _load_by_others(
        self, module: nn.Module, part: StateDictPart, metadata: dict[str, Any]
    ) -> bool:
        """Load a module's own entries with the module's own method."""
        self.check_first()
        part.entries = self.copier.show_dict(part.entries)
        self._note_foreign_run()
        self._call_torch(module, part, metadata)
        return True

    def _run_post_hooks(self, module: nn.Module) -> None:
        keys = TorchsIncompatibleKeys(self.missing, self.unexpected)
        for hook in post_hooks_of(module).values():
            self._show({})
            if hook(module, keys) is not None:  # let torch raise its own error
                other = nn.Module()
                other.register_load_state_dict_post_hook(lambda *_: True)
                other.load_state_dict({})

    def _show(self, entries: dict[str, Any]) -> None:
        self.check_first()
        self.copier.show(entries)
        self._note_foreign_run()

    def _note_foreign_run(self) -> None:
        self._lazy_buffers.clear()  # the planned tensors have replaced the buffers
        self.foreign_runs += 1

    def _call_torch(self, module: nn.Module, part: StateDictPart, metadata: dict[str, Any]) -> None:
        """Call the module's own method, and note whether user code keeps the dict of entries."""
        n_references = sys.getrefcount(part.entries)
        with self._skipping_mismatched(module):
            load_method_of(module)(
                part.entries,
                part.prefix,
                metadata,
                True,
                self.missing,
                self.unexpected,
                self.errors,
            )
        part.is_kept = (
            sys.getrefcount(part.entries) > n_references
            or weakref.getweakrefcount(part.entries) > 0
        )

    @contextlib.contextmanager
    def _skipping_mismatched(self, module: nn.Module) -> Iterator[None]:
        """Skip entries whose shape differs while the module's own method runs.

        A pre-hook replaces such entries with the module's own tensors. It runs last, so it sees the
        same entries as torch. A tensor that is copied to itself keeps its value, and its key is
        neither missing nor unexpected.
        """
        if not self.skip_mismatched:
            yield
            return
        replaced: list[tuple[dict[str, Any], str, Any]] = []

        lazy = {hook.name for hook in lazy_buffer_hooks(module)}

        def replace(entries: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, target in own_tensors(module).items():
                key = prefix + name
                if key in entries and name not in lazy and differ(target, entries[key]):
                    replaced.append((entries, key, entries[key]))
                    self.mismatched.append((key, entries[key].shape, target.shape))
                    entries[key] = target

        handle = register_pre_hook(module, replace)
        try:
            yield
        finally:
            handle.remove()
            for entries, key, entry in replaced:
                entries[key] = entry


class Checking(Loading):
    """Finds the errors of modules that torch's code alone loads, and changes nothing."""

    calls_others = False
    _new_buffer: _MakeBuffer = staticmethod(_like)

    def __init__(self, metadata: Any, copier: Copier, skip_mismatched: bool) -> None:
        super().__init__(metadata, False, copier, skip_mismatched)
        self.is_complete = True

    def _metadata_at(self, prefix: str) -> dict[str, Any]:
        return dict(super()._metadata_at(prefix))

    def _load_by_others(self, *_: Any) -> bool:
        """Skip a module and its children: their errors appear only when the module's code runs."""
        self.is_complete = False
        return False

    def _load_by_torch(
        self,
        module: nn.Module,
        own: dict[str, Tensor],
        part: StateDictPart,
        metadata: dict[str, Any],
        has_extra_state: bool,
        **_: Any,
    ) -> None:
        """Compare keys and shapes; other errors appear only when torch's code runs."""
        prefix = part.prefix
        found = part.own_entries(own)
        self.missing += [prefix + name for name in own if name not in found]
        for name, entry in found.items():
            if not is_tensor_like(entry):
                self.errors.append(no_tensor_message(prefix + name, entry))
            elif differ(own[name], entry) and not self.skip_mismatched:
                self.errors.append(mismatch_message(prefix + name, own[name], entry))
        n_found = len(found) + self._load_extra_state(module, own, part, has_extra_state)
        self._find_unexpected(module, own, part, n_found)


class _UnknownMethodError(Exception):
    """Raised for a module with its own load method, whose errors appear only when it runs."""


class Report(Checking):
    """Finds all errors that torch would list; used after one error has become certain.

    Nothing is copied, but hooks run as in torch, because they may rename entries and edit the lists
    of keys.
    """

    def run(self, module: nn.Module, entries: Mapping[str, Any], strict: bool) -> None:
        """Raise one error for all problems; return if some are unknown, or if hooks solved all."""
        with contextlib.suppress(_UnknownMethodError):
            self.load(module, OrderedDict(items_of(entries)), "")
            self.raise_errors(module, strict)

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        metadata = self._metadata_at(prefix)
        if not runs_torchs_method(module, entries, prefix, metadata):
            raise _UnknownMethodError
        part = StateDictPart(entries, prefix)
        part.is_kept = True  # hooks may keep the dict
        run_trusted_code(module, entries, prefix, metadata)
        for hook in hooks_that_look(module):
            self._show(entries)
            hook(entries, prefix, metadata, True, self.missing, self.unexpected, self.errors)
        present = buffers_of(module)
        wanted: dict[str, Any] = {
            hook.name: hook.wanted(entries, prefix + hook.name, present.get(hook.name))
            for hook in lazy_buffer_hooks(module)
        }
        own = own_tensors(module, wanted)
        self._load_by_torch(module, own, part, metadata, sets_extra_state(module))
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                self.load(child, part.of_child(name, child_prefix, self.foreign_runs), child_prefix)
        self._run_post_hooks(module)

    def _load_extra_state(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, is_set: bool
    ) -> int:
        key = part.prefix + EXTRA_STATE_KEY_SUFFIX
        found = key in part.entries
        if found != is_set:
            (self.unexpected if found else self.missing).append(key)
        return int(found and EXTRA_STATE_KEY_SUFFIX not in own)
