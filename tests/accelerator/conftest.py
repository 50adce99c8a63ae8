"""Fixtures of tests that need an accelerator.

By default that is the one of ``fake_device``. ``PTSAVE_ACCELERATOR=real`` takes the machine's, and
fails where there is none. ``make accelerator-standin`` makes a stand-in for CUDA the machine's.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerator import controlled
from accelerator.standin import control as standin

_COUNTS = pytest.StashKey[list[list[object]]]()


def pytest_configure() -> None:
    if controlled.CHOICE not in ("fake", "real"):
        reason = f"PTSAVE_ACCELERATOR={controlled.CHOICE}: it is 'fake' or 'real'"
        pytest.exit(reason, returncode=2)
    try:
        controlled.load()
    except subprocess.CalledProcessError as error:
        pytest.exit(f"the fake accelerator does not build: {error}", returncode=2)
    if not torch.accelerator.is_available():
        pytest.exit("PTSAVE_ACCELERATOR=real: torch finds no accelerator here", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "accelerator" in item.path.parent.parts:
            item.add_marker(pytest.mark.accelerator)


def accelerator_name() -> str:
    if controlled.CHOICE == "fake":
        return "fake backend"
    return "stand-in for CUDA" if standin.is_there() else torch.cuda.get_device_name()


def reason_of(report: Any) -> str:
    """Return why a test was skipped, or failed as expected."""
    reason = getattr(report, "wasxfail", "") or report.longrepr[2]
    return reason.removeprefix("reason: ").removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own list of tests
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print the accelerator, the numbers of outcomes, and the reasons for tests that did not pass.

    The file ``PTSAVE_ACCELERATOR_RESULT`` gets the same as JSON, with the rows of ``record``.
    """
    yield
    reports = {
        outcome: terminalreporter.getreports(outcome)
        for outcome in ("passed", "failed", "error", "xfailed", "xpassed", "skipped")
    }
    reasons = Counter(
        f"{outcome}: {reason_of(report)}"
        for outcome in ("xfailed", "skipped")
        for report in reports[outcome]
    )
    result = {
        "accelerator": accelerator_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tests": ", ".join(f"{len(found)} {name}" for name, found in reports.items() if found),
        "reasons": dict(reasons.most_common()),
        "counts": terminalreporter.config.stash.get(_COUNTS, []),
    }
    terminalreporter.section("accelerator")
    terminalreporter.write_line("{accelerator}, torch {torch}: {tests}".format(**result))
    for reason, n in reasons.most_common():
        terminalreporter.write_line(f"{n} {reason}")
    for kernel in standin.missing_kernels() if standin.is_there() else []:
        terminalreporter.write_line(f"not emulated: {kernel}")
    if path := os.environ.get("PTSAVE_ACCELERATOR_RESULT"):
        Path(path).write_text(json.dumps(result))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[list[object]], None]:
    """Return a function that adds a row of counts to the result."""
    return request.config.stash.setdefault(_COUNTS, []).append


@pytest.fixture(scope="session")
def device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator.type


@pytest.fixture(scope="session")
def devices(device_type: str) -> list[str]:
    return [f"{device_type}:{index}" for index in range(torch.accelerator.device_count())]


@pytest.fixture
def fake() -> ModuleType:
    """Return what controls the accelerator; real hardware skips these tests."""
    module = controlled.load()
    if module is None:
        pytest.skip("needs control over the accelerator")
    return module


@pytest.fixture(autouse=True)
def _accelerator_is_as_it_was() -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    stream = torch.accelerator.current_stream(device)
    yield
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(device)
    if (module := controlled.load()) is not None:
        module.reset()
