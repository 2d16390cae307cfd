"""All that `--tune` says of a model, applied to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.tuning import ALL, TUNINGS, read_tuning
from echelon.models.tuning.base import TuningKind
from echelon.models.weights import head_names


@dataclass(frozen=True)
class TuningPlan:
    """What is trained of a model, and at which rates.

    The head is trained with every kind that chooses parameters; what kinds choose is joined, what they freeze is taken
    out of it.

    Attributes:
        text: as described.
        kinds: its parts.
        trains_norm: whether BatchNorm whose parameters are frozen takes in the statistics of new batches.
    """

    text: str = ALL
    kinds: tuple[TuningKind, ...] = ()
    trains_norm: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether the model is trained as it is."""
        return self.text == ALL

    def apply(self, model: nn.Module) -> str:
        """Freeze what is not trained, set rates, and return in words how much is trained.

        What the model itself has frozen stays so. Rates are left with the model as `lr_rates`, by name of parameter.

        Raises:
            UserError: a kind does not fit the model, or nothing is left to train.
        """
        chosen = [names for kind in self.kinds if (names := kind.trained(model)) is not None]
        frozen = {name for kind in self.kinds for name in kind.frozen(model)}
        named = dict(model.named_parameters(remove_duplicate=False))
        wanted = set().union(*chosen, head_names(model)) if chosen else set(named)
        trained = {id(p) for name, p in named.items() if name in wanted - frozen and p.requires_grad}
        if not trained:
            raise UserError(f"--tune {self.text} leaves nothing of {type(model).__name__} to train")
        for parameter in named.values():
            parameter.requires_grad_(id(parameter) in trained)
        if not self.trains_norm:
            _keep_statistics(model)
        rates: dict[str, float] = {}
        for kind in self.kinds:
            for name, rate in kind.rates(model).items():
                rates[name] = rates.get(name, 1.0) * rate
        if rates:
            model.lr_rates = rates  # type: ignore[assignment]
        unique = {id(p): p for p in named.values()}.values()
        count, total = (sum(p.numel() for p in unique if p.requires_grad or every) for every in (False, True))
        return f"tuning {self.text}: {count:,} of {total:,} parameters are trained"


UNTUNED = TuningPlan()


def tuning_plan(text: str, frozen_norm: str) -> TuningPlan:
    """Return the plan that `--tune` and `--frozen-norm` describe.

    Raises:
        UserError: a kind does not exist, or a setting is impossible.
    """
    return TuningPlan(text, tuple(TUNINGS.bind(spec) for spec in read_tuning(text)), frozen_norm == "train")


def _keep_statistics(model: nn.Module) -> None:
    """Keep BatchNorm whose parameters are all frozen in evaluation mode, in place."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "running_mean") and own and not any(p.requires_grad for p in own):
            module.register_forward_pre_hook(_in_evaluation)
            module.keeps_statistics = True  # type: ignore[assignment]


def _in_evaluation(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    module.training = False
