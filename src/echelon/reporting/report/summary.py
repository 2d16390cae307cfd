"""A run in numbers: what `summary.json` holds and what the closing words are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from echelon.core.json_values import JsonObject, finite_object
from echelon.core.task import BestResult, Metric, TaskFacts
from echelon.observe.phases import PHASES
from echelon.records.events import (
    BadImageSkipped,
    CallbackError,
    DataGrew,
    Event,
    LossNotFinite,
    PeriodChanged,
    RankFailed,
    RunDiverged,
    WayPredicted,
)
from echelon.records.kinds import End, EntropyCoding, Evaluation, ServerWindow, Start, in_passes
from echelon.reporting.report.advice import Advice, Bound, RunFacts, advise, find_bound, shares_of
from echelon.reporting.report.clock import sittings
from echelon.reporting.report.communication import Communication
from echelon.reporting.report.incidents import ExplainedStep, Incident, count_restarts, find_incidents, find_slow_steps
from echelon.reporting.report.predictions import WayPrediction, predict
from echelon.reporting.report.priority import priority_notes
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import SlowRank, Timing, measure, timing_notes
from echelon.reporting.report.waterfall import Waterfall, waterfall_notes, waterfall_of
from echelon.reporting.report.whole_run import WholeRun, whole_run_of

_PERIODS_SHOWN = 4


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Seconds unless the name says otherwise; None where the record holds no answer.

    Attributes:
        metrics: of the last evaluation; where there is a test set apart, what that gave for the best checkpoint.
        tested: whether they are of such a test set.
        validation: what the validation data gave for that checkpoint; empty where there is no test set apart.
        task: whose metrics they are; `best` is of its primary one, at `best_step`.
        seconds, wall_s: of all its commands, each from the process's start to its end; where that was not recorded, to
            the last record. Pauses between a stop and a resume are left out.
        commands: that it took: one, and each that resumed it.
        last_command_s: seconds of the last one.
        startup_s: from the command to where training begins, the sum over the commands that came so far.
        objects: keywords of `echelon.resume` by which the run needs objects from Python again.
        wire_bytes_per_step: between replicas; None: not known, as where there is one that is spread over the ranks.
        inner_axes: that a replica is spread over, inside of which bytes are not counted.
        folder: of the run, as its reader named it; empty: not known.
        whole: from the first step to the end of the last evaluation or checkpoint: the figure by which runs compare.
    """

    run: str
    status: str
    message: str
    metrics: dict[str, float | None]
    tested: bool
    validation: dict[str, float | None]
    task: TaskFacts
    best: float | None
    best_step: int | None
    eval_samples: int
    eval_step: int | None
    seconds: float
    wall_s: float
    commands: int
    last_command_s: float
    startup_s: float | None
    samples_per_s: float | None
    step_s: float | None
    wire_bytes_per_step: float | None
    phases: dict[str, float]
    shares: dict[str, float]
    workers: int
    parameters: int | None
    epochs: float
    steps: int
    measured_steps: int
    restarts: int
    bad_images: int
    bad_losses: int
    nonfinite_step: int | None
    outlier_windows: int
    bound: Bound
    slowest_rank: SlowRank | None
    advice: tuple[Advice, ...]
    incidents: tuple[Incident, ...]
    notes: tuple[str, ...]
    predictions: tuple[WayPrediction, ...]
    slow_steps: tuple[ExplainedStep, ...]
    communication: Communication | None
    waterfall: Waterfall | None
    whole: WholeRun | None
    waits_for_servers: bool
    searched: bool
    objects: tuple[str, ...] = ()
    folder: str = ""
    inner_axes: tuple[str, ...] = ()

    @property
    def axes_in_passes(self) -> tuple[str, ...]:
        """Those of `inner_axes` whose messages are among forward and backward."""
        return in_passes(self.inner_axes)

    def to_json(self) -> JsonObject:
        """Plain values for `summary.json`; NaN and infinity become null."""
        values = asdict(self)
        del values["folder"]
        values[f"best_{self.task.primary.name}"] = values.pop("best")
        values["whole"] = self.whole and {
            "seconds": self.whole.seconds, "steps_s": self.whole.steps_s, "pauses": dict(self.whole.pauses),
        }  # fmt: skip
        values["served"] = values.pop("waits_for_servers")
        values["bound"], values["bound_share"] = self.bound.kind, self.bound.share
        values["predictions"] = [{**asdict(p), "gain": p.gain} for p in self.predictions]
        values["advice"] = [{**asdict(a), "sentence": a.sentence()} for a in self.advice]
        return finite_object(values)


def _sent_per_step(timing: Timing | None, inner_axes: Sequence[str]) -> float | None:
    if timing is None or (inner_axes and not timing.wire_bytes_per_step):
        return None
    return timing.wire_bytes_per_step


def summarise(record: RunRecord) -> Summary:
    """Compute a run's numbers from its record."""
    timing = measure(record)
    stretches = sittings(record)
    seconds, startup_s = sum(s.seconds for s in stretches), _startup_s(record)
    evaluations, task = record.kept_evaluations(), record.task
    best, best_step = _best(evaluations, task.primary)
    status, message = _status(record)
    start, steps = record.last_start, max((w.step for w in record.kept_windows()), default=0)
    waterfall, whole = waterfall_of(record), whole_run_of(record)
    inner_axes = start.inner_axes if start else ()
    predictions = tuple(predict(record, timing, whole))
    return Summary(
        run=record.name,
        status=status,
        message=message,
        metrics=_metrics(record, evaluations),
        tested=any(evaluation.test_metrics for evaluation in evaluations),
        validation=next((dict(e.metrics) for e in reversed(evaluations) if e.test_metrics), {}),
        task=task,
        best=best.value if best else None,
        best_step=best_step,
        eval_samples=_eval_samples(evaluations),
        eval_step=evaluations[-1].step if evaluations else None,
        seconds=seconds,
        wall_s=seconds,
        commands=len(stretches),
        last_command_s=stretches[-1].seconds if stretches else 0.0,
        startup_s=startup_s,
        samples_per_s=timing.samples_per_s if timing else None,
        step_s=timing.step_s if timing else None,
        wire_bytes_per_step=_sent_per_step(timing, inner_axes),
        phases=_phases(timing),
        shares=shares_of(timing) if timing and timing.phases else {},
        workers=start.world_size if start else 0,
        parameters=start.parameters if start else None,
        epochs=_epochs(record, steps),
        steps=steps,
        measured_steps=timing.steps if timing else 0,
        restarts=count_restarts(record),
        bad_images=_bad_images(record),
        bad_losses=sum(event.count for event in record.of(LossNotFinite)),
        nonfinite_step=_first_nonfinite(record),
        outlier_windows=timing.outlier_windows if timing else 0,
        bound=find_bound(timing),
        slowest_rank=_slowest(record, timing),
        advice=tuple(advise(record, timing, RunFacts(seconds, startup_s, whole, predictions))),
        incidents=tuple(find_incidents(record, stretches)),
        notes=(*record.notes, *timing_notes(timing), *waterfall_notes(waterfall), *_notes(record, timing)),
        predictions=predictions,
        slow_steps=tuple(find_slow_steps(record, timing)),
        communication=timing.communication if timing else None,
        waterfall=waterfall,
        whole=whole,
        waits_for_servers=record.waits_for_servers,
        searched=record.searched,
        objects=tuple(start.objects) if start else (),
        folder=record.folder,
        inner_axes=inner_axes,
    )


def _notes(record: RunRecord, timing: Timing | None) -> list[str]:
    traced = [event.message for event in record.of(Event) if event.name == "profile"]
    predicted = [event.message for event in record.of(WayPredicted)]
    told = (f"{text[:1].upper()}{text[1:]}." for text in (*traced[-1:], *predicted[-1:]))
    return [
        *priority_notes(record, timing),
        *_period_notes(record),
        *_entropy_notes(record),
        *_idle_notes(record),
        *told,
    ]


def chosen_periods(record: RunRecord) -> list[PeriodChanged]:
    """Return how the period changed as the run went; of steps that were trained again, the last time."""
    changes: list[PeriodChanged] = []
    for change in record.of(PeriodChanged):
        changes = [*(before for before in changes if before.step < change.step), change]
    return changes


def _period_notes(record: RunRecord) -> list[str]:
    """Say which periods were chosen as the run went."""
    changes = chosen_periods(record)
    if not changes:
        return []
    shown = changes[-_PERIODS_SHOWN:]
    first = f"every {shown[0].old} steps at first,"
    if shown != changes:
        first = f"at {len(changes) + 1} periods in turn, in the end"
    then = ", ".join(f"every {change.new} from step {change.step} on" for change in shown)
    return [f"Replicas agreed {first} {then} ({changes[-1].reason})."]


def _idle_notes(record: RunRecord) -> list[str]:
    """Say which settings did nothing in a run that had one worker from its start to its end, and no server."""
    starts = record.of(Start)
    if not starts or any(start.world_size != 1 or start.served for start in starts) or record.of(ServerWindow):
        return []
    idle = list(starts[-1].idle)
    if starts[-1].version == 0:  # runs did not tell yet
        codec = str(record.setting("strategy", "compression") or "none")
        idle = [f"--compression {codec}"] * (codec != "none")
    return [f"One worker has nobody to send to: {' and '.join(idle)} did nothing."] if idle else []


def _entropy_notes(record: RunRecord) -> list[str]:
    """Say whether entropy coding paid, by the last count: rank 0's, or all workers' of a parameter server."""
    counts = record.of(EntropyCoding)
    if not counts:
        return []
    last = counts[-1]
    whose = "the workers'" if record.of(ServerWindow) else "rank 0's"
    if not last.planes_coded or last.sent_bytes >= last.plain_bytes:
        return ["Huffman coding did not pay: it shortened nothing, leave it out."]
    slow = f", or sooner sent than coded ({last.planes_slow:.0f})" if last.planes_slow else ""
    streams = f"{last.planes_coded:.0f} of {last.planes_coded + last.planes_plain:.0f} streams of symbols"
    share = f"{streams}; the others were as short plain{slow}" if last.planes_plain else "all"
    saved = 1 - last.sent_bytes / last.plain_bytes
    note = f"Huffman coding made {whose} encoded messages {saved:.1%} smaller (it coded {share})."
    return [note, *_entropy_seconds(last)]


def _entropy_seconds(count: EntropyCoding) -> list[str]:
    """Say what entropy coding took and spared; without a link's rate, below which rate it pays."""
    if not count.coding_s:
        return []
    took = f"Encoding and decoding took {count.coding_s:.2g} s"
    if not count.bytes_per_s:
        limit = _mbit_per_s((count.plain_bytes - count.sent_bytes) / count.coding_s)
        return [f"{took}; no link's rate was measured here, so all was coded that got shorter: it pays below {limit}."]
    verdict = "it paid" if count.spared_s > count.coding_s else "it did not pay, leave it out"
    rate = _mbit_per_s(count.bytes_per_s)
    return [f"{took} and spared {count.spared_s:.2g} s at {rate} between ranks, as measured: {verdict}."]


def _mbit_per_s(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s"


def _bad_images(record: RunRecord) -> int:
    """Count the files that could not be decoded: each rank that met one tells of it, and does so again when resumed."""
    events = record.of(BadImageSkipped)
    files = {event.path for event in events if event.path and event.count == 1}
    return len(files) + sum(event.count for event in events if not event.path or event.count > 1)


def _status(record: RunRecord) -> tuple[str, str]:
    last = next((line for line in reversed(record.records) if isinstance(line, Start | End)), None)
    if last is None:
        events = record.of(Event)
        return "unfinished", events[-1].message if events else "the record is empty"
    if isinstance(last, Start):
        return "unfinished", "the record has no end: the run is still going, or was killed"
    message, errors = last.message, [event.message for event in record.of(RankFailed) if event.message]
    causes = [event.message for kind in (CallbackError, RunDiverged) for event in record.of(kind)]
    is_known = any(cause in message for cause in causes)  # the others lost that rank
    if last.status == "failed" and errors and errors[-1] not in message and not is_known:
        message = f"{message.rstrip('.') or 'a rank failed'}; the last error was {errors[-1]}"
    return last.status, message


def _best(evaluations: Sequence[Evaluation], primary: Metric) -> tuple[BestResult | None, int | None]:
    """Return the best result, and its step: the one whose checkpoint is kept."""
    best, step = None, None
    for each in evaluations:
        result = BestResult.of(each.metrics.get(primary.name), each.loss)
        if result is not None and result.improves(best, primary):
            best, step = result, each.step
    return best, step


def _metrics(record: RunRecord, evaluations: list[Evaluation]) -> dict[str, float | None]:
    named = (record.task.primary, *record.task.headlines) if record.last_start else ()  # else the task is not known
    metrics: dict[str, float | None] = {metric.name: None for metric in named}
    if evaluations:
        tested = next((e.test_metrics for e in reversed(evaluations) if e.test_metrics), None)
        metrics.update(tested or evaluations[-1].metrics)
    else:
        metrics.update(record.evaluation.metrics)
    return metrics


def _eval_samples(evaluations: list[Evaluation]) -> int:
    """Return the samples that the metrics of a summary are of."""
    tested = next((e.test_samples for e in reversed(evaluations) if e.test_samples), 0)
    return tested or (evaluations[-1].samples if evaluations else 0)


def _phases(timing: Timing | None) -> dict[str, float]:
    phases = {str(p): 0.0 for p in PHASES} if timing else {}
    return {**phases, **(timing.phases if timing else {})}


def _startup_s(record: RunRecord) -> float | None:
    begun: dict[float, float] = {}  # where training began first, by when the command was given: ranks may start again
    for start in record.of(Start):
        if start.launched_t is not None:
            begun.setdefault(start.launched_t, start.t)
    return sum(max(0.0, t - launched_t) for launched_t, t in begun.items()) if begun else None


def _epochs(record: RunRecord, steps: int) -> float:
    """Return the epochs that were trained; where the data grew, the earlier ones had fewer steps."""
    per_epoch = record.last_start.steps_per_epoch if record.last_start else 0
    if not per_epoch:
        return 0.0
    whole, before = 0, 0
    if any(record.of(DataGrew)):
        windows = list(record.kept_windows())
        whole = max((w.epoch for w in windows), default=0)
        before = max((w.step for w in windows if w.epoch < whole), default=0)
    return round(whole + (steps - before) / per_epoch, 3)


def _first_nonfinite(record: RunRecord) -> int | None:
    if any(record.of(LossNotFinite)):  # such batches were left out
        return None
    for window in record.kept_windows():
        if window.nonfinite_step is not None:
            return window.nonfinite_step
    return None


def _slowest(record: RunRecord, timing: Timing | None) -> SlowRank | None:
    if timing is None or timing.slow is None:
        return None
    return replace(timing.slow, host=record.rank_host(timing.slow.rank))
