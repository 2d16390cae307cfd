"""The loss and the metrics that a model of Keras was compiled with, as functions of this module's logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from echelon.core.errors import UserError
from echelon.models.keras_model import KerasModule, given_by_keras, loss_name, reads_logits

_OF_CLASSES = ("sparsecategoricalcrossentropy", "categoricalcrossentropy", "binarycrossentropy")
_OF_NUMBERS = ("meansquarederror", "mse")
_ACCURACIES = ("accuracy", "acc")
_OF_ONE_HOT = ("categoricalaccuracy", "topkcategoricalaccuracy", "categoricalcrossentropy")


class KerasLoss:
    """A loss of Keras, one number for each sample: the mean over what the loss gives for it."""

    def __init__(self, loss: Any, activation: str) -> None:
        """Take a function of targets and of what Keras gives, and what was undone at the model's end."""
        self._loss, self._activation = loss, activation

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses `(B,)` of logits."""
        values = self._loss(targets, given_by_keras(outputs, self._activation))
        return values.reshape(len(values), -1).mean(1)


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
        """Count a batch: outputs and targets `(B, ...)`."""
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


def compiled_loss(model: KerasModule) -> KerasLoss | None:
    """Return the loss that a model was compiled with; None: it has none, or a task of Echelon learns the same.

    Raises:
        UserError: it has several, or its `from_logits` contradicts the end of the model.
    """
    import keras

    given = getattr(model.compiled, "loss", None)
    if given is None:
        return None
    if isinstance(given, dict | list | tuple):
        raise UserError("a Keras model compiled with several losses: give loss=..., one function of all outputs")
    name = loss_name(given)
    logits = reads_logits(given)
    if logits is not None and logits == bool(model.activation):
        raise UserError(
            f"the Keras model was compiled with {name}(from_logits={logits}), but it ends "
            f"{'with ' + model.activation if model.activation else 'without softmax or sigmoid'}: compile it with "
            f"from_logits={not logits}"
        )
    if name in (*_OF_CLASSES, *_OF_NUMBERS) and not _is_special(given):
        return None
    found = keras.losses.get(given)
    return KerasLoss(found.call if isinstance(found, keras.losses.Loss) else found, model.activation)


def check_targets(model: KerasModule, data: str) -> None:
    """Refuse targets that are fractions, where a model was compiled with a loss of classes.

    Raises:
        UserError: says how classes, or labels, are given.
    """
    name = loss_name(getattr(model.compiled, "loss", None) or "")
    if name == "binarycrossentropy":
        raise UserError(
            f"data {data}: the Keras model was compiled with binary_crossentropy, and targets are floats: with targets "
            '(labels,) of 0 and 1 for each sample, give task="multi_label"'
        )
    if name in _OF_CLASSES:
        raise UserError(
            f"data {data}: the Keras model was compiled with a cross-entropy of classes, and targets are floats: give "
            "class numbers (of one-hot ones their argmax) and compile it with sparse_categorical_crossentropy; "
            "label_smoothing is a setting here"
        )


def compiled_metrics(model: KerasModule) -> dict[str, KerasMetric]:
    """Return the metrics that a model was compiled with, by name.

    Accuracies by name are left out: every task of classes has its own.

    Raises:
        UserError: one cannot be added up over workers, or takes targets that are no class numbers.
    """
    import keras

    compiled = getattr(model.compiled, "_compile_metrics", None)
    listed = getattr(compiled, "_user_metrics", None) or []
    if isinstance(listed, dict) or any(isinstance(each, list | dict) for each in listed):
        raise UserError("a Keras model compiled with metrics for several outputs: give metrics=...")
    own = [each for each in listed if not (isinstance(each, str) and each in _ACCURACIES)]
    for each in own:
        if loss_name(each) in _OF_ONE_HOT:
            name = getattr(each, "name", each)
            raise UserError(
                f"the Keras model was compiled with the metric {name}, which takes one-hot targets, and targets are "
                "class numbers here: compile it with the sparse one, such as sparse_categorical_accuracy"
            )
    built = [keras.metrics.get(each) for each in own]
    metrics = [m if isinstance(m, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(m) for m in built]
    return {metric.name: KerasMetric(metric, model.activation) for metric in metrics}


def _is_special(loss: object) -> bool:
    """Whether a cross-entropy smooths labels or leaves a class out, which the tasks' own do not."""
    if isinstance(loss, str) or not hasattr(loss, "get_config"):
        return False
    config = loss.get_config()
    return bool(config.get("label_smoothing") or config.get("ignore_class") is not None)
