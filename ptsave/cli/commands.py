"""The group of all commands, and what they share: arguments, options, errors and remarks.

Modules that ``ptsave --help`` does not need are imported inside functions.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pickle import UnpicklingError
from typing import IO, Any

import click
from click.shell_completion import CompletionItem

import ptsave
from ptsave.cli.terminal import INTERRUPTED, colors_by_environment, raise_when_interrupted
from ptsave.errors import CheckpointWarning, CorruptCheckpointError, SaveError
from ptsave.sources.locations import is_url
from ptsave.support.text import printable

# Each command's purpose is here, so that help and completion do not import its module.
PURPOSES = {
    "ls": "List the entries of files.",
    "show": "Show one value, or a tensor's numbers.",
    "verify": "Check files for damage.",
    "globals": "List the code that a file needs.",
    "extract": "Write parts of a file to a new file.",
    "convert": "Write a file in another format.",
    "compact": "Write a file without its unused bytes.",
    "diff": "Compare two checkpoints.",
    "delta": "Write a new version of weights as a patch.",
    "apply": "Bring weights to a version.",
    "run": "Run a program whose saves and loads go through ptsave.",
    "bench": "Measure saves and loads on your disk.",
    "completion": "Print a completion script for your shell.",
}
# Commands that share a module; any other command is in the module of its own name.
_MODULES = {
    "ls": "entries",
    "show": "entries",
    "verify": "checks",
    "globals": "checks",
    "extract": "rewriting",
    "convert": "rewriting",
    "compact": "rewriting",
    "delta": "versions",
    "apply": "versions",
}


class _Commands(click.Group):
    """A group that imports a command's module when the command is used."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return super().make_context(*args, **{"color": colors_by_environment(), **kwargs})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*PURPOSES]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in PURPOSES:
            return None
        module = importlib.import_module(f"ptsave.cli.{_MODULES.get(name, name)}")
        command = getattr(module, f"{name}_command")
        assert isinstance(command, click.Command)
        # The garbage collector visits all objects, during imports and at exit.  Freezing exempts
        # the many objects of torch's modules.
        gc.freeze()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in PURPOSES and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            similar = difflib.get_close_matches(name, PURPOSES, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*PURPOSES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=purpose)
            for name, purpose in PURPOSES.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ptsave.__version__, prog_name="ptsave")
def commands() -> None:
    """Look into, check, convert and compare PyTorch checkpoints.

    Each command has examples: ptsave COMMAND --help
    """


# ------------------------------------------------------------------- options, errors and exit codes

# Exit codes as in diff and grep: 1 is the answer "no", 2 means that there is no answer.
NEGATIVE = 1
FAILED = 2
_PIPE_CLOSED = 141  # the code of a program that SIGPIPE ends

_MAX_LENGTH = 700
_MAX_SCANNED = 100 * _MAX_LENGTH  # before blanks and torch's C++ frames are removed
_WEIGHTS_ONLY = "Weights only load failed"
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")
_CPP_FRAMES = "\nException raised from "  # follows the messages of torch's C++ part


class Command(click.Command):
    """A command with ``--quiet`` and ``--debug`` that prints an error as one line."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.short_help = PURPOSES.get(str(self.name))
        self._examples = examples
        self.params += [
            _flag("--quiet", "-q", help="No progress bars and no remarks, only results."),
            _flag("--debug", help="Show the traceback of an error."),
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._examples:
            return
        with formatter.section("Examples"):
            for line in self._examples.strip().splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return super().make_context(*args, **{"color": colors_by_environment(), **kwargs})

    def invoke(self, ctx: click.Context) -> Any:
        raise_when_interrupted()
        try:
            with warnings.catch_warnings():
                warnings.showwarning = partial(_show_warning, ctx)
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except SaveError as error:  # also for a closed pipe as the target
            report_error(ctx, error)
            ctx.exit(FAILED)
        except BrokenPipeError:  # click would exit with 1, which means a negative answer
            _discard_unwritten()
            ctx.exit(_PIPE_CLOSED)
        except KeyboardInterrupt:
            _say("interrupted")
            ctx.exit(INTERRUPTED)
        except Exception as error:
            report_error(ctx, error)
            try:
                _flush_output()
            except OSError:
                _discard_unwritten()
            ctx.exit(FAILED)


@contextmanager
def exits_if_unwritable() -> Iterator[None]:
    """If standard output cannot be written, exit as `Command` does.

    Without this, Python's flush at exit would print several lines, and the exit code would be 120.
    """
    try:
        try:
            yield
        finally:
            _flush_output()
    except BrokenPipeError:
        _discard_unwritten()
        sys.exit(_PIPE_CLOSED)
    except OSError as error:
        _discard_unwritten()
        _say(one_line(error), color="red")
        sys.exit(FAILED)


def _flush_output() -> None:
    if sys.stdout is not None:  # None if it was closed before Python started
        sys.stdout.flush()


def _discard_unwritten() -> None:
    """Redirect standard output to /dev/null, so that Python's flush at exit cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _flag(*names: str, help: str) -> click.Option:  # noqa: A002 - as click calls it
    def keep(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        ctx.meta[f"ptsave.{option.name}"] = value

    return click.Option([*names], is_flag=True, expose_value=False, callback=keep, help=help)


def _is_set(ctx: click.Context, name: str) -> bool:
    """Return whether a flag that all commands share is set."""
    return bool(ctx.meta.get(f"ptsave.{name}"))


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    elif isinstance(error, OSError) and error.strerror:  # writing to standard output failed
        text = error.strerror
    elif isinstance(error, UnpicklingError) and _WEIGHTS_ONLY in str(error):
        text = _short_refusal(str(error), getattr(error, "path", "the file"))
    elif type(error) is KeyError:
        text = f"no entry {error}"
    else:
        text = error.brief if isinstance(error, CorruptCheckpointError) else str(error)
        text = text or type(error).__name__
        if type(error) is CorruptCheckpointError and not is_url(error.path):
            is_storage = (error.record or "").startswith("data/")
            taken = ", `ptsave extract --whole` copies them" if is_storage and error.entries else ""
            text += f" (`ptsave verify FILE` lists undamaged tensors{taken})"
    shown = text[:_MAX_SCANNED].partition(_CPP_FRAMES)[0]
    line = printable(" ".join(shown.split()))
    more = "... (--debug shows all of it)" if len(line) > _MAX_LENGTH else ""
    return line[:_MAX_LENGTH] + more


def _short_refusal(message: str, path: str) -> str:
    """Shorten the error message of torch's restricted unpickler: leave out its advice."""
    needs = f"{path} needs more than torch.load(weights_only=True) allows"
    found = _REFUSED.search(message)
    if found:
        return f"{needs}: {found[1]} (`ptsave globals FILE` lists all, and runs no code)"
    reason = _REASON.search(message)  # allowing a global would not help
    return f"{needs}: {reason[1]}" if reason else needs


def report_error(ctx: click.Context, error: Exception) -> None:
    """Print an error as one line, or its traceback with ``--debug``."""
    if _is_set(ctx, "debug"):
        import traceback

        traceback.print_exception(error)
    else:
        _say(one_line(error), color="red")


def _say(text: str, color: str | None = None) -> None:
    begin = click.style("ptsave:", fg=color, bold=True) if color else "ptsave:"
    click.echo(f"{begin} {printable(text)}", err=True, color=colors_by_environment())


def note(ctx: click.Context, text: str) -> None:
    """Print a remark on standard error, unless ``--quiet`` is given."""
    if not _is_set(ctx, "quiet"):
        _say(text)


def _show_warning(
    ctx: click.Context, message: Warning | str, category: type[Warning], *place: object
) -> None:
    """Show a warning about a file; with ``--debug``, also show warnings for programmers."""
    if issubclass(category, CheckpointWarning) or _is_set(ctx, "debug"):
        note(ctx, one_line(message) if isinstance(message, Warning) else message)


def result(ctx: click.Context, text: str) -> None:
    """Print the result of a command, unless ``--quiet`` is given."""
    if not _is_set(ctx, "quiet"):
        click.echo(printable(text))


with_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

with_recovery = click.option(
    "--recover",
    is_flag=True,
    help="Read the complete part of a file that was cut short. A killed process leaves such a file "
    "(.NAME.<16 hex digits>.ptsave) if it used ptsave.ArchiveWriter or ptsave.capture. Damaged and "
    "missing entries are left out, and their names are printed.",
)


def _trust(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    """Let torch build objects of the named classes until the command ends."""
    if not names:
        return
    from torch.serialization import safe_globals

    classes = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            classes.append(getattr(importlib.import_module(module), attribute))
        except (ImportError, ValueError, AttributeError) as error:
            raise click.BadParameter(f"{name}: {error}", ctx, param) from None
    ctx.with_resource(safe_globals(classes))


with_trust = click.option(
    "--trust",
    metavar="MODULE.CLASS",
    multiple=True,
    expose_value=False,
    callback=_trust,
    help="Build objects of this class, which runs its code. May be given several times.",
)


def shows_progress(ctx: click.Context) -> bool:
    """Return whether standard error is a terminal, and ``--quiet`` is not given."""
    return sys.stderr.isatty() and not _is_set(ctx, "quiet")


# ---------------------------------------------------------------------------------------- arguments

STANDARD_INPUT = "/dev/stdin"  # the system opens descriptor 0
_TAKEN = "ptsave.standard_input"
_COPIED_NBYTES = 4 << 20  # at once
_HEAD_NBYTES = 9  # a safetensors file begins with its header's length (8 bytes) and a brace
_MAX_NAMES = 1000
_EXPECTED = "pass an object such as '{\"anon\": true}'"


class _File(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """The name of a file, directory or URL, which click passes on unchanged."""

    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


class _Source(_File):
    """A file that is read; ``-`` is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "-" or ctx is None or ctx.resilient_parsing:
            return value
        return path_of_standard_input(ctx)


FILE = _File()
SOURCE = _Source()


def path_of_standard_input(ctx: click.Context, *, needs_values: bool = True) -> str:
    """Return the path of a file that holds all of standard input.

    Reading a checkpoint starts at its end, so a pipe is copied to an unnamed temporary file, which
    becomes standard input.  Without `needs_values`, only the header of a safetensors file is
    copied, and the temporary file has a hole (no data) instead of the tensors.
    """
    if ctx.meta.get(_TAKEN):
        raise click.UsageError("Only one argument can be standard input.", ctx)
    ctx.meta[_TAKEN] = True
    try:
        status = os.fstat(0)
    except OSError:
        raise click.UsageError("Standard input is closed: pass a path.", ctx) from None
    if os.isatty(0):
        raise click.UsageError("Standard input is a terminal: redirect a file or a pipe.", ctx)
    is_at_begin = stat.S_ISREG(status.st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0
    if not is_at_begin and not stat.S_ISDIR(status.st_mode):
        import shutil
        import tempfile

        with tempfile.TemporaryFile() as copy:
            if needs_values or not copy_header(sys.stdin.buffer, copy):
                shutil.copyfileobj(sys.stdin.buffer, copy, _COPIED_NBYTES)
            copy.flush()
            os.dup2(copy.fileno(), 0)
    return STANDARD_INPUT


def copy_header(stream: IO[bytes], copy: IO[bytes]) -> bool:
    """Copy a safetensors header and extend the copy to the file's size; return False if invalid."""
    import json

    from ptsave.sources.kinds import is_safetensors

    head = stream.read(_HEAD_NBYTES)
    copy.write(head)
    if not is_safetensors(head, 0):
        return False
    header = stream.read(int.from_bytes(head[:8], "little") - 1)
    copy.write(header)
    try:
        entries = json.loads(b"{" + header)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end >= 0:
            copy.truncate(copy.tell() + end)
    except Exception:  # the reader will report the damaged header
        return False
    return bool(end >= 0)


def complete_names(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the entries of the command's file whose names begin with `incomplete`."""
    found: dict[str, None] = {}
    of_modules = ctx.params.get("stats", False) is not False  # only ls has --stats, None by default
    try:
        for name in names_in(ctx.params["file"], ctx.params.get("storage_options"), of_modules):
            if name.startswith(incomplete) and name.isprintable():
                found[name] = None
    except Exception:  # the command reports the error when it runs
        return []
    return [CompletionItem(name) for name in list(found)[:_MAX_NAMES]]


def names_in(
    file: str, storage_options: Mapping[str, Any] | None, of_modules: bool
) -> Iterator[str]:
    """Yield the names of a file's entries; for a capture, with `of_modules`, its modules' paths."""
    from ptsave.contents.captures import HEADER, is_capture
    from ptsave.contents.directories import find_files
    from ptsave.inspection.reports import list_files

    for listing in list_files(find_files(file, storage_options, distributed=True)):
        if of_modules and is_capture(listing.tree.obj):
            yield from listing.tree.obj[HEADER].get("modules", {})
        else:
            yield from (node.name for node in listing.tree.nodes)


def _json_object(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Parse a JSON object; errors do not show its text, because it may contain secrets."""
    import json

    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON ({error}): {_EXPECTED}", ctx, option) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{_EXPECTED}, not a {type(found).__name__}", ctx, option)
    return found


def with_storage_options(argument: str, prefix: str = "") -> Callable[[Any], Any]:
    """Return a decorator that adds ``--storage-options`` for `argument` to a command."""
    return click.option(
        f"--{prefix}-storage-options" if prefix else "--storage-options",
        callback=_json_object,
        metavar="JSON",
        help=f"If {argument} is a URL: a JSON object of options for its file system, for example "
        "'{\"anon\": true}'.",
    )
