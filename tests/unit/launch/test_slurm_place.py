"""The Slurm place: the exact script, what is refused, what an allocation must be, what the queue's words mean."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.launch import places
from echelon.launch.places import PLACES, PlaceChoice
from echelon.launch.places.cluster import ChainedJob, JobPhase, NodeRank, PlaceFiles, RunArray, Submission
from echelon.launch.places.slurm import Slurm

SUBMISSION = Submission(Path("/home/me/runs/digits 1"), Path("/home/me"), "/opt/python")
GOLDEN = """\
#!/bin/bash
#SBATCH --job-name='echelon-digits 1'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=480
#SBATCH --partition=main
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output='/home/me/runs/digits 1/logs/slurm.out'
#SBATCH --chdir=/home/me
#SBATCH --account=x --constraint=y

module load cuda

job=$SLURM_JOB_ID
# A task of an array has a name of its own: the number alone may be that of the whole array.
[ -n "$SLURM_ARRAY_JOB_ID" ] && job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID && unset ${!SLURM_ARRAY_@}
# A signal lets every node save a checkpoint and end: before the time limit, at a preemption, at a stop.
trap 'scancel --signal=TERM "$job"' TERM  # to the tasks alone: srun itself would kill them
rm -f '/home/me/runs/digits 1/place/exit'
# srun has not taken the batch job's cores for its tasks since Slurm 22.05.
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 --open-mode=append --output='/home/me/runs/digits 1/logs/node%n.out' \
/opt/python -m echelon.run.node '/home/me/runs/digits 1' &
step=$!
until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done
# What was noted is how the run ended, whatever became of the tasks that srun killed after it.
[ -e '/home/me/runs/digits 1/place/exit' ] && read -r code _ <'/home/me/runs/digits 1/place/exit'
case "$code" in 0|1|2|126|127) exit "$code" ;; esac  # completed, failed, refused; there is no such command

# Stopped or died before its last epoch: go on later, unless somebody stopped it, or Slurm does that itself.
[ -e '/home/me/runs/digits 1/place/stop' ] && exit "$code"
[ "$(squeue -h -j "$job" -o %T)" = RUNNING ] || exit "$code"
scontrol requeue "$job" || sbatch --parsable '/home/me/runs/digits 1/place/submitted' \
>>'/home/me/runs/digits 1/place/jobs'
exit "$code"
"""
ALLOCATION = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7",
              "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURMD_NODENAME": "n2", "SLURM_CPUS_ON_NODE": "1"}  # fmt: skip


def _build(text: str) -> Slurm:
    place = PLACES.build(text)
    assert isinstance(place, Slurm)
    return place


def test_the_script_is_as_it_was(tmp_path: Path) -> None:
    text = (
        'slurm(nodes=2, gpus=4, cores=8, time=8h, partition=main, setup="module load cuda", '
        'extra="--account=x --constraint=y")'
    )
    script = _build(text).text(SUBMISSION)
    assert script == GOLDEN.replace(" \\\n", " ")
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("noted", "of_srun", "ends", "again"),
    [
        ("0", 0, 0, False),
        ("2 refused", 143, 2, False),  # srun killed the others because one had refused
        ("143", 0, 143, True),  # the time limit
        ("", 137, 137, True),  # a node's processes died
        ("", 127, 127, False),  # there is no such interpreter there
    ],
)
def test_what_is_queued_again(tmp_path: Path, noted: str, of_srun: int, ends: int, again: bool) -> None:
    run, programs = tmp_path / "run", tmp_path / "bin"
    for folder in (run / "place", run / "logs", programs):
        folder.mkdir(parents=True)
    note = f"echo '{noted}' >'{PlaceFiles(run).exit}'; " if noted else ""
    for name, does in {
        "srun": f"{note}exit {of_srun}",
        "squeue": "echo RUNNING",
        "scontrol": f"echo again >>'{tmp_path / 'again'}'",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{programs}:{os.environ['PATH']}"}
    script = _build("slurm(nodes=2)").text(Submission(run, tmp_path))
    assert subprocess.run(["bash", "-c", script], env=environment, check=False, timeout=60).returncode == ends
    assert (tmp_path / "again").exists() == again


def test_what_is_not_said_is_left_to_the_site() -> None:
    script = _build("slurm").text(SUBMISSION)
    assert not [option for option in ("--time", "--partition", "--gpus", "--cpus", "--account") if option in script]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slurm(nods=2)", "did you mean nodes?"),
        ("slurm(time=8)", "time must be a quantity such as 8h"),
        ("slurm(time=8gb)", "time must be a duration"),
        ("slurm(nodes=0)", "nodes must be at least 1"),
        ("slurm(time=1m, notice=1m)", "leaves nothing"),
        ("slrum", "did you mean slurm?"),
        ("local(nodes=2)", "no setting 'nodes'"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--on") as refused:
        PlaceChoice(text).cluster()
    assert words in str(refused.value)


def test_names_of_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "echelon" / "places.yaml"
    file.parent.mkdir()
    file.write_text('big: slurm(nodes=8, partition="gpu", time=8h)\nbad: slrum(nodes=1)\n')
    assert places.expanded("big(nodes=2)") == "slurm(nodes=2, partition=gpu, time=8h)"
    assert PlaceChoice("big").cluster() == _build("slurm(nodes=8, partition=gpu, time=8h)")
    for text, words in {"bad": "did you mean slurm?", "bog": "did you mean big?", "big(node=1)": "nodes"}.items():
        with pytest.raises(UserError) as refused:
            places.check_place(text)
        assert words in str(refused.value)
    file.write_text("big: [1]\n")
    with pytest.raises(UserError, match="expected a spec for each name"):
        places.check_place("big")


def test_the_seat_in_an_allocation() -> None:
    assert _build("slurm(nodes=2)").node_rank(ALLOCATION) == NodeRank(1, "n2", "10.0.0.1", "7-0")
    again = _build("slurm(nodes=2)").node_rank({**ALLOCATION, "SLURM_RESTART_COUNT": "3"})
    assert again.start == "7-3"


@pytest.mark.parametrize(
    ("text", "change", "words"),
    [
        ("slurm(nodes=3)", {}, "has 2 nodes, --on asks for 3"),
        ("slurm(nodes=2)", {"SLURM_NTASKS": "4"}, "has 4 tasks, --on asks for 2"),
        ("slurm(nodes=2, cores=4)", {}, "has 1 cores on this node, --on asks for 4"),
        ("slurm(nodes=2, gpus=2)", {"CUDA_VISIBLE_DEVICES": "0"}, "GPUs on each node, --on asks for 2"),
        ("slurm", {"SLURM_JOB_ID": None}, "started by srun"),
    ],
)
def test_an_allocation_unlike_the_request(
    monkeypatch: pytest.MonkeyPatch, text: str, change: dict[str, str | None], words: str
) -> None:
    if visible := change.get("CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = {name: value for name, value in {**ALLOCATION, **change}.items() if value is not None}
    with pytest.raises(UserError) as refused:
        _build(text).node_rank(environment)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "phase", "words"),
    [
        (
            "echo '7|PENDING|Resources||2026-01-01T10:00:00'",
            JobPhase.WAITS,
            "waiting for 2 nodes (Resources, expected at 2026",
        ),
        ("echo '7|RUNNING|None|n[1-2]|N/A'", JobPhase.RUNS, "running on n[1-2]"),
        ("echo '7|COMPLETING|None|n1|N/A'", JobPhase.RUNS, "completing"),
        ("echo '7|CANCELLED|None||N/A'", JobPhase.ENDED, "cancelled"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", JobPhase.ENDED, "no more in the queue"),
        ("true", JobPhase.ENDED, "no more in the queue"),
    ],
)
def test_the_queues_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, phase: JobPhase, words: str
) -> None:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state = _build("slurm(nodes=2)").state("7")
    assert state.phase is phase and words in state.text


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    submission = Submission(tmp_path)
    submission.files.prepare()
    with pytest.raises(UserError, match="sbatch is not there"):
        _build("slurm").submit(submission)


def test_files_between_machines(tmp_path: Path) -> None:
    files, first, again = (
        PlaceFiles(tmp_path),
        NodeRank(0, "n1", "10.0.0.1", "7-0"),
        NodeRank(0, "n1", "10.0.0.1", "7-1"),
    )
    files.prepare()
    assert (files.job(), files.ended(), files.meeting(first)) == ("", None, "")
    files.add_job("7")
    files.add_job("9")
    files.meet_at(first, "10.0.0.1:29400")
    assert files.meeting(first) == "10.0.0.1:29400" and not files.meeting(again)
    files.meet_at(again, "10.0.0.1:29500")
    files.end(2, "two\nlines")
    assert files.job() == "9" and files.ended() == (2, "two lines") and not files.meeting(first)
    files.prepare()
    assert files.ended() is None


def test_an_array_of_jobs_that_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, does in {"sbatch": "echo '12;lab'", "squeue": 'echo "$@" >$0.given; echo 12_0; echo 12_2'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place, script = _build("slurm(partition=main)"), tmp_path / "tune.sh"
    commands = {number: ["echo", f"it's {number}"] for number in (0, 2)}
    array = ChainedJob("tune", script, commands, is_array=True, after=["7", "9_1"], cores=2, time_s=90)
    assert place.submit_chained(array) == {0: "12_0", 2: "12_2"} == place.chained("tune")
    text = script.read_text()
    for option in ("--array=0,2", "--dependency=afterok:7:9_1", f"--output={tmp_path}/tune-%a.out", "--time=5"):
        assert f"#SBATCH {option}\n" in text
    ran = subprocess.run(["bash", str(script)], env={**os.environ, "SLURM_ARRAY_TASK_ID": "2"}, capture_output=True)
    assert ran.stdout == b"it's 2\n"
    assert place.submit_chained(replace(array, commands={0: ["echo"]}, is_array=False)) == {0: "12"}
    assert "--array" not in script.read_text() and script.read_text().endswith("\nexec echo\n")


def test_an_array_of_runs_whose_tasks_go_on_by_their_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in {
        "sbatch": "echo 12",
        "srun": "exit 137",  # a node died
        "squeue": """case "$*" in
            *%i*) echo '12_0|RUNNING||n1|N/A'; echo '12_2|PENDING|Resources||N/A' ;;
            *) echo RUNNING ;;
        esac""",
        "scontrol": f"echo $@ ${{SLURM_ARRAY_JOB_ID-alone}} >>'{tmp_path / 'again'}'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place, runs = _build("slurm(time=1h)"), [Submission(tmp_path / f"run {n}", tmp_path) for n in range(3)]
    for each in runs:
        each.files.folder.mkdir(parents=True)
        (each.run / "logs").mkdir()
    jobs = place.submit_array(RunArray("study", tmp_path / "array.sh", runs, at_once=2))
    assert jobs == ["12_0", "12_1", "12_2"] and runs[1].files.text.read_text() == place.text(runs[1])
    text = (tmp_path / "array.sh").read_text()
    for option in ("--array=0-2%2", "--job-name=echelon-study", "--time=60", f"--output={tmp_path}/array.out"):
        assert f"#SBATCH {option}\n" in text
    task = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "13"}
    done = subprocess.run(["bash", str(tmp_path / "array.sh")], env={**os.environ, **task}, check=False, timeout=60)
    assert done.returncode == 137 and (tmp_path / "again").read_text() == "requeue 12_1 alone\n"
    assert (runs[1].run / "logs" / "slurm.out").exists() and not (runs[0].run / "logs" / "slurm.out").exists()
    phases = {job: state.phase for job, state in place.states(jobs).items()}
    assert phases == {"12_0": JobPhase.RUNS, "12_1": JobPhase.ENDED, "12_2": JobPhase.WAITS}


def test_a_percent_sign_in_a_folder_stands_for_itself() -> None:
    place, run = _build("slurm"), Submission(Path("/home/me/runs/50%n"), Path("/home/me"))
    chained = ChainedJob("tune", run.run / "a%j.sh", {0: ["echo"]}, is_array=True)
    array = RunArray("study", run.run / "a%j.sh", [run], at_once=1)
    for text, outputs in (
        (place.text(run), ["/home/me/runs/50%%n/logs/slurm.out", "/home/me/runs/50%%n/logs/node%n.out"]),
        (place.chained_text(chained), ["/home/me/runs/50%%n/a%%j-%a.out"]),
        (place.array_text(array), ["/home/me/runs/50%%n/a%%j.out"]),
    ):
        assert [word.removeprefix("--output=") for word in text.split() if word.startswith("--output=")] == outputs
