"""What a run records as alternatives to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.compression import read
from echelon.config import RunConfig
from echelon.forecast import alternatives
from echelon.run.resolve import resolve
from echelon.sync.registry import read as read_sync


@pytest.mark.parametrize("own", ["powersgd(2)", "powersgd(rank=2)", "topk(0.01)", "none"])
def test_a_runs_own_codec_is_no_alternative_however_it_is_written(own: str) -> None:
    config = RunConfig()
    run = resolve(replace(config, strategy=replace(config.strategy, compression=own)))
    codecs = alternatives._settled(run)
    assert next(iter(codecs)) == own
    assert [spec for spec, codec in codecs.items() if codec == run.compression] == [own]
    assert len(codecs) == len(alternatives.TRIED)


COSTS = {
    spec: alternatives.Cost(n_bytes, 3, 1e-3, 1.0, 1e-6 * n_bytes, sums=spec not in ("int8", "sign"), buckets=1)
    for spec, n_bytes in (("none", 4e6), ("bf16", 2e6), ("int8", 1e6), ("sign", 1e5), ("powersgd(rank=2)", 1e5))
}


@pytest.mark.parametrize(("spec", "begins_with"), [("sign", "int8"), ("powersgd(rank=2)", "bf16")])
def test_messages_that_begin_and_end_a_run_count(spec: str, begins_with: str) -> None:
    whole = read(spec).codec.for_run(100).whole_steps(100)
    share = (whole.first + whole.last) / 100
    assert share > 0.05
    cost = alternatives._over_run(COSTS[spec], read(spec).for_run(100), COSTS)
    assert cost.n_bytes == pytest.approx((1 - share) * 1e5 + share * COSTS[begins_with].n_bytes)
    assert cost.network_s == pytest.approx(1e-6 * cost.n_bytes)


def test_stages_of_a_density_count() -> None:
    plain, staged = (read(f"topk(0.01, {text}finish_steps=0)").for_run(100) for text in ("warmup_steps=0, ", ""))
    cost = COSTS["sign"]
    assert alternatives._over_run(cost, plain, COSTS).n_bytes == pytest.approx(cost.n_bytes)
    assert alternatives._over_run(cost, staged, COSTS).n_bytes > 2 * cost.n_bytes


def test_what_no_codec_acts_on_has_no_stages() -> None:
    staged = read("topk(0.01, finish_steps=0)").for_run(100)
    cost = replace(COSTS["sign"], small_bytes=9e4, small_s=0.09)
    more = alternatives._over_run(replace(cost, n_bytes=1e4, small_bytes=0.0, small_s=0.0), staged, COSTS)
    assert alternatives._over_run(cost, staged, COSTS).n_bytes == pytest.approx(9e4 + more.n_bytes)


def test_a_period_is_sent_as_often_as_the_run_sends_it() -> None:
    settled = {spec: read(spec) for spec in COSTS}
    rows = alternatives._rows(COSTS, settled, "none", 60)
    local = next(row for row in rows if row.settings == {"strategy.sync": "local(period=8)"})
    assert local.often == read_sync("local(period=8)").messages(60) / 60 > 1 / 8
    assert local.network_s == COSTS["none"].network_s
