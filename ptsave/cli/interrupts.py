"""Ctrl-C: while the command starts it ends the process in silence, then it is an exception."""

from __future__ import annotations

import os
import signal
from typing import Any

__all__ = ["INTERRUPTED", "exit_when_interrupted", "raise_when_interrupted"]

INTERRUPTED = 130  # the exit code


def exit_when_interrupted() -> None:
    """End the process at Ctrl-C, which in the middle of an import would show a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored
        signal.signal(signal.SIGINT, _exit)


def raise_when_interrupted() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, as Python does."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)
