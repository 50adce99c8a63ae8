"""ptsave.comparison: structure and values of two checkpoints, against stock torch's results."""

from __future__ import annotations

import copy
import enum
import gc
import math
import random
import time
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_comparison import stock_save
from torch import Tensor, nn

import ptsave
from ptsave.comparison import tensors as tensor_comparison
from ptsave.comparison.compare import Comparison, compare
from ptsave.comparison.entries import ValueNumbers, moved_names
from ptsave.errors import EntryNotFoundError
from ptsave.tree.tree import Opaque


@pytest.fixture
def diff(tmp_path: Path) -> Callable[..., Comparison]:
    def save_and_compare(a: Any, b: Any, **options: Any) -> Comparison:
        paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
        for obj, path in zip((a, b), paths, strict=True):
            stock_save(obj, path)
        return compare(*map(str, paths), **options)

    return save_and_compare


def kinds(found: Comparison) -> list[tuple[str, str]]:
    return [(each.kind, each.name) for each in found.differences]


Diff = Callable[..., Comparison]


# --------------------------------------------------------------------------------------- structure


def test_a_training_checkpoint_and_itself(diff: Diff) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    checkpoint: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }
    later = copy.deepcopy(checkpoint)
    found = diff(checkpoint, later)
    assert found.equal
    assert found.n_tensors == len(model.state_dict()) + 3 * len(list(model.parameters()))
    later["optimizer"]["param_groups"][0]["lr"] = 1.0
    later["model"]["0.weight"][3, 4] += 1
    later["optimizer"]["state"][0]["step"] += 1
    later["epoch"] = 4
    later["model"]._metadata["0"]["version"] = 2
    assert kinds(diff(checkpoint, later)) == [
        ("value", "model._metadata.0.version"),
        ("value", "optimizer.param_groups.0.lr"),
        ("value", "epoch"),
        ("numbers", "model.0.weight"),
        ("numbers", "optimizer.state.0.step"),
    ]


def test_structure(diff: Diff) -> None:
    a = {"x": 1, "list": [1, 2, 3], "d": {"y": torch.ones(2), "z": "text"}, "t": (1,), "n": None}
    b = {"list": [1, 2], "d": OrderedDict(y=torch.ones(3), z="text"), "t": [1], "new": {}, "n": 0}
    found = diff(a, b)
    assert kinds(found) == [
        ("only in a", "x"),
        ("only in a", "list.2"),
        ("type", "d"),
        ("shape", "d.y"),
        ("type", "t"),
        ("type", "n"),
        ("only in b", "new"),
    ]


def test_what_is_missing_as_a_whole(diff: Diff) -> None:
    state = {"optimizer": {"state": {0: torch.ones(2), 1: torch.ones(2)}, "lr": 0.1}}
    found = diff({"step": 1, **state}, {"step": 1})
    assert {each.top for each in found.differences} == {"optimizer"}
    assert len(found.differences) == 3


def test_values_that_are_no_tensors(diff: Diff) -> None:
    values = {
        "nan": math.nan,
        "zero": -0.0,
        "bytes": b"x",
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "huge": 10**400,
        "complex": 1 + 2j,
        "set": {1, 2},
    }
    assert diff(values, {**values, "zero": 0.0}).equal
    for name, other in [("nan", 1.0), ("bytes", b"y"), ("size", torch.Size([2])), ("huge", 1)]:
        assert kinds(diff(values, {**values, name: other})) == [("value", name)]
    assert kinds(diff({"x": 1}, {"x": True})) == [("type", "x")]
    assert diff({"lr": 1e-3}, {"lr": 1.0001e-3}, rtol=1e-3).equal
    assert diff({"lr": 1.0}, {"lr": 1.1}, rtol=0.095).equal  # relative to the second, as in torch
    assert not diff({"lr": 1.1}, {"lr": 1.0}, rtol=0.095).equal
    assert not diff({"n": 10**400}, {"n": 10**400 + 1}, rtol=1e-3).equal
    assert kinds(diff({"n": 1}, {"n": 1.0})) == [("type", "n")]
    assert diff({"n": 1}, {"n": 1.0}, ignore_dtype=True).equal


def test_parameters_storages_and_containers_in_themselves(diff: Diff) -> None:
    assert kinds(diff({"w": nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)})) == [("type", "w")]
    storages = {"s": torch.arange(3.0).untyped_storage()}
    assert diff(storages, copy.deepcopy(storages)).equal
    assert kinds(diff(storages, {"s": torch.ones(3).untyped_storage()})) == [("numbers", "s")]
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    assert diff(loop, copy.deepcopy(loop)).equal
    assert kinds(diff(torch.ones(2), torch.zeros(2))) == [("numbers", "")]


def test_moved_prefixes(diff: Diff) -> None:
    state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3)).state_dict()
    wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
    found = diff(dict(state), wrapped)
    assert {e.name: e.moved for e in found.differences if e.kind == "only in a"} == {
        name: f"module._orig_mod.{name}" for name in state
    }
    nested = diff({"model": dict(state)}, {"net": {"model": dict(state)}})
    assert all(each.moved is not None for each in nested.differences)


def test_what_has_not_moved() -> None:
    assert moved_names({"a.weight": 1}, {"b.weight": 1}) == {}
    assert moved_names({"a.weight": 1}, {"module.a.weight": 2}) == {}
    assert moved_names({"w": 1}, {"x.w": 1, "y.w": 1}) == {}
    assert moved_names({"x.w": 1, "y.w": 1}, {"w": 1}) == {}
    assert moved_names({"a.b.w": 1}, {"c.b.w": 1, "d.e.w": 1}) == {"a.b.w": "c.b.w"}


def test_details_and_patterns(diff: Diff) -> None:
    a = {"m": {"w": torch.ones(2), "x": torch.ones(2)}, "step": 1}
    b = {"m": {"w": torch.zeros(2), "x": torch.ones(3).half()}, "step": 2}
    assert diff(a, b, detail="names").equal
    assert kinds(diff(a, b, detail="shapes")) == [("dtype", "m.x"), ("shape", "m.x")]
    assert kinds(diff(a, b, patterns=["m.w", "other"])) == [("numbers", "m.w")]
    with pytest.raises(EntryNotFoundError, match=r"no entry 'm.v'; did you mean 'm\.[wx]'"):
        diff(a, b, patterns=["m.v"])
    with pytest.raises(ValueError, match="rtol must be 0 or more, not -1"):
        diff(a, b, rtol=-1)


def test_shapes_read_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    monkeypatch.setattr(tensor_comparison, "_read", None)
    path = str(tmp_path / "a.pt")
    assert compare(path, path, detail="shapes").equal


# ------------------------------------------------------------------------------------------ values


def tensors() -> dict[str, Tensor]:
    big = torch.arange(300 * 700, dtype=torch.float32).reshape(300, 700)
    return {
        "big": big.clone(),
        "transposed": big.clone().t(),
        "permuted": torch.randn(20, 30, 40).permute(2, 0, 1),
        "steps": big[::7, ::11],
        "expanded": torch.randn(1, 700).expand(400, 700),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "view of nothing": big[0:0],
        "conjugate": torch.randn(4, 5, dtype=torch.complex64).conj(),
        "imaginary": torch.randn(4, dtype=torch.complex64).conj().imag,
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(9000).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "uint64": torch.tensor([1, 2**64 - 1], dtype=torch.uint64),
        "complex128": torch.randn(3, dtype=torch.complex128),
        "float4": torch.arange(9, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }


@pytest.mark.parametrize("piece_nbytes", [64, 5000, 32 << 20])
def test_all_kinds_of_tensors(
    diff: Diff, monkeypatch: pytest.MonkeyPatch, piece_nbytes: int
) -> None:
    monkeypatch.setattr(tensor_comparison, "_PIECE_NBYTES", piece_nbytes)
    a = tensors()
    if piece_nbytes == 64:  # many pieces
        a = {name: value for name, value in a.items() if value.numel() < 9000}
    assert diff(a, copy.deepcopy(a)).equal
    for name, value in a.items():
        if value.numel() == 0:
            continue
        changed = copy.deepcopy(value.contiguous())  # torch 2.9 cannot clone float4
        last = changed.view(torch.uint8) if changed.dim() else changed.reshape(1).view(torch.uint8)
        last.view(-1)[-1] ^= 1
        (found,) = diff({name: value}, {name: changed}).differences
        assert (found.kind, found.name) == ("numbers", name)
        assert found.numbers is not None
        assert (found.numbers.numel, found.numbers.n_different) == (value.numel(), 1)
        if name != "float4":
            wide = torch.complex128 if value.is_complex() else torch.float64
            distance = (value.to(wide) - changed.to(wide)).abs().max()
            if name != "uint64":
                assert found.numbers.max_abs == pytest.approx(float(distance), rel=1e-12)


def test_expanded_tensors_are_read_once(diff: Diff) -> None:
    a = torch.zeros(1, 1).expand(10**6, 10**6)
    (found,) = diff({"x": a}, {"x": torch.ones(1, 1).expand(a.shape)}).differences
    assert found.numbers is not None
    assert found.numbers.n_different == found.numbers.numel == 10**12


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
def test_sparse_and_quantized(diff: Diff) -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    other = torch.tensor([[0.0, 1.0, 4.0], [2.0, 0.0, 3.5]])
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        a, b = (x.to_sparse(layout=layout) for x in (dense, other))
        assert diff({"x": a}, {"x": a.clone()}).equal
        (found,) = diff({"x": a}, {"x": b}).differences
        assert found.numbers is not None
        assert (found.numbers.n_different, found.numbers.max_abs) == (2, 4.0)
    assert kinds(diff({"x": dense}, {"x": dense.to_sparse()})) == [("type", "x")]
    a, b = (torch.quantize_per_tensor(x, 0.5, 1, torch.qint8) for x in (dense, other))
    assert diff({"x": a}, {"x": a.clone()}).equal
    (found,) = diff({"x": a}, {"x": b}).differences
    assert found.numbers is not None
    assert found.numbers.max_abs == 4.0
    rescaled = torch.quantize_per_tensor(dense, 0.25, 1, torch.qint8)
    assert kinds(diff({"x": a}, {"x": rescaled})) == [("type", "x")]


def test_meta_tensors_have_no_values(diff: Diff) -> None:
    meta = {"x": torch.empty(3, device="meta")}
    assert diff(meta, meta).equal
    assert kinds(diff(meta, {"x": torch.empty(3)})) == [("type", "x")]


def test_tolerance(diff: Diff) -> None:
    a = {"w": torch.randn(1000), "v": torch.ones(3)}
    b = {"w": a["w"] * (1 + 1e-4), "v": torch.tensor([1.0, 1.0, math.nan])}
    found = diff(a, b, rtol=1e-3)
    assert kinds(found) == [("numbers", "v")]
    assert [each.name for each in found.within_tolerance] == ["w"]
    torch.testing.assert_close(a["w"], b["w"], rtol=1e-3, atol=0)
    assert kinds(diff(a, b, rtol=1e-5)) == [("numbers", "w"), ("numbers", "v")]


def test_across_dtypes(diff: Diff) -> None:
    a = {"w": torch.randn(1000), "n": torch.arange(5)}
    b = {"w": a["w"].bfloat16(), "n": torch.arange(5).float()}
    assert kinds(diff(a, b)) == [("dtype", "w"), ("dtype", "n")]
    (found,) = diff(a, b, ignore_dtype=True).differences
    assert found.numbers is not None
    assert found.numbers.max_abs == float((a["w"].double() - b["w"].double()).abs().max())
    assert diff(a, b, ignore_dtype=True, rtol=1e-2).equal


def test_sharing_is_a_remark(diff: Diff) -> None:
    w = torch.ones(3)
    found = diff({"a": w, "b": w}, {"a": w, "b": w.clone()})
    assert found.equal
    assert "a.pt, these tensors share memory: a, b" in found.remarks[0]


# ------------------------------------------------------------------------------------------- kinds


def test_tensors_by_dotted_names(tmp_path: Path) -> None:
    """tests/test_front_door.py compares all other kinds of files."""
    state = {f"layer.{i}.weight": torch.randn(50, 60) for i in range(6)}
    stock_save(
        {"layer": {str(i): {"weight": t} for i, t in enumerate(state.values())}}, tmp_path / "a.pt"
    )
    ptsave.save_model(state, tmp_path / "shards", max_shard_size=40_000)
    found = compare(str(tmp_path / "a.pt"), str(tmp_path / "shards"))
    assert found.equal
    assert (found.n_tensors, found.remarks) == (6, [])
    state["layer.3.weight"][2, 3] += 1
    stock_save({**state, "step": 1}, tmp_path / "b.pt")
    found = compare(str(tmp_path / "shards"), str(tmp_path / "b.pt"))
    assert kinds(found) == [("numbers", "layer.3.weight")]
    assert "b.pt holds more than tensors" in found.remarks[0]


def test_memory_is_bounded(diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = tensor_comparison._read

    def spy(*arguments: Any) -> Any:
        result = read(*arguments)
        tensors = [*result.others, *([] if result.row is None else [result.row])]
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        return result

    monkeypatch.setattr(tensor_comparison, "_PIECE_NBYTES", 100_000)
    monkeypatch.setattr(tensor_comparison, "_read", spy)
    whole = torch.randn(500, 1000)
    a = {"whole": whole, "t": whole.t(), "row": whole[7], "small": torch.ones(3), "last": whole[-1]}
    assert diff(a, copy.deepcopy(a)).equal
    assert max(sizes) <= 100_000


DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bfloat16),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def test_empty_tensors_of_every_dtype_and_stride(diff: Diff) -> None:
    tensors: list[Tensor] = []
    for dtype in DTYPES:
        base, row = torch.empty(0, 4, dtype=dtype), torch.empty(0, dtype=dtype)
        tensors += [base, base[:, ::2], base[::3], base.t(), base[:, 1:], row, row[::2]]
    found = diff(tensors, tensors)
    assert found.equal
    assert found.n_tensors == len(tensors)


def test_deep_containers_come_in_order(diff: Diff) -> None:
    def nested(*leaves: Any) -> Any:
        obj: Any = {"first": leaves[0], "last": leaves[1]}
        for _ in range(300):
            obj = [obj, leaves[0]]
        return {"deep": obj, "after": leaves[1]}

    found = diff(nested(1, 2), nested(1, 3))
    assert kinds(found) == [("value", f"deep{'.0' * 300}.last"), ("value", "after")]
    alone = diff({"a": 1}, {"a": 1, **nested(1, 2)})
    assert kinds(alone)[:2] == [
        ("only in b", f"deep{'.0' * 300}.first"),
        ("only in b", f"deep{'.0' * 300}.last"),
    ]


# ----------------------------------------------------------------------------- many small tensors


def _small_pairs(source: random.Random) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of all kinds that are read in a row, or are not, and others that differ a little."""
    numbers = [0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 2.5]
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    base = torch.arange(12.0)
    for i in range(60):
        dtype = source.choice(
            [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
        )
        shape = source.choice([(), (0,), (1,), (3,), (2, 3), (5, 0, 2)])
        numel = math.prod(shape)
        values = [source.choice(numbers) for _ in range(numel)]
        tensor = torch.tensor(values).nan_to_num() if not dtype.is_floating_point else values
        x = torch.as_tensor(tensor, dtype=torch.float64).to(dtype).reshape(shape)
        y = x.clone()
        if numel and source.random() < 0.5:
            y.view(-1)[source.randrange(numel)] = source.choice([0.0, -0.0, 1.0, 4.0])
        kind = source.randrange(8)
        if kind == 0:
            x = torch.nn.Parameter(x, requires_grad=False)
            y = torch.nn.Parameter(y, requires_grad=False)
        elif kind == 1:
            x, y = base[i % 6 :], base[i % 6 :].clone()
        elif kind == 2 and len(shape) == 2:
            x, y = x.T, y.T
        elif kind == 3:
            y = y.to(torch.float64)
        elif kind == 4 and numel:
            y.view(-1).view(torch.uint8)[-1] ^= 1 if dtype != torch.bool else 0
        a[f"t{i}"], b[f"t{i}"] = x, y
    return a, b


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"atol": 1.0}, {"ignore_dtype": True}])
@pytest.mark.parametrize("shares", [False, True])
def test_many_small_tensors_as_one_by_one(
    diff: Diff,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    options: dict[str, Any],
    shares: bool,
) -> None:
    a, b = _small_pairs(random.Random(seed))
    if shares:
        a["first"] = a["second"] = torch.ones(3)
        b["first"], b["second"] = torch.ones(3), torch.zeros(3)
    found = diff(a, b, **options)
    monkeypatch.setattr(tensor_comparison, "_SMALL_NUMEL", -1)  # none is small: none is packed
    expected = diff(a, b, **options)

    def facts(result: Comparison) -> Any:
        listed = [
            [(each.kind, each.name, each.numbers) for each in some]
            for some in (result.differences, result.within_tolerance)
        ]
        return listed, result.remarks, result.n_tensors, result.nbytes

    assert facts(found) == facts(expected)
    assert any(each.numbers for each in found.differences)


def test_small_tensors_are_read_in_a_row(diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that differ are looked at one by one."""
    looked_at: list[str] = []
    difference = tensor_comparison.NumberMeasure.difference

    def note(self: Any, pair: Any, *args: Any) -> Any:
        looked_at.append(pair.name)
        return difference(self, pair, *args)

    monkeypatch.setattr(tensor_comparison.NumberMeasure, "difference", note)
    a = {f"t{i}": torch.full((1 + i % 5,), float(i)) for i in range(300)}
    b = {**a, "t7": a["t7"] + 1, "t299": -a["t299"]}
    assert kinds(diff(a, b)) == [("numbers", "t7"), ("numbers", "t299")]
    assert looked_at == ["t7", "t299"]


@pytest.mark.parametrize("numel", [0, 3])
def test_time_grows_with_the_number_of_tensors(tmp_path: Path, numel: int) -> None:
    def seconds(n: int) -> float:
        path = str(tmp_path / f"{n}.pt")
        ptsave.save({f"t{i}": torch.zeros(numel) for i in range(n)}, path)
        times = []
        for _ in range(3):
            gc.collect()
            begin = time.process_time()
            assert compare(path, path).n_tensors == n
            times.append(time.process_time() - begin)
        return min(times)

    seconds(10)
    assert seconds(16_000) < 6 * seconds(4_000)


# ------------------------------------------ sets, keys and objects that are not built: by number


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def storage(*values: float) -> torch.UntypedStorage:
    return torch.tensor(values).untyped_storage()


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


def test_nan_in_objects(diff: Diff) -> None:
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
