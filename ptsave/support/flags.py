"""Options that are True or False, checked where they come in."""

from __future__ import annotations

__all__ = ["check_flags"]


def check_flags(**flags: object) -> None:
    """Refuse values of options that are no bool, as "no" would count as True.

    Raises
    ------
    TypeError
        If there is one; it names the option.

    Examples
    --------
    >>> check_flags(fsync=True, verify="no")
    Traceback (most recent call last):
    ...
    TypeError: verify must be True or False, not 'no'
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")
