"""Captures as objects: records survive their way through a file, and wrong ones are refused."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from captured_runs import block_of, name_of
from hypothesis import given
from hypothesis import strategies as st

from ptsave.capturing.run import CapturedRun, steps_text
from ptsave.capturing.schema import (
    CALL_FIELDS,
    PHASES,
    SUMMARY,
    VALUE_FIELDS,
    VERSION,
    CapturedCall,
    CapturedValue,
    Statistics,
    block_key,
    is_block_key,
    parse_name,
)
from ptsave.contents.captures import FORMAT, HEADER, captured_run
from ptsave.errors import CorruptCheckpointError, EntryNotFoundError
from ptsave.support.text import n_columns

STATISTICS = Statistics(4, 0, 0, 1, 0.5, 0.1, 0.0, 1.0, 2.0, 0xDEADBEEF)
CALL = CapturedCall(0, 3, "forward", "layers.0", 1, "torch.nn.Linear", 0, 4, None)
VALUE = CapturedValue(
    name_of(3, "forward", "layers.0", 1, ("outputs",)),
    *(2, 0, "tensor", "Tensor", "torch.float32", "cpu", "torch.strided", (2, 2), 16, True),
    stored=name_of(3, "forward", "layers.0", 1, ("outputs",)),
    statistics=STATISTICS,
)
OUTER = replace(CALL, module="", class_name="Outer")
INNER = replace(CALL, id=1, order=1, end=3, parent=0)


parts = st.text(max_size=6)


@given(st.integers(0, 9), st.sampled_from(PHASES), parts, st.integers(0, 9), st.lists(parts))
def test_names(step: int, phase: str, module: str, call: int, path: list[str]) -> None:
    name = name_of(step, phase, module, call, path)
    assert parse_name(name) == (step, phase, module, call, tuple(path))
    assert not is_block_key(name)


@pytest.mark.parametrize(
    "name", ["", "weight", "0/forward", "0/other/a#0/x", "0/forward/a/x", "a/b/c#d"]
)
def test_other_names(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a captured value"):
        parse_name(name)


def capture_of(*blocks: Any, **header: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {
        HEADER: {"format": FORMAT, "version": VERSION, "modules": {"": "Outer"}, **header},
        VALUE.name: torch.ones(2, 2),
    }
    entries.update({block_key(3, i): block for i, block in enumerate(blocks)})
    return entries


def read(*blocks: Any, **header: Any) -> CapturedRun:
    return CapturedRun(capture_of(*blocks, **header), "run.pt")


def test_records_through_a_file() -> None:
    values = [VALUE, replace(VALUE, name=f"{VALUE.name}/0", order=5, statistics=None)]
    file = io.BytesIO()
    torch.save(capture_of(block_of([OUTER, INNER], values)), file)
    file.seek(0)
    run = CapturedRun(torch.load(file, weights_only=True), "run.pt")
    assert run.calls() == [OUTER, INNER]
    assert list(run.values()) == values
    assert run.calls()[0].values == {"outputs": values[0], "outputs/0": values[1]}
    assert run.calls()[0].grads == {}
    assert run.tensor(values[1].name) is run.tensor(VALUE.name)


def test_fields_of_a_later_version_are_left_out() -> None:
    block = block_of([CALL], [VALUE])
    block["value_fields"] = ("colour", *block["value_fields"])
    block["values"] = [("red", *row) for row in block["values"]]
    assert list(read(block).values()) == [VALUE]


def test_fields_that_an_earlier_version_had_not() -> None:
    block = block_of([CALL], [replace(VALUE, statistics=None)])
    block["value_fields"] = block["value_fields"][:-1]
    block["values"] = [row[:-1] for row in block["values"]]
    assert list(read(block).values()) == [replace(VALUE, statistics=None)]


def test_a_call_of_which_only_values_were_written() -> None:
    """A killed process leaves the call that it was in, and no record of it."""
    grad = replace(VALUE, name=VALUE.name.replace("forward", "backward"), order=9)
    ((call, inner),) = [read(block_of([INNER], [VALUE, grad])).calls()]
    assert (inner.parent, call.order) == (0, 2) or (call.parent, inner.order) == (0, 2)
    unfinished = next(each for each in (call, inner) if each.status == "unfinished")
    assert unfinished.id == 0
    assert (unfinished.phase, unfinished.module, unfinished.call) == ("forward", "layers.0", 1)
    assert unfinished.values == {"outputs": VALUE}
    assert unfinished.grads == {"outputs": grad}


def test_values_by_phase_and_step() -> None:
    weight = replace(VALUE, name="4/params/layers.0#0/weight", call=None)
    run = read(block_of([CALL], [VALUE, weight]))
    assert list(run.values("params")) == [weight]
    assert list(run.values(step=3)) == [VALUE]
    assert list(run.values("params", 3)) == []


def test_what_is_no_capture() -> None:
    for obj in ({"weight": torch.ones(2)}, {HEADER: {"format": "other"}}, [1], {HEADER: 3}):
        with pytest.raises(ValueError, match=r"run\.pt is not a capture.*get_tensor"):
            captured_run(obj, "run.pt")
    with pytest.raises(ValueError, match="has version 2"):
        read(version=VERSION + 1)


def test_steps_as_text() -> None:
    assert steps_text([]) == "none"
    assert steps_text({2, 0}) == "0, 2"
    assert steps_text(range(100)) == "0, 1, 2, 3, 4, 5, 6, ..., 99"


def with_field(kind: str, name: str, value: Any) -> dict[str, Any]:
    block = block_of([CALL], [VALUE])
    names = CALL_FIELDS if kind == "call" else VALUE_FIELDS
    row = list(block[f"{kind}s"][0])
    row[names.index(name)] = value
    block[f"{kind}s"] = [tuple(row)]
    return block


WRONG: list[tuple[str, str, Any]] = [
    *(("call", name, None) for name in CALL_FIELDS if name != "parent"),
    *(("value", name, b"") for name in VALUE_FIELDS),
    *(("call", name, -1) for name in ("id", "step", "order", "parent")),
    *(("value", name, 1 << 80) for name in ("order", "nbytes", "call")),
    ("call", "phase", "params"),
    ("call", "status", "vanished"),
    ("call", "parent", 0),
    ("call", "stack", ([],)),
    ("value", "kind", "other"),
    ("value", "shape", ([], 2)),
    ("value", "shape", (2, None)),
    ("value", "shape", (-2,)),
    ("value", "statistics", (1, 2)),
    ("value", "statistics", ("1",) * 10),
    ("value", "statistics", (1, 0, 0, 0, 1j, 1j, 0, 0, 0, 0)),
    ("value", "statistics", (1, 0, 0, 0, 0, 0, 1 << 80, 0, 0, 0)),
    *(
        ("value", "name", name)
        for name in (
            "",
            "weight",
            "3/forward/a#0",
            "x/forward/a#0/b",
            "1/other/a#0/b",
            "1/grads/a/b",
        )
    ),
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_fields_of_wrong_types(kind: str, name: str, value: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"run\.pt: the capture is damaged") as caught:
        read(with_field(kind, name, value))
    assert caught.value.path == "run.pt"


def test_numbers_that_cannot_be_written() -> None:
    with pytest.raises(CorruptCheckpointError, match="a value has a wrong nbytes"):
        read(with_field("value", "nbytes", 10**5000))


@pytest.mark.parametrize(
    "block",
    [
        None,
        {},
        torch.ones(2),
        {**block_of([CALL], []), "calls": None},
        {**block_of([CALL], []), "calls": [()]},
        {**block_of([CALL], []), "calls": [list(range(12))]},
        {**block_of([CALL], []), "call_fields": ("id",), "calls": [(1,)]},
        {**block_of([CALL], []), "call_fields": (1, 2)},
        block_of([CALL, CALL], []),
        block_of([replace(CALL, parent=1), replace(CALL, id=1, parent=0)], []),
    ],
)
def test_blocks_that_are_none(block: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the capture is damaged"):
        read(block)


def test_headers_that_are_none() -> None:
    for version in (None, "1", 1.0):
        with pytest.raises(CorruptCheckpointError, match="the version is"):
            read(version=version)
    run = read(block_of([], [VALUE]), modules=3, model=None)
    assert run.calls()[0].class_name == ""
    assert str(run.summary())


def test_attributes_in_place_of_methods() -> None:
    """Pickles set attributes of an OrderedDict, which would hide its methods."""
    header = OrderedDict(capture_of()[HEADER])
    header.__dict__.update(dict.fromkeys(("get", "items", "keys"), 3))
    block = OrderedDict(block_of([CALL], [VALUE]))
    block.__dict__.update(header.__dict__)
    entries = OrderedDict(capture_of(block), **{HEADER: header})
    entries.__dict__.update(header.__dict__)
    run = CapturedRun(entries, "run.pt")
    assert run.calls() == [CALL]
    assert run.tensor(VALUE.name).shape == (2, 2)


def test_tensors_that_are_not_there() -> None:
    dropped = replace(VALUE, name=f"{VALUE.name}/0", stored="", note="dropped: max_bytes")
    plain = replace(VALUE, name=f"{VALUE.name}/1", kind="plain", type="int", stored="")
    unkept = replace(VALUE, name=f"{VALUE.name}/2", stored="")
    lost = replace(VALUE, name=f"{VALUE.name}/3", stored="elsewhere")
    run = read(block_of([CALL], [VALUE, dropped, plain, unkept, lost]))
    with pytest.raises(EntryNotFoundError, match=r"is not in the file \(dropped: max_bytes\)"):
        run.tensor(dropped.name)
    with pytest.raises(EntryNotFoundError, match="tensors=False"):
        run.tensor(unkept.name)
    with pytest.raises(TypeError, match="is not a tensor, but a int"):
        run.tensor(plain.name)
    with pytest.raises(CorruptCheckpointError, match=r"'elsewhere' .* is missing"):
        run.tensor(lost.name)
    with pytest.raises(EntryNotFoundError, match="did you mean"):
        run.tensor(VALUE.name[:-1])


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.just(torch.ones(1)),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from(["calls", "values", "call_fields", "x"]), inner)
        ),
        max_leaves=12,
    ),
    st.sampled_from([*CALL_FIELDS, *VALUE_FIELDS, HEADER, SUMMARY, "3/records/0"]),
)
def test_anything_anywhere(value: Any, place: str) -> None:
    """Records are right, or the error is the documented one."""
    entries = capture_of(block_of([CALL], [VALUE]))
    if place in entries or place == SUMMARY:
        entries[place] = value
    else:
        entries[block_key(3, 0)] = with_field(
            "call" if place in CALL_FIELDS else "value", place, value
        )
    try:
        run = CapturedRun(entries, "run.pt")
    except (CorruptCheckpointError, ValueError):
        return
    assert [dict(call.values) for call in run.calls()]
    assert str(run.summary())


@given(st.lists(st.integers(0, 10**12), min_size=1), st.text(min_size=1), st.text())
def test_summaries_fit_a_terminal(counts: list[int], class_name: str, model: str) -> None:
    numbers = iter(counts)
    statistics = STATISTICS._replace(n_nan=counts[0], n_inf=counts[-1])
    values = [
        replace(
            VALUE,
            name=f"{VALUE.name}/{i}",
            shape=tuple(counts[:i]),
            nbytes=next(numbers),
            statistics=statistics,
        )
        for i in range(len(counts))
    ]
    block = block_of([replace(CALL, class_name=class_name)], values)
    summary = read(block, model=model).summary()
    lines = str(summary).split("\n")
    assert max(map(n_columns, lines)) <= 80  # some characters take no column, or two
    assert all(line.isprintable() for line in lines)
    assert summary.classes[0].nbytes == sum(counts)
