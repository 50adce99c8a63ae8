"""Sphinx builds the documentation from the Markdown files here: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ptsave
from ptsave.integrations import lazy_classes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._tables import tables_of  # noqa: E402
from benchmarks.plots import RESULTS, draw_report  # noqa: E402

# Classes of plug-ins are documented without the libraries from whose classes they are derived.
lazy_classes.classes_over = lambda *_, **__: object().__getattribute__

PLOTS = "_generated"
# Pages that are files of the repository, where their links are those of the repository, too.
OF_THE_REPOSITORY = {
    f"project/{name.lower()}": f"{name}.md"
    for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "RELEASE", "SECURITY")
}

project = "ptsave"
author = "the ptsave authors"
copyright = author
version = release = ptsave.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
suppress_warnings: list[str] = []

# Every reference has to lead somewhere; names of others' documentation are known by their prefix.
nitpicky = True
_ELSEWHERE = ("torch", "concurrent", "pickle", "io", "os", "fnmatch", "pathlib")
nitpick_ignore_regex = [
    ("py:.*", rf"({'|'.join(_ELSEWHERE)})(\..*)?"),
    ("py:class", r"[^.]+"),  # types of attributes, in words: "mapping of str to int"
]

autodoc_preserve_defaults = True  # as they are written, not the builder's values of them
autodoc_typehints = "none"  # the docstrings have the types, in words
autodoc_member_order = "bysource"
add_module_names = False
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "ptsave"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
# These pages are alone in their section.
_ALONE = (
    "install",
    "tested",
    "tutorial",
    "troubleshooting",
    "limits",
    "benchmarks",
    "benchmark_results",
)
html_sidebars: dict[str, list[str]] = {page: [] for page in _ALONE}
html_theme_options = {
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}


def read_from_the_repository(app: Any, page: str, source: list[str]) -> None:
    """Put the file of the repository into its page, with links that lead to pages."""
    if page in OF_THE_REPOSITORY:
        text = (ROOT / OF_THE_REPOSITORY[page]).read_text()
        source[0] = re.sub(r"\]\(([\w/.-]+\.md)\)", _link_to_page, text)


def _link_to_page(link: re.Match[str]) -> str:
    pages = {file: f"/{page}.md" for page, file in OF_THE_REPOSITORY.items()}
    return f"]({pages.get(link[1]) or '/' + link[1].removeprefix('docs/')})"


def write_results(app: Any, page: str, source: list[str]) -> None:
    """Put all results of benchmarks into their page, each table with its plot."""
    if page == "benchmark_results":
        for path in sorted(RESULTS.glob("*.md")):
            text = path.read_text()
            for table in reversed(tables_of(text)):
                if not table.is_of_goals():
                    picture = f"\n![Plot of this table]({PLOTS}/{path.stem}-{table.number}.svg)\n"
                    text = text[: table.end] + picture + text[table.end :]
            text = re.sub("^#", "##", text, flags=re.MULTILINE)
            text = re.sub(r"\]\((\w+)\.md\)", r"](#results-\1)", text)
            source[0] += f"\n(results-{path.stem})=\n\n{text}"


def show_plots(app: Any, page: str, source: list[str]) -> None:
    """Show plots in two versions, for light pages and for dark ones."""
    versions = "".join(
        f"```{{image}} \\2{version}.svg\n:alt: \\1\n:class: only-{theme}\n```\n\n"
        for theme, version in (("light", ""), ("dark", "-dark"))
    )
    source[0] = re.sub(rf"!\[([^\]]*)\]\(({PLOTS}/[\w-]+)\.svg\)", versions, source[0])


def draw_plots(app: Any) -> None:
    """Draw the plots before the pages are read that show them."""
    for path in RESULTS.glob("*.md"):
        draw_report(path, Path(app.srcdir) / PLOTS)


def write_commands(app: Any, page: str, source: list[str]) -> None:
    """Put what each command says with ``--help`` into the page of the commands."""
    if page == "reference/command_line":
        from click import Context

        from ptsave.cli.commands import commands

        group = Context(commands, info_name="ptsave")
        for name in commands.list_commands(group):
            command = commands.get_command(group, name)
            assert command is not None
            context = Context(command, parent=group, info_name=name, terminal_width=90)
            source[0] += f"\n## ptsave {name}\n\n```text\n{command.get_help(context)}\n```\n"


def setup(app: Any) -> None:
    """Register the hooks of this file with Sphinx."""
    app.connect("source-read", read_from_the_repository)
    app.connect("source-read", write_commands)
    app.connect("source-read", write_results)
    app.connect("source-read", show_plots)
    app.connect("builder-inited", draw_plots)
