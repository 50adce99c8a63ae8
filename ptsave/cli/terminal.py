"""The terminal: its width, its colours and Ctrl-C.

The command imports this small module first, because until then Ctrl-C prints a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NamedTuple

_MIN_WIDTH = 20


class Terminal(NamedTuple):
    """A terminal or a file; for a file, `width` is None, and lines are not cut."""

    width: int | None = None
    has_colors: bool = False

    def paint(self, text: str, color: str | None = None, *, bold: bool = False) -> str:
        """Return text in a colour if the terminal has colours."""
        if not self.has_colors:
            return text
        import click

        return click.style(text, fg=color, bold=bold or None)


PLAIN = Terminal()


def colors_by_environment() -> bool | None:
    """Return whether environment variables turn colours on or off; None if they do neither.

    NO_COLOR (https://no-color.org) takes precedence over FORCE_COLOR, and both over TERM.  An empty
    variable counts as not set.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM") in ("dumb", "unknown") else None


def terminal() -> Terminal:
    """Return the width and the colours of standard output."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    wanted = colors_by_environment()
    has_colors = is_terminal if wanted is None else wanted
    # COLUMNS sets the width of a pipe, too.
    if not is_terminal and not os.environ.get("COLUMNS"):
        return Terminal(None, has_colors)
    import shutil

    return Terminal(max(shutil.get_terminal_size().columns, _MIN_WIDTH), has_colors)


INTERRUPTED = 130  # the exit code


def exit_when_interrupted() -> None:
    """Make Ctrl-C end the process at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the signal may be ignored
        signal.signal(signal.SIGINT, _exit)


def raise_when_interrupted() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)
