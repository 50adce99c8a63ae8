"""Find sentences in docstrings, comments and Markdown pages that take two readings.

    .venv/bin/python tools/prose.py [FOLDER ...]

A sentence is hard if it is long or nests clauses, or if a pronoun stands where a name should
("of which", "nobody"). Prints the hard ones with their places, and exits with 1 where a tree has
more of them than LIMIT. A comment of Python is found by tokenize, a docstring by ast; C++ is read
as far as its comments and literals need. Of Markdown, code, tables and links' targets are left out;
the tree `docs` includes the pages of the repository's root.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("ptsave", "csrc", "docs", "examples")
LIMIT = 0.003  # of the sentences of a tree
MOST_WORDS = 30
MOST_CLAUSES = 3

SENTENCE_END = re.compile(
    r"(?<=[.!?;:])[*_)]*\s+(?=[A-Z`\"(*{[])|\n\s*\n|\n(?=[ ]*(?:[-*]|\d+\.) )"
)
WORD = re.compile(r"[A-Za-z_`][\w'`.()-]*")
CLAUSE = re.compile(
    r"\b(which|who|whose|that|what|where|when|while|if|unless|until|as|because|so|but|than)\b", re.I
)
RIDDLE = re.compile(
    r"\b(of (which|whom)|in whose|nobody|somebody|anybody|whoever|as of one)\b",
    re.I,
)
# Raw strings, strings and characters are skipped, so that "http://" begins no comment.
CPP_TOKEN = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])+'"
    r"|(?P<comment>(?://[^\n]*\n?[ \t]*)+|/\*.*?\*/)",
    re.DOTALL,
)
COMMENT_MARK = re.compile(r"^[ \t]*(//+|#+:?)[ \t]?", re.M)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The line of NumPy's style before a description: "path : str", or a section's title.
ENTRY = re.compile(
    r"^[ \t]*([\w*]+(, [\w*]+)* : .*|[A-Z][a-z]+\n[ \t]*-{3,})$|^[ \t]*(?!\W)[\w.]+$", re.M
)
CODE = re.compile(r"^[ \t]*(>>>|\.\.\.) .*\n?|^.*::\n\n(?:    .*\n|\n)+|^-{3,}$|``[^`]+``", re.M)
NOT_PROSE = re.compile(  # front matter, fenced blocks, comments, tables, indented code, roles
    r"\A---\n.*?\n---\n|^ *(?P<fence>```+).*?^ *(?P=fence)\n|<!--.*?-->|^(\||    )[^\n]*\n"
    r"|(?<=\])\([^)]*\)|\{[\w:]+\}(?=`)",
    re.M | re.S,
)


def python_prose(source: str) -> Iterator[str]:
    """Yield docstrings, and comments; those on neighbouring lines are one."""
    comments: list[str] = []
    last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if comments and token.start != (last[0] + 1, last[1]):
            yield "\n".join(comments)
            comments = []
        comments.append(token.string)
        last = token.start
    yield "\n".join(comments)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def cpp_prose(source: str) -> Iterator[str]:
    for match in CPP_TOKEN.finditer(source):
        yield match["comment"] or ""


def markdown_prose(source: str) -> Iterator[str]:
    yield re.sub(r"^#+ .*$", "\n", NOT_PROSE.sub("", source), flags=re.M)


PROSE_OF = {".py": python_prose, ".pyi": python_prose, ".h": cpp_prose, ".cpp": cpp_prose}
PROSE_OF[".md"] = markdown_prose


def sentences(prose: str) -> list[str]:
    plain = ENTRY.sub("\n\n", CODE.sub("", COMMENT_MARK.sub("", prose)))
    found = (" ".join(sentence.split()) for sentence in SENTENCE_END.split(plain))
    return [sentence for sentence in found if WORD.search(sentence)]


def complaint(sentence: str) -> str:
    """Say why a sentence is hard, or nothing."""
    n_words = len(WORD.findall(sentence))
    n_clauses = len(CLAUSE.findall(sentence))
    riddle = RIDDLE.search(sentence)
    if riddle:
        return f'"{riddle[0]}"'
    if n_words > MOST_WORDS:
        return f"{n_words} words"
    return f"{n_clauses} clauses" if n_clauses > MOST_CLAUSES else ""


def report(tree: str) -> float:
    n_sentences = n_hard = 0
    pages = ROOT.glob("*.md") if tree == "docs" else ()
    for path in sorted([*(ROOT / tree).rglob("*"), *pages]):
        if path.suffix not in PROSE_OF or "third_party" in path.parts:
            continue
        for prose in PROSE_OF[path.suffix](path.read_text()):
            for sentence in sentences(prose):
                n_sentences += 1
                why = complaint(sentence)
                if why:
                    n_hard += 1
                    print(f"{path.relative_to(ROOT)}: {why}: {sentence}")
    print(f"{tree}: {n_hard} of {n_sentences} sentences")
    return n_hard / n_sentences if n_sentences else 0.0


def main() -> int:
    return int(max(report(tree) for tree in sys.argv[1:] or TREES) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
