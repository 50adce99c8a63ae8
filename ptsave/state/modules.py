"""`load_state_dict` of modules with an early check, and the tensors that state dicts lack."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave.state.copying import Copier, Mismatch, no_mapping_error, tensors_in
from ptsave.state.module_loading import Checking, Loading, Report
from ptsave.state.trusted_loading import (
    gives_lists_away,
    may_run_others_code,
    overrides_load_state_dict,
)
from ptsave.support.torch_modules import METADATA, post_hooks_of
from ptsave.support.torch_modules import IncompatibleKeys as TorchsIncompatibleKeys
from ptsave.support.torch_names import storage_id_of
from ptsave.tree.containers import is_container, items_of, walk, walk_entries


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
        Whether the module gets the tensors themselves instead of copies of their values.
    ignore_mismatched_sizes : bool, default False
        Whether entries whose shape differs from the module's are left out.  Their parameters and
        buffers keep their values, and the result names them.

    Returns
    -------
    torch.nn.modules.module._IncompatibleKeys
        The keys ``(missing_keys, unexpected_keys)``; with `ignore_mismatched_sizes`, an
        `IncompatibleKeys`, which has ``mismatched_keys`` too.

    Raises
    ------
    RuntimeError
        With torch's message: keys are missing or unexpected, shapes differ, or entries are no
        tensors.  As in torch, everything else has been loaded by then.
    TypeError
        If `state_dict` is not a mapping.
    ValueError
        If `ignore_mismatched_sizes` is used with a module that overrides ``load_state_dict``.

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
    if not isinstance(state_dict, Mapping):
        raise no_mapping_error(state_dict)
    entries: OrderedDict[str, Any] = OrderedDict(items_of(state_dict))  # other code may change it
    metadata = getattr(state_dict, METADATA, None)
    if metadata is not None:
        setattr(entries, METADATA, metadata)
    loading = Loading(metadata, assign, copier, ignore_mismatched_sizes)
    if check_first:

        def check() -> None:
            checking = Checking(metadata, copier, ignore_mismatched_sizes)
            checking.copies = not assign
            _check(module, entries, strict, checking)
            if tensors_in(metadata):  # hooks and overrides get their part of it
                copier.show({METADATA: metadata})

        loading.check = check
        # Assigning is done at once, and effects of others' code cannot be undone.
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
    """Raise the errors that `load_module` is certain to raise, changing nothing."""
    if overrides_load_state_dict(module):
        return
    if not isinstance(state_dict, Mapping):
        raise no_mapping_error(state_dict)
    metadata = getattr(state_dict, METADATA, None)
    _check(module, state_dict, strict, Checking(metadata, copier, ignore_mismatched_sizes))


def _check(module: nn.Module, entries: Mapping[str, Any], strict: bool, checking: Checking) -> None:
    """Raise the errors that no hook or override can prevent."""
    checking.load(module, OrderedDict(items_of(entries)), "")
    if not (checking.errors or checking.missing or checking.unexpected):
        return
    # Hooks and overrides may declare that nothing is missing; they cannot change sizes.
    keys_are_final = not any(
        post_hooks_of(each) or gives_lists_away(each) for each in module.modules()
    )
    certain = strict and keys_are_final
    if not (checking.errors or certain):
        return
    if not (checking.is_complete and keys_are_final):
        report = Report(checking.metadata, checking.lender, checking.skip_mismatched)
        report.run(module, entries, strict)
    checking.raise_errors(module, certain)


# ------------------------------------------------------------------------- unsaved tensors


def unsaved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that are in no state dict, and are lost by saving one.

    These are:

    * tensors that are plain attributes, or in lists, tuples and dicts that are attributes;
    * parameters and buffers of modules in such containers, such as a list where an
      :class:`torch.nn.ModuleList` was meant;
    * buffers that are not persistent;
    * parameters that a hook takes out.

    Parameters
    ----------
    module : torch.nn.Module
        The module, whose ``state_dict()`` is called once.

    Returns
    -------
    dict of str to torch.Tensor
        The tensors themselves by dotted name, in the order of the modules.  Tensors that share
        memory with one in the state dict are left out, because their values are saved.  Each tensor
        is there once, under its first name.

    Raises
    ------
    TypeError
        If it is no module.

    Notes
    -----
    Not every such tensor is a mistake: a mask or a table that ``__init__`` computes again does not
    have to be saved.  Tensors in objects of other types are not looked for.

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
    values = walk(module.state_dict(keep_vars=True))  # kept, so that nothing else gets their marks
    saved = {mark for value in values if isinstance(value, Tensor) for mark in _marks_of(value)}
    found: dict[str, Tensor] = {}
    for name, tensor in _tensors_of(module, "", set()):
        if not _marks_of(tensor) & saved:
            found[name] = tensor
            saved.add(id(tensor))
    return found


def _marks_of(tensor: Tensor) -> set[int]:
    """Return numbers that identify a tensor's memory: its `id`, and its storage's number."""
    storage = None if is_lazy(tensor) else storage_id_of(tensor)
    return {id(tensor)} if storage is None else {id(tensor), storage}


def _tensors_of(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a module and of the modules below it, each module once."""
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
