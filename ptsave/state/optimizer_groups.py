"""Matches saved parameters with the optimizer's by order, and makes the new groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ptsave.state.copying import Copier

_ATOMS = {int, str, float, bool, type(None)}


class UnmatchedParameters(NamedTuple):
    """The parameters that have no partner.

    Attributes
    ----------
    missing : list of str
        Parameters of the optimizer that were not saved, in its order.
    unexpected : list of str
        Saved parameters that the optimizer does not have, in saved order.

    Examples
    --------
    >>> import ptsave
    >>> ptsave.UnmatchedParameters(missing=["head.weight"], unexpected=[])
    UnmatchedParameters(missing=['head.weight'], unexpected=[])
    """

    missing: list[str]
    unexpected: list[str]


@dataclass
class Assignment:
    """Saved ids assigned to parameters, and the new groups; nothing has been changed yet."""

    params: dict[Hashable, Tensor]  # by saved id
    groups: list[dict[str, Any]]  # as the optimizer is to have them
    kept: list[Tensor] = field(default_factory=list)  # parameters whose present state stays
    dropped: set[Hashable] = field(default_factory=set)  # saved ids whose state is left out
    unmatched: UnmatchedParameters | None = None

    def leave_out(self, param_id: Hashable) -> None:
        """Let a parameter keep its present state."""
        self.kept.append(self.params.pop(param_id))
        self.dropped.add(param_id)


def match_by_order(optimizer: Any, saved_groups: Any, copier: Copier) -> Assignment:
    """Match groups and parameters by place, with the checks of `Optimizer.load_state_dict`."""
    groups = optimizer.param_groups
    saved_groups = copy_plainly(saved_groups, copier)
    if len(groups) != len(saved_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    sizes = (len(group["params"]) for group in groups)
    saved_sizes = (len(group["params"]) for group in saved_groups)
    if any(size != saved for size, saved in zip(sizes, saved_sizes, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group "
            "that doesn't match the size of optimizer's group"
        )
    saved_ids = chain.from_iterable(group["params"] for group in saved_groups)
    params = chain.from_iterable(group["params"] for group in groups)
    by_id = dict(zip(saved_ids, params, strict=True))
    for group, new_group in zip(groups, saved_groups, strict=True):
        new_group["params"] = group["params"]
        if "param_names" in group and "param_names" not in new_group:
            new_group["param_names"] = group["param_names"]
    return Assignment(by_id, saved_groups)


def copy_plainly(groups: Any, copier: Copier) -> Any:
    """Return a `deepcopy` of a group or groups that copies plain lists of ids or names at once."""
    each = groups if type(groups) in (list, tuple) else [groups]
    show_unless_plain(each, copier)  # tensors are copied with their values
    copies: dict[int, Any] = {}
    for group in each:
        for value in group.values() if type(group) is dict else ():
            if type(value) is list and _is_plain(value):
                copies[id(value)] = value.copy()
    return deepcopy(groups, copies)


def show_unless_plain(groups: Iterable[Any], copier: Copier) -> None:
    """Show the copier groups that are about to be looked at, if they may hold tensors."""
    if not all(type(group) is dict and all(map(_is_plain, group.values())) for group in groups):
        copier.show({"param_groups": groups})


def _is_plain(value: Any) -> bool:
    """Return whether a hyper-parameter is a number, a string or a flat sequence of these."""
    if type(value) in (list, tuple):
        return set(map(type, value)) <= _ATOMS
    return type(value) in _ATOMS


def is_torchs(optimizer: Optimizer, method: str) -> bool:
    """Return whether ``torch.optim`` alone defines this method of an optimizer's class."""
    return all(
        f"{owner.__module__}.".startswith("torch.optim.")
        for owner in type(optimizer).__mro__
        if method in vars(owner)
    )
