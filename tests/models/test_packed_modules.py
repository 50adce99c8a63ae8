"""Routing of a checkpoint's names to packed parameters."""

from __future__ import annotations

from typing import Any

import pytest

from ptsave.models.packed_modules import PackedModules, Route

QKV = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}


def route(mapping: Any, name: str) -> tuple[str, Any] | None:
    found = PackedModules(mapping).routes(name)
    assert len(found) <= 1
    return (found[0].target, found[0].shard_id) if found else None


def test_tuples_name_the_packed_module_and_the_shard() -> None:
    packed = PackedModules(QKV)
    assert packed.routes("layers.0.attn.k_proj.weight") == [
        Route("layers.0.attn.qkv_proj.weight", "k", "qkv_proj")
    ]
    assert packed.shard_ids("qkv_proj") == ["q", "k", "v"]


def test_lists_number_their_shards() -> None:
    packed = PackedModules({"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert packed.routes("q_proj.bias") == [Route("qkv_proj.bias", 0, "qkv_proj")]
    assert packed.routes("a.v_proj.bias") == [Route("a.qkv_proj.bias", 2, "qkv_proj")]
    assert packed.shard_ids("qkv_proj") == [0, 1, 2]


def test_both_forms_may_be_mixed() -> None:
    mapping = {**QKV, "gate_up_proj": ["gate_proj", "up_proj"]}
    assert route(mapping, "mlp.up_proj.weight") == ("mlp.gate_up_proj.weight", 1)
    assert route(mapping, "attn.v_proj.weight") == ("attn.qkv_proj.weight", "v")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.xq_proj.weight",
        "layers.0.q_proj_norm.weight",
        "layers.0.qkv_proj.weight",
        "q_projweight",
        "",
        "weight",
    ],
)
def test_only_whole_components_match(name: str) -> None:
    assert route(QKV, name) is None


def test_the_longest_match_wins_in_any_order_of_the_mapping() -> None:
    longer = {"attn.q_proj": ("attn.packed", 7)}
    shorter = {"q_proj": ("qkv_proj", "q")}
    for mapping in ({**longer, **shorter}, {**shorter, **longer}):
        assert route(mapping, "layers.0.attn.q_proj.weight") == ("layers.0.attn.packed.weight", 7)
        assert route(mapping, "layers.0.cross.q_proj.weight") == (
            "layers.0.cross.qkv_proj.weight",
            "q",
        )


def test_of_equally_long_matches_the_one_nearest_to_the_end_wins() -> None:
    mapping = {"gate": ("gates", 0), "weight": ("weights", 1)}
    assert route(mapping, "gate.x.weight") == ("gate.x.weights", 1)
    assert route({"a": ("b", 0)}, "a.a.w") == ("a.b.w", 0)


def test_a_longer_match_in_front_wins_over_a_shorter_one_behind() -> None:
    mapping = {"experts.gate": ("experts.gates", 0), "weight": ("weights", 1)}
    assert route(mapping, "experts.gate.x.weight") == ("experts.gates.x.weight", 0)


def test_a_module_that_is_packed_into_itself_is_not_packed() -> None:
    packed = PackedModules({"qkv_proj": ["qkv_proj"], "o_proj": ["o_proj"]})
    assert packed.routes("attn.qkv_proj.weight") == []


def test_two_names_may_share_a_shard() -> None:
    packed = PackedModules({"q_proj": ("qkv", "q"), "query": ("qkv", "q"), "k": ("qkv", "k")})
    assert packed.shard_ids("qkv") == ["q", "k"]


@pytest.mark.parametrize(
    "mapping",
    [
        {"q_proj": "qkv_proj"},
        {"q_proj": ("qkv_proj",)},
        {"q_proj": ("qkv_proj", 1.5)},
        {"q_proj": ("qkv_proj", "q", "k")},
        {"q_proj": (1, "q")},
        {"qkv_proj": ["q_proj", 1]},
        {"qkv_proj": None},
    ],
)
def test_what_is_neither_form_is_a_type_error(mapping: Any) -> None:
    (name,) = mapping
    with pytest.raises(TypeError, match=name):
        PackedModules(mapping)


@pytest.mark.parametrize("mapping", [{"": ("a", 0)}, {"a": ("b..c", 0)}, {"a": [""]}])
def test_empty_names_are_refused(mapping: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        PackedModules(mapping)


def test_a_name_goes_to_one_part_of_a_module() -> None:
    with pytest.raises(ValueError, match="k_proj"):
        PackedModules({"qk": ["q_proj", "k_proj"], "k_proj": ("qk", "k")})


def test_a_name_may_have_several_places() -> None:
    packed = PackedModules({"qk": ["q_proj", "k_proj"], "kv": ["k_proj", "v_proj"]})
    assert packed.routes("a.k_proj.bias") == [
        Route("a.qk.bias", 1, "qk"),
        Route("a.kv.bias", 0, "kv"),
    ]
    packed = PackedModules({"embed": [("tokens", None), ("head", None), ("both", 1), ("both", 2)]})
    assert [(each.target, each.shard_id) for each in packed.routes("embed.weight")] == [
        ("tokens.weight", None),
        ("head.weight", None),
        ("both.weight", 1),
        ("both.weight", 2),
    ]


@pytest.mark.parametrize(
    ("mapping", "name", "expected"),
    [
        ({".q_proj": (".qkv_proj", "q")}, "attn.q_proj.weight", ("attn.qkv_proj.weight", "q")),
        ({".q_proj": (".qkv_proj", "q")}, "q_proj.weight", ("qkv_proj.weight", "q")),
        ({".q_proj": (".qkv_proj", "q")}, "attn.xq_proj.weight", None),
        ({"mlp.gate.": ("mlp.both.", 0)}, "1.mlp.gate.weight", ("1.mlp.both.weight", 0)),
        (
            {"experts.3.w1.": ("experts.w13_", ("w1", 3))},
            "moe.experts.3.w1.weight",
            ("moe.experts.w13_weight", ("w1", 3)),
        ),
        ({"experts.3.w1.": ("experts.w13_", ("w1", 3))}, "moe.experts.3.w1", None),
        ([("qkv_proj", "q_proj", "q")], "attn.q_proj.bias", ("attn.qkv_proj.bias", "q")),
        ([(".qkv_proj", ".q_proj", "q")], "attn.q_proj.bias", ("attn.qkv_proj.bias", "q")),
        (
            [
                ("experts.w13_", "experts.0.w3.", 0, "w3"),
                ("experts.w13_", "experts.1.w3.", 1, "w3"),
            ],
            "experts.1.w3.weight",
            ("experts.w13_weight", ("w3", 1)),
        ),
    ],
)
def test_dots_at_an_end_tuple_shard_ids_and_lists_of_tuples(
    mapping: Any, name: str, expected: Any
) -> None:
    assert route(mapping, name) == expected


def test_parts_of_components_are_found_last() -> None:
    packed = PackedModules({"attn.q_": ("attn.qkv_", "q")})
    assert packed.routes("0.attn.q_weight") == []
    ((loose,),) = packed.loose_candidates("0.attn.q_weight")
    assert (loose.target, loose.shard_id) == ("0.attn.qkv_weight", "q")


def test_the_names_of_the_parts_of_a_parameter() -> None:
    packed = PackedModules(QKV)
    assert packed.shards_of("0.qkv_proj.bias") == [
        ("0.q_proj.bias", "q"),
        ("0.k_proj.bias", "k"),
        ("0.v_proj.bias", "v"),
    ]
    assert packed.shards_of("0.o_proj.bias") == []


@pytest.mark.parametrize("mapping", [[("qkv_proj", ["q_proj"])], "qkv_proj", 1])
def test_what_is_no_mapping_is_a_type_error(mapping: Any) -> None:
    with pytest.raises(TypeError, match="must be a mapping"):
        PackedModules(mapping)
