"""Checks options that are True or False, or that have two names."""

from __future__ import annotations

from typing import Any

import torch


def check_flags(**flags: object) -> None:
    """Raise a TypeError for an option that is no bool: "no" would count as True.

    >>> check_flags(fsync=True, verify="no")
    Traceback (most recent call last):
    ...
    TypeError: verify must be True or False, not 'no'
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def one_of(**values: Any) -> Any:
    """Return the value of an option that has two names, under the name that the caller used.

    >>> one_of(map_location=None, device="cpu")
    'cpu'
    >>> one_of(map_location="cpu", device="cpu")
    Traceback (most recent call last):
    ...
    TypeError: map_location and device are two names of one option: give one of them
    """
    given = [value for value in values.values() if value is not None]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(values)} are two names of one option: give one of them")
    return given[0] if given else None


def location_of(map_location: Any, device: Any) -> Any:
    """Return the `map_location` for torch, which may be given as `device`.

    A number becomes a device, because torch takes no number here.
    """
    if not isinstance(device, (torch.device, str, int, type(None))):
        raise TypeError(f"device must be a device or its name, not {type(device).__name__}")
    if isinstance(device, int):
        device = torch.device(device)
    return one_of(map_location=map_location, device=device)
