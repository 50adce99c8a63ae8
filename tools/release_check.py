"""Check a source distribution before it is released, as RELEASE.md asks for.

    .venv/bin/python tools/release_check.py build/release/ptsave-0.1.0.tar.gz

Prints what is missing, and exits with 1 if anything is.
"""

from __future__ import annotations

import datetime
import re
import sys
import tarfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("LICENSE", "NOTICE", "README.md", "CMakeLists.txt", "csrc/module.cpp", "ptsave/py.typed")
URLS = ("Repository", "Documentation", "Changelog", "Issues")
# Paths, and addresses of registries, of the machine that builds.
OF_THE_BUILDER = re.compile(rb"file:///|/root/|/home/\w|\.pyenv|index-url")


def problems_of(archive: Path) -> Iterator[str]:
    with tarfile.open(archive) as tar:
        members = {member.name.partition("/")[2]: member for member in tar}
        texts = {name: _bytes_of(tar, member) for name, member in members.items()}
    yield from (f"{name} is missing" for name in FILES if name not in members)
    metadata = Parser().parsestr(texts["PKG-INFO"].decode())
    yield from _problems_of_metadata(metadata)
    yield from _problems_of_changelog(metadata["Version"])
    for name in ("PKG-INFO", "pyproject.toml", "setup.py", "README.md"):
        if found := OF_THE_BUILDER.search(texts.get(name, b"")):
            yield f"{name} names something of this machine: {found[0].decode()}"
    yield from (f"{name} was built, and is no source" for name in members if name.endswith(".so"))


def _bytes_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member) if member.isfile() else None
    return stream.read() if stream is not None else b""


def _problems_of_metadata(metadata: Message) -> Iterator[str]:
    urls = [url.partition(",")[0] for url in metadata.get_all("Project-URL", [])]
    missing = [name for name in URLS if name not in urls]
    if missing:
        yield f"pyproject.toml has no [project.urls] for {', '.join(missing)}"
    for requirement in metadata.get_all("Requires-Dist", []):
        if requirement.startswith("torch") and "<" in requirement:
            yield f"the source distribution wants the torch of this machine: {requirement}"


def _problems_of_changelog(version: str) -> Iterator[str]:
    text = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)$", text, re.MULTILINE)
    if heading is None:
        yield f"CHANGELOG.md has no heading for {version}"
        return
    try:
        datetime.date.fromisoformat(heading[1])
    except ValueError:
        yield f"CHANGELOG.md says {version} ({heading[1]}), and not the day of the release"


def main() -> int:
    found = [*problems_of(Path(sys.argv[1]))]
    print("\n".join(found) or "ready for a release")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
