"""Any targets, with a loss of your own (`--loss`): judged by that loss, or by metrics of your own (`--metrics`).

Helps: Targets that no other task knows.
Needs: `--loss`, and a model whose outputs the loss takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.task import Metric
from echelon.tasks.base import EvaluationResult, Metrics, Task
from echelon.tasks.nest import Nest


class Supervised(Task):
    """Outputs and targets of any shape; what is learnt is the loss that the user gives."""

    name = "supervised"
    primary = Metric("loss", "min")
    needs_loss = True

    @property
    def outputs(self) -> int:
        """Any."""
        return 0

    def loss_sum(self, outputs: Any, targets: Nest) -> Tensor:
        """Refuse: there is no loss but the user's.

        Raises:
            UserError: always.
        """
        raise UserError("--task supervised needs --loss: module:name of your own, or a class of torch.nn")

    def metrics(self, device: torch.device) -> Metrics:
        """Return metrics that count nothing: the loss is counted where it is known."""
        return _NoMetrics()


TASK = Supervised


class _NoMetrics:
    def update(self, outputs: Any, targets: Nest) -> None:
        """Do nothing."""

    def compute(self, group: torch.distributed.ProcessGroup | None = None) -> EvaluationResult:
        """Return no metrics."""
        return EvaluationResult({})
