"""Fixtures of tests that need an accelerator.

By default that is the one of ``fake_device``. ``PTSAVE_ACCELERATOR=real`` takes the machine's, and
fails where there is none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from accelerator import fake_device

_CHOICE = os.environ.get("PTSAVE_ACCELERATOR", "fake")


def pytest_configure() -> None:
    if _CHOICE == "fake":
        try:
            fake_device.load()
        except subprocess.CalledProcessError as error:
            pytest.exit(f"the fake accelerator does not build: {error}", returncode=2)
    elif _CHOICE != "real":
        pytest.exit(f"PTSAVE_ACCELERATOR={_CHOICE}: it is 'fake' or 'real'", returncode=2)
    elif not torch.accelerator.is_available():
        pytest.exit("PTSAVE_ACCELERATOR=real: torch finds no accelerator here", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "accelerator" in item.path.parent.parts:
            item.add_marker(pytest.mark.accelerator)


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
    """Return what controls the accelerator made for tests; real ones skip these tests."""
    if _CHOICE == "real":
        pytest.skip("needs control over the accelerator")
    return fake_device.load()


@pytest.fixture(autouse=True)
def _accelerator_is_as_it_was() -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    stream = torch.accelerator.current_stream(device)
    yield
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(device)
    if _CHOICE == "fake":
        fake_device.reset()
