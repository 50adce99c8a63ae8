"""The option weights_only: torch's default for it, and torch's advice in its errors."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any, NoReturn

from torch.serialization import UNSAFE_MESSAGE

from ptsave.support.calls import warn_user
from ptsave.support.torch_names import (
    IGNORES_CASE_OF_VARIABLES,
    defaults_to_weights_only,
    restricted_unpickler,
)

_TRUE_VALUES = ("1", "y", "yes", "true")


def raise_with_advice(error: pickle.UnpicklingError, pickle_module: Any) -> NoReturn:
    """Raise an unpickling error, with torch's advice if torch's restricted unpickler raised it."""
    if pickle_module is not restricted_unpickler or isinstance(error, RuntimeError):
        raise error
    raise pickle.UnpicklingError(_weights_only_message(str(error))) from None


def resolve_weights_only(weights_only: bool | None, pickle_module: Any) -> bool:
    """Return the option's value by torch's default and its environment variables."""
    force = _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    force_not = _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    if force and force_not:
        raise RuntimeError(
            "Only one of `TORCH_FORCE_WEIGHTS_ONLY_LOAD` or `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` "
            "should be set, but both were set."
        )
    restricted = defaults_to_weights_only(pickle_module) if weights_only is None else weights_only
    if force:
        restricted = True
    elif force_not and weights_only is None:
        warn_user(
            "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected, since the"
            "`weights_only` argument was not explicitly passed to `torch.load`, forcing "
            "weights_only=False."
        )
        restricted = False
    if restricted and pickle_module is not None:
        raise RuntimeError("Can not safely load weights when explicit pickle_module is specified")
    return bool(restricted)


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    return (value.lower() if IGNORES_CASE_OF_VARIABLES else value) in _TRUE_VALUES


def _weights_only_message(message: str) -> str:
    """Return the message of torch's restricted unpickler with torch's advice around it."""
    documentation = (
        "\n\nCheck the documentation of torch.load to learn more about types accepted by default "
        "with weights_only https://pytorch.org/docs/stable/generated/torch.load.html."
    )
    if re.search(r"GLOBAL (\S+) was not an allowed global by default.", message):
        return (
            "Weights only load failed. This file can still be loaded, to do so you have two "
            "options, \033[1mdo those steps only if you trust the source of the checkpoint\033[0m. "
            f"\n\t(1) {UNSAFE_MESSAGE}\n\t(2) Alternatively, to load with `weights_only=True` "
            "please check the recommended steps in the following error message.\n\t"
            f"WeightsUnpickler error: {message}{documentation}"
        )
    if re.search(r"(\S+) must be (\S+) to load", message):
        return f"Weights only load failed. {message}\n {UNSAFE_MESSAGE}\n"
    advice = (
        ""
        if re.search(r"whose module (\S+) is blocked", message)
        else "Please file an issue with the following so that we can make `weights_only=True` "
        "compatible with your use case: WeightsUnpickler error: "
    )
    return f"Weights only load failed. {UNSAFE_MESSAGE}\n{advice}\n\n{message}{documentation}"
