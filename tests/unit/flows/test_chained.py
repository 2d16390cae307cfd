"""Flows as jobs of a queue: what is submitted together, what waits for what, and what is found again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.flows.base import step_folder
from echelon.flows.chained import _Chain, _submit, chained_texts, queued_jobs, run_chained, stop_queued
from echelon.flows.page import page_text
from echelon.flows.run import FlowRequest, start_flow
from echelon.flows.state import (
    FlowArguments,
    Stands,
    load_arguments,
    load_flow,
    only_start,
    step_statuses,
    write_description,
)
from echelon.launch.places.cluster import ChainedJob, JobPhase, JobState, TakesChains
from echelon.records.file import Recorder
from echelon.records.kinds import FlowStepEnd, FlowStepStart

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
    shown = chained_texts(load_flow(folder), folder, queue)
    assert len(shown) == 5 and not (folder / "jobs").exists()
    jobs: dict[str, str] = {}
    _submit(_Chain(load_flow(folder), folder, queue, print, jobs))
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
    assert f"['{queue.jobs[1].name}-0']" in shown[2]


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
PASSED_ON = """\
parameters: {v: 1}
steps:
  a:
    command: [sh, -c, "echo ${v} >${folder}/x"]
    outputs: {x: x}
  b:
    command: [sh, -c, "cat ${a.x} >${folder}/y"]
    outputs: {y: y}
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


class Unlucky(Processes):
    """A queue whose jobs die before their processes begin."""

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        return Queue.submit_chained(self, job)


@pytest.mark.parametrize("in_order", [True, False])
def test_an_end_of_before_is_not_that_of_a_job_that_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    monkeypatch.setattr("echelon.flows.chained.POLL_S", 0.01)
    monkeypatch.setattr("echelon.flows.chained._SETTLE_S", 0.0)
    monkeypatch.setattr(Processes, "holds_order", in_order)
    file, folder, said = tmp_path / "flow.yaml", tmp_path / "there", list[str]()
    file.write_text(PASSED_ON)
    write_description(folder, file, FlowArguments(str(file), {}))
    assert run_chained(load_flow(folder), folder, Processes(), print).status == "completed"
    write_description(folder, file, FlowArguments(str(file), {"v": "2"}))
    outcome = run_chained(load_flow(folder), folder, Unlucky(), said.append)
    assert (outcome.status, outcome.ran, outcome.failed, outcome.blocked) == ("partial", [], ["a"], ["b"])
    assert "a: ended: not begun" in said
    assert run_chained(load_flow(folder), folder, Processes(), print).ran == ["a", "b"]


def test_a_step_that_its_job_found_done_has_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.flows.chained.POLL_S", 0.01)
    monkeypatch.setattr("echelon.flows.chained._SETTLE_S", 0.0)
    monkeypatch.setattr(Processes, "holds_order", True)
    file, folder = tmp_path / "flow.yaml", tmp_path / "there"
    file.write_text(PASSED_ON)
    write_description(folder, file, FlowArguments(str(file), {}))
    run_chained(load_flow(folder), folder, Processes(), print)
    (folder / "steps" / "a" / "x").write_text("damaged")  # done again, and leaves what b has read
    outcome = run_chained(load_flow(folder), folder, Processes(), print)
    assert (outcome.status, outcome.ran) == ("completed", ["a", "b"])


def test_a_job_that_runs_with_other_settings_is_not_taken_for_the_step(tmp_path: Path) -> None:
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Queue()
    file.write_text(PASSED_ON)
    write_description(folder, file, FlowArguments(str(file), {}))
    chain = _Chain(load_flow(folder), folder, queue, print)
    _submit(chain)
    queue.goes_on = {job.name: {0: str(number)} for number, job in enumerate(queue.jobs, 1)}
    began = chain.now("a")
    (folder / "steps" / "a").mkdir(parents=True)
    recorder = Recorder(folder / "steps" / "a")
    recorder.write(FlowStepStart(began.digest, began.parts))
    recorder.close()
    _submit(_Chain(load_flow(folder), folder, queue, print))  # as it was
    write_description(folder, file, FlowArguments(str(file), {"v": "2"}))
    with pytest.raises(UserError, match=f"a runs as job 1, and its settings changed .* echelon flow stop {folder}"):
        _submit(_Chain(load_flow(folder), folder, queue, print))
    queue.state = lambda job: JobState(JobPhase.WAITS, "queued again")  # type: ignore[method-assign]
    _submit(_Chain(load_flow(folder), folder, queue, print))  # it will begin as described now
    assert len(queue.jobs) == 2


def test_a_jobs_number_stays_that_of_its_step(tmp_path: Path) -> None:
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Queue()
    text = "steps:\n  a:\n    command: echo ${n}\n    matrix: {n: [1, 2]}\n"
    for values, goes_on, numbers in (("[1, 2]", {}, [0, 1]), ("[0, 1]", {0: "1_0", 1: "1_1"}, [2]), ("[0]", {}, [0])):
        file.write_text(text.replace("[1, 2]", values))
        write_description(folder, file, FlowArguments(str(file), {}))
        queue.goes_on = {queue.jobs[0].name: goes_on} if queue.jobs else {}
        flow = load_flow(folder)
        if goes_on:
            assert queued_jobs(flow, folder, queue) == {"a[n=1]": "1_0", "a[n=2]": "1_1"}
        _submit(_Chain(flow, folder, queue, print))
        assert list(queue.jobs[-1].commands) == numbers
    assert queue.jobs[1].commands[2][-2:] == ["a[n=0]", "0"]


def test_an_array_is_of_jobs_that_need_the_same(tmp_path: Path) -> None:
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Queue()
    file.write_text(
        "steps:\n  a:\n    train: digits\n    matrix: {n: [1, 2], seed: [0, 1]}\n"
        "    settings: {workers: '${n}', seed: '${seed}'}\n"
    )
    write_description(folder, file, FlowArguments(str(file), {}))
    _submit(_Chain(load_flow(folder), folder, queue, print))
    assert [(list(job.commands), job.cores) for job in queue.jobs] == [([0, 1], 1), ([2, 3], 2)]


@pytest.mark.parametrize("queue", [Queue(), Processes()], ids=["ordered", "without order"])
def test_a_queue_is_given_the_highest_priority_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Queue
) -> None:
    monkeypatch.setattr("echelon.flows.chained.POLL_S", 0.01)
    monkeypatch.setattr(queue, "state", lambda job: JobState(JobPhase.ENDED, "over"))
    monkeypatch.setattr("echelon.flows.chained._SETTLE_S", 0.0)
    file, folder = tmp_path / "flow.yaml", tmp_path / "there"
    file.write_text("steps:\n" + "".join(f"  p{n}: {{command: echo, priority: {n}}}\n" for n in (1, 3, 2)))
    write_description(folder, file, FlowArguments(str(file), {}))
    run_chained(load_flow(folder), folder, queue, print)
    assert [job.name.split("-")[1] for job in queue.jobs] == ["p3", "p2", "p1"]


class Stoppable(Queue):
    """A queue whose jobs end when they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[str] = []

    def stop(self, job: str) -> None:
        self.stopped.append(job)


def test_jobs_that_nobody_follows_are_shown_and_ended(tmp_path: Path) -> None:
    file, folder, queue = tmp_path / "flow.yaml", tmp_path / "there", Stoppable()
    file.write_text(FLOW)
    folder.mkdir()
    write_description(folder, file, FlowArguments(str(file), {}))
    flow = load_flow(folder)
    _submit(_Chain(flow, folder, queue, print))
    names = {job.name: job for job in queue.jobs}
    queue.goes_on = {name: {0: "7"} if not job.is_array else {1: "8_1"} for name, job in names.items()}
    found = queued_jobs(flow, folder, queue)
    assert found == {
        "data": "7", "train[seed=1]": "8_1", "tune[seed=0,lr=0.2]": "8_1", "best": "7",
    }  # fmt: skip
    step_folder(folder, "data").mkdir(parents=True)
    recorder = Recorder(step_folder(folder, "data"))
    recorder.write(FlowStepStart("x"))
    recorder.close()
    assert step_statuses(flow, folder)[0].stands is Stands.CUT_SHORT
    assert step_statuses(flow, folder, set(found))[0].stands is Stands.RUNS
    stopped = stop_queued(flow, folder, queue, print)
    assert sorted(stopped) == sorted(found) and len(queue.stopped) == 4
    assert stopped.index("best") < stopped.index("tune[seed=0,lr=0.2]") < stopped.index("data")


def test_a_flow_is_resumed_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.flows.chained.POLL_S", 0.01)
    monkeypatch.setattr("echelon.flows.run._chains", {"local": None, "there": Processes()}.__getitem__)
    file, folder = tmp_path / "flow.yaml", tmp_path / "run"
    file.write_text('steps:\n  a:\n    command: [sh, -c, "test -e ${folder}/../../GO"]\n')
    said: list[str] = []
    assert start_flow(FlowRequest(str(file), "there", str(folder)), said.append).status == "partial"
    (folder / "GO").touch()
    assert load_arguments(folder).on == "there"
    assert start_flow(FlowRequest(str(folder), resume=True), said.append).status == "completed"
    assert [line for line in said if "job" in line] == ["a: job 1", "a: job 2"]
    assert start_flow(FlowRequest(str(folder), "local", resume=True), said.append).status == "completed"
    assert load_arguments(folder).on == "local"


def test_two_processes_do_not_do_the_same_step(tmp_path: Path) -> None:
    with (
        only_start(tmp_path / "step"),
        pytest.raises(UserError, match="does this step"),
        only_start(tmp_path / "step", patience_s=0.0),
    ):
        raise AssertionError


def test_a_steps_cost_is_that_of_all_its_starts(tmp_path: Path) -> None:
    file, folder = tmp_path / "flow.yaml", tmp_path / "there"
    file.write_text("steps:\n  a:\n    command: echo\n    resources: {gpus: 2}\n")
    write_description(folder, file, FlowArguments(str(file), {}))
    step_folder(folder, "a").mkdir(parents=True)
    recorder = Recorder(step_folder(folder, "a"))
    for fingerprint, status, seconds in (("x", "failed", 100.0), ("y", "stopped", 3600.0), ("y", "completed", 1800.0)):
        recorder.write(FlowStepStart(fingerprint))
        recorder.write(FlowStepEnd(fingerprint, status, "", seconds))
    recorder.close()
    (found,) = step_statuses(load_flow(folder), folder)
    assert (found.seconds, found.starts) == (5400.0, 3)
    page = page_text(load_flow(folder), [found])
    assert "GPU hours" in page and ">1.500<" in page and ">3.000<" in page
