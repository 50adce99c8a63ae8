"""Casts the state of one parameter for an optimizer: dtypes, devices, containers.

torch decides on each tensor's dtype and device; it is asked with a stand-in, because the bytes may
not have arrived. For each tensor, torch searches all groups for the parameter, so it gets only the
parameter's group.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ptsave.state.copying import Copier
from ptsave.state.optimizer_groups import Assignment
from ptsave.support.torch_modules import optimizer_policy
from ptsave.support.torch_tensors import has_internal_overlap, storage_id
from ptsave.tree.containers import items_of

_TORCHS_POLICY = optimizer_policy()
_TORCHS_TYPES = (Tensor, Parameter)
# For these types, a search through a group finds the same as a look-up by hash.
_PLAIN_IDS = (int, str)
# Iterating over any other container runs code that is neither Python's nor torch's.
_PLAIN_CONTAINERS = {
    *(dict, OrderedDict, defaultdict, list, tuple, set, frozenset),
    *(str, bytes, bytearray, range, torch.Size),
}


class _Destination:
    """Stands in for a tensor, because torch's policy only calls `to` on it, if anything."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def to(self, *, device: torch.device, dtype: torch.dtype | None = None) -> _Destination:
        self.dtype, self.device = dtype, device
        return self


class _Owner(NamedTuple):
    """The parameter that a state belongs to, and the groups that torch gets."""

    param: Tensor
    param_id: Any
    groups: Any


class PresentState:
    """The tensors in an optimizer's state, and which of them can take loaded values."""

    def __init__(self, optimizer: Optimizer, saved_state: Mapping[Any, Any]) -> None:
        present = list(_tensors_in(list(optimizer.state.values())))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # Tensors that share memory would be filled twice; ones shared in the file stay shared.
        self._shared = _overlapping([*present, *params], _address)
        self._shared |= _overlapping(_tensors_in(list(saved_state.values())), _place_in_storage)
        self._state = dict(optimizer.state)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def take(self, param: Tensor) -> Any:
        """Return a parameter's present state, but only once: a group may have it twice."""
        return self._state.pop(param, None)

    def fill(
        self,
        present: Any,
        value: Tensor,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> Tensor | None:
        """Return `present`, and note the copy for later, if it can hold the converted `value`."""
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

    Tensors in `present` are filled in place; if it is None, all state is new.
    """

    def __init__(self, param_groups: Any, copier: Copier, present: PresentState | None) -> None:
        self._param_groups = param_groups
        self._group_of = _index_groups(param_groups)
        self._copier = copier
        self._present = present
        self._policy = optimizer_policy()

    def cast(self, saved: Any, assignment: Assignment) -> dict[Any, Any]:
        """Return the state of the optimizer's parameters, cast from the saved one."""
        state: dict[Any, Any] = defaultdict(dict)
        # Only a mapping has items; for anything else Python says so, as under torch.
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
        dtype, device = _destination(owner, key)
        if self._present is not None:
            target = self._present.fill(present, value, dtype, device)
            if target is not None:
                return target
        return value if device is None else self._copier.convert(value, dtype, device)


def _destination(owner: _Owner, key: Hashable) -> tuple[torch.dtype | None, torch.device | None]:
    """Return torch's dtype and device for a tensor with this key; None for one that stays."""
    ask: Any = _TORCHS_POLICY
    answer = ask(owner.param, _Destination(), owner.param_id, owner.groups, key)
    return answer.dtype, answer.device


def _index_groups(param_groups: Any) -> dict[Any, dict[Any, Any]]:
    """Return each id's first group, or nothing if a search could find another."""
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

_Place = tuple[int, int]  # the memory a tensor is in, and the address of its first byte there


def _tensors_in(obj: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested plain containers; those of shared containers come twice."""
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
    """Return a tensor's address; an equal one on another device costs a copy and nothing else."""
    return 0, tensor.data_ptr()


def _place_in_storage(tensor: Tensor) -> _Place:
    """Return a tensor's storage and its offset there; the tensor may have no memory yet.

    Two storages of a file never share memory.
    """
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset()) * tensor.itemsize


def _overlapping(tensors: Iterable[Tensor], place: Callable[[Tensor], _Place]) -> set[int]:
    """Return the `id` of every tensor whose range of bytes overlaps that of another one."""
    spans = sorted(
        (*place(tensor), _extent(tensor), id(tensor)) for tensor in tensors if _has_bytes(tensor)
    )
    overlapping: set[int] = set()
    memory, end, last = 0, 0, 0
    for this_memory, begin, nbytes, identity in spans:
        if this_memory != memory:
            memory, end = this_memory, 0
        if begin < end:
            overlapping |= {last, identity}
        if begin + nbytes > end:
            end, last = begin + nbytes, identity
    return overlapping


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


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first one to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


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
