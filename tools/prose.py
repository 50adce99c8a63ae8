"""Count the word "what" in docstrings and comments: a sentence about "what ..." names no thing.

    .venv/bin/python tools/prose.py [FOLDER ...]

Prints how often it occurs per 1,000 words, by folder, and the files with most of it; exits with 1
where a tree has more than LIMIT. A comment of Python is found by tokenize, a docstring by ast;
C++ is read as far as its comments and literals need.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("ptsave", "csrc")
LIMIT = 2.0  # per 1,000 words
WORST = 10

WORD = re.compile(r"[A-Za-z_][\w'-]*")
# Raw strings, strings and characters are skipped, so that "http://" begins no comment.
CPP_TOKEN = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])+'"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_prose(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def cpp_prose(source: str) -> Iterator[str]:
    for match in CPP_TOKEN.finditer(source):
        yield match["comment"] or ""


def counts(path: Path) -> tuple[int, int]:
    """Return how many words of a file's prose are "what", and how many there are."""
    prose = python_prose if path.suffix in (".py", ".pyi") else cpp_prose
    words = [word.lower() for text in prose(path.read_text()) for word in WORD.findall(text)]
    return words.count("what"), len(words)


def per_thousand(found: int, words: int) -> float:
    return 1000 * found / words if words else 0.0


def report(tree: str) -> float:
    files = {
        path.relative_to(ROOT): counts(path)
        for path in sorted((ROOT / tree).rglob("*"))
        if path.suffix in (".py", ".pyi", ".h", ".cpp")
    }
    found: Counter[Path] = Counter()
    words: Counter[Path] = Counter()
    for path, (file_found, file_words) in files.items():
        for folder in {path.parent, Path(tree)}:
            found[folder] += file_found
            words[folder] += file_words
    for folder in sorted(words):
        print(f"{per_thousand(found[folder], words[folder]):6.1f}  {found[folder]:4}  {folder}/")
    worst = sorted(files, key=lambda path: files[path], reverse=True)[:WORST]
    for path in worst:
        if files[path][0]:
            print(f"{per_thousand(*files[path]):6.1f}  {files[path][0]:4}    {path}")
    return per_thousand(found[Path(tree)], words[Path(tree)])


def main() -> int:
    print("per 1,000  times")
    figures = {tree: report(tree) for tree in sys.argv[1:] or TREES}
    print(", ".join(f"{tree}: {figure:.1f}" for tree, figure in figures.items()))
    return int(max(figures.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
