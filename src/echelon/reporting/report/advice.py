"""What bounds a run, and what to change: each gain is computed from the record (Amdahl's law), never promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observe.phases import Phase
from echelon.records.kinds import Checkpoint, Evaluation, Start
from echelon.reporting.report.predictions import FEWEST_AGREEMENTS, SAYS_SO, WayPrediction, pick_ways
from echelon.reporting.report.priority import LEAST_GAIN, could_gain
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import SlowRank, Timing
from echelon.reporting.report.whole_run import WholeRun

_WORTH_SAYING = 0.10
_PERSISTENT = 0.7
_SCOPES = {
    "steps": "steps would be", "run": "from its first step on the run would be", "command": "the command would be",
}  # fmt: skip
_PAUSES = (  # the pause, from which share of the run on it is worth saying, what it does, what helps
    ("checkpoint", 0.03, ("Checkpoints stop training for", "a longer --checkpoint-every")),
    ("evaluation", 0.15, ("Evaluation takes", "a larger --eval-every")),
    ("callbacks", 0.05, ("Callbacks and loggers take", "fewer of them, or less often")),
    ("start", 0.25, ("Preparing the first step of an attempt takes", "a longer run pays it only once")),
)


@dataclass(frozen=True)
class Advice:
    """One change and its gain: a factor on the rate of steps, on the time from the first step on, or of the command.

    `scope`: one of `_SCOPES`.
    `said`: the text says what is gained, as computed from the record; else the gain is an upper bound.
    """

    text: str
    gain: float
    scope: str = "steps"
    said: bool = False

    def sentence(self) -> str:
        """Say it with its gain."""
        if self.said:
            return f"{self.text}."
        return f"{self.text}: {_SCOPES[self.scope]} at most {self.gain:.2f}x as fast."


@dataclass(frozen=True)
class Bound:
    """What bounds the run: input, compute, communication, slow rank, other or unknown; its share of a step."""

    kind: str
    share: float
    slow: SlowRank | None = None


@dataclass(frozen=True)
class RunFacts:
    """What advice on the whole run follows from.

    Attributes:
        seconds: of its commands, each from the process's start to its end.
        startup_s: from the command to where training begins, of all commands.
        whole: from the first step to the end, and what of it was no step.
        predictions: what other ways to communicate would take.
    """

    seconds: float
    startup_s: float | None
    whole: WholeRun | None
    predictions: Sequence[WayPrediction]


def shares_of(timing: Timing) -> dict[str, float]:
    """Share of the time of steps by cause; of each phase the mean of the ranks, waiting for slower ones among it."""
    compute = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    return {
        "compute": sum(timing.share(p) for p in compute),
        "input": timing.share(Phase.DATA),
        "communication": timing.share(Phase.COMMUNICATE),
        "slow rank": timing.slow.saving_s / timing.step_s if timing.slow and timing.step_s else 0.0,
        "other": timing.share(Phase.OTHER),
    }


def find_bound(timing: Timing | None) -> Bound:
    """Name the largest cause; a rank that the others persistently wait for comes first."""
    if timing is None or not timing.phases:
        return Bound("unknown", 0.0)
    shares = shares_of(timing)
    slow = held_up_by(timing)
    if slow:
        return Bound("slow rank", shares["slow rank"], slow)
    del shares["slow rank"]
    kind = max(shares, key=shares.__getitem__)
    return Bound(kind, shares[kind])


def held_up_by(timing: Timing) -> SlowRank | None:
    """The rank that makes the others wait, if one does so in most windows and for long enough to matter."""
    slow = timing.slow
    if slow is None or not timing.step_s:
        return None
    matters = slow.saving_s / timing.step_s >= _WORTH_SAYING
    return slow if matters and slow.is_slow and slow.persistence >= _PERSISTENT else None


def advise(record: RunRecord, timing: Timing | None, told: RunFacts) -> list[Advice]:
    """List changes worth trying, the greatest gain first; empty when nothing stands out."""
    found = _about_the_run(record, timing, told)
    if timing is not None and timing.phases:
        found += _about_steps(record, timing, told.predictions)
    return sorted(found, key=lambda a: -a.gain)


def _about_steps(record: RunRecord, timing: Timing, predictions: Sequence[WayPrediction]) -> list[Advice]:
    shares = shares_of(timing)
    found = []
    if shares["input"] >= _WORTH_SAYING:
        found.append(_input(record, shares["input"]))
    if shares["communication"] >= _WORTH_SAYING:
        share = shares["communication"]
        found.append(_predicted(predictions, share) if predictions else _communication(record, share))
    if (gain := could_gain(record, timing)) >= LEAST_GAIN:
        text = (
            "order=priority in --sync ps(...) lets values travel while the next forward pass computes"
            if record.has_servers
            else "order=priority in --collective lets sums travel while the next forward pass computes"
        )
        found.append(Advice(text, gain))
    if (slow := held_up_by(timing)) is not None:
        text = f"Make rank {slow.rank} as fast as the next slowest (it loses its time in {slow.phase})"
        found.append(Advice(text, _gain(shares["slow rank"])))
    if shares["compute"] >= 0.5 and not (record.last_start and record.last_start.axes_in_passes):
        found.append(_compute(record, shares["compute"]))
    if shares["other"] >= _WORTH_SAYING and not record.has_servers:  # whose workers had no batch then
        text = f"{shares['other']:.0%} of a step is in no phase (logging, hooks, garbage collection); without that"
        found.append(Advice(text, _gain(shares["other"])))
    return found


def _input(record: RunRecord, share: float) -> Advice:
    loaders = record.setting("data", "loaders")
    now = f" (now {loaders} per worker)" if isinstance(loaders, int) and loaders >= 0 else ""
    return Advice(f"Loading data takes {share:.0%} of a step; more --loaders{now}, where cores are free", _gain(share))


def _predicted(predictions: Sequence[WayPrediction], share: float) -> Advice:
    """Say what other ways to communicate would save of the whole run, where the run recorded what they cost."""
    faster = [p for p in predictions if p.gain >= SAYS_SO]
    better = [p for p in faster if p.is_long_enough]
    if faster and not better:
        text = (
            f"Communication takes {share:.0%} of a step; {_named(faster[0])} would save time in a longer run, in which "
        )
        return Advice(f"{text}replicas agree at least {FEWEST_AGREEMENTS} times; without communication", _gain(share))
    if not better:
        text = f"Communication takes {share:.0%} of a step, and no other way that was computed from the record would "
        return Advice(f"{text}save time; a larger --batch-size communicates less often", _gain(share))
    first, *others = pick_ways(better)
    more = "".join(f", {_named(p)} {p.run_saves:.0%}" for p in others)
    text = (
        f"Communication takes {share:.0%} of a step: {_named(first)} would save {first.run_saves:.0%} of the run, "
        f"from its first step to its end{more}, computed from the record (what accuracy each costs, `echelon compare` "
        "measures)"
    )
    return Advice(text, better[0].gain, said=True)


def _named(way: WayPrediction) -> str:
    return "no compression" if way.label == "none" else way.label


def _communication(record: RunRecord, share: float) -> Advice:
    if record.one_replica:
        text = (
            f"Communication inside the replica takes {share:.0%} of a step, which no --compression acts on; "
            "other sizes in --parallel, more micro-batches of a pipeline, or a larger --batch-size"
        )
        return Advice(text, _gain(share))
    compression = record.setting("strategy", "compression")
    if compression in (None, "none"):
        text = (
            f"Communication takes {share:.0%} of a step; --compression sends less, and takes time to encode, which "
            "this run did not measure"
        )
    else:
        text = (
            f"Communication takes {share:.0%} of a step in spite of {compression}; "
            "a stronger --compression or a larger --batch-size"
        )
    return Advice(text, _gain(share))


def _compute(record: RunRecord, share: float) -> Advice:
    if record.setting("training", "device") == "cuda" or _on_gpu(record):
        untried = [
            flag
            for flag, used in (
                ("--precision bf16", record.setting("training", "precision") != "fp32"),
                ("--compile", bool(record.setting("model", "compile"))),
            )
            if not used
        ]
        also = f" ({' and '.join(untried)} not tried)" if untried else ""
    else:
        also = ""
    text = f"Computing takes {share:.0%} of a step{also}; twice the --workers, each on cores or a GPU of its own"
    return Advice(text, _gain(share / 2))


def _on_gpu(record: RunRecord) -> bool:
    return any(start.device.startswith("cuda") for start in record.of(Start))


def _spared(record: RunRecord, pause: str) -> float:
    """Return which share of a pause its remedy can spare: the last evaluation stays, so do checkpoints of the best."""
    if pause == "evaluation":
        made = len(record.of(Evaluation))
        return (made - 1) / made if made else 1.0
    if pause == "checkpoint":
        saved = [checkpoint.reason for checkpoint in record.of(Checkpoint)]
        return saved.count("interval") / len(saved) if any(saved) else 1.0
    return 1.0


def _about_the_run(record: RunRecord, timing: Timing | None, told: RunFacts) -> list[Advice]:
    found, whole = [], told.whole
    for name, least, remedy in _PAUSES:
        share = whole.shares().get(name, 0.0) if whole else 0.0
        if least <= share < 1:
            text = f"{remedy[0]} {share:.0%} of the run from its first step to its end; {remedy[1]}"
            spared = share * _spared(record, name)
            found += [Advice(text, _gain(spared), "run")] if spared >= least / 2 else []
    starting = (told.startup_s or 0.0) / told.seconds if told.seconds > 0 else 0.0
    if 0.25 <= starting < 1 and timing is not None:
        text = f"{starting:.0%} of this short run is its start, which a longer run pays only once; not counting it"
        found.append(Advice(text, _gain(starting), "command"))
    return found


def _gain(share: float) -> float:
    return 1.0 / (1.0 - min(share, 0.99))
