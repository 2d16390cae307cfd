"""What a run has to know of an optimizer of the user's own, found out by steps on a few small tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.optim.own import FLAG, OptimizerFactory, construct, has_sgd_momentum, takes_weight_decay
from echelon.optim.traits import Reach

DECLARED = "elementwise"
"""An attribute of the class that says what the probe would find out: `elementwise = True`."""

_LR = _DECAY = 0.01
_STEPS = 24  # what acts at every tenth step acts
_SCALES = (1.0, 0.1, 100.0, 1e-3, 1.0, 1e4)  # of gradients: what clips, clips
_PLAIN = (Tensor, bool, int, float, str, type(None))

Values = Sequence[Tensor]


@dataclass(frozen=True)
class OwnTraits:
    """What an optimizer is.

    Attributes:
        reach: what the update of an element depends on.
        momentum: as its groups have it by that name; 0 without.
        is_sgd: that is SGD's, as far as can be told.
        draws: its steps draw random numbers.
        eager: it has state before the first step.
        in_state: all that its steps depend on is in `state`, nothing of it in groups.
    """

    reach: Reach
    momentum: float = 0.0
    draws: bool = False
    eager: bool = False
    in_state: bool = True
    is_sgd: bool = True


def probe(factory: OptimizerFactory, name: str) -> OwnTraits:
    """Find out what an optimizer is; deterministic, so that every process of a run finds the same.

    Whole tensors are trained together, alone, and as pieces, each in an optimizer of its own, in float64: the update
    is by element where pieces give what whole tensors do. What the class declares (`DECLARED`) is taken instead.

    Args:
        name: how the run's description names it.

    Raises:
        UserError: it cannot be built, or not be trained and resumed with.
    """
    trial = _Trial(factory, name)
    with torch.random.fork_rng(devices=[]):
        optimizer = trial.build(trial.values())
        elementwise = getattr(optimizer, DECLARED, None)
        is_sgd = has_sgd_momentum(optimizer)
        momentum = max(float(group.get("momentum") or 0.0) for group in optimizer.param_groups)
        try:
            traits = _probed(trial)
        except UserError:
            raise
        except Exception as error:
            if elementwise is not None:  # such as a step that only a GPU can take
                return OwnTraits(Reach.ELEMENT if elementwise else Reach.TENSOR, momentum, is_sgd=is_sgd)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            raise UserError(
                f"{FLAG} {name}: its step(), without a closure, failed on small tensors in float64 on the CPU "
                f"({reason}); a class that says elementwise = True or False is not tried out"
            ) from error
    traits = replace(traits, momentum=momentum, eager=bool(optimizer.state), is_sgd=is_sgd)
    if elementwise is None:
        return traits
    return replace(traits, reach=Reach.ELEMENT if elementwise else max(traits.reach, Reach.TENSOR))


def _probed(trial: _Trial) -> OwnTraits:
    matrix, vector = trial.values()
    together, again = trial.train([matrix, vector]), trial.train([matrix, vector], seed=1)
    draws = not _is_same(together, again)
    trial.check_still([matrix, vector])
    resumed, in_state = trial.resumes(together)
    if not (resumed or draws):
        raise UserError(
            f"{FLAG} {trial.name}: a resumed run would go on otherwise: what its steps depend on has to be in "
            "self.state[parameter] or self.param_groups, which its state_dict() holds"
        )
    reach = Reach.MODEL
    if _is_same(together, [*trial.train([matrix]), *trial.train([vector], first=1)]):
        by_rows = [trial.train([matrix[rows]], rows=rows)[0] for rows in (slice(0, 40), slice(40, None))]
        flat = [trial.train([matrix.flatten()[cut]], cut=cut)[0] for cut in (slice(0, 5000), slice(5000, None))]
        by_element = _is_same(together[:1], [torch.cat(by_rows)])
        by_element = by_element and _is_same(together[:1], [torch.cat(flat).view_as(matrix)])
        reach = Reach.ELEMENT if by_element else Reach.TENSOR
    return OwnTraits(reach, draws=draws, in_state=in_state or draws)


@dataclass(frozen=True)
class _Trial:
    """Values and gradients that an optimizer is tried out on."""

    factory: OptimizerFactory
    name: str
    shapes: tuple[tuple[int, ...], ...] = ((136, 144), (144,))  # what begins at 128 rows and columns begins
    gradients: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        for i in range(_STEPS):
            scale = _SCALES[i % len(_SCALES)]
            drawn = [torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in self.shapes]
            self.gradients.append([scale * gradient for gradient in drawn])

    def values(self) -> list[Tensor]:
        """Return what training begins with: a matrix (136, 144) and a vector (144,), in float64."""
        draw = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for shape in self.shapes]

    def build(self, values: Values) -> torch.optim.Optimizer:
        """Build the optimizer for copies of values, all with weight decay where it has any."""
        parameters = [nn.Parameter(value.detach().clone()) for value in values]
        decay = {"weight_decay": _DECAY} if takes_weight_decay(self.factory) else {}
        return construct(self.factory, self.name, [{"params": parameters, **decay}], _LR)

    def train(
        self, values: Values, seed: int = 0, first: int = 0, rows: slice = slice(None), cut: slice | None = None
    ) -> list[Tensor]:
        """Return values after all steps.

        Args:
            seed: of the generator, for what draws.
            first: which of the gradients is the first value's.
            rows, cut: which part of each gradient, or of its elements in a row, is taken.
        """
        torch.manual_seed(seed)
        optimizer = self.build(values)
        for of_step in self.gradients:
            parts = [gradient[rows] if cut is None else gradient.flatten()[cut] for gradient in of_step[first:]]
            _step(optimizer, parts)
        return _values(optimizer)

    def check_still(self, values: Values) -> None:
        """Refuse a step that gives parameters other memory, or that torch's way to save state would make (UserError).

        Where there is no state, torch takes a step at the learning rate 0 to make it.
        """
        optimizer = self.build(values)
        before = [parameter.data_ptr() for parameter in _parameters(optimizer)]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in _parameters(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(closure=None)
        if not optimizer.state and not _is_same(_values(optimizer), values):
            raise UserError(
                f"{FLAG} {self.name}: it moves parameters at lr=0 without gradients, as checkpoints are written: "
                "multiply all of an update, weight decay too, by lr"
            )
        _step(optimizer, self.gradients[0])
        if before != [parameter.data_ptr() for parameter in _parameters(optimizer)]:
            raise UserError(
                f"{FLAG} {self.name}: its step gives parameters other memory; change them in place, as with p.add_(...)"
            )

    def resumes(self, together: Values) -> tuple[bool, bool]:
        """Return whether training goes on as it was from its state dict, and from the dict's `state` alone.

        Raises:
            UserError: the state holds what no checkpoint does.
        """
        optimizer = self.build(self.values())
        for gradients in self.gradients[: _STEPS // 2]:
            _step(optimizer, gradients)
        saved = copy.deepcopy(optimizer.state_dict())
        for entry in saved["state"].values():
            for key, value in entry.items():
                if not isinstance(value, _PLAIN):
                    raise UserError(
                        f"{FLAG} {self.name}: its state {key!r} is a {type(value).__name__}, which a checkpoint does "
                        "not hold: keep tensors and numbers"
                    )
        ends = []
        for with_groups in (True, False):
            fresh = self.build(_values(optimizer))
            fresh.load_state_dict(
                copy.deepcopy(saved if with_groups else {**fresh.state_dict(), "state": saved["state"]})
            )
            for gradients in self.gradients[_STEPS // 2 :]:
                _step(fresh, gradients)
            ends.append(_is_same(_values(fresh), together))
        return ends[0], ends[1]


def _step(optimizer: torch.optim.Optimizer, gradients: Values) -> None:
    for parameter, gradient in zip(_parameters(optimizer), gradients, strict=False):
        parameter.grad = gradient.clone()
    optimizer.step()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in _parameters(optimizer)]


def _is_same(values: Values, others: Values) -> bool:
    return all(
        torch.allclose(value, other, rtol=1e-9, atol=1e-12, equal_nan=True)
        for value, other in zip(values, others, strict=True)
    )
