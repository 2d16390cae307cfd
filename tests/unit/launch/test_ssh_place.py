"""The ssh place: what is refused, its commands, and parts that run, die and are silent, with an ssh that stays here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import psutil
import pytest

from echelon.core.errors import UserError
from echelon.launch.places import PLACES, PlaceChoice, carried
from echelon.launch.places.cluster import JobPhase, NodeRank, PlaceSilent, Submission
from echelon.launch.places.ssh import RANK_VARIABLE, Ssh

SSH = """#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done
[ "$1" = -4 ] && shift
host=$1; shift
[ -e {folder}/silent-$host ] && {{ echo "connect to host $host: no route" >&2; exit 255; }}
[ -e {folder}/greets ] && cat {folder}/greets
[ -e {folder}/no-shell ] && exit 0
export SSH_CONNECTION="10.0.0.9 5 10.0.0.1 22" XDG_STATE_HOME={folder}/state-$host
exec sh -c "$*"
"""
PYTHON = """#!/bin/sh
if [ "$1" = - ]; then cat >/dev/null; echo '{"versions": {"echelon": "1", "torch": "2", "Python": "3.11"}, "port": 29}'
else trap 'exit 7' TERM; trap 'exit 0' USR1; echo "$ECHELON_SSH_RANK" >>"$3/ranks"; while :; do sleep 0.05; done; fi
"""
VERSIONS = {"echelon": "1", "torch": "2", "Python": "3.11"}
DEADLINE_S = 30.0


def _build(text: str) -> Ssh:
    place = PLACES.build(text)
    assert isinstance(place, Ssh)
    return place


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"ssh": SSH.format(folder=tmp_path), "python": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def _wait(ready: Callable[[], object]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssh", "missing"),
        ('ssh(hosts=a+"-oProxyCommand=x")', "is no name of a host"),
        ("ssh(hosts=a+a)", "stands there twice"),
        ("ssh(hosts=a, folder=here)", "must be a whole path"),
        ("ssh(host=a)", "did you mean hosts?"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--on") as refused:
        PlaceChoice(text).cluster()
    assert words in str(refused.value)


def test_the_commands_are_a_script() -> None:
    place = _build('ssh(hosts=a+"me@10.0.0.2", options="-p 2222")')
    text = place.text(Submission(Path("/home/me/runs/it's 1"), Path("/home/me"), "/opt/python"))
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    assert "-p 2222 a sh -s <<'END'" in text and "-p 2222 me@10.0.0.2 sh -s" in text
    assert "/opt/python -m echelon.run.node" in text and place.machines == 2
    assert _build("ssh(hosts=a)").machines == 1


def test_parts_run_die_come_back_and_stop(programs: Path) -> None:
    place = _build(f'ssh(hosts=a+b+c, python="{programs}/python")')
    submission = Submission(programs / "run", programs)
    submission.run.mkdir()
    (submission.run / "config.yaml").write_text("")
    submission.files.prepare()
    (submission.files.folder / "versions").write_text('{"echelon": "1", "torch": "2", "Python": "3.11"}')
    place.check(submission, VERSIONS)
    with pytest.raises(UserError, match=r"a has torch 2, here it is 3: use the same"):
        place.check(submission, {**VERSIONS, "torch": "3"})
    job = place.submit(submission)
    try:
        _wait(lambda: len((submission.run / "ranks").read_text().splitlines()) == 3)
        assert place.state(job).text == "running on a, b, c"
        assert submission.files.meeting(NodeRank(0, "a", "", job)) == "10.0.0.1:29"
        (programs / "silent-c").touch()
        state = place.state(job)
        assert state.phase is JobPhase.RUNS and "running on a, b; c does not answer" in state.text
        pid = int((programs / "state-b" / "echelon" / "parts" / f"{job}.1" / "pid").read_text())
        os.kill(pid, 9)
        _wait(lambda: "the part on b died" in place.state(job).text)
        place.keep(job, submission)
        _wait(lambda: len((submission.run / "ranks").read_text().splitlines()) == 4)
        assert place.state(job).text.startswith("running on a, b;")
        (programs / "silent-c").unlink()
    finally:
        place.stop(job)
    _wait(lambda: place.state(job).phase is JobPhase.ENDED)


@pytest.fixture
def begun(programs: Path) -> Iterator[tuple[Ssh, Submission, str]]:
    """Give a run whose parts are there on a and b, and end it."""
    place = _build(f'ssh(hosts=a+b, python="{programs}/python")')
    submission = Submission(programs / "run", programs)
    submission.run.mkdir()
    (submission.run / "config.yaml").write_text("")
    submission.files.prepare()
    (submission.files.folder / "versions").write_text(json.dumps(VERSIONS))
    job = place.submit(submission)
    try:
        _wait(lambda: len((submission.run / "ranks").read_text().splitlines()) == 2)
        yield place, submission, job
    finally:
        place.stop(job)
        _wait(lambda: place.state(job).phase is JobPhase.ENDED)


def _process(programs: Path, job: str, number: int) -> psutil.Process:
    pid = programs / f"state-{'ab'[number]}" / "echelon" / "parts" / f"{job}.{number}" / "pid"
    return psutil.Process(int(pid.read_text()))


def test_a_part_between_its_end_and_its_code_is_not_dead(begun: tuple[Ssh, Submission, str], programs: Path) -> None:
    place, submission, job = begun
    part = _process(programs, job, 1)
    keeper = part.parent()
    assert keeper is not None
    keeper.suspend()
    try:
        part.send_signal(signal.SIGUSR1)
        _wait(lambda: part.status() == psutil.STATUS_ZOMBIE)
        assert place.keep(job, submission).text == "running on a, b"
    finally:
        keeper.resume()
    _wait(lambda: place.keep(job, submission).text == "running on a")
    assert len((submission.run / "ranks").read_text().splitlines()) == 2, "a part that had ended began again"


def test_what_a_shell_prints_when_it_starts_is_no_answer(
    begun: tuple[Ssh, Submission, str], programs: Path, tmp_path: Path
) -> None:
    place, submission, job = begun
    (programs / "greets").write_bytes(b"welcome to a host\nZ\xfcrich 1.0\nno end of line: ")  # Latin-1
    place.check(submission, VERSIONS)
    assert place.state(job).text == "running on a, b"
    process = _process(programs, job, 1)
    process.kill()
    _wait(lambda: "the part on b died" in place.state(job).text)
    place.keep(job, submission)
    _wait(lambda: place.state(job).text == "running on a, b")
    ssh = [str(programs / "ssh"), "a"]
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "file").write_text("x")
    (tmp_path / "sent" / (latin := os.fsdecode(b"Z\xfcrich"))).write_text("y")
    carried.send(ssh, tmp_path / "sent", ["file", latin], PurePosixPath(tmp_path / "there"))
    run = tmp_path / "brought"
    run.mkdir()
    carried.bring_run(ssh, str(tmp_path / "there"), run)
    assert (run / "file").read_text() == "x" and (run / latin).read_text() == "y"
    (programs / "no-shell").touch()
    with pytest.raises(UserError, match="a: it runs no commands given over ssh: welcome to a host Z\ufffdrich"):
        place.check(submission, VERSIONS)
    with pytest.raises(UserError, match="it runs no commands given over ssh"):
        carried.send(ssh, tmp_path / "sent", ["file"], PurePosixPath(tmp_path / "there"))
    (programs / "no-shell").unlink()


def test_a_first_host_that_is_reached_by_ipv6_is_refused_where_others_come_to_it(programs: Path) -> None:
    ssh = programs / "ssh"
    ssh.write_text(ssh.read_text().replace("10.0.0.9 5 10.0.0.1 22", "fd00::9 5 fd00::1 22"))
    submission, python = Submission(programs / "run", programs), f'python="{programs}/python"'
    with pytest.raises(UserError, match=r"a is reached by IPv6 \(fd00::1\), and machines meet by IPv4"):
        _build(f"ssh(hosts=a+b, {python})").check(submission, VERSIONS)
    _build(f"ssh(hosts=a, {python})").check(submission, VERSIONS)


def test_who_did_not_hear_of_the_end_is_stopped(
    begun: tuple[Ssh, Submission, str], programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, submission, job = begun
    _process(programs, job, 0).send_signal(signal.SIGUSR1)
    _wait(lambda: place.keep(job, submission).text == "running on b")
    _process(programs, job, 1).kill()
    _wait(lambda: "the part on b died" in place.keep(job, submission).text)
    assert len((submission.run / "ranks").read_text().splitlines()) == 2, "a part of a run that is over began again"
    place._start_again(submission, job, 1)  # as if it had begun again a moment before the end
    _wait(lambda: place.keep(job, submission).text == "running on b")
    monkeypatch.setattr("echelon.launch.places.ssh.MOST_GOODBYE_S", -1.0)
    _wait(lambda: place.keep(job, submission).phase is JobPhase.ENDED)


def test_hosts_that_do_not_answer(programs: Path) -> None:
    (programs / "silent-a").touch()
    place = _build("ssh(hosts=a)")
    with pytest.raises(UserError, match="a does not answer: connect to host a: no route"):
        place.check(Submission(Path("run")), VERSIONS)
    with pytest.raises(PlaceSilent, match="a does not answer"):
        place.state("job")


def test_a_seat() -> None:
    node_rank = _build("ssh(hosts=a+b)").node_rank({RANK_VARIABLE: NodeRank(1, "b", "10.0.0.1:29", "job").to_json()})
    assert node_rank == NodeRank(1, "b", "10.0.0.1:29", "job")
    with pytest.raises(UserError, match="is not set"):
        _build("ssh(hosts=a)").node_rank({})


def test_the_code_and_the_run_travel(programs: Path) -> None:
    here, there, ssh = programs / "work", PurePosixPath(programs / "there" / "it's"), [str(programs / "ssh"), "a"]
    run = here / "runs" / "one"
    for name in ("own.py", ".gitignore", "a.secret", "part/b.py", "runs/one/config.yaml", "runs/one/machines/secret",
                 "runs/one/place/exit", "runs/one/checkpoints/step-5/model"):  # fmt: skip
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("*.secret" if name == ".gitignore" else name)
    (run / "machines" / "secret").chmod(0o600)
    files = carried.working_files(here, run)
    assert files == [".gitignore", "own.py", "part/b.py"]
    carried.send(ssh, here, files, there / "code")
    carried.send_run(ssh, run, there / "run", is_first=True)
    host = Path(there / "run")
    assert sorted(p.name for p in Path(there / "code").iterdir()) == [".gitignore", "own.py", "part"]
    assert (host / "machines" / "secret").stat().st_mode & 0o777 == 0o600 and not (host / "place" / "exit").exists()
    (host / "checkpoints" / "step-5").rename(host / "checkpoints" / "step-9")
    (host / "record.jsonl").write_text("{}")
    (host / "place").mkdir(exist_ok=True)
    (host / "place" / "exit").write_text("0 ")
    (host / "place" / "stop").write_text("of the host")
    for _ in range(3):  # the second time nothing is new: the third time nobody is asked
        carried.bring_run(ssh, str(host), run)
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-9"]
        assert (run / "record.jsonl").read_text() == "{}" and (run / "place" / "exit").read_text() == "0 "
        assert not (run / "place" / "stop").exists()
        if carried.Brought.read(run, 0).whole:
            (programs / "silent-a").touch()
    assert (programs / "silent-a").exists()
    (run / "place" / "exit").unlink()  # as a new start does
    with pytest.raises(PlaceSilent, match="no route"):
        carried.bring_run(ssh, str(host), run)


def test_links_and_repositories_within_travel_too(tmp_path: Path) -> None:
    work, inner = tmp_path / "work", tmp_path / "work" / "vendor" / "lib"
    inner.mkdir(parents=True)
    for folder in (work, inner):
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        (folder / "own.py").write_text("x = 1")
    (tmp_path / "elsewhere").mkdir()
    (work / "linked").symlink_to(tmp_path / "elsewhere")
    assert carried.working_files(work, work / "runs" / "one") == ["linked", "own.py", "vendor/lib/own.py"]


def test_a_link_to_nowhere_travels_and_a_file_that_cannot_be_read_is_named(programs: Path) -> None:
    here = programs / "work"
    here.mkdir()
    (here / ".#train.py").symlink_to("me@laptop.1")  # as an editor marks a file that is being changed
    (here / ".gitignore").write_text("runs")
    submission = Submission(here / "runs" / "one", here)
    submission.run.mkdir(parents=True)
    place = _build(f'ssh(hosts=a, folder="{programs}/there")')
    place._send(submission)
    code = Path(carried.base_there(place.folder, submission.run) / "code")
    assert (code / ".#train.py").readlink() == Path("me@laptop.1")
    with pytest.raises(UserError, match=r"work/gone.py cannot be sent \(No such file or directory\): make it readable"):
        carried.send([str(programs / "ssh"), "a"], here, ["gone.py"], PurePosixPath(code))


def test_checkpoints_that_are_not_here_are_kept_aside(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, there = programs / "work" / "runs" / "one", PurePosixPath(programs / "there")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("a: 1")
    ssh = [str(programs / "ssh"), "a"]
    carried.send_run(ssh, run, there / "run", is_first=True)
    newer = Path(there / "run" / "checkpoints" / "step-9" / "manifest.sha256")
    newer.parent.mkdir(parents=True)
    newer.write_text("of the host alone")
    carried.send_run(ssh, run, there / "run", is_first=True)
    kept = next(Path(there).glob("run-*"))
    assert (kept / "checkpoints" / "step-9" / "manifest.sha256").read_text() == "of the host alone"
    assert not newer.exists() and str(kept) in capsys.readouterr().out


def test_the_first_host_is_sent_what_is_newer_here(programs: Path) -> None:
    there, ssh, run = PurePosixPath(programs / "there"), [str(programs / "ssh"), "a"], programs / "runs" / "one"
    for name in ("config.yaml", "record.jsonl", "checkpoints/step-5/manifest.sha256", "place/jobs"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    carried.send_run(ssh, run, there, is_first=True)
    (run / "checkpoints" / "step-5").rename(run / "checkpoints" / "step-9")  # it went on here
    (run / "config.yaml").write_text("other settings")
    carried.send_run(ssh, run, there, is_first=True, is_new=False)
    assert Path(there / "checkpoints" / "step-5").exists() and not Path(there / "checkpoints" / "step-9").exists()
    assert Path(there / "config.yaml").read_text() == "other settings"
    carried.send_run(ssh, run, there, is_first=True)
    assert [path.name for path in Path(there / "checkpoints").iterdir()] == ["step-9"]
    Path(there / "of the host").touch()
    carried.send_run(ssh, run, there, is_first=True)
    assert Path(there / "of the host").exists(), "what is the same there already is not sent again"


def test_logs_of_other_hosts_come_too(programs: Path) -> None:
    ssh, run, other = [str(programs / "ssh"), "b"], programs / "one", programs / "other"
    run.mkdir()
    for name in ("logs/rank1.log", "logs/rank0.log", "record.jsonl"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(f"{name} of b")
    carried.Brought({"logs/rank0.log": "5 99999999999.0"}).write(run, 0)  # the first host has a newer one
    carried.bring_logs(ssh, str(other), run, 1)
    assert [path.name for path in (run / "logs").iterdir()] == ["rank1.log"] and not (run / "record.jsonl").exists()
    with (other / "logs" / "rank1.log").open("a") as log:
        log.write(", and more")
    carried.bring_logs(ssh, str(other), run, 1)
    assert (run / "logs" / "rank1.log").read_text() == "logs/rank1.log of b, and more"
