"""The public API fits programs that were written for the last release (RELEASE.md).

python tests/test_public_api.py > tests/public_api.txt    writes it down, when one is made
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ptsave
from ptsave import deltas, distributed

RECORDED = Path(__file__).with_name("public_api.txt")
# Made by ptsave alone: what they have is public, how they are made is not.
RESULTS = {
    "Archive", "Capture", "CaptureComparison", "CaptureSummary", "CapturedCall",
    "CapturedDifference", "CapturedValue", "Compaction", "Comparison", "Conversion", "Folding",
    "IncompatibleKeys", "LoadedWeights", "RestoredEntries", "SaveFuture", "SavedBytes",
    "TensorInfo", "UnmatchedParameters", "WeightSlice",
}  # fmt: skip


def callables() -> Iterator[tuple[str, Any]]:
    """Yield public functions, classes and their methods, by name."""
    modules = {"": (ptsave, ptsave.__all__)}
    for package in (deltas, distributed):
        modules[f"{package.__name__.removeprefix('ptsave.')}."] = (package, package.__all__)
    for prefix, (module, names) in modules.items():
        for name in sorted(names):
            value = getattr(module, name)
            if not callable(value):
                continue
            is_error = isinstance(value, type) and issubclass(value, Exception)
            yield f"{prefix}{name}", None if is_error or name in RESULTS else value
            for method in sorted(vars(value)) if isinstance(value, type) and not is_error else ():
                if not method.startswith("_") and inspect.isfunction(vars(value)[method]):
                    yield f"{prefix}{name}.{method}", vars(value)[method]


def signature_of(value: Any) -> str:
    """Return the parameters; a default that has no short form is dots."""
    if value is None:
        return ""
    parameters = []
    marked = False
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not marked:
            parameters.append("*")
        marked = marked or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        star = "*" if each.kind is each.VAR_POSITIONAL else ""
        star = "**" if each.kind is each.VAR_KEYWORD else star
        default = "" if each.default is each.empty else f"={_short(each.default)}"
        parameters.append(f"{star}{each.name}{default}")
    return ", ".join(parameters)


def _short(default: Any) -> str:
    text = repr(default)
    return text if re.fullmatch(r"None|True|False|[\w.'-]+", text) else "..."


def recorded() -> dict[str, str]:
    lines = RECORDED.read_text().splitlines()
    return {name: rest.removesuffix(")") for name, _, rest in (x.partition("(") for x in lines)}


NOW = dict(callables())


@pytest.mark.parametrize("name", recorded())
def test_calls_of_the_last_release_fit(name: str) -> None:
    assert name in NOW, f"{name} is gone: deprecate it first, for two releases"
    before = [each for each in recorded()[name].split(", ") if each]
    now = [each for each in signature_of(NOW[name]).split(", ") if each]
    assert [each for each in now if each in before] == before, "changed, gone or in another order"
    added = [each for each in now if each not in before]
    assert all("=" in each or each.startswith("*") for each in added), "without a default"
    kept = before[: before.index("*")] if "*" in before else before
    assert now[: len(kept)] == kept, "a new parameter stands before positional ones"


def test_every_public_name_is_recorded() -> None:
    """A name that is new is written down as soon as it is there."""
    assert {name.partition(".")[0] for name in NOW} <= {
        name.partition(".")[0] for name in recorded()
    }
    for name in ptsave.__all__:
        assert getattr(ptsave, name).__doc__, f"{name} has no documentation"


if __name__ == "__main__":
    for _name, _value in callables():
        print(f"{_name}({signature_of(_value)})")
