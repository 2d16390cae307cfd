"""The page's tables and headline numbers, as rows of plain text: also what a screen reader reads for the charts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from echelon.core.units import format_bytes, format_seconds
from echelon.records.kinds import TCP_HEADER_BYTES
from echelon.reporting.report.charts_cost import phase_order
from echelon.reporting.report.clock import elapsed_s, sittings
from echelon.reporting.report.records import RunRecord, TimelineEntry
from echelon.reporting.report.summary import Summary, kept_evaluations, rank_host
from echelon.reporting.report.timing import Timing, own_work
from echelon.reporting.report.words import wilson_interval


@dataclass(frozen=True)
class Table:
    """Rows of text below a head; `caption` names it for all readers."""

    caption: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Headline:
    """One number in large type, what it is, and a word beside it."""

    label: str
    value: str
    aside: str = ""


def headlines(s: Summary) -> list[Headline]:
    """The numbers that come first; those without a value are left out."""
    top1, f1, auc = (s.metrics.get(k) for k in ("top1", "macro_f1", "roc_auc"))
    found = []
    if top1 is not None:
        aside = f"on {s.eval_samples} samples" if s.eval_samples else ""
        if s.eval_samples and 0 <= top1 <= 1:
            low, high = wilson_interval(top1, s.eval_samples)
            aside = f"± {(high - low) * 50:.1f} pt (95%)"
        found.append(Headline("top-1", f"{top1:.4f}", aside))
    if f1 is not None:
        found.append(Headline("macro F1", f"{f1:.4f}", f"ROC AUC {auc:.4f}" if auc is not None else ""))
    startup = f"{format_seconds(s.startup_s)} to start" if s.startup_s is not None else ""
    found.append(Headline("time", format_seconds(s.seconds), startup))
    if s.samples_per_s is not None and s.step_s is not None:
        found.append(Headline("samples/s", f"{s.samples_per_s:,.0f}", f"{format_seconds(s.step_s)} a step"))
    if s.wire_bytes_per_step is not None:
        found.append(Headline("sent a step", format_bytes(s.wire_bytes_per_step), "by all ranks"))
    if s.workers:
        restarts = f"{s.restarts} restart{'s' * (s.restarts != 1)}"
        found.append(Headline("workers", str(s.workers), restarts if s.restarts else ""))
    if s.parameters is not None:
        found.append(Headline("parameters", _count(s.parameters)))
    return found


def _count(n: int) -> str:
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if n >= scale:
            return f"{n / scale:.3g}{unit}"
    return str(n)


def rank_table(record: RunRecord, timing: Timing | None) -> Table | None:
    """Milliseconds per step by rank and phase, beside each rank's peak memory."""
    if timing is None or not timing.by_rank:
        return None
    phases = phase_order(list(timing.phases))
    memory = timing.memory_bytes
    head = ["rank", "host", *phases, "own work", *(["peak memory"] if memory else [])]
    rows = []
    for rank, seconds in enumerate(timing.by_rank):
        row = [str(rank), rank_host(record, rank) or "–"]
        row += [_ms(seconds.get(p, 0.0)) for p in phases] + [_ms(own_work(seconds))]
        rows.append(row + ([format_bytes(memory[rank])] if memory else []))
    return Table("Milliseconds per step, by rank and phase", head, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def evaluation_table(record: RunRecord) -> Table | None:
    """One row per evaluation that survived restarts."""
    kept = kept_evaluations(record)
    if not kept:
        return None
    names = list(dict.fromkeys(name for e in kept for name in e.metrics))
    rows = []
    for e in kept:
        loss = "–" if e.loss is None else f"{e.loss:.4f}"
        values = [f"{e.metrics[n]:.4f}" if n in e.metrics else "–" for n in names]
        rows.append([str(e.epoch), str(e.step), loss, *values, str(e.samples), format_seconds(e.seconds)])
    head = ["epoch", "step", "loss", *(n.replace("_", " ") for n in names), "samples", "took"]
    return Table("Evaluations", head, rows)


def happenings(record: RunRecord) -> Table | None:
    """Everything that happened beside steps and evaluations, in order."""
    marks = [m for m in record.marks if m.kind in ("start", "event", "checkpoint", "end")]
    if not marks:
        return None
    stretches = sittings(record)
    rows = []
    attempt = 0
    for mark in marks:
        attempt += mark.kind == "start"
        said = mark.message
        if mark.kind == "start":
            step = mark.number("start_step") or 0
            said = f"attempt {attempt}, {mark.details.get('world_size', '?')} workers, from step {step:.0f}"
        elif mark.kind == "checkpoint":
            said = (
                f"step {mark.number('step') or 0:.0f}, {format_bytes(mark.number('n_bytes') or 0)}, training waited "
                f"{format_seconds(mark.number('blocked_s') or 0)}; {mark.details.get('reason') or ''}".rstrip("; ")
            )
        elif mark.kind == "end":
            said = f"{mark.details.get('status', '')}: {said}" if said else str(mark.details.get("status", ""))
        what = mark.name.replace("_", " ") if mark.kind == "event" else mark.kind
        rows.append([format_seconds(elapsed_s(stretches, mark.t)), what, said])
    return Table("Attempts, events and checkpoints in order", ["at", "what", "in words"], rows)


def environment_table(record: RunRecord) -> Table | None:
    """What the run ran on, as the last attempt recorded it."""
    starts = record.of_kind("start")
    if not starts:
        return None
    start = starts[-1].details
    pairs: list[tuple[str, object]] = [
        (k, start[k]) for k in ("hosts", "device", "backend", "threads", "affinity", "world_size") if k in start
    ]
    environment = start.get("environment")
    if isinstance(environment, dict):
        pairs += [(k, v) for k, v in environment.items() if k != "command"]
    pairs += [(k, start[k]) for k in ("model", "data", "train_size", "eval_size", "batch_size") if k in start]
    return Table("Environment", ["what", "value"], [[str(k).replace("_", " "), _plain(v)] for k, v in pairs])


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(str(v) for v in value)) or "none"
    return str(value)


def command(record: RunRecord) -> str:
    """The command that started the run first, as a shell would take it."""
    for start in record.of_kind("start"):
        environment = start.details.get("environment")
        said = environment.get("command") if isinstance(environment, dict) else None
        if said:
            return shlex.join(str(w) for w in said) if isinstance(said, list) else str(said)
    return ""


def link_words(record: RunRecord) -> list[str]:
    """What the kernel counted on shaped links against the run's own count, in words; empty without such links."""
    counted, dropped, rates = 0.0, 0.0, []
    for mark in record.of_kind("link"):
        hosts = mark.details.get("hosts")
        # What a worker of a parameter server receives is sent by servers, which also send to their standbys.
        ways = ("sent", "received") if mark.details.get("servers") else ("sent",)
        for host in hosts if isinstance(hosts, list) else []:
            if isinstance(host, dict):
                counters = TimelineEntry(mark.t, mark.kind, host)
                counted += sum(_payload_bytes(counters, way) for way in ways)
                dropped += counters.number("dropped") or 0.0
        rates.append(str(mark.details.get("link") or ""))
    if not counted:
        return []
    own = sum(w.wire_bytes for w in record.windows)
    others = sum(w.other_wire_bytes for w in record.windows)
    others += sum(mark.number("other_wire_bytes") or 0.0 for mark in record.of_kind("end"))
    return [
        f"The kernel counted {format_bytes(counted)} of payload sent on the links ({rates[-1]}) and "
        f"{dropped:.0f} packets dropped; the run itself counted {format_bytes(own)} between replicas, and "
        f"{format_bytes(others)} for evaluations, checkpoints and statistics ({(own + others) / counted - 1:+.1%})."
    ]


def _payload_bytes(counters: TimelineEntry, way: str) -> float:
    packets = counters.number(f"{way}_packets") or 0.0
    return (counters.number(f"{way}_bytes") or 0.0) - TCP_HEADER_BYTES * packets
