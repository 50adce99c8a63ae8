"""The engine's restricted unpickler: torch's results, torch's policy, and hostile pickles."""

from __future__ import annotations

import collections
import decimal
import gc
import io
import os
import pickle
import pickletools
import random
import resource
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoint_strategies import CHECKPOINTS
from hypothesis import given
from stock_comparison import (
    assert_same_failure,
    assert_same_object,
    saved_bytes,
    stock_load,
    stock_save,
    zipped,
)
from torch import _weights_only_unpickler
from unpickler_mutation import N_MUTATIONS, SAFE_GLOBALS, Subject, corpus, disagreement, mutated

import ptsave
from ptsave import _C
from ptsave.archive import unpickling

_CORPUS = corpus()


@pytest.fixture(autouse=True)
def _safe_globals() -> Iterator[None]:
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        yield


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    return {name: Subject(archive) for name, archive in _CORPUS.items()}


def _unpickle(data: bytes, persistent_load: Any = None, storages: Any = None) -> Any:
    return _C.unpickle_weights_only(data, persistent_load, encoding="utf-8", storages=storages)


def _both(data: bytes, **options: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return (
        lambda: ptsave.load(io.BytesIO(data), weights_only=True, **options),
        lambda: stock_load(io.BytesIO(data), weights_only=True, **options),
    )


# --------------------------------------------------------------------------- the same objects


@pytest.mark.parametrize("name", _CORPUS)
@pytest.mark.parametrize("storages_are_plain", [True, False])
def test_same_as_torchs_machine(
    name: str, storages_are_plain: bool, subjects: dict[str, Subject]
) -> None:
    subject = subjects[name]
    outcome = subject.by_engine(subject.pickle, storages_are_plain=storages_are_plain)
    assert outcome.error is None
    difference = disagreement(subject, subject.pickle, storages_are_plain=storages_are_plain)
    assert difference is None


@pytest.mark.parametrize("name", _CORPUS)
def test_same_as_stock(name: str) -> None:
    ours, stock = _both(_CORPUS[name])
    assert_same_object(ours(), stock())


@given(CHECKPOINTS)
def test_random_graphs(graph: Any) -> None:
    data = saved_bytes(stock_save, graph)
    ours, stock = _both(data)
    try:
        expected = stock()
    except pickle.UnpicklingError:
        assert_same_failure(ours, stock)
    else:
        assert_same_object(ours(), expected)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol: int) -> None:
    """Which opcodes are known is up to torch, and so is what is said about other protocols."""
    subject = Subject(saved_bytes(stock_save, {"a": torch.ones(2)}, pickle_protocol=protocol))
    assert disagreement(subject, subject.pickle) is None


def test_one_hundred_thousand_memo_entries() -> None:
    values = [f"text {i}" for i in range(70_000)]
    assert _unpickle(pickle.dumps([values, list(values)], 2)) == [values, values]
    loaded = _unpickle(pickle.dumps([values, list(values)], 2))
    assert all(a is b for a, b in zip(*loaded, strict=True))


@pytest.mark.parametrize("number", [0, 1, -1, 255, 256, 65_535, 65_536, 2**31 - 1, -(2**31)])
def test_numbers(number: int) -> None:
    for value in (number, number << 31, -number << 90, number * 1.1):
        assert _unpickle(pickle.dumps(value, 2)) == value
    for n in range(10):
        data = bytes([0x8A, n]) + b"\x80" * n + b"."
        assert _unpickle(data) == pickle.decode_long(b"\x80" * n)


# ------------------------------------------------------------------------------------ mutations


def test_mutations(subjects: dict[str, Subject]) -> None:
    """The same verdict on pickles that nobody has written, and the same object if it is one."""
    source = random.Random(0)
    pickles = [subject.pickle for subject in subjects.values()]
    names = list(subjects)
    n_accepted = 0
    for _ in range(N_MUTATIONS):
        subject = subjects[source.choice(names)]
        data = mutated(subject.pickle, pickles, source)
        difference = disagreement(subject, data, storages_are_plain=source.random() < 0.8)
        assert difference is None, f"{difference}; {data!r}"
        n_accepted += subject.by_engine(data, storages_are_plain=True).error is None
    assert n_accepted > N_MUTATIONS // 20  # or the comparison of results has not been tested


@pytest.mark.parametrize("shape", [b"K\x05\x85", b"K\xff\x85", b"K\x05K\x05\x86"])
def test_tensors_without_values(shape: bytes, subjects: dict[str, Subject]) -> None:
    """What a call leaves uninitialized does not count as a difference."""
    for _ in range(20):
        _reused = [torch.rand(25) for _ in range(100)]
        assert disagreement(subjects["sets"], b"\x80\x02ctorch\nTensor\n" + shape + b"R.") is None


@pytest.mark.parametrize("name", ["tensors", "optimizer", "plain"])
def test_every_truncation(name: str, subjects: dict[str, Subject]) -> None:
    data = subjects[name].pickle
    for end in range(len(data)):
        assert disagreement(subjects[name], data[:end]) is None, end


# --------------------------------------------------------------------------------------- policy

_EVIL = [b"os\nsystem\n", b"posix\nsystem\n", b"sys\nexit\n", b"builtins\neval\n", b"nt\nsystem\n"]
_EVIL += [b"builtins\ngetattr\n", b"torch\nload\n", b"__builtin__\nfile\n", b"torch.hub\nload\n"]


def _with_pickle(data: bytes) -> bytes:
    return zipped({"data.pkl": data, "version": b"3\n"})


@pytest.mark.parametrize("lines", _EVIL)
def test_forbidden_globals(lines: bytes) -> None:
    data = _with_pickle(b"\x80\x02c" + lines + b")R.")
    error = assert_same_failure(*_both(data))
    assert type(error) is pickle.UnpicklingError


def test_allowed_only_while_allowed() -> None:
    data = saved_bytes(stock_save, decimal.Decimal(1))
    assert_same_failure(*_both(data))
    with torch.serialization.safe_globals([decimal.Decimal]):
        assert _both(data)[0]() == 1
    assert_same_failure(*_both(data))


def test_blocked_modules_stay_blocked() -> None:
    with torch.serialization.safe_globals([os.system]):
        assert_same_failure(*_both(_with_pickle(b"\x80\x02cposix\nsystem\n.")))


def test_names_of_unsafe_globals() -> None:
    stream = io.BytesIO(saved_bytes(stock_save, decimal.Decimal(1)))
    error = assert_same_failure(*_both(stream.getvalue()))
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    assert unsafe == ["decimal.Decimal"]
    assert f"GLOBAL {unsafe[0]} was not an allowed global by default" in str(error)


def test_replaced_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original: Any = torch._utils._rebuild_tensor

    def rebuild(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(torch._utils, "_rebuild_tensor", rebuild)
    _both(saved_bytes(stock_save, [torch.ones(2), torch.ones(3)]))[0]()
    assert len(calls) == 2


def test_a_replaced_machine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    class Machine(_weights_only_unpickler.Unpickler):
        def load(self) -> Any:
            runs.append(self)
            return super().load()  # type: ignore[no-untyped-call]

    monkeypatch.setattr(_weights_only_unpickler, "Unpickler", Machine)
    _both(saved_bytes(stock_save, [1]))[0]()
    assert len(runs) == 1


def test_a_machine_that_knows_more_runs_itself() -> None:
    class Machine(_weights_only_unpickler.Unpickler):
        def load(self) -> Any:
            if self.read(1) == b"0":
                return None
            return super().load()  # type: ignore[no-untyped-call]

    assert unpickling._opcodes_of(_weights_only_unpickler.Unpickler) == unpickling._OPCODES
    assert unpickling._opcodes_of(Machine) != unpickling._OPCODES


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), torch.enable_grad],
    ids=["no_grad", "inference", "device", "grad"],
)
def test_contexts(context: Any) -> None:
    tensors = [torch.ones(3), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(1))]
    data = saved_bytes(stock_save, tensors)
    with context():
        ours, stock = (load() for load in _both(data))
    for a, b in zip(ours, stock, strict=True):
        assert (type(a), a.device, a.requires_grad) == (type(b), b.device, b.requires_grad)
        assert (a.is_inference(), a.is_leaf) == (b.is_inference(), b.is_leaf)
        assert a.is_inference() or a._version == b._version


def test_autocast_and_vmap() -> None:
    data = saved_bytes(stock_save, torch.ones(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_object(*(load() for load in _both(data)))

    def add_loaded(x: torch.Tensor) -> torch.Tensor:
        loaded: torch.Tensor = _both(data)[0]()
        return x + loaded

    assert torch.vmap(add_loaded)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_hooks_work() -> None:
    tensor = _both(saved_bytes(stock_save, torch.ones(2, requires_grad=True)))[0]()
    assert tensor._backward_hooks == collections.OrderedDict()
    tensor.register_hook(lambda grad: grad * 3)
    tensor.sum().backward()
    assert tensor.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("what", ["set", "list of pairs"])
def test_sparse_tensors_are_validated(what: str) -> None:
    """What torch notes for later is noted."""
    data = saved_bytes(stock_save, {what: torch.eye(2).to_sparse()})
    broken = data.replace(struct.pack("<qq", 0, 1) * 2, struct.pack("<qq", 0, 9) * 2)
    assert broken != data
    torch.sparse.check_sparse_tensor_invariants.enable()
    try:
        _, stock = _both(broken)
        assert_same_failure(lambda: ptsave.load(io.BytesIO(broken), verify=False), stock)
    finally:
        torch.sparse.check_sparse_tensor_invariants.disable()


def test_warning_about_protocols() -> None:
    with pytest.warns(UserWarning, match="Detected pickle protocol 3"):
        assert _unpickle(b"\x80\x03N.") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            _unpickle(b"\x80\x03N.")


# --------------------------------------------------------------------------------------- hostile


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


_HOSTILE = {
    "memo index 2**31": b"\x80\x02Nr\0\0\0\x80.",
    "memo index read": b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xfe.",
    "memo index of nothing": b"\x80\x02j\0\0\0\x80.",
    "no mark": b"\x80\x02t.",
    "no mark to append": b"\x80\x02]e.",
    "below the mark": b"\x80\x02](a.",
    "underflow": b"\x80\x02a.",
    "nothing to stop with": b"\x80\x02.",
    "cut in an operand": b"\x80\x02J\0\0",
    "cut in a float": b"\x80\x02G\0\0",
    "4 GiB of text": b"\x80\x02X\xff\xff\xff\xffabc",
    "text that is none": b"\x80\x02X\x01\0\0\0\xff.",
    "odd items": b"\x80\x02}(K\x01u.",
    "unhashable": b"\x80\x02}]K\x01s.",
    "key of a set": b"\x80\x02c__builtin__\nset\n](]ea\x85R.",
    "bytearray of 2 GiB": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "no arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "cut in a global": b"\x80\x02ctorch\nSiz",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_pickles(name: str, subjects: dict[str, Subject]) -> None:
    data = _with_pickle(_HOSTILE[name])
    if name == "memo index 2**31":  # nobody reads it
        assert _both(data)[0]() is None
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError) as caught:
        _both(data)[0]()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    if name != "bytearray of 2 GiB":
        assert disagreement(subjects["plain"], _HOSTILE[name]) is None
    if isinstance(caught.value, ptsave.CorruptCheckpointError):
        assert f"data.pkl, offset {caught.value.offset}" in str(caught.value)
        assert caught.value.record == "data.pkl"
        assert caught.value.offset is not None
        assert 0 < caught.value.offset <= len(_HOSTILE[name])
        assert pickle.loads(pickle.dumps(caught.value.args)) == caught.value.args


def _tensor(
    offset: bytes = b"K\x00", size: bytes = b"K\x02\x85", stride: bytes = b"K\x01\x85"
) -> bytes:
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu")
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    arguments = b"(" + storage + b"K\x0ctQ" + offset + size + stride + hooks + b"t"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R."


_LONG = {n: b"\x8a\x08" + struct.pack("<q", n) for n in (2**62, 2**63 - 1, -1, -(2**63), 2**31)}


@pytest.mark.parametrize("number", _LONG)
@pytest.mark.parametrize("part", ["offset", "size", "stride", "size and stride"])
def test_geometry(part: str, number: int, subjects: dict[str, Subject]) -> None:
    names = part.split(" and ")
    parts = {n: _LONG[number] + (b"" if n == "offset" else b"\x85") for n in names}
    subject = subjects["tensor"]
    assert subject.by_engine(_tensor(), storages_are_plain=True).error is None
    for plain in (True, False):
        outcome = subject.by_engine(_tensor(**parts), storages_are_plain=plain)
        assert isinstance(outcome.error, pickle.UnpicklingError)
        assert disagreement(subject, _tensor(**parts), storages_are_plain=plain) is None


def _quantized(how: str, offset: bytes, size: bytes, stride: bytes) -> bytes:
    storage = b"(" + _text("storage") + b"ctorch\nQInt8Storage\n" + _text("0") + _text("cpu")
    geometry = storage + b"K\x06tQ" + offset + size + stride
    affine = b"ctorch\nper_tensor_affine\nG?\xe0\0\0\0\0\0\0K\x03\x87"
    hooks = b"ccollections\nOrderedDict\n)R"
    qtensor = b"(" + geometry + affine + b"\x89" + hooks
    function = b"ctorch._utils\n_rebuild_qtensor\n"
    if how == "plain":
        return b"\x80\x02" + function + qtensor + b"tR."
    if how == "from a list":
        return b"\x80\x02" + function + b"]" + qtensor + b"eR."
    if how == "by another function":
        outer = b"ctorch._tensor\n_rebuild_from_type_v2\n"
        return b"\x80\x02" + outer + b"(" + function + b"ctorch\nTensor\n" + qtensor + b"t}tR."
    if how == "as a plain tensor":
        return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + geometry + b"\x89" + hooks + b"tR."
    if how == "with a type":
        third = b"ctorch._utils\n_rebuild_tensor_v3\n("
        return b"\x80\x02" + third + geometry + b"\x89" + hooks + b"ctorch\nqint8\ntR."
    good = _quantized("plain", b"K\x00", b"K\x02\x85", b"K\x01\x85")
    return good[:-1] + b"(" + geometry + b"tb."  # BUILD: set_()


_WAYS = ["plain", "from a list", "by another function", "as a plain tensor", "with a type", "build"]


@pytest.mark.parametrize("how", _WAYS)
@pytest.mark.parametrize("part", ["offset", "size", "stride"])
def test_quantized_tensors_stay_in_their_storage(
    how: str, part: str, subjects: dict[str, Subject]
) -> None:
    """torch does not look at the geometry of quantized tensors: reading them would crash."""
    subject = Subject(_with_quantized_storage())
    good = {"offset": b"K\x01", "size": b"K\x05\x85", "stride": b"K\x01\x85"}
    if how != "build":
        outcome = subject.by_engine(_quantized(how, **good), storages_are_plain=True)
        assert outcome.error is None or how == "with a type", outcome.error
    for number in (b"K\x07", *_LONG.values()):
        bad = good | {part: number + (b"" if part == "offset" else b"\x85")}
        for plain in (True, False):
            outcome = subject.by_engine(_quantized(how, **bad), storages_are_plain=plain)
            assert isinstance(outcome.error, pickle.UnpicklingError), bad


def _with_quantized_storage() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return saved_bytes(
            stock_save, torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.qint8)
        )


def test_deep_tuples_as_keys() -> None:
    """Python hashes tuples recursively: without a limit that is a crash, or an endless loop."""
    for nested in (b"\x85" * 200_000, b"q\x01h\x01\x86" * 100):
        with pytest.raises(RecursionError):
            _unpickle(b"\x80\x02}N" + nested + b"K\x01s.")
        with pytest.raises(RecursionError):
            _unpickle(b"\x80\x02c__builtin__\nset\n](N" + nested + b"e\x85R.")
        _unpickle(b"\x80\x02N" + nested + b".")
    key = ((1, 2), (3, (4, 5)))
    assert _unpickle(pickle.dumps({key: 1}, 2)) == {key: 1}


def test_many_marks() -> None:
    with pytest.raises(IndexError):
        _unpickle(b"\x80\x02" + b"(" * 1_000_000 + b".")


# --------------------------------------------------------------------------------- good manners


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    seen: list[bool] = []

    def load(pid: Any) -> Any:
        seen.append(gc.isenabled())
        gc.disable() if enabled else gc.enable()
        return 1

    was_enabled = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        assert _unpickle(b"\x80\x02N.") is None
        with pytest.raises(IndexError):
            _unpickle(b"\x80\x02a.")
        assert gc.isenabled() == enabled
        assert _unpickle(b"\x80\x02K\x01Q.", load) == 1
        assert seen == [enabled]
        assert gc.isenabled() != enabled  # what was called has changed it
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_no_references_are_left(subjects: dict[str, Subject]) -> None:
    source = random.Random(1)
    pickles = [mutated(s.pickle, [s.pickle], source) for s in subjects.values() for _ in range(20)]
    shared = [None, True, (), "cpu", torch.float32, collections.OrderedDict, torch.Size]

    def count(run: Callable[[Subject, bytes], object]) -> list[int]:
        for subject in subjects.values():
            for data in (subject.pickle, *pickles):
                run(subject, data)
        gc.collect()
        return [len(gc.get_objects()), *(sys.getrefcount(each) for each in shared)]

    def growth(run: Callable[[Subject, bytes], object]) -> list[int]:
        count(run)
        return [b - a for a, b in zip(count(run), count(run), strict=True)]

    # The archive itself keeps empty storages for as long as it is being loaded.
    allowed = growth(lambda subject, data: subject.by_torch(data))
    found = growth(lambda subject, data: subject.by_engine(data, storages_are_plain=True))
    assert all(a < b + 20 for a, b in zip(found, allowed, strict=True)), (found, allowed)


def test_empty_storages_are_made_without_torch() -> None:
    """As torch makes them: one for each tensor, which can be resized."""
    data = saved_bytes(stock_save, [torch.zeros(0, 3, dtype=torch.int16) for _ in range(50)])
    n_calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call" and frame.f_code.co_name == "load_tensor"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        loaded = ptsave.load(io.BytesIO(data))
    finally:
        sys.setprofile(before)
    assert n_calls <= 1  # the first one names the location that all have
    assert_same_object(loaded, torch.load(io.BytesIO(data)))
    assert len({tensor.untyped_storage()._cdata for tensor in loaded}) == len(loaded)
    for tensor in loaded:
        assert tensor.resize_(2, 3).untyped_storage().nbytes() == 12


def test_other_threads_run_and_signals_are_handled() -> None:
    data = b"\x80\x02](" + b"K\x01" * 12_000_000 + b"e."
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    loaded = _unpickle(data)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert loaded == [1] * 12_000_000
    assert sum(begin < tick < end for tick in ticks) >= 2


def test_users_errors_are_unchanged() -> None:
    class Error(ValueError):
        pass

    def load(storage: Any, location: str) -> Any:
        raise Error("mine")

    data = saved_bytes(stock_save, torch.ones(2))
    with pytest.raises(Error, match=r"^mine$"):
        ptsave.load(io.BytesIO(data), map_location=load)
    with pytest.raises(ZeroDivisionError):
        ptsave.load(io.BytesIO(data), map_location=lambda storage, location: 1 // 0)


# ------------------------------------------------------------------------- a plain tensor's opcodes


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
