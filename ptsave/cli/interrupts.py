"""Ctrl-C: the first import of the command, and small, because before it Ctrl-C is a traceback."""

from __future__ import annotations

import os
import signal
from typing import Any

INTERRUPTED = 130  # the exit code


def exit_when_interrupted() -> None:
    """End the process at Ctrl-C, because a traceback in the middle of an import helps no user."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the signal may be ignored
        signal.signal(signal.SIGINT, _exit)


def raise_when_interrupted() -> None:
    """Raise KeyboardInterrupt at Ctrl-C again, as Python does."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)
