"""Ends of a run before its last step, and whether anything is left to do for a command that resumes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.checkpoint.files import check_whole
from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.core.own import continuing
from echelon.core.task import TaskFacts
from echelon.core.units import format_seconds
from echelon.records.events import DataGrew, StartedOver
from echelon.records.file import newest, read_records
from echelon.records.going import resumed_by
from echelon.records.kinds import EARLY_STOP, MAX_TIME, Checkpoint, End, Start, Steps
from echelon.run.machine import say
from echelon.run.outcome import Outcome, outcome_of
from echelon.trainer.folder import CHECKPOINTS_FOLDER, has_checkpoint


def failed_by(path: Path, error: UserError) -> Outcome:
    """Return how a run ended that had begun to train and could not go on: why, and what continues it."""
    continues, ended = resumed_by(path), outcome_of(path, "failed")
    is_told = continues in str(error) or "echelon resume" in str(error)
    reason = str(error) if is_told else f"{error}; mend that, then continue with `{continues}`"
    is_reported = any(str(error) in line for line in ended.words)
    return replace(ended, failure=reason, words=[*([] if is_reported else [f"Failed: {reason}."]), *ended.words])


def why_ended(reason: str, task: TaskFacts, stagnant: int, config: RunConfig, path: Path) -> str:
    """Return why a run completed before its last step, for its record; empty where it did not.

    Args:
        reason: `EARLY_STOP`, `MAX_TIME` or empty.
        stagnant: evaluations in a row without improvement.
    """
    if reason == EARLY_STOP:
        return f"stopped early: no better {task.primary.title} in {stagnant} evaluation{'s' * (stagnant != 1)}"
    if reason == MAX_TIME:
        return f"the time of --max-time {config.training.max_time} is used; `{resumed_by(path)}` goes on"
    return ""


def why_cut(path: Path, waited_s: float, given_s: float) -> str:
    """Return what became of a run that could not save in the time its place gives for a stop.

    Args:
        waited_s: of `given_s`, until its processes were ended.
    """
    last, saved = next(newest(path, Steps), None), next(newest(path, Checkpoint, StartedOver), None)
    until = saved.step if isinstance(saved, Checkpoint) else 0
    lost = last.step - until if last is not None else 0
    kept = f"the checkpoint of step {until} is the last one" if until else "nothing was saved"
    if lost > 0:
        kept += f", {lost} step{'s' * (lost != 1)}{' after it' * (until > 0)} {'is' if lost == 1 else 'are'} lost"
    waited, given = format_seconds(waited_s), format_seconds(given_s)
    return f"it did not end within {waited} of being asked to stop (--on gives {given}), and was ended: {kept}"


def check_checkpoints(path: Path) -> None:
    """Refuse a run of one machine whose checkpoints are all gone or damaged, before any process is started for it.

    Raises:
        UserError: the record says that there was one, or there are some and none is whole.
    """
    if has_checkpoint(path):
        check_whole(path / CHECKPOINTS_FOLDER, "best")
        return
    if next(newest(path, Checkpoint), None) is None:
        return  # nothing was saved, nothing is missing
    from echelon.trainer.saving import check_not_behind  # with torch, which would hold up what a resume says first

    check_not_behind(path, None)


@dataclass(frozen=True)
class EpochLengths:
    """How many steps a run's epochs have: fewer before its data grew.

    Attributes:
        stages: the first epoch of each, from 0, and the steps of its epochs.
    """

    stages: tuple[tuple[int, int], ...]

    def steps(self, epochs: int) -> int:
        """Return the steps of so many epochs from the beginning."""
        ends = [*(epoch for epoch, _ in self.stages[1:]), epochs]
        parts = zip(self.stages, ends, strict=True)
        return sum(max(0, min(end, epochs) - begin) * per_epoch for (begin, per_epoch), end in parts)

    def epochs(self, steps: int) -> float:
        """Return how many epochs so many steps from the beginning are."""
        begin, per_epoch = next(stage for stage in reversed(self.stages) if self.steps(stage[0]) <= steps)
        return begin + (steps - self.steps(begin)) / per_epoch


def epoch_lengths(path: Path, begun: Start) -> EpochLengths:
    """Return how long the epochs of a run are, as its record says.

    Args:
        begun: its newest start, which says how long they are now.
    """
    stages = [(0, begun.steps_per_epoch)]
    for each in read_records(path, Start, DataGrew):
        if isinstance(each, DataGrew):
            stages = [*(stage for stage in stages if stage[0] < each.epoch), (each.epoch, begun.steps_per_epoch)]
        elif isinstance(each, Start) and each.steps_per_epoch:
            stages[-1] = stages[-1][0], each.steps_per_epoch
    return EpochLengths(tuple(stages))


def nothing_left(path: Path, config: RunConfig) -> bool:
    """Whether a run has completed as long as its description says now, or stopped early, which is said.

    Raises:
        UserError: it would be shorter than what is done.
    """
    begun, last = next(newest(path, Start), None), next(newest(path, Checkpoint, StartedOver), None)
    if begun is None or not begun.steps_per_epoch or not isinstance(last, Checkpoint):
        return False
    done, lengths = last.step, epoch_lengths(path, begun)
    epochs, most, done_epochs = config.training.epochs, config.training.max_steps, lengths.epochs(done)
    if epochs < done_epochs:
        raise UserError(f"--epochs {epochs} is less than what is done: {path} has trained {done_epochs:.4g} epochs")
    if 0 < most < done:
        raise UserError(f"--max-steps {most} is less than what is done: {path} has trained {done} steps")
    end = next(newest(path, End, Start), None)
    if not isinstance(end, End) or end.status != "completed":
        return False
    if end.reason == EARLY_STOP and 0 < config.training.early_stop <= end.stagnant:
        say(
            f"{path} {end.message} (step {done}): nothing to do. To train further: "
            f"{continuing(path, begun.objects, early_stop=end.stagnant + config.training.early_stop)}, or with 0"
        )
        return True
    if done < min(lengths.steps(epochs), most or math.inf):
        return False
    no_limit = {"max_steps": 0} if most else {}
    trained = f"{done_epochs:.4g} epoch{'s' * (done_epochs != 1)}"
    say(
        f"{path} is complete ({done} steps, {trained}): nothing to do. To train further: "
        f"{continuing(path, begun.objects, epochs=math.ceil(done_epochs) + 1, **no_limit)}"
    )
    return True
