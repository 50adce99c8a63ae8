"""`load_state_dict` of modules: torch's semantics in time linear in the number of keys.

torch filters the state dict of a module once for each of its children.  Here it is divided among
them in one pass (`StateDictPart`), in the parent's order; otherwise the order is torch's: a
module's own entries, its children, its post-hooks.

* Each module's own entries are loaded here if its ``_load_from_state_dict`` is torch's, it has no
  pre-hooks but those of lazy buffers, torch's modes are off and every entry is copied plainly.
  Otherwise the module's own method is called, before anything of that module was touched, so that
  its errors, warnings and calls are torch's.
* Values may arrive later, because a `Copier` decides when.  So nothing here looks at a value, and
  before other people's code runs (hooks, overrides, extra state, tensor subclasses) the copier is
  shown the entries that this code can reach.
* A hook may keep the dict that it was given and edit it while a later child loads, which torch
  would notice.  Its reference count tells whether anybody keeps it; only then is it divided again,
  and only after other people's code has run.
* Mismatched sizes that are to be ignored are left out of the plan, or, where torch's code runs,
  replaced by the module's own tensors in a last pre-hook: copied to itself, a tensor keeps its
  value and is neither missing nor unexpected.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import is_tensor_like

from ptsave.state.copying import Copier, CopyNothing, CopyNow, Replacement, tensors_in
from ptsave.state.lazy_buffers import lazy_buffer_hooks, new_buffer
from ptsave.state.load_errors import (
    mismatch_message,
    no_tensor_message,
    raise_load_errors,
    require_mapping,
)
from ptsave.state.module_plan import Mismatch, ModulePlan, are_plain, differ, plan_module
from ptsave.state.state_dict_parts import StateDictPart
from ptsave.state.trusted_loading import (
    assigns_plainly,
    gives_lists_away,
    hooks_that_look,
    loads_plainly,
    overrides_load_state_dict,
    own_tensors,
    run_trusted_code,
    runs_torchs_method,
    sets_extra_state,
    takes_part,
)
from ptsave.support.torch_modules import (
    EXTRA_STATE_KEY_SUFFIX,
    buffers_of,
    children_of,
    load_method_of,
    post_hooks_of,
    pre_hooks_of,
    register_pre_hook,
    set_metadata,
)
from ptsave.support.torch_modules import IncompatibleKeys as TorchsIncompatibleKeys
from ptsave.support.torch_tensors import modes_are_active
from ptsave.tree.containers import items_of

__all__ = ["IncompatibleKeys", "check_module", "load_module", "load_state_dict"]


class IncompatibleKeys(TorchsIncompatibleKeys):
    """torch's ``(missing_keys, unexpected_keys)`` with the keys whose shapes differ.

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
    """Copy a state dict into a module, as ``module.load_state_dict`` does, in linear time.

    Hooks, overridden methods, extra state, metadata, warnings and messages are the same.

    Parameters
    ----------
    module : torch.nn.Module
        The module to load into.
    state_dict : Mapping of str to object
        As from :meth:`torch.nn.Module.state_dict`.  It is not changed.
    strict : bool, default True
        Whether missing and unexpected keys are an error.
    assign : bool, default False
        Whether the module gets the tensors themselves, and not copies of their values.
    ignore_mismatched_sizes : bool, default False
        Whether entries whose shape differs from the module's are left out: those parameters and
        buffers keep their values, and the result names them.

    Returns
    -------
    torch.nn.modules.module.TorchsIncompatibleKeys
        The keys ``(missing_keys, unexpected_keys)``; with `ignore_mismatched_sizes`, an
        `IncompatibleKeys`, which has ``mismatched_keys`` too.

    Raises
    ------
    RuntimeError
        With torch's message: keys that are missing or unexpected, shapes that differ, entries that
        are no tensors.  As in torch, everything else has been loaded by then.
    TypeError
        If `state_dict` is not a mapping.
    ValueError
        If `ignore_mismatched_sizes` is asked of a module whose ``load_state_dict`` is overridden.

    Notes
    -----
    An overridden ``load_state_dict`` of `module` itself is called, with `assign` only if it is
    set.  `ignore_mismatched_sizes` does not reach into a ``_load_from_state_dict`` that does not
    call its base class's.

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
    return load_module(module, state_dict, strict, assign, CopyNow(), ignore_mismatched_sizes=skips)


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

    With `check_first`, errors that are certain are raised before other people's code runs, which
    may be when the first values are overwritten.
    """
    if overrides_load_state_dict(module):
        if ignore_mismatched_sizes:
            raise ValueError(
                f"{type(module).__name__} has a load_state_dict of its own, which knows nothing of "
                "ignore_mismatched_sizes: take the entries that do not fit out of the state dict"
            )
        copier.show(state_dict)
        options = {"assign": assign} if assign else {}
        result: TorchsIncompatibleKeys = module.load_state_dict(state_dict, strict, **options)
        return result
    require_mapping(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    entries: OrderedDict[str, Any] = OrderedDict(items_of(state_dict))
    if metadata is not None:
        set_metadata(entries, metadata)
    loading = _Loading(metadata, assign, copier, ignore_mismatched_sizes)
    if check_first:
        checking = _Checking(metadata, copier, ignore_mismatched_sizes)
        checking.copies = not assign

        def check() -> None:
            checking.run(module, entries, strict)
            if any(True for _ in tensors_in(metadata)):  # hooks and overrides get their part of it
                copier.show({"_metadata": metadata})

        loading.check = check
        # Assigning is done at once, and effects of others' code cannot be undone.
        if assign or any(map(takes_part, module.modules())):
            loading.check_first()
    loading.load(module, entries, "")
    loading.raise_errors(module, strict)
    if ignore_mismatched_sizes:
        return IncompatibleKeys(loading.missing, loading.unexpected, loading.mismatched)
    return TorchsIncompatibleKeys(loading.missing, loading.unexpected)


def check_module(module: nn.Module, state_dict: Any, strict: bool, copier: Copier) -> None:
    """Raise the errors that `load_module` is certain to raise, changing nothing."""
    if overrides_load_state_dict(module):
        return
    require_mapping(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    _Checking(metadata, copier, False).run(module, state_dict, strict)


# Makes a lazy buffer of a module from the present one and the entry.
_MakeBuffer = Callable[[nn.Module, "Tensor | None", Tensor], Tensor]


def _like(module: nn.Module, present: Tensor | None, saved: Tensor) -> Tensor:
    """Return a tensor of the shape that the buffer will have."""
    return saved


class _Loading:
    """One load: its options, and the missing, unexpected and mismatched keys found so far."""

    copies = True  # into the tensors that are there, in the end
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
        # Counts the runs of other people's code, which may change any dict that it holds, and how
        # torch behaves.
        self.foreign_runs = 0
        self._copies = True
        self._asked_after = -1
        self.check: Callable[[], None] | None = None  # before the first of those runs
        # Tensors of lazy buffers after the copies, by the module's id.
        self._lazy_buffers: dict[int, dict[str, Tensor | None]] = {}

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """Load a module and its children; one Python frame for each level, as in torch."""
        metadata = {} if self.metadata is None else self.metadata.get(prefix[:-1], {})
        if self.assign:
            metadata["assign_to_params_buffers"] = self.assign
        part = StateDictPart(entries, prefix)
        self._load_own(module, part, metadata)
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                child_entries = part.of_child(name, child_prefix, self.foreign_runs)
                self.load(child, child_entries, child_prefix)
        hooks = post_hooks_of(module)
        if hooks:
            keys = TorchsIncompatibleKeys(self.missing, self.unexpected)
            for hook in hooks.values():
                self._show({})
                if hook(module, keys) is not None:
                    _raise_for_result_of_hook()

    def raise_errors(self, module: nn.Module, strict: bool) -> None:
        """Raise torch's error for all problems that were found, if there are any."""
        raise_load_errors(module, self.errors, self.missing, self.unexpected, strict=strict)

    # ---------------------------------------------------------------------- one module's own part

    def _load_own(self, module: nn.Module, part: StateDictPart, metadata: dict[str, Any]) -> None:
        entries, prefix = part.entries, part.prefix
        if not loads_plainly(module, entries, prefix, metadata):
            self._show(entries)
            self._call_torch(module, part, metadata)
            return
        run_trusted_code(module, entries, prefix, metadata)
        assigns = metadata.get("assign_to_params_buffers", False)
        make = _like if assigns else self._new_buffer
        lazy_buffers = self._plan_lazy_buffers(module, entries, prefix, make)
        own = own_tensors(module, lazy_buffers)
        if not self._copies_itself():
            plan = None
        elif assigns:
            self._load_by_torch(module, own, part, metadata, plainly=assigns_plainly(module))
            return
        else:
            plan = plan_module(
                own, entries, prefix, skip_mismatched=self.skip_mismatched, copies=self.copies
            )
        if plan is None:
            self._load_by_torch(module, own, part, metadata, plainly=False)
            return
        if lazy_buffers:
            self._copy_lazy_buffers(module, lazy_buffers, plan)
        copy = self.copier.copy
        for target, source in plan.copies:
            copy(target, source)
        self.missing += plan.missing
        self.mismatched += plan.mismatched
        self.errors += plan.errors
        n_found = len(own) - len(plan.missing)
        n_found += self._load_extra_state(module, own, entries, prefix)
        self._find_unexpected(module, own, part, n_found)

    def _plan_lazy_buffers(
        self, module: nn.Module, entries: dict[str, Any], prefix: str, make: _MakeBuffer
    ) -> dict[str, Tensor | None]:
        """Return the future tensors of those lazy buffers that change.

        A module that has several places in the model may have been planned for one of them already.
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
        """Make those copies of a plan that are for new buffers."""
        sources = {id(target): source for target, source in plan.copies}
        for name, new in lazy_buffers.items():
            if new is None or id(new) in sources:
                source = None if new is None else sources[id(new)]
                self.copier.replace(Replacement(buffers_of(module), name, new, source))
        new_ones = {id(new) for new in lazy_buffers.values()}
        plan.copies = [each for each in plan.copies if id(each[0]) not in new_ones]

    def _copies_itself(self) -> bool:
        """Return whether copying is just copying now, and nobody wants to see torch do it."""
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
        *,
        plainly: bool,
    ) -> None:
        """Let torch's code load the module, after showing the entries it passes to others' code."""
        entries, prefix = part.entries, part.prefix
        names = [*own, EXTRA_STATE_KEY_SUFFIX] if sets_extra_state(module) else [*own]
        seen = {prefix + name: entries[prefix + name] for name in names if prefix + name in entries}
        # Only where all values are there is nothing to be read first, whatever the metadata says.
        plainly &= self.assign
        plainly &= all(are_plain(own.get(key[len(prefix) :]), seen[key]) for key in seen)
        if seen and not plainly:
            self._show(seen)
        elif seen:
            self.copier.note_assigned(seen)
        self._lazy_buffers.pop(id(module), None)  # torch calls the hooks
        self._call_torch(module, part, metadata)

    def _load_extra_state(
        self, module: nn.Module, own: dict[str, Tensor], entries: dict[str, Any], prefix: str
    ) -> int:
        """Load a module's extra state; returns how many entries that are no tensor's it was."""
        key = prefix + EXTRA_STATE_KEY_SUFFIX
        found = key in entries
        if sets_extra_state(module):
            if found:
                self._show({key: entries[key]})
                module.set_extra_state(entries[key])
            else:
                self.missing.append(key)
        elif found:
            self.unexpected.append(key)
        return int(found and EXTRA_STATE_KEY_SUFFIX not in own)

    def _find_unexpected(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, n_found: int
    ) -> None:
        """Note the keys that belong to neither the module nor a child; `n_found` are its own."""
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

    # ------------------------------------------------------------------------ other people's code

    def check_first(self) -> None:
        """Raise the errors that are certain, unless they have been looked for already."""
        if self.check is not None:
            self.check()
            self.check = None

    def _show(self, entries: dict[str, Any]) -> None:
        self.check_first()
        self.copier.show(entries)
        self._lazy_buffers.clear()  # the planned tensors are in place
        self.foreign_runs += 1

    def _call_torch(self, module: nn.Module, part: StateDictPart, metadata: dict[str, Any]) -> None:
        """Call the module's own method, and note whether anybody keeps the dict it was given."""
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
        """Let entries of other shapes do nothing while the module's own method runs.

        The last pre-hook, which sees the same entries as torch, puts the module's own tensors into
        their places: so nothing is missing, and the tensors are copied to themselves.
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


class _Checking(_Loading):
    """Finds errors in the entries of modules in whose loading only torch takes part."""

    _new_buffer: _MakeBuffer = staticmethod(_like)

    def __init__(self, metadata: Any, lender: Copier, skip_mismatched: bool) -> None:
        super().__init__(metadata, False, CopyNothing(), skip_mismatched)
        self.lender = lender  # knows where the values are, should hooks have to see them
        self._is_complete = True

    def run(self, module: nn.Module, entries: Mapping[str, Any], strict: bool) -> None:
        """Raise the errors that no code of anybody's can prevent."""
        self.load(module, OrderedDict(items_of(entries)), "")
        # Hooks and overrides may declare that nothing is missing; they cannot change sizes.
        keys_are_final = not any(
            post_hooks_of(each) or gives_lists_away(each) for each in module.modules()
        )
        certain = strict and keys_are_final
        if not self.errors and not (certain and (self.missing or self.unexpected)):
            return
        if not (self._is_complete and keys_are_final):
            _Report(self.metadata, self.lender, self.skip_mismatched).run(module, entries, strict)
        self.raise_errors(module, certain)

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        metadata = {} if self.metadata is None else dict(self.metadata.get(prefix[:-1], {}))
        if not loads_plainly(module, entries, prefix, metadata) or sets_extra_state(module):
            self._is_complete = False
            return
        part = StateDictPart(entries, prefix)
        self._load_own(module, part, metadata)
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                self.load(child, part.of_child(name, child_prefix, 0), child_prefix)

    def _load_by_torch(
        self, module: nn.Module, own: dict[str, Tensor], part: StateDictPart, *_: Any, **__: Any
    ) -> None:
        """Compare keys and shapes; other errors appear only when torch's code really runs."""
        entries, prefix = part.entries, part.prefix
        found = {name: entries[prefix + name] for name in own if prefix + name in entries}
        self.missing += [prefix + name for name in own if name not in found]
        for name, entry in found.items():
            if not is_tensor_like(entry):
                self.errors.append(no_tensor_message(prefix + name, entry))
            elif differ(own[name], entry) and not self.skip_mismatched:
                self.errors.append(mismatch_message(prefix + name, own[name], entry))
        n_found = len(found) + self._load_extra_state(module, own, entries, prefix)
        self._find_unexpected(module, own, part, n_found)


class _UnknownMethodError(Exception):
    """A module has a method of its own for loading: only calling it tells which errors it finds."""


class _Report(_Checking):
    """Finds everything that torch would list, now that an error is certain.

    Hooks run as under torch, because they may rename entries and edit the lists of keys, but
    nothing is copied.
    """

    def run(self, module: nn.Module, entries: Mapping[str, Any], strict: bool) -> None:
        """Raise all of it; do nothing where it cannot be known, or hooks have mended it."""
        with contextlib.suppress(_UnknownMethodError):
            self.load(module, OrderedDict(items_of(entries)), "")
            self.raise_errors(module, strict)

    def load(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        metadata = {} if self.metadata is None else dict(self.metadata.get(prefix[:-1], {}))
        if not runs_torchs_method(module, entries, prefix, metadata):
            raise _UnknownMethodError
        part = StateDictPart(entries, prefix)
        part.is_kept = True  # by hooks, maybe
        run_trusted_code(module, entries, prefix, metadata)
        for hook in hooks_that_look(module):
            self._lend(entries)
            hook(entries, prefix, metadata, True, self.missing, self.unexpected, self.errors)
        self._load_by_torch(module, self._own_tensors(module, entries, prefix), part)
        for name, child in children_of(module).items():
            if child is not None:
                child_prefix = prefix + name + "."
                self.load(child, part.of_child(name, child_prefix, self.foreign_runs), child_prefix)
        keys = TorchsIncompatibleKeys(self.missing, self.unexpected)
        for hook in post_hooks_of(module).values():
            self._lend({})
            if hook(module, keys) is not None:
                _raise_for_result_of_hook()

    def _own_tensors(
        self, module: nn.Module, entries: dict[str, Any], prefix: str
    ) -> dict[str, Tensor]:
        present = buffers_of(module)
        wanted: dict[str, Any] = {
            hook.name: hook.wanted(entries, prefix + hook.name, present.get(hook.name))
            for hook in lazy_buffer_hooks(module)
        }
        return own_tensors(module, wanted)

    def _load_extra_state(
        self, module: nn.Module, own: dict[str, Tensor], entries: dict[str, Any], prefix: str
    ) -> int:
        key = prefix + EXTRA_STATE_KEY_SUFFIX
        found = key in entries
        if found != sets_extra_state(module):
            (self.unexpected if found else self.missing).append(key)
        return int(found and EXTRA_STATE_KEY_SUFFIX not in own)

    def _lend(self, entries: dict[str, Any]) -> None:
        self.lender.lend(entries)
        self.foreign_runs += 1


def _raise_for_result_of_hook() -> None:
    """Raise torch's error for a post-hook that returns something, in its version's words."""
    module = nn.Module()
    module.register_load_state_dict_post_hook(lambda *_: True)
    module.load_state_dict({})
