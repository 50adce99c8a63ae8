"""The opcodes of a plain tensor, which the engine takes as one step, and everything near them."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator

import pytest
import torch
from stock_comparison import saved_bytes, stock_save
from unpickler_mutation import Subject, disagreement

_TENSORS = {
    "vector": torch.ones(3),
    "vector again": torch.ones(2),
    "scalar": torch.tensor(1.5),
    "matrix": torch.ones(300, 2, dtype=torch.bfloat16).T,
    "three": torch.ones(2, 1, 2, dtype=torch.int64)[1:],
    "four": torch.ones(70_000, 1, 1, 1, dtype=torch.bool),
    "empty": torch.ones(0, 2),
    "grad": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "complex grad": torch.ones(1, dtype=torch.complex64, requires_grad=True),
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    shared = torch.ones(4)
    return Subject(saved_bytes(stock_save, {**_TENSORS, "shared": [shared, shared[1:]]}))


def _pieces(data: bytes) -> list[bytes]:
    """Return a pickle cut into its opcodes with their operands."""
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    return [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]


def _other_ways(piece: bytes) -> Iterator[bytes]:
    """Yield opcodes that mean the same, and ones that do not."""
    yield from (b"", piece * 2, b"N", b"K\x00", b")", b"(", b"0")
    opcode, operand = piece[:1], piece[1:]
    if opcode == b"K":
        yield from (b"M" + operand + b"\0", b"J" + operand + b"\0\0\0", b"\x8a\x01" + operand)
        yield from (b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x88", b"G" + bytes(8))
    elif opcode in b"\x85\x86\x87":
        n = opcode[0] - 0x84
        yield from (bytes([0x85 + n % 3]), b"t", b"(t", b"]", b"K\x01" + opcode)
    elif opcode in b"hj":
        (place,) = struct.unpack("<I", operand.ljust(4, b"\0"))
        yield b"j" + struct.pack("<I", place)
        yield from (b"h" + bytes([other]) for other in (0, 1, 2, 3, 5, 7))
    elif opcode in b"qr":
        yield from (b"q\x00", b"q\x03", b"r\x00\xff\xff\xff")
    elif opcode == b"X":
        yield from (_text(text) for text in ("", "0", "00", "01", "7", "1" * 12, "-1", "\u0661"))
        yield from (b"X\x01\0\0\0\xff", b"X\xff\xff\xff\xff0")
    elif opcode in b"\x88\x89":
        yield from (b"\x88", b"\x89", b"K\x01")


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def test_they_are_what_torch_writes(subject: Subject) -> None:
    assert disagreement(subject, subject.pickle) is None


def test_every_entry_of_the_memo_can_be_read(subject: Subject) -> None:
    """What is skipped when nobody asks for it is made when somebody does, and is one object."""
    last = max(argument for opcode, argument, _ in pickletools.genops(subject.pickle)
               if "PUT" in opcode.name and isinstance(argument, int))  # fmt: skip
    for i in range(last + 1):
        read = b"j" + struct.pack("<I", i)
        data = subject.pickle[:-1] + read + read + b"\x87."
        assert disagreement(subject, data) is None, i


def test_other_opcodes() -> None:
    """Each opcode left out, repeated, and replaced by others of the same and another meaning."""
    tensors = [_TENSORS[name] for name in ("vector", "matrix", "grad")]
    subject = Subject(saved_bytes(stock_save, tensors))
    pieces = _pieces(subject.pickle)
    # The first tensor's globals are in full; what comes after it refers to them.
    first = 1 + next(i for i, piece in enumerate(pieces) if b"OrderedDict" in piece)
    for i, piece in enumerate(pieces[first:-1], first):
        for other in _other_ways(piece):
            data = b"".join([*pieces[:i], other, *pieces[i + 1 :]])
            assert disagreement(subject, data) is None, (i, piece, other)


def test_geometry_beyond_the_storage(subject: Subject) -> None:
    """Numbers of all sizes in place of each number."""
    pieces = _pieces(subject.pickle)
    numbers = [b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\x00\x00\x00\x80", b"\x8a\x08" + b"\x7f" * 8]
    for i, piece in enumerate(pieces):
        for number in numbers if piece[:1] in b"KMJ" else []:
            data = b"".join([*pieces[:i], number, *pieces[i + 1 :]])
            assert disagreement(subject, data) is None, (i, piece, number)


@pytest.mark.parametrize("name", _TENSORS)
def test_cut_short(name: str) -> None:
    subject = Subject(saved_bytes(stock_save, [_TENSORS["vector again"], _TENSORS[name]]))
    for end in range(len(subject.pickle)):
        assert disagreement(subject, subject.pickle[:end]) is None, end
