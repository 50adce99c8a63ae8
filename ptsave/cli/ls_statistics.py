"""``ptsave ls --stats``: shows statistics of a checkpoint's tensors, or of a capture's modules."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import click

from ptsave.cli.listing_json import directory_json, file_json
from ptsave.cli.listing_text import totals_lines
from ptsave.cli.statistics_json import add_statistics, run_json
from ptsave.cli.statistics_text import entry_lines, module_lines
from ptsave.cli.terminal import terminal
from ptsave.contents.contents import Contents
from ptsave.contents.opening import open_each
from ptsave.contents.shard_files import ShardFiles
from ptsave.inspection.listing import FileListing, listing_of, select
from ptsave.inspection.statistics import ModuleStatistics, entry_statistics, module_statistics
from ptsave.support.text import count_text, printable
from ptsave.tree.capture_schema import is_capture
from ptsave.tree.captured_run import CapturedRun


def statistics_text(  # noqa: PLR0917
    files: ShardFiles,
    recover: bool,
    names: tuple[str, ...],
    depth: int | None,
    step: int | None,
    as_json: bool,
) -> str:
    """Return the statistics of a checkpoint's tensors, or of a capture's modules, as text."""
    contents = list(open_each(files, recover=recover))
    if len(contents) == 1 and is_capture(contents[0].obj):
        run = CapturedRun(contents[0].obj, contents[0].path)
        return _statistics_of_run(run, names, depth, step, as_json)
    if step is not None:
        raise click.UsageError(f"{files.path} is no capture, and has no steps: leave --step out")
    listings = [listing_of(each) for each in contents]
    chosen = select(listings, names)
    if as_json:
        objects = [
            add_statistics(file_json(listing, numbers), entry_statistics(each, listing, numbers))
            for each, listing, numbers in zip(contents, listings, chosen, strict=True)
        ]
        is_set = files.source is None
        return json.dumps(
            directory_json(files.path, files.index_path, objects) if is_set else objects[0]
        )
    return "\n".join(_statistics_of_files(contents, listings, chosen, depth))


def _statistics_of_run(
    run: CapturedRun, names: tuple[str, ...], depth: int | None, step: int | None, as_json: bool
) -> str:
    modules = module_statistics(run, step=step, patterns=names)
    if as_json:
        return json.dumps(run_json(run, modules))
    lines = module_lines(modules, depth, terminal())
    totals = _totals_of(modules, step) if names or step is not None else _totals_of_run(run)
    return "\n".join([*lines, "", totals, *_remarks_on(run)])


def _totals_of_run(run: CapturedRun) -> str:
    return (
        f"{count_text(len(run.steps), 'step')}, {count_text(len(run.call_rows), 'call')}, "
        f"{count_text(len(run.value_rows), 'value')}"
    )


def _totals_of(modules: list[ModuleStatistics], step: int | None) -> str:
    """Return the totals of the listed modules or step."""
    where = "" if step is None else f" in step {step}"
    n_calls = sum(module.n_calls for module in modules)
    n_tensors = sum(value.n_tensors for module in modules for value in module.values)
    return (
        f"{count_text(len(modules), 'module')}, {count_text(n_calls, 'call')}, "
        f"{count_text(n_tensors, 'tensor')}{where}"
    )


def _remarks_on(run: CapturedRun) -> Iterator[str]:
    if run.header.get("statistics") is False:
        yield "captured with statistics=False"
    if run.totals is None:
        yield "unfinished: the process was killed"


def _statistics_of_files(
    contents: list[Contents],
    listings: list[FileListing],
    chosen: list[list[int]],
    depth: int | None,
) -> Iterator[str]:
    for each, listing, numbers in zip(contents, listings, chosen, strict=True):
        if len(contents) > 1:
            yield f"{printable(os.path.basename(listing.path))}:"
        nodes = listing.tree.nodes
        shown = [number for number in numbers if depth is None or nodes[number].depth < depth]
        found = entry_statistics(each, listing, shown)
        yield from entry_lines(listing, shown, found, terminal())
        yield ""
    yield from totals_lines(listings, chosen, terminal())
