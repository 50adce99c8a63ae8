"""``ptsave verify``: checks that files are whole, and names the parts that are not."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import Any

import click

from ptsave.cli.command import (
    FAILED,
    NEGATIVE,
    Command,
    note,
    report_error,
    shows_progress,
    with_recovery,
)
from ptsave.cli.completing import FILE
from ptsave.cli.storage_options import with_storage_options
from ptsave.contents.checkpoint_files import CheckpointFiles, checkpoint_files
from ptsave.contents.rank_directories import nbytes_of_ranks
from ptsave.contents.shard_files import ShardFiles
from ptsave.inspection.findings import Problem, Verification, compare_with_index
from ptsave.inspection.whole_files import whole_file
from ptsave.sources.ranges import FsspecFile
from ptsave.sources.urls import is_url
from ptsave.support.progress import ProgressCallback, progress_bar, progress_from
from ptsave.support.text import count_text, printable, size_text

__all__ = ["command"]

_EXAMPLES = """
ptsave verify checkpoint.pt
ptsave verify --list checkpoint.pt   # names every damaged tensor, and every one that is whole
ptsave verify *.pt && rm -r backup
ptsave verify .run.pt.4f1c0a93b2d7e856.ptsave --recover  # what a killed process has left
ptsave verify path/to/checkpoint-500 # every checkpoint in a directory, shards with their index
"""
_N_SHOWN = 5


@click.command("verify", cls=Command, examples=_EXAMPLES, short_help="Whether files are whole.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option("--list", "list_all", is_flag=True, help="Name all tensors, not only the first few.")
@with_recovery
@with_storage_options("a FILE")
@click.pass_context
def command(
    ctx: click.Context,
    files: tuple[str, ...],
    list_all: bool,
    recover: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Check that files are whole: every checksum, every size, every place.

    Of a directory every checkpoint is checked that lies in it, whatever it is called: shards with
    their index, the files of all ranks of a distributed checkpoint, and each other file. Files that
    are not looked at are named.

    Exits with 1 if anything is damaged; says then which records are, which tensors that reaches,
    and which are whole. Files without checksums (safetensors, torch before 1.6) are checked as far
    as that goes.
    """
    codes = [0]
    found = []
    for file in files:
        try:
            found.append(checkpoint_files(file, storage_options))
            for each in found[-1].sets:
                each.close()  # of many files each descriptor counts
        except Exception as error:
            codes.append(FAILED)
            report_error(ctx, error)
    sizes = [_sizes_of(checkpoints) for checkpoints in found]
    nbytes = sum(sum(map(sum, each)) for each in sizes)
    with progress_bar(shows_progress(ctx), "verifying", nbytes, delay=1) as bar:
        done = 0
        for checkpoints, own in zip(found, sizes, strict=True):
            progress = progress_from(bar, done)
            codes.append(_verify_all(ctx, checkpoints, own, list_all, recover, progress))
            done += sum(map(sum, own))
    ctx.exit(max(codes))


def _sizes_of(found: CheckpointFiles) -> list[list[int]]:
    """Return the size of each file of each set: of a remote one it is asked once."""
    return [[_file_nbytes(files, path) for path in files.paths] for files in found.sets]


def _verify_all(  # noqa: PLR0917
    ctx: click.Context,
    checkpoints: CheckpointFiles,
    sizes: list[list[int]],
    list_all: bool,
    recover: bool,
    progress: ProgressCallback | None,
) -> int:
    """Print the findings about one argument; return the exit code."""
    codes = [0]
    problems = [Problem(text) for text in checkpoints.problems]
    done = 0
    for files, file_sizes in zip(checkpoints.sets, sizes, strict=True):
        shards = []
        for path, nbytes in zip(files.paths, file_sizes, strict=True):
            try:
                found = _verify(path, files, recover, progress_from(progress, done))
            except Exception as error:
                codes.append(FAILED)
                report_error(ctx, error)
            else:
                shards.append(found)
                codes.append(NEGATIVE if found.problems else 0)
                _print(ctx, found, list_all)
            done += nbytes
        problems += compare_with_index(files, shards)
    for problem in problems:
        click.echo(f"{printable(checkpoints.path)}: DAMAGED: {printable(problem.reason)}")
        codes.append(NEGATIVE)
    if rest := _rest_of(checkpoints):
        click.echo(f"{printable(checkpoints.path)}: not looked at: {_some(rest, list_all)}")
    return max(codes)


def _verify(
    path: str, files: ShardFiles, recover: bool, progress: ProgressCallback | None
) -> Verification:
    """Verify one file: without torch, which takes a second to import, if it is plain and whole."""
    found = None if recover else whole_file(path, progress)
    if found is not None:
        return found
    from ptsave.inspection.verification import verify_file

    return verify_file(path, progress, recover=recover, storage_options=files.storage_options)


def _rest_of(files: CheckpointFiles) -> list[str]:
    """Return the names of files and folders in a directory that are not looked at."""
    ignored = [f"{name} ({what})" if what else name for name, what in files.ignored.items()]
    return ignored + [f"{name}/" for name in files.directories]


def _some(names: list[str], list_all: bool) -> str:
    shown = names if list_all else names[:_N_SHOWN]
    more = f" and {len(names) - len(shown):,} more (--list shows all)" if names != shown else ""
    return ", ".join(map(printable, shown)) + more


def _file_nbytes(files: ShardFiles, path: str) -> int:
    try:
        if is_url(path):
            return FsspecFile(path, dict(files.storage_options)).nbytes
        return os.stat(path).st_size + nbytes_of_ranks(path)
    except OSError:
        return 0  # which is said when it is read


def _print(ctx: click.Context, found: Verification, list_all: bool) -> None:
    path = printable(found.path)
    for remark in found.remarks:
        note(ctx, f"{path}: {printable(remark)}")
    records = [count_text(found.n_records, "record")] if found.n_records else []
    n_tensors = [] if found.tensors is None else [count_text(len(found.tensors), "tensor")]
    facts = ", ".join([*records, *n_tensors, size_text(found.nbytes)])
    if not found.problems:
        state = "whole" if found.has_checksums else "no checksums"
        click.echo(f"{path}: {'unfinished, but ' if found.is_unfinished else ''}{state} ({facts})")
        return
    click.echo(f"{path}: DAMAGED ({facts})")
    click.echo("\n".join(_lines(found, list_all)))


def _lines(found: Verification, list_all: bool) -> Iterator[str]:
    for problem in found.problems:
        where = "" if problem.record is None else f"record {problem.record}: "
        at = "" if problem.offset is None else f" (at offset {problem.offset})"
        yield f"  {printable(where + problem.reason)}{at}"
        yield from _names("damaged:", problem.entries, list_all)
    if found.whole is None or found.tensors is None:
        return
    yield f"  {len(found.whole):,} of {count_text(len(found.tensors), 'tensor')} can be read"
    if list_all:
        yield from _names("whole:", found.whole, list_all)
    is_named = found.is_unfinished or found.problems[0].record is not None
    if found.whole and found.n_records and is_named:
        option = "--recover " if found.is_unfinished else ""
        path = shlex.quote(printable(found.path))
        yield f"  read them with: ptsave extract {option}{path} NAME..."


def _names(label: str, names: list[str], list_all: bool) -> Iterator[str]:
    shown = names if list_all else names[:_N_SHOWN]
    for name in shown:
        yield f"    {label} {printable(name)}"
    if len(names) > len(shown):
        yield f"    {label} and {len(names) - len(shown):,} more (--list shows all)"
