"""Record of the pairs that ran, on this system and on others, as a page of the documentation."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from environments import BUILD, run
from pairs import PLATFORM, Pair

RECORDS = BUILD / "records.json"
HEADER = f"""# Tested releases

`make wheels` made one wheel for each Python, with an engine (the compiled part of ptsave) for each
torch. According to auditwheel, the platform of the wheels is `{PLATFORM}`. Each pair of
Python and torch was installed into a fresh environment. Then the tests that compare ptsave with
this torch ran there.

| Python | torch | compiled and tested on | tests |
|---|---|---|---|
"""
NOT_RUN = """
## Not run

| Python | torch | system | why |
|---|---|---|---|
"""
_NOT_RUN = "not run: "


class Report:
    """Rows by Python, torch and system; those of earlier runs stay until they are run again."""

    def __init__(self) -> None:
        self.failures = 0

    @property
    def _rows(self) -> dict[str, list[str]]:
        """The rows so far; another system's run may add some meanwhile."""
        return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}

    def tested(self, pair: Pair, summary: str) -> None:
        python, torch = pair.versions
        self._add(pair.wheel.version, pair.torch, python, torch, summary.partition(" in ")[0])

    def skipped(self, python: str, torch: str, reason: str) -> None:
        self._add(python, torch, python, torch or "all", f"{_NOT_RUN}{reason}")

    def left_out(self, python: str, torch: str) -> None:
        """Name a pair that was not asked for, if no earlier run has anything to say of it."""
        earlier = f"{python} {torch} {_system()}" if torch else f"{python} "
        if not any(key.startswith(earlier) and key.endswith(_system()) for key in self._rows):
            self.skipped(python, torch, "left out")

    def failed(self, python: str, torch: str, reason: str) -> None:
        self.failures += 1
        self._add(python, torch, python, torch or "all", f"**failed**: {reason}")

    def _add(self, key: str, torch_key: str, python: str, torch: str, outcome: str) -> None:
        row = [python, torch, _system(), outcome.replace("|", "/")]
        print(*row, sep=" | ", flush=True)
        rows = {**self._rows, f"{key} {torch_key} {_system()}": row}
        if torch_key:
            rows.pop(f"{key}  {_system()}", None)  # nothing was to be said of any of its pairs
        RECORDS.write_text(json.dumps(rows, indent=1))

    def write(self, path: Path) -> None:
        rows = sorted(self._rows.values(), key=lambda row: [number(each) for each in row[:2]])
        ran = [row for row in rows if not row[3].startswith(_NOT_RUN)]
        others = [[*row[:3], row[3].removeprefix(_NOT_RUN)] for row in rows if row not in ran]
        path.write_text(HEADER + _table(ran) + (NOT_RUN + _table(others) if others else ""))


def _table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def number(version: str) -> list[int]:
    parts = version.partition("+")[0].split(".")
    return [int(part) if part.isdigit() else 0 for part in parts]


def _system() -> str:
    name = platform.freedesktop_os_release()
    compiler = run("c++", "-dumpfullversion").strip()
    glibc = platform.libc_ver()[1]
    return f"{name['NAME'].split()[0]} {name['VERSION_ID']}, gcc {compiler}, glibc {glibc}"
