"""Page-locked CPU memory for tensors that a ``weight_loader`` copies to an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

from ptsave.archive.recycled_memory import MIN_NBYTES, is_idle


class PinnedMemory:
    """Lends tensors in page-locked memory, up to `max_nbytes` at a time; for one thread.

    Memory comes from torch's allocator each time, and goes back there. The allocator knows copies
    that a loader has only begun (``non_blocking=True``), and does not reuse memory before they are
    done. Sizes count as torch rounds them: up to powers of two.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._lent: list[torch.UntypedStorage] = []

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return a contiguous tensor without values; None if it is small or exceeds the bound."""
        self._forget_idle()
        nbytes = shape.numel() * dtype.itemsize
        lent_nbytes = sum(_rounded(storage.nbytes()) for storage in self._lent)
        if nbytes < MIN_NBYTES or lent_nbytes + _rounded(nbytes) > self._max_nbytes:
            return None
        tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        self._lent.append(tensor.untyped_storage())
        return tensor

    def _forget_idle(self) -> None:
        busy = [not is_idle(self._lent, number) for number in range(len(self._lent))]
        self._lent = [storage for storage, keep in zip(self._lent, busy, strict=True) if keep]


def _rounded(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
