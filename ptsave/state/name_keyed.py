"""Optimizer state under the names of parameters, as torch.distributed.checkpoint has it.

``get_optimizer_state_dict`` writes names in place of numbers::

    {"state": {"layer.weight": {"exp_avg": ...}},
     "param_groups": [{"params": ["layer.weight"], "lr": 0.1}]}

``flatten_optimizer_state_dict=True`` writes one dict, with a group's options for each parameter::

    {"state.layer.weight.exp_avg": ..., "param_groups.layer.weight.lr": 0.1}

The names are those of the bare model, without the prefixes of DistributedDataParallel, FSDP,
torch.compile and activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from ptsave.support.torch_names import is_distributed_tensor
from ptsave.tree.containers import items_of, walk

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_FLAT = (f"{_STATE}.", f"{_GROUPS}.")
# Parts of parameters' names that wrappers add.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FLAT_PARAMETER = "_flat_param"  # of FSDP without use_orig_params

Named: TypeAlias = "Sequence[tuple[str, Tensor]]"


def is_name_keyed(state_dict: Any) -> bool:
    """Return whether the parameters of an optimizer's state dict are names, not numbers.

    >>> is_name_keyed({"state": {}, "param_groups": [{"params": ["weight"]}]})
    True
    >>> is_name_keyed({"param_groups.weight.lr": 0.1}), is_name_keyed({"param_groups": []})
    (True, False)
    """
    if not isinstance(state_dict, Mapping):
        return False
    if is_flat(state_dict):
        return True
    groups = state_dict.get(_GROUPS)
    if not isinstance(groups, (list, tuple)):
        return False
    ids = [each for group in groups if isinstance(group, Mapping) for each in _params_of(group)]
    return bool(ids) and all(isinstance(each, str) for each in ids)


def is_flat(state_dict: Mapping[Any, Any]) -> bool:
    """Return whether a state dict has no groups, but a key for each of their values."""
    keys = [*state_dict]
    return bool(keys) and all(isinstance(key, str) and key.startswith(_FLAT) for key in keys)


def _params_of(group: Mapping[Any, Any]) -> Sequence[Any]:
    params = group.get(_PARAMS)
    return params if isinstance(params, (list, tuple)) else ()


def regrouped(state_dict: Any) -> Any:
    """Return the flat form as groups, one for each parameter; any other state dict as it is.

    >>> regrouped({"state.a.b.step": 1, "param_groups.a.b.lr": 0.1})
    {'state': {'a.b': {'step': 1}}, 'param_groups': [{'params': ['a.b'], 'lr': 0.1}]}
    """
    if not is_flat(state_dict):
        return state_dict
    groups: dict[str, dict[str, Any]] = {}
    for key, value in items_of(state_dict):
        if key.startswith(_FLAT[1]):
            name, _, option = key[len(_FLAT[1]) :].rpartition(".")
            groups.setdefault(name, {_PARAMS: [name]})[option] = value
    state: dict[str, dict[str, Any]] = {}
    for key, value in items_of(state_dict):
        if key.startswith(_FLAT[0]):
            name, rest = _split(key[len(_FLAT[0]) :], groups)
            _store(state.setdefault(name, {}), rest.split("."), value)
    return {_STATE: state, _GROUPS: [*groups.values()]}


def _split(path: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Divide a path into a parameter's name, as long as possible, and the key of its state."""
    end = path.rfind(".")
    while end > 0 and path[:end] not in names:
        end = path.rfind(".", 0, end)
    if end <= 0:
        raise ValueError(f"the state dict has a state, {path!r}, of a parameter of no group")
    return path[:end], path[end + 1 :]


def _store(state: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def names_in(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the parameters' names in a state dict with groups, in saved order."""
    return [name for group in state_dict[_GROUPS] for name in _params_of(group)]


# ------------------------------------------------------------------------------------- own names


def bare_name(module: nn.Module, name: str) -> str:
    """Return a parameter's name without the additions of wrappers, as torch has it.

    >>> wrapped = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})  # as torch.compile does it
    >>> bare_name(wrapped, "_orig_mod.weight")
    'weight'
    """
    parts = []
    owner: Any = module
    for part in name.split("."):
        is_ddp = isinstance(owner, nn.parallel.DistributedDataParallel) and part == "module"
        if not is_ddp and part not in _WRAPPED:
            parts.append(part)
        owner = getattr(owner, part, None)
    return ".".join(parts)


def best_names(candidates: Iterable[Named], params: Iterable[Tensor], saved: set[str]) -> Any:
    """Return the way of naming parameters that has most names in common with the saved ones.

    `candidates` may have several names for a parameter, and the preferred candidate comes first.
    Each parameter gets one name, a saved one if it has any. None if no candidate names all
    parameters.
    """
    wanted = {id(param) for param in params}
    best: Named | None = None
    n_best = -1
    for named in candidates:
        chosen: dict[int, tuple[str, Tensor]] = {}
        for name, param in named:
            known = chosen.get(id(param))
            if id(param) in wanted and (known is None or (known[0] not in saved and name in saved)):
                chosen[id(param)] = (name, param)
        n_found = len(saved.intersection(name for name, _ in chosen.values()))
        if len(chosen) == len(wanted) and n_found > n_best:
            best, n_best = [*chosen.values()], n_found
    return best


def ways_of_naming(named: Iterable[tuple[str, Tensor]]) -> Iterator[Named]:
    """Yield names as they are, without the additions of wrappers, and without ``module.``.

    >>> one = Tensor()
    >>> [names[0][0] for names in ways_of_naming([("module._orig_mod.weight", one)])]
    ['module._orig_mod.weight', 'module.weight', 'weight']
    """
    pairs = [*named]
    yield pairs
    parts = [([part for part in name.split(".") if part not in _WRAPPED], p) for name, p in pairs]
    bare = [(".".join(each), param) for each, param in parts]
    yield bare
    if all(name.startswith("module.") for name, _ in bare):
        yield [(name.removeprefix("module."), param) for name, param in bare]


def refuse_sharded(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], state: Mapping[Any, Any]
) -> None:
    """Raise TypeError if each rank has a part of the parameters, but the saved state is whole.

    The error names torch's function, which divides the state among the ranks.
    """
    params = [param for group in optimizer.param_groups for param in group[_PARAMS]]
    is_flat = any(name.rpartition(".")[2] == _FLAT_PARAMETER for name, _ in named)
    is_whole = not any(is_distributed_tensor(value) for value in walk(state))
    if is_flat or (is_whole and any(is_distributed_tensor(param) for param in params)):
        raise TypeError(
            f"the parameters of this {type(optimizer).__name__} are parts of what the file has, "
            "which has no ranks: use torch.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict() with what ptsave.load() returns"
        )
