"""What a run records as alternatives to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config import RunConfig
from echelon.forecast import alternatives
from echelon.run.resolve import resolve


@pytest.mark.parametrize("own", ["powersgd(2)", "powersgd(rank=2)", "topk(0.01)", "none"])
def test_a_runs_own_codec_is_no_alternative_however_it_is_written(own: str) -> None:
    config = RunConfig()
    run = resolve(replace(config, strategy=replace(config.strategy, compression=own)))
    codecs = alternatives._settled(run)
    assert next(iter(codecs)) == own
    assert [spec for spec, codec in codecs.items() if codec == run.compression] == [own]
    assert len(codecs) == len(alternatives.CODECS)
