"""``ptsave ls``: lists the entries of a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import click

from ptsave.cli.command import Command
from ptsave.cli.completing import FILE, complete_names
from ptsave.cli.listing_json import directory_json, file_json
from ptsave.cli.listing_text import lines_by_size, totals_lines, tree_lines
from ptsave.cli.storage_options import with_storage_options
from ptsave.cli.text import printable
from ptsave.contents.checkpoint_files import find_files
from ptsave.inspection.listing import FileListing, Totals, list_files, select

__all__ = ["command"]

_EXAMPLES = """
ptsave ls checkpoint.pt
ptsave ls checkpoint.pt optimizer '*.bias'  # only these
ptsave ls checkpoint.pt --depth 1           # only the top level
ptsave ls model.safetensors --sort size     # the largest tensors first
ptsave ls s3://bucket/checkpoint.pt         # reads the directory and the pickle, no tensors
ptsave ls path/to/model                     # a directory of shards
ptsave ls checkpoint.pt --json | jq '.tensors[].name'
"""


@click.command("ls", cls=Command, examples=_EXAMPLES, short_help="What a file holds.")
@click.argument("file", type=FILE)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_names)
@click.option("--depth", type=click.IntRange(1), help="How many levels to show.")
@click.option(
    "--sort",
    type=click.Choice(["file", "size"]),
    default="file",
    help="The order: as in the file (a tree), or tensors by size, the largest first.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@with_storage_options("FILE")
def command(
    file: str,
    names: tuple[str, ...],
    *,
    depth: int | None,
    sort: str,
    as_json: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """List the entries of FILE: names, dtypes, shapes and sizes.

    FILE is a .pt or .safetensors file, a URL, or a directory of shards (or their index). NAMEs are
    names of entries, with all that is in them, or patterns such as '*.weight'; "('a.b', 0)" is a
    path of keys. No tensor is read.
    """
    gc.disable()  # all objects live until the end, so the collector would search in vain
    files = find_files(file, storage_options)
    listings = list(list_files(files))
    _keep_until_exit(listings)
    is_set = files.source is None
    chosen = select(listings, names)
    if as_json:
        objects = [file_json(*pair) for pair in zip(listings, chosen, strict=True)]
        text = json.dumps(directory_json(file, files.index_path, objects) if is_set else objects[0])
    else:
        text = "\n".join(_lines(listings, chosen, depth, sort, is_set))
    sys.stdout.write(f"{text}\n")


def _keep_until_exit(listings: list[FileListing]) -> None:
    """Leave objects to the end of the process, which is faster than freeing each of 100,000."""
    cycle: list[object] = [listings]
    cycle.append(cycle)
    gc.freeze()


def _lines(
    listings: list[FileListing],
    chosen: list[list[int]],
    depth: int | None,
    sort: str,
    with_paths: bool,
) -> list[str]:
    lines: list[str] = []
    for listing, numbers in zip(listings, chosen, strict=True):
        if with_paths:
            lines.append(f"{printable(os.path.basename(listing.path))}:")
        if sort == "size":
            lines += lines_by_size(listing, numbers)
        else:
            lines += tree_lines(listing, numbers, depth)
        lines.append("")
    return [*lines, *totals_lines(sum((listing.totals for listing in listings), Totals()))]
