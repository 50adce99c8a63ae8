"""``ptsave verify``: checks that files are whole, and names the parts that are not."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from ptsave.contents.checkpoint_files import checkpoint_files
from ptsave.contents.shard_files import ShardFiles, files_at
from ptsave.errors import CorruptCheckpointError, NotCheckpointError
from ptsave.inspection.verification import Problem, Verification, compare_with_index, verify_file
from ptsave.sources.ranges import FsspecFile
from ptsave.sources.urls import is_url, refuse_url
from ptsave.support.progress import ProgressCallback, progress_bar, progress_from

__all__ = ["command"]

_EXAMPLES = """
ptsave verify checkpoint.pt
ptsave verify --list checkpoint.pt   # names every damaged tensor, and every one that is whole
ptsave verify *.pt && rm -r backup
ptsave verify path/to/checkpoint-500 # every checkpoint in a directory, shards with their index
"""
_N_SHOWN = 5


@click.command("verify", cls=Command, examples=_EXAMPLES, short_help="Whether files are whole.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option("--list", "list_all", is_flag=True, help="Name all tensors, not only the first few.")
@click.pass_context
def command(ctx: click.Context, files: tuple[str, ...], list_all: bool) -> None:
    """Check that files are whole: every checksum, every size, every place.

    Of a directory every checkpoint is checked that lies in it, whatever it is called: shards with
    their index, and each other file. What was not looked at is said.

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
            codes.append(_verify_model(ctx, model, list_all, progress_from(bar, done)))
            done += sum(map(_nbytes_of, model.paths))
    ctx.exit(max(codes))


def _verify_model(
    ctx: click.Context, model: _Model, list_all: bool, progress: ProgressCallback | None
) -> int:
    """Print the findings about one argument; return the exit code."""
    codes = [0]
    problems = list(model.problems)
    done = 0
    for files in model.sets:
        shards = []
        for path in files.paths:
            try:
                found = verify_file(path, progress_from(progress, done))
            except Exception as error:
                codes.append(FAILED)
                report_error(ctx, error)
            else:
                shards.append(found)
                codes.append(NEGATIVE if found.problems else 0)
                _print(ctx, found, list_all)
            done += _nbytes_of(path)
        problems += compare_with_index(files, shards)
    for problem in problems:
        click.echo(f"{printable(model.name)}: DAMAGED: {printable(problem.reason)}")
        codes.append(NEGATIVE)
    if model.rest:
        click.echo(f"{printable(model.name)}: not looked at: {_some(model.rest, list_all)}")
    return max(codes)


@dataclass(frozen=True)
class _Model:
    """A file, the shards that an index names, or the checkpoints in a directory."""

    name: str
    sets: list[ShardFiles]
    problems: list[Problem] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)  # other files there, which are not looked at

    @property
    def paths(self) -> list[str]:
        return [path for files in self.sets for path in files.paths]


def _model_at(path: str) -> _Model:
    if os.path.isdir(path):
        contents = checkpoint_files(path)
        problems = [Problem(text) for text in contents.problems]
        ignored = [f"{name} ({what})" if what else name for name, what in contents.ignored.items()]
        directories = [f"{name}/" for name in contents.directories]
        return _Model(path, contents.sets, problems, ignored + directories)
    try:
        files = files_at(path)
    except FileNotFoundError as error:
        if error.filename == path:
            raise
        return _Model(path, [], [Problem(f"{error.filename}: {error.strerror}")])  # of a shard
    except NotCheckpointError:
        raise
    except CorruptCheckpointError as error:  # the index
        return _Model(path, [], [Problem(str(error))])
    if files is None and not is_url(path):
        refuse_url(path)
        os.stat(path)
    return _Model(path, [files or ShardFiles([path])])


def _some(names: list[str], list_all: bool) -> str:
    shown = names if list_all else names[:_N_SHOWN]
    more = f" and {len(names) - len(shown):,} more (--list shows all)" if names != shown else ""
    return ", ".join(map(printable, shown)) + more


def _nbytes_of(path: str) -> int:
    try:
        return FsspecFile(path, {}).nbytes if is_url(path) else os.stat(path).st_size
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
        click.echo(f"{path}: {'whole' if found.has_checksums else 'no checksums'} ({facts})")
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
