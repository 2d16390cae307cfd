"""norm: scales and shifts of normalisation layers are trained, and the head.

Helps: With little data whose distribution differs from that of the old.
Costs: accuracy, if more than the distribution differs.
Needs: --weights, and a model with normalisation layers.

Paper: Frankle et al. 2021, Training BatchNorm and Only BatchNorm (arXiv:2003.00152).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import nn

from echelon.models.keras_model import KerasModule
from echelon.models.tuning.base import TuningKind, some


@dataclass(frozen=True)
class Norm(TuningKind):
    """Settings of `norm`."""

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return the parameters of modules whose class is one of normalisation.

        Raises:
            UserError: there are none.
        """
        found = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            if "norm" in type(module).__name__.lower()
            for name, _ in module.named_parameters(recurse=False)
        }
        if isinstance(model, KerasModule):
            found |= {name for kind, names in model.layers if "norm" in kind.lower() for name in names}
        return some(found, model, "norm", "normalisation layer with parameters")


TUNING = Norm
