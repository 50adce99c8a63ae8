"""Starts the command line."""

from __future__ import annotations

import gc
import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Python looks for garbage among all objects, while it imports more and at exit: not among those
    # that torch has made.
    gc.freeze()
    from ptsave.cli.command import exits_if_unwritable
    from ptsave.cli.commands import commands

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may be in any script
    with exits_if_unwritable():
        commands(prog_name="ptsave")
