"""The closing words: what the run reached, what bounds it, what to change, who died and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.core.own import continuing
from echelon.core.rate_search import STEPS
from echelon.core.task import TaskFacts
from echelon.core.units import format_metric, format_seconds, many, sentence_case
from echelon.records.kinds import Evaluation
from echelon.reporting.report.incidents import MOST_SLOW_STEPS
from echelon.reporting.report.records import StoredEvaluation
from echelon.reporting.report.summary import Summary
from echelon.reporting.report.whole_run import BEFORE_STEPS, OTHER, WholeRun

_MOST_ADVICE = 3
_LEAST_PAUSE = 0.001


def closing_words(summary: Summary) -> list[str]:
    """Return sentences for the terminal and the page, the most important first. Plain text, unescaped."""
    words = [_outcome(summary)]
    if summary.searched:  # nothing was trained: its speed, its last loss and the like are nothing to conclude from
        return words
    words += _accuracy(summary)
    words += whole_run_words(summary.whole, summary.waits_for_servers)
    words += _bound(summary) + list(summary.notes)
    words += [a.sentence() for a in summary.advice[:_MOST_ADVICE]]
    words += [i.sentence(summary.step_s) for i in summary.incidents]
    if summary.bad_images:
        n = summary.bad_images
        words.append(f"{many(n, 'sample')} could not be read or used, and {'were' if n > 1 else 'was'} left out.")
    if n := summary.bad_losses:
        lost = f"{n} batches" if n > 1 else "a batch"
        words.append(f"The loss of {lost} was not finite: left out of training.")
    return words


def whole_run_words(whole_run: WholeRun | None, waits_for_servers: bool = False) -> list[str]:
    """Say how long a run took from its first step to its last result, and which share steps and each pause have.

    Args:
        waits_for_servers: one worker pauses while the others go on.
    """
    if whole_run is None or whole_run.seconds <= 0:
        return []
    shares_of = whole_run.shares(_LEAST_PAUSE)
    ordered = sorted(shares_of, key=lambda name: name == OTHER)  # what nothing explains comes last
    told = [f"{pause_name(name)} {shares_of[name]:.1%}" for name in ordered]
    twice = -whole_run.pauses.get(OTHER, 0.0) / whole_run.seconds
    less = f", less {twice:.1%} that clocks count twice" if twice > _LEAST_PAUSE else ""
    mean = " (means of the workers)" if waits_for_servers and told else ""
    shares = f"{', '.join(told)}{mean}{less}".removeprefix(", ")
    took = format_seconds(whole_run.seconds)
    paused = f": steps {whole_run.steps_s / whole_run.seconds:.1%}, {shares}" if shares else ", nearly all in steps"
    return [f"From the first step to the last evaluation or checkpoint it took {took}{paused}."]


def pause_name(name: str) -> str:
    """Return the words for a pause."""
    return {BEFORE_STEPS: "preparing the first step", OTHER: "not accounted for"}.get(name, name)


def wilson_interval(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share observed in n independent samples (Wilson 1927).

    Centre (p + z^2/2n) / (1 + z^2/n), half width z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).
    """
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def _outcome(s: Summary) -> str:
    after = f"after {s.steps} step{'s' * (s.steps != 1)}" + (
        f" ({s.epochs:g} epoch{'s' * (s.epochs != 1)})" if s.epochs else ""
    )
    if s.searched:
        after = f"a search of {many(min(s.steps, STEPS), 'step')}"
    known = {
        "completed": f"Completed {after} in {_took(s)}",
        "stopped": f"Stopped {after} and {_took(s)}; `{continuing(s.folder or 'RUN', s.objects)}` continues it",
        "failed": f"Failed {after} and {_took(s)}",
        "refused": f"Refused {after}" if s.steps else "Refused before the first step",
        "unfinished": f"Not ended {after}" if s.steps else "No step was recorded",
    }
    said = known.get(s.status, f"Ended as {s.status!r} {after}")
    return f"{said}: {s.message.rstrip('.')}." if s.message else f"{said}."


def _took(s: Summary) -> str:
    """Return a run's time; of several commands it is their sum, which no clock beside the last one shows."""
    took = format_seconds(s.seconds)
    return (
        took if s.commands < 2 else f"{took} over {s.commands} commands ({format_seconds(s.last_command_s)} the last)"
    )


def _accuracy(s: Summary) -> list[str]:
    words = []
    if s.nonfinite_step is not None:
        words.append(f"The loss is not finite from step {s.nonfinite_step} on: a lower --lr, warm-up or clipping.")
    primary = s.task.primary
    value = s.metrics.get(primary.name)
    if value is None:
        unknown = f"No evaluation was recorded: nothing is known of its {primary.noun or primary.title}."
        return [*words, unknown] if s.steps else words
    said = f"{sentence_case(primary.title)} {format_metric(value)}"
    if s.eval_samples:
        said += f" on {samples_of_primary(s)}"
    if s.eval_samples and primary.percent:
        low, high = wilson_interval(value, s.eval_samples)
        said += f" (95% interval {format_metric(low)} to {format_metric(high)})"
    if s.eval_step is not None and s.eval_step < s.steps:
        said += f", after step {s.eval_step}: no later one was evaluated"
    words.append(f"{said}.")
    chosen_by = s.validation.get(primary.name)
    if s.tested and chosen_by is not None:
        words.append(
            "That is of the test set; the checkpoint was chosen by validation data, with "
            f"{format_metric(chosen_by)} there."
        )
    if s.best is not None and not s.tested and format_metric(s.best) != format_metric(value):
        words.append(
            f"The best was {format_metric(s.best)} at step {s.best_step}, whose checkpoint is kept: the last is not "
            "the best one."
        )
    return words


def evaluation_words(stored: StoredEvaluation, evaluations: Sequence[Evaluation], task: TaskFacts) -> str:
    """Say of what data, and of which checkpoint, a page shows what the task has made of an evaluation."""
    if stored.step is None:
        return "Of the validation data, at the best checkpoint."
    samples = next((each.samples for each in reversed(evaluations) if each.step == stored.step), 0)
    value = stored.metrics.get(task.primary.name)
    reached = "" if value is None else f" ({task.primary.title} {format_metric(value)})"
    of = f", {many(samples, 'sample')}," if samples else ""
    return f"Of the validation data{of} at step {stored.step:,}, the best checkpoint{reached}."


def samples_of_primary(s: Summary) -> str:
    """Say of how many samples the primary metric is: `1,000 samples`; `250 of 1,000 samples` where they are written."""
    count = s.task.samples_of(s.task.primary.name, s.eval_samples)
    return f"{count:,} of {s.eval_samples:,} samples" if count < s.eval_samples else many(count, "sample")


def _bound(s: Summary) -> list[str]:
    if s.bound.kind == "unknown" or s.step_s is None:
        return []
    share, step = f"{s.bound.share:.0%}", format_seconds(s.step_s)
    slow = s.bound.slow
    if slow is not None:
        words = [
            f"A slow rank bounds this run: rank {slow.rank} works {slow.ratio:.2f}x as long as the median of the "
            f"others, mostly in {slow.phase}; they wait for it, {share} of a step of {step} is lost."
            f" {slow.evidence}"
        ]
    else:
        names = {
            "input": "Loading data",
            "compute": "Computing (forward, backward and update)"
            if not s.axes_in_passes
            else f"The time of forward, backward and update, the messages of {' and '.join(s.axes_in_passes)} among "
            "them (they are not told apart),",
            "communication": "Waiting for servers" if s.waits_for_servers else "Communication",
        }
        idle = (
            "Waiting for a batch (while others evaluate, begin or end)"
            if s.waits_for_servers
            else "What is in no phase"
        )
        words = [f"{names.get(s.bound.kind, idle)} bounds this run: {share} of a step of {step}."]
        words += _rank_words(s)
    return words + _slow_steps(s)


def _slow_steps(s: Summary) -> list[str]:
    if s.slow_steps:
        worst, n = s.slow_steps[0], len(s.slow_steps)
        more = f"At least {n - 1}" if n >= MOST_SLOW_STEPS else str(n - 1)
        others = f" {more} more took over 3 times the median." if n > 1 else ""
        return [
            f"The slowest step ({worst.step}) took {format_seconds(worst.seconds)}; the median "
            f"of the steps before it was {format_seconds(worst.median_s)}: {worst.cause}.{others}"
        ]
    if s.outlier_windows:
        n = s.outlier_windows
        return [f"{n} window{'s' * (n > 1)} of steps took more than twice the median."]
    return []


def _rank_words(s: Summary) -> list[str]:
    slowest = s.slowest_rank
    if slowest is None or not slowest.is_slow:
        return []
    longer = f"Rank {slowest.rank} works {slowest.ratio:.2f}x as long as the median of the others."
    return [f"{longer} {slowest.evidence}"]
