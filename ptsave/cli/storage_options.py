"""The option ``--storage-options``: arguments for the file systems of URLs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click


class _JsonObject(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:  # not shown, as the value may be a secret
            self.fail(f"not JSON ({error}): {_EXPECTED}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{_EXPECTED}, not a {type(found).__name__}", param, ctx)
        return found


_EXPECTED = "pass an object such as '{\"anon\": true}'"


def with_storage_options(argument: str, prefix: str = "") -> Callable[[Any], Any]:
    """Give a command the option for an argument's file system; `prefix` begins its name."""
    return click.option(
        f"--{prefix}-storage-options" if prefix else "--storage-options",
        type=_JsonObject(),
        metavar="JSON",
        help=f"If {argument} is a URL: an object of arguments for its file system, for example "
        "'{\"anon\": true}'.",
    )
