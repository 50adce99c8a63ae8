"""What all commands have in common: their options, their errors, their exit codes, progress."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

import click

__all__ = ["FAILED", "NEGATIVE", "Command", "Settings", "note", "result", "shows_progress"]

# Exit codes, as of diff and grep: the answer is no, and there is no answer.
NEGATIVE = 1
FAILED = 2
_INTERRUPTED = 130


@dataclass
class Settings:
    """The options that every command has."""

    quiet: bool = False
    debug: bool = False


class Command(click.Command):
    """A command with ``--quiet`` and ``--debug``, of which any error is one line.

    Parameters
    ----------
    examples : str
        Lines for the end of ``--help``.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._examples = examples
        self.params += [
            _flag("--quiet", "-q", help="No progress bars and no remarks, only results."),
            _flag("--debug", help="Show where an error comes from."),
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._examples:
            return
        with formatter.section("Examples"):
            for line in self._examples.strip().splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _say("interrupted")
            ctx.exit(_INTERRUPTED)
        except Exception as error:
            if ctx.ensure_object(Settings).debug:
                traceback.print_exc()
            else:
                _say(one_line(error))
            ctx.exit(FAILED)


def _flag(*names: str, help: str) -> click.Option:  # noqa: A002 - as click calls it
    def keep(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        setattr(ctx.ensure_object(Settings), str(option.name), value)

    return click.Option([*names], is_flag=True, expose_value=False, callback=keep, help=help)


def one_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    elif type(error) is KeyError:
        text = f"no entry {error}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def _say(text: str) -> None:
    click.echo(f"ptsave: {text}", err=True)


def note(ctx: click.Context, text: str) -> None:
    """Say something on standard error that is no result; ``--quiet`` leaves it out."""
    if not ctx.ensure_object(Settings).quiet:
        _say(text)


def result(ctx: click.Context, text: str) -> None:
    """Say what was done; ``--quiet`` leaves it out."""
    if not ctx.ensure_object(Settings).quiet:
        click.echo(text)


def shows_progress(ctx: click.Context) -> bool:
    """Whether progress bars are shown: on a terminal, without ``--quiet``."""
    return sys.stderr.isatty() and not ctx.ensure_object(Settings).quiet
