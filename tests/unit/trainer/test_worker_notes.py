"""A run says at its start what makes its losses depend on the number of workers."""

from __future__ import annotations

from torch import nn

from echelon.config import build
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import sent_whole_notes, worker_notes


def test_batchnorm_and_dropout_are_named_where_batches_are_cut() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.1))
    (said,) = worker_notes(model, 2, sync_batchnorm=False)
    assert "BatchNorm (0)" in said and "dropout (2)" in said and "\n" not in said
    (said,) = worker_notes(model, 2, sync_batchnorm=True)
    assert "BatchNorm" not in said and "dropout (2)" in said
    assert not worker_notes(model, 1, sync_batchnorm=False)
    assert not worker_notes(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), 2, sync_batchnorm=False)
    model[0].eval()  # frozen: it keeps its statistics
    assert "BatchNorm" not in worker_notes(model, 2, sync_batchnorm=False)[0]


def test_a_codec_that_has_nothing_to_encode_is_said() -> None:
    run = resolve(build(None, {"strategy.compression": "int8"}).config)
    (said,) = sent_whole_notes(run, nn.Linear(8, 8), 2)
    assert said.startswith("--compression int8 does nothing: ") and "1,024" in said
    assert not sent_whole_notes(run, nn.Linear(8, 8), 1) and not sent_whole_notes(run, nn.Linear(64, 64), 2)
    assert not sent_whole_notes(resolve(build(None, {}).config), nn.Linear(8, 8), 2)
    frozen = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(8, 8))
    assert sent_whole_notes(run, frozen, 2)
