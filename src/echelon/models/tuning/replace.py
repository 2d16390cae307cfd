"""replace: your own function gets each module that a pattern matches, and returns the module that replaces it.

Example: replace("blocks.*.mlp.act", mine:factory). A pattern is that of --tensor-plan: `*` stands for any part of a
name between two dots, `**` for any number of parts. New modules are trained; the rest of the model is as the other
kinds say.

Helps: To try another activation, attention or normalisation in a given model, with its weights.
Costs: what your modules cost.
Needs: a function that can be imported: `def factory(old): return MyAttention.like(old)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from echelon.core.errors import UserError
from echelon.core.hints import matches
from echelon.core.own import find_own
from echelon.models.tuning.base import TuningKind


@dataclass(frozen=True)
class Replace(TuningKind):
    """Settings of `replace`.

    Attributes:
        pattern: names of modules; joined by `+`.
        factory: the function, as `module:name`.
    """

    pattern: str
    factory: str

    def __post_init__(self) -> None:
        if ":" not in self.factory:
            raise ValueError(f"factory {self.factory}: write module:function, importable from the current folder")

    @property
    def rebuilds(self) -> bool:
        """Return True."""
        return True

    def rebuild(self, model: nn.Module) -> None:
        """Put what the function returns in the place of each module that is meant, in place.

        Raises:
            UserError: there is no such function or no such module, or it does not return a module.
        """
        label = f'--tune replace("{self.pattern}", {self.factory})'
        make, made = find_own("--tune replace", self.factory), dict[int, nn.Module]()
        device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
        replaced = {name: model.get_submodule(name) for name in self._outermost(model, label)}
        for name, old in replaced.items():
            if id(old) not in made:
                made[id(old)] = _made(make, old, f"{label}: for {name}")
                made[id(old)].train(old.training)
                if device is not None and device.type != "meta":
                    made[id(old)].to(device)
        for name, old in replaced.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made[id(old)])

    def _outermost(self, model: nn.Module, label: str) -> list[str]:
        """Return the names that are meant, but for what lies inside another of them."""
        patterns = [each.strip() for each in self.pattern.split("+")]
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        meant = [name for name in names if any(matches(pattern, name) for pattern in patterns)]
        if not meant:
            tops = ", ".join(name for name, _ in model.named_children())
            raise UserError(f"{label}: it matches no module; {type(model).__name__} has {tops}")
        return [name for name in meant if not any(name.startswith(f"{other}.") for other in meant)]


def _made(make: object, old: nn.Module, label: str) -> nn.Module:
    if not callable(make):
        raise UserError(f"{label}: it is no function")
    try:
        new = make(old)
    except UserError:
        raise
    except Exception as error:  # the caller's code may raise any
        raise UserError(f"{label} it raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(new, nn.Module):
        raise UserError(f"{label} it returned {type(new).__name__}, not a torch.nn.Module")
    return new


TUNING = Replace
