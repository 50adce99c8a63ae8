"""Loads a state dict into one target of a restore: a module, optimizer, dict or other object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ptsave.errors import CheckpointWarning
from ptsave.state.copying import Copier, Mismatch
from ptsave.state.modules import IncompatibleKeys, check_module, load_module
from ptsave.support.calls import warn_user

if TYPE_CHECKING:
    from ptsave.state.name_keyed import Named
    from ptsave.state.optimizer_matching import Matching
    from ptsave.state.renaming import Renaming
    from ptsave.training.options import KeyMapping, RestoreOptions


class Target(NamedTuple):
    """An object to restore; `namings` name an optimizer's parameters beside its own names."""

    target: Any
    options: RestoreOptions
    renaming: Renaming | None
    namings: Sequence[Named]

    def check(self, state: Any, copier: Copier) -> None:
        """Raise the errors that `load` is certain to raise, and change nothing."""
        target, options = self.target, self.options
        if isinstance(target, nn.Module):
            check_module(
                target,
                self._renamed(state),
                options.strict,
                copier,
                ignore_mismatched_sizes=options.ignore_mismatched_sizes,
            )
        elif isinstance(target, Optimizer):
            from ptsave.state.optimizers import check_optimizer

            check_optimizer(target, state, copier, self._matching(state, []))
        elif isinstance(target, Mapping):
            from ptsave.state.mappings import check_mapping

            check_mapping(target, state, options.strict)
        else:
            _check_type(target)

    def load(self, state: Any, copier: Copier) -> Any:
        """Load a state dict into the target in place, and return the result of that load."""
        target, options = self.target, self.options
        if isinstance(target, nn.Module):
            return load_module(
                target,
                self._renamed(state),
                options.strict,
                options.assign,
                copier,
                ignore_mismatched_sizes=options.ignore_mismatched_sizes,
                check_first=True,
            )
        if isinstance(target, Optimizer):
            return self._load_optimizer(target, state, copier)
        if isinstance(target, Mapping):
            from ptsave.state.mappings import load_mapping

            return load_mapping(target, state, options.strict, copier)
        _check_type(target)
        copier.show({"": state})
        return target.load_state_dict(state)

    def _load_optimizer(self, target: Optimizer, state: Any, copier: Copier) -> Any:
        from ptsave.state.optimizer_matching import UnmatchedParameters
        from ptsave.state.optimizers import load_optimizer

        mismatched: list[Mismatch] = []
        result = load_optimizer(
            target, state, copier, self._matching(state, mismatched), in_place=True
        )
        if isinstance(result, UnmatchedParameters):
            return IncompatibleKeys(result.missing, result.unexpected, mismatched)
        return IncompatibleKeys([], [], mismatched) if mismatched else result

    def _matching(self, state: Any, mismatched: list[Mismatch]) -> Matching:
        from ptsave.state.name_keyed import is_name_keyed
        from ptsave.state.optimizer_matching import Matching

        match = self.options.match
        by_name = match == "name" or (match is None and is_name_keyed(state))
        return Matching(
            match,
            namings=self.namings if by_name else None,
            rename=self.renaming if by_name else None,
            strict=self.options.strict,
            mismatched=mismatched if self.options.ignore_mismatched_sizes else None,
        )

    def _renamed(self, state: Any) -> Any:
        if self.renaming is None or not isinstance(state, Mapping):
            return state
        return self.renaming.of_state_dict(state)


def _check_type(target: Any) -> None:
    if isinstance(target, type) or not callable(getattr(target, "load_state_dict", None)):
        name = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise TypeError(
            f"cannot restore into {name}: expected a module, an optimizer, a dict or an object "
            "with load_state_dict()"
        )


def names_of_modules(modules: Iterable[nn.Module]) -> list[Named]:
    """Return the ways to name parameters that modules offer.

    Each module offers its names with and without the parts that wrappers add.  Several modules also
    offer all of their names together.
    """
    from ptsave.state.name_keyed import bare_name

    all_named: list[list[Named]] = []
    for module in modules:
        named = [*module.named_parameters(remove_duplicate=False)]
        bare = [(bare_name(module, name), param) for name, param in named]
        all_named.append([named, bare])
    found = [way for ways in all_named for way in ways]
    if len(all_named) > 1:
        found += [[pair for ways in all_named for pair in ways[i]] for i in range(2)]
    return found


def key_mappings(key_mapping: KeyMapping | None, targets: Mapping[str, Any]) -> dict[str, Renaming]:
    """Return the renaming of each module and optimizer among the targets.

    `key_mapping` is one renaming for all of them, or a mapping of targets' names to renamings.
    """
    if key_mapping is None:
        return {}
    named = {name for name, each in targets.items() if isinstance(each, (nn.Module, Optimizer))}
    by_target: Any = key_mapping
    if not isinstance(by_target, Mapping) or not any(
        isinstance(value, Mapping) or callable(value) for value in by_target.values()
    ):
        return dict.fromkeys(named, _renaming(key_mapping))
    for name in by_target:
        if name not in named:
            raise TypeError(
                f"key_mapping is of {name!r}, which is no module and no optimizer among the targets"
            )
    return {name: _renaming(rename) for name, rename in by_target.items()}


def _renaming(rename: Any) -> Renaming:
    if not (callable(rename) or isinstance(rename, Mapping)):
        raise TypeError(
            f"key_mapping must be a function or a mapping of names, not {type(rename).__name__}"
        )
    from ptsave.state.renaming import Renaming

    return Renaming(rename)


# ------------------------------------------------------------ the part that was probably meant


def refuse_module(state: Any) -> None:
    """Raise if the file holds a whole module where a state dict is expected."""
    if isinstance(state, nn.Module):
        raise TypeError(
            f"the file holds a module that was saved whole ({type(state).__name__}), not a state "
            "dict: get it with ptsave.load(), and load its state_dict()"
        )


@contextmanager
def part_named(obj: Any, target: Any) -> Iterator[None]:
    """Add to errors about keys the name of the part of `obj` that probably fits `target`."""
    try:
        yield
    except RuntimeError as error:
        is_plain = type(error) is RuntimeError and not hasattr(error, "overwritten")
        message = str(error)
        if is_plain and "key(s) in state_dict" in message:
            sentence = _advice(obj, target)
            if sentence:
                error.args = (f"{message}\n\t{sentence}",)
        raise
    except KeyError as error:
        if not isinstance(target, Optimizer) or error.args not in [("param_groups",), ("state",)]:
            raise
        from ptsave.state.nested_state import optimizer_advice

        missing = error.args[0]
        words = f"the file holds no state dict of an optimizer: it has no {missing!r}"
        raise KeyError(". ".join(filter(None, (words, optimizer_advice(obj, target))))) from None


def warn_if_nothing_fits(obj: Any, target: Any, keys: Any) -> None:
    """Warn if the file has none of the target's keys, but a part of it has them."""
    missing = getattr(keys, "missing_keys", None)
    if not missing or not isinstance(obj, Mapping) or not isinstance(target, (nn.Module, Mapping)):
        return
    if not {*obj}.intersection(_keys_of(target)):
        sentence = _advice(obj, target)
        if sentence:
            message = f"nothing was loaded: the file has none of the target's keys. {sentence}"
            warn_user(message, CheckpointWarning)


def _advice(obj: Any, target: Any) -> str:
    if not isinstance(target, (nn.Module, Mapping)):
        return ""
    from ptsave.state.nested_state import advice

    return advice(obj, _keys_of(target), "model" if isinstance(target, nn.Module) else "target")


def _keys_of(target: Any) -> Iterable[str]:
    if isinstance(target, nn.Module):
        return [*dict(target.named_parameters()), *dict(target.named_buffers())]
    return [key for key in target if isinstance(key, str)]
