"""freeze: what a pattern of names matches stays as it is: freeze("blocks.[0-3]"), freeze("patch_embed+**.norm1").

A pattern is that of --tensor-plan: `*` is any part of a name between two points, `**` any number of them.

Helps: to keep a part that others are tuned around, such as an encoder.
Needs: a pattern that matches something; `echelon train --dry-run` with one that does not lists what there is.
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
        pattern: of modules, with all that is in them, or of parameters.
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
