"""Every code block of README and documentation runs, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import CODE, blocks_of
from doc_runner import ROOT, PageRunner

import ptsave

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The last: directives of MyST, which Sphinx checks.
LANGUAGES = {*CODE, "text", "", "{toctree}", "{literalinclude}", "{include}", "{eval-rst}"}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.kind in CODE for b in blocks_of(page))], ids=_name
)
@pytest.mark.usefixtures("one_torch_thread")
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    try:
        PageRunner(page, monkeypatch).run()
    finally:
        while True:
            try:
                ptsave.uninstall()
            except RuntimeError:
                break


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    assert {block.kind for block in blocks_of(page)} <= LANGUAGES
