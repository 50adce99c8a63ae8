"""Damaged checkpoints: an error that says so, or the very contents that were saved."""

from __future__ import annotations

import io
import os
import pickle
import signal
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _corruption import (
    Part,
    archive_of,
    complaint_about,
    flipped,
    outcome_of,
    outcomes_all_ways,
    outcomes_of,
    parts_of,
    patched,
    same_object,
)
from stock_comparison import assert_same_object, saved_bytes, sparse_tensors_to_validate, stock_save

import ptsave

pytestmark = pytest.mark.usefixtures("_leaves_nothing_open")

_WEIGHT = torch.arange(1.0, 7.0)
_OBJECT = {
    "model": {"weight": _WEIGHT, "tied": _WEIGHT, "blocks": [torch.ones(3, dtype=torch.int64)]},
    "epoch": 7,
    "empty": torch.empty(0),
}
_DATA = saved_bytes(stock_save, _OBJECT)
_PARTS = list(parts_of(_DATA))
_KINDS = sorted({part.kind for part in _PARTS})


def _payload_offset(data: bytes, record: str) -> int:
    return next(p.begin for p in parts_of(data) if (p.kind, p.record) == ("payload", record))


def _damaged(data: bytes, record: str, at: int = 5) -> bytes:
    return flipped(data, _payload_offset(data, record) + at, 6)


def _corruption(data: bytes, **options: Any) -> ptsave.CorruptCheckpointError:
    with pytest.raises(ptsave.CorruptCheckpointError) as info:
        ptsave.load(io.BytesIO(data), **options)
    return info.value


# ------------------------------------------------------------------- every byte and every bit


@pytest.mark.parametrize("weights_only", [True, False])
def test_truncation_at_every_byte(weights_only: bool) -> None:
    complaints: Counter[str] = Counter()
    for nbytes in range(0, len(_DATA), 1 if weights_only else 7):
        stock, ours = outcomes_of(_DATA[:nbytes], weights_only=weights_only)
        assert ours.error is not None, nbytes
        assert stock.error is not None, nbytes
        if nbytes >= 4:  # before, not even the file's kind is known
            assert isinstance(ours.error, ptsave.CorruptCheckpointError), nbytes
        complaint = complaint_about(ours, stock, _OBJECT)
        if complaint:
            complaints[f"{complaint}: {ours}, stock {stock}"] += 1
    assert not complaints


def test_truncation_of_files(tmp_path: Path) -> None:
    for nbytes in range(0, len(_DATA), 41):
        memory, path, stream = outcomes_all_ways(_DATA[:nbytes], tmp_path).values()
        assert type(path.error) is type(stream.error) is type(memory.error), nbytes
        assert memory.error is not None


def test_zeros_instead_of_the_end(tmp_path: Path) -> None:
    """What a crash of the machine leaves of a file that was not synced."""
    for nbytes in range(4, len(_DATA), 41):
        data = _DATA[:nbytes] + bytes(len(_DATA) - nbytes)
        for ours in outcomes_all_ways(data, tmp_path).values():
            assert isinstance(ours.error, ptsave.CorruptCheckpointError), nbytes


def _complaints_about_bits(parts: list[Part], **options: Any) -> Counter[str]:
    """Of several records with the same fields each has a quarter of the bits flipped."""
    complaints: Counter[str] = Counter()
    n_turns = 4 if len(parts) >= 4 and "PTSAVE_EVERY_BIT" not in os.environ else 1
    for number, part in enumerate(parts):
        for offset in range(part.begin, part.end):
            for bit in range((offset - part.begin + number) % n_turns, 8, n_turns):
                stock, ours = outcomes_of(flipped(_DATA, offset, bit), **options)
                complaint = complaint_about(ours, stock, _OBJECT)
                if complaint:
                    place = f"byte {offset - part.begin} of {part.kind} {part.record}"
                    complaints[f"{complaint}: {place}: {ours}, stock {stock}"] += 1
    return complaints


@pytest.mark.parametrize("kind", _KINDS)
def test_every_flipped_bit(kind: str) -> None:
    complaints = _complaints_about_bits([part for part in _PARTS if part.kind == kind])
    assert not complaints


def test_every_damaged_payload_is_noticed() -> None:
    """Whether or not the record is needed for the object.

    Ours only, because some of these bits make stock's unpickler allocate gigabytes.
    """
    for part in (part for part in _PARTS if part.kind == "payload"):
        for offset in range(part.begin, part.end):
            for bit in range(0, 8, 3):
                error = _corruption(flipped(_DATA, offset, bit), weights_only=False)
                assert error.record == part.record


def test_every_flipped_bit_of_a_checksum_is_noticed() -> None:
    for part in (part for part in _PARTS if part.kind == "central header"):
        nonempty = struct.unpack_from("<I", _DATA, part.begin + 24)[0]
        for offset in range(part.begin + 16, part.begin + 20 if nonempty else 0):
            for bit in range(8):
                assert _corruption(flipped(_DATA, offset, bit)).record == part.record


def test_damaged_pickle_is_also_what_torch_raises() -> None:
    error = _corruption(_damaged(_DATA, "data.pkl", at=0))
    assert isinstance(error, pickle.UnpicklingError)
    assert isinstance(error, RuntimeError)
    assert error.record == "data.pkl"


def test_damage_that_hides_the_byte_order() -> None:
    """Bytes are swapped, or the load fails; never are they left as they are."""
    swapped = archive_of({"w": torch.arange(5, dtype=torch.int32)})
    swapped.entry("byteorder").payload = b"big"
    data = swapped.to_bytes()
    expected = ptsave.load(io.BytesIO(data))["w"]
    assert expected[1] == 1 << 24
    name_at = data.rindex(b"archive/byteorder") + len("archive/")
    for offset in range(name_at, name_at + len("byteorder")):
        for bit in range(8):
            _, ours = outcomes_of(flipped(data, offset, bit))
            assert ours.error is not None or same_object(ours.value["w"], expected), (offset, bit)


def test_no_damage_turns_verification_off() -> None:
    """A bit that sends the archive to torch's loader must not take the checks along."""
    damaged = _damaged(_DATA, "data/0")
    for part in (part for part in _PARTS if part.kind == "central header"):
        for bit in range(16):
            data = flipped(damaged, part.begin + 10 + bit // 8, bit % 8)
            _, ours = outcomes_of(data)
            assert ours.error is not None, (part.record, bit)


# ----------------------------------------------------------------------- what the error tells


def test_error_names_nested_entries() -> None:
    obj = {
        "state": {"layers": [{"w": torch.ones(3)}, {"w": torch.full((4,), 2.0)}]},
        "tuple": (torch.zeros(2), [torch.full((5,), 3.0)]),
    }
    data = saved_bytes(stock_save, obj)
    expected = {"data/0": "state.layers.0.w", "data/1": "state.layers.1.w"}
    expected |= {"data/2": "tuple.0", "data/3": "tuple.1.0"}
    for record, entry in expected.items():
        error = _corruption(_damaged(data, record))
        assert (error.record, error.entries) == (record, [entry])
        assert error.offset == _payload_offset(data, record)
        assert record in str(error)
        assert entry in str(error)


def test_error_names_all_that_share_a_storage() -> None:
    base = torch.arange(12.0)
    obj = {"a": base, "rows": [base.view(3, 4)[1], base[:2]], "other": torch.ones(1), "z": base}
    error = _corruption(_damaged(saved_bytes(stock_save, obj), "data/0"))
    assert error.entries == ["a", "rows.0", "rows.1", "z"]


def test_error_that_is_kept_keeps_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(_damaged(_DATA, "data/0"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ptsave.CorruptCheckpointError) as info:
        ptsave.load(path)
    assert os.listdir("/proc/self/fd") == before
    assert info.value.__traceback__ is not None


def test_error_names_a_bare_tensor() -> None:
    error = _corruption(_damaged(saved_bytes(stock_save, torch.ones(3)), "data/0"))
    assert error.entries == ["the tensor itself"]


def test_error_counts_several_damaged_records() -> None:
    obj = {f"t{i}": torch.full((100,), float(i)) for i in range(20)}
    data = saved_bytes(stock_save, obj)
    for record in ("data/17", "data/3", "data/11"):
        data = _damaged(data, record)
    error = _corruption(data)
    assert (error.record, error.offset) == ("data/3", _payload_offset(data, "data/3"))
    assert error.entries == ["t3", "t11", "t17"]
    assert "2 more damaged records" in str(error)


def test_error_in_a_large_file(tmp_path: Path) -> None:
    """Several chunks, read by several threads; the damage is on either side of a boundary."""
    obj = {f"t{i}": torch.full((700_000,), float(i)) for i in range(8)}
    path = tmp_path / "large.pt"
    stock_save(obj, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begins = [archive.getinfo(f"large/data/{i}").header_offset for i in range(8)]
    for offset in [(4 << 20) - 1, 4 << 20, (8 << 20) + 1, begins[4] + 1000, begins[7] + 2_000_000]:
        path.write_bytes(flipped(data, offset, 0))
        with pytest.raises(ptsave.CorruptCheckpointError) as info:
            ptsave.load(path)
        hit = sum(begin <= offset for begin in begins) - 1
        assert info.value.entries == [f"t{hit}"]


def test_error_when_the_entries_cannot_be_told() -> None:
    """Objects that only run code of the file could rebuild have no entries, and no code is run."""
    data = _damaged(saved_bytes(stock_save, {"a": torch.ones(3), "b": _Explosive()}), "data/0")
    error = _corruption(data, weights_only=False)
    assert (error.record, error.entries) == ("data/0", [])


class _Explosive:
    def __reduce__(self) -> tuple[Any, ...]:
        return (_explode, ())


def _explode() -> None:
    raise AssertionError("code of a damaged file was run")


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Interrupt what would take for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("interrupted by the test")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", ["shared", "cyclic", "cyclic twice"])
def test_naming_entries_takes_no_time(make: str) -> None:
    """A list that contains one list twice, which contains ... has 2 ** 40 entries."""
    nested: list[Any] = [torch.ones(3)]
    if make == "shared":
        for _ in range(40):
            nested = [nested, nested]
    else:
        nested += [nested] * (1 if make == "cyclic" else 2)
    data = _damaged(saved_bytes(stock_save, nested), "data/0")
    with _at_most(3):
        ours = outcome_of(lambda: ptsave.load(io.BytesIO(data)))
    assert isinstance(ours.error, ptsave.CorruptCheckpointError)
    assert ours.error.entries
    assert len(ours.error.entries) < 100_000
    assert ours.seconds < 1


def test_naming_entries_leaves_no_trace() -> None:
    """Finding them loads once more, on the meta device."""
    data = _damaged(saved_bytes(stock_save, {"a": torch.ones(3), "b": _Explosive()}), "data/0")
    _corruption(data, weights_only=False)
    assert torch.serialization._serialization_tls.map_location is None
    sparse = torch.eye(3).to_sparse()
    _corruption(_damaged(saved_bytes(stock_save, [sparse, torch.ones(9)]), "data/2"))
    assert not sparse_tensors_to_validate()
    assert_same_object(ptsave.load(io.BytesIO(_DATA)), _OBJECT)


def test_archives_written_by_others_name_entries_too() -> None:
    """Without torch's padding, offsets are not what they can be calculated to be."""
    error = _corruption(_damaged_copy(archive_of(_OBJECT).to_bytes()))
    assert (error.record, error.entries) == ("data/1", ["model.blocks.0"])


def _damaged_copy(data: bytes) -> bytes:
    return data.replace(struct.pack("<3q", 1, 1, 1), struct.pack("<3q", 1, 2, 1))


# --------------------------------------------------------------------------------- unverified


def test_verify_false_loads_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = patched(_DATA, _payload_offset(_DATA, "data/0"), struct.pack("<f", 42.0))
    path = tmp_path / "file.pt"
    path.write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError, match="verify=False"):
        ptsave.load(path)
    assert ptsave.load(path, verify=False)["model"]["tied"][0] == 42
    assert ptsave.load(path, mmap=True)["model"]["tied"][0] == 42
    monkeypatch.setenv("PTSAVE_VERIFY", "0")
    assert ptsave.load(path)["model"]["tied"][0] == 42


def test_all_checksums_zero_is_a_file_without_checksums() -> None:
    archive = archive_of(_OBJECT)
    for entry in archive.entries:
        entry.crc = 0
    with pytest.warns(ptsave.CheckpointWarning, match="without checksums") as caught:
        result = ptsave.load(io.BytesIO(archive.to_bytes()))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_same_object(result, _OBJECT)


@pytest.mark.parametrize("save", [stock_save, ptsave.save])
@pytest.mark.parametrize("obj", [_OBJECT, {"e": torch.empty(0), "w": torch.ones(300)}])
def test_storages_that_were_left_out_and_filled(
    save: Callable[..., object], obj: Any, tmp_path: Path
) -> None:
    """A file of skip_data has no checksums of storages by design: no warning, as with torch."""
    whole = archive_of(obj)
    with torch.serialization.skip_data():
        save(obj, tmp_path / "archive.pt")
    data = bytearray((tmp_path / "archive.pt").read_bytes())
    for entry in whole.entries:
        name = entry.name.decode().partition("/")[2]
        if name.startswith("data/"):
            offset = _payload_offset(bytes(data), name)
            data[offset : offset + len(entry.payload)] = entry.payload
    (tmp_path / "archive.pt").write_bytes(data)
    for source in (tmp_path / "archive.pt", io.BytesIO(bytes(data))):
        for weights_only in (True, False):
            assert_same_object(ptsave.load(source, weights_only=weights_only), obj)
            if isinstance(source, io.BytesIO):
                source.seek(0)
    pickle_byte = bytes(data).index(b"cpu")
    assert _corruption(patched(bytes(data), pickle_byte, b"x")).record == "data.pkl"


def test_an_ordinary_file_whose_storages_have_lost_their_checksums() -> None:
    """Its serialization id says that it had some."""
    archive = archive_of(_OBJECT)
    for entry in archive.entries:
        if b"/data/" in entry.name:
            entry.crc = 0
    with pytest.warns(ptsave.CheckpointWarning, match="without checksums"):
        ptsave.load(io.BytesIO(archive.to_bytes()))


@pytest.mark.parametrize("record", ["data.pkl", "byteorder", "data/0", "data/1", "version"])
def test_one_checksum_zero_is_damage(record: str) -> None:
    archive = archive_of(_OBJECT)
    archive.entry(record).crc = 0
    assert _corruption(archive.to_bytes()).record == record


def test_the_central_directory_holds_the_checksum_that_counts() -> None:
    """Some writers leave the others 0; data that matches the directory's is undamaged."""
    archive = archive_of(_OBJECT)
    for entry in archive.entries:
        entry.descriptor = True
        entry.local = {"crc": 0x12345678, "stored_nbytes": 1, "nbytes": 2}
    assert_same_object(ptsave.load(io.BytesIO(archive.to_bytes())), _OBJECT)
