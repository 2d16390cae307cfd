"""Some tokens of a text from all others: cross-entropy in nats, judged by loss and perplexity of those masked.

Shapes: B samples, T tokens, V size of the vocabulary.

Helps: Encoders of texts, to be fine-tuned where labels are few.
Needs: one text (.txt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from echelon.core.task import TaskDefaults
from echelon.tasks.base import ChosenSample, Encoding, Generated, InputFacts
from echelon.tasks.language_modelling import LanguageModelling
from echelon.tasks.nest import Nest


class MaskedLanguageModelling(LanguageModelling):
    """Logits `(B, T, V)` and the tokens `(B, T)`, `NO_TARGET` for those that are not to be predicted.

    The loss is the sum over tokens that are to be predicted of -log p(token | what is seen of its window).
    """

    name = "masked_language_modelling"
    unit = "masked token"
    encoding = Encoding.MASKED_TOKENS
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 0.1, epochs=20, batch_size=16, holdout=0.1)

    def auto_model(self, data: InputFacts) -> str:
        """Return the small encoder."""
        return "small_bert"

    def generated(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return nothing: such models write no texts."""
        return Generated()


TASK = MaskedLanguageModelling
