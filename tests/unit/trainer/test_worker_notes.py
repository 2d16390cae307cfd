"""A run says at its start what makes its losses depend on the number of workers."""

from __future__ import annotations

from torch import nn

from echelon.trainer.compatibility import worker_notes


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
