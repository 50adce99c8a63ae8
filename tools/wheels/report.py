"""Record of the pairs that ran, on this system and on others, as a page of the documentation.

`python tools/wheels/report.py RESULT` adds a result of tests/accelerator, and writes the page.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

from environments import ROOT, run
from pairs import PLATFORM, Pair

RECORDS = ROOT / "docs" / "tested.json"
PAGE = ROOT / "docs" / "tested.md"
HEADER = f"""# Tested releases

`make wheels` made one wheel for each Python, with an engine (the compiled part of ptsave) for each
torch. According to auditwheel, the platform of the wheels is `{PLATFORM}`. Each pair of
Python and torch was installed into a fresh environment. Then the tests that compare ptsave with
this torch ran there. Rows are of different days, so the numbers of tests differ.

| Python | torch | compiled and tested on | tests |
|---|---|---|---|
"""
NOT_RUN = """
## Not run

| Python | torch | system | why |
|---|---|---|---|
"""
FAKE, STANDIN = "fake backend", "stand-in for CUDA"
ACCELERATORS = """
## Accelerators

`tests/accelerator` runs on three kinds of accelerators. The first two need no GPU:

- `make test-accelerator`: a backend of the tests' own, whose devices are memory and threads.
- `make accelerator-standin`: torch's CUDA build. A library stands in for CUDA's runtime.
- `make accelerator`: real hardware.

| accelerator | torch | Python | tests |
|---|---|---|---|
"""
REASONS = """
Tests that were skipped, or failed as expected (`xfailed`):

| accelerator | tests | why |
|---|---|---|
"""
COUNTS = """
On the stand-in, a test counts copies and waits of ptsave and of torch. Each call moves 40 MiB in
1,010 tensors. They are on device 1, or one half is on each of two devices. Torch saves by
`torch.save`, loads by `torch.load`, and restores by `load_state_dict(torch.load(file, "cpu"))`.
A wait is a call that synchronizes with a stream, an event or a device, which keeps a core busy.
Instead, ptsave queries events, and sleeps between queries. Kernels gather or scatter small tensors.
The limits are `PTSAVE_MAX_PINNED_BYTES` and, for `async_save`, `PTSAVE_MAX_STAGED_BYTES`.

| call | devices | copies | copies of torch | kernels | waits | waits of torch | event queries \
| pinned, MiB | limit, MiB |
|---|---|---|---|---|---|---|---|---|---|
"""
_NOT_RUN = "not run: "


class Report:
    """Results of pairs and accelerators; those of earlier runs stay until they are run again."""

    def __init__(self) -> None:
        self.failures = 0

    @property
    def _records(self) -> dict[str, dict[str, Any]]:
        """The results so far; another system's run may add some meanwhile."""
        return json.loads(RECORDS.read_text())

    @property
    def _rows(self) -> dict[str, list[str]]:
        """The rows of pairs, by Python, torch and system."""
        return self._records["pairs"]

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
        self._write("pairs", rows)

    def accelerator(self, result: dict[str, Any]) -> None:
        """Add what tests/accelerator/conftest.py has written."""
        others = self._records["accelerators"]
        self._write("accelerators", {**others, result["accelerator"]: result})

    def _write(self, kind: str, records: dict[str, Any]) -> None:
        RECORDS.write_text(json.dumps({**self._records, kind: records}, indent=1) + "\n")

    def page(self) -> str:
        rows = sorted(self._rows.values(), key=lambda row: [number(each) for each in row[:2]])
        ran = [row for row in rows if not row[3].startswith(_NOT_RUN)]
        others = [[*row[:3], row[3].removeprefix(_NOT_RUN)] for row in rows if row not in ran]
        not_run = NOT_RUN + _table(others) if others else ""
        return HEADER + _table(ran) + not_run + self._accelerators()

    def _accelerators(self) -> str:
        results = self._records["accelerators"]
        rows = [
            [name, result["torch"], result["python"], result["tests"]]
            for name, result in results.items()
        ]
        if results.keys() == {FAKE, STANDIN}:
            rows.append(["real hardware", "", "", "not run: no machine with a GPU was available"])
        reasons = [
            [name, str(n), reason]
            for name, result in results.items()
            for reason, n in result["reasons"].items()
        ]
        counts = [[str(cell) for cell in row] for row in results[STANDIN]["counts"]]
        return ACCELERATORS + _table(rows) + REASONS + _table(reasons) + COUNTS + _table(counts)


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


if __name__ == "__main__":
    report = Report()
    report.accelerator(json.loads(Path(sys.argv[1]).read_text()))
    PAGE.write_text(report.page())
