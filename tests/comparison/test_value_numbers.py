"""Values that are compared by number: sets, keys and objects that are not built."""

from __future__ import annotations

import enum
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from ptsave.comparison.compare import Comparison, compare
from ptsave.comparison.value_numbers import ValueNumbers
from ptsave.tree.tree import Opaque


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def storage(*values: float) -> torch.UntypedStorage:
    return torch.tensor(values).untyped_storage()


Diff = Callable[[Any, Any], Comparison]


@pytest.fixture
def diff(tmp_path: Path) -> Diff:
    def save_and_compare(a: Any, b: Any) -> Comparison:
        torch.save(a, tmp_path / "a.pt")
        torch.save(b, tmp_path / "b.pt")
        return compare(tmp_path / "a.pt", tmp_path / "b.pt")

    return save_and_compare


MAKERS: dict[str, Callable[[Any], Any]] = {
    "key": lambda color: {color: 1},
    "key in a tuple": lambda color: {("a", color): torch.ones(2)},
    "set": lambda color: {"s": {color, "other"}},
    "frozen set": lambda color: {"s": frozenset([color, Color])},
    "deque": lambda color: {"s": deque([color])},
    "twice": lambda color: {"x": color, "y": color},
    "in a namespace": lambda color: Namespace(a=color, b={color, 1}),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_enums(diff: Diff, make: Callable[[Any], Any]) -> None:
    assert diff(make(Color.RED), make(Color.RED)).equal
    assert not diff(make(Color.RED), make(Color.BLUE)).equal


def test_every_use_of_an_enum_is_compared(diff: Diff) -> None:
    found = diff({"x": Color.RED, "y": Color.RED}, {"x": Color.BLUE, "y": Color.BLUE})
    assert [each.name for each in found.differences] == ["x", "y"]


def test_storages_in_a_namespace(diff: Diff) -> None:
    assert diff(Namespace(s=storage(1, 2)), Namespace(s=storage(1, 2))).equal
    found = diff({"n": Namespace(s=storage(1, 2))}, {"n": Namespace(s=storage(1, 3))})
    assert [(each.kind, each.name) for each in found.differences] == [("numbers", "n.<tensor 0>")]
    # A storage and a tensor over it are two things.
    assert not diff(Namespace(s=storage(1)), Namespace(s=torch.ones(1))).equal


def test_nan(diff: Diff) -> None:
    for value in (Decimal("NaN"), float("nan"), complex("nan+1j")):
        for a in ({"n": Namespace(a=value)}, {"n": value}, {value: 1}):
            assert diff(a, a).equal, a
    assert not diff(Namespace(a=Decimal("NaN")), Namespace(a=Decimal(1))).equal
    assert diff(Namespace(a=Decimal("1.0")), Namespace(a=Decimal("1.00"))).equal


def test_parts_that_one_file_shares(diff: Diff) -> None:
    for make in (lambda: (1, [2]), lambda: [1, 2], lambda: {"t": torch.ones(2)}):
        shared = make()
        twice = Namespace(a=shared, b=shared)
        assert diff(twice, Namespace(a=make(), b=make())).equal
        assert not diff(twice, Namespace(a=make(), b=0)).equal


def test_the_order_of_keys_does_not_count(diff: Diff) -> None:
    a, b = {1: "a", "b": 2, None: 3}, {None: 3, "b": 2, 1: "a"}
    assert diff(Namespace(a=a), Namespace(a=b)).equal


def test_circles() -> None:
    """Containers that hold themselves have equal numbers only if they do so in one way."""

    def numbers(make: Callable[[], Any]) -> list[int]:
        found = ValueNumbers()
        return [found.of(make()), found.of(make())]

    def circle(n: int, *, at: int = 0, label: Any = 0) -> list[Any]:
        nodes = [Opaque("Node", [i]) for i in range(n)]
        for i, node in enumerate(nodes):
            node["next"] = nodes[(i + 1) % n]
        nodes[at].parts.append(label)
        return nodes[0].parts

    for n in (1, 2, 3, 3000):
        first, second = numbers(lambda n=n: circle(n))  # type: ignore[misc]
        assert first == second
    found = ValueNumbers()
    assert len({found.of(circle(3, at=at, label=label)) for at in range(3) for label in "ab"}) == 6


def test_a_part_of_a_circle_is_another_one_elsewhere() -> None:
    found = ValueNumbers()
    p: list[Any] = ["p"]
    x = ["x", p]
    p.append(x)
    q = ["q", x]  # the x of q leads to p
    other_q: list[Any] = ["q"]
    other_q.append(["x", other_q])  # and here to q
    found.of(p)
    assert found.of(q) != found.of(other_q)


def test_nodes_and_their_neighbours(diff: Diff) -> None:
    node = Namespace(name="a")
    node.neighbours = {Color.RED: node, "set": {1, 2}}
    assert diff({"n": node}, {"n": node}).equal


@pytest.mark.parametrize("last", [0, 1])
def test_time_of_objects_that_share_a_list(diff: Diff, last: int) -> None:
    """Each looks at the list: also if they differ behind it."""
    shared = list(range(2000))

    def objects(last: int) -> list[Namespace]:
        return [Namespace(i=i, list=shared, z=last) for i in range(1000)]

    begin = time.process_time()
    assert len(diff(objects(0), objects(last)).differences) == 1000 * last
    assert time.process_time() - begin < 3  # 7 s when each looked into the list
