"""``ptsave ls`` lists the entries of checkpoints; ``ptsave show`` prints one entry."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from glob import has_magic
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ptsave.cli.commands import (
    FAILED,
    FILE,
    SOURCE,
    Command,
    complete_names,
    names_in,
    note,
    path_of_standard_input,
    report_error,
    with_json,
    with_recovery,
    with_storage_options,
    with_trust,
)
from ptsave.cli.listing import (
    ListOptions,
    Style,
    file_json,
    json_text,
    lines_by_size,
    totals_lines,
    tree_lines,
)
from ptsave.cli.runs import run_text
from ptsave.cli.terminal import terminal
from ptsave.cli.versions import folder_of_versions, versions_text
from ptsave.contents.captures import is_capture
from ptsave.contents.directories import PROMISING, find_files, look_into
from ptsave.contents.files import ShardFiles
from ptsave.inspection.reports import FileListing, list_files, listing_of, select
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import Folder, folder_at
from ptsave.support.text import count_text, dtype_text, printable, shape_text, size_text, some_of
from ptsave.tree.containers import is_container
from ptsave.tree.tree import EntryNames

if TYPE_CHECKING:
    from torch import Tensor

_LS_EXAMPLES = """
ptsave ls checkpoint.pt
ptsave ls checkpoint.pt optimizer '*.bias'  # only these
ptsave ls step-*.pt                         # several files
ptsave ls checkpoint.pt -l                  # where each tensor lies in the file
ptsave ls checkpoint.pt --depth 1           # only the top level
ptsave ls model.safetensors --sort size     # the largest tensors first
ptsave ls s3://bucket/checkpoint.pt         # reads the directory and the pickle, no tensors
ptsave ls path/to/model                     # a directory of shards
ptsave ls checkpoints/1000 --chunks         # a distributed checkpoint: the parts of each tensor
ptsave ls checkpoint.pt --json | jq '.tensors[].name'
ptsave ls checkpoint.pt --stats             # reads the tensors: mean, std, min, max, NaN, Inf
ptsave ls run.pt                            # a capture: the statistics of its modules
ptsave ls .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave ls run.pt --step 3 'layers.*.mlp'
ptsave ls s3://bucket/run /nvme/run         # AsyncCheckpointer(local=...): the steps by place
ptsave ls path/to/versions                  # versions of weights: ptsave delta
"""


def _complete(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    names = complete_names(ctx, parameter, incomplete)
    return names or FILE.shell_complete(ctx, parameter, incomplete)


@click.command("ls", cls=Command, examples=_LS_EXAMPLES)
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
    help="Add each tensor's place: size in bytes, offset, record and storage. Includes --chunks.",
)
@click.option(
    "--chunks",
    is_flag=True,
    help="Show the parts of each tensor of a distributed checkpoint, with their files.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each FILE, for programs."
)
@click.option(
    "--stats/--no-stats",
    default=None,
    help="Show statistics of a capture's modules over all calls and steps (the default for "
    "captures), or of any other file's tensors, which are read for this.",
)
@click.option("--step", type=click.IntRange(0), help="Show statistics of only this step.")
@with_recovery
@with_storage_options("FILE")
@click.pass_context
def ls_command(
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
    directory of torch.distributed.checkpoint. Each NAME is the name of an entry (its contents are
    listed, too), a pattern such as '*.weight', or a path of keys such as "('a.b', 0)". Without
    --stats, no tensor is read.

    There may be several FILEs. Another argument is a FILE if it is a URL, an existing path or ends
    in .pt, .safetensors, ..., unless the first FILE has an entry with that name. Each NAME is
    searched in all FILEs. If a FILE cannot be listed, the command reports an error, but still
    lists the others.

    If all FILEs are directories, and one has manifests of AsyncCheckpointer(local=...), the command
    lists the run's steps, unless there is an option for entries. A line shows the whole parts in
    each directory, and in brackets other places that manifests name. A protected step survives the
    loss of a host.

    If FILE is a directory of versions (`ptsave delta`), the command lists them: number, base,
    tensors, bytes, the part of all weights that this is (if a version is whole), and time.

    When statistics of a capture are shown, a NAME is a module's path, and includes submodules.
    Lines are cut to the terminal's width. mean, std, min, max and norm cover only finite elements.
    """
    if gc.isenabled():  # all objects live until the end, so collecting finds nothing
        gc.disable()
        ctx.call_on_close(gc.enable)
    stats = True if step is not None and stats is None else stats
    is_entries = options["sort"] != "file" or options["long"] or options["chunks"]
    if step is not None and stats is False:
        raise click.UsageError("--step needs --stats")
    if is_entries and stats:
        raise click.UsageError(
            "--stats lists tensors in the order of the file: leave --sort, --long and --chunks out"
        )
    stats = False if is_entries else stats
    needs_values = bool(stats or options["recover"])

    def source(text: str) -> str:
        return path_of_standard_input(ctx, needs_values=needs_values) if text == "-" else text

    file = source(file)
    if not (stats or is_entries or options["recover"] or options["depth"]):
        run = run_text(ctx, [file, *others], options["storage_options"], options["as_json"])
        if run is None and not others:
            folder = folder_of_versions(file, options["storage_options"])
            run = None if folder is None else versions_text(ctx, folder, options["as_json"])
        if run is not None:
            _write(run[0])
            ctx.exit(run[1])
    places = _places(file, others, stats is not False, options["storage_options"])
    names = tuple(each for each in others if each not in places)
    asked = ListOptions(names, stats=stats, step=step, **options)
    if not places:
        _write(_listed(ctx, file, asked))
        return
    code = 0
    files = [file, *(source(each) for each in others if each in places)]
    for number, path in enumerate(files):
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


def _places(
    file: str, others: Sequence[str], of_modules: bool, storage_options: dict[str, Any] | None
) -> set[str]:
    """Return the arguments in `others` that are files, not names of entries in `file`."""
    places = {
        each
        for each in others
        if each == "-" or is_url(each) or re.fullmatch(PROMISING, each) or os.path.lexists(each)
    }
    if places:
        with suppress(Exception):  # reported when the file is listed
            found = set(names_in(file, storage_options, of_modules))
            patterns = {each for each in places - found if has_magic(each)}
            places -= found
            places -= {each for each in patterns if any(fnmatchcase(name, each) for name in found)}
    return places


def _listed(ctx: click.Context, file: str, asked: ListOptions) -> str:
    """Return the listing of one file as text."""
    files = find_files(file, asked.storage_options, distributed=True)
    listings = [] if asked.stats else list(list_files(files, recover=asked.recover))
    # This reference cycle keeps all objects until the process ends, because freeing them is slow.
    circle: list[object] = [listings]
    circle.append(circle)
    gc.freeze()
    if asked.stats is None and len(listings) == 1 and is_capture(listings[0].tree.obj):
        files = find_files(file, asked.storage_options)  # opened again
        asked = asked._replace(stats=True)
    if asked.stats:
        from ptsave.cli.statistics import statistics_text

        return statistics_text(files, asked)
    chosen = select(listings, asked.names)
    if asked.as_json:
        objects = [file_json(*pair) for pair in zip(listings, chosen, strict=True)]
        return json_text(file, files, objects)
    folder = folder_at(file, asked.storage_options) if files.source is None else None
    if folder is not None:
        _note_others(ctx, folder, files)
    return "\n".join(_lines(listings, chosen, asked, files))


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
        note(ctx, f"not listed: {count_text(len(names), 'other checkpoint')} here ({listed})")


def _write(text: str) -> None:
    """Print text without click, which would search long text for colours."""
    if sys.stdout is not None:  # None if it was closed before Python started
        sys.stdout.write(f"{text}\n")


def _lines(
    listings: list[FileListing], chosen: list[list[int]], asked: ListOptions, files: ShardFiles
) -> list[str]:
    shown_on = terminal()
    style = Style(shown_on, with_places=asked.long, with_chunks=asked.chunks or asked.long)
    keys = dict(zip(files.paths, files.ranks or (), strict=False))  # for each rank's file
    lines: list[str] = []
    for listing, numbers in zip(listings, chosen, strict=True):
        if files.source is None:
            names = keys.get(listing.path)
            heading = os.path.basename(listing.path) + (f" ({'.'.join(names)})" if names else "")
            lines.append(shown_on.paint(f"{printable(heading)}:", bold=True))
        if asked.sort == "size":
            lines += lines_by_size(listing, numbers, style)
        else:
            lines += tree_lines(listing, numbers, asked.depth, style)
        lines.append("")
    return [*lines, *totals_lines(listings, chosen, shown_on)]


# --------------------------------------------------------------------------------------------- show

_WIDTH = 80
_MAX_VALUES = 1000  # torch also summarises a tensor with more elements
_SHOW_EXAMPLES = """
ptsave show checkpoint.pt epoch
ptsave show checkpoint.pt optimizer.param_groups
ptsave show model.safetensors embed.weight     # reads this tensor
ptsave show s3://bucket/checkpoint.pt model.head.bias
ptsave show checkpoints/1000 model.embed.weight --json | jq .statistics.max
ptsave show lightning.ckpt hyper_parameters --trust argparse.Namespace
"""


@click.command("show", cls=Command, examples=_SHOW_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.argument("name", default="", shell_complete=complete_names)
@with_json
@with_recovery
@with_trust
@with_storage_options("FILE")
def show_command(
    file: str, name: str, *, as_json: bool, recover: bool, storage_options: dict[str, Any] | None
) -> None:
    """Print one entry of FILE.

    NAME is a dotted name, as `ptsave ls` shows it, or a Python tuple of keys: "('a.b', 0)". Without
    NAME, the whole object is shown.

    For a tensor, the command prints dtype, shape, size, the device it was saved from, its numbers
    as torch prints them, and statistics of its finite elements. It reads no other tensor. A
    container that holds tensors is listed without reading them. Objects of unknown classes are not
    built: the error names the class (see --trust).

    With --json: an object with path, name, type and value. If JSON cannot express the value, value
    is null, and text is the value's repr. A tensor also has dtype, shape, nbytes, location, note
    and statistics; its value is null if it has more than 1,000 elements. NaN and infinities are
    null. A container that holds tensors is an object as in `ptsave ls --json`.
    """
    from ptsave.capturing.run import tensor_statistics
    from ptsave.cli.statistics import statistics_json, statistics_line
    from ptsave.comparison.entries import opened
    from ptsave.contents.contents import facts_of
    from ptsave.contents.opening import OpenOptions, open_checkpoint
    from ptsave.inspection.extraction import find_entry
    from ptsave.tree.leaves import read_entry, tensors_over

    contents = open_checkpoint(file, OpenOptions(storage_options, recover=recover))
    entry = find_entry(EntryNames(contents.obj, contents.path).find, name)
    tensors = tensors_over(entry)
    if tensors and is_container(entry):  # its tensors are not read
        listing = listing_of(contents)
        (numbers,) = select([listing], [name] if name else [])
        if as_json:
            click.echo(json.dumps(file_json(listing, numbers)))
        else:
            click.echo("\n".join(tree_lines(listing, numbers, None, Style(terminal()))))
        return
    shown = f"{contents.path}: {name!r}" if name else contents.path
    value = read_entry(entry, lambda each: contents.read(each, None), shown)
    facts: dict[str, Any] = {"path": contents.path, "name": name, "type": type(value).__name__}
    if not tensors:
        click.echo(json.dumps({**facts, **_value_json(value)}) if as_json else _value_text(value))
        return
    tensor, location = opened(value), contents.places_of(tensors)[0][3]
    ((dtype, shape, _, _, nbytes, _),) = facts_of([tensor])
    found = tensor_statistics(name, tensor, nbytes)
    if as_json:
        facts |= {"dtype": dtype_text(dtype), "shape": [*shape], "nbytes": nbytes}
        facts |= {"location": location, "note": found.note}
        facts |= {"statistics": statistics_json(found.statistics), "value": _numbers_json(tensor)}
        click.echo(json.dumps(facts))
        return
    where = "" if location is None else f", saved from {printable(location)}"
    head = f"{dtype_text(dtype)} {shape_text(shape)}, {size_text(nbytes)}{where}"
    try:
        text = str(tensor)
    except NotImplementedError as error:  # torch cannot read elements of this dtype
        text = f"no numbers: {error}"
    click.echo("\n".join([head, *map(printable, text.splitlines()), statistics_line(found)]))


def _value_text(value: Any) -> str:
    text = repr(value)
    if is_container(value):
        import pprint

        text = pprint.pformat(value, width=terminal().width or _WIDTH, sort_dicts=False)
    return "\n".join(map(printable, text.splitlines()))


def _value_json(value: Any) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # a set, NaN, a list that contains itself
        return {"value": None, "text": repr(value)}
    return {"value": value}


def _numbers_json(tensor: Tensor) -> Any:
    from ptsave.cli.statistics import number_json

    def as_json(numbers: Any) -> Any:
        return [*map(as_json, numbers)] if isinstance(numbers, list) else number_json(numbers)

    if tensor.is_nested or tensor.numel() > _MAX_VALUES:
        return None
    try:
        return as_json(tensor.tolist())
    except RuntimeError:  # a sparse tensor, or a dtype that Python does not have
        return None
