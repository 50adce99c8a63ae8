"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ptsave.support.calls import pausing_garbage_collection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_pauses_within_pauses() -> None:
    with pausing_garbage_collection():
        with pausing_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_that_ends_early_ends_once() -> None:
    with pausing_garbage_collection() as pause:
        pause.end()
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()


def test_who_has_disabled_it_finds_it_so() -> None:
    gc.disable()
    with pausing_garbage_collection() as pause:
        pause.end()
    assert not gc.isenabled()


def test_pause_of_another_thread_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    is_enabled, other = gc.isenabled, pausing_garbage_collection()

    def look_late() -> bool:
        seen = is_enabled()
        other.__exit__()
        return seen

    other.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(gc, "isenabled", look_late)
        own = pausing_garbage_collection().__enter__()
    own.__exit__()
    assert gc.isenabled()


def test_an_error_ends_it() -> None:
    with pytest.raises(KeyError), pausing_garbage_collection():
        raise KeyError
    assert gc.isenabled()
