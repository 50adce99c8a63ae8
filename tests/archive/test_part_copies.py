"""Tensors that are copied from parts of their storages, against copies from the whole."""

from __future__ import annotations

import random
import warnings

import torch

from ptsave.archive.group_archive import PART_ALIGNMENT, StorageView, is_viewable


def _random_view(choice: random.Random, base: torch.Tensor) -> torch.Tensor:
    """Return a view of a storage: slices, steps, permutations, overlaps and repetitions."""
    shape = [choice.randint(1, 9) for _ in range(choice.randint(0, 4))]
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, choice.choice([step, step, step + choice.randint(0, 3), 0, 1]))
        step = max(step, strides[0]) * n
    order = choice.sample(range(len(shape)), len(shape))
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    while span > len(base):
        shape = [max(n - 1, 1) for n in shape]
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    view = base.as_strided(shape, strides, choice.randint(0, len(base) - span)).permute(order)
    if view.is_complex() and choice.random() < 0.5:
        view = view.conj()
        return view.imag if choice.random() < 0.5 else view  # which has the negative bit
    return view


def test_parts_make_the_whole() -> None:
    choice = random.Random(0)
    for _ in range(400):
        dtype = choice.choice([torch.float32, torch.int8, torch.complex64, torch.bfloat16])
        base = torch.randint(-100, 100, (choice.randint(1, 2000),)).to(dtype)
        view = _random_view(choice, base)
        target = torch.full(view.shape[::-1], 77, dtype=torch.complex128)
        target = target.permute([*reversed(range(view.dim()))])
        data = base.view(torch.uint8)
        begin, where = 0, StorageView.of(view)
        while begin < len(data):
            end = begin + PART_ALIGNMENT * choice.randint(1, 20)
            # At another address than in the storage, as in a chunk.
            chunk = torch.cat([torch.zeros(PART_ALIGNMENT, dtype=torch.uint8), data[begin:end]])
            where.copy_part(target, chunk[PART_ALIGNMENT:], begin)
            begin = end
        assert torch.equal(target, view.to(torch.complex128)), (view.shape, view.stride())


def test_quantized_tensors_are_more_than_bytes() -> None:
    assert is_viewable(torch.zeros(2, dtype=torch.float8_e4m3fn))
    assert is_viewable(torch.zeros(2, dtype=torch.bool))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is going to remove them
        assert not is_viewable(torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.qint8))
