"""freeze: what a pattern matches is not trained: freeze("blocks.[0-3]"), freeze("patch_embed+**.norm1").

It takes parameters out of what the other kinds choose. A pattern is that of --tensor-plan: `*` stands for any part of a
name between two dots, `**` for any number of parts.

Helps: To keep a part, such as an encoder, unchanged while others are tuned.
Costs: nothing: frozen parameters have no gradient, no optimizer state and no traffic.
Needs: a pattern that matches something; `echelon train --dry-run` with one that does not lists the names.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from echelon.models.tuning.base import TuningKind, matching


@dataclass(frozen=True)
class Freeze(TuningKind):
    """Settings of `freeze`.

    Attributes:
        pattern: names of modules, with everything in them, or of parameters; joined by `+`.
    """

    trains: ClassVar[str] = "nothing"
    pattern: str

    def frozen(self, model: nn.Module) -> Set[str]:
        """Return the names that it matches.

        Raises:
            UserError: it matches none.
        """
        return matching(model, self.pattern, f'freeze("{self.pattern}")')


TUNING = Freeze
