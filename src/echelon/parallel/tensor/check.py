"""Whether a split model still computes what it did."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import FAKE_TENSOR_LOGGER, detect_fake_mode

# Sums over ranks are made in another order: some ulps of a network's depth; a wrong split is off by the whole.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def answer(model: nn.Module, example: Nest) -> Tensor:
    """Return the model's first output for an example, in evaluation mode; all ranks of the group call it together."""
    was_training = model.training
    model.eval()
    try:
        result = nest.call(model, example)
    finally:
        model.train(was_training)
    logits = getattr(result, "logits", None)
    if not isinstance(logits, Tensor):
        logits = next(leaf for leaf in nest.leaves(result) if isinstance(leaf, Tensor))
    return logits


def same_function(model: nn.Module, example: Nest, before: Tensor) -> None:
    """Check that the split model answers an example as it did `before` it was split.

    Use it where the plan was found or written by the user; the example should be random, not blank.

    Raises:
        UserError: it fails, or answers otherwise.
    """
    advice = (
        "write --tensor-plan by hand, or change yours: layers that follow each other are column and then row, or both "
        "replicate (a fused qkv ordered by head is column, by q, k, v column(parts=3))"
    )
    try:
        with _quiet(FAKE_TENSOR_LOGGER):  # it logs a traceback of what is refused in words here
            after = answer(model, example)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"tp: the split model cannot compute one batch ({reason}): {advice}") from error
    if detect_fake_mode((before, after)) is not None:  # a rehearsal: there are no values
        return
    tolerance = TOLERANCE.get(before.dtype, 0.1)
    scale = before.abs().max().clamp(min=1e-6)
    difference = float((after - before).abs().max() / scale) if after.shape == before.shape else float("inf")
    if not difference <= tolerance:
        raise UserError(
            f"tp: the split model is not the same function (logits differ by {difference:.1e} of the largest): {advice}"
        )
