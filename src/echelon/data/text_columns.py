"""Columns of texts as ids: padded to the longest of a batch, with a mask that says which are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import DataRequest
from echelon.data.ragged import RaggedArray
from echelon.data.tokenisers import Tokeniser, tokeniser_for
from echelon.tasks.nest import TensorSpec

IDS, MASK = "input_ids", "attention_mask"  # what models of texts call their inputs, those of transformers too
MOST_TOKENS = 512  # of a sample; what is longer is cut


@dataclass(frozen=True)
class TextColumn:
    """Texts as token ids.

    Attributes:
        inputs: `input_ids` and `attention_mask` of each text, int64 `(length,)`; padding is 0 in both.
        specs: of the inputs.
    """

    inputs: dict[str, RaggedArray]
    specs: dict[str, TensorSpec]
    tokeniser: Tokeniser


def encode_texts(request: DataRequest, texts: Sequence[str], train: int) -> TextColumn:
    """Return texts as ids, by the tokeniser of `tokeniser_for`; of each at most the first 512.

    Args:
        texts: of all parts.
        train: how many of the first ones are for training: a tokeniser is trained on these alone.

    Raises:
        UserError: there is no such tokeniser, or no text to train one on.
    """
    if not any(text.strip() for text in texts[:train]):
        raise UserError(f"data {request.config.source}: column {request.config.input} holds no text")
    tokeniser = tokeniser_for(request, texts[:train])
    rows = [row[:MOST_TOKENS] if len(row) else np.zeros(1, np.int64) for row in tokeniser.encode(texts)]
    ids = RaggedArray.of(rows)
    mask = RaggedArray(np.ones_like(ids.values), np.cumsum(ids.lengths))
    longest = ids.shape[1:2]
    specs = {
        IDS: TensorSpec(longest, "int64", tokeniser.count, ragged=True),
        MASK: TensorSpec(longest, "int64", ragged=True),
    }
    return TextColumn({IDS: ids, MASK: mask}, specs, tokeniser)
