"""Routing of a checkpoint's names to packed parameters."""

from __future__ import annotations

from typing import Any

import pytest

from ptsave.models.packed_modules import PackedModules, Route

QKV = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
LISTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
LONGER, SHORTER = {"attn.q_proj": ("attn.packed", 7)}, {"q_proj": ("qkv_proj", "q")}
TWO = {"gate": ("gates", 0), "weight": ("weights", 1)}
DOTS = {".q_proj": (".qkv_proj", "q")}
EXPERTS = {"experts.3.w1.": ("experts.w13_", ("w1", 3))}
TUPLES = [("experts.w13_", "experts.0.w3.", 0, "w3"), ("experts.w13_", "experts.1.w3.", 1, "w3")]


def best_routes(packed: PackedModules, name: str) -> list[Route]:
    return next(packed.candidates(name), [])


@pytest.mark.parametrize(
    ("mapping", "name", "expected"),
    [
        (QKV, "0.attn.k_proj.weight", ("0.attn.qkv_proj.weight", "k")),
        # Lists number their shards; both forms may be mixed.
        (LISTS, "q_proj.bias", ("qkv_proj.bias", 0)),
        ({**QKV, "gate_up": ["gate", "up"]}, "mlp.up.weight", ("mlp.gate_up.weight", 1)),
        ({**QKV, "gate_up": ["gate", "up"]}, "a.v_proj.weight", ("a.qkv_proj.weight", "v")),
        # Only whole components match.
        *((QKV, name, None) for name in ("0.xq_proj.weight", "0.q_proj_norm.weight")),
        *((QKV, name, None) for name in ("0.qkv_proj.weight", "q_projweight", "", "weight")),
        # The longest match wins in any order of the mapping, also in front of a shorter one.
        *(
            (mapping, name, expected)
            for mapping in ({**LONGER, **SHORTER}, {**SHORTER, **LONGER})
            for name, expected in (
                ("0.attn.q_proj.weight", ("0.attn.packed.weight", 7)),
                ("0.cross.q_proj.weight", ("0.cross.qkv_proj.weight", "q")),
            )
        ),
        (
            {"experts.gate": ("experts.gates", 0), "weight": ("weights", 1)},
            "experts.gate.x.weight",
            ("experts.gates.x.weight", 0),
        ),
        # Of equally long ones it is that nearest to the end.
        (TWO, "gate.x.weight", ("gate.x.weights", 1)),
        ({"a": ("b", 0)}, "a.a.w", ("a.b.w", 0)),
        # A module that is packed into itself is not packed.
        ({"qkv_proj": ["qkv_proj"], "o_proj": ["o_proj"]}, "attn.qkv_proj.weight", None),
        # Dots at an end, tuples as shard ids, and lists of tuples.
        (DOTS, "attn.q_proj.weight", ("attn.qkv_proj.weight", "q")),
        (DOTS, "q_proj.weight", ("qkv_proj.weight", "q")),
        (DOTS, "attn.xq_proj.weight", None),
        ({"mlp.gate.": ("mlp.both.", 0)}, "1.mlp.gate.weight", ("1.mlp.both.weight", 0)),
        (EXPERTS, "moe.experts.3.w1.weight", ("moe.experts.w13_weight", ("w1", 3))),
        (EXPERTS, "moe.experts.3.w1", None),
        ([("qkv_proj", "q_proj", "q")], "attn.q_proj.bias", ("attn.qkv_proj.bias", "q")),
        ([(".qkv_proj", ".q_proj", "q")], "attn.q_proj.bias", ("attn.qkv_proj.bias", "q")),
        (TUPLES, "experts.1.w3.weight", ("experts.w13_weight", ("w3", 1))),
    ],
)
def test_one_place_or_none(mapping: Any, name: str, expected: Any) -> None:
    found = [(each.target, each.shard_id) for each in best_routes(PackedModules(mapping), name)]
    assert found == ([] if expected is None else [expected])


def test_several_places() -> None:
    packed = PackedModules({"qk": ["q_proj", "k_proj"], "kv": ["k_proj", "v_proj"]})
    assert best_routes(packed, "a.k_proj.bias") == [
        Route("a.qk.bias", 1, "qk"),
        Route("a.kv.bias", 0, "kv"),
    ]
    packed = PackedModules({"embed": [("tokens", None), ("head", None), ("both", 1), ("both", 2)]})
    assert [(each.target, each.shard_id) for each in best_routes(packed, "embed.weight")] == [
        *(("tokens.weight", None), ("head.weight", None)),
        *(("both.weight", 1), ("both.weight", 2)),
    ]


def test_shards_of_a_packed_module() -> None:
    assert PackedModules(QKV).shard_ids("qkv_proj") == ["q", "k", "v"]
    assert PackedModules(LISTS).shard_ids("qkv_proj") == [0, 1, 2]
    packed = PackedModules({"q_proj": ("qkv", "q"), "query": ("qkv", "q"), "k": ("qkv", "k")})
    assert packed.shard_ids("qkv") == ["q", "k"]
    assert PackedModules(QKV).shards_of("0.qkv_proj.bias") == [
        *(("0.q_proj.bias", "q"), ("0.k_proj.bias", "k"), ("0.v_proj.bias", "v")),
    ]
    assert PackedModules(QKV).shards_of("0.o_proj.bias") == []


def test_parts_of_components_are_found_last() -> None:
    packed = PackedModules({"attn.q_": ("attn.qkv_", "q")})
    assert best_routes(packed, "0.attn.q_weight") == []
    ((loose,),) = packed.loose_candidates("0.attn.q_weight")
    assert (loose.target, loose.shard_id) == ("0.attn.qkv_weight", "q")


@pytest.mark.parametrize(
    ("mapping", "error", "words"),
    [
        *(({"q_proj": "qkv_proj"}, TypeError, "q_proj"), ({"qkv": None}, TypeError, "qkv")),
        *(({"q_proj": ("qkv",)}, TypeError, "q_proj"), ({"q": ("qkv", 1.5)}, TypeError, "q")),
        *(({"q_proj": ("qkv", "q", "k")}, TypeError, "q_proj"), ({"q": (1, "q")}, TypeError, "q")),
        ({"qkv_proj": ["q_proj", 1]}, TypeError, "qkv_proj"),
        *(({"": ("a", 0)}, ValueError, "empty"), ({"a": ("b..c", 0)}, ValueError, "empty")),
        ({"a": [""]}, ValueError, "empty"),
        ({"qk": ["q_proj", "k_proj"], "k_proj": ("qk", "k")}, ValueError, "k_proj"),
        ([("qkv_proj", ["q_proj"])], TypeError, "must be a mapping"),
        *(("qkv_proj", TypeError, "must be a mapping"), (1, TypeError, "must be a mapping")),
    ],
)
def test_what_is_refused(mapping: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PackedModules(mapping)
