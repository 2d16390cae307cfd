"""Flows as jobs of a queue: what is submitted together, what waits for what, and what is found again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from echelon.flows.chained import _Chain, _submit, chained_texts, run_chained
from echelon.flows.state import FlowArguments, load_flow, write_description
from echelon.launch.places.cluster import ChainedJob, JobPhase, JobState, TakesChains

FLOW = """\
steps:
  data:
    command: echo
    outputs: {data: x}
  train:
    train: ${data.data}
    matrix: {seed: [0, 1]}
    settings: {seed: "${seed}"}
  tune:
    finetune: ["${train.run}", digits]
    matrix: {seed: [0, 1], lr: [0.1, 0.2]}
    settings: {lr: "${lr}"}
  best:
    select: ${tune.run}
"""


class Queue:
    """A queue that keeps what it is given."""

    holds_order = True

    def __init__(self) -> None:
        self.jobs: list[ChainedJob] = []
        self.goes_on: dict[str, dict[int, str]] = {}

    def chained_text(self, job: ChainedJob) -> str:
        return f"{job.name}\n{list(job.after)}"

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        self.jobs.append(job)
        number = str(len(self.jobs))
        return {each: f"{number}_{each}" if job.is_array else number for each in job.commands}

    def chained(self, name: str) -> dict[int, str]:
        return self.goes_on.get(name, {})

    def state(self, job: str) -> JobState:
        return JobState(JobPhase.RUNS, "runs")

    def stop(self, job: str) -> None:
        raise AssertionError(job)


def test_what_a_matrix_makes_is_an_array_of_those_that_wait_for_the_same(tmp_path: Path) -> None:
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Queue()
    file.write_text(FLOW)
    folder.mkdir()
    write_description(folder, file, FlowArguments(str(file), {}, False))
    assert isinstance(queue, TakesChains)
    jobs: dict[str, str] = {}
    assert _submit(_Chain(load_flow(folder), folder, queue, print, jobs)) == []
    found = [(list(job.commands), job.is_array, list(job.after)) for job in queue.jobs]
    assert found == [
        ([0], False, []),
        ([0, 1], True, ["1"]),
        ([0, 1], True, ["2_0"]),
        ([2, 3], True, ["2_1"]),
        ([0], False, ["3_0", "3_1", "4_2", "4_3"]),
    ]
    assert jobs["tune[seed=1,lr=0.2]"] == "4_3"
    assert queue.jobs[3].commands[3][-2:] == ["tune[seed=1,lr=0.2]", "0"]
    assert len({job.script for job in queue.jobs}) == 5 and queue.jobs[2].name == queue.jobs[3].name
    again = Queue()
    again.goes_on = {queue.jobs[2].name: {0: "3_0", 3: "4_3"}}  # the queue knows some
    jobs.clear()
    _submit(_Chain(load_flow(folder), folder, again, print, jobs))
    assert [list(job.commands) for job in again.jobs] == [[0], [0, 1], [1], [2], [0]]
    assert jobs["tune[seed=1,lr=0.2]"] == "4_3" and jobs["tune[seed=0,lr=0.2]"] == "3_1"
    shown = chained_texts(load_flow(folder), folder, queue)
    assert len(shown) == 5 and f"['{queue.jobs[1].name}-0']" in shown[2] and not (folder / "jobs").exists()


class Processes(Queue):
    """A queue that runs each job at once, and knows no order."""

    holds_order = False

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        for command in job.commands.values():
            subprocess.run(command, check=False, timeout=120)
        return super().submit_chained(job)

    def state(self, job: str) -> JobState:
        return JobState(JobPhase.ENDED, "over")


ORDERED = """\
steps:
  after:
    command: [sh, -c, "cat ${before.x} >${folder}/x"]
    outputs: {x: x}
  before:
    command: [sh, -c, "echo 1 >${folder}/x"]
    outputs: {x: x}
  wrong:
    command: [sh, -c, "exit 3"]
  never:
    command: [sh, -c, "exit 0"]
    needs: [wrong]
"""


def test_a_queue_without_order_is_given_what_can_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.flows.chained.POLL_S", 0.01)
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Processes()
    file.write_text(ORDERED)
    folder.mkdir()
    write_description(folder, file, FlowArguments(str(file), {}, False))
    outcome = run_chained(load_flow(folder), folder, queue, print)
    assert [job.name.split("-")[1] for job in queue.jobs] == ["before", "wrong", "after"]
    assert (outcome.status, outcome.failed, outcome.blocked) == ("partial", ["wrong"], ["never"])
    assert sorted(outcome.ran) == ["after", "before"] and (folder / "steps" / "after" / "x").read_text() == "1\n"
    again = run_chained(load_flow(folder), folder, queue, print)
    assert sorted(again.kept) == ["after", "before"] and len(queue.jobs) == 4
