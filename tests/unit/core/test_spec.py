from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import UserError
from echelon.core.spec import Spec, bind, parse_chain, parse_spec


def test_a_name_alone() -> None:
    assert parse_spec(" allreduce ") == Spec("allreduce")


def test_values_in_order_and_by_name() -> None:
    spec = parse_spec("diloco(50, outer_lr=0.7, nesterov=true, mode=async)")
    assert spec.args == (50,)
    assert dict(spec.kwargs) == {"outer_lr": 0.7, "nesterov": True, "mode": "async"}


def test_a_chain() -> None:
    assert [s.name for s in parse_chain("topk(0.01)+huffman")] == ["topk", "huffman"]


words = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda w: w not in ("true", "false", "inf", "nan", "infinity")
)
values = st.one_of(st.integers(-1000, 1000), st.floats(-1e6, 1e6, allow_nan=False), st.booleans(), words)


@given(words, st.lists(values, max_size=3), st.dictionaries(words, values, max_size=3))
def test_what_is_written_is_read_back(name: str, args: list[object], kwargs: dict[str, object]) -> None:
    spec = Spec(name, tuple(args), tuple(kwargs.items()))  # type: ignore[arg-type]
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["", "topk(", "topk)", "topk(=1)", "topk(a b)", "topk(density=1, 2)", "topk(a=1, a=2)", "1x", "a(b)c"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_spec(text)


@dataclass(frozen=True)
class TopK:
    density: float
    warmup_steps: int = 0
    momentum: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError("density must be in (0, 1]")


def test_bind_fills_fields_and_widens_integers() -> None:
    assert bind(parse_spec("topk(0.01, momentum=1)"), TopK) == TopK(0.01, 0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topk(densty=0.1)", "did you mean density?"),
        ("topk", "a setting is missing"),
        ("topk(2)", r"density must be in \(0, 1\]"),
        ("topk(0.1, warmup_steps=0.5)", "must be a whole number"),
        ("topk(0.1, density=0.2)", "given twice"),
        ("topk(0.1, 1, 1, 1)", "4 unnamed values"),
    ],
)
def test_bind_refuses_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        bind(parse_spec(text), TopK)
