"""The accelerator of this run, as far as tests control it."""

from __future__ import annotations

import os
from types import ModuleType

from accelerator import fake_device
from accelerator.standin import control as standin

CHOICE = os.environ.get("PTSAVE_ACCELERATOR", "fake")


def load() -> ModuleType | None:
    """Prepare the accelerator and return what controls it; None for real hardware."""
    if CHOICE == "fake":
        return fake_device.load()
    return standin.load() if standin.is_there() else None
