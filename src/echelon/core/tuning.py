"""What is trained of a model, as `--tune` says: names and settings are known without importing torch."""

from __future__ import annotations

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
