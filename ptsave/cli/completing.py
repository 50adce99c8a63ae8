"""Arguments that are files, and shell completions of their names and their entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ptsave.cli.standard_input import path_of_standard_input

_MAX_NAMES = 1000


class _File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """The name of a file, directory or URL, unchanged, because a URL is no path."""

    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


class _Source(_File):
    """A file that is read; ``-`` is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "-" or ctx is None or ctx.resilient_parsing:
            return value
        return path_of_standard_input(ctx)


FILE = _File()
SOURCE = _Source()


def complete_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the entries of the command's file whose names begin with `incomplete`."""
    found: dict[str, None] = {}
    of_modules = ctx.params.get("stats", False) is not False  # only ls has it; None is a default
    try:
        for name in names_in(ctx.params["file"], ctx.params.get("storage_options"), of_modules):
            if name.startswith(incomplete) and name.isprintable():
                found[name] = None
    except Exception:  # the command reports the error when it runs
        return []
    return [CompletionItem(name) for name in list(found)[:_MAX_NAMES]]


def names_in(
    file: str, storage_options: Mapping[str, Any] | None, of_modules: bool
) -> Iterator[str]:
    """Yield the names of a file's entries, or with `of_modules` of a capture's modules."""
    from ptsave.contents.captures import HEADER, is_capture
    from ptsave.contents.checkpoint_files import find_files
    from ptsave.inspection.listing import list_files

    for listing in list_files(find_files(file, storage_options, distributed=True)):
        if of_modules and is_capture(listing.tree.obj):
            yield from listing.tree.obj[HEADER].get("modules", {})
        else:
            yield from (node.name for node in listing.tree.nodes)
