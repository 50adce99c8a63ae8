"""The pages: their code runs, their links lead somewhere, and they name all that is public.

Every code block of README and documentation runs, and prints what its page says.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import CODE, blocks_of
from doc_runner import ROOT, PageRunner

import ptsave

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The last: directives of MyST, which Sphinx checks.
LANGUAGES = {*CODE, "text", "", "{toctree}", "{literalinclude}", "{include}", "{eval-rst}"}
ROOT_PAGES = sorted(ROOT.glob("*.md"))
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
GAP = "…"  # of a message, in the place of a name or a number
# Of the operating system and of torch: what comes behind an opening that is ptsave's.
FOREIGN = ("No space left on device", "No such file or directory", "Permission denied")


# ------------------------------------------------------------------------------------------ blocks


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
        with suppress(RuntimeError):
            while True:
                ptsave.uninstall()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    assert {block.kind for block in blocks_of(page)} <= LANGUAGES


# ------------------------------------------------------------------------------- names and links


def test_every_public_name_is_in_the_reference() -> None:
    from ptsave import deltas, distributed

    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", pages, re.MULTILINE)
    assert sorted(named) == sorted(
        {*ptsave.__all__, *deltas.__all__, *distributed.__all__} - {"__version__"}
    )


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
    for page in {*ROOT_PAGES, *PAGES}:
        for block in blocks_of(page):
            for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"


# ------------------------------------------------------------------------------------------ errors


def quoted() -> list[str]:
    """Return the first cell of each row, without the headings of tables."""
    return re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING, re.MULTILINE)


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
    headings = "".join(re.findall(r"^## (.*)$", TROUBLESHOOTING, re.MULTILINE))
    errors = [name for name in ptsave.__all__ if name.endswith(("Error", "Warning"))]
    assert errors
    assert [name for name in errors if name not in headings] == []
