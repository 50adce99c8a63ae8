"""``ptsave ls``: lists the entries of a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from glob import has_magic
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from ptsave.cli.command import FAILED, Command, note, report_error, with_recovery
from ptsave.cli.completing import FILE, complete_names, names_in
from ptsave.cli.listing_json import directory_json, file_json
from ptsave.cli.listing_text import Style, lines_by_size, totals_lines, tree_lines
from ptsave.cli.standard_input import path_of_standard_input
from ptsave.cli.storage_options import with_storage_options
from ptsave.cli.terminal import terminal
from ptsave.contents.captures import is_capture
from ptsave.contents.checkpoint_files import PROMISING, find_files, look_into
from ptsave.contents.shard_files import ShardFiles
from ptsave.inspection.listing import FileListing, list_files, select
from ptsave.sources.opening import Folder, folder_at
from ptsave.sources.urls import is_url
from ptsave.support.text import count_text, printable, some_of

_EXAMPLES = """
ptsave ls checkpoint.pt
ptsave ls checkpoint.pt optimizer '*.bias'  # only these
ptsave ls step-*.pt                         # several files
ptsave ls checkpoint.pt -l                  # where each tensor lies in the file
ptsave ls checkpoint.pt --depth 1           # only the top level
ptsave ls model.safetensors --sort size     # the largest tensors first
ptsave ls s3://bucket/checkpoint.pt         # reads the directory and the pickle, no tensors
ptsave ls path/to/model                     # a directory of shards
ptsave ls checkpoints/1000 --chunks         # of many ranks: the parts of each tensor
ptsave ls checkpoint.pt --json | jq '.tensors[].name'
ptsave ls checkpoint.pt --stats             # reads the tensors: mean, std, min, max, NaN, Inf
ptsave ls run.pt                            # a capture: the statistics of its modules
ptsave ls .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave ls run.pt --step 3 'layers.*.mlp'
"""


class _Options(NamedTuple):
    """The options of one call, for each file."""

    names: tuple[str, ...]
    depth: int | None
    sort: str
    long: bool
    chunks: bool
    as_json: bool
    stats: bool | None  # None: only for a capture
    step: int | None
    recover: bool
    storage_options: dict[str, Any] | None


def _complete(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return complete_names(ctx, parameter, incomplete) or FILE.shell_complete(
        ctx, parameter, incomplete
    )


@click.command("ls", cls=Command, examples=_EXAMPLES, short_help="What a file holds.")
@click.argument("file", type=FILE)
@click.argument("others", metavar="[FILE]... [NAME]...", nargs=-1, shell_complete=_complete)
@click.option("--depth", type=click.IntRange(1), help="How many levels to show.")
@click.option(
    "--sort",
    type=click.Choice(["file", "size"]),
    default="file",
    help="The order: as in the file (a tree), or tensors by size, the largest first.",
)
@click.option(
    "-l",
    "--long",
    is_flag=True,
    help="Add each tensor's place: its size in bytes, offset, record and storage; and --chunks.",
)
@click.option(
    "--chunks",
    is_flag=True,
    help="Of a distributed checkpoint: the parts of each tensor, where they are and in which file.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object for each FILE, for programs."
)
@click.option(
    "--stats/--no-stats",
    default=None,
    help="Statistics of tensors: those of a capture by modules, all calls and steps together (the "
    "default for a capture); those of another file are taken now, by reading its tensors.",
)
@click.option("--step", type=click.IntRange(0), help="Statistics of this step of a capture only.")
@with_recovery
@with_storage_options("FILE")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    file: str,
    others: tuple[str, ...],
    *,
    stats: bool | None,
    step: int | None,
    **options: Any,
) -> None:
    """List the entries of FILE: names, dtypes, shapes and sizes.

    FILE is a .pt or .safetensors file, a URL, a directory of shards (or their index), or a
    directory of torch.distributed.checkpoint. NAMEs are names of entries, with all that is in them,
    or patterns such as '*.weight'; "('a.b', 0)" is a path of keys. No tensor is read without
    --stats.

    Another argument is a FILE, too, if a file is there, or it ends as one (.pt, .safetensors, ...),
    and the first FILE has no entry of that name. NAMEs are looked for in each. A FILE that cannot
    be listed is an error, and the others are listed all the same.

    With statistics, NAMEs of a capture are paths of modules, with all that is in them. Lines are
    cut to the terminal; mean, std, min, max and norm are of the finite elements.
    """
    if gc.isenabled():  # all objects live until the end, so collecting finds nothing
        gc.disable()
        ctx.call_on_close(gc.enable)
    stats = True if step is not None and stats is None else stats
    is_entries = options["sort"] != "file" or options["long"] or options["chunks"]
    _check_options(is_entries, step, stats)
    stats = False if is_entries else stats
    needs_values = bool(stats or options["recover"])

    def source(text: str) -> str:
        if text != "-":
            return text
        return path_of_standard_input(ctx, needs_values=needs_values)

    file = source(file)
    places, names = _places_and_names(file, others, stats is not False, options)
    files = [*map(source, places)]
    asked = _Options(names, stats=stats, step=step, **options)
    if not files:
        _write(_listed(ctx, file, asked))
        return
    code = 0
    for number, path in enumerate([file, *files]):
        try:
            text = _listed(ctx, path, asked)
        except click.ClickException:
            raise
        except Exception as error:
            report_error(ctx, error)
            code = FAILED
        else:
            heading = terminal().paint(f"==> {printable(path)} <==", bold=True)
            begin = "\n" if number else ""
            _write(text if asked.as_json else f"{begin}{heading}\n{text}")
    ctx.exit(code)


def _places_and_names(
    file: str, others: Sequence[str], of_modules: bool, options: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the other arguments into files and names of entries."""
    places = {each for each in others if _is_place(each)}
    if places:
        with suppress(Exception):  # reported when the file is listed
            found = set(names_in(file, options["storage_options"], of_modules))
            patterns = {each for each in places - found if has_magic(each)}
            places -= found
            places -= {each for each in patterns if any(fnmatchcase(name, each) for name in found)}
    return tuple(each for each in others if each in places), tuple(
        each for each in others if each not in places
    )


def _is_place(text: str) -> bool:
    is_called_so = text == "-" or is_url(text) or re.fullmatch(PROMISING, text)
    return bool(is_called_so) or os.path.lexists(text)


def _listed(ctx: click.Context, file: str, asked: _Options) -> str:
    """Return the listing of one file as text."""
    files = find_files(file, asked.storage_options, distributed=True)
    listings = [] if asked.stats else list(list_files(files, recover=asked.recover))
    _keep_until_exit(listings)
    if asked.stats is None and len(listings) == 1 and is_capture(listings[0].tree.obj):
        files = find_files(file, asked.storage_options)  # from the beginning
        asked = asked._replace(stats=True)
    if asked.stats:
        from ptsave.cli.statistics import statistics_text

        return statistics_text(
            files, asked.recover, asked.names, asked.depth, asked.step, asked.as_json
        )
    is_set = files.source is None
    chosen = select(listings, asked.names)
    if asked.as_json:
        objects = [file_json(*pair) for pair in zip(listings, chosen, strict=True)]
        return json.dumps(directory_json(file, files.index_path, objects) if is_set else objects[0])
    folder = folder_at(file, asked.storage_options) if is_set else None
    if folder is not None:
        _note_others(ctx, folder, files)
    return "\n".join(_lines(listings, chosen, asked, headings=_headings(files) if is_set else {}))


def _note_others(ctx: click.Context, folder: Folder, files: ShardFiles) -> None:
    """Print a remark that names the directory's checkpoints that are not listed."""
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
    """Print text without click, which would search long text for colours."""
    if sys.stdout is not None:  # None if it was closed before Python started
        sys.stdout.write(f"{text}\n")


def _check_options(is_entries: bool, step: int | None, stats: bool | None) -> None:
    if step is not None and stats is False:
        raise click.UsageError("--step is for --stats")
    if is_entries and stats:
        raise click.UsageError(
            "--stats lists tensors in the order of the file: leave --sort, --long and --chunks out"
        )


def _keep_until_exit(listings: list[FileListing]) -> None:
    """Keep objects until the process ends, which is faster than to free 100,000 of them."""
    cycle: list[object] = [listings]
    cycle.append(cycle)
    gc.freeze()


def _headings(files: ShardFiles) -> dict[str, str]:
    """Return the text after each file's name in its heading: the keys of a rank's file."""
    keys = files.ranks or ((),) * len(files.paths)
    return {
        path: f" ({'.'.join(names)})" if names else ""
        for path, names in zip(files.paths, keys, strict=True)
    }


def _lines(
    listings: list[FileListing],
    chosen: list[list[int]],
    asked: _Options,
    *,
    headings: Mapping[str, str],
) -> list[str]:
    shown_on = terminal()
    lines: list[str] = []
    for listing, numbers in zip(listings, chosen, strict=True):
        if headings:
            name = printable(os.path.basename(listing.path))
            heading = f"{name}{printable(headings.get(listing.path, ''))}:"
            lines.append(shown_on.paint(heading, bold=True))
        style = Style(shown_on, with_places=asked.long, with_chunks=asked.chunks or asked.long)
        if asked.sort == "size":
            lines += lines_by_size(listing, numbers, style)
        else:
            lines += tree_lines(listing, numbers, asked.depth, style)
        lines.append("")
    return [*lines, *totals_lines(listings, chosen, shown_on)]
