"""A model as a chain of steps, each the only user of the one before's output: where a pipeline may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.core.errors import UserError
from echelon.core.hints import Style

_SPLITTING = ("column", "channels_out")
_JOINING = ("row", "channels_in", "vocabulary")


@dataclass(frozen=True)
class ChainStep:
    """One step of a forward pass.

    Attributes:
        name: of a module below the root, `:method` of the root, or `=flatten` or `=relu`.
        owns: names of the modules and of the root's own parameters and buffers that it uses.
        numel: numbers in the parameters that it uses.
        function: what a `:method` step does that the root has no method for.
    """

    name: str
    owns: tuple[str, ...]
    numel: int
    function: Callable[[Any, Any], Any] | None = None


def is_under(name: str, owned: str) -> bool:
    """Whether a dotted name is another, or inside it.

    >>> is_under("blocks.1.norm", "blocks.1"), is_under("blocks.10", "blocks.1")
    (True, False)
    """
    return name == owned or name.startswith(f"{owned}.")


def numel_of(model: nn.Module, owned: tuple[str, ...]) -> int:
    """Return the numbers in the parameters that have one of these names, or are inside of it."""
    return sum(p.numel() for name, p in model.named_parameters() if any(is_under(name, each) for each in owned))


@dataclass(frozen=True)
class Unit:
    """Steps that are never cut apart: one with parameters and those without any that follow it.

    The first unit also has the steps without parameters before it. Where tensor parallelism splits what goes from one
    step to the next, they are of one unit.
    """

    name: str
    steps: tuple[ChainStep, ...]


def units_of(steps: tuple[ChainStep, ...], styles: Mapping[str, Style] | None = None) -> tuple[Unit, ...]:
    """Return what a stage is made of; each has parameters, so that each stage has some.

    Args:
        styles: of tensor parallelism, by module, in forward order.
    """
    groups = _groups(steps, styles or {})
    return tuple(Unit(next(s.name for s in group if s.numel), tuple(group)) for group in groups)


def _groups(steps: tuple[ChainStep, ...], styles: Mapping[str, Style]) -> Iterator[list[ChainStep]]:
    group: list[ChainStep] = []
    split = False  # whether each rank of tp has a part of what the group gives
    for step in steps:
        if step.numel and any(each.numel for each in group) and not split:
            yield group
            group = []
        group.append(step)
        split = _gives_parts(step, styles, split)
    if any(each.numel for each in group):
        yield group


def _gives_parts(step: ChainStep, styles: Mapping[str, Style], takes_parts: bool) -> bool:
    """Whether what a step gives is split over the ranks of tensor parallelism, by the last layer in it that says so."""
    for name, style in reversed(list(styles.items())):
        if style.name in (*_SPLITTING, *_JOINING) and any(is_under(name, owned) for owned in step.owns):
            return style.name in _SPLITTING
    return takes_parts


def check_tied(model: nn.Module, stages: tuple[tuple[ChainStep, ...], ...]) -> None:
    """Refuse a parameter that two stages would share: each would keep and train a copy of its own.

    Raises:
        UserError: names the two, and what to do.
    """
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = _stage_of(name, stages)
        first, where = seen.setdefault(id(parameter), (name, stage))
        if where != stage:
            raise UserError(
                f"--parallel pp: {name} and {first} of {type(model).__name__} are one tensor, used by stages {stage} "
                f"and {where}: build the model with untied weights, or use fsdp=N instead"
            )


def _stage_of(name: str, stages: tuple[tuple[ChainStep, ...], ...]) -> int:
    for i, steps in enumerate(stages):
        if any(is_under(name, owned) for step in steps for owned in step.owns):
            return i
    raise AssertionError(f"{name} belongs to no stage")
