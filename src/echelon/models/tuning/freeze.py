"""freeze: what a pattern of names matches stays as it is: freeze("blocks.[0-3]"), freeze("patch_embed+**.norm1").

A pattern is that of --tensor-plan: `*` is any part of a name between two points, `**` any number of them.

Helps: to keep a part that others are tuned around, such as an encoder.
Needs: a pattern that matches something; `echelon train --dry-run` with one that does not lists what there is.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import nn

from echelon.core.errors import UserError
from echelon.models.tuning.base import TuningKind, below


@dataclass(frozen=True)
class Freeze(TuningKind):
    """Settings of `freeze`.

    Attributes:
        pattern: of modules, with all that is in them, or of parameters.
    """

    pattern: str

    def frozen(self, model: nn.Module) -> Set[str]:
        """Return the names that it matches.

        Raises:
            UserError: it matches none.
        """
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        found = {name for name in names for pattern in self.pattern.split("+") if below(name, pattern.strip())}
        if not found:
            tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(f'--tune freeze("{self.pattern}"): it matches nothing; {type(model).__name__} has {tops}')
        return found


TUNING = Freeze
