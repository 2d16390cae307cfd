"""A run in numbers: what `summary.json` holds and what the closing words are made of."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from echelon.observe.phases import PHASES
from echelon.reporting.report.advice import Advice, Bound, advise, find_bound, shares_of
from echelon.reporting.report.clock import sittings
from echelon.reporting.report.communication import Communication
from echelon.reporting.report.incidents import Incident, count_restarts, find_incidents
from echelon.reporting.report.predictions import Prediction, predict
from echelon.reporting.report.records import Evaluation, RunRecord, TimelineEntry, Window, surviving
from echelon.reporting.report.slow_steps import SlowStep, find_slow_steps
from echelon.reporting.report.timing import Timing, measure, timing_notes
from echelon.reporting.report.waterfall import Waterfall, waterfall_notes, waterfall_of

METRICS = ("top1", "top5", "macro_f1", "roc_auc")


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Seconds unless the name says otherwise; None where the record holds no answer."""

    run: str
    status: str
    message: str
    metrics: dict[str, float | None]
    best_top1: float | None
    best_step: int | None
    eval_samples: int
    seconds: float
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
    nonfinite_step: int | None
    outlier_windows: int
    bound: Bound
    slowest_rank: dict[str, Any] | None
    advice: tuple[Advice, ...]
    incidents: tuple[Incident, ...]
    notes: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    slow_steps: tuple[SlowStep, ...]
    communication: Communication | None
    waterfall: Waterfall | None
    served: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values for `summary.json`; NaN and infinity become null."""
        values = asdict(self)
        values["bound"], values["bound_share"] = self.bound.kind, self.bound.share
        values["predictions"] = [{**asdict(p), "gain": p.gain} for p in self.predictions]
        values["advice"] = [{**asdict(a), "sentence": a.sentence()} for a in self.advice]
        cleaned = finite(values)
        assert isinstance(cleaned, dict)
        return cleaned


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, deeply: JSON has neither."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def kept_windows(record: RunRecord) -> list[Window]:
    """Windows of the trajectory that survived restarts; one that reaches past a restart's step is dropped."""
    return surviving(record.windows, record, lambda w: (w.attempt, w.step))


def kept_evaluations(record: RunRecord) -> list[Evaluation]:
    """Evaluations of the trajectory that survived restarts."""
    return surviving(record.evaluations, record, lambda e: (e.attempt, e.step))


def summarise(record: RunRecord) -> Summary:
    """Compute a run's numbers from its record."""
    timing = measure(record)
    stretches = sittings(record)
    seconds = sum(s.seconds for s in stretches)
    startup_s = _startup_s(record)
    evaluations = kept_evaluations(record)
    best = max((e for e in evaluations if "top1" in e.metrics), key=lambda e: e.metrics["top1"], default=None)
    status, message = _status(record)
    start = record.of_kind("start")[-1] if record.of_kind("start") else None
    parameters = start.number("parameters") if start else None
    steps = max((w.step for w in kept_windows(record)), default=0)
    waterfall = waterfall_of(record)
    return Summary(
        run=record.name,
        status=status,
        message=message,
        metrics=_metrics(record, evaluations),
        best_top1=best.metrics["top1"] if best else None,
        best_step=best.step if best else None,
        eval_samples=evaluations[-1].samples if evaluations else 0,
        seconds=seconds,
        startup_s=startup_s,
        samples_per_s=timing.samples_per_s if timing else None,
        step_s=timing.step_s if timing else None,
        wire_bytes_per_step=timing.wire_bytes_per_step if timing else None,
        phases=_phases(timing),
        shares=shares_of(timing) if timing and timing.phases else {},
        workers=int((start.number("world_size") if start else None) or 0),
        parameters=int(parameters) if parameters is not None else None,
        epochs=_epochs(record, steps),
        steps=steps,
        measured_steps=timing.steps if timing else 0,
        restarts=count_restarts(record),
        bad_images=sum(int(m.number("count") or 1) for m in _events(record, "bad_image")),
        nonfinite_step=_first_nonfinite(record),
        outlier_windows=timing.outlier_windows if timing else 0,
        bound=find_bound(timing),
        slowest_rank=_slowest(record, timing),
        advice=tuple(advise(record, timing, seconds, startup_s)),
        incidents=tuple(find_incidents(record, stretches)),
        notes=(*record.notes, *timing_notes(timing), *waterfall_notes(waterfall), *_notes(record)),
        predictions=tuple(predict(record, timing)),
        slow_steps=tuple(find_slow_steps(record, timing)),
        communication=timing.communication if timing else None,
        waterfall=waterfall,
        served=record.served,
    )


def rank_host(record: RunRecord, rank: int) -> str:
    """The host a rank ran on in the last attempt, or nothing when the record lists hosts otherwise."""
    starts = record.of_kind("start")
    hosts = starts[-1].details.get("hosts") if starts else None
    if not isinstance(hosts, list) or not hosts:
        return ""
    if len(hosts) == 1:
        return str(hosts[0])
    return str(hosts[rank]) if len(hosts) == starts[-1].number("world_size") else ""


def _notes(record: RunRecord) -> list[str]:
    return [*_entropy_notes(record), *_lone_notes(record)]


def _lone_notes(record: RunRecord) -> list[str]:
    """Say which settings did nothing in a run that had one worker from its start to its end, and no server."""
    starts = record.of_kind("start")
    if not starts or any(m.number("world_size") != 1 or str(m.details.get("backend")) == "zmq" for m in starts):
        return []
    sync, codec = (str(record.setting("strategy", key) or "") for key in ("sync", "compression"))
    averages = sync.startswith("local") and "reset" not in sync  # moments are reset by one worker, too
    idle = [f"--sync {sync}"] * averages + [f"--compression {codec}"] * (codec not in ("", "none"))
    return [f"One worker has nobody to send to: {' and '.join(idle)} did nothing."] if idle else []


def _entropy_notes(record: RunRecord) -> list[str]:
    """Say whether entropy coding paid, by the last count: rank 0's, or all workers' of a parameter server."""
    if not record.of_kind("entropy_coding"):
        return []
    last = record.of_kind("entropy_coding")[-1]
    plain, sent, coded, left, slow = (
        last.number(key) or 0.0 for key in ("plain_bytes", "sent_bytes", "planes_coded", "planes_plain", "planes_slow")
    )
    whose = "the workers'" if record.of_kind("server") else "rank 0's"
    if not coded or sent >= plain:
        return ["Huffman coding did not pay: it shortened nothing, leave it out."]
    others = "as short plain" if not slow else f"as short plain, or sooner sent than coded ({slow:.0f})"
    share = f"{coded:.0f} of {coded + left:.0f} streams of symbols; the others were {others}" if left else "all"
    saved = f"Huffman coding made {whose} encoded messages {1 - sent / plain:.1%} smaller (it coded {share})."
    return [saved, *_entropy_seconds(last, plain - sent)]


def _entropy_seconds(last: TimelineEntry, saved_bytes: float) -> list[str]:
    """Say what entropy coding took and spared; without a link's rate, below which rate it pays."""
    coding_s, spared_s, rate = (last.number(key) or 0.0 for key in ("coding_s", "spared_s", "bytes_per_s"))
    if not coding_s:
        return []
    took = f"Encoding and decoding took {coding_s:.2g} s"
    if not rate:
        limit = _mbit_per_s(saved_bytes / coding_s)
        return [f"{took}; no link's rate was measured here, so all was coded that got shorter: it pays below {limit}."]
    verdict = "it paid" if spared_s > coding_s else "it did not pay, leave it out"
    return [f"{took} and spared {spared_s:.2g} s at {_mbit_per_s(rate)} between ranks, as measured: {verdict}."]


def _mbit_per_s(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s"


def _events(record: RunRecord, name: str) -> list[TimelineEntry]:
    return [m for m in record.of_kind("event") if m.name == name]


def _status(record: RunRecord) -> tuple[str, str]:
    last = next((m for m in reversed(record.marks) if m.kind in ("start", "end")), None)
    if last is None:
        return ("unfinished", "the record is empty") if not record.marks else ("unfinished", record.marks[-1].message)
    if last.kind == "start":
        return "unfinished", "the record has no end: the run is still going, or was killed"
    status, message = str(last.details.get("status") or "unknown"), last.message
    errors = [m.message for m in _events(record, "rank_failed") if m.message]
    if status == "failed" and errors:
        message = f"{message.rstrip('.') or 'a rank failed'}; the last error was {errors[-1]}"
    return status, message


def _metrics(record: RunRecord, evaluations: list[Evaluation]) -> dict[str, float | None]:
    found: dict[str, float | None] = dict.fromkeys(METRICS)
    if evaluations:
        found.update(evaluations[-1].metrics)
    elif isinstance(record.detail.get("metrics"), dict):
        found.update({str(k): v for k, v in record.detail["metrics"].items() if isinstance(v, int | float)})
    return found


def _phases(timing: Timing | None) -> dict[str, float]:
    phases = {str(p): 0.0 for p in PHASES} if timing else {}
    return {**phases, **(timing.phases if timing else {})}


def _startup_s(record: RunRecord) -> float | None:
    first = next(iter(record.of_kind("start")), None)
    launched = first.number("launched_t") if first else None
    return max(0.0, first.t - launched) if first and launched is not None else None


def _epochs(record: RunRecord, steps: int) -> float:
    starts = record.of_kind("start")
    per_epoch = starts[-1].number("steps_per_epoch") if starts else None
    return round(steps / per_epoch, 3) if per_epoch else 0.0


def _first_nonfinite(record: RunRecord) -> int | None:
    for window in kept_windows(record):
        for i, loss in enumerate(window.losses):
            if not math.isfinite(loss):
                return window.step - window.steps + 1 + i
    return None


def _slowest(record: RunRecord, timing: Timing | None) -> dict[str, Any] | None:
    if timing is None or timing.slow is None:
        return None
    return {**asdict(timing.slow), "host": rank_host(record, timing.slow.rank)}
