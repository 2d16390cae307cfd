"""bias: biases and the head are trained, about a thousandth of a transformer's parameters.

Helps: With little data, and a transformer that has been trained on similar text or images.
Costs: accuracy, if the new data differs much from the old.
Needs: --weights, a model with biases, and a learning rate about ten times that of all.

Paper: Ben Zaken et al. 2022, BitFit (arXiv:2106.10199).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import nn

from echelon.models.tuning.base import TuningKind, some


@dataclass(frozen=True)
class Bias(TuningKind):
    """Settings of `bias`."""

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return the names of biases, those of normalisation among them.

        Raises:
            UserError: there are none.
        """
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        return some({name for name in names if name.rpartition(".")[2].endswith("bias")}, model, "bias", "bias")


TUNING = Bias
