"""Machines reached by ssh: the system's OpenSSH client starts one part of the run on each.

A part keeps running if the connection is lost. If a host restarts, its part is started again while you follow the run;
the other hosts wait for it (`--machine-patience`). With `folder`, the working folder is sent to each host, and what the
first host writes is copied back. Without `folder`, all hosts and this machine share a disk.

Helps: Runs on a few machines without a queue.
Needs: ssh keys without a password, and the same versions of Python, torch and Echelon on each host.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import ClassVar, TypeVar

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.units import format_bytes
from echelon.launch.places import carried
from echelon.launch.places.cluster import (
    ANSWER_S,
    NODE_MODULE,
    Cluster,
    JobPhase,
    JobState,
    NodeRank,
    PlaceSilent,
    Submission,
)
from echelon.messages.identity import SECRET_VARIABLE

T = TypeVar("T")

RANK_VARIABLE = "ECHELON_SSH_RANK"
CONNECT_S = 10
MOST_STARTS = 10  # of one part
MOST_CHANGE_S = 120.0  # workers finish what is under way, or start
MOST_GOODBYE_S = 30.0  # after the first host's part; it waits for 10 s until the others know that the run is over
_NO_CONNECTION = 255  # the exit code of ssh itself
_HOST = re.compile(r"(?!-)[\w.@:%\[\]-]+")
_REFUSED = 2
_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3")  # fmt: skip

_PART = 'part="${{XDG_STATE_HOME:-$HOME/.local/state}}/echelon/parts/{job}.{number}"\n'
_START = """\
cd {folder} || exit 3
[ -f {run}/config.yaml ] || {{ echo "{run_words} is not there: without a common disk, give folder=DIR" >&2; exit 3; }}
mkdir -p "$part" {run}/logs || exit 3
rm -f "$part/pid" "$part/keeper" "$part/code"
echo start >>"$part/starts" || exit 3
: >>{run}/logs/node{number}.out || exit 3
export {variable}={node_rank}
setsid nohup sh -c 'echo "$$" >"$0/keeper"; "$@" & echo "$!" >"$0/pid"; wait "$!"
  echo "$? $(date +%s)" >"$0/code.new"; mv "$0/code.new" "$0/code"' "$part" \\
  {command} </dev/null >>{run}/logs/node{number}.out 2>&1 &
session=$!
looks=0
until [ -s "$part/pid" ]; do
  looks=$((looks + 1))
  [ "$looks" -lt 200 ] || {{ kill -s TERM -- "-$session" 2>/dev/null
    echo "the part of the run does not start: $part has no room, maybe" >&2; exit 3; }}
  sleep 0.1
done
"""
_RUNS = """\
runs() {{ kill -0 "$1" 2>/dev/null && {{ [ ! -e /proc/self ] || grep -q {module} "/proc/$1/cmdline" 2>/dev/null; }}; }}
"""
# The keeper outlives the command and notes its code: whoever sees neither of them before finds the code, if any.
_LOOK = """\
living=
for process in $(cat "$part/keeper" "$part/pid" 2>/dev/null); do runs "$process" && living=1; done
if [ -s "$part/code" ]; then read -r code at <"$part/code"; echo "ended $code $(($(date +%s) - at))"
elif [ "$living" ]; then echo runs
else echo gone; fi
"""
_STOP = 'pid=$(cat "$part/pid" 2>/dev/null) && runs "$pid" && kill -TERM "$pid" 2>/dev/null; true\n'
_PROBE = """\
import json, platform, socket
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try: return version(name)
    except PackageNotFoundError: return ""
with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
python = ".".join(platform.python_version_tuple()[:2])
print(json.dumps({"versions": {**{n: found(n) for n in ("echelon", "torch")}, "Python": python}, "port": port}))
"""


@dataclass(frozen=True)
class HostPart:
    """What a host says of its part of a run.

    Attributes:
        state: `runs`, `ended`, `gone` (it neither runs nor ended: the host began anew) or `silent`.
        detail: the exit code, or why the host does not answer.
        ended_s: how long ago it ended, by the host's clock.
    """

    host: str
    state: str
    detail: str = ""
    ended_s: float = 0.0

    @property
    def died(self) -> bool:
        """Whether it ended without that being said: it may be started again."""
        return self.state == "gone" or (self.state == "ended" and self.detail not in ("0", str(_REFUSED)))

    @property
    def is_done(self) -> bool:
        """Whether it ended in an orderly way: the first host's part ends so when the run is over."""
        return self.state == "ended" and self.detail == "0"


@dataclass(frozen=True)
class Ssh(Cluster):
    """Machines reached by ssh.

    Attributes:
        hosts: names as ssh knows them: a+b+c; in quotes if they contain an @ or start with a digit:
            "me@10.0.0.1"+"10.0.0.2". The first one records the run.
        folder: folder on each host for the code and the run; left out: a disk is shared.
        python: interpreter on the hosts; left out: this one's path, or python3 with `folder`.
        code: with `folder`: send the working folder, without what .gitignore names.
        options: other options of ssh, passed on unchanged: "-p 2222 -i key".
    """

    hosts: tuple[str, ...]
    folder: str = ""
    python: str = ""
    code: bool = True
    options: str = ""

    starts_again: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse what no host can be.

        Raises:
            ValueError: names the setting.
        """
        if isinstance(self.hosts, str):
            object.__setattr__(self, "hosts", (self.hosts,))
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"hosts: {host!r} is no name of a host")
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError("hosts: a host stands there twice; --workers says how many processes each has")
        if self.folder and not Path(self.folder).is_absolute():
            raise ValueError(f"folder={self.folder} must be a whole path on the hosts, such as '/data/echelon'")
        if "\n" in self.options:
            raise ValueError("options must be one line")

    @property
    def machines(self) -> int:
        """How many machines a run is given."""
        return len(self.hosts)

    @property
    def shares_disk(self) -> bool:
        """Whether a run's folder is common to this machine and the hosts."""
        return not self.folder

    def _ssh(self, host: str, more: Sequence[str] = ()) -> list[str]:
        return ["ssh", *_OPTIONS, *shlex.split(self.options), *more, host]

    def _run_there(self, run: Path) -> str:
        return str(carried.base_there(self.folder, run) / "run") if self.folder else str(run)

    def _folder_there(self, submission: Submission) -> str:
        if not self.folder:
            return str(submission.folder)
        return str(carried.base_there(self.folder, submission.run) / "code")

    def _python(self, submission: Submission) -> str:
        return self.python or ("python3" if self.folder else submission.python)

    def _start_script(self, submission: Submission, node_rank: NodeRank) -> str:
        run = self._run_there(submission.run)
        command = [self._python(submission), *submission.command[1:-1], run]
        return _PART.format(job=node_rank.start, number=node_rank.number) + _START.format(
            folder=shlex.quote(self._folder_there(submission)),
            run=shlex.quote(run),
            run_words=run.replace('"', "").replace("$", "").replace("`", "").replace("\\", ""),
            variable=RANK_VARIABLE,
            node_rank=shlex.quote(node_rank.to_json()),
            command=shlex.join(command),
            number=node_rank.number,
        )

    def text(self, submission: Submission) -> str:
        """Return the commands, one a host; JOB is a new name, and ADDRESS the first host's own, which it says."""
        return "\n".join(self._texts(submission, "ADDRESS", "JOB"))

    def _texts(self, submission: Submission, address: str, job: str) -> Iterator[str]:
        if self.folder:
            base = carried.base_there(self.folder, submission.run)
            yield f"# before: the run's folder, and the working folder if code=true, are sent to {base} on each host\n"
        for number, host in enumerate(self.hosts):
            script = self._start_script(submission, NodeRank(number, host, address, job))
            yield f"{shlex.join(self._ssh(host))} sh -s <<'END'\n{script}END\n"

    def check(self, submission: Submission, versions: Mapping[str, str]) -> None:
        """Refuse hosts that do not answer, or have other versions than these.

        Raises:
            UserError: names the first such host.
        """
        self._probe(versions)

    def _probe(self, versions: Mapping[str, str]) -> str:
        """Return the first host's own address with a free port, having seen that all hosts can take part.

        Raises:
            UserError: one cannot.
        """
        python = self._python(Submission(Path(), Path()))
        script = f'printf "%s\\n" "$SSH_CONNECTION"\n{shlex.quote(python)} - <<"END"\n{_PROBE}END\n'
        by_ipv4 = ("-4",) if self.machines > 1 else ()  # the others come to the first host's address
        answers = self._on_all(lambda host: self._ask(host, script, more=by_ipv4 if host == self.hosts[0] else ()))
        address = ""
        for host, answer in zip(self.hosts, answers, strict=True):
            if isinstance(answer, Exception):
                raise UserError(str(answer))
            connection, *_, said = answer.rstrip("\n").split("\n")
            found = json.loads(said)
            for name, wanted in versions.items():
                if (there := found["versions"][name]) != wanted:
                    has = f"{name} {there}" if there else f"no {name} for {python}"
                    raise UserError(f"{host} has {has}, here it is {wanted}: use the same (python=... names another)")
            if not address:
                if not connection:
                    raise UserError(
                        f"{host}: its sessions have no SSH_CONNECTION, which tells its address: name others"
                    )
                own = connection.split()[2]
                if ":" in own and self.machines > 1:
                    raise UserError(f"{host} is reached by IPv6 ({own}), and machines meet by IPv4: name that address")
                address = f"{own}:{found['port']}"
        return address

    def submit(self, submission: Submission) -> str:
        """Start a part on each host; returns the name of the job.

        Raises:
            UserError: a host does not answer or refuses; those that began are stopped.
        """
        job = f"{time.strftime('%m%d-%H%M%S')}-{token_hex(3)}"
        wanted = json.loads((submission.files.folder / "versions").read_text())
        address = self._probe(wanted)
        ranks = [NodeRank(number, host, address, job) for number, host in enumerate(self.hosts)]
        submission.files.meet_at(ranks[0], address)
        write_atomic(submission.files.text, "\n".join(self._texts(submission, address, job)))
        if self.folder:
            self._send(submission)
        try:
            begun = self._on_all(lambda host: self._ask(host, self._start_script(submission, _of(ranks, host))))
        except BaseException:  # a signal: nobody would know of what began
            self._signal(job)
            raise
        for answer in begun:
            if isinstance(answer, Exception):
                self._signal(job)
                raise UserError(str(answer))
        return job

    def _send(self, submission: Submission) -> None:
        """Send the code and the run's folder to hosts that share no disk with this machine.

        Raises:
            UserError: one cannot take them.
        """
        base = carried.base_there(self.folder, submission.run)
        files = carried.working_files(submission.folder, submission.run) if self.code else []
        size = sum((submission.folder / name).lstat().st_size for name in files)
        print(f"echelon: sending {len(files)} files of the working folder, {format_bytes(size)}, to each host")

        def send(host: str) -> str:
            """Send what travels to one host."""
            carried.send(self._ssh(host), submission.folder, files, base / "code")
            carried.send_run(self._ssh(host), submission.run, base / "run", is_first=host == self.hosts[0])
            return ""

        for host, answer in zip(self.hosts, self._on_all(send), strict=True):
            if isinstance(answer, Exception):
                raise UserError(f"{host}: {answer}") from None

    def bring(self, run: Path) -> None:
        """Bring what the first host wrote into the run's folder here, where no disk is common.

        Raises:
            PlaceSilent: the host does not answer.
        """
        if self.folder:
            carried.bring_run(self._ssh(self.hosts[0]), self._run_there(run), run)

    def bring_logs(self, run: Path) -> None:
        """Bring the logs of the other hosts, from all that answer.

        Raises:
            PlaceSilent: one does not answer.
        """
        if not self.folder:
            return

        def bring(host: str) -> None:
            """Bring one host's."""
            number = self.hosts.index(host)
            if number:
                carried.bring_logs(self._ssh(host), self._run_there(run), run, number)

        for host, answer in zip(self.hosts, self._on_all(bring), strict=True):
            if isinstance(answer, Exception):
                raise PlaceSilent(f"{host}: {answer}")

    def state(self, job: str) -> JobState:
        """Return where a job is.

        Raises:
            PlaceSilent: no host answers.
        """
        return _state_of(self._parts(job))

    def keep(self, job: str, submission: Submission) -> JobState:
        """Return where a job is, having started parts again that died while others wait for them.

        Where a part was refused, the others are stopped; and where the run is over, those that did not hear of it.

        Raises:
            PlaceSilent: no host answers.
        """
        parts, files = self._parts(job), submission.files
        refused = next((part for part in parts if part.state == "ended" and part.detail == str(_REFUSED)), None)
        if refused is not None:
            if files.ended() is None:
                files.end(_REFUSED, self._last_words(submission, refused.host))
            self._signal(job)
        elif parts[0].is_done:
            if parts[0].ended_s > MOST_GOODBYE_S:
                self._signal(job)
        elif any(part.state == "runs" for part in parts) and not files.stop.exists() and files.ended() is None:
            for number, part in enumerate(parts):
                if part.died:
                    try:
                        self._start_again(submission, job, number)
                    except UserError as error:  # just booted, it may not have its disks yet: it is asked again
                        print(f"echelon: {self.hosts[number]} does not start its part again yet: {error}", flush=True)
        return _state_of(parts)

    def _start_again(self, submission: Submission, job: str, number: int) -> None:
        host = self.hosts[number]
        starts = self._ask(host, _PART.format(job=job, number=number) + 'grep -c start "$part/starts" || true')
        if int(starts or 0) >= MOST_STARTS:
            return
        address = submission.files.meeting(NodeRank(number, host, "", job))
        if self.folder:
            base = carried.base_there(self.folder, submission.run)
            carried.send_run(self._ssh(host), submission.run, base / "run", is_first=number == 0, is_new=False)
        self._ask(host, self._start_script(submission, NodeRank(number, host, address, job)))
        print(f"echelon: {host} is back: its part of the run is started again", flush=True)

    def _last_words(self, submission: Submission, host: str) -> str:
        number = self.hosts.index(host)
        log = f"{self._run_there(submission.run)}/logs/node{number}.out"
        words = self._ask(host, f"tail -n 1 {shlex.quote(log)}").strip().removeprefix("echelon: ")
        return f"{host}: {words}"

    def stop(self, job: str) -> None:
        """Ask all parts to save a checkpoint and end.

        Raises:
            PlaceSilent: no host answers.
        """
        answers = self._signal(job)
        if all(isinstance(answer, Exception) for answer in answers):
            raise PlaceSilent(str(answers[0]))

    def change_members(self, submission: Submission, words: Sequence[str]) -> str:
        """Give `echelon nodes RUN` on the first host.

        Raises:
            UserError: it was refused, or the host does not answer.
        """
        command = [self._python(submission), "-m", "echelon", "nodes", self._run_there(submission.run), *words]
        script = f"cd {shlex.quote(self._folder_there(submission))} || exit 3\n{shlex.join(command)}\n"
        return self._ask(self.hosts[0], script, MOST_CHANGE_S)

    def _signal(self, job: str) -> list[str | Exception]:
        numbers = {host: number for number, host in enumerate(self.hosts)}
        return self._on_all(lambda host: self._ask(host, _part(job, numbers[host]) + _STOP))

    def _parts(self, job: str) -> list[HostPart]:
        """Return what each host says of its part.

        Raises:
            PlaceSilent: none answers.
        """
        numbers = {host: number for number, host in enumerate(self.hosts)}
        answers = self._on_all(lambda host: self._ask(host, _part(job, numbers[host]) + _LOOK))
        if all(isinstance(answer, Exception) for answer in answers):
            raise PlaceSilent(str(answers[0]))
        parts = []
        for host, answer in zip(self.hosts, answers, strict=True):
            if isinstance(answer, Exception):
                parts.append(HostPart(host, "silent", str(answer)))
            else:
                state, code, ended_s = (*answer.split(), "", "0")[:3]
                parts.append(HostPart(host, state, code, float(ended_s)))
        return parts

    def _ask(self, host: str, script: str, most_s: float = ANSWER_S, more: Sequence[str] = ()) -> str:
        """Run a script on a host, and return what it prints; `more` options of ssh.

        Raises:
            PlaceSilent: the host does not answer.
            UserError: the script fails there: in its words.
        """
        environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        try:
            done = subprocess.run(
                [*self._ssh(host, more), "sh", "-s"],
                input=f"{carried.SAY_BEGUN}\n{script}".encode(), env=environment, capture_output=True,
                timeout=most_s, check=False,
                start_new_session=True,  # Ctrl-C is for who follows the run
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError("ssh is not there: install the OpenSSH client") from None
        except subprocess.TimeoutExpired:
            raise PlaceSilent(f"{host} gives no answer within {most_s:.0f}s") from None
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())
            words = said.removeprefix("echelon: ") or f"exit code {done.returncode}"
            if done.returncode == _NO_CONNECTION:
                raise PlaceSilent(f"{host} does not answer: {words}")
            raise UserError(f"{host}: {words}")
        return carried.answer_of(done.stdout.decode(errors="replace"), host)  # a banner may be of any bytes

    def _on_all(self, act: Callable[[str], T]) -> list[T | Exception]:
        """Return what `act` gives for each host, or why it does not, all at the same time."""

        def tried(host: str) -> T | Exception:
            """Return an answer, or why there is none."""
            try:
                return act(host)
            except (PlaceSilent, UserError) as error:
                return error

        with ThreadPoolExecutor(min(32, len(self.hosts))) as pool:
            return list(pool.map(tried, self.hosts))

    def node_rank(self, environment: Mapping[str, str]) -> NodeRank:
        """Return this host's part.

        Raises:
            UserError: this was not started by `submit`.
        """
        try:
            return NodeRank.from_json(environment[RANK_VARIABLE])
        except (KeyError, ValueError):
            raise UserError(f"{RANK_VARIABLE} is not set: this is started over ssh, on each host") from None


PLACE = Ssh


def _part(job: str, number: int) -> str:
    """Return the beginning of a script that looks at a part."""
    return _PART.format(job=job, number=number) + _RUNS.format(module=NODE_MODULE)


def _of(ranks: list[NodeRank], host: str) -> NodeRank:
    return next(node_rank for node_rank in ranks if node_rank.name == host)


def _state_of(host_parts: list[HostPart]) -> JobState:
    """Return a job's state: it is over when no part runs on the hosts that answer."""
    words = [f"running on {', '.join(p.host for p in host_parts if p.state == 'runs')}"]
    words += [part.detail for part in host_parts if part.state == "silent"]
    died = [part.host for part in host_parts if part.died]
    if died:
        words.append(f"the part on {', '.join(died)} died")
    if any(part.state == "runs" for part in host_parts):
        return JobState(JobPhase.RUNS, "; ".join(words))
    return JobState(JobPhase.ENDED, "; ".join(words[1:]) or "over")
