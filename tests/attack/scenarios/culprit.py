"""Who did it: one process of a run hangs, and the run says which, in what, and who waits for it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.attack.scenario import Scenario
from tests.ranks import faulty_parts
from tests.ranks.runs import Run, Runs

TIMEOUT_S = 10
AT_STEP = 12
STEPS = 60
LINK = "100mbit"


@dataclass(frozen=True)
class Case:
    """A fault of one process under a strategy or a layout, and what the record must say of it.

    Attributes:
        line: a function of the user's that is to be named; empty: none.
    """

    fault: str
    settings: tuple[str, ...]
    line: str = ""
    activity: str = "forward"
    model: str = "net"
    at: int = AT_STEP

    @property
    def title(self) -> str:
        """The fault and where it strikes."""
        return f"{self.fault} under {self.settings[1]}"


def _ranks(how: str) -> tuple[str, ...]:
    return ("--sync", how)


def _layout(how: str) -> tuple[str, ...]:
    return ("--parallel", how)


SYNCS = (
    "allreduce",
    "local(4)",
    "diloco(4)",
    "easgd(4)",
    "ps(mode=sync)",
    "ps(mode=async)",
    "ps(mode=ssp)",
)
LAYOUTS = ("fsdp=2", "pp=2", "tp=2")
SLEEP, LOCK = "fall_asleep", "wait_for_own_lock"
LOADER = "read_from_dead_disk"

CASES = [
    *(Case("sleep", _ranks(sync), SLEEP) for sync in SYNCS),
    *(Case("sleep", _layout(layout), SLEEP, model="vit") for layout in LAYOUTS),
    *(Case("lock", _ranks(sync), LOCK) for sync in ("allreduce", "diloco(4)", "ps(mode=sync)")),
    Case("lock", _layout("tp=2"), LOCK, model="vit"),
    Case("gil", _ranks("allreduce"), "compute_without_a_word"),
    Case("gil", _layout("fsdp=2"), "compute_without_a_word", model="vit"),
    Case("loader", (*_ranks("allreduce"), "--loaders", "0"), LOADER, "data", at=800),
    Case("loader", (*_ranks("local(4)"), "--loaders", "1"), LOADER, "data", at=800),
    Case("loader", (*_ranks("ps(mode=ssp)"), "--loaders", "0"), LOADER, "data", at=800),
    *(Case("stop", _ranks(sync)) for sync in ("allreduce", "easgd(4)")),
    Case("stop", _layout("pp=2"), model="vit"),
]
SHORT = [
    case for case in CASES if (case.fault, case.settings[1]) in (("sleep", "allreduce"), ("loader", "ps(mode=ssp)"))
]


def _process(case: Case) -> str:
    return "worker1" if case.settings[1].startswith("ps(") else "rank1"


def _start(runs: Runs, case: Case, folder: str) -> Run:
    shutil.copy(faulty_parts.__file__, runs.root)
    (runs.root / "struck").unlink(missing_ok=True)
    fault = {"ECHELON_FAULT": f"{case.fault}:{_process(case)}:{case.at}"}
    return runs.start(
        "train", "faulty_parts:points", "--model", f"faulty_parts:{case.model}", "--workers", "2", "--threads", "1",
        "--device", "cpu", "--batch-size", "64", "--epochs", "100", "--max-steps", str(STEPS), "--eval-every", "0",
        "--timeout", f"{TIMEOUT_S}s", "--checkpoint-every", "10", *case.settings, folder=folder, environment=fault,
    )  # fmt: skip


def _names(case: Case, run: Run) -> tuple[str, float]:
    """Return the sentence that names the culprit, and the seconds that the fault had lasted then.

    Raises:
        AssertionError: it names another, or says something wrong of it.
    """
    hang = run.wait_for(lambda: run.events("hang") or run.events("worker_died"), f"{case.title}: a sentence")[0]
    who = f"rank{hang['rank']}" if hang["rank"] is not None else hang["role"]
    assert who == _process(case), f"{case.title}: {who} is blamed: {hang['message']}"
    assert hang["name"] == "hang", f"{case.title}: named only at its end: {hang['message']}"
    wanted = "SIGSTOP" if case.fault == "stop" else case.line
    assert wanted in hang["message"], f"{case.title}: no {wanted} in: {hang['message']}"
    assert hang["activity"] == case.activity or case.fault == "stop", f"{case.title}: in {hang['activity']}"
    return hang["message"], hang["seconds"]


def names_the_culprit(cases: Sequence[Case], folder: Path) -> str:
    """Try each case in a run of its own; returns how many were named."""
    seconds: list[float] = []
    wrong: list[str] = []
    for i, case in enumerate(cases):
        with Runs(folder) as runs:
            run = _start(runs, case, f"run{i}")
            try:
                sentence, after_s = _names(case, run)
                seconds.append(after_s)
                assert run.end() == 0, f"{case.title}: the run did not go on: {run.text()[-600:]}"
                print(f"  {case.title}: {sentence}", flush=True)
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
                print(f"  WRONG {error}", flush=True)
                run.process.kill()
    count = f"{len(seconds) if not wrong else len(cases) - len(wrong)} of {len(cases)}"
    assert not wrong, f"{count} named; {'; '.join(wrong)}"
    return f"{count} named, {min(seconds):.0f} to {max(seconds):.0f} s after the fault, with --timeout {TIMEOUT_S}s"


SCENARIOS = [
    Scenario(
        "hang",
        "A process that hangs is named with its phase and its line of code, and the run goes on.",
        partial(names_the_culprit, SHORT),
    ),
    Scenario(
        "matrix",
        "In every strategy and layout a process that sleeps, deadlocks, holds the interpreter, has a stuck loader or "
        "is stopped is named, not those that wait for it.",
        partial(names_the_culprit, CASES),
        short=False,
    ),
]
