"""Loads state dicts into optimizers in linear time, by order or by name.

The steps are the same as in `Optimizer.load_state_dict`, but nothing is copied before the whole
state dict has been checked.  A restore from a file fills a tensor of the present state in place if
its shape, dtype and device are right, and it shares no memory with other state or a parameter.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ptsave.state.copying import Copier, LookOnly, Mismatch, overlapping
from ptsave.state.optimizer_matching import Assignment, Matching, UnmatchedParameters, regrouped
from ptsave.support.torch_modules import (
    optimizer_policy,
    optimizer_post_hooks_of,
    optimizer_pre_hooks_of,
)
from ptsave.support.torch_names import has_internal_overlap, storage_id
from ptsave.tree.containers import items_of
from ptsave.tree.extents import span_of

_LOAD_STATE_DICT = Optimizer.load_state_dict
_TORCHS_POLICY = optimizer_policy()
_TORCHS_TYPES = (Tensor, Parameter)
# With ids of these types, a search through the groups and a look-up in a dict find the same group.
_PLAIN_IDS = (int, str)
# Iterating over a container of another type may run code from outside Python and torch.
_PLAIN_CONTAINERS = {
    *(dict, OrderedDict, defaultdict, list, tuple, set, frozenset),
    *(str, bytes, bytearray, range, torch.Size),
}


@overload
def load_optimizer_state_dict(
    optimizer: Any, state_dict: Mapping[str, Any], *, match: Literal["order"] = "order"
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
    the number of parameters.  The time of this function grows linearly.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer to load into.  If it overrides `load_state_dict`, that method is called.
    state_dict : dict
        A state dict, as from ``optimizer.state_dict()``.
    match : {"order", "name"}, default "order"
        Rule that pairs saved parameters with the optimizer's parameters: by position, as in torch,
        or by name, in any order.
    names : sequence of str, optional
        With ``match="name"``: the names of the saved parameters, in saved order, one group after
        the other.  The default is the names in the state dict, which has names if its optimizer
        was made from ``model.named_parameters()``.
    named_parameters : iterable of (str, Tensor), optional
        With ``match="name"``: the names of the optimizer's parameters, as from
        ``model.named_parameters()``.  Parameters that the optimizer does not have are ignored.
        The default is the optimizer's own names.
    strict : bool, default True
        With ``match="name"``: whether a parameter that is only in the optimizer, or only in the
        state dict, is an error.

    Returns
    -------
    UnmatchedParameters or None
        With ``match="order"``: None, as in torch.  With ``match="name"``: the names of the
        parameters that are only in the optimizer (`missing`) or only in the state dict
        (`unexpected`).  With ``strict=True`` both lists are empty.

    Raises
    ------
    ValueError
        As in torch, if the number of groups or their sizes differ.  With ``match="name"``: names
        are missing or occur twice, or the parameters of a group come from saved groups with
        different hyper-parameters, or an LBFGS does not have the saved parameters in saved order.
    RuntimeError
        With ``match="name"``: a parameter is missing or unexpected (``strict=True``), or its saved
        state has the wrong shape.

    Notes
    -----
    All errors above are raised before the optimizer changes.

    With ``match="name"``, each group gets the hyper-parameters of the saved group that contained
    its parameters.  If none of its parameters was saved, the group keeps its own hyper-parameters.
    A missing parameter keeps its present state.  An unexpected parameter is left out.  The
    optimizer's parameters keep their names.  Shapes are checked for torch's own optimizers.  For
    other optimizers, a shape is checked if the parameter has present state to compare with.

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
    return load_optimizer(optimizer, state_dict, Copier(), matching)


def load_optimizer(
    optimizer: Any,
    state_dict: Any,
    copier: Copier,
    matching: Matching | None = None,
    *,
    in_place: bool = False,
) -> Any:
    """Load as `load_optimizer_state_dict` does, but the tensors' bytes may not have been read yet.

    `copier` decides when bytes are read. This function calls `copier.show` before code outside
    ptsave may read values. With `in_place`, present tensors of the right shape, dtype and device
    are filled instead of being replaced.
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
    new = {"state": state, "param_groups": assignment.groups}
    copier.show(new)  # the optimizer gets its new state now, so all values must be there
    optimizer.__setstate__(new)
    for post_hook in optimizer_post_hooks_of(optimizer).values():
        post_hook(optimizer)
    return assignment.unmatched


def check_optimizer(
    optimizer: Any, state_dict: Any, copier: Copier, matching: Matching | None = None
) -> None:
    """Raise the errors that `load_optimizer` is sure to raise, and change nothing."""
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
        for key in ("param_groups", "state"):
            if key not in state_dict:
                raise KeyError(
                    f"the state dict has no {key!r}, so it is not an optimizer's state dict, which "
                    f"{type(optimizer).__name__} needs"
                )
        trial.assign(optimizer, state_dict, LookOnly(copier))


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


# -------------------------------------------------------------------- the state of one parameter
# torch's `optimizer_policy` decides each tensor's dtype and device.  It gets a stand-in for the
# tensor, because the bytes may not have been read.  Its time grows with the number of groups that
# it gets, so it gets only the parameter's group.


class _Destination:
    """A stand-in for a tensor; it records the dtype and device that `optimizer_policy` wants."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def to(self, *, device: torch.device, dtype: torch.dtype | None = None) -> _Destination:
        self.dtype, self.device = dtype, device
        return self


class _Owner(NamedTuple):
    """A state's parameter with its saved id, and the groups to pass to `optimizer_policy`."""

    param: Tensor
    param_id: Any
    groups: Any


class PresentState:
    """The present tensors in an optimizer's state; some can be filled with loaded values."""

    def __init__(self, optimizer: Optimizer, saved_state: Mapping[Any, Any]) -> None:
        present = list(_tensors_in(list(optimizer.state.values())))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # Tensors that share memory are not filled: present ones would be filled twice, and saved
        # ones must stay shared.
        self._shared = overlapping(_spans([*present, *params], _address))
        saved = _tensors_in(list(saved_state.values()))
        self._shared |= overlapping(_spans(saved, _place_in_storage))
        self._state = dict(optimizer.state)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def take(self, param: Tensor) -> Any:
        """Return a parameter's state once, then None, because groups may repeat a parameter."""
        return self._state.pop(param, None)

    def fill(
        self, present: Any, value: Tensor, dtype: torch.dtype | None, device: torch.device | None
    ) -> Tensor | None:
        """Note a copy of `value` into `present`; return `present`, or None if they do not fit."""
        if type(present) not in _TORCHS_TYPES or not _is_writable(present):
            return None
        dtype = value.dtype if dtype is None else dtype
        device = value.device if device is None else device
        if (present.shape, present.dtype, present.device) != (value.shape, dtype, device):
            return None
        if value.layout is not torch.strided or value.is_meta or value.requires_grad:
            return None
        if id(present) in self._shared or id(value) in self._shared:
            return None
        self.copies.append((present, value))
        filled: Tensor = present
        return filled


class StateCaster:
    """Casts the state of all parameters as `Optimizer.load_state_dict` does.

    Tensors in `present` are filled in place; if `present` is None, all state is new.
    """

    def __init__(self, param_groups: Any, copier: Copier, present: PresentState | None) -> None:
        self._param_groups = param_groups
        self._group_of = _index_groups(param_groups)
        self._copier = copier
        self._present = present
        self._policy = optimizer_policy()

    def cast(self, saved: Any, assignment: Assignment) -> dict[Any, Any]:
        """Return the state of the optimizer's parameters, cast from the saved state."""
        state: dict[Any, Any] = defaultdict(dict)
        # If `saved` is not a mapping, `items()` raises the same error as in torch.
        for param_id, value in items_of(saved) if isinstance(saved, Mapping) else saved.items():
            if param_id in assignment.params:
                param = assignment.params[param_id]
                state[param] = self._cast_state(param, param_id, value)
            elif param_id not in assignment.dropped:
                state[param_id] = value
        return state

    def _cast_state(self, param: Tensor, param_id: Any, state: Any) -> Any:
        groups = self._param_groups
        if type(param_id) in _PLAIN_IDS and param_id in self._group_of:
            groups = [{**self._group_of[param_id], "params": (param_id,)}]
        present = self._present.take(param) if self._present is not None else None
        return self._cast(_Owner(param, param_id, groups), state, None, present)

    def _cast(self, owner: _Owner, value: Any, key: Hashable, present: Any) -> Any:
        if isinstance(value, Tensor):
            return self._cast_tensor(owner, value, key, present)
        if not isinstance(value, Iterable):
            return value
        if type(value) not in _PLAIN_CONTAINERS:
            self._copier.show({key: value})
        if isinstance(value, dict):
            before = present if type(present) is dict else {}
            return {k: self._cast(owner, v, k, before.get(k)) for k, v in items_of(value)}
        rebuild: Any = type(value)
        return rebuild(self._cast(owner, v, None, None) for v in value)

    def _cast_tensor(self, owner: _Owner, value: Tensor, key: Hashable, present: Any) -> Tensor:
        if self._policy is not _TORCHS_POLICY or type(value) not in _TORCHS_TYPES:
            self._copier.show({key: value})
            return self._policy(owner.param, value, owner.param_id, owner.groups, key)
        ask: Any = _TORCHS_POLICY
        answer = ask(owner.param, _Destination(), owner.param_id, owner.groups, key)
        if self._present is not None:
            target = self._present.fill(present, value, answer.dtype, answer.device)
            if target is not None:
                return target
        if answer.device is None:
            return value
        return self._copier.convert(value, answer.dtype, answer.device)


def _index_groups(param_groups: Any) -> dict[Any, dict[Any, Any]]:
    """Return each parameter id's first group; an empty dict if torch could find another group."""
    index: dict[Any, dict[Any, Any]] = {}
    for group in param_groups:
        if type(group) is not dict or type(group["params"]) not in (list, tuple):
            return {}
        if not {type(param_id) for param_id in group["params"]} <= {*_PLAIN_IDS}:
            return {}
        for param_id in group["params"]:
            index.setdefault(param_id, group)
    return index


# ----------------------------------------------------------------------------------- shared memory

_Place = tuple[int, int]  # a number for a tensor's memory, and the position of its first byte there


def _tensors_in(obj: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested plain containers; visit each container at most twice."""
    pending = [obj]
    n_visits: dict[int, int] = defaultdict(int)
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (dict, OrderedDict, defaultdict, list, tuple):
            n_visits[id(value)] += 1
            if n_visits[id(value)] <= 2:  # a container may hold itself
                pending.extend(dict.values(value) if isinstance(value, dict) else value)


def _address(tensor: Tensor) -> _Place:
    """Return a tensor's address; equal addresses on two devices count as shared memory."""
    return 0, tensor.data_ptr()


def _place_in_storage(tensor: Tensor) -> _Place:
    """Return the number of a tensor's storage, and the tensor's offset there, in bytes.

    The storage may have no memory yet.  Two storages of a file never share memory.
    """
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.itemsize


def _spans(
    tensors: Iterable[Tensor], place: Callable[[Tensor], _Place]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield memory, begin, end and `id` of each tensor that has bytes."""
    for tensor in tensors:
        if _has_bytes(tensor):
            memory, begin = place(tensor)
            if tensor.is_contiguous():
                nbytes = tensor.nbytes
            else:
                first, end = span_of(tensor)
                nbytes = end - first
            yield memory, begin, begin + nbytes, id(tensor)


def _has_bytes(tensor: Tensor) -> bool:
    return (
        not is_lazy(tensor)
        and _is_real(tensor)
        and (
            type(tensor) in _TORCHS_TYPES
            or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        )
        and tensor.numel() > 0
    )


def _is_real(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _is_writable(tensor: Tensor) -> bool:
    """Return whether a copy into a tensor cannot fail, and writes each element once."""
    return (
        _is_real(tensor)
        and not (tensor.is_inference() or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and (tensor.is_contiguous() or has_internal_overlap(tensor) == 0)
    )
