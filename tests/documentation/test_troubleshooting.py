"""The page of errors quotes messages that exist, and has every public error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from doc_runner import ROOT

import ptsave

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
GAP = "…"  # of a message, in the place of a name or a number
# Of the operating system and of torch: what comes behind an opening that is ptsave's.
FOREIGN = ("No space left on device", "No such file or directory", "Permission denied")


def quoted() -> list[str]:
    """Return the first cell of each row, without the headings of tables."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def texts_of(node: ast.AST) -> Iterator[str]:
    """Yield the string constants of a module, f-strings with gaps for what is put in."""
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else GAP for part in each.values
            )
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


@cache
def messages() -> str:
    python = (
        text
        for path in (ROOT / "ptsave").rglob("*.py")
        for text in texts_of(ast.parse(path.read_text()))
    )
    cpp = (path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    return "\n".join([*python, *cpp])


@pytest.mark.parametrize("words", quoted())
def test_words_are_those_of_a_message(words: str) -> None:
    for foreign in FOREIGN:
        words = words.replace(f"({foreign})", f"({GAP})").replace(foreign, GAP)
    assert words.removesuffix(GAP) in messages() or words == "size mismatch for"


def test_every_error_has_a_section() -> None:
    headings = "".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    errors = [name for name in ptsave.__all__ if name.endswith(("Error", "Warning"))]
    assert errors
    assert [name for name in errors if name not in headings] == []
