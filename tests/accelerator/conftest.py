"""Fixtures of tests that need an accelerator.

By default that is the one of ``fake_device``. ``PTSAVE_ACCELERATOR=real`` takes the machine's, and
fails where there is none. ``make accelerator-standin`` makes a stand-in for CUDA the machine's.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from accelerator import controlled
from accelerator.standin import control as standin


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the accelerator, the numbers of outcomes, and the reasons for skipped tests."""
    if controlled.CHOICE == "fake":
        return
    name = "the stand-in" if standin.is_there() else torch.cuda.get_device_name()
    outcomes = {
        outcome: len(terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "error", "xfailed", "xpassed", "skipped")
    }
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items() if n)
    terminalreporter.section("accelerator")
    terminalreporter.write_line(f"torch {torch.__version__} on {name}: {counts}")
    reasons = Counter(
        report.longrepr[2]
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    for reason, n in reasons.most_common():
        terminalreporter.write_line(f"{n} {reason}")
    for kernel in standin.missing_kernels() if standin.is_there() else []:
        terminalreporter.write_line(f"not emulated: {kernel}")


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
