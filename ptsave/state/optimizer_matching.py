"""Matches saved parameters with an optimizer's parameters, and makes the optimizer's new groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ptsave.state.copying import Copier, Mismatch, raise_load_errors
from ptsave.support.torch_names import is_distributed_tensor
from ptsave.tree.containers import items_of, walk

# Keys of the state in torch's optimizers: each tensor under such a key has the parameter's shape.
# Under all other keys except `_MEANS`, these optimizers keep one number for each parameter.
_ELEMENTWISE = {
    *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum", "variance"),
}
# Adafactor's keys for means over one dimension of the parameter, and the index of this dimension.
_MEANS = {"row_var": -1, "col_var": -2}
_ATOMS = {int, str, float, bool, type(None)}


class UnmatchedParameters(NamedTuple):
    """The names of parameters that only the optimizer or only the state dict has.

    Attributes
    ----------
    missing : list of str
        Parameters of the optimizer that were not saved, in the optimizer's order.
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
    """The result of matching: saved ids with their parameters, and the optimizer's new groups."""

    params: dict[Hashable, Tensor]  # by saved id
    groups: list[dict[str, Any]]  # the optimizer's new groups
    kept: list[Tensor] = field(default_factory=list)  # parameters whose present state stays
    dropped: set[Hashable] = field(default_factory=set)  # saved ids whose state is left out
    unmatched: UnmatchedParameters | None = None


@dataclass(frozen=True)
class Matching:
    """The rule that pairs saved parameters with an optimizer's parameters.

    Most fields are arguments of `load_optimizer_state_dict`. If `match` is None, parameters match
    by name if the file has names instead of numbers and the optimizer has names, too; otherwise by
    order. Each of `namings` is another list of names for the optimizer's parameters. If `rename`
    returns None, the saved parameter is left out. State of a wrong shape is left out and noted in
    the list `mismatched`. If this list is None, such state is an error in matching by name; in
    matching by order, such state is loaded, as in torch.
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
            raise ValueError('names and named_parameters can only be used with match="name"')

    def resolved(self, optimizer: Any, state_dict: Mapping[Any, Any]) -> Matching:
        """Return this rule, or a rule by order if `match` is None and parameters have no names."""
        names_any = self.namings or self.named_parameters is not None or self.rename is not None
        groups = optimizer.param_groups
        if self.match is not None or names_any or is_flat(state_dict):
            return self
        if any("param_names" in group for group in groups):
            return self
        return replace(self, match="order")

    def assign(self, optimizer: Any, state_dict: Any, copier: Copier) -> Assignment:
        """Match the parameters in a state dict with the optimizer's parameters."""
        is_keyed = self._goes_by_keys(state_dict)
        if self.match == "name" or (self.match is None and is_keyed):
            if not is_keyed:
                return match_by_name(optimizer, state_dict, copier, self)
            named = [pair for naming in self.namings or () for pair in naming]
            refuse_sharded(optimizer, named, state_dict["state"])
            names = [name for group in state_dict[_GROUPS] for name in _params_of(group)]
            return match_by_name(optimizer, state_dict, copier, replace(self, names=names))
        assignment = match_by_order(optimizer, state_dict["param_groups"], copier)
        saved_state = state_dict["state"]
        if self.mismatched is not None and isinstance(saved_state, Mapping):
            ids: dict[str, Hashable] = {str(param_id): param_id for param_id in assignment.params}
            states = {
                name: (assignment.params[param_id], saved_state.get(param_id))
                for name, param_id in ids.items()
            }
            shapes = [*_mismatches(optimizer, states)]
            _leave_out(assignment, shapes, ids, self.mismatched)
        return assignment

    def _goes_by_keys(self, state_dict: Any) -> bool:
        """Return whether to match by names that the state dict has instead of numbers."""
        if self.match == "order" or self.names is not None or not is_name_keyed(state_dict):
            return False
        groups = state_dict["param_groups"]
        return self.namings is not None or not any("param_names" in group for group in groups)


def match_by_order(optimizer: Any, saved_groups: Any, copier: Copier) -> Assignment:
    """Match groups and parameters by order, with the checks of `Optimizer.load_state_dict`."""
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
    """Return a `deepcopy` of one or more groups, but copy plain lists of ids or names faster."""
    each = groups if type(groups) in (list, tuple) else [groups]
    show_unless_plain(each, copier)  # before tensors are copied, they need their values
    copies: dict[int, Any] = {}
    for group in each:
        for value in group.values() if type(group) is dict else ():
            if type(value) is list and _is_plain(value):
                copies[id(value)] = value.copy()
    return deepcopy(groups, copies)


def show_unless_plain(groups: Iterable[Any], copier: Copier) -> None:
    """Call `Copier.show` if groups may hold tensors, because the caller will read their values."""
    if not all(type(group) is dict and all(map(_is_plain, group.values())) for group in groups):
        copier.show({"param_groups": groups})


def _is_plain(value: Any) -> bool:
    """Return whether a hyper-parameter is a number, a string or a flat sequence of these."""
    if type(value) in (list, tuple):
        return set(map(type, value)) <= _ATOMS
    return type(value) in _ATOMS


# ----------------------------------------------------------------------------------------- by name


class _Saved(NamedTuple):
    param_id: Hashable
    group: int


class _Own(NamedTuple):
    param: Tensor
    group: int


def match_by_name(
    optimizer: Optimizer, state_dict: Any, copier: Copier, matching: Matching
) -> Assignment:
    """Match parameters by name, as `matching` says.

    Of the optimizer's own names and each of `namings`, those that match most saved names are used.
    If `matching.match` is None, an unexpected parameter is not an error. A missing parameter is an
    error only if it requires gradients. ``torch.distributed.checkpoint`` has the same rule, because
    its state dicts may contain the state of several optimizers.
    """
    strict, rename, mismatched = matching.strict, matching.rename, matching.mismatched
    as_torch = matching.match is None
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    everything = _saved_parameters(saved_groups, matching.names)
    saved: Mapping[str, _Saved] = everything
    if rename is not None:
        from ptsave.state.renaming import renamed

        saved = renamed(everything, rename)
    named_parameters = matching.named_parameters
    if matching.namings is not None and named_parameters is None:
        named_parameters = _named_best(groups, matching.namings, {*saved}, bare=as_torch)
    own = _own_parameters(groups, named_parameters)
    if isinstance(optimizer, LBFGS) and list(saved) != list(own):
        raise ValueError(
            "LBFGS keeps one state for all parameters: this state can only be loaded into an LBFGS "
            "with the same parameters in the same order"
        )
    unmatched = UnmatchedParameters(
        [name for name in own if name not in saved], [name for name in saved if name not in own]
    )
    pairs = {name: (saved[name], own[name]) for name in own if name in saved}
    states = {
        name: (param, state_dict["state"].get(partner.param_id))
        for name, (partner, (param, _)) in pairs.items()
    }
    shapes = [*_mismatches(optimizer, states)]
    problems = [
        f"size mismatch for {shape.name}: its {shape.key} has shape {shape.saved} in the "
        f"checkpoint, but must have shape {shape.expected}."
        for shape in shapes
        if mismatched is None
    ]
    missing, unexpected = unmatched
    if as_torch:
        missing = [name for name in missing if own[name].param.requires_grad]
        unexpected = []
    raise_load_errors(optimizer, problems, missing, unexpected, strict=strict, noun="parameter")
    sources: list[set[int]] = [set() for _ in groups]
    for partner, (_, index) in pairs.values():
        sources[index].add(partner.group)
    used = {partner.param_id for partner, _ in pairs.values()}
    assignment = Assignment(
        params={partner.param_id: param for partner, (param, _) in pairs.values()},
        groups=[
            _new_group(index, group, [(i, saved_groups[i]) for i in sorted(source)], copier)
            for index, (group, source) in enumerate(zip(groups, sources, strict=True))
        ],
        kept=[own[name].param for name in unmatched.missing],
        dropped={place.param_id for place in everything.values()} - used,
        unmatched=unmatched,
    )
    if mismatched is not None:
        ids = {name: partner.param_id for name, (partner, _) in pairs.items()}
        _leave_out(assignment, shapes, ids, mismatched)
    return assignment


# ------------------------------------------------------------------------------------------- names


def _saved_parameters(groups: Any, names: Sequence[str] | None) -> dict[str, _Saved]:
    """Return the saved parameters by name, in saved order."""
    places = [_Saved(param_id, i) for i, group in enumerate(groups) for param_id in group["params"]]
    if names is None:
        names = _names_in(groups, "the state dict")
    if names is None:
        raise ValueError(
            "the state dict has no param_names, because its optimizer was not made from "
            "named_parameters(): pass names=[...], in saved order, to "
            'ptsave.load_optimizer_state_dict(), or match="order"'
        )
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError("the names of the saved parameters must be a sequence of str")
    if len(names) != len(places):
        raise ValueError(f"the state dict has {len(places)} parameters, but {len(names)} names")
    if len({place.param_id for place in places}) != len(places):
        raise ValueError("the state dict has two parameters with the same id")
    _check_unique(names, "the state dict")
    return dict(zip(names, places, strict=True))


def _own_parameters(
    groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[str, _Own]:
    """Return the optimizer's parameters by name, in the optimizer's order."""
    places = [_Own(param, i) for i, group in enumerate(groups) for param in group["params"]]
    if named_parameters is not None:
        names = _names_of([place.param for place in places], named_parameters)
    elif (own_names := _names_in(groups, "the optimizer")) is not None:
        names = own_names
    else:
        raise ValueError(
            "the optimizer's parameters have no names: pass "
            "named_parameters=model.named_parameters(), make the optimizer from "
            "model.named_parameters(), or also pass the model to ptsave.load_checkpoint()"
        )
    _check_unique(names, "the optimizer")
    return dict(zip(names, places, strict=True))


def _named_best(
    groups: list[dict[str, Any]], namings: Iterable[Named], saved: set[str], *, bare: bool
) -> Named | None:
    """Return the naming with most `saved` names; a tie goes to the first, with `bare` the last."""
    params = [param for group in groups for param in group["params"]]
    candidates = [*namings]
    own_names = _names_in(groups, "the optimizer")
    if own_names is not None:
        candidates += ways_of_naming(zip(own_names, params, strict=True))
    return best_names(candidates[::-1] if bare else candidates, params, saved)


def _names_in(groups: Any, owner: str) -> list[str] | None:
    """Return the groups' `param_names`, or None if a group with parameters has no names."""
    names: list[str] = []
    for index, group in enumerate(groups):
        own = group.get("param_names", [])
        if len(own) != len(group["params"]):
            if "param_names" not in group:
                return None
            raise ValueError(
                f"{owner} has {len(group['params'])} parameters in group {index}, "
                f"but {len(own)} param_names"
            )
        names.extend(own)
    return names


def _names_of(params: list[Tensor], named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    names: dict[int, str] = {}
    pair: Any
    for pair in named_parameters:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError("named_parameters must be pairs of a str and a parameter")
        name, param = pair
        if names.setdefault(id(param), name) != name:
            both = f'"{names[id(param)]}" and "{name}"'
            raise ValueError(f"named_parameters has one parameter under two names, {both}")
    for index, param in enumerate(params):
        if id(param) not in names:
            raise ValueError(
                f"parameter {index} of the optimizer, of shape {tuple(param.shape)}, is not in "
                "named_parameters"
            )
    return [names[id(param)] for param in params]


def _check_unique(names: Sequence[str], owner: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f'{owner} has two parameters named "{name}"')
        seen.add(name)


# ------------------------------------------------------------------------------------------ shapes


class _Shape(NamedTuple):
    """A value in a parameter's state whose saved shape is not the expected shape."""

    name: str
    key: Any
    saved: torch.Size
    expected: torch.Size


def _leave_out(
    assignment: Assignment,
    shapes: list[_Shape],
    ids: Mapping[str, Hashable],
    mismatched: list[Mismatch],
) -> None:
    """Keep the present state of each parameter whose saved state has a wrong shape."""
    for name in dict.fromkeys(shape.name for shape in shapes):
        assignment.kept.append(assignment.params.pop(ids[name]))
        assignment.dropped.add(ids[name])
    mismatched += [(f"{each.name}.{each.key}", each.saved, each.expected) for each in shapes]


def _mismatches(optimizer: Optimizer, states: dict[str, tuple[Tensor, Any]]) -> Iterator[_Shape]:
    """Yield the saved values that have a wrong shape; `states` has parameter names as keys."""
    # Whether torch.optim alone defines the optimizer's steps, and so its state.
    is_known = all(
        f"{owner.__module__}.".startswith("torch.optim.")
        for owner in type(optimizer).__mro__
        if "step" in vars(owner)
    )
    for name, (param, state) in states.items():
        if not isinstance(state, dict):
            continue
        shape = param.shape
        present = {} if is_known else optimizer.state.get(param, {})
        for key, value in items_of(state):
            if not isinstance(value, Tensor):
                continue
            if is_known:
                expected = _shape_in_torch(key, shape)
            else:
                other = present.get(key) if isinstance(present, dict) else None
                expected = other.shape if isinstance(other, Tensor) else None
            if expected is not None and value.shape != expected:
                yield _Shape(name, key, value.shape, expected)


def _shape_in_torch(key: Any, shape: torch.Size) -> torch.Size | None:
    """Return the shape of the state under `key` in torch's optimizers, or None if it is unknown."""
    if key in _ELEMENTWISE:
        return shape
    if key in _MEANS and len(shape) > 1:
        sizes = list(shape)
        sizes[_MEANS[key]] = 1
        return torch.Size(sizes)
    return None


# ------------------------------------------------------------------------------------------ groups


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in items_of(group) if key not in ("params", "param_names")}


def _new_group(
    index: int, group: dict[str, Any], sources: list[tuple[int, Any]], copier: Copier
) -> dict[str, Any]:
    """Return one of the optimizer's groups with the hyper-parameters of its saved `sources`."""
    if not sources:
        return dict(group)
    first, saved = sources[0]
    chosen = _hyper_parameters(saved)
    for other, other_saved in sources[1:]:
        show_unless_plain([saved, other_saved], copier)
        differing = _differing(chosen, _hyper_parameters(other_saved))
        if differing:
            raise ValueError(
                f"the optimizer's group {index} has parameters of the saved groups {first} and "
                f"{other}, which disagree in {', '.join(differing)}: split the optimizer's group"
            )
    own = {key: group[key] for key in ("params", "param_names") if key in group}
    return {**copy_plainly(chosen, copier), **own}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    nothing = object()

    def are_equal(key: str) -> bool:
        a, b = one.get(key, nothing), other.get(key, nothing)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return [
        f"{key} ({one.get(key)!r} and {other.get(key)!r})"
        for key in {**one, **other}
        if not are_equal(key)
    ]


# ------------------------------------------------------------------ names in place of numbers
# torch.distributed.checkpoint's get_optimizer_state_dict writes names in place of numbers:
#     {"state": {"layer.weight": {"exp_avg": ...}},
#      "param_groups": [{"params": ["layer.weight"], "lr": 0.1}]}
# With flatten_optimizer_state_dict=True it writes one flat dict, which repeats the options of a
# group for each parameter:
#     {"state.layer.weight.exp_avg": ..., "param_groups.layer.weight.lr": 0.1}
# The names are bare names: they lack the prefixes of DistributedDataParallel, FSDP, torch.compile
# and activation checkpointing.

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_FLAT = (f"{_STATE}.", f"{_GROUPS}.")
# Parts of parameters' names that wrappers add.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FLAT_PARAMETER = "_flat_param"  # FSDP's name for a flat parameter, without use_orig_params

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
    """Return whether a state dict is flat: all keys begin with ``state.`` or ``param_groups.``."""
    keys = [*state_dict]
    return bool(keys) and all(isinstance(key, str) and key.startswith(_FLAT) for key in keys)


def _params_of(group: Mapping[Any, Any]) -> Sequence[Any]:
    params = group.get(_PARAMS)
    return params if isinstance(params, (list, tuple)) else ()


def regrouped(state_dict: Any) -> Any:
    """Nest a flat state dict, with a group for each parameter; return other dicts unchanged.

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
            *parents, last = rest.split(".")
            inner = state.setdefault(name, {})
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
    return {_STATE: state, _GROUPS: [*groups.values()]}


def _split(path: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Divide a path into a parameter's name (the longest in `names`) and the key of its state."""
    end = path.rfind(".")
    while end > 0 and path[:end] not in names:
        end = path.rfind(".", 0, end)
    if end <= 0:
        raise ValueError(f"the state dict has {path!r}, but no group has that parameter")
    return path[:end], path[end + 1 :]


# ------------------------------------------------------------------------------------- own names


def bare_name(module: nn.Module, name: str) -> str:
    """Return a parameter's name without the components that wrappers add, as torch does.

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


def best_names(
    candidates: Iterable[Named], params: Iterable[Tensor], saved: set[str]
) -> Named | None:
    """Return the candidate that shares most names with `saved`; the first candidate wins a tie.

    A candidate may have several names for a parameter. The result has one name for each parameter,
    a saved name if possible. Returns None if no candidate names all parameters.
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
    """Yield the names unchanged, then without wrappers' components, then also without ``module.``.

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
    """Raise a TypeError if each rank has a part of the parameters, but the file has full tensors.

    The error names the function of torch that divides the state among the ranks.
    """
    params = [param for group in optimizer.param_groups for param in group[_PARAMS]]
    is_flat = any(name.rpartition(".")[2] == _FLAT_PARAMETER for name, _ in named)
    is_whole = not any(is_distributed_tensor(value) for value in walk(state))
    if is_flat or (is_whole and any(is_distributed_tensor(param) for param in params)):
        raise TypeError(
            f"each rank has a part of the parameters of this {type(optimizer).__name__}, but the "
            "file has full tensors: pass the result of ptsave.load() to "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict()"
        )
