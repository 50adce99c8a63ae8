"""Errors of loading a state dict, in the words of :meth:`torch.nn.Module.load_state_dict`."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Shaped(Protocol):
    """A tensor, or a stand-in that knows its shape."""

    @property
    def shape(self) -> torch.Size: ...


def no_mapping_error(state_dict: Any) -> TypeError:
    """Return torch's error for a state dict that is not a mapping."""
    return TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")


def no_tensor_message(key: str, source: Any) -> str:
    """Return torch's words for an entry that is no tensor, where one belongs."""
    return (
        f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
        f"object from checkpoint but received {type(source)}"
    )


def failure_message(key: str, target: Shaped, source: Shaped, error: Exception) -> str:
    """Return torch's words for an entry that could not be copied."""
    return (
        f'While copying the parameter named "{key}", whose dimensions in the model are '
        f"{target.shape} and whose dimensions in the checkpoint are {source.shape}, an exception "
        f"occurred : {error.args}."
    )


def mismatch_message(key: str, target: Shaped, source: Shaped) -> str:
    """Return torch's words for shapes that differ."""
    return (
        f"size mismatch for {key}: copying a param with shape {source.shape} from "
        f"checkpoint, the shape in current model is {target.shape}."
    )


def no_copy_message(key: str, target: torch.Tensor) -> str:
    """Return the message for a tensor that torch cannot copy into another one."""
    return (
        f'While copying the parameter named "{key}": torch has no copy for {target.dtype}. Load it '
        "with assign=True, or take it from ptsave.load()"
    )


def raise_load_errors(
    target: object, errors: list[str], missing: list[str], unexpected: list[str], *, strict: bool
) -> None:
    """Raise one error for everything that was found, if anything was.

    With `strict`, missing and unexpected keys are errors, too, and named before the others.
    """
    if strict:
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing)):
            if len(keys) > 0:
                names = ", ".join(f'"{key}"' for key in keys)
                errors.insert(0, f"{kind} key(s) in state_dict: {names}. ")
    if len(errors) > 0:
        reasons = "\n\t".join(errors)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {target.__class__.__name__}:\n\t{reasons}"
        )
