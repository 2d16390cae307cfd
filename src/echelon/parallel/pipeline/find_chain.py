"""From a model to the chain that its forward pass is: as its family declares, or as a trace shows; else why not."""

from __future__ import annotations

from torch import nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints, matching
from echelon.parallel.pipeline.chain import ChainStep, is_under, numel_of
from echelon.parallel.pipeline.traced_chain import NoChain, trace_chain

FUNCTIONS = ("=flatten", "=relu")


def declares_chain(model: nn.Module, hints: Hints | None) -> bool:
    """Whether a model says that its forward pass is a chain: by its family, or as an `nn.Sequential`."""
    declared = hints is not None and hints.chain is not None
    return declared or (isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward)


def no_chain(model: str, fix: str = "", reason: str = "") -> UserError:
    """Build the refusal of a model that is none, for a reason, as `fix` may make it one."""
    because = f" ({reason})" if reason else ""
    return UserError(
        f"--parallel pp: the forward pass of {model} is not known to be a chain of blocks{because}: {fix}use fsdp=N "
        "instead"
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


def _check_owners(model: nn.Module, steps: tuple[ChainStep, ...]) -> None:
    for name, _ in model.named_parameters():
        users = [step.name for step in steps if any(is_under(name, owned) for owned in step.owns)]
        if len(users) != 1:
            found = f"{len(users)} steps ({', '.join(users)})" if users else "no step"
            raise UserError(
                f"--parallel pp: {type(model).__name__}: the parameter {_all_names(model, name)} belongs to {found} of "
                f"its chain ({', '.join(step.name for step in steps[:4])}, ...), and has to belong to one: use fsdp=N "
                "instead"
            )


def _all_names(model: nn.Module, name: str) -> str:
    """Return a parameter's name, and that it is tied to others."""
    named = dict(model.named_parameters(remove_duplicate=False))
    others = [other for other, parameter in named.items() if parameter is named[name] and other != name]
    return f"{name}, which is also {', '.join(others)}," if others else name
