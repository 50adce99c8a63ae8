"""Outlines beside torch's objects: what is listed of one equals what is listed of the others."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from ptsave.cli.listing import Style, file_json, lines_by_size, totals_lines, tree_lines
from ptsave.contents.opening import open_file
from ptsave.contents.outline import Outline, outline_of
from ptsave.inspection.reports import FileListing, listing_of
from ptsave.sources.ranges import LocalFile


def outlined(data: bytes, folder: Path) -> Outline | None:
    path = folder / "outlined.pt"
    path.write_bytes(data)
    return outline_of(LocalFile.open(str(path)))


def shown(listing: FileListing) -> list[str]:
    """Return all that the command shows of a listing."""
    numbers = [*range(len(listing.tree.nodes))]
    return [
        json.dumps(file_json(listing, numbers)),
        *tree_lines(listing, numbers, None, Style()),
        *lines_by_size(listing, numbers, Style()),
        *totals_lines([listing], [numbers]),
    ]


def by_torch(folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shown(listing_of(open_file(LocalFile.open(str(folder / "outlined.pt")))))


def assert_equal_or_left_to_torch(data: bytes, folder: Path) -> bool:
    """Return whether there is an outline."""
    found = outlined(data, folder)
    if found is None:
        return False
    (listed, *lines), (expected, *expected_lines) = shown(listing_of(found)), by_torch(folder)
    assert _as_far_as_known(json.loads(listed), json.loads(expected)) == json.loads(expected)
    assert lines == expected_lines
    return True


def _as_far_as_known(listed: dict[str, Any], by_torch: dict[str, Any]) -> dict[str, Any]:
    """Take away places of tensors of a file that torch loads as a whole, and so has none."""
    if all(each["record"] is None for each in by_torch["tensors"]):
        for tensor, other in zip(listed["tensors"], by_torch["tensors"], strict=False):
            tensor |= {key: other[key] for key in ("record", "offset", "location")}
    return listed
