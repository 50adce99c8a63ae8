"""``ptsave compact``: removes bytes that no tensor uses."""

from __future__ import annotations

import json
from typing import Any

import click

from ptsave.cli.arguments import FILE, SOURCE, STANDARD_INPUT, with_storage_options
from ptsave.cli.command import Command, result, shows_progress, with_json, with_trust
from ptsave.support.text import count_text, size_text

_EXAMPLES = """
ptsave compact checkpoint.pt --dry-run
ptsave compact checkpoint.pt -o small.pt
ptsave compact checkpoint.pt --in-place
ptsave compact path/to/model -o small   # a directory of shards
"""


@click.command("compact", cls=Command, examples=_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.option("-o", "--output", type=FILE, metavar="OUT", help="Where to write the compact file.")
@click.option("--in-place", is_flag=True, help="Replace FILE, if that makes it smaller.")
@click.option("--dry-run", is_flag=True, help="Only say what would be saved.")
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it is there.")
@click.option("--fsync", is_flag=True, help="Wait until all is on the disk, past all caches.")
@with_json
@with_trust
@with_storage_options("FILE")
@with_storage_options("OUT", "target")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    file: str,
    output: str | None,
    in_place: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rewrite FILE so that its storages hold only bytes that its tensors use.

    FILE is a checkpoint, a directory of shards or their index. Shards are compacted one by one and
    keep their names; OUT is a directory then.

    A saved view takes its whole storage along.  Views that overlap go on sharing memory. Views of
    one storage that are a KiB or more apart get storages of their own.

    With --json: an object with path, tensors (how many), storages (how many have unused bytes),
    nbytes_before, nbytes and written (whether there is a new file).
    """
    if output == "-":
        raise click.UsageError("OUT is a file or a directory: ./- if it is called -")
    if in_place and file == STANDARD_INPUT:
        raise click.UsageError("Standard input cannot be replaced: pass --output OUT")
    from ptsave.conversion.compacting import compact

    if in_place == (output is not None) and not (dry_run and output is None and not in_place):
        raise click.UsageError("pass one of --output OUT, --in-place and --dry-run")
    done = compact(file, output, dry_run=dry_run, progress=shows_progress(ctx), **options)
    if as_json:
        found = {"path": done.path, "tensors": done.n_tensors, "storages": done.n_storages}
        found |= {"nbytes_before": done.nbytes_before, "nbytes": done.nbytes}
        found |= {"written": done.is_written}
        click.echo(json.dumps(found))
        return
    saved = done.nbytes_before - done.nbytes
    where = f"wrote {done.path}" if done.is_written else file
    if done.n_storages == 0:
        result(ctx, f"{where}: nothing to save: its tensors use all of their storages")
        return
    if saved <= 0:
        result(ctx, f"{where}: nothing to save: it gets no smaller")
        return
    change = f"{size_text(done.nbytes_before)} -> {size_text(done.nbytes)}"
    parts = count_text(done.n_storages, "storage")
    could = "saved" if done.is_written else "could be saved"
    result(ctx, f"{where}: {change}, {size_text(saved)} {could} in {parts}")
