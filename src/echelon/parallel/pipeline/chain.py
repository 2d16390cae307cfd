"""A model as a chain of steps, each the only user of the one before's output: where a pipeline may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints, Style, matching

FUNCTIONS = ("=flatten", "=relu")
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


def declares_chain(model: nn.Module, hints: Hints | None) -> bool:
    """Whether a model says that its forward pass is a chain: by its family, or as an `nn.Sequential`."""
    declared = hints is not None and hints.chain is not None
    return declared or (isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward)


def no_chain(model: str, fix: str = "", reason: str = "") -> UserError:
    """Build the refusal of a model that is none, for a reason, as `fix` may make it one."""
    because = f" ({reason})" if reason else ""
    return UserError(
        f"--parallel pp: the forward pass of {model} is not known to be a chain of blocks{because}: {fix}use fsdp=N or "
        "tp=N instead"
    )


MAKES_CHAIN = (
    "make the model an nn.Sequential, give its class `structure = echelon.models.Hints(chain=...)` beside its forward, "
    "or "
)


def find_chain(model: nn.Module, hints: Hints | None) -> tuple[ChainStep, ...]:
    """Return a model's forward pass as a chain: as it declares, or as a trace of it shows (see `traced_chain`).

    One that a trace shows is to be tried before it is used, by `check_chain`.

    Raises:
        UserError: it is none, a parameter belongs to no step or to two, or a declaration names what the model does
            not have.
    """
    if hints is not None and hints.chain is not None:
        steps = _declared(model, hints.chain, hints)
    elif declares_chain(model, hints):
        steps = _declared(model, ("*",), Hints())
    else:
        steps = _traced(model)
    _check_owners(model, steps)
    return steps


def _traced(model: nn.Module) -> tuple[ChainStep, ...]:
    from echelon.parallel.pipeline.traced_chain import NoChain, trace_chain  # it makes steps of the kind above

    try:
        return trace_chain(model)
    except NoChain as error:
        raise no_chain(type(model).__name__, MAKES_CHAIN, str(error)) from error


def _declared(model: nn.Module, chain: tuple[str, ...], hints: Hints) -> tuple[ChainStep, ...]:
    modules = dict(model.named_modules())
    steps: list[ChainStep] = []
    for entry in chain:
        if entry in FUNCTIONS:
            steps.append(ChainStep(entry, (), 0))
        elif entry.startswith(":"):
            function = hints.functions.get(entry)
            if function is None and not callable(getattr(model, entry[1:], None)):
                raise UserError(f"the chain of {type(model).__name__} names {entry}, a method that it does not have")
            # A family declares more than each of its members has.
            owned = tuple(name for name in hints.glue.get(entry, ()) if _has(model, name))
            steps.append(ChainStep(entry, owned, numel_of(model, owned), function))
        else:
            names = [name for name in modules if name]
            steps += [ChainStep(name, (name,), numel_of(model, (name,))) for name in matching([entry], names)]
    if not steps:
        raise UserError(f"the chain of {type(model).__name__}, {', '.join(chain)}, names no module that it has")
    return tuple(steps)


def _has(model: nn.Module, owned: str) -> bool:
    sources = (model.named_modules(), model.named_parameters(remove_duplicate=False), model.named_buffers())
    return any(is_under(name, owned) for source in sources for name, _ in source)


def is_under(name: str, owned: str) -> bool:
    """Whether a dotted name is another, or inside it.

    >>> is_under("blocks.1.norm", "blocks.1"), is_under("blocks.10", "blocks.1")
    (True, False)
    """
    return name == owned or name.startswith(f"{owned}.")


def numel_of(model: nn.Module, owned: tuple[str, ...]) -> int:
    """Return the numbers in the parameters that have one of these names, or are inside of it."""
    return sum(p.numel() for name, p in model.named_parameters() if any(is_under(name, each) for each in owned))


def _check_owners(model: nn.Module, steps: tuple[ChainStep, ...]) -> None:
    for name, _ in model.named_parameters():
        users = [step.name for step in steps if any(is_under(name, owned) for owned in step.owns)]
        if len(users) != 1:
            found = f"{len(users)} steps ({', '.join(users)})" if users else "no step"
            raise UserError(
                f"--parallel pp: {type(model).__name__}: the parameter {_all_names(model, name)} belongs to {found} of "
                f"its chain ({', '.join(step.name for step in steps[:4])}, ...), and has to belong to one: use fsdp=N "
                "or tp=N instead"
            )


def _all_names(model: nn.Module, name: str) -> str:
    """Return a parameter's name, and that it is tied to others."""
    named = dict(model.named_parameters(remove_duplicate=False))
    others = [other for other, parameter in named.items() if parameter is named[name] and other != name]
    return f"{name}, which is also {', '.join(others)}," if others else name


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
                f"and {where}: build the model with untied weights, or use fsdp=N or tp=N instead"
            )


def _stage_of(name: str, stages: tuple[tuple[ChainStep, ...], ...]) -> int:
    for i, steps in enumerate(stages):
        if any(is_under(name, owned) for step in steps for owned in step.owns):
            return i
    raise AssertionError(f"{name} belongs to no stage")
