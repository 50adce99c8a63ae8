"""Unpickles the object of an archive; if this is safe, storages are read at the same time.

With ``weights_only=True`` the engine's unpickler runs in place of torch's.  Otherwise the
unpickler of `pickle_module` runs, by default Python's.

Code that can look at a tensor's values must not run before the bytes of its storages are read.
Rebuilding plain tensors in CPU memory does not look at values.  So the steps of the pickle are
checked first.  If the pickle only rebuilds plain tensors, unpickling starts while bytes are still
being read.  Otherwise unpickling starts when all bytes are read and verified.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ptsave import _C
from ptsave.archive.filling import (
    Placement,
    ReceivedPlacement,
    goes_by_torchs_rules,
    may_reach_accelerator,
    verifies_storages,
)
from ptsave.archive.reader import RecordReader, UnfilledView
from ptsave.errors import MalformedPickleError
from ptsave.support.torch_names import (
    LOADER_KNOWS_WEIGHTS_ONLY,
    cpu_rule,
    detect_fake_mode,
    load_archive,
    location_rules,
    modes_are_active,
    options,
    restricted_unpickler,
)

# Storages are read several times as fast as a pickle is checked, per byte.  Checking a small pickle
# takes almost no time.
_MIN_BYTES_PER_PICKLE_BYTE = 8
_SMALL_PICKLE_NBYTES = 1 << 20
_CPU = torch.device("cpu")
# The names of dtypes in pickles.
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def unpickle(
    reader: RecordReader,
    map_location: Any,
    pickle_module: Any,
    overall_storage: torch.UntypedStorage | None,
    pickle_load_args: dict[str, Any],
) -> Any:
    """Rebuild the object of an archive, as :func:`torch.load` does.

    With ``mmap=True``, `overall_storage` is the mapped file; otherwise, it is None.
    """
    fills = fills_storages(map_location)
    if overall_storage is not None or not fills or reader.reads_when_asked:
        if fills and reader.reads_when_asked:
            reader.verifies = verifies_storages(reader)
        shown = reader.for_loader() if fills else UnfilledView(reader)
        module = faster(pickle_module, reader)
        return _load(shown, map_location, module, pickle_load_args, overall_storage)
    if may_reach_accelerator(reader, map_location) and _may_defer(reader, pickle_module):
        return _unpickle_to_places(reader, map_location, pickle_module, pickle_load_args)
    for exact_offsets in (False, True):
        try:
            reader.engine.start(
                None,
                n_threads=reader.limits.n_readers,
                verify=verifies_storages(reader),
                exact_offsets=exact_offsets,
            )
            view = reader.for_loader()
            data = view.get_record("data.pkl")
            are_plain = _stay_on_cpu(map_location) and _storages_are_plain(reader)
            if are_plain:
                reader.engine.place("cpu", _CPU)
            module = faster(pickle_module, reader, storages_are_plain=are_plain)
            if are_plain and _gains_by_overlap(reader, data) and _is_blind(data, pickle_module):
                module = _overlapping(reader, module)
                result = _load(view, map_location, module, pickle_load_args)
                _wait(reader)
            else:
                _wait(reader)
                result = _load(view, map_location, module, pickle_load_args)
            reader.engine.release_storages()
            return result
        except _C.LayoutMismatchError:
            # The payloads are not where torch's writer would have put them.  So far, no code has
            # looked at storages, so unpickling can be repeated.
            if exact_offsets:
                raise
        finally:
            reader.engine.cancel()
    raise AssertionError("unreachable")


def _wait(reader: RecordReader) -> None:
    """Wait until every storage is filled; raise an error if a storage is damaged."""
    damaged = reader.engine.wait_all(progress=reader.progress)
    if damaged:
        from ptsave.archive.damage import damage_of

        raise damage_of(reader, damaged)


def can_defer_reading(reader: RecordReader, pickle_module: Any) -> bool:
    """Whether the object can be made in CPU memory before any storage's bytes are read."""
    return fills_storages("cpu") and _may_defer(reader, pickle_module)


def unpickle_unread(
    reader: RecordReader,
    pickle_module: Any,
    locations: set[str],
    first_at: dict[int, str] | None = None,
) -> Any:
    """Rebuild an archive's object; its storages get CPU memory, but no bytes are read.

    `can_defer_reading` must be true.  Saved devices other than the CPU, such as "cuda:0", are
    added to `locations`.  `first_at` gets each record's first saved device, by record number.
    """

    def stay(storage: Any, location: str) -> Any:
        if location != "cpu":
            locations.add(location)
        reader.engine.place(location, _CPU)
        if first_at is not None:
            record = reader.engine.record_of(torch.empty(0, dtype=torch.uint8).set_(storage))
            if record is not None:
                first_at.setdefault(record, location)
        return storage

    _reserve(reader)
    reader.engine.place("cpu", _CPU)
    return _load_reserved(reader, stay, pickle_module, {"encoding": "utf-8"})


def unpickle_without_bytes(
    archive: Any, map_location: Any, pickle_module: Any, pickle_load_args: Mapping[str, Any]
) -> Any:
    """Rebuild an archive's object without its storages' bytes; `fills_storages` must be False."""
    return _load(UnfilledView(archive), map_location, pickle_module, pickle_load_args)


def unpickle_received(
    reader: RecordReader,
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: dict[str, Any],
    receive: Callable[[set[int], Mapping[int, torch.UntypedStorage]], None],
) -> Any:
    """Rebuild the object of an archive whose storages come from another rank.

    `receive` gets the records to fill in CPU memory, and the storages to fill on other devices.
    """
    if not fills_storages(map_location):
        module = faster(pickle_module, reader)
        return _load(UnfilledView(reader), map_location, module, pickle_load_args)
    _reserve(reader)
    if goes_by_torchs_rules(map_location) and _may_defer(reader, pickle_module):
        placement = ReceivedPlacement(reader, map_location)
        result = _load_reserved(reader, placement, pickle_module, pickle_load_args)
        receive(set(reader.engine.referenced()) - placement.placed.keys(), placement.placed)
    else:  # something may look at values, or at storages
        others = {reader.find(name) for name in reader.engine.other_names()}
        receive(set(range(len(reader.engine.records()))) - others, {})
        module = faster(pickle_module, reader)
        result = _load(reader.for_loader(), map_location, module, pickle_load_args)
    reader.engine.release_storages()
    return result


def refusal_of(data: bytes, *, allows_values: bool = False) -> str | None:
    """Return why ``weights_only=True`` refuses a pickle; None if it accepts the pickle.

    With `allows_values`, harmless values such as NumPy's scalars are accepted, too.

    >>> refusal_of(pickle.dumps({"lr": 0.5}, 2)) is None
    True
    >>> refusal_of(pickle.dumps(io.StringIO, 2))[:33]
    'Unsupported global: GLOBAL _io.St'
    """
    reader: Any = _PickleAlone(data, allows_values=allows_values)
    module = faster(restricted_unpickler, reader)
    try:
        _load(UnfilledView(reader), "meta", module, {"encoding": "utf-8"})
    except pickle.UnpicklingError as error:
        return None if isinstance(error, MalformedPickleError) else str(error)
    except Exception:  # no refusal: some tensors cannot be made without bytes
        return None
    return None


class _PickleAlone:
    """An archive for torch's loader that has only a pickle; its storages have no bytes."""

    path = "data.pkl"
    is_blind = False

    def __init__(self, data: bytes, *, allows_values: bool) -> None:
        self.allows_values = allows_values
        self.leaves_opaque = False
        records = {"data.pkl": data}
        self.has_record = records.__contains__
        self.get_record = records.__getitem__

    def get_record_offset(self, name: str) -> int:
        return 0


def _unpickle_to_places(
    reader: RecordReader, map_location: Any, pickle_module: Any, pickle_load_args: dict[str, Any]
) -> Any:
    """Make the object with its storages on their devices; then read the bytes of the storages."""
    _reserve(reader)
    placement = Placement(reader, map_location, verify=verifies_storages(reader))
    result = _load_reserved(reader, placement, pickle_module, pickle_load_args)
    placement.finish()
    reader.engine.release_storages()
    return result


def _reserve(reader: RecordReader) -> None:
    """Reserve memory for the storages; `fill` reads their bytes later."""
    with reader.naming_what_needs_memory():
        reader.engine.reserve()
    reader.wait_for_bytes = False


def _load_reserved(
    reader: RecordReader, map_location: Any, pickle_module: Any, pickle_load_args: dict[str, Any]
) -> Any:
    """Make an archive's object after `_reserve`; its pickle must not look at tensors' values."""
    module = faster(pickle_module, reader, storages_are_plain=True)
    return _load(reader.for_loader(), map_location, module, pickle_load_args)


def _load(
    shown: Any,
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: Mapping[str, Any],
    overall_storage: torch.UntypedStorage | None = None,
) -> Any:
    """Call torch's loader with `shown` as its file reader and `pickle_module` as its unpickler."""
    if LOADER_KNOWS_WEIGHTS_ONLY:  # tensors without bytes have no values to validate
        machine = getattr(pickle_module, "Unpickler", None)
        is_restricted = pickle_module is restricted_unpickler or (
            isinstance(machine, type) and issubclass(machine, (Unpickler, _TORCHS_MACHINE))
        )
        validates = is_restricted and fills_storages(map_location)
        pickle_load_args = {**pickle_load_args, "weights_only": validates}
    try:
        return load_archive(
            shown, map_location, pickle_module, overall_storage=overall_storage, **pickle_load_args
        )
    finally:
        # torch does not reset this option when unpickling fails.
        options.map_location = None


def fills_storages(map_location: Any) -> bool:
    """Whether loading reads bytes into storages; False, for example, for the meta device."""
    return not (
        is_meta_location(map_location) or options.skip_data or detect_fake_mode(None) is not None
    )


def is_meta_location(map_location: Any) -> bool:
    """Whether everything is loaded onto the meta device; False for a dict or a callable.

    >>> is_meta_location("meta"), is_meta_location(torch.device("cpu")), is_meta_location(None)
    (True, False, False)
    """
    if isinstance(map_location, torch.device):
        return map_location.type == "meta"
    return isinstance(map_location, str) and map_location == "meta"


def _storages_are_plain(reader: RecordReader) -> bool:
    """Whether torch turns a record's bytes into a CPU storage without change or other code."""
    if os.environ.get("TORCH_SERIALIZATION_DEBUG", "0") == "1":  # torch compares offsets then
        return False
    # torch's own rule comes first: it returns CPU storages as they are.
    restores_blindly = location_rules[0][2] is cpu_rule
    return reader.is_native_byte_order() and restores_blindly and not modes_are_active()


def _gains_by_overlap(reader: RecordReader, data: bytes) -> bool:
    """Whether reading the storages takes longer than checking the steps of the pickle."""
    nbytes = len(data)
    if nbytes <= _SMALL_PICKLE_NBYTES:
        return True
    return reader.engine.nbytes_to_read >= _MIN_BYTES_PER_PICKLE_BYTE * nbytes


def _may_defer(reader: RecordReader, pickle_module: Any) -> bool:
    """Whether unpickling may start before the storages' bytes are read."""
    if not _storages_are_plain(reader):
        return False
    data = reader.small_records()["data.pkl"]
    if _is_blind(data, pickle_module):
        reader.is_blind = True
        return True
    if not reader.leaves_opaque:
        return False
    from ptsave.archive.plain_values import opaque_globals

    opaque = opaque_globals(data)
    return bool(opaque) and _is_blind(data, pickle_module, opaque)


def _is_blind(data: bytes, pickle_module: Any, *opaque: set[str]) -> bool:
    """Whether the pickle only makes plain tensors and `opaque` objects, and looks at no values."""
    known = pickle_module in (pickle, restricted_unpickler)
    return known and _C.rebuilds_blindly(data, _DTYPES, *opaque)


def _stay_on_cpu(map_location: Any) -> bool:
    """Whether storages that were saved on the CPU certainly stay there."""
    # A callable or a subclass of `str` may claim to be the CPU, and do anything.
    is_plain = type(map_location) in (str, torch.device)
    return map_location is None or (is_plain and str(map_location) == "cpu")


def _overlapping(reader: RecordReader, pickle_module: Any) -> Any:
    """Wrap `pickle_module` so that it waits for the bytes of storages not saved on the CPU."""

    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
        persistent_load: Callable[[Any], Any]  # set by torch

        def load(self) -> Any:
            load_storage = self.persistent_load

            def persistent_load(saved_id: Any) -> Any:
                stays = isinstance(saved_id, tuple) and len(saved_id) > 3 and saved_id[3] == "cpu"
                reader.wait_for_bytes = not stays
                return load_storage(saved_id)

            self.persistent_load = persistent_load
            return super().load()

    return SimpleNamespace(Unpickler=Unpickler)


# ------------------------------------------------------------------- the engine's own unpickler


class Unpickler:
    """Replaces ``torch._weights_only_unpickler.Unpickler``, for one archive."""

    archive: weakref.ref[RecordReader]
    storages_are_plain: bool
    persistent_load: Callable[[Any], Any]  # set by torch

    def __init__(self, file: io.BytesIO, *, encoding: str = "bytes") -> None:
        self.file = file
        self.encoding = encoding

    def load(self) -> Any:
        reader = self.archive()
        assert reader is not None
        data = self.file.read()
        if not reader.leaves_opaque:
            if not reader.allows_values or reader.is_blind:
                try:
                    return self._load(reader, data, None)
                except pickle.UnpicklingError:
                    if not reader.allows_values:
                        raise
            return self._load(reader, data, "ValueUnpickler")  # its import takes a while
        refused: set[Any] = set()
        while True:
            n_refused = len(refused)
            try:
                return self._load(reader, data, "OpaqueUnpickler", refused=refused)
            except pickle.UnpicklingError:
                if len(refused) == n_refused:
                    raise

    def _load(
        self, reader: RecordReader, data: bytes, machine_name: str | None, **attributes: Any
    ) -> Any:
        machine = None
        if machine_name is not None:
            from ptsave.archive import plain_values

            given: set[Any] = set()
            kind = getattr(plain_values, machine_name)
            machine = type("Machine", (kind,), {"given": given, **attributes})
        try:
            obj = _C.unpickle_weights_only(
                data,
                self.persistent_load,
                encoding=self.encoding,
                storages=reader.engine if self.storages_are_plain else None,
                unpickler_type=machine,
            )
        except Exception as error:
            offset = getattr(error, "pickle_offset", None)
            if offset is None:
                raise
            malformed = MalformedPickleError.from_error(error, offset, reader.path)
            if malformed is None:
                raise
            raise malformed from error
        if machine is not None:
            plain_values.refuse_functions(obj, given)
        return obj


def faster(pickle_module: Any, reader: RecordReader, *, storages_are_plain: bool = False) -> Any:
    """Replace torch's restricted unpickler by the engine's; return other modules unchanged."""
    if pickle_module is not restricted_unpickler or not _knows_torchs_machine():
        return pickle_module
    # The class lives until the next garbage collection, and must not keep the archive open.
    attributes = {"archive": weakref.ref(reader), "storages_are_plain": storages_are_plain}
    return SimpleNamespace(Unpickler=type("Unpickler", (Unpickler,), attributes))


# fmt: off
_OPCODES = frozenset(
    getattr(pickle, name)[0]
    for name in [
        "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID",
        "BINPUT", "BINUNICODE", "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE",
        "GLOBAL", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "NEWFALSE", "NEWOBJ", "NEWTRUE",
        "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS", "SHORT_BINSTRING", "STOP", "TUPLE",
        "TUPLE1", "TUPLE2", "TUPLE3",
    ]
)
# fmt: on


def _knows_torchs_machine() -> bool:
    """Whether torch's restricted unpickler is the version that the engine imitates.

    If a later torch knows more opcodes, or a program replaces the unpickler, torch's code runs.
    """
    machine = restricted_unpickler.Unpickler
    return machine is _TORCHS_MACHINE and _opcodes_of(machine) == _OPCODES


_TORCHS_MACHINE = restricted_unpickler.Unpickler


@functools.cache
def _opcodes_of(machine: Any) -> frozenset[int]:
    return frozenset(opcode for opcode in range(256) if _knows(machine, opcode))


def _knows(machine: Any, opcode: int) -> bool:
    try:
        machine(io.BytesIO(bytes([opcode]))).load()
    except pickle.UnpicklingError as error:
        return "Unsupported operand" not in str(error)
    except Exception:
        return True
    return True
