"""``ptsave verify``: whether files are whole, and what of them is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import click

from ptsave.cli.command import (
    FAILED,
    NEGATIVE,
    Command,
    note,
    report_error,
    shows_progress,
)
from ptsave.cli.completing import FILE
from ptsave.cli.text import count_text, printable, size_text
from ptsave.errors import CorruptCheckpointError, NotCheckpointError
from ptsave.file_verification import Problem, Verification, compare_with_index, verify_file
from ptsave.progress import ProgressCallback, progress_bar
from ptsave.shard_files import ShardFiles, files_at
from ptsave.sources import FsspecFile, is_url

__all__ = ["command"]

_EXAMPLES = """
ptsave verify checkpoint.pt
ptsave verify --list checkpoint.pt   # names every damaged tensor, and every one that is whole
ptsave verify *.pt && rm -r backup
ptsave verify path/to/model          # a directory of shards, and its index
"""
_N_SHOWN = 5


@click.command("verify", cls=Command, examples=_EXAMPLES, short_help="Whether files are whole.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option("--list", "list_all", is_flag=True, help="Name all tensors, not only the first few.")
@click.pass_context
def command(ctx: click.Context, files: tuple[str, ...], list_all: bool) -> None:
    """Check that files are whole: every checksum, every size, every place.

    Exits with 1 if anything is damaged; says then which records are, which tensors that reaches,
    and which are whole. Files without checksums (safetensors, torch before 1.6) are checked as far
    as that goes.
    """
    codes = [0]
    models = []
    for file in files:
        try:
            models.append(_model_at(file))
        except Exception as error:
            codes.append(FAILED)
            report_error(ctx, error)
    nbytes = sum(_nbytes_of(path) for model in models for path in model.paths)
    with progress_bar(shows_progress(ctx), "verifying", nbytes, delay=1) as bar:
        done = 0
        for model in models:
            codes.append(_verify_model(ctx, model, list_all, _from(bar, done)))
            done += sum(map(_nbytes_of, model.paths))
    ctx.exit(max(codes))


def _verify_model(
    ctx: click.Context, model: _Model, list_all: bool, progress: ProgressCallback | None
) -> int:
    """Print what there is to say about a file, or a set of shards; return the exit code."""
    codes = [0]
    shards = []
    done = 0
    for path in model.paths:
        try:
            found = verify_file(path, _from(progress, done))
        except Exception as error:
            codes.append(FAILED)
            report_error(ctx, error)
            continue
        shards.append(found)
        done += found.nbytes
        _print(ctx, found, list_all)
    problems = [*model.problems, *compare_with_index(model.files, shards)]
    for problem in problems:
        click.echo(f"{printable(model.name)}: DAMAGED: {printable(problem.reason)}")
    if problems or any(shard.problems for shard in shards):
        codes.append(NEGATIVE)
    return max(codes)


@dataclass(frozen=True)
class _Model:
    """A file, or the shards in a directory."""

    name: str
    files: ShardFiles
    problems: list[Problem]

    @property
    def paths(self) -> list[str]:
        return self.files.paths


def _model_at(path: str) -> _Model:
    try:
        files = files_at(path)
    except FileNotFoundError as error:
        if error.filename == path:
            raise
        # A shard is missing.
        return _Model(path, ShardFiles([]), [Problem(f"{error.filename}: {error.strerror}")])
    except NotCheckpointError:
        raise
    except CorruptCheckpointError as error:  # the index
        return _Model(path, ShardFiles([]), [Problem(str(error))])
    if files is None and not is_url(path):
        os.stat(path)
    return _Model(path, files or ShardFiles([path]), [])


def _nbytes_of(path: str) -> int:
    try:
        return FsspecFile(path, {}).nbytes if is_url(path) else os.stat(path).st_size
    except OSError:
        return 0  # which is said when it is read


def _from(bar: ProgressCallback | None, begin: int) -> ProgressCallback | None:
    return None if bar is None else lambda done: bar(begin + done)


def _print(ctx: click.Context, found: Verification, list_all: bool) -> None:
    path = printable(found.path)
    for remark in found.remarks:
        note(ctx, f"{path}: {printable(remark)}")
    records = [count_text(found.n_records, "record")] if found.n_records else []
    n_tensors = [] if found.tensors is None else [count_text(len(found.tensors), "tensor")]
    facts = ", ".join([*records, *n_tensors, size_text(found.nbytes)])
    if not found.problems:
        click.echo(f"{path}: whole ({facts})")
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
    if found.whole and found.n_records and found.problems[0].record is not None:
        yield f"  read them with: ptsave extract {shlex.quote(printable(found.path))} NAME..."


def _names(label: str, names: list[str], list_all: bool) -> Iterator[str]:
    shown = names if list_all else names[:_N_SHOWN]
    for name in shown:
        yield f"    {label} {printable(name)}"
    if len(names) > len(shown):
        yield f"    {label} and {len(names) - len(shown):,} more (--list shows all)"
