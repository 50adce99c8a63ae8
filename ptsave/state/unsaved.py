"""Finds the tensors of a module that its state dict does not have."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ptsave.support.torch_tensors import storage_id_of
from ptsave.tree.containers import is_container, walk, walk_entries

_OF_TORCH = frozenset(vars(nn.Module()))  # tables of parameters, buffers, hooks


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
    for path, part in module.named_modules(seen, prefix):
        dot = f"{path}." if path else ""
        yield from part.named_parameters(path, recurse=False)
        yield from part.named_buffers(path, recurse=False)
        attributes = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
        for _, between, key, value, _, _ in walk_entries(attributes, is_container):
            name = f"{dot}{between}{key}"
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, nn.Module):
                yield from _tensors_of(value, name, seen)
