"""``ptsave convert``, ``compact`` and ``extract``: rewrite a checkpoint, or a part of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from ptsave.cli.commands import (
    FILE,
    SOURCE,
    STANDARD_INPUT,
    Command,
    complete_names,
    note,
    result,
    shows_progress,
    with_json,
    with_recovery,
    with_storage_options,
    with_trust,
)
from ptsave.cli.versions import folder_of_versions
from ptsave.errors import CorruptCheckpointError
from ptsave.support.text import count_text, printable, size_text, some_of

_CONVERT_EXAMPLES = """
ptsave convert pytorch_model.bin model.safetensors
ptsave convert model.safetensors model.pt
ptsave convert checkpoint.pt model.safetensors --drop   # leave out other values
ptsave convert checkpoint.pt shards/ --max-shard-size 2GB
ptsave convert shards/ model.pt
ptsave convert .run.pt.4f1c0a93b2d7e856.ptsave run.pt --recover  # what a killed process has left
ptsave convert old.pt new.pt                            # from before torch 1.6, or compressed
ptsave convert checkpoints/1000 model.pt                # of torch.distributed.checkpoint: all ranks
ptsave convert model.pt checkpoint --format dcp         # for torch.distributed.checkpoint
"""


@click.command("convert", cls=Command, examples=_CONVERT_EXAMPLES)
@click.argument("source", type=SOURCE)
@click.argument("target", type=FILE)
@click.option(
    "--format",
    type=click.Choice(["pt", "safetensors", "dcp"]),
    help="The format of a directory (default: safetensors), or of a file with an unknown suffix; "
    "dcp is a directory for torch.distributed.checkpoint.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Most bytes in one shard. Default: 5GB.")
@click.option(
    "--max-size",
    metavar="SIZE",
    help="The most bytes that all tensors may take. Expanded and shared ones are written in full. "
    "Default: 8 times the size of their storages, at least 1GiB.",
)
@click.option("--drop", is_flag=True, help="Leave out what the format cannot hold.")
@click.option("-f", "--force", is_flag=True, help="Replace TARGET if it exists.")
@click.option("--fsync", is_flag=True, help="Wait until all data is on the disk.")
@click.option(
    "--checksums/--no-checksums",
    default=True,
    help="Whether a safetensors file gets checksums of its tensors. Default: yes.",
)
@with_json
@with_recovery
@with_trust
@with_storage_options("SOURCE")
@with_storage_options("TARGET", "target")
@click.pass_context
def convert_command(
    ctx: click.Context, /, *, source: str, target: str, as_json: bool, **options: Any
) -> None:
    """Write the tensors of SOURCE in the format of TARGET.

    SOURCE is a file, a directory of shards, its index, a URL, or a directory of
    torch.distributed.checkpoint.  TARGET is a file (.pt, .pth, .bin, .ckpt, .safetensors) or, with
    no suffix or a slash at its end, a directory of shards.  The bytes are copied from file to file,
    and verified against their checksums.

    With --json: an object with path, tensors (how many), nbytes, seconds and remarks.
    """
    if target == "-":
        raise click.UsageError("TARGET cannot be standard output: for a file called -, pass ./-")
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


# ------------------------------------------------------------------------------------------ compact

_COMPACT_EXAMPLES = """
ptsave compact checkpoint.pt --dry-run
ptsave compact checkpoint.pt -o small.pt
ptsave compact checkpoint.pt --in-place
ptsave compact path/to/model -o small   # a directory of shards
ptsave compact path/to/versions --in-place   # makes one version of several
"""


@click.command("compact", cls=Command, examples=_COMPACT_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.option("-o", "--output", type=FILE, metavar="OUT", help="Where to write the compact file.")
@click.option("--in-place", is_flag=True, help="Replace FILE if the new file is smaller.")
@click.option("--dry-run", is_flag=True, help="Only print how many bytes would be saved.")
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--fsync", is_flag=True, help="Wait until all data is on the disk.")
@with_json
@with_trust
@with_storage_options("FILE")
@with_storage_options("OUT", "target")
@click.pass_context
def compact_command(
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
    keep their names; OUT is then a directory.

    A checkpoint contains the whole storage of a saved view. After compacting, views that overlap
    still share memory; views of one storage that are a KiB or more apart get separate storages.

    If FILE is a directory of versions (`ptsave delta`), the patches since the last whole version
    become one version, with --in-place. The others are removed.

    With --json: an object with path, tensors (how many), storages (how many have unused bytes),
    nbytes_before, nbytes and written (whether there is a new file). For versions: the attributes of
    ptsave.deltas.Folding, and written.
    """
    if output == "-":
        raise click.UsageError("OUT cannot be standard output: for a file called -, pass ./-")
    if in_place and file == STANDARD_INPUT:
        raise click.UsageError("Standard input cannot be replaced: pass --output OUT")
    if folder_of_versions(file, options["storage_options"]) is not None:
        if output is not None or in_place == dry_run:
            raise click.UsageError("Versions: pass either --in-place or --dry-run, and no --output")
        _fold(ctx, file, as_json, dry_run, options["fsync"], options["storage_options"])
        return
    from ptsave.conversion.compacting import compact

    if in_place == (output is not None) and not (dry_run and output is None and not in_place):
        raise click.UsageError("pass one of --output OUT, --in-place and --dry-run")
    done = compact(file, output, dry_run=dry_run, progress=shows_progress(ctx), **options)
    if as_json:
        facts = {"path": done.path, "tensors": done.n_tensors, "storages": done.n_storages}
        facts |= {"nbytes_before": done.nbytes_before, "nbytes": done.nbytes}
        click.echo(json.dumps({**facts, "written": done.is_written}))
        return
    saved = done.nbytes_before - done.nbytes
    where = f"wrote {done.path}" if done.is_written else file
    if done.n_storages == 0:
        found = "nothing to gain: the tensors use all of their storages"
    elif saved <= 0:
        found = "nothing to gain: the new file would not be smaller"
    else:
        could = "saved" if done.is_written else "could be saved"
        found = f"{size_text(done.nbytes_before)} -> {size_text(done.nbytes)}, "
        found += f"{size_text(saved)} {could} in {count_text(done.n_storages, 'storage')}"
    result(ctx, f"{where}: {found}")


def _fold(ctx: click.Context, file: str, as_json: bool, dry_run: bool, *options: Any) -> None:
    from ptsave.deltas import fold

    fsync, storage_options = options
    done = fold(file, dry_run=dry_run, fsync=fsync, storage_options=storage_options)
    is_written = not dry_run and bool(done.removed)
    if as_json:
        click.echo(json.dumps({**done._asdict(), "written": is_written}))
        return
    count = count_text(len(done.removed), "other version")
    found = f"{count} {'became' if is_written else 'could become'} part of it, "
    found += f"{size_text(done.nbytes_before)} -> {size_text(done.nbytes)}"
    result(ctx, f"{done.path}: {found if done.removed else 'nothing to gain: no other patches'}")


# ------------------------------------------------------------------------------------------ extract

_N_SHOWN = 8
_EXTRACT_EXAMPLES = """
ptsave extract checkpoint.pt model                     # the state dict alone: model.pt
ptsave extract checkpoint.pt model -o model.safetensors
ptsave extract checkpoint.pt model.embed.weight -o embed.npy
ptsave extract checkpoint.pt epoch optimizer.param_groups -o some.pt
ptsave extract s3://bucket/checkpoint.pt model.head    # reads only that
ptsave extract damaged.pt --whole -o rest.pt           # all that is not damaged
ptsave extract damaged.pt model.embed.weight --no-verify
ptsave extract checkpoint.pt model -o - | ssh host 'cat > model.pt'
"""


@click.command("extract", cls=Command, examples=_EXTRACT_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_names)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="A .pt, .safetensors or .npy file, or - for standard output. Default: NAME.pt.",
)
@click.option(
    "--whole",
    is_flag=True,
    help="Write all undamaged entries, instead of NAMEs, even from a file that was cut short. The "
    "names of damaged and missing entries are printed.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Whether to compare checksums; if not, damaged tensors are read as they are.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="The most bytes that tensors may take in a .safetensors or .npy file, where expanded "
    "tensors are written in full. Default: 8 times the size of their storages, at least 1GiB.",
)
@with_json
@with_recovery
@with_trust
@with_storage_options("FILE")
@with_storage_options("OUTPUT", "target")
@click.pass_context
def extract_command(
    ctx: click.Context,
    *,
    file: str,
    names: tuple[str, ...],
    output: str | None,
    whole: bool,
    force: bool,
    verify: bool,
    max_size: str | None,
    as_json: bool,
    recover: bool,
    storage_options: dict[str, Any] | None,
    target_storage_options: dict[str, Any] | None,
) -> None:
    """Write entries of FILE to a new file.

    Each NAME is the dotted name of a tensor, a container such as model, or another value, as
    `ptsave ls` shows it. One entry is written as it is; several entries are written as a dict. No
    other entry is read. If a name is ambiguous, pass a Python tuple of keys: "('a.b', 0)".

    With --json: an object with path, entries (the names), tensors and values (how many), and nbytes
    (of the tensors). With --whole, left_out has the names of entries that are left out.
    """
    if whole is bool(names):
        raise click.UsageError("Pass names of entries, or --whole for all undamaged entries")
    if whole and output is None:
        raise click.UsageError("--whole needs a name for the new file: pass -o OUT")
    if whole and not verify:
        raise click.UsageError("--whole finds damage by checksums, which --no-verify turns off")
    from ptsave.inspection.extraction import (
        count_entries,
        default_output,
        read_whole,
        write_entries,
    )

    if output is None and len(names) > 1:
        raise click.UsageError("Several entries need a name for the new file: pass -o OUT")
    target = default_output(names[0]) if output is None else output
    if target == "-" and as_json:
        raise click.UsageError("--json and the checkpoint cannot both go to standard output")
    if target == "-" and sys.stdout.isatty():
        raise click.UsageError("A checkpoint cannot be shown on a terminal: use -o OUT, or a pipe")
    lost: list[str] = []
    if whole:
        rest, lost = read_whole(file, storage_options=storage_options)
        entries, written = {"": rest}, [*rest]  # a single entry is not wrapped in a dict
    else:
        entries = _read_named(file, names, verify=verify, recover=recover, options=storage_options)
        written = [*entries]
    write_entries(
        entries,
        sys.stdout.buffer if target == "-" else target,
        overwrite=force,
        max_size=max_size,
        storage_options=target_storage_options,
    )
    counts = count_entries(entries)
    if as_json:
        found = {"path": target, "entries": written, **counts._asdict()}
        found |= {"left_out": lost} if whole else {}
        click.echo(json.dumps(found))
        return
    if lost:
        note(ctx, f"left out, because damaged or not built: {some_of(lost, _N_SHOWN)}")
    parts = [count_text(counts.tensors, "tensor")] if counts.tensors else []
    parts += [count_text(counts.values, "value")] if counts.values else []
    parts += [size_text(counts.nbytes)] if counts.tensors else []
    if target != "-":
        result(ctx, f"wrote {printable(target)}: {', '.join(parts) or 'nothing'}")


def _read_named(
    file: str, names: Sequence[str], *, verify: bool, recover: bool, options: Any
) -> dict[str, Any]:
    from ptsave.inspection.extraction import read_entries

    try:
        return read_entries(file, names, verify=verify, recover=recover, storage_options=options)
    except CorruptCheckpointError as error:
        # A record differs from its checksum; for other kinds of damage, `finding` is set.
        if type(error) is CorruptCheckpointError and error.advice and not error.finding:
            words = error.brief.removesuffix(".")
            error.args = (f"{words}, or use --no-verify to read it as it is.",)
        raise
