"""The records of a capture: names and headers."""

from __future__ import annotations

import pytest
from captured_runs import name_of
from hypothesis import given
from hypothesis import strategies as st

from ptsave.capturing.schema import (
    PHASES,
    VERSION,
    check_header,
    is_block_key,
    parse_name,
)
from ptsave.contents.captures import FORMAT, HEADER, is_capture

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


def test_headers() -> None:
    header = {"format": FORMAT, "version": VERSION}
    assert is_capture({HEADER: header})
    assert not is_capture({HEADER: {}})
    assert not is_capture([header])
    check_header(header, "run.pt")
    with pytest.raises(ValueError, match=r"run\.pt: a capture of version 2"):
        check_header({**header, "version": VERSION + 1}, "run.pt")
