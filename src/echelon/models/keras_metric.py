"""A metric of Keras as one of torchmetrics, whose states are added up over workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from echelon.core.errors import UserError
from echelon.models.keras_model import given_by_keras


class KerasMetric(Metric):
    """A metric whose variables are sums, as those of means, confusion matrices and areas under curves are."""

    full_state_update = False

    def __init__(self, metric: Any, activation: str) -> None:
        """Take a metric of Keras, and what was undone at the model's end.

        Raises:
            UserError: its variables do not begin at zero, so that they are no sums.
        """
        super().__init__()
        self._metric, self._activation = metric, activation
        metric.reset_state()  # it may have counted already, as Keras does before each pass
        for place, variable in enumerate(metric.variables):
            start = variable.value.detach().cpu()
            if bool((start != 0).any()):
                raise UserError(f"metric {metric.name} of Keras cannot be added up over workers: give metrics=...")
            self.add_state(f"state_{place}", start.clone(), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        import keras

        with keras.device(str(outputs.device)):
            after = self._metric.stateless_update_state(
                self._states(), targets, given_by_keras(outputs, self._activation)
            )
        for place, value in enumerate(after):
            setattr(self, f"state_{place}", value.detach())

    def compute(self) -> Any:
        """Return the value of all that was counted."""
        import keras

        with keras.device(str(self.device)):
            return torch.as_tensor(self._metric.stateless_result(self._states()))

    def _states(self) -> list[Tensor]:
        return [getattr(self, f"state_{place}") for place in range(len(self._metric.variables))]
