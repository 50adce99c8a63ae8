"""Tensors that another thread changes while they are saved, as in lock-free training."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave
from ptsave import _C

N_SAVES = 3


@pytest.fixture
def changing() -> Iterator[dict[str, torch.Tensor]]:
    """Tensors, all of which a thread changes again and again."""
    tensors = {"large": torch.zeros(4 << 20), **{f"small.{i}": torch.zeros(100) for i in range(9)}}
    stopped = threading.Event()

    def change() -> None:
        while not stopped.is_set():
            for tensor in tensors.values():
                tensor.add_(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield tensors
    finally:
        stopped.set()
        thread.join()


def save_async(tensors: dict[str, torch.Tensor], file: Any, **options: Any) -> None:
    ptsave.async_save(tensors, file, **options).result()


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (ptsave.save, {}),
        (ptsave.save, {"fsync": True}),
        (ptsave.save, {"atomic": False}),
        (save_async, {}),
        (save_async, {"staging": "background"}),
    ],
)
def test_the_file_loads(
    save: Callable[..., None],
    options: dict[str, Any],
    changing: dict[str, torch.Tensor],
    path: Path,
) -> None:
    for _ in range(N_SAVES):
        save(changing, path, **options)
        assert ptsave.load(path).keys() == changing.keys()  # every CRC-32 is compared


def test_a_stream_loads(changing: dict[str, torch.Tensor]) -> None:
    for _ in range(N_SAVES):
        stream = io.BytesIO()
        ptsave.save(changing, stream)
        stream.seek(0)
        assert ptsave.load(stream).keys() == changing.keys()


def _change(tensor: torch.Tensor) -> None:
    while True:
        tensor.add_(1)


def test_another_process_changes_a_shared_tensor(tmp_path: Path) -> None:
    tensor = torch.zeros(4 << 20).share_memory_()
    process = torch.multiprocessing.get_context("spawn").Process(target=_change, args=(tensor,))
    process.start()
    try:
        while tensor[0] == 0:
            pass  # it is being imported
        for _ in range(N_SAVES):
            ptsave.save({"tensor": tensor}, tmp_path / "model.pt")
            assert ptsave.load(tmp_path / "model.pt")["tensor"].shape == tensor.shape
    finally:
        process.kill()
        process.join()


def test_only_copies_of_tensors_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may read those itself, between their checksum and the end of the write."""
    still: list[bool] = []
    options_of = _C.WriteOptions

    def note(**options: Any) -> _C.WriteOptions:
        still.append(options["payloads_are_still"])
        return options_of(**options)

    monkeypatch.setattr(_C, "WriteOptions", note)
    tensors = {"tensor": torch.zeros(100)}
    ptsave.save(tensors, tmp_path / "a.pt")
    assert set(still) == {False}
    still.clear()
    save_async(tensors, tmp_path / "b.pt")
    with ptsave.ArchiveWriter(tmp_path / "c.pt") as writer:
        writer.add("tensor", tensors["tensor"])
    assert set(still) == {True}
