"""A small encoder of texts in the form of BERT (Devlin et al. 2019, arXiv:1810.04805), pre-norm and without dropout.

It is `small_gpt` whose tokens see those before and behind them: of `--task masked-language-modelling`, and, with the
mean of its tokens classified, of texts in classes. Both have the same parameters up to the head, so that one is tuned
to the other, whose texts may be longer.

Shapes: N samples, T tokens, V size of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.models.builtin.small_gpt import SIZE, SmallGPT, TextSize
from echelon.models.builtin.small_vit import TRANSFORMER_PLAN
from echelon.tasks.nest import TensorSpec

LONGEST = 512  # tokens of a text that is classified, in training and later


def build(data: ModelInput) -> nn.Module:
    """Build 4 blocks of width 128 with 4 heads: 0.8 M parameters for 66 characters and windows of 128.

    Raises:
        UserError: inputs are neither token ids nor `input_ids` with an `attention_mask`.
    """
    is_masked = isinstance(data.several, dict) and set(data.several) == {"input_ids", "attention_mask"}
    spec = data.several["input_ids"] if isinstance(data.several, dict) and is_masked else data.several
    if not isinstance(spec, TensorSpec) or not spec.count or len(spec.shape) != 1:
        raise UserError(f"--model small_bert reads token ids, the data has {data.describe()}: choose another model")
    vocabulary = spec.count + is_masked  # masked language modelling has one id more, behind the others
    places = max(spec.shape[0], LONGEST) if is_masked else spec.shape[0]
    text = TextSize(vocabulary, places, tied=False, causal=False, outputs=data.classes)
    return BertClassifier(text, SIZE) if is_masked else SmallBERT(text, SIZE)


class SmallBERT(SmallGPT):
    """Token ids (N, T), some of them masked -> logits (N, T, V) of the tokens that are there."""


class BertClassifier(SmallGPT):
    """Token ids (N, T) and a mask (N, T) of those that are there -> logits (N, classes)."""

    structure = Hints(
        blocks=("blocks.*",),
        tensor_plan={**TRANSFORMER_PLAN, "embedding": "vocabulary", "head": "vocabulary"},
        positions=("positions",),
    )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (N, classes): of the mean of the tokens that are there."""
        there = attention_mask.bool()
        seen = there.clone()
        seen[:, 0] = True  # a text without a token: attention to nothing would be no number
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, seen[:, None, None])
        weights = there.to(x.dtype)[..., None]
        return self.head((self.norm(x) * weights).sum(1) / weights.sum(1).clamp(min=1))
