"""The page's tables and headline numbers, as rows of plain text: also what a screen reader reads for the charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.columns import NONE, Column, bytes_column, moments_column, rows_of, seconds_column
from echelon.core.units import format_bytes, format_metric, format_seconds, rounded
from echelon.observe.phases import Phase, phase_name, phase_share
from echelon.records.events import Event, SharesDealt
from echelon.records.kinds import Checkpoint, End, LinkTraffic, Record, Start
from echelon.reporting.report.charts_cost import phase_order
from echelon.reporting.report.charts_events import checkpoint_text
from echelon.reporting.report.charts_waterfall import part_name
from echelon.reporting.report.clock import elapsed_s, sittings
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.summary import Summary
from echelon.reporting.report.timing import Timing, own_work
from echelon.reporting.report.words import samples_of_primary, wilson_interval


@dataclass(frozen=True)
class Table:
    """Rows of text below a head.

    Attributes:
        caption: names it for all readers.
        links: lead on from its rows.
        counting: heads of columns whose cells end below each other.
    """

    caption: str
    head: list[str]
    rows: list[list[str]]
    links: Sequence[str] = ()
    counting: Sequence[str] = ()

    @classmethod
    def of(cls, caption: str, columns: Sequence[Column], links: Sequence[str] = ()) -> Table:
        """Put columns beside each other."""
        counting = [column.head for column in columns if column.counts]
        return cls(caption, [column.head for column in columns], rows_of(columns), links, counting)


@dataclass(frozen=True)
class Headline:
    """One number in large type, what it is, and a word beside it."""

    label: str
    value: str
    aside: str = ""


def headlines(s: Summary) -> list[Headline]:
    """The numbers that come first; those without a value are left out."""
    found, primary = [], s.task.primary
    if (value := s.metrics.get(primary.name)) is not None:
        aside = f"on {samples_of_primary(s)}" if s.eval_samples else ""
        if s.eval_samples and primary.percent:
            low, high = wilson_interval(value, s.eval_samples)
            aside = f"95%: {low:.3f} to {high:.3f}"
        found.append(Headline(primary.title, format_metric(value), aside))
    others = [(m.title, v) for m in s.task.headlines if (v := s.metrics.get(m.name)) is not None]
    if others:
        (title, value), *beside = others
        found.append(
            Headline(title, format_metric(value), ", ".join(f"{name} {format_metric(v)}" for name, v in beside))
        )
    if s.whole is not None:
        paused_s = sum(s.whole.pauses.values())
        aside = f"{paused_s / s.whole.seconds:.0%} of it pauses" if s.whole.seconds > 0 else ""
        found.append(Headline("first step to end", format_seconds(s.whole.seconds), aside))
    startup = f"{format_seconds(s.startup_s)} to start" if s.startup_s is not None else ""
    found.append(Headline("time in all", format_seconds(s.seconds), startup))
    if s.samples_per_s is not None and s.step_s is not None:
        unit, speed = s.task.speed(s.samples_per_s)
        found.append(Headline(unit, f"{speed:,.0f}", f"{format_seconds(s.step_s)} a step"))
    if s.wire_bytes_per_step is not None:
        senders = "by workers and servers" if s.waits_for_servers else "by all ranks"
        if s.inner_axes:
            senders = f"between replicas; inside of them ({', '.join(s.inner_axes)}) it is not counted"
        found.append(Headline("sent a step", format_bytes(s.wire_bytes_per_step), senders))
    elif s.inner_axes and s.measured_steps:
        found.append(Headline("sent a step", "not counted", f"inside a replica ({', '.join(s.inner_axes)})"))
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
    """Milliseconds per step by rank and phase, beside each rank's peak memory, and its part of a batch if not equal."""
    if timing is None or not timing.by_rank:
        return None
    phases = phase_order(list(timing.phases))
    memory, shares = timing.memory_bytes, _shares(record, len(timing.by_rank))
    gc_s = timing.gc_s
    ranks = range(len(timing.by_rank))
    columns = [Column("rank", [str(r) for r in ranks]), Column("host", [record.rank_host(r) or NONE for r in ranks])]
    columns += [Column(phase_name(p), [_ms(seconds.get(p, 0.0)) for seconds in timing.by_rank]) for p in phases]
    columns += [Column("own work", [_ms(own_work(seconds)) for seconds in timing.by_rank])]
    columns += [Column("garbage collection", [_ms(gc_s[r]) for r in ranks])] if gc_s else []
    columns += [bytes_column("peak memory", [memory[r] for r in ranks])] if memory else []
    columns += [Column("samples of a batch", [str(shares[r]) for r in ranks])] if shares else []
    return Table.of("Milliseconds per step, by rank and phase", columns)


def _shares(record: RunRecord, ranks: int) -> Sequence[int]:
    """Return the samples of a full batch that each rank had at the end; empty where they are equal."""
    begun = [line for line in record.records if isinstance(line, Start | SharesDealt)]
    last = begun[-1] if begun else Start()
    shares = last.shares if isinstance(last, Start) else last.sizes
    return shares if len(shares) == ranks else ()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def evaluation_table(record: RunRecord) -> Table | None:
    """One row per evaluation that survived restarts; what a test set gave stands beside, where it was looked at."""
    evaluations = record.kept_evaluations()
    if not evaluations:
        return None
    names = list(dict.fromkeys(name for e in evaluations for name in e.metrics))
    tested = list(dict.fromkeys(name for e in evaluations for name in e.test_metrics))
    title = record.task.title_of
    columns = [
        Column("epoch", [str(e.epoch + 1) for e in evaluations]), Column("step", [f"{e.step:,}" for e in evaluations]),
        Column("loss", [_four(e.loss) for e in evaluations]),
        *(Column(title(n), [_four(e.metrics.get(n)) for e in evaluations]) for n in names),
        *(Column(f"test {title(n)}", [_four(e.test_metrics.get(n)) for e in evaluations]) for n in tested),
        Column("samples", [f"{e.samples:,}" for e in evaluations]),
        seconds_column("took", [e.seconds for e in evaluations]),
    ]  # fmt: skip
    return Table.of("Evaluations", columns)


def _four(value: float | None) -> str:
    return NONE if value is None else format_metric(value)


_KINDS = {Start.kind: "training begins", End.kind: "training ends"}


def events(record: RunRecord) -> Table | None:
    """Everything that happened beside steps and evaluations, in order."""
    lines = [line for line in record.records if isinstance(line, Start | Event | Checkpoint | End)]
    if not lines:
        return None
    stretches, attempt = sittings(record), 0
    what, words = [], []
    for line in lines:
        attempt += isinstance(line, Start)
        what.append(line.name.replace("_", " ") if isinstance(line, Event) else _KINDS.get(line.kind, line.kind))
        words.append(_sentence(line, attempt))
    at = moments_column("at", [elapsed_s(stretches, line.t) for line in lines])
    return Table.of("Attempts, events and checkpoints in order", [at, Column("what", what), Column("in words", words)])


def _sentence(line: Record, attempt: int) -> str:
    match line:
        case Start():
            return f"attempt {attempt}, {line.world_size or '?'} workers, from step {line.start_step}"
        case Checkpoint():
            return f"{checkpoint_text(line)}; {line.reason}".rstrip("; ")
        case End():
            return f"{line.status}: {line.message}" if line.message else line.status
        case Event():
            return f"{line.message} (and {line.more} more like it)" if line.more else line.message
    return ""


def environment_table(record: RunRecord) -> Table | None:
    """What the run ran on, as the last attempt recorded it."""
    start = record.last_start
    if start is None:
        return None
    machine = ("hosts", "device", "backend", "threads", "affinity", "world_size")
    data = ("model", "data", "train_size", "eval_size", "batch_size")
    pairs = [(name, getattr(start, name)) for name in machine]
    pairs += [(name, value) for name, value in vars(start.environment).items() if name != "command"]
    pairs += [(name, getattr(start, name)) for name in data]
    told = [(name, value) for name, value in pairs if name == "gpus" or value not in (None, "", ())]
    return Table("Environment", ["what", "value"], [[name.replace("_", " "), _plain(value)] for name, value in told])


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(str(v) for v in value)) or "none"
    return str(value)


def command(record: RunRecord) -> str:
    """The command that started the run first, as a shell would take it."""
    return next((start.environment.command for start in record.of(Start) if start.environment.command), "")


def link_words(record: RunRecord) -> list[str]:
    """What the kernel counted on shaped links against the run's own count, in words; empty without such links."""
    links = record.of(LinkTraffic)
    counted = sum(_payload_bytes(link) for link in links)
    if not counted:
        return []
    dropped = sum(host.dropped for link in links for host in link.hosts)
    between = sum(w.wire_bytes for w in record.windows)
    others = sum(w.other_wire_bytes for w in record.windows) + sum(end.other_wire_bytes for end in record.of(End))
    return [
        f"The kernel counted {format_bytes(counted)} of payload sent on the links ({links[-1].link}) and "
        f"{dropped} packets dropped; the run itself counted {format_bytes(between)} between replicas, and "
        f"{format_bytes(others)} for evaluations, checkpoints and statistics ({(between + others) / counted - 1:+.1%})."
    ]


def _payload_bytes(link: LinkTraffic) -> int:
    """Add up what hosts sent; what a worker receives is sent by servers, which also send to their standbys."""
    sent = sum(host.sent_payload_bytes for host in link.hosts)
    return sent + sum(host.received_payload_bytes for host in link.hosts) if link.servers else sent


def waterfall_table(record: RunRecord, summary: Summary) -> Table | None:
    """Seconds by rank and part, whose sum is the wall time."""
    waterfall = summary.waterfall
    if waterfall is None:
        return None
    head = ["rank", *(part_name(name) for name in waterfall.parts), "wall time"]
    rows = [
        [str(r), *(f"{seconds[r]:.2f}" for seconds in waterfall.parts.values()), f"{waterfall.wall_s:.2f}"]
        for r in range(waterfall.ranks)
    ]
    return Table("Seconds of the whole run, by rank and part", head, rows)


def critical_table(record: RunRecord, timing: Timing | None) -> Table | None:
    """How often each rank was the one that the others waited for, where one of them was more often than by chance."""
    tested = timing.waited_for if timing else None
    if timing is None or timing.communication is None or tested is None or not tested.is_one:
        return None
    what = "steps" if timing.communication.by_step else "windows of steps"
    head = ["rank", "host", f"share of {what} in which the others waited for it"]
    critical = timing.communication.critical
    rows = [[str(rank), record.rank_host(rank) or "–", f"{share:.0%}"] for rank, share in enumerate(critical)]
    return Table("The critical rank: the last to be ready for communication", head, rows)


def critical_words(timing: Timing | None) -> list[str]:
    """Say what was tested before a rank is called the one that the others wait for."""
    tested = timing.waited_for if timing else None
    return [tested.sentence] if tested is not None else []


def prediction_table(summary: Summary) -> Table | None:
    """What other ways to communicate would do to a step, and to the run from its first step to its end."""
    if not summary.predictions:
        return None
    first, others = summary.predictions[0], summary.predictions
    columns = [
        Column("change", ["none: this run", *(p.label for p in others)]),
        Column("saved of the run", ["0%", *(f"{rounded(p.run_saves, 2):.0%}" for p in others)]),
        seconds_column("whole run", [first.run_now_s, *(p.run_then_s for p in others)]),
        seconds_column("a step would take", [first.now_s, *(p.then_s for p in others)]),
        Column("saved of a step", ["0%", *(f"{rounded(p.saves, 2):.0%}" for p in others)]),
        Column("times as fast", ["1.00x", *(f"{p.gain:.2f}x" for p in others)]),
        bytes_column("sent a step by a rank", [first.now_bytes, *(p.wire_bytes for p in others)]),
    ]
    return Table.of("What other ways to communicate would gain, computed from the record", columns)


def slow_step_table(summary: Summary) -> Table | None:
    """The slowest steps and their causes."""
    if not summary.slow_steps:
        return None
    steps = summary.slow_steps
    waited = [f"rank {s.waited_for}" if s.waited_for is not None else NONE for s in steps]
    columns = [
        Column("step", [f"{s.step:,}" for s in steps], counts=True),
        seconds_column("took", [s.seconds for s in steps]),
        seconds_column("median then", [s.median_s for s in steps]),
        *([Column("the others waited for", waited)] if set(waited) != {NONE} else []),
        Column("cause", [s.cause for s in steps]),
    ]
    return Table.of("Steps that took over 3 times the median", columns)


def communication_words(summary: Summary) -> list[str]:
    """Say what communication takes of the time of steps, what of that is waiting, and what is hidden beside it."""
    c, step_s = summary.communication, summary.step_s
    if c is None or not step_s or c.total_s / step_s < 0.01:
        return []
    seconds = summary.phases.get(Phase.COMMUNICATE, 0.0)
    waited = f", {format_seconds(c.waited_s)} of it waiting for slower ranks" if c.waited_s > 0 else ""
    hidden = f" Another {format_seconds(c.hidden_s)} is hidden behind backward." if c.hidden_s > 0 else ""
    hidden = hidden or (" No more of it overlaps with backward." if c.timed else "")
    return [
        f"Communication takes {phase_share(seconds, step_s):.0%} of step time, the mean of the ranks: "
        f"{format_seconds(seconds)} of a step of {format_seconds(step_s)}{waited}.{hidden}"
    ]
