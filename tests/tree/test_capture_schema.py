"""The records of a capture: names and rows survive their way through a file."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptsave.tree.capture_schema import (
    FORMAT,
    HEADER,
    PHASES,
    VERSION,
    CapturedCall,
    CapturedValue,
    Statistics,
    block_key,
    block_to_plain,
    calls_in,
    check_header,
    is_block_key,
    is_capture,
    name_of,
    parse_name,
    values_in,
)

CALL = CapturedCall(0, 3, "forward", "layers.0", 1, "torch.nn.Linear", 0, 4, None)
STATISTICS = Statistics(4, 0, 0, 1, 0.5, 0.1, 0.0, 1.0, 2.0, 0xDEADBEEF)
VALUE = CapturedValue(name_of(3, "forward", "layers.0", 1, ("outputs",)), 2, 0, "tensor", "Tensor")
parts = st.text(max_size=6)


@given(st.integers(0, 9), st.sampled_from(PHASES), parts, st.integers(0, 9), st.lists(parts))
def test_names(step: int, phase: str, module: str, call: int, path: list[str]) -> None:
    name = name_of(step, phase, module, call, path)
    assert parse_name(name) == (step, phase, module, call, tuple(path))
    assert not is_block_key(name)


@pytest.mark.parametrize(
    "name", ["", "weight", "0/forward", "0/other/a#0/x", "0/forward/a/x", "a/b/c#d"]
)
def test_other_names(name: str) -> None:
    with pytest.raises(ValueError, match="names no captured value"):
        parse_name(name)


def test_records_through_a_file() -> None:
    values = [VALUE, replace(VALUE, statistics=STATISTICS, shape=(2, 2), stored=VALUE.name)]
    file = io.BytesIO()
    torch.save({block_key(3, 0): block_to_plain([CALL], values)}, file)
    file.seek(0)
    ((key, block),) = torch.load(file, weights_only=True).items()
    assert is_block_key(key)
    assert list(calls_in(block)) == [CALL]
    assert list(values_in(block)) == values


def test_fields_of_a_later_version_are_left_out() -> None:
    block = block_to_plain([CALL], [VALUE])
    block["value_fields"] = (*block["value_fields"], "colour")
    block["values"] = [(*row, "red") for row in block["values"]]
    assert list(values_in(block)) == [VALUE]


def test_headers() -> None:
    header = {"format": FORMAT, "version": VERSION}
    assert is_capture({HEADER: header})
    assert not is_capture({HEADER: {}})
    assert not is_capture([header])
    check_header(header, "run.pt")
    with pytest.raises(ValueError, match=r"run\.pt: a capture of version 2"):
        check_header({**header, "version": VERSION + 1}, "run.pt")
