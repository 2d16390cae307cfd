"""What a rank trains on what: the data's facts, the task, the caller's model, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from echelon.data.base import DataInfo
from echelon.models import LoadedWeights
from echelon.models.tuning.plan import UNCHANGED, UNTUNED, StartTuning, Tuned, TuningPlan, of_no_run
from echelon.ps.table import RowStart
from echelon.tasks import nest
from echelon.tasks.base import Task
from echelon.tasks.nest import Nest
from echelon.trainer.inputs import any_inputs


@dataclass(frozen=True)
class Work:
    """What is trained on what.

    Attributes:
        info: of the data.
        task: fitted to it.
        user_model: the caller's own module, in place of the described one.
        example: two samples' inputs of any values, the same on every rank; None: made as `info` says.
        tuning: what is trained of it.
        start_tuning: returns what was trained of the run whose weights it starts from (`ResolvedRun.start_tuning`).
        loaded: what became of the weights that it starts from, each time that it is built.
        steps: of the run; 0: not known.
        tunings: what tuning has made of the model, likewise.
        row_starts: how rows of tables begin that servers make, by name, likewise: the model is built without them;
            None: it is built with all rows.
        least_samples: that a rank computes with at once in some step; 0: not known.
        usual_samples: that a rank computes with at once in a full batch; 0: not known.
        balances: parts of a batch follow the ranks' speed, and a rank may get fewer than these.
        needs_several: whether it cannot train on one sample alone, likewise, where that was tried.
        example_targets: of the two samples, where data is at hand; None: it is not, as in a rehearsal.
        oddities: what its outputs for these look like that its user can hardly mean, each time that it is tried.
    """

    info: DataInfo
    task: Task
    user_model: nn.Module | None = None
    example: Nest = None
    tuning: TuningPlan = UNTUNED
    loaded: list[LoadedWeights] = field(default_factory=list)
    steps: int = 0
    tunings: list[Tuned] = field(default_factory=list)
    row_starts: dict[str, RowStart] | None = None
    example_targets: Nest = None
    least_samples: int = 0
    usual_samples: int = 0
    oddities: list[str] = field(default_factory=list)
    balances: bool = False
    needs_several: list[bool] = field(default_factory=list)
    start_tuning: StartTuning = of_no_run

    @property
    def tuned(self) -> Tuned:
        """What tuning has made of the model that was built last."""
        return self.tunings[-1] if self.tunings else UNCHANGED

    @property
    def notes(self) -> list[tuple[str, str]]:
        """What a user has to know of it, with the name of its event."""
        tuned = [("tuning", self.tuned.words)] if self.tunings else []
        return [*tuned, *(("outputs", odd) for odd in self.oddities[:1])]

    def inputs(self, like: Tensor) -> Nest:
        """Return the example, alike on all ranks, drawn without the run's generators, where `like` (any shape) is."""
        example = any_inputs(self.info, 2, like.dtype) if self.example is None else self.example
        return nest.map_leaves(
            lambda leaf: leaf.to(like.device, like.dtype) if leaf.is_floating_point() else leaf.to(like.device), example
        )
