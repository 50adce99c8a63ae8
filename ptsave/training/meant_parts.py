"""Names the part of a checkpoint that was probably meant when the whole does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ptsave.errors import CheckpointWarning
from ptsave.support.calls import warn_user


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
