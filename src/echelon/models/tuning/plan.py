"""All that `--tune` says of a model, applied to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from echelon.core.errors import UserError
from echelon.core.spec import Spec
from echelon.core.tuning import ALL, TUNINGS, read_tuning
from echelon.models.keras_model import KerasModule
from echelon.models.still_buffers import keep_still
from echelon.models.trial import blank_copy
from echelon.models.tuning.base import Call, TuningKind
from echelon.models.weights import head_names, tied_names


@dataclass(frozen=True)
class Tuned:
    """What a plan has made of a model.

    Attributes:
        words: how much is trained.
        rates: factors of the learning rate by name of parameter; 1 for those left out, empty: none was asked for.
        frozen: names of parameters and statistics that stay as they are; not those that the model itself had frozen,
            which its own code may move.
        still: names of the modules whose statistics these are.
    """

    words: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    still: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TuningPlan:
    """What is trained of a model, and at which rates.

    The head is trained with every kind that chooses parameters; what kinds choose is joined, what they freeze is taken
    out of it.

    Attributes:
        text: as described.
        kinds: its parts.
        trains_norm: whether BatchNorm whose parameters are frozen takes in the statistics of new batches.
        epoch: since which it is as it is, counted from 0: kinds that begin later are not looked at.
        specs: the kinds as described, in their order.
    """

    text: str = ALL
    kinds: tuple[TuningKind, ...] = ()
    trains_norm: bool = False
    epoch: int = 0
    specs: tuple[Spec, ...] = ()

    @property
    def changes_later(self) -> bool:
        """Whether more is trained from an epoch on."""
        return any(kind.begins for kind in self.kinds)

    def at(self, epoch: int) -> TuningPlan:
        """Return the plan as it is in an epoch, counted from 0."""
        return replace(self, epoch=max((kind.begins for kind in self.kinds if kind.begins <= epoch), default=0))

    @property
    def until(self) -> int:
        """The epoch, counted from 0, from which on more is trained than now; 0: none."""
        return min((kind.begins for kind in self.kinds if kind.begins > self.epoch), default=0)

    @property
    def last(self) -> TuningPlan:
        """The plan as it is in the end: when most is trained."""
        return self.at(max((kind.begins for kind in self.kinds), default=0))

    @property
    def changes_nothing(self) -> bool:
        """Whether the model is trained as it is."""
        return self.text == ALL

    def apply(self, model: nn.Module, rebuilt: Set[str] | None = None, call: Call | None = None) -> Tuned:
        """Change the structure and freeze what is not trained, in place; returns what that is, and rates.

        What the model itself has frozen stays so.

        Args:
            rebuilt: what `rebuild` has returned, where it was called before; None: it was not.
            call: runs the model's forward; None: there is nothing to call it with, and no layer is left out for it.

        Raises:
            UserError: a kind does not fit the model, or nothing is left to train.
        """
        new = self.rebuild(model) if rebuilt is None else rebuilt
        head = head_names(model)  # before adapters are in it
        if not any(kind.trains == "new" for kind in self.kinds):  # what is loaded is no head that is new
            head -= tied_names(model).keys()
        for kind in self.kinds:
            kind.prepare(model, call)
        chosen = [names for kind in self.kinds if (names := kind.trained(model)) is not None]
        frozen = {name for kind in self.kinds for name in kind.frozen(model)}
        named = dict(model.named_parameters(remove_duplicate=False))
        wanted = set().union(*chosen, head) if chosen else set(named)
        moving = self._thawed((wanted | new) - frozen, model)
        trained = {id(p) for name, p in named.items() if name in moving and p.requires_grad}
        if not trained:
            raise UserError(f"--tune {self.text} leaves nothing of {type(model).__name__} to train")
        stays = {name for name, p in named.items() if p.requires_grad and id(p) not in trained}
        for parameter in named.values():
            parameter.requires_grad_(id(parameter) in trained)
        still = {} if self.trains_norm else _keep_statistics(model)
        rates: dict[str, float] = {}
        for kind in self.kinds:
            for name, rate in kind.rates(model).items():
                rates[name] = rates.get(name, 1.0) * rate
        unique = {id(p): p for p in named.values()}.values()
        count, total = (sum(p.numel() for p in unique if p.requires_grad or every) for every in (False, True))
        words = f"tuning {self.text}: {count:,} of {total:,} parameters are trained"
        if chosen and (head := head & moving):
            words += f", with the head ({', '.join(sorted(_owners(head)))})"
        statistics = {f"{path}.{name}" for path, names in still.items() for name in names}
        return Tuned(words, rates, frozenset(stays | {name.removeprefix(".") for name in statistics}), frozenset(still))

    def never_trained(self, model: nn.Module) -> Set[str]:
        """Return the names of the parameters that stay as they are to the run's end, tried on a model without memory.

        Raises:
            UserError: a kind does not fit the model.
        """
        if self.changes_nothing or self.rebuilds or isinstance(model, KerasModule):
            return frozenset()
        if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            return frozenset()
        return self.last.apply(blank_copy(model)).frozen & dict(model.named_parameters(remove_duplicate=False)).keys()

    def _thawed(self, moving: set[str], model: nn.Module) -> set[str]:
        """Return what is trained in this epoch: with what kinds have thawed until then.

        Raises:
            UserError: one thaws what is trained before it.
        """
        now = moving
        for kind in sorted((kind for kind in self.kinds if kind.begins), key=lambda kind: kind.begins):
            thawed = kind.thawed(model)
            if thawed <= moving:
                raise UserError(
                    f"--tune {self.text}: nothing is frozen that epoch {kind.begins + 1} could unfreeze: join it to a "
                    "kind that freezes, as in head+unfreeze(epoch=3)"
                )
            moving = moving | thawed
            now = moving if kind.begins <= self.epoch else now
        return now

    @property
    def rebuilds(self) -> bool:
        """Whether the model has other modules than it was built with."""
        return any(kind.rebuilds for kind in self.kinds)

    def rebuild(self, model: nn.Module) -> Set[str]:
        """Give a model that is built by name the modules that it was trained with, in place.

        Returns:
            the names of parameters that are new with them.

        Raises:
            UserError: they cannot be made.
        """
        before = {id(parameter) for parameter in model.parameters()}
        for kind in self.kinds:
            kind.rebuild(model)
        return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in before}

    def rebuilds_as(self, other: TuningPlan) -> bool:
        """Whether both put the same modules in the same places."""
        return self._rebuilding == other._rebuilding

    @property
    def rebuilding_text(self) -> str:
        """The kinds that put modules in, as described."""
        return "+".join(str(spec) for spec, kind in zip(self.specs, self.kinds, strict=True) if kind.rebuilds)

    @property
    def _rebuilding(self) -> list[TuningKind]:
        return [kind for kind in self.kinds if kind.rebuilds]

    def plain(self, weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
        """Return weights, any shape, for the model as it is without tuning, from those that were trained.

        Args:
            model: without tuning, or with it.
        """
        for kind in reversed(self.kinds):
            weights = kind.plain(weights, model)
        return weights


UNTUNED = TuningPlan()
StartTuning = Callable[[], TuningPlan | None]
"""Reads what was trained of the run whose weights another one starts from: a run that goes on may have lost it."""


def of_no_run() -> TuningPlan | None:
    """Return None: no run's weights are started from."""
    return None


UNCHANGED = Tuned()


def tuning_plan(text: str, frozen_norm: str) -> TuningPlan:
    """Return the plan that `--tune` and `--frozen-norm` describe.

    Raises:
        UserError: a kind does not exist, or a setting is impossible.
    """
    specs = tuple(read_tuning(text))
    return TuningPlan(text, tuple(TUNINGS.bind(spec) for spec in specs), frozen_norm == "train", specs=specs)


def _owners(names: Set[str]) -> set[str]:
    """Return the names of the modules that hold parameters, or those of parameters that the model itself holds."""
    return {name.rpartition(".")[0] or name for name in names}


def _keep_statistics(model: nn.Module) -> dict[str, Set[str]]:
    """Keep BatchNorm whose parameters are all frozen in evaluation mode, in place.

    Returns:
        the names of what stays in them, by the module's name.

    One without parameters is frozen where those that the model declares last before it are.
    """
    still: dict[str, Set[str]] = {}
    moves = next((parameter.requires_grad for parameter in model.parameters()), True)
    for name, module in model.named_modules():
        if isinstance(module, KerasModule):
            still[name] = module.keep_statistics()
        own = list(module.parameters(recurse=False))
        moves = any(parameter.requires_grad for parameter in own) if own else moves
        if getattr(module, "running_mean", None) is not None and not moves:
            module.register_forward_pre_hook(_in_evaluation)
            still[name] = {own_name for own_name, _ in module.named_buffers(recurse=False)}
    for name, names in still.items():
        keep_still(model.get_submodule(name), names)
    return still


def _in_evaluation(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    module.training = False
