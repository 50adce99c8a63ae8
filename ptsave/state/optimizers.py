"""`load_optimizer_state_dict`: `Optimizer.load_state_dict` in linear time, by order or by name.

It takes torch's steps one by one, but copies nothing before the whole state dict has been checked.
A restore from a file fills a tensor in place if it has the right shape, dtype and device, and
shares no memory with another one or with a parameter.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from torch import Tensor
from torch.optim import Optimizer

from ptsave.state.copying import Copier, CopyNow, LookOnly
from ptsave.state.name_keyed import (
    Named,
    is_flat,
    is_name_keyed,
    names_in,
    refuse_sharded,
    regrouped,
)
from ptsave.state.optimizer_cast import PresentState, StateCaster
from ptsave.state.optimizer_groups import Assignment, UnmatchedParameters, match_by_order
from ptsave.state.optimizer_names import leave_mismatched_out, match_by_name
from ptsave.state.plain_copies import Mismatch
from ptsave.support.torch_modules import optimizer_post_hooks_of, optimizer_pre_hooks_of

_LOAD_STATE_DICT = Optimizer.load_state_dict


@overload
def load_optimizer_state_dict(
    optimizer: Any,
    state_dict: Mapping[str, Any],
    *,
    match: Literal["order"] = "order",
) -> None: ...


@overload
def load_optimizer_state_dict(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    match: Literal["name"],
    names: Sequence[str] | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    strict: bool = True,
) -> UnmatchedParameters: ...


def load_optimizer_state_dict(
    optimizer: Any,
    state_dict: Mapping[str, Any],
    *,
    match: Literal["order", "name"] = "order",
    names: Sequence[str] | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    strict: bool = True,
) -> Any:
    """Load an optimizer's state, as ``optimizer.load_state_dict(state_dict)`` does.

    torch searches all groups for each value of the state, so its time grows with the square of
    the number of parameters; here it grows with the number.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer to load into.  If it overrides `load_state_dict`, that method is called.
    state_dict : dict
        As from ``optimizer.state_dict()``.
    match : {"order", "name"}, default "order"
        Rule that pairs saved parameters with the optimizer's: the same place, as in torch, or the
        same name, in any place.
    names : sequence of str, optional
        With ``match="name"``: the names of the saved parameters, in saved order, one group after
        the other.  By default the names in the file: an optimizer that was made from
        ``model.named_parameters()`` saves them.
    named_parameters : iterable of (str, Tensor), optional
        With ``match="name"``: the names of the optimizer's parameters, as from
        ``model.named_parameters()``.  Parameters that the optimizer does not have are ignored.  By
        default the optimizer's own names.
    strict : bool, default True
        With ``match="name"``: whether it is an error if a parameter is only in the optimizer or
        only in the state dict.

    Returns
    -------
    UnmatchedParameters or None
        None, as from torch, with ``match="order"``.  With ``match="name"`` the names of the
        parameters that are only in the optimizer (`missing`) and only in the state dict
        (`unexpected`), both empty with ``strict=True``.

    Raises
    ------
    ValueError
        As from torch if groups or their sizes differ.  With ``match="name"``: names are missing or
        there twice, the parameters of a group come from saved groups with different
        hyper-parameters, or an LBFGS has other parameters or another order.
    RuntimeError
        With ``match="name"``: parameters without a partner (``strict=True``), and state whose
        shape is not the parameter's.

    Notes
    -----
    The optimizer changes only after everything above has been checked.

    By name, each group takes the hyper-parameters of the saved group that its parameters come
    from, and keeps its own if none of its parameters was saved.  A parameter that is missing keeps
    its present state, and one that is unexpected is left out.  The optimizer's names stay.
    Shapes are checked for the state of torch's own optimizers.  For any other optimizer they are
    checked where it has present state to compare with.

    Examples
    --------
    >>> import torch, ptsave
    >>> def make(*names):
    ...     parameters = [(name, torch.nn.Parameter(torch.ones(2))) for name in names]
    ...     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    >>> saved = make("bias", "weight")
    >>> for parameter in saved.param_groups[0]["params"]:
    ...     parameter.grad = torch.ones(2)
    >>> saved.step()
    >>> optimizer = make("weight", "head", "bias")
    >>> ptsave.load_optimizer_state_dict(
    ...     optimizer, saved.state_dict(), match="name", strict=False
    ... )
    UnmatchedParameters(missing=['head'], unexpected=[])
    >>> len(optimizer.state)
    2
    """
    matching = Matching(match, names, named_parameters, strict=strict)
    return load_optimizer(optimizer, state_dict, CopyNow(), matching)


def load_optimizer(
    optimizer: Any,
    state_dict: Any,
    copier: Copier,
    matching: Matching | None = None,
    *,
    in_place: bool = False,
) -> Any:
    """Load as `load_optimizer_state_dict` does, from bytes that may not have arrived yet.

    `copier` decides when bytes move, and is told before any code may look at them. With `in_place`,
    tensors in the optimizer's state that have the right shape, dtype and device are filled, so that
    they stay the same objects.
    """
    matching = Matching() if matching is None else matching
    matching.check()
    if _overrides_load_state_dict(optimizer):
        if matching.match == "name":
            raise TypeError(
                f"{type(optimizer).__name__} has a load_state_dict() of its own, which matches "
                'parameters in its own way: use match="order"'
            )
        _show(copier, state_dict)
        return optimizer.load_state_dict(state_dict)
    matching = matching.resolved(optimizer, state_dict)
    if matching.match != "order":
        state_dict = regrouped(state_dict)
    state_dict = _run_pre_hooks(optimizer, state_dict, copier)
    param_groups = state_dict["param_groups"]
    assignment = matching.assign(optimizer, state_dict, copier)
    saved_state = state_dict["state"]
    if type(saved_state) not in (dict, OrderedDict, defaultdict):
        _show(copier, saved_state)
    present = PresentState(optimizer, saved_state) if in_place else None
    state = StateCaster(param_groups, copier, present).cast(saved_state, assignment)
    for param in assignment.kept:
        if param in optimizer.state:
            state[param] = optimizer.state[param]
    if present is not None and present.copies:
        copier.copy(present.copies)
    _set_state(optimizer, {"state": state, "param_groups": assignment.groups}, copier)
    return assignment.unmatched


@dataclass(frozen=True)
class Matching:
    """The rule that pairs saved parameters with an optimizer's.

    The fields are those of `load_optimizer_state_dict`, but `match` may be None. Then parameters
    match by name if the file has names in place of numbers, in any form of
    torch.distributed.checkpoint, and something names the optimizer's parameters; otherwise by
    order. `namings` are ways of naming these beside the optimizer's own names. `rename` leaves out
    a saved parameter if it returns None. `mismatched` gets state of other shapes, which is then
    left out; if it is None, they are an error (by order, torch loads them).
    """

    match: Literal["order", "name"] | None = "order"
    names: Sequence[str] | None = None
    named_parameters: Iterable[tuple[str, Tensor]] | None = None
    namings: Sequence[Named] | None = None
    rename: Callable[[str], str | None] | None = None
    strict: bool = True
    mismatched: list[Mismatch] | None = None

    def check(self) -> None:
        """Raise ValueError for options that contradict each other."""
        if self.match not in (None, "order", "name"):
            raise ValueError(f'match must be "order" or "name", not {self.match!r}')
        if self.match == "order" and (self.names is not None or self.named_parameters is not None):
            raise ValueError('names and named_parameters are only looked at with match="name"')

    def resolved(self, optimizer: Any, state_dict: Mapping[Any, Any]) -> Matching:
        """Return this, or matching by order if nothing names the optimizer's parameters."""
        names_any = self.namings or self.named_parameters is not None or self.rename is not None
        groups = optimizer.param_groups
        if self.match is not None or names_any or is_flat(state_dict):
            return self
        if any("param_names" in group for group in groups):
            return self
        return replace(self, match="order")

    def assign(self, optimizer: Any, state_dict: Any, copier: Copier) -> Assignment:
        """Match the parameters of a state dict with the optimizer's."""
        is_keyed = self._goes_by_keys(state_dict)
        if self.match == "name" or (self.match is None and is_keyed):
            if is_keyed:
                refuse_sharded(optimizer, self._all_named(), state_dict["state"])
            return match_by_name(
                optimizer,
                state_dict,
                copier,
                names=names_in(state_dict) if is_keyed else self.names,
                named_parameters=self.named_parameters,
                strict=self.strict,
                rename=self.rename,
                as_torch=self.match is None,
                mismatched=self.mismatched,
                namings=self.namings,
            )
        assignment = match_by_order(optimizer, state_dict["param_groups"], copier)
        if self.mismatched is not None:
            leave_mismatched_out(assignment, optimizer, state_dict["state"], self.mismatched)
        return assignment

    def _goes_by_keys(self, state_dict: Any) -> bool:
        """Return whether names are in place of numbers, and no other names are given."""
        if self.match == "order" or self.names is not None or not is_name_keyed(state_dict):
            return False
        groups = state_dict["param_groups"]
        return self.namings is not None or not any("param_names" in group for group in groups)

    def _all_named(self) -> Iterable[tuple[str, Tensor]]:
        return [pair for named in self.namings or () for pair in named]


def check_optimizer(
    optimizer: Any, state_dict: Any, copier: Copier, matching: Matching | None = None
) -> None:
    """Raise the errors that `load_optimizer` is certain to raise, changing nothing."""
    if _overrides_load_state_dict(optimizer):
        return
    matching = Matching() if matching is None else matching
    has_hooks = optimizer_pre_hooks_of(optimizer)
    if not has_hooks and type(state_dict) in (dict, OrderedDict):
        skipped: list[Mismatch] | None = None if matching.mismatched is None else []
        matching = matching.resolved(optimizer, state_dict)
        trial = replace(matching, mismatched=skipped)
        trial.check()
        state_dict = state_dict if matching.match == "order" else regrouped(state_dict)
        _check_keys(optimizer, state_dict)
        trial.assign(optimizer, state_dict, LookOnly(copier))


def _check_keys(optimizer: Any, state_dict: Mapping[Any, Any]) -> None:
    """Raise KeyError, as torch does, for a state dict that is not an optimizer's."""
    lacking = [key for key in ("param_groups", "state") if key not in state_dict]
    if lacking:
        raise KeyError(
            f"{lacking[0]!r} is not in it, so it is no state of an optimizer, which "
            f"{type(optimizer).__name__} needs"
        )


def _overrides_load_state_dict(optimizer: Any) -> bool:
    return getattr(optimizer.load_state_dict, "__func__", None) is not _LOAD_STATE_DICT


def _show(copier: Copier, obj: Any) -> None:
    copier.show(obj if isinstance(obj, dict) else {"state_dict": obj})


def _run_pre_hooks(optimizer: Any, state_dict: Any, copier: Copier) -> Any:
    hooks = optimizer_pre_hooks_of(optimizer)
    if hooks or type(state_dict) not in (dict, OrderedDict):
        _show(copier, state_dict)
    state_dict = state_dict.copy()
    for pre_hook in hooks.values():
        result = pre_hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    return state_dict


def _set_state(optimizer: Any, new: dict[str, Any], copier: Copier) -> None:
    # From here on the optimizer has its new state, so all of its values must be there.
    copier.show(new)
    optimizer.__setstate__(new)
    for post_hook in optimizer_post_hooks_of(optimizer).values():
        post_hook(optimizer)
