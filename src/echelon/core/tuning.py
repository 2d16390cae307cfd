"""What is trained of a model, as `--tune` says: names and settings are known without importing torch."""

from __future__ import annotations

import ast
import importlib.util

from echelon.core.errors import UserError
from echelon.core.registry import Registry
from echelon.core.spec import Spec

ALL = "all"
TUNINGS = Registry("echelon.models.tuning", "tuning", "TUNING", heavy=True)


def read_tuning(text: str) -> list[Spec]:
    """Read kinds of tuning joined by `+`, each checked.

    >>> [str(spec) for spec in read_tuning("last(2)+bias")]
    ['last(2)', 'bias']

    Raises:
        UserError: one does not exist, has other settings, or stands twice; names the nearest.
    """
    specs = TUNINGS.chain(text)
    for spec in specs:
        TUNINGS.check(spec)
    names = [spec.name for spec in specs]
    if ALL in names and len(names) > 1 and set(names) & {"head", "last", "bias", "norm"}:
        raise UserError(f"{text}: all leaves nothing for the others to choose: leave it out, or them")
    return specs


def code_of(text: str) -> list[str]:
    """Return what kinds of tuning name as `module:name`.

    >>> code_of('head+replace("blocks.*.act", mine:factory)')
    ['mine:factory']
    """
    specs = TUNINGS.chain(text)
    values = [value for spec in specs for value in (*spec.args, *(value for _, value in spec.kwargs))]
    return [value for value in values if isinstance(value, str) and ":" in value]


def rate_share(text: str) -> float:
    """Return the share of the rate from scratch that given weights are trained at, where nobody says a rate.

    A tenth where the weights themselves move: at the whole rate a few steps spoil them. Adapters, which begin at
    nothing, bear 0.3 of it, and a head alone, which is new, all.

    >>> rate_share("layer_decay(0.5)"), rate_share("lora+norm"), rate_share("lora+layer_decay(0.5)"), rate_share("head")
    (0.1, 0.1, 0.3, 1.0)
    """
    if trains_weights(text):
        return 0.1
    return 0.3 if "adapters" in _trained(text) else 1.0


def trains_weights(text: str) -> bool:
    """Whether weights that a model is given are trained, not only what is new beside them: a head, adapters.

    >>> trains_weights("all"), trains_weights("lora+head")
    (True, False)
    """
    trained = _trained(text)
    return "weights" in trained or trained <= {"nothing"}


def _trained(text: str) -> set[str]:
    constants = [TUNINGS.declaration(spec.name).constants for spec in TUNINGS.chain(text)]
    return {ast.literal_eval(each["trains"]) for each in constants}


def packages_of(text: str) -> tuple[str, ...]:
    """Return the packages that kinds of tuning need beside torch.

    >>> packages_of("lora+norm"), packages_of("head")
    (('peft',), ())
    """
    constants = [TUNINGS.declaration(spec.name).constants for spec in TUNINGS.chain(text)]
    return tuple(ast.literal_eval(each["package"]) for each in constants if "package" in each)


def check_packages(text: str) -> None:
    """Refuse a kind of tuning whose package is not there, without importing it.

    Raises:
        UserError: says how it is installed.
    """
    for package in packages_of(text):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{text} needs the package {package}: pip install 'echelon[lora]'")
