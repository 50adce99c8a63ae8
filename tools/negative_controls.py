"""Remove each wait, guard and event of accelerators in turn, and expect a test to fail.

    make negative-controls [CONTROLS="3 17"]

The table in tests/accelerator/negative_controls.md has a row for each control. A copy of the tree
gets a switch at each place of the table, so one build serves all controls. First, all tests of the
table must pass in the copy. Then each control is removed, and the row's test must fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path("tests/accelerator/negative_controls.md")
COPY = ROOT / "build/negative-controls"
VARIABLE = "PTSAVE_WITHOUT"  # the number of the control to remove
TRIES = 3  # a wrong order of two threads does not show in every run
# A test that hangs in the engine fails, too.
HANG = ["-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=true"]
SWITCH = f"""#pragma once
#include <cstdlib>
#include <optional>
inline bool is_without(int control) {{
  static const char* const chosen = std::getenv("{VARIABLE}");
  return chosen != nullptr && std::atoi(chosen) == control;
}}
"""
ROW = re.compile(r"^\| `(\S+): (.+?)` \| `(.+?)` \| (?:`(.+?)`)? *\| `(.+?)` \|$", re.M)
GUARD = re.compile(r"const (\S+) (\w+)(?:\((.*)\))?;")


class Control(NamedTuple):
    """Code to remove: the first `text` after `anchor` in a file; `instead` replaces it."""

    number: int
    path: str
    anchor: str
    text: str
    instead: str
    test: str

    def place_in(self, source: str) -> int:
        begin = source.find(self.anchor)
        place = source.find(self.text, begin) if begin >= 0 else -1
        if place < 0:
            sys.exit(f"control {self.number}: {self.path} has no {self.text} after {self.anchor}")
        return place

    def switched(self) -> str:
        """Return the code, which does nothing, or `instead`, if the control is chosen."""
        text, instead = self.text, self.instead
        if self.path.endswith(".py"):
            chosen = f'(__import__("os").environ.get("{VARIABLE}") == "{self.number}")'
            return f"({instead} if {chosen} else {text})" if instead else f"if not {chosen}: {text}"
        chosen = f"is_without({self.number})"
        if guard := GUARD.fullmatch(text):
            made, name, arguments = guard[1], guard[2], guard[3] or ""
            there = f"std::optional<decltype({made}({arguments}))> {name};"
            return f"{there} if (!{chosen}) {name}.emplace({arguments});"
        if text.endswith(";"):
            return f"{{ if ({chosen}) {{ {instead} }} else {{ {text} }} }}"
        return f"({chosen} ? ({instead}) : ({text}))"


def controls() -> list[Control]:
    rows = [line for line in (ROOT / TABLE).read_text().splitlines() if line.startswith("| `")]
    found = []
    for number, line in enumerate(rows, 1):
        row = ROW.match(line)
        if row is None:
            sys.exit(f"{TABLE} has a row that is no control: {line}")
        path, anchor, text, instead, test = row.groups(default="")
        found.append(Control(number, path, anchor, text, instead, test))
    return found


def with_switches(source: str, controls: list[Control]) -> str:
    """Return a file with a switch for each of its controls."""
    end = len(source)
    for place, control in sorted(((c.place_in(source), c) for c in controls), reverse=True):
        if place + len(control.text) > end:
            sys.exit(f"control {control.number} overlaps another: {control.text}")
        source = source[:place] + control.switched() + source[place + len(control.text) :]
        end = place
    return source if controls[0].path.endswith(".py") else '#include "without.h"\n' + source


def copy_tree(found: list[Control]) -> None:
    """Write files that differ, so that a second build compiles only them."""
    by_path = defaultdict(list)
    for control in found:
        by_path[control.path].append(control)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    files = {name: (ROOT / name).read_bytes() for name in names.split("\0") if name}
    for path, group in by_path.items():
        files[path] = with_switches(files[path].decode(), group).encode()
    files["csrc/without.h"] = SWITCH.encode()
    for name, content in files.items():
        target = COPY / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def run(tests: list[str], without: int = 0) -> int:
    """Return pytest's exit status, or the negative number of the signal that ended it."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *HANG]
    return subprocess.run(
        [*command, *(f"tests/accelerator/{test}" for test in tests)],
        check=False,
        cwd=COPY,
        env=os.environ | {"PYTHONPATH": str(COPY), VARIABLE: str(without)},
        stdout=subprocess.DEVNULL if without else None,
        stderr=subprocess.DEVNULL if without else None,
    ).returncode


def is_missed(control: Control) -> bool:
    """Return whether the row's test fails without the code in none of a few runs."""
    for _ in range(TRIES):
        status = run([control.test], control.number)
        if status == 1 or status < 0:
            return False
        if status != 0:
            sys.exit(f"control {control.number}: pytest cannot run {control.test} ({status})")
    return True


def main(numbers: list[str]) -> int:
    found = controls()
    copy_tree(found)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=COPY, check=True, env=os.environ | {"PYTHONPATH": str(COPY)})
    chosen = [each for each in found if not numbers or str(each.number) in numbers]
    if run(sorted({each.test for each in chosen})) != 0:
        sys.exit("the tests fail although nothing is removed")
    missed = 0
    for control in chosen:
        result = "no test fails" if is_missed(control) else "fails"
        missed += result != "fails"
        print(f"{control.number} {control.path}: {control.text}: {control.test}: {result}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
