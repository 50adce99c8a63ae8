"""Every public name is in the reference, and links of the repository's files lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of
from doc_runner import ROOT

import ptsave

ROOT_PAGES = sorted(ROOT.glob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", pages, re.MULTILINE)
    assert sorted(named) == sorted({*ptsave.__all__, *_of_distributed()} - {"__version__"})


def _of_distributed() -> set[str]:
    from ptsave import distributed

    return set(distributed.__all__)


def test_every_integration_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "integrations.md").read_text()
    project = (ROOT / "pyproject.toml").read_text().partition("# ptsave.integrations\n")[2]
    extras = re.findall(r"^([\w-]+) = \[", project.partition("\n\n")[0], re.MULTILINE)
    assert extras
    assert [name for name in extras if name.replace("-", "_") not in page] == []


@pytest.mark.parametrize("page", ROOT_PAGES, ids=lambda page: page.name)
def test_links_of_the_repository(page: Path) -> None:
    """Sphinx checks those of the site."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_an_index_page_has_no_links_of_the_repository() -> None:
    """`setup.py` takes them out, or puts the repository's address in."""
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "The [" not in done.stdout
    assert "tutorial" in done.stdout
    targets = re.findall(r"\]\(([^)]+)\)", done.stdout)
    assert all("://" in target for target in targets)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in (*ROOT_PAGES, *(ROOT / "docs").rglob("*.md")):
        for block in blocks_of(page):
            for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"
