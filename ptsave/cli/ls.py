"""``ptsave ls``: lists the entries of a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from ptsave.cli.command import Command, note, with_recovery
from ptsave.cli.completing import SOURCE, complete_names
from ptsave.cli.listing_json import directory_json, file_json
from ptsave.cli.listing_text import lines_by_size, totals_lines, tree_lines
from ptsave.cli.storage_options import with_storage_options
from ptsave.cli.terminal import Terminal, terminal
from ptsave.contents.checkpoint_files import find_files, look_into
from ptsave.contents.shard_files import ShardFiles
from ptsave.inspection.listing import FileListing, list_files, select
from ptsave.sources.opening import Folder, folder_at
from ptsave.support.text import count_text, printable, some_of
from ptsave.tree.capture_schema import is_capture

__all__ = ["command"]

_EXAMPLES = """
ptsave ls checkpoint.pt
ptsave ls checkpoint.pt optimizer '*.bias'  # only these
ptsave ls checkpoint.pt --depth 1           # only the top level
ptsave ls model.safetensors --sort size     # the largest tensors first
ptsave ls s3://bucket/checkpoint.pt         # reads the directory and the pickle, no tensors
ptsave ls path/to/model                     # a directory of shards
ptsave ls checkpoints/1000 --chunks         # of many ranks: the parts of each tensor
ptsave ls checkpoint.pt --json | jq '.tensors[].name'
ptsave ls checkpoint.pt --stats             # reads the tensors: mean, std, min, max, NaN, Inf
ptsave ls run.pt --stats                    # a capture: the statistics of its modules
ptsave ls .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave ls run.pt --stats --step 3 'layers.*.mlp'
"""


@click.command("ls", cls=Command, examples=_EXAMPLES, short_help="What a file holds.")
@click.argument("file", type=SOURCE)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_names)
@click.option("--depth", type=click.IntRange(1), help="How many levels to show.")
@click.option(
    "--sort",
    type=click.Choice(["file", "size"]),
    default="file",
    help="The order: as in the file (a tree), or tensors by size, the largest first.",
)
@click.option(
    "--chunks",
    is_flag=True,
    help="Of a distributed checkpoint: the parts of each tensor, where they are and in which file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option(
    "--stats",
    is_flag=True,
    help="Statistics of tensors: those of a capture by modules, all calls and steps together; "
    "those of another file are taken now, by reading its tensors.",
)
@click.option("--step", type=click.IntRange(0), help="With --stats: this step of a capture only.")
@with_recovery
@with_storage_options("FILE")
@click.pass_context
def command(
    ctx: click.Context,
    file: str,
    names: tuple[str, ...],
    *,
    depth: int | None,
    sort: str,
    chunks: bool,
    as_json: bool,
    stats: bool,
    step: int | None,
    recover: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """List the entries of FILE: names, dtypes, shapes and sizes.

    FILE is a .pt or .safetensors file, a URL, a directory of shards (or their index), or a
    directory of torch.distributed.checkpoint. NAMEs are
    names of entries, with all that is in them, or patterns such as '*.weight'; "('a.b', 0)" is a
    path of keys. No tensor is read without --stats.

    With --stats, NAMEs of a capture are paths of modules, with all that is in them. Lines are cut
    to the terminal; mean, std, min, max and norm are of the finite elements.
    """
    if gc.isenabled():  # all objects live until the end, so the collector would search in vain
        gc.disable()
        ctx.call_on_close(gc.enable)
    _check_options(sort, step, stats)
    files = find_files(file, storage_options, distributed=True)
    if stats:
        from ptsave.cli.ls_statistics import statistics_text

        text = statistics_text(files, recover, names, depth, step, as_json)
        _write(text)
        return
    folder = folder_at(file, storage_options) if files.source is None else None
    listings = list(list_files(files, recover=recover))
    _keep_until_exit(listings)
    is_set = files.source is None
    chosen = select(listings, names)
    if as_json:
        objects = [file_json(*pair) for pair in zip(listings, chosen, strict=True)]
        text = json.dumps(directory_json(file, files.index_path, objects) if is_set else objects[0])
    else:
        text = "\n".join(
            _lines(
                listings,
                chosen,
                terminal(),
                depth,
                sort,
                headings=_headings(files) if is_set else {},
                with_chunks=chunks,
            )
        )
        if folder is not None:
            _note_others(ctx, folder, files)
        if any(is_capture(listing.tree.obj) for listing in listings):
            note(ctx, "this is a capture: --stats lists its modules and their statistics")
    _write(text)


def _note_others(ctx: click.Context, folder: Folder, files: ShardFiles) -> None:
    """Name the checkpoints of a directory that are not listed."""
    others = look_into(folder, distributed=True).sets
    names = [
        each.name_of(each.index_path or each.paths[0])
        for each in others
        if not set(files.paths).issuperset(each.paths)
    ]
    if names:
        listed = printable(some_of(names, 3))
        note(ctx, f"not listed: {count_text(len(names), 'other checkpoint')} there, {listed}")


def _write(text: str) -> None:
    """Print text that may be long: click would look for colours in it."""
    if sys.stdout is not None:  # None if it was closed before Python started
        sys.stdout.write(f"{text}\n")


def _check_options(sort: str, step: int | None, stats: bool) -> None:
    if step is not None and not stats:
        raise click.UsageError("--step is for --stats")
    if sort != "file" and stats:
        raise click.UsageError("--stats lists tensors in the order of the file: leave --sort out")


def _keep_until_exit(listings: list[FileListing]) -> None:
    """Leave objects to the end of the process, which is faster than freeing each of 100,000."""
    cycle: list[object] = [listings]
    cycle.append(cycle)
    gc.freeze()


def _headings(files: ShardFiles) -> dict[str, str]:
    """Return what is said of each file behind its name."""
    keys = files.ranks or ((),) * len(files.paths)
    return {
        path: f" ({'.'.join(names)})" if names else ""
        for path, names in zip(files.paths, keys, strict=True)
    }


def _lines(
    listings: list[FileListing],
    chosen: list[list[int]],
    shown_on: Terminal,
    depth: int | None,
    sort: str,
    *,
    headings: Mapping[str, str],
    with_chunks: bool,
) -> list[str]:
    lines: list[str] = []
    for listing, numbers in zip(listings, chosen, strict=True):
        if headings:
            name = printable(os.path.basename(listing.path))
            heading = f"{name}{printable(headings.get(listing.path, ''))}:"
            lines.append(shown_on.paint(heading, bold=True))
        if sort == "size":
            lines += lines_by_size(listing, numbers, with_chunks=with_chunks, terminal=shown_on)
        else:
            lines += tree_lines(listing, numbers, depth, with_chunks=with_chunks, terminal=shown_on)
        lines.append("")
    return [*lines, *totals_lines(listings, chosen, shown_on)]
