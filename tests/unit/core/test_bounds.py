"""What a setting may be is declared beside its type, and said in one sentence."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.core.bounds import Bounds, OneOf, check_bounds, typed
from echelon.core.errors import UserError
from echelon.core.spec import bind, parse_spec
from echelon.sync.registry import STRATEGIES


@dataclass(frozen=True)
class Settings:
    """Some of each kind."""

    share: Annotated[float, Bounds(above=0, most=1)] = 0.5
    block: Annotated[int | None, Bounds(least=8, step=8)] = None
    form: Annotated[str, OneOf(("bf16", "fp32"))] = "bf16"
    free: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"share": 1.5}, "share must be above 0 and at most 1, the nearest is 1"),
        ({"share": 0.0}, "share must be above 0 and at most 1"),
        ({"block": 4}, "block must be at least 8 and a multiple of 8, the nearest is 8"),
        ({"block": 21}, "block must be at least 8 and a multiple of 8, the nearest is 24"),
        ({"form": "fp3"}, "form must be one of bf16, fp32, not fp3: did you mean fp32?"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_sentence(given: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        Settings(**given)
    assert str(error.value) == refused
    text = ", ".join(f"{key}={value}" for key, value in given.items())
    with pytest.raises(UserError) as of_spec:
        bind(parse_spec(f"settings({text})"), Settings)
    assert str(of_spec.value) == f"settings({text}): {refused}"


def test_what_is_allowed_or_left_out_passes() -> None:
    assert Settings(1.0, None, "fp32", -5).free == -5
    assert Settings(block=16).block == 16
    assert Settings(share=sys.float_info.min).share > 0


def test_an_annotation_is_read_from_its_text() -> None:
    assert typed("int | None") == ("int | None", None)
    assert typed("Annotated[int | None, Bounds(least=1, hint='a')]") == ("int | None", Bounds(least=1, hint="a"))
    assert typed("Annotated[str, OneOf(('a', 'b'))]") == ("str", OneOf(("a", "b")))


@pytest.mark.parametrize(
    ("registry", "text"),
    [
        (CODECS, "topk(2)"), (CODECS, "powersgd(0)"), (CODECS, "sign(block=9)"), (CODECS, "qsgd(levels=200)"),
        (STRATEGIES, "local(0)"), (STRATEGIES, "ps(mode=asyn)"), (STRATEGIES, "easgd(5, beta=2)"),
        (PATHS, "hierarchical(0)"),
    ],
)  # fmt: skip
def test_a_value_is_refused_alike_with_and_without_the_implementation(registry: Any, text: str) -> None:
    spec = parse_spec(text)
    with pytest.raises(UserError) as without:
        registry.check(spec)
    with pytest.raises(UserError) as with_it:
        registry.bind(spec)
    assert str(without.value) == str(with_it.value)
