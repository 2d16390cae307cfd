"""Seconds from the first step to the end, and which share each pause has: from records whose truth is planted."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.observe.phases import PAUSES
from echelon.records.events import DataGrew
from echelon.records.kinds import Checkpoint, End, Evaluation, Pause, Record, Start, Steps
from echelon.reporting.report.records import RunRecord, with_pauses_apart
from echelon.reporting.report.summary import summarise
from echelon.reporting.report.whole_run import WholeRun, whole_run_of
from echelon.reporting.report.words import closing_words, whole_run_words


def window(t: float, seconds: float, step: int, **more: Any) -> Steps:
    """Ten steps of two ranks that end at `t`."""
    return Steps(step, [1.0] * 10, seconds, t=t, **more)


def of(*records: Record) -> WholeRun:
    found = whole_run_of(RunRecord("run", list(records)))
    assert found is not None
    return found


PAUSED = {"pause_names": ["evaluation", "checkpoint", "recording"], "pauses": [[2.0, 0.4, 0.1], [2.0, 0.2, 0.1]]}


def test_what_is_no_step_is_told_by_reason() -> None:
    whole = of(
        Start(t=100.0),
        window(103.0, 2.0, 10),  # a second passes before the first step
        Evaluation(10, seconds=1.9, t=105.0),
        window(107.5, 2.0, 20, **PAUSED),
        Pause("checkpoint", 1.0, 20, t=108.6),  # a tenth of a second that nobody accounts for
        Checkpoint(20, t=109.0),  # until then it was written
    )
    assert whole.seconds == pytest.approx(9.0) and whole.steps_s == pytest.approx(4.0)
    told = {"start": 1.0, "evaluation": 2.0, "checkpoint": 1.7, "recording": 0.1, "callbacks": 0.0, "other": 0.2}
    assert whole.pauses == pytest.approx(told)
    assert whole.at(105.0) == pytest.approx(5.0)
    assert list(whole.shares(0.01)) == ["evaluation", "checkpoint", "start", "other", "recording"]
    assert whole_run_words(whole) == [
        "From the first step to the last evaluation or checkpoint it took 9 s: steps 44.4%, evaluation 22.2%, "
        "checkpoint 18.9%, preparing the first step 11.1%, recording 1.1%, not accounted for 2.2%."
    ]


def test_an_outage_is_left_out_and_what_a_restart_undid_is_not() -> None:
    whole = of(Start(t=0.0), window(2.0, 2.0, 10), Start(t=50.0, start_step=0), window(52.0, 2.0, 10))
    assert (whole.seconds, whole.steps_s) == (4.0, 4.0)
    assert whole.at(51.0) == 3.0


def test_a_resume_that_had_only_an_evaluation_left_counts_it() -> None:
    whole = of(
        *(Start(t=0.0), window(2.0, 2.0, 10), Start(t=50.0, start_step=10), Evaluation(10, seconds=0.9, t=51.0)),
        Pause("evaluation", 0.9, 10, t=51.0),
    )
    assert (whole.seconds, whole.steps_s) == (3.0, 2.0) and whole.pauses["evaluation"] == 0.9


def test_records_of_before_pauses_were_told_have_their_evaluations_and_checkpoints() -> None:
    whole = of(
        Start(t=0.0), window(2.0, 2.0, 10), Evaluation(10, seconds=1.0, t=3.0), Checkpoint(10, blocked_s=0.5, t=3.5)
    )
    assert (whole.pauses["evaluation"], whole.pauses["checkpoint"], whole.seconds) == (1.0, 0.5, 3.5)


def test_where_servers_are_a_pause_of_a_worker_lies_in_its_windows() -> None:
    names, rows = ["forward", "evaluation"], [[2.0, 1.0], [3.0, 0.0]]
    whole = of(*with_pauses_apart([Start(t=0.0, served=True), window(3.0, 3.0, 10, phase_names=names, phases=rows)]))
    assert (whole.seconds, whole.steps_s, whole.pauses["evaluation"]) == (3.0, 2.5, 0.5)


def test_a_run_without_a_step_has_no_such_time() -> None:
    assert whole_run_of(RunRecord("run", [Start(t=0.0)])) is None


def test_epochs_before_the_data_grew_had_fewer_steps() -> None:
    """Two epochs of 10 steps, then one of 20."""
    record = RunRecord(
        "run",
        [
            *(Start(t=0.0, steps_per_epoch=10), window(2.0, 2.0, 10), window(4.0, 2.0, 20, epoch=1)),
            *(DataGrew("10 samples are new", 2), Start(t=5.0, steps_per_epoch=20, start_step=20)),
            *(window(7.0, 2.0, 30, epoch=2), window(9.0, 2.0, 40, epoch=2)),
        ],
    )
    assert summarise(record).epochs == 3.0


def test_the_best_step_is_that_of_the_checkpoint_that_is_kept() -> None:
    """Of equal metrics the lower loss is the best."""
    steps = [window(2.0 * number, 2.0, 10 * number) for number in range(1, 4)]
    found = [Evaluation(10 * number, 0, loss, {"top1": 0.9}) for number, loss in enumerate((0.5, 0.4, 0.45), 1)]
    summary = summarise(
        RunRecord("run", [Start(t=0.0), *(each for pair in zip(steps, found, strict=True) for each in pair)])
    )
    assert (summary.best, summary.best_step) == (0.9, 20)


def test_a_metric_says_after_which_step_where_later_ones_were_not_evaluated() -> None:
    begun = [Start(t=0.0), window(2.0, 2.0, 10), Evaluation(10, metrics={"top1": 0.5}, samples=100, t=2.5)]
    said = closing_words(summarise(RunRecord("run", [*begun, window(5.0, 2.0, 20), End("stopped", t=5.1)])))
    assert any("Top-1 0.5000" in words and "after step 10: no later one was evaluated" in words for words in said), said
    said = closing_words(summarise(RunRecord("run", [*begun, End("stopped", t=5.1)])))
    assert not any("no later one" in words for words in said), said


@pytest.mark.parametrize(("reason", "evaluations", "said"), [("interval", 2, True), ("best", 1, False)])
def test_nothing_is_advised_that_cannot_help(reason: str, evaluations: int, said: bool) -> None:
    """A checkpoint of the best comes however long the interval is, and the last evaluation however rare they are."""
    paused = {"pause_names": ["evaluation", "checkpoint"], "pauses": [[2.0, 2.0], [2.0, 2.0]]}
    lines = [Start(t=0.0), window(2.0, 2.0, 10), *(Evaluation(10, seconds=1.0, t=4.0),) * evaluations]
    lines += [Checkpoint(10, t=6.0, reason=reason), window(8.0, 2.0, 20, **paused), End("completed", t=8.1)]
    words = " ".join(advice.sentence() for advice in summarise(RunRecord("run", lines)).advice)
    assert ("a larger --eval-every: from its first step on the run would be at most" in words) == said, words
    assert ("a longer --checkpoint-every" in words) == said, words


def test_a_recording_that_began_before_the_first_line_is_counted_once() -> None:
    """The line of a window is stamped within its recording, whose seconds are a pause of the window that follows."""
    paused = {"pause_names": ["recording"], "pauses": [[0.5], [0.5]]}
    whole = of(Start(t=0.0), window(2.4, 1.0, 10), window(4.5, 2.0, 20, **paused))
    assert whole.pauses == pytest.approx({**dict.fromkeys(PAUSES, 0.0), "recording": 0.5, "start": 1.0, "other": 0.0})
