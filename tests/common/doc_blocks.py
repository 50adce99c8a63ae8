"""Reads the code blocks of a Markdown page, and runs them as a reader would.

The blocks of a page run from top to bottom, in one namespace and one directory:

* ``python`` runs. With a ``:caption: train.py`` it is the file of that name, and is written.
* ``console`` has commands behind ``$``, each with its output; ``^C`` in it interrupts the command.
* ``sh`` has commands without outputs.
* ``text`` is the output of the block before it. ``...`` stands for any text, as in doctests.
* A comment ``<!-- test: ... -->`` holds Python that readers do not see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = ("python", "console", "sh")

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})(?P<info>[^`\n]*)$")
_DIRECTIVE = re.compile(r"\{code-block\}\s*(\w+)")
_HIDDEN = re.compile(r"^<!-- test:\s?(.*)$")


@dataclass
class Block:
    """One block of a page: its language, text, the line of its text, and the file that it is."""

    kind: str
    text: str
    line: int
    file: str = ""


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page in their order; those with a language are code or its output."""
    return list(_parse(path.read_text().splitlines()))


def _parse(lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        if hidden := _HIDDEN.match(lines[number]):
            number, text = _until(lines, number, "-->", hidden[1])
            yield Block("python", text, number - text.count("\n"))
        elif (fence := _FENCE.match(lines[number])) and fence["fence"][0] == "`":
            start = number + 1
            end = next(n for n in range(start, len(lines)) if lines[n].strip() == fence["fence"])
            body = [line[len(fence["indent"]) :] for line in lines[start:end]]
            yield _block(fence["info"].strip(), body, start + 1)
            number = end
        number += 1


def _until(lines: list[str], number: int, end: str, first: str) -> tuple[int, str]:
    """Return the line at which a comment ends, and its text."""
    found = [first]
    while end not in found[-1]:
        number += 1
        found.append(lines[number])
    found[-1] = found[-1].partition(end)[0]
    return number, "\n".join(found).strip("\n")


def _block(info: str, body: list[str], line: int) -> Block:
    directive = _DIRECTIVE.match(info)
    kind = directive[1] if directive else info.partition(" ")[0]
    file = ""
    while directive and body and body[0].startswith(":"):
        _, name, value = body.pop(0).split(":", 2)
        line += 1
        if name == "caption":
            file = value.strip().strip("`")
    if directive and body and not body[0]:
        body.pop(0)
        line += 1
    return Block(kind, "\n".join(body), line, file)
