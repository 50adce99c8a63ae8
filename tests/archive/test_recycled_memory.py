"""`RecycledMemory`: whose memory is lent again, and whose is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from ptsave.archive.spans import MIN_NBYTES, RecycledMemory


def test_memory_that_somebody_has_is_not_lent_again() -> None:
    memory = RecycledMemory(8 * MIN_NBYTES)
    shape = torch.Size([MIN_NBYTES])
    kept = memory.tensor(shape, torch.uint8)
    view = memory.tensor(shape, torch.uint8)[10:20]  # which has all of it
    storage = memory.storage(MIN_NBYTES)
    places = {kept.data_ptr(), view.data_ptr() - 10, storage.data_ptr()}
    assert len(places) == 3
    again = [memory.tensor(shape, torch.uint8) for _ in range(3)]
    assert places.isdisjoint(tensor.data_ptr() for tensor in again)


def test_no_more_than_its_bound_is_held() -> None:
    memory = RecycledMemory(2 * MIN_NBYTES)
    places = [tensor.data_ptr() for tensor in [memory.storage(MIN_NBYTES) for _ in range(6)]]
    held = {memory.storage(MIN_NBYTES).data_ptr() for _ in range(6)}
    assert len(held) == 1
    assert held <= set(places)


def test_threads_have_memory_of_their_own() -> None:
    memory = RecycledMemory(16 * MIN_NBYTES)

    def use(number: int) -> bool:
        for _ in range(200):
            tensor = memory.tensor(torch.Size([MIN_NBYTES // 8]), torch.int64).fill_(number)
            if not bool((tensor[:: MIN_NBYTES // 64] == number).all()):
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(8)))
