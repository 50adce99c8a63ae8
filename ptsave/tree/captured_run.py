"""The calls and values of a capture, from the object of its file.

Records stay tuples until they are asked for, and are checked column by column. There may be 100,000
calls, and making an object for each takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ptsave.errors import CorruptCheckpointError, EntryNotFoundError
from ptsave.support.tensor_types import is_tensor
from ptsave.support.text import count_text
from ptsave.tree.capture_columns import are_texts, is_column_right
from ptsave.tree.capture_schema import (
    CALL_FIELDS,
    GRADIENT_PHASES,
    HEADER,
    SUMMARY,
    VALUE_FIELDS,
    CapturedCall,
    CapturedValue,
    Statistics,
    check_header,
    is_block_key,
    is_capture,
    parse_name,
)
from ptsave.tree.names import entry_not_found

if TYPE_CHECKING:
    from torch import Tensor

Row = tuple[Any, ...]

_CALL_PHASES = frozenset(GRADIENT_PHASES.values())
_NAME, _CALL, _STATISTICS = map(VALUE_FIELDS.index, ("name", "call", "statistics"))


class CapturedRun:
    """An open capture; the tensors of the saved object `obj` may have no values.

    `header` is as docs/format.md lists it. `totals` are written at the end, and None if the capture
    was killed before. An object that is no capture, or one of a later version, raises ValueError;
    damaged records raise CorruptCheckpointError.
    """

    def __init__(self, obj: object, path: str) -> None:
        if not is_capture(obj):
            raise ValueError(
                f"{path} is no capture: ptsave.capture writes them; the tensors of any other "
                "checkpoint are read with get_tensor()"
            )
        self.path = path
        self._obj = self._dict_of(obj)
        self.header = self._checked_header(self._obj[HEADER])
        self.totals = self._dict_of(self._obj.get(SUMMARY))
        blocks = [(key, value) for key, value in self._obj.items() if is_block_key(key)]
        if not blocks and not isinstance(self.header.get("modules"), dict):
            raise self._damaged("it has no records, and its header no modules")
        self.call_rows: list[Row] = []
        self.value_rows: list[Row] = []
        for key, block in blocks:
            self.call_rows += self._rows(key, block, "call", CALL_FIELDS, _CALL_DEFAULTS)
            self.value_rows += self._rows(key, block, "value", VALUE_FIELDS, _VALUE_DEFAULTS)
        self.value_rows.sort(key=itemgetter(VALUE_FIELDS.index("order")))
        self._check_ids()

    @property
    def model(self) -> str:
        """The full name of the model's class."""
        found = self.header.get("model")
        return found if type(found) is str else ""

    @cached_property
    def modules(self) -> dict[str, str]:
        """The names of the selected modules' classes, by the modules' paths."""
        found = self._dict_of(self.header.get("modules"), {})
        return {path: name for path, name in found.items() if type(path) is type(name) is str}

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that have records."""
        texts = {row[_NAME].partition("/")[0] for row in self.value_rows}
        found = {*map(int, texts), *(row[CALL_FIELDS.index("step")] for row in self.call_rows)}
        return tuple(sorted(found))

    def total(self, name: str) -> int | None:
        """Return a total from the end of the capture; None if it has no such total."""
        found = (self.totals or {}).get(name)
        return found if type(found) is int and 0 <= found < 1 << 64 else None

    def calls(self) -> list[CapturedCall]:
        """Return all calls, in the order in which they began."""
        return list(self._calls)

    def values(self, phase: str | None = None, step: int | None = None) -> Iterator[CapturedValue]:
        """Yield values in the order of their events, of all phases and steps or of one."""
        for row in self.value_rows:
            if phase is not None or step is not None:
                of_step, of_phase, _ = row[_NAME].split("/", 2)
                if phase not in (None, of_phase) or step not in (None, int(of_step)):
                    continue
            yield _value_of(row)

    def value(self, name: str) -> CapturedValue:
        """Return the value with a name; an EntryNotFoundError suggests similar names."""
        row = self._by_name.get(name)
        if row is None:
            raise entry_not_found(self.path, name, self._by_name)
        return _value_of(row)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a value, as it is in the object.

        A tensor that the capture has left out raises EntryNotFoundError. One that the file should
        hold, but does not, raises CorruptCheckpointError.
        """
        value = self.value(name)
        if value.kind != "tensor":
            raise TypeError(f"{self.path}: {name!r} is no tensor, but a {value.type}")
        if not value.stored:
            reason = value.note or "the capture was made with tensors=False"
            raise EntryNotFoundError(
                f"{self.path}: the tensor {name!r} is not in the file ({reason})"
            )
        tensor = self._obj.get(value.stored)
        if not is_tensor(tensor):
            raise self._damaged(f"{name!r} should be the tensor {value.stored!r}, which is missing")
        return tensor

    # -------------------------------------------------------------------------------- views

    @cached_property
    def _calls(self) -> list[CapturedCall]:
        groups: dict[int | None, list[Row]] = {}
        for row in self.value_rows:
            groups.setdefault(row[_CALL], []).append(row)
        calls = [_call_of(row, groups.pop(row[0], ())) for row in self.call_rows]
        groups.pop(None, None)
        if groups:  # calls that were not finished when the process was killed
            calls += filter(None, map(self._unfinished, groups.values()))
        calls.sort(key=lambda call: call.order)
        return calls

    def _unfinished(self, rows: list[Row]) -> CapturedCall | None:
        """Return a call that has values but no record."""
        values = list(map(_value_of, rows))
        name = parse_name(values[0].name)
        phase = GRADIENT_PHASES.get(name.phase, name.phase)
        if phase not in _CALL_PHASES:
            return None
        class_name = self.modules.get(name.module, "")
        order, end = values[0].order, values[-1].order
        call_id = rows[0][_CALL]
        return _call_of(
            (
                *(call_id, name.step, phase, name.module, name.call, class_name),
                *(order, end, None, "unfinished", "", ()),
            ),
            rows,
        )

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row[_NAME]: row for row in self.value_rows}

    # ------------------------------------------------------------------------------- checks

    def _damaged(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path}: a damaged capture: {reason}", path=self.path, record="data.pkl"
        )

    def _checked_header(self, header: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._dict_of(header, {})
        version = found.get("version")
        if type(version) is not int:
            raise self._damaged(f"its version is {type(version).__name__}, not int")
        check_header(found, self.path)
        return found

    def _dict_of(self, value: Any, default: Any = None) -> Any:
        """Return a plain copy of a dict, without methods that a file has replaced."""
        return dict(dict.items(value)) if isinstance(value, dict) else default

    def _rows(
        self, key: str, block: Any, kind: str, known: tuple[str, ...], defaults: dict[str, Any]
    ) -> Sequence[Row]:
        """Return the rows of a block with the fields that this version knows, in their order."""
        block = self._dict_of(block, {})
        names, rows = block.get(f"{kind}_fields"), block.get(f"{kind}s")
        if type(names) is not tuple or type(rows) is not list or not are_texts(names):
            raise self._damaged(f"{key!r} has no list of {kind}s with the names of their fields")
        if set(map(type, rows)) - {tuple} or set(map(len, rows)) - {len(names)}:
            raise self._damaged(f"{key!r}: its {kind}s are not tuples of {len(names)} fields")
        if names != known:
            missing = [name for name in known if name not in names and name not in defaults]
            if missing:
                raise self._damaged(f"{key!r}: its {kind}s have no {', '.join(missing)}")
            rows = [_rearranged(row, names, known, defaults) for row in rows]
        for name, column in zip(known, zip(*rows, strict=True), strict=False):
            if not is_column_right(kind, name, column):
                raise self._damaged(f"{key!r}: a {kind} has a wrong {name}")
        return rows

    def _check_ids(self) -> None:
        ids = set(map(itemgetter(0), self.call_rows))
        if len(ids) < len(self.call_rows):
            raise self._damaged("two calls have one id")
        parent = CALL_FIELDS.index("parent")
        if any(row[parent] is not None and row[parent] >= row[0] for row in self.call_rows):
            raise self._damaged("a call began before the one that it was made in")


class CapturedRecords:
    """Stands for a block of records, which may have 100,000 parts, when a file is listed."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._block = block

    def __str__(self) -> str:
        n_calls, n_values = len(self._block["calls"]), len(self._block["values"])
        return f"{count_text(n_calls, 'call')}, {count_text(n_values, 'value')}"


def with_short_records(obj: object, path: str) -> object:
    """Return a saved object; a capture has `CapturedRecords` in place of its blocks."""
    if not isinstance(obj, dict) or not is_capture(obj):
        return obj
    try:
        CapturedRun(obj, path)
    except (CorruptCheckpointError, ValueError):
        return obj  # a damaged capture is listed as it is
    return {
        key: CapturedRecords(value) if is_block_key(key) else value
        for key, value in dict.items(obj)
    }


class _Values(Mapping[str, CapturedValue]):
    """The values of a call by their paths, made when one of them is asked for."""

    __slots__ = ("_found", "_phases", "_rows")

    def __init__(self, rows: Sequence[Row], phases: Iterable[str]) -> None:
        self._rows = rows
        self._phases = phases
        self._found: dict[str, CapturedValue] | None = None

    def _made(self) -> dict[str, CapturedValue]:
        if self._found is None:
            found = {}
            for row in self._rows:
                _, phase, _, path = row[_NAME].split("/", 3)
                if phase in self._phases:
                    found[path] = _value_of(row)
            self._found = found
        return self._found

    def __getitem__(self, path: str) -> CapturedValue:
        return self._made()[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def __repr__(self) -> str:
        return repr(self._made())


def _call_of(row: Row, values: Sequence[Row]) -> CapturedCall:
    make: Any = CapturedCall  # its fields are those of a row, and the values
    return make(*row, _Values(values, _CALL_PHASES), _Values(values, GRADIENT_PHASES))  # type: ignore[no-any-return]


def _value_of(row: Row) -> CapturedValue:
    found = row[_STATISTICS]
    if found is not None:
        row = (*row[:_STATISTICS], Statistics(*found[: len(Statistics._fields)]))
    return CapturedValue(*row)


def _defaults_of(kind: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING}


_CALL_DEFAULTS = _defaults_of(CapturedCall)
_VALUE_DEFAULTS = _defaults_of(CapturedValue)


def _rearranged(
    row: Row, names: tuple[str, ...], known: tuple[str, ...], defaults: dict[str, Any]
) -> Row:
    found = {**defaults, **dict(zip(names, row, strict=True))}
    return tuple(found[name] for name in known)
