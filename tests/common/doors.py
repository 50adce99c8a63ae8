"""Everything that reads a checkpoint from a path, a URL or a file, to test what all of it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from reports import list_file
from torch import nn

import ptsave
from ptsave.comparison.compare import compare
from ptsave.conversion.compacting import compact
from ptsave.conversion.converting import convert
from ptsave.inspection.extraction import read_entries
from ptsave.inspection.pickle_globals import required_globals
from ptsave.inspection.verification import verify_file

# These refuse what they cannot read as torch does. The state is that of a `Linear(3, 2)`.
LOADS: dict[str, Callable[..., Any]] = {
    "load": ptsave.load,
    "load, weights_only=False": functools.partial(ptsave.load, weights_only=False),
    "load_into": lambda f, **options: ptsave.load_into(f, nn.Linear(3, 2), **options),
    "load_checkpoint": lambda f, **options: ptsave.load_checkpoint(
        f, model=nn.Linear(3, 2), **options
    ),
    "load_model": lambda f, **options: ptsave.load_model(nn.Linear(3, 2), f, **options),
}
INSPECTIONS: dict[str, Callable[..., Any]] = {
    "open": ptsave.open,
    "list_file": list_file,
    "verify_file": verify_file,
    "required_globals": required_globals,
    "read_entries": lambda f, **options: read_entries(f, ["bias"], **options),
    "convert": lambda f, **options: convert(f, "converted.pt", force=True, **options),
    "compact": lambda f, **options: compact(f, "compacted.pt", **options),
    "compare": lambda f, **options: compare(
        f, f, **{f"{side}_{name}": value for name, value in options.items() for side in "ab"}
    ),
}
