from __future__ import annotations

import pytest

from echelon.core.errors import UserError
from echelon.core.hints import Style, matches, matching, parse_tensor_plan, style_of


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("blocks.*", "blocks.0", True),
        ("blocks.*", "blocks.0.attn", False),
        ("**.attn", "attn", True),
        ("**.attn", "a.b.attn", True),
        ("a.**.c", "a.c", True),
        ("layer[12].*.conv?", "layer2.0.conv1", True),
        ("layer[12].*", "layer3.0", False),
        ("*", "", False),
        ("**", "", False),
    ],
)
def test_a_star_stays_inside_one_component(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_names_come_pattern_by_pattern_in_their_own_order_each_once() -> None:
    names = ["head", "blocks.0", "blocks.1", "stem"]
    assert matching(["stem", "blocks.*", "*"], names) == ["stem", "blocks.0", "blocks.1", "head"]


def test_the_last_pattern_that_fits_counts() -> None:
    plan = parse_tensor_plan({"blocks.*.qkv": "column(parts=3)", "blocks.0.*": "replicate"})
    assert plan["blocks.*.qkv"] == Style("column", 3) and str(plan["blocks.*.qkv"]) == "column(parts=3)"
    assert style_of("blocks.0.qkv", plan) == Style("replicate")
    assert style_of("blocks.1.qkv", plan) == Style("column", 3)
    assert style_of("head", plan) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"fc": "colum"}, "did you mean column"),
        ({"fc": "row(parts=3)"}, "only column takes a setting"),
        ({"fc": "column(pieces=3)"}, "only column takes a setting"),
        ({"fc": "column(parts=0)"}, "whole number from 1"),
        ({"fc": 3}, "is no style"),
        ({"": "column"}, "no pattern of module names"),
        ({"a..b": "column"}, "no pattern of module names"),
    ],
)
def test_what_is_no_plan_is_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match="tensor_plan") as refusal:
        parse_tensor_plan(plan)
    assert words in str(refusal.value)
