from __future__ import annotations

import pytest

from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.layout import parse_layout


def test_a_layout() -> None:
    layout = parse_layout("dp=2, tp=-1, sequence")
    assert layout.sizes == {Axis.DP: 2, Axis.TP: -1} and layout.sequence
    assert layout.resolve(8).tp == 4
    assert str(layout) == "dp=2,tp=-1,sequence"


def test_dp_takes_what_is_left_where_it_is_not_given() -> None:
    layout = parse_layout("tp=2,pp=2,microbatches=4").resolve(12)
    assert (layout.dp, layout.pp, layout.tp, layout.fsdp, layout.model_size) == (3, 2, 2, 1, 4)
    assert parse_layout(str(layout)) == layout


def test_tables_are_cut_over_the_replicas_themselves() -> None:
    layout = parse_layout("dp=4,table=2").resolve(4)
    assert (layout.dp, layout.table, layout.model_size, str(layout)) == (4, 2, 1, "dp=4,table=2")
    assert parse_layout("table=2").resolve(6).dp == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown axis"),
        ("dp", "dp=N"),
        ("dp=0", "at least 1"),
        ("dp=x", "dp=N"),
        ("dp=2,dp=2", "stands twice"),
        ("dp=-1,tp=-1", "only one axis can be -1"),
        ("xp=2", "unknown axis or option"),
        ("dp=2,schedule=gpipe", "schedule belongs to pp=N"),
        ("dp=2,microbatches=4", "microbatches belongs to pp=N"),
        ("pp=2,microbatches=x", "microbatches=N"),
        ("dp=2,sequence", "sequence belongs to tp=N"),
        ("dp=2,fsdp=2,zero1", "leave zero1 out"),
        ("dp=2,zero1=yes", "alone"),
        ("dp=2,table", "table=N with N at least 1"),
        ("dp=2,table=2,zero1", "leave out fsdp, tp, pp and zero1, or table"),
        ("dp=2,tp=2,table=2", "leave out fsdp, tp, pp and zero1, or table"),
    ],
)
def test_an_impossible_layout_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "world", "words"),
    [
        ("dp=2,tp=2", 2, "4 ranks, but there are 2 workers; write dp=-1 or --workers 4"),
        ("dp=-1,tp=2", 3, "2 ranks do not divide 3 workers"),
        ("tp=4", 2, "4 ranks do not divide 2 workers; use --workers 4"),
        ("dp=1,fsdp=2", 4, "2 ranks, but there are 4"),
        ("dp=4,table=3", 4, "3 does not divide 4 replicas, over which tables are cut"),
        ("table=4", 2, "4 does not divide 2 replicas"),
    ],
)
def test_a_layout_that_is_not_the_world_is_refused(text: str, world: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_layout(text).resolve(world)
