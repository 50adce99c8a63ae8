"""Refuses pickles that ask for more memory than their bytes justify, before anything is made.

A length in front of bytes that are not there, or the number of a memo entry that nothing needs,
makes Python's unpickler allocate gigabytes for a file of a few bytes.
"""

from __future__ import annotations

import pickletools
import re
from functools import lru_cache

__all__ = ["refuse_huge_claims"]

_FIXED = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}
_COUNTED = {
    "string1": 1,
    "string4": 4,
    "bytes1": 1,
    "bytes4": 4,
    "bytes8": 8,
    "bytearray8": 8,
    "unicodestring1": 1,
    "unicodestring4": 4,
    "unicodestring8": 8,
    "long1": 1,
    "long4": 4,
}
_N_LINES = {"stringnl_noescape_pair": 2}

# Of each opcode: the size of its argument, that of the count in front of it, lines that it takes.
_SIZES: dict[int, tuple[int, int, int]] = {}
for _opcode in pickletools.opcodes:
    _kind = "" if _opcode.arg is None else _opcode.arg.name
    _fixed, _counted = _FIXED.get(_kind, 0), _COUNTED.get(_kind, 0)
    _lines = 0 if not _kind or _fixed or _counted else _N_LINES.get(_kind, 1)
    _SIZES[ord(_opcode.code)] = _fixed, _counted, _lines
_FRAME, _LONG_BINPUT, _PUT, _STOP = 0x95, ord("r"), ord("p"), ord(".")
_MAX_SHORT_NBYTES = 64


@lru_cache(maxsize=8)
def _common_opcodes(n_numbers: int) -> re.Pattern[bytes]:
    """Return a pattern of runs of opcodes of which a pickle is made, with short arguments.

    The numbers of memo entries in it are below `n_numbers`, whose last 16 bits are 0.
    """
    by_size: dict[int, bytes] = {}
    counted: dict[int, bytes] = {}
    for code, (fixed, n, lines) in _SIZES.items():
        if n in (1, 4):
            counted[n] = counted.get(n, b"") + bytes([code])
        elif not n and not lines and code not in (_FRAME, _LONG_BINPUT, _STOP):
            by_size[fixed] = by_size.get(fixed, b"") + bytes([code])
    kinds = [
        b"[%b]%b" % (re.escape(codes), b"." * fixed if fixed else b"+")
        for fixed, codes in sorted(by_size.items())
    ]
    for n, codes in counted.items():
        strings = b"|".join(
            re.escape(size.to_bytes(n, "little")) + b".{%d}" % size
            for size in range(_MAX_SHORT_NBYTES)
        )
        kinds.append(b"[%b](?:%b)" % (re.escape(codes), strings))
    if n_numbers:
        last = re.escape(bytes([min(n_numbers >> 16, 256) - 1]))
        kinds.append(b"%c..[\\x00-%b]\\x00" % (_LONG_BINPUT, last))
    return re.compile(b"(?:%b){1,1000}" % b"|".join(kinds), re.DOTALL)


def refuse_huge_claims(data: bytes) -> None:
    r"""Raise for a pickle that is cut short, or has numbers that its size does not justify.

    Raises
    ------
    ValueError
        The message says which.

    Examples
    --------
    >>> refuse_huge_claims(b"\x80\x02Nr\xff\xff\xff\x7f.")
    Traceback (most recent call last):
    ValueError: it numbers a value 2147483647, and has 9 bytes
    """
    at, end = 0, len(data)
    common = _common_opcodes(min(end, 1 << 24) >> 16 << 16)
    while at < end:
        if found := common.match(data, at):
            at = found.end()
            continue
        code = data[at]
        fixed, counted, lines = _SIZES.get(code, (0, 0, 0))
        at += 1
        if code in (_LONG_BINPUT, _PUT):
            _refuse_number(data, at, code)
        if counted:
            nbytes = int.from_bytes(data[at : at + counted], "little")
            if nbytes > end - at - counted:
                raise ValueError(f"it is cut short: {nbytes} bytes of a value are not there")
            at += counted + nbytes
        elif lines:
            for _ in range(lines):
                at = data.find(b"\n", at) + 1 or end
        else:
            if code == _FRAME and int.from_bytes(data[at : at + 8], "little") > end - at - 8:
                raise ValueError("it is cut short: a part of it is not there")
            at += fixed
        if code == _STOP:
            return
    raise ValueError("it is cut short: it has no end")


def _refuse_number(data: bytes, at: int, code: int) -> None:
    if code == _PUT:
        digits = data[at : data.find(b"\n", at)]
        number = int(digits) if digits.isdigit() and len(digits) < 20 else len(data)
    else:
        number = int.from_bytes(data[at : at + 4], "little")
    if number >= len(data):
        raise ValueError(f"it numbers a value {number}, and has {len(data)} bytes")
