"""``ptsave convert``: writes a checkpoint in another format."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from ptsave.cli.arguments import FILE, SOURCE, with_storage_options
from ptsave.cli.command import (
    Command,
    note,
    result,
    shows_progress,
    with_json,
    with_recovery,
    with_trust,
)
from ptsave.support.text import count_text, size_text

_EXAMPLES = """
ptsave convert pytorch_model.bin model.safetensors
ptsave convert model.safetensors model.pt
ptsave convert checkpoint.pt model.safetensors --drop   # leave out what is no tensor
ptsave convert checkpoint.pt shards/ --max-shard-size 2GB
ptsave convert shards/ model.pt
ptsave convert .run.pt.4f1c0a93b2d7e856.ptsave run.pt --recover  # what a killed process has left
ptsave convert old.pt new.pt                            # from before torch 1.6, or compressed
ptsave convert checkpoints/1000 model.pt                # of torch.distributed.checkpoint: all ranks
ptsave convert model.pt checkpoint --format dcp         # for torch.distributed.checkpoint
"""


@click.command("convert", cls=Command, examples=_EXAMPLES)
@click.argument("source", type=SOURCE)
@click.argument("target", type=FILE)
@click.option(
    "--format",
    type=click.Choice(["pt", "safetensors", "dcp"]),
    help="The format of a directory (default: safetensors), or of a file with an unknown suffix; "
    "dcp is a directory for torch.distributed.checkpoint.",
)
@click.option("--max-shard-size", metavar="SIZE", help="For a directory; default: 5GB.")
@click.option(
    "--max-size",
    metavar="SIZE",
    help="The most that all tensors may take; expanded and shared ones are written in full. "
    "Default: 8 times their storages, at least 1GiB.",
)
@click.option("--drop", is_flag=True, help="Leave out what the format cannot hold.")
@click.option("-f", "--force", is_flag=True, help="Replace what is there.")
@click.option("--fsync", is_flag=True, help="Wait until all is on the disk, past all caches.")
@with_json
@with_recovery
@with_trust
@with_storage_options("SOURCE")
@with_storage_options("TARGET", "target")
@click.pass_context
def command(
    ctx: click.Context, /, *, source: str, target: str, as_json: bool, **options: Any
) -> None:
    """Write the tensors of SOURCE in the format of TARGET.

    SOURCE is a file, a directory of shards, its index, a URL, or a directory of
    torch.distributed.checkpoint.  TARGET is a file (.pt, .pth, .bin, .ckpt, .safetensors) or, with
    no suffix or a slash at its end, a directory of shards.
    Bytes are copied from file to file, and compared with their checksums on the way.

    With --json: an object with path, tensors (how many), nbytes, seconds and remarks.
    """
    if target == "-":
        raise click.UsageError("TARGET is a file or a directory: ./- if it is called -")
    from ptsave.conversion.converting import convert

    begin = time.perf_counter()
    conversion = convert(source, target, progress=shows_progress(ctx), **options)
    seconds = time.perf_counter() - begin
    if as_json:
        found = {"path": conversion.path, "tensors": conversion.n_tensors}
        found |= {"nbytes": conversion.nbytes, "seconds": seconds, "remarks": conversion.remarks}
        click.echo(json.dumps(found))
        return
    for remark in conversion.remarks:
        note(ctx, remark)
    what = count_text(conversion.n_tensors, "tensor")
    size = size_text(conversion.nbytes)
    result(ctx, f"wrote {conversion.path}: {what}, {size} in {seconds:.2f} s")
