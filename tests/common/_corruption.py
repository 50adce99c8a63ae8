"""Bad checkpoints: a zip writer that tells any lie it is asked for, and what a load makes of it."""

from __future__ import annotations

import io
import pickle
import re
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stock_comparison import SOURCE_PLACE, assert_same_object, saved_bytes, stock_load, stock_save

import ptsave
from ptsave import _C

DEFLATED = 8
_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_ZIP64_END, _ZIP64_LOCATOR, _DESCRIPTOR = 0x06064B50, 0x07064B50, 0x08074B50
_CENTRAL_NBYTES, _LOCAL_NBYTES = 46, 30
_END_RECORDS = (("zip64 end", 56), ("zip64 locator", 20), ("end", 22))


# ------------------------------------------------------------------------------------ writing


@dataclass
class Entry:
    """A record, and the lies its two headers tell about it (field name: value)."""

    name: bytes  # with the root folder
    payload: bytes = b""  # as it lies in the file
    method: int = 0
    nbytes: int | None = None  # uncompressed; None: what lies in the file
    crc: int | None = None  # None: of the payload
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    descriptor: bool = False
    is_written: bool = True  # False: the central directory alone names it

    def values(self, offset: int, lies: dict[str, Any]) -> dict[str, Any]:
        nbytes = len(self.payload) if self.nbytes is None else self.nbytes
        crc = zlib.crc32(self.payload) if self.crc is None else self.crc
        values: dict[str, Any] = {
            "signature": _LOCAL if lies is self.local else _CENTRAL,
            "version": 20,
            "flags": 8 if self.descriptor else 0,
            "method": self.method,
            "crc": crc,
            "stored_nbytes": len(self.payload),
            "nbytes": nbytes,
            "name": self.name,
            "extra": b"",
            "comment": b"",
            "disk": 0,
            "attributes": 0,
            "offset": offset,
        }
        values.update(lies)
        values.setdefault("name_nbytes", len(values["name"]))
        values.setdefault("extra_nbytes", len(values["extra"]))
        return values

    def local_bytes(self) -> bytes:
        v = self.values(0, self.local)
        head = struct.pack(
            "<IHHHHHIIIHH",
            *(v["signature"], v["version"], v["flags"], v["method"], 0, 0),
            *(v["crc"], v["stored_nbytes"], v["nbytes"], v["name_nbytes"], v["extra_nbytes"]),
        )
        tail = struct.pack("<IIII", _DESCRIPTOR, v["crc"], len(self.payload), len(self.payload))
        body = head + bytes(v["name"]) + bytes(v["extra"]) + self.payload
        return body + tail if self.descriptor else body

    def central_bytes(self, offset: int) -> bytes:
        v = self.values(offset, self.central)
        head = struct.pack(
            "<IHHHHHHIIIHHHHHII",
            *(v["signature"], v["version"], v["version"], v["flags"], v["method"], 0, 0),
            *(v["crc"], v["stored_nbytes"], v["nbytes"], v["name_nbytes"], v["extra_nbytes"]),
            *(len(v["comment"]), v["disk"], 0, v["attributes"], v["offset"]),
        )
        return head + bytes(v["name"]) + bytes(v["extra"]) + bytes(v["comment"])


@dataclass
class Archive:
    """A whole archive; `end`, `zip64_end` and `locator` hold the lies of the end records."""

    entries: list[Entry]
    end: dict[str, int] = field(default_factory=dict)
    zip64_end: dict[str, int] | None = None  # None: no zip64 end records
    locator: dict[str, int] = field(default_factory=dict)
    comment: bytes = b""
    directory_after: int | None = None  # so many records; None: all of them, as it should be

    def entry(self, name: str) -> Entry:
        """Return the record of that name (without root)."""
        return next(each for each in self.entries if each.name.partition(b"/")[2] == name.encode())

    def to_bytes(self) -> bytes:
        nbytes = sum(len(entry.central_bytes(0)) for entry in self.entries)
        body, offsets, place = bytearray(), [], -1
        for i, entry in enumerate(self.entries):
            if i == self.directory_after:
                place = len(body)
                body += bytes(nbytes)
            offsets.append(len(body))
            body += entry.local_bytes() if entry.is_written else b""
        pairs = zip(self.entries, offsets, strict=True)
        directory = b"".join(entry.central_bytes(offset) for entry, offset in pairs)
        if place < 0:
            place = len(body)
            body += directory
        body[place : place + nbytes] = directory
        return bytes(body) + self._end_records(place, nbytes, len(body))

    def _end_records(self, offset: int, nbytes: int, zip64_offset: int) -> bytes:
        values = {"offset": offset, "nbytes": nbytes, "n": len(self.entries), "disk": 0}
        records = b""
        if self.zip64_end is not None:
            v = {"signature": _ZIP64_END, "record_nbytes": 44, **values, **self.zip64_end}
            v = {"n_here": v["n"], **v}
            records += struct.pack(
                "<IQHHIIQQQQ",
                *(v["signature"], v["record_nbytes"], 45, 45, v["disk"], v["disk"]),
                *(v["n_here"], v["n"], v["nbytes"], v["offset"]),
            )
            where = {"offset": zip64_offset, "n_disks": 1, **self.locator}
            records += struct.pack("<IIQI", _ZIP64_LOCATOR, 0, where["offset"], where["n_disks"])
        v = {**values, "comment_nbytes": len(self.comment), **self.end}
        v = {"n_here": v["n"], **v}
        records += struct.pack(
            "<IHHHHIIH",
            *(_END, v["disk"], v["disk"], v["n_here"] & 0xFFFF, v["n"] & 0xFFFF),
            *(v["nbytes"], v["offset"], v["comment_nbytes"]),
        )
        return records + self.comment


def archive_of(obj: object) -> Archive:
    """Return the records that torch writes for an object, ready for telling lies about them."""
    with zipfile.ZipFile(io.BytesIO(saved_bytes(stock_save, obj))) as archive:
        names = archive.namelist()
        return Archive([Entry(name.encode(), archive.read(name)) for name in names])


# ----------------------------------------------------------------------------------- damaging


def patched(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]


def flipped(data: bytes, offset: int, bit: int) -> bytes:
    return patched(data, offset, bytes([data[offset] ^ (1 << bit)]))


def flip(path: Path, *places: int | bytes) -> None:
    """Damage one bit at each place of a file: an offset, or the first one with these bytes."""
    data = path.read_bytes()
    for place in places:
        data = flipped(data, data.index(place) if isinstance(place, bytes) else place, 0)
    path.write_bytes(data)


def offset_of(path: Path, name: str) -> int:
    """Return the position of a tensor in a file."""
    with ptsave.open(path) as archive:
        offset = archive.info(name).offset
    assert offset is not None
    return offset


def flip_middle(path: Path, record: str) -> None:
    """Damage one bit in the middle of a record of a file."""
    with path.open("rb") as file:
        engine = _C.Reader.open_descriptor(file.fileno(), 0, b"flip", direct=True)
        found = engine.find(record)
        assert found is not None
        where = engine.payload_offset(found) + engine.record(found).nbytes // 2
    flip(path, where)


@dataclass(frozen=True)
class Part:
    """A stretch of a file that torch has written."""

    kind: str  # "local header", "name", "padding", "payload", "descriptor", "central name", ...
    record: str  # without root; "" in the end records
    begin: int
    end: int


def parts_of(data: bytes) -> Iterator[Part]:
    """Name every byte of a small file that torch has written."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos, directory = archive.infolist(), archive.start_dir
    nexts = [info.header_offset for info in infos[1:]] + [directory]
    for info, end in zip(infos, nexts, strict=True):
        name = info.filename.partition("/")[2]
        cuts = [info.header_offset, info.header_offset + _LOCAL_NBYTES]
        extra_nbytes = struct.unpack_from("<H", data, info.header_offset + 28)[0]
        cuts += [cuts[-1] + len(info.filename), cuts[-1] + len(info.filename) + extra_nbytes]
        cuts += [cuts[-1] + info.file_size, end]
        kinds = ("local header", "name", "padding", "payload", "descriptor")
        for kind, part_begin, part_end in zip(kinds, cuts, cuts[1:], strict=False):
            yield Part(kind, name, part_begin, part_end)
    position = directory
    for info in infos:
        name = info.filename.partition("/")[2]
        yield Part("central header", name, position, position + _CENTRAL_NBYTES)
        position += _CENTRAL_NBYTES
        yield Part("central name", name, position, position + len(info.filename))
        position += len(info.filename)
    for kind, nbytes in _END_RECORDS:
        yield Part(kind, "", position, position + nbytes)
        position += nbytes
    assert position == len(data)


# ------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Outcome:
    """What a load has come to: a value or an error, in how many seconds."""

    value: Any
    error: Exception | None
    seconds: float

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.value!r:.100}"
        return f"{type(self.error).__name__}: {core_of(self.error):.150}"


def outcome_of(call: Callable[[], Any]) -> Outcome:
    value, error = None, None
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = call()
        except Exception as raised:
            error = raised.with_traceback(None)  # the frames would keep the file open
    return Outcome(value, error, time.perf_counter() - begin)


def outcomes_of(data: bytes, **options: Any) -> tuple[Outcome, Outcome]:
    """Load from memory; returns what stock torch has come to, and ptsave."""
    return (
        outcome_of(lambda: stock_load(io.BytesIO(data), **options)),
        outcome_of(lambda: ptsave.load(io.BytesIO(data), **options)),
    )


def outcomes_all_ways(data: bytes, folder: Path, **options: Any) -> dict[str, Outcome]:
    """Load with ptsave from memory, by path and from an open file."""
    path = folder / "bad.pt"
    path.write_bytes(data)
    with path.open("rb") as stream:
        return {
            "memory": outcome_of(lambda: ptsave.load(io.BytesIO(data), **options)),
            "path": outcome_of(lambda: ptsave.load(path, **options)),
            "stream": outcome_of(lambda: ptsave.load(stream, **options)),
        }


def same_object(actual: Any, expected: Any) -> bool:
    try:
        assert_same_object(actual, expected)
    except AssertionError:
        return False
    return True


# ------------------------------------------------------------------------------------ judging

_DOCUMENTED = (RuntimeError, pickle.UnpicklingError, OSError, ValueError, EOFError)
_MAX_SECONDS = 2.0
# What torch's reader itself says about an archive; any other error is what it stumbled over later.
_OF_READER = re.compile(
    "PytorchStreamReader|file in archive|archive does not contain|record size|"
    "hasRecord|Attempted to read a PyTorch file|Couldn't parse the version"
)
# We look at names and checksums before torch's reader gets to whatever it says.
_EARLIER = re.compile("CRC-32|invalid filename|not in a subdirectory|two records have the name")


def core_of(error: BaseException) -> str:
    """Return what people match on in torch's message."""
    text = SOURCE_PLACE.sub("", str(error))
    return text.partition(". This is an internal miniz error")[0].partition("  (Could")[0].strip()


def complaint_about(ours: Outcome, stock: Outcome, original: object) -> str | None:
    """Return what is wrong with our handling of damaged bytes, or None.

    Either the damage has no meaning and the object is the original, or there is an error: of
    stock's type and with its words where stock's reader noticed the damage, and
    `CorruptCheckpointError` where stock stumbled over it later, or not at all.
    """
    if ours.seconds > _MAX_SECONDS:
        return f"took {ours.seconds:.1f} s"
    if ours.error is None:
        return None if same_object(ours.value, original) else "wrong contents"
    if not isinstance(ours.error, _DOCUMENTED) and type(ours.error) is not type(stock.error):
        return "undocumented type"
    damage = isinstance(ours.error, ptsave.CorruptCheckpointError)
    if stock.error is None:
        return None if damage else "an error of another type than CorruptCheckpointError"
    if isinstance(stock.error, RuntimeError) and _OF_READER.search(str(stock.error)):
        if not isinstance(ours.error, RuntimeError):
            return "not a RuntimeError"
        return None if _has_words_of(stock.error, str(ours.error)) else "lacks torch's words"
    if damage or type(ours.error) is type(stock.error):
        return None
    return "neither CorruptCheckpointError nor stock's type"


def _has_words_of(stock: Exception, message: str) -> bool:
    core = core_of(stock)
    miniz_words = core.rpartition(": ")[2] if "PytorchStreamReader" in core else core
    # Where exactly an inconsistency shows depends on what is compared first.
    same_fault = miniz_words == "invalid header or archive is corrupted" and miniz_words in message
    # A shifted payload, or memory that nothing was inflated into: torch takes what it finds there
    # for the version, which is another one in each run.
    made_up = "parse the version" in core or "a PyTorch file with version" in core
    shifted = made_up and "record version" in message
    return core in message or same_fault or shifted or _EARLIER.search(message) is not None
