"""Flows of small commands, whole: what runs again and what does not, what a failure stops, what a kill leaves."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.checkpoint.files import entries
from echelon.cli.flow import _logs
from echelon.core.errors import UserError
from echelon.flows.base import StepResources, step_folder
from echelon.flows.driver import FlowOutcome, run_flow
from echelon.flows.page import page_text
from echelon.flows.resolve import read_flow
from echelon.flows.run import FlowRequest, plan_flow, start_flow
from echelon.flows.state import (
    FlowArguments,
    Stands,
    load_flow,
    only_driver,
    only_start,
    step_statuses,
    write_description,
)
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import FlowStepEnd, FlowStepStart
from echelon.trainer.folder import CONFIG_FILE

FLOW = """\
parameters: {word: b, broken: "no"}
steps:
  data:
    prepare: own:data
    settings: {lines: 3}
    outputs: {data: data.txt}
  upper:
    command: [sh, -c, "test ${broken} = no && tr ab AB <${data.data} >${folder}/out.txt"]
    outputs: {text: out.txt}
  count:
    command: [sh, -c, "wc -l <${data.data} >${folder}/n.txt; echo ${word} >>${folder}/n.txt"]
    outputs: {n: n.txt}
  all:
    command: [sh, -c, "cat ${upper.text} ${count.n} >${folder}/all.txt"]
    outputs: {all: all.txt}
"""
OWN = "import helper\n\ndef data(folder, lines: int):\n    (folder / 'data.txt').write_text(helper.LINE * lines)\n"


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("LINE = 'ab\\n'\n")
    (tmp_path / "flow.yaml").write_text(FLOW)
    return tmp_path / "flow.yaml"


def _run(file: Path, **parameters: str) -> FlowOutcome:
    return start_flow(FlowRequest(str(file), run=str(file.parent / "there"), parameters=parameters), print)


def _text(file: Path) -> str:
    return (step_folder(file.parent / "there", "all") / "all.txt").read_text()


@pytest.mark.long
def test_exactly_what_changed_runs_again(flow_file: Path) -> None:
    assert sorted(_run(flow_file).ran) == ["all", "count", "data", "upper"]
    assert _text(flow_file).split() == ["AB", "AB", "AB", "3", "b"]
    assert _run(flow_file).ran == []
    assert _run(flow_file, word="c").ran == ["count", "all"]
    (step_folder(flow_file.parent / "there", "count") / "n.txt").write_text("damaged")
    assert _run(flow_file, word="c").ran == ["count"]  # it came out as it was: nothing below runs
    (flow_file.parent / "helper.py").write_text("LINE = 'a\\n'\n")
    assert sorted(_run(flow_file, word="c").ran) == ["all", "count", "data", "upper"]
    assert _text(flow_file).split() == ["A", "A", "A", "3", "c"]


@pytest.mark.long
def test_a_failure_stops_what_needs_it_and_nothing_else(flow_file: Path) -> None:
    outcome = _run(flow_file, broken="yes")
    assert outcome.status == "partial" and outcome.failed == ["upper"] and outcome.blocked == ["all"]
    assert sorted(outcome.ran) == ["count", "data"]
    folder = flow_file.parent / "there"
    found = {each.step.name: each.stands for each in step_statuses(load_flow(folder), folder)}
    assert found == {"data": Stands.DONE, "upper": Stands.FAILED, "count": Stands.DONE, "all": Stands.BLOCKED}
    page = page_text(load_flow(folder), step_statuses(load_flow(folder), folder))
    assert "upper" in page and "failed" in page and "<svg" in page
    mended = _run(flow_file)
    assert mended.status == "completed" and mended.ran == ["upper", "all"]


def test_a_step_that_waits_for_room_is_looked_at_once(tmp_path: Path) -> None:
    step = "  {}: {{command: [sh, -c, 'sleep 0.5; echo ${{x}}'], resources: {{cores: 1}}}}\n"
    (tmp_path / "flow.yaml").write_text(f"parameters: {{x: 1}}\nsteps:\n{step.format('a')}{step.format('b')}")
    said: list[str] = []
    for x in ("1", "2"):
        request = FlowRequest(str(tmp_path / "flow.yaml"), run=str(tmp_path / "there"), parameters={"x": x}, cores=1)
        start_flow(request, said.append)
    assert [line for line in said if "again" in line] == [f"{name}: again, for its settings changed" for name in "ab"]


def test_a_command_ends_with_all_that_its_shell_has_started(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(
        'steps:\n  a:\n    command: [sh, -c, "sleep 987654 & echo $! >${folder}/pid; wait"]\n'
        "    resources: {time: 1s}\n"
    )
    outcome = _run(tmp_path / "flow.yaml")
    assert outcome.failed == ["a"]
    pid = int((step_folder(tmp_path / "there", "a") / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]


def test_two_drivers_exclude_each_other(flow_file: Path) -> None:
    with only_driver(flow_file.parent / "there"), pytest.raises(UserError, match="goes on in"):
        _run(flow_file)


def test_a_step_that_needs_more_than_there_is_is_refused(flow_file: Path) -> None:
    flow_file.write_text(f"{FLOW}    resources: {{cores: 100000}}\n")
    with pytest.raises(UserError, match="line 14: step all needs 100000 cores"):
        _run(flow_file)
    assert not (flow_file.parent / "there").exists()


def test_what_is_lacking_is_said() -> None:
    assert StepResources(1).lacking(StepResources(2, 1e9)) == ""
    assert (
        StepResources(1, 2e9, 1).lacking(StepResources(2, 1e9)) == "1 GPUs (there are 0), 2 GB of memory (there are 1)"
    )


@pytest.mark.long
def test_a_killed_driver_loses_nothing_and_repeats_nothing(flow_file: Path) -> None:
    folder, draw = flow_file.parent / "there", random.Random(0)
    command = [sys.executable, "-m", "echelon", "flow", str(flow_file), "--run", str(folder)]
    kills = 0
    for _ in range(40):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=draw.uniform(0.4, 2.0) if kills < 6 else 200)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)
            kills += 1
            continue
        assert process.returncode == 0, errors
        break
    assert _text(flow_file).split() == ["AB", "AB", "AB", "3", "b"]
    for name in load_flow(folder).steps:
        where = step_folder(folder, name)
        ends = [end for end in read_records(where, FlowStepEnd) if end.status == "completed"]
        assert len(ends) == 1, f"{name} was done {len(ends)} times"
        assert max(start.t for start in read_records(where, FlowStepStart)) < ends[0].t


@pytest.mark.long
def test_a_training_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    file, folder = tmp_path / "flow.yaml", tmp_path / "there"
    step = "  {}:\n    train: digits\n    settings: {{model: mlp, workers: 1, epochs: 3, checkpoint-every: 2}}\n"
    file.write_text("steps:\n" + step.format("a"))
    command = [sys.executable, "-m", "echelon", "flow", str(file), "--run", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    checkpoints = step_folder(folder, "a") / "run" / "checkpoints"
    until = time.monotonic() + 200
    while not entries(checkpoints) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait(30)
    done = start_flow(FlowRequest(str(folder), resume=True), print)
    assert done.status == "completed"
    starts = read_records(step_folder(folder, "a"), FlowStepStart)
    assert len(starts) == 1 or starts[-1].goes_on


TUNED = """\
parameters: {{lr: 0.01}}
steps:
  pretrain:
    train: digits
    settings: {small}
  calm:
    finetune: ["${{pretrain.run}}", digits]
    settings: {tuned}
  tune:
    finetune: ["${{pretrain.run}}", digits]
    settings:
      lr: ${{lr}}
      max_steps: 2
      workers: 1
  judge:
    evaluate: ${{tune.run}}
    settings: {{workers: 1}}
  best:
    select: ["${{calm.run}}", "${{tune.run}}"]
""".format(small="{model: mlp, workers: 1, max_steps: 2}", tuned="{workers: 1, max_steps: 2, lr: 0.01}")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_setting_of_a_fine_tuning_runs_exactly_the_steps_below_it(tmp_path: Path) -> None:
    file = tmp_path / "flow.yaml"
    file.write_text(TUNED)
    assert sorted(_run(file).ran) == ["best", "calm", "judge", "pretrain", "tune"]
    below = {"tune", "judge", "best"}
    request = FlowRequest(str(file), run=str(tmp_path / "there"), parameters={"lr": "0.02"})
    planned = [line for line in plan_flow(request) if "would run" in line]
    assert {line.partition(":")[0] for line in planned} == below
    assert "tune: would run, for its settings changed" in planned
    changed = _run(file, lr="0.02")
    assert set(changed.ran) == below and set(changed.kept) == {"pretrain", "calm"}
    shutil.rmtree(step_folder(tmp_path / "there", "tune") / "run" / "checkpoints")
    (step_folder(tmp_path / "there", "calm") / "run" / CONFIG_FILE).write_text("")
    planned = [line for line in plan_flow(request) if "damaged" in line]
    assert planned == [f"{name}: would run, for its outputs are damaged" for name in ("calm", "tune")]


def test_logs_of_no_step_are_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes a step too, one of a, b"):
        _logs(tmp_path, "", ["a", "b"])


def test_a_step_that_was_cut_short_does_not_run_while_a_driver_does_another(tmp_path: Path) -> None:
    file, folder = tmp_path / "flow.yaml", tmp_path / "there"
    file.write_text("steps:\n  a:\n    command: echo\n")
    write_description(folder, file, FlowArguments(str(file), {}))
    where = step_folder(folder, "a")
    where.mkdir(parents=True)
    recorder = Recorder(where)
    recorder.write(FlowStepStart("x"))
    recorder.close()
    with only_driver(folder):
        assert step_statuses(load_flow(folder), folder)[0].stands is Stands.CUT_SHORT
        with only_start(where):
            assert step_statuses(load_flow(folder), folder)[0].stands is Stands.RUNS


def test_what_trains_without_a_gpu_where_there_are_some_is_told(tmp_path: Path) -> None:
    file, told = tmp_path / "flow.yaml", list[str]()
    settings = ("{}", "{device: cpu}", "{on: ray}")
    steps = [f"  t{i}: {{train: digits, settings: {each}, needs: [stop]}}" for i, each in enumerate(settings)]
    steps += ["  g: {train: digits, resources: {gpus: 1}, needs: [stop]}", "  stop: {command: sh -c 'exit 1'}"]
    file.write_text("\n".join(["steps:", *steps]))
    run_flow(read_flow(file), tmp_path / "there", StepResources(64, 1e12, 2), told.append)
    assert [line for line in told if "CPU" in line] == ["t0: runs on the CPU: give it `resources: {gpus: 1}` for a GPU"]
