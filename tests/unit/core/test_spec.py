from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import UserError
from echelon.core.spec import Quantity, Range, Spec, bind, parse_chain, parse_spec, spec_of
from echelon.core.units import UNITS


def test_a_name_alone() -> None:
    assert parse_spec(" allreduce ") == Spec("allreduce")


def test_values_in_order_and_by_name() -> None:
    spec = parse_spec("diloco(50, outer_lr=0.7, nesterov=true, mode=async)")
    assert spec.args == (50,)
    assert dict(spec.kwargs) == {"outer_lr": 0.7, "nesterov": True, "mode": "async"}


def test_a_chain() -> None:
    assert [s.name for s in parse_chain("topk(0.01)+huffman")] == ["topk", "huffman"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run(time=8h)", Quantity(8.0, "h")),
        ("run(link=1gbit)", Quantity(1.0, "gbit")),
        ("run(nodes=1:4)", Range(1, 4)),
        ("run(hosts=a+b)", ("a", "b")),
        ('run(x="blocks.[0-3]")', "blocks.[0-3]"),
        (r'run(x="a \" b, c) = (")', 'a " b, c) = ('),
        ("run(lr=1e+5)", 1e5),
        ('run(x="8h")', "8h"),
    ],
)
def test_each_kind_of_value(text: str, value: object) -> None:
    assert parse_spec(text).kwargs[0][1] == value


def test_a_quoted_value_needs_no_name() -> None:
    assert [s.args for s in parse_chain('freeze("a=b, (c+d")+huffman')] == [("a=b, (c+d",), ()]


def test_a_quantity_knows_what_it_is() -> None:
    quantity = Quantity(1.5, "h")
    assert (str(quantity), quantity.kind, quantity.value) == ("1.5h", "duration", 5400.0)


names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(lambda w: w not in ("true", "false"))
scalars = st.one_of(
    st.integers(-1000, 1000),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(),
    st.builds(Quantity, st.floats(0, 1e9), st.sampled_from(sorted(UNITS))),
    st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda ends: Range(min(ends), max(ends))),
)
values = st.one_of(scalars, st.lists(scalars, min_size=2, max_size=3).map(tuple))


@given(names, st.lists(values, max_size=3), st.dictionaries(names, values, max_size=3))
def test_what_is_written_is_read_back(name: str, args: list[object], kwargs: dict[str, object]) -> None:
    spec = Spec(name, tuple(args), tuple(kwargs.items()))  # type: ignore[arg-type]
    assert parse_spec(str(spec)) == spec
    assert parse_chain(f"{spec}+{spec}") == (spec, spec)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_spec(text)
    except UserError:
        return
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "topk(",
        "topk)",
        "topk(=1)",
        "topk(a b)",
        "topk(density=1, 2)",
        "topk(a=1, a=2)",
        "1x",
        "a(b)c",
        'a("b)',
        "a(4:1)",
        "a(8parsecs)",
        "a(b+)",
        "a(b=c(d))",
    ],
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


def test_settings_are_written_as_the_spec_they_are_read_from() -> None:
    assert str(spec_of("topk", TopK(0.01))) == "topk(density=0.01)"
    assert bind(spec_of("topk", TopK(0.5, 3, 0.9)), TopK) == TopK(0.5, 3, 0.9)


@dataclass(frozen=True)
class Place:
    time: Quantity
    nodes: Range | None = None
    hosts: tuple[str, ...] = ()


def test_bind_takes_quantities_ranges_and_lists() -> None:
    assert bind(parse_spec("slurm(8h, nodes=2, hosts=a)"), Place) == Place(Quantity(8.0, "h"), Range(2, 2), ("a",))
    with pytest.raises(UserError, match="time must be a quantity such as 8h or 24GB, not '8'"):
        bind(parse_spec("slurm(8)"), Place)


def test_bind_fills_fields_and_widens_integers() -> None:
    assert bind(parse_spec("topk(0.01, momentum=1)"), TopK) == TopK(0.01, 0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topk(densty=0.1)", "did you mean density?"),
        ("topk", "missing"),
        ("topk(2)", r"density must be in \(0, 1\]"),
        ("topk(0.1, warmup_steps=0.5)", "must be a whole number"),
        ("topk(0.1, density=0.2)", "given twice"),
        ("topk(0.1, 1, 1, 1)", "4 unnamed values"),
    ],
)
def test_bind_refuses_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        bind(parse_spec(text), TopK)


def test_rates_as_others_write_them_are_understood_in_the_refusal() -> None:
    with pytest.raises(UserError, match="unknown unit 'gbps': did you mean gbit"):
        parse_spec("f(link=1gbps)")
