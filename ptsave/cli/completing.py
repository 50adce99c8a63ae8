"""Completions for shells: names of files, and of entries in them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ptsave.contents.checkpoint_files import find_files
from ptsave.inspection.listing import list_files

__all__ = ["FILE", "complete_names"]

_MAX_NAMES = 1000


class _File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """The name of a file, a directory or a URL; as it is, since not all of them are paths."""

    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


FILE = _File()


def complete_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of entries of the command's file that begin so."""
    found: dict[str, None] = {}
    try:
        files = find_files(ctx.params["file"], ctx.params.get("storage_options"))
        for listing in list_files(files):
            for node in listing.tree.nodes:
                if node.name.startswith(incomplete) and node.name.isprintable():
                    found[node.name] = None
    except Exception:  # the command reports the error when it runs
        return []
    return [CompletionItem(name) for name in list(found)[:_MAX_NAMES]]
