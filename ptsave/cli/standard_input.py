"""The argument ``-`` of commands: a checkpoint on standard input, from a file or a pipe."""

from __future__ import annotations

import os
import stat
import sys

import click

__all__ = ["STANDARD_INPUT", "path_of_standard_input"]

STANDARD_INPUT = "/dev/stdin"  # which the system opens as whatever descriptor 0 is
_TAKEN = "ptsave.standard_input"
_COPIED_NBYTES = 4 << 20  # at once


def path_of_standard_input(ctx: click.Context) -> str:
    """Return a path for a file that holds all of standard input.

    A checkpoint is read at its end first, so a pipe is copied to a temporary file without a name,
    which takes the place of standard input.

    Raises
    ------
    click.UsageError
        If it is a terminal, closed, or taken by another argument.
    OSError
        If it cannot be read, or the disk has no room for it.
    """
    if ctx.meta.get(_TAKEN):
        raise click.UsageError("Standard input can be one argument only.", ctx)
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
            shutil.copyfileobj(sys.stdin.buffer, copy, _COPIED_NBYTES)
            copy.flush()
            os.dup2(copy.fileno(), 0)
    return STANDARD_INPUT
