"""A small encoder of texts in the form of BERT (Devlin et al. 2019, arXiv:1810.04805), pre-norm and without dropout.

It is `small_gpt` whose tokens see those before and behind them: of `--task masked-language-modelling`.
"""

from __future__ import annotations

from torch import nn

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.models.builtin.small_gpt import SIZE, SmallGPT, TextSize
from echelon.tasks.nest import TensorSpec


def build(data: ModelInput) -> nn.Module:
    """Build 4 blocks of width 128 with 4 heads: 0.8 M parameters for 66 characters and windows of 128.

    Raises:
        UserError: inputs are no token ids.
    """
    spec = data.several
    if not isinstance(spec, TensorSpec) or not spec.count or len(spec.shape) != 1:
        raise UserError(f"--model small_bert reads token ids, the data has {data.describe()}: choose another model")
    return SmallBERT(TextSize(spec.count, spec.shape[0], tied=False, causal=False, outputs=data.classes), SIZE)


class SmallBERT(SmallGPT):
    """Token ids (N, T), some of them masked -> logits (N, T, V) of the tokens that are there."""
