"""Who did it: one process of a run hangs or is slow, and the run says which, in what, and who waits for it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from echelon.core.errors import UserError
from echelon.launch.link import ShapedNetwork, check_link, parse_link
from echelon.observe.oom import memory_group
from tests.attack.scenario import CannotRunHere, Scenario
from tests.ranks import faulty_parts
from tests.ranks.runs import Run, Runs

TIMEOUT_S = 10
AT_STEP = 12
AT_SAMPLE = 800
STEPS = 60
LINK = "100mbit"
LIMIT_BYTES = 2_000_000_000
AT_ONCE = 3  # runs; one that hangs needs no processor
LINE = {
    "sleep": "fall_asleep",
    "lock": "wait_for_own_lock",
    "gil": "compute_without_a_word",
    "loader": "read_from_dead_disk",
    "stop": "SIGSTOP",
    "slow": "crawl",
}


@dataclass(frozen=True)
class Case:
    """A fault of one process under a strategy or a layout.

    Attributes:
        how: a strategy, or a layout such as `tp=2`.
        more: other settings.
    """

    fault: str
    how: str
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.fault, "under", self.how, *self.more))

    @property
    def process(self) -> str:
        """The one that falls ill."""
        return "worker1" if self.how.startswith("ps(") else "rank1"

    @property
    def is_layout(self) -> bool:
        """Whether `how` is a layout."""
        return self.how.partition("=")[0] in ("fsdp", "pp", "tp")

    @property
    def steps(self) -> int:
        """Of the run: where nobody waits, the others must not be done before somebody hangs; the slow need time."""
        goes_on_alone = self.how == "ps(mode=async)" or (self.how == "ps(mode=ssp)" and self.fault == "gil")
        if self.fault == "slow" or goes_on_alone:  # servers do not wait for a worker of which they hear nothing
            return 100_000
        return STEPS


SYNCS = ("allreduce", "local(4)", "diloco(4)", "easgd(4)", "ps(mode=sync)", "ps(mode=async)", "ps(mode=ssp)")
LAYOUTS = ("fsdp=2", "pp=2", "tp=2")

CASES = [
    *(Case("sleep", how) for how in (*SYNCS, *LAYOUTS)),
    *(Case("lock", how) for how in ("allreduce", "diloco(4)", "ps(mode=sync)", "tp=2")),
    *(Case("gil", how) for how in ("allreduce", "ps(mode=ssp)", "fsdp=2")),
    *(Case("loader", how, ("--loaders", "0")) for how in ("allreduce", "ps(mode=async)")),
    *(Case("loader", how, ("--loaders", "1")) for how in ("local(4)", "easgd(4)")),
    *(Case("stop", how) for how in ("allreduce", "easgd(4)", "pp=2")),
    *(Case("slow", how) for how in ("allreduce", "local(4)", "ps(mode=async)", "tp=2")),
    *(Case("cut", how, ("--link", LINK)) for how in ("allreduce", "diloco(4)")),
]
SHORT = [Case("sleep", "allreduce"), Case("loader", "ps(mode=ssp)", ("--loaders", "0"))]


def _start(runs: Runs, case: Case, folder: str = "run", prefix: Sequence[str] = ()) -> Run:
    shutil.copy(faulty_parts.__file__, runs.root)
    at = AT_SAMPLE if case.fault == "loader" else AT_STEP
    model = "vit" if case.is_layout else "net"
    return runs.start(
        "train", "faulty_parts:points", "--model", f"faulty_parts:{model}", "--workers", "2", "--threads", "1",
        "--device", "cpu", "--batch-size", "64", "--epochs", "100000", "--max-steps", str(case.steps), "--eval-every",
        "0", "--timeout", f"{TIMEOUT_S}s", "--checkpoint-every", "10s" if case.steps > STEPS else "10",
        "--parallel" if case.is_layout else "--sync", case.how, *case.more, folder=folder, prefix=prefix,
        environment={"ECHELON_FAULT": f"{case.fault}:{case.process}:{at}"},
    )  # fmt: skip


def _sentence(case: Case, run: Run) -> str:
    """Wait for the first sentence of blame; returns it.

    Raises:
        AssertionError: it blames another, or says something wrong of it.
    """
    kinds = ("slow_process",) if case.fault == "slow" else ("hang", "worker_died")
    told = run.wait_for(lambda: [event for kind in kinds for event in run.events(kind)], f"{case}: a sentence")[0]
    message: str = told["message"]
    if case.fault == "cut":
        assert told["rank"] is None and "gets no answer from" in message, f"{case}: {message}"
        return message
    blamed = f"rank{told['rank']}" if told["rank"] is not None else told["role"]
    assert blamed == case.process, f"{case}: {blamed} is blamed: {message}"
    assert told["name"] == kinds[0], f"{case}: named only at its end: {message}"
    assert LINE[case.fault] in message, f"{case}: no {LINE[case.fault]} in: {message}"
    assert told["activity"] == "data" or case.fault != "loader", f"{case}: in {told['activity']}"
    return message


def _try(folder: Path, case: Case) -> str:
    """Try a case in a run of its own; returns what is wrong, or nothing."""
    if case.fault == "cut":
        try:
            check_link(parse_link(LINK))
        except UserError as refusal:
            return f"{case}: {refusal}"
    folder.mkdir()
    with Runs(folder) as runs:
        run = _start(runs, case)
        try:
            print(f"  {case}: {_sentence(case, run)}", flush=True)
            is_long = case.steps > STEPS
            if is_long:
                run.process.terminate()
            if case.fault != "cut":  # a link that stays cut is nothing that a restart mends
                code = run.end()
                assert code == (128 + signal.SIGTERM if is_long else 0), (
                    f"{case}: ended with {code}: {run.text()[-600:]}"
                )
            return ""
        except AssertionError as error:
            print(f"  WRONG {error}", flush=True)
            return str(error).splitlines()[0]
        finally:
            run.process.kill()
            run.process.wait()


def names_the_culprit(cases: Sequence[Case], folder: Path) -> str:
    """Try each case; returns how many were named."""
    with ThreadPoolExecutor(AT_ONCE) as several:
        wrong = [said for said in several.map(_try, (folder / str(i) for i in range(len(cases))), cases) if said]
    count = f"{len(cases) - len(wrong)} of {len(cases)}"
    assert not wrong, f"{count} named; {'; '.join(wrong)}"
    return f"{count} named, with --timeout {TIMEOUT_S}s"


def names_the_culprit_of_another_machine(folder: Path) -> str:
    """Let the only rank of the second machine sleep; the first machine has to say so."""
    try:
        check_link(parse_link(LINK))
    except UserError as refusal:
        raise CannotRunHere(str(refusal)) from None
    shutil.copy(faulty_parts.__file__, folder)
    with ShapedNetwork(2, parse_link(LINK)) as network, Runs(folder) as runs:
        machines = [
            runs.start(
                "train", "faulty_parts:points", "--model", "faulty_parts:net", "--nodes", "2", "--workers", "1",
                "--rendezvous", f"{network.addresses[0]}:29400", "--threads", "1", "--device", "cpu", "--batch-size",
                "64", "--epochs", "100000", "--max-steps", str(STEPS), "--eval-every", "0", "--timeout",
                f"{TIMEOUT_S}s", "--checkpoint-every", "10", folder="run", prefix=network.command_prefix(machine),
                environment={"ECHELON_FAULT": f"sleep:rank0:{AT_STEP}" if machine else "::"},
            )
            for machine in range(2)
        ]  # fmt: skip
        first = machines[0]
        hang = first.wait_for(lambda: first.events("hang"), "a sentence")[0]
        assert hang["rank"] == 1 and LINE["sleep"] in hang["message"], hang["message"]
        assert hang["waiting"] == ["rank 0"], hang["message"]
        assert [machine.end() for machine in machines] == [0, 0], first.text()[-600:]
    message: str = hang["message"]
    return message


@contextmanager
def _memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup with a limit below that of this process.

    Raises:
        CannotRunHere: this process may not.
    """
    group = memory_group(os.getpid())
    if group is None:
        raise CannotRunHere("this process's cgroup cannot be seen")
    folder = group.events.parent / f"echelon-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise CannotRunHere(f"no cgroup can be made: {error}") from None
    try:
        (folder / group.limit.name).write_text(str(limit_bytes))
        yield folder
    except (PermissionError, FileNotFoundError) as error:
        raise CannotRunHere(f"no limit of memory can be set: {error}") from None
    finally:
        folder.rmdir()


def calls_it_out_of_memory(folder: Path) -> str:
    """Let a rank eat until the kernel kills it, and another ask for more than there is."""
    sentences = []
    with _memory_group(LIMIT_BYTES) as group, Runs(folder) as runs:
        enter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        for fault, prefix in (("eat", enter), ("ask", ())):
            (folder / "struck").unlink(missing_ok=True)
            run = _start(runs, Case(fault, "allreduce"), fault, prefix)
            assert run.end() == 0, f"{fault}: the run did not go on: {run.text()[-600:]}"
            (death,) = run.events("worker_died")
            sentences.append(death["message"])
            assert death["rank"] == 1 and "out of memory" in death["message"], death["message"]
            assert "predicted for each rank" in death["message"], death["message"]
        assert "the kernel killed it" in sentences[0] and "are allowed" in sentences[0], sentences[0]
    return "; ".join(sentences)


SCENARIOS = [
    Scenario(
        "hang",
        "A process that hangs is named with its phase and its line of code, and the run goes on.",
        partial(names_the_culprit, SHORT),
    ),
    Scenario(
        "machines",
        "A rank that hangs on another machine is named by the first one.",
        names_the_culprit_of_another_machine,
        short=False,
    ),
    Scenario(
        "memory",
        "A rank that the kernel kills for want of memory, or that asks for too much, is called so, with the forecast.",
        calls_it_out_of_memory,
        short=False,
    ),
    Scenario(
        "matrix",
        "In every strategy and layout a process that sleeps, deadlocks, holds the interpreter, has a stuck loader, is "
        "stopped, is 50 times slower or has lost its link is named, not those that wait for it.",
        partial(names_the_culprit, CASES),
        short=False,
    ),
]
