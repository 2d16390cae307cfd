"""What the survivors of a killed worker keep: Echelon beside torchft, torchrun and Ray Train, the same task and kills.

python -m benchmarks.elastic_peers [--rounds 1] [--torchft-python PATH] [--ray-python PATH] [--tool NAME ...]

Each tool trains the same small model with 3 workers on gloo, once undisturbed and once while workers other than the
leading one are killed at the same steps. Each process writes a line of each step that it finishes, with the samples
whose gradients the update holds, so that nothing rests on what a tool says of itself. A step counts as the last time
that it was trained: what was rolled back is not in the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from tests.ranks.runs import Run, Runs, TooLate

from benchmarks._common import (
    append_result,
    environment_line,
    interleave,
    markdown_table,
    median,
    read_results,
    update_section,
)
from benchmarks._elastic_peers_task import BATCH, EPOCH, SAMPLES, STEPS, WORKERS
from benchmarks._elastic_peers_tools import Tool, tools

RAW_NAME = "elastic_peers"
TITLE = "Elastic: beside torchft, torchrun and Ray Train"
KILLS = ((60, 1), (145, 2), (220, 1))  # after which step which worker
STEP_S = 0.1  # of a worker's samples of a step; a worker that takes more of them takes longer
QUICK_S = 0.01  # the same, undisturbed
DEADLINE_S = 400.0  # of a run
AWAY_S = 200.0  # in which a kill's step comes, with all workers
Line = dict[str, Any]


@dataclass
class Kill:
    """A worker's end: when (unix seconds), after which step of the leading worker."""

    t: float
    step: int


@dataclass
class Trained:
    """What a run gave: lines of finished steps, by time, and kills."""

    lines: list[Line] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def leading(self) -> list[Line]:
        """The lines of the leading worker."""
        return [line for line in self.lines if line["worker"] == 0]

    @property
    def history(self) -> dict[int, Line]:
        """The steps that made the model, by number."""
        return {line["step"]: line for line in self.leading}


class Watch:
    """Reads what processes write, as they write it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lines: list[Line] = []

    def look(self) -> list[Line]:
        """Return all lines so far, by time."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        self.lines.sort(key=lambda line: float(line["t"]))
        return self.lines

    def newest(self, worker: int) -> Line | None:
        """Return a worker's newest line."""
        return next((line for line in reversed(self.look()) if line["worker"] == worker), None)

    def is_due(self, step: int, dead: set[int]) -> bool:
        """Return whether a step is finished, and the newest one is of all workers, none of whom is one of the dead."""
        newest = [self.newest(i) for i in range(WORKERS)]
        if any(line is None or line["pid"] in dead for line in newest):
            return False
        steps = [int(line["step"]) for line in newest if line is not None]
        whole = newest[0] is not None and len(newest[0]["samples"]) == BATCH
        return whole and steps[0] >= step and min(steps) == max(steps)


def train(tool: Tool, kills: Sequence[tuple[int, int]]) -> Trained:
    """Train once with a tool.

    Raises:
        TooLate: it did not come to a kill, or to its end.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-peers-", ignore_cleanup_errors=True) as root:
        folder = Path(root) / "steps"
        folder.mkdir()
        watch, done, dead = Watch(folder), Trained(), set[int]()
        awaited = f"of all workers, awaited for {AWAY_S:.0f} s"
        with Runs(Path(root)) as runs:
            started = tool.start(runs, folder, STEP_S if kills else QUICK_S)
            try:
                for step, worker in kills:
                    started[-1].wait_for(partial(watch.is_due, step, dead), f"step {step} {awaited}", AWAY_S)
                    pid, kill = _kill(watch, worker)
                    done.kills.append(kill)
                    dead.add(pid)
                started[-1].end(DEADLINE_S)
            except TooLate as error:
                raise TooLate(_progress(watch, done, kills) + str(error)) from error
            finally:
                _end(started)
        done.lines = list(watch.look())
    if len(done.history) != STEPS:
        raise TooLate(f"{len(done.history)} steps instead of {STEPS}")
    return done


def _progress(watch: Watch, done: Trained, kills: Sequence[tuple[int, int]]) -> str:
    """Return how far a run came that failed."""
    newest, last = watch.newest(0), done.kills[-1] if done.kills else None
    since = f"after kill {len(done.kills)} of {len(kills)}, at step {last.step}," if last else "before any kill"
    if newest is None or (last and newest["t"] <= last.t):
        return f"{since} no step was finished; "
    return f"{since} it came to step {newest['step']}; "


def _kill(watch: Watch, worker: int) -> tuple[int, Kill]:
    line, leading = watch.newest(worker), watch.newest(0)
    assert line is not None and leading is not None
    now = time.time()
    os.kill(line["pid"], signal.SIGKILL)
    return line["pid"], Kill(now, leading["step"])


def _end(started: Sequence[Run]) -> None:
    for run in started:
        run.process.terminate()
    for run in started:
        try:
            run.process.wait(20)
        except subprocess.TimeoutExpired:
            run.process.kill()


@dataclass
class Kept:
    """What survivors kept; a list has a value for each kill.

    Attributes:
        stalls: seconds from a kill to the next finished step.
        new: seconds from a kill to the next step that had not been finished before it.
        whole: seconds from a kill to the first step of all workers, where that came before the end.
        again: finished steps that were trained again.
        batches: samples of the batches that were trained while a worker was missing, with their numbers of steps.
        lost, repeated: samples that an epoch lacks, or has more than once, in sum over the epochs.
        loss: the largest difference of the mean loss over all samples to the undisturbed run's, after the same step.
    """

    stalls: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    batches: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    repeated: int = 0
    loss: float = 0.0


def kept(disturbed: Trained, calm: Trained) -> Kept:
    """Return what survivors kept of a run."""
    result, batches = Kept(), Counter[int]()
    for i, kill in enumerate(disturbed.kills):
        until = disturbed.kills[i + 1].t if i + 1 < len(disturbed.kills) else float("inf")
        span = [line for line in disturbed.lines if kill.t < line["t"] <= until]
        after = [line for line in span if line["worker"] == 0]
        finished = Counter(line["step"] for line in span)
        all_there = [x for x in after if finished[x["step"]] == WORKERS and len(x["samples"]) == BATCH]
        result.stalls.append(after[0]["t"] - kill.t)
        result.new.append(next(line["t"] for line in after if line["step"] > kill.step) - kill.t)
        whole_t = all_there[0]["t"] if all_there else float("inf")
        if all_there:
            result.whole.append(whole_t - kill.t)
        result.again.append(sum(line["step"] <= kill.step for line in after))
        batches.update(len(line["samples"]) for line in after if line["t"] < whole_t)
    result.batches = dict(batches)
    result.lost, result.repeated = _counted(disturbed)
    history = calm.history
    result.loss = max(abs(line["loss"] - history[step]["loss"]) for step, line in disturbed.history.items())
    return result


def _counted(run: Trained) -> tuple[int, int]:
    """Return (samples lost, samples repeated), in sum over the epochs."""
    epochs = [Counter[int]() for _ in range(STEPS // EPOCH)]
    for step, line in run.history.items():
        epochs[(step - 1) // EPOCH].update(line["samples"])
    lost = sum(SAMPLES - len(epoch) for epoch in epochs)
    return lost, sum(epoch.total() - len(epoch) for epoch in epochs)


TIMES = ("stalls", "new", "whole")
HEADER = (
    "tool", "runs", "steps trained again", "stall, s", "to a new step, s", "to all workers, s",
    "batch while one is missing", "samples lost / repeated", "largest difference of losses", "load",
)  # fmt: skip


def row(tool: Tool, results: Sequence[Kept], failed: Sequence[str], loads: Sequence[float]) -> tuple[str, ...]:
    """Return a tool's row; `failed`: why the other runs have no result; `loads`: the machine's load averages."""
    load = ", ".join(map(str, loads))
    runs = f"{len(results)} of {len(results) + len(failed)}" if failed else str(len(results))
    if not results:
        state = failed[-1] if failed else "not measured" if tool.version() else "not installed"
        return (tool.name, runs, state, *[""] * (len(HEADER) - 4), load)
    batches: Counter[int] = Counter()
    for result in results:
        batches.update(result.batches)
    trained = ", ".join(f"{size} of {BATCH} ({count} steps)" for size, count in sorted(batches.items()))
    return (
        tool.name, runs, _mean_and_span([float(n) for r in results for n in r.again]),
        *(_median_and_span([value for r in results for value in getattr(r, name)]) for name in TIMES),
        trained or "none is trained", _each([r.lost for r in results]) + " / " + _each([r.repeated for r in results]),
        f"{max(r.loss for r in results):.1g}", load,
    )  # fmt: skip


def _mean_and_span(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.0f} ({min(values):.0f} to {max(values):.0f})" if any(values) else "0"


def _median_and_span(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "not before the end"


def _each(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) if any(values) else "0"


def measure(tool: Tool) -> None:
    """Train with kills and undisturbed, and append the result, or why there is none."""
    raw = {"tool": tool.name, "version": tool.version(), "kills": len(KILLS)}
    try:
        result = kept(train(tool, KILLS), train(tool, ()))
    except AssertionError as error:  # such as TooLate
        print(f"{tool.name}: {str(error)[-3000:]}", file=sys.stderr, flush=True)
        append_result(RAW_NAME, {**raw, "why": why(str(error))})
        return
    print(tool.name, result, flush=True)
    append_result(RAW_NAME, {**raw, **asdict(result)})


def why(message: str) -> str:
    """Return what failed, in a sentence: the message's first line, and the newest error that was printed."""
    first, _, printed = message.partition("\n")
    errors: list[str] = re.findall(r"\w+Error: .+", printed)
    newest = re.sub(r"(?:/[^\s/\]]+)+/", "", errors[-1])[:200] if errors else ""  # without folders
    return f"{first}; the newest error is `{newest}`" if newest else first


def main() -> None:
    """Measure, print and write the section, of all results that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="0: only write the section")
    parser.add_argument("--torchft-python", default=sys.executable, help="an interpreter that has torchft")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has Ray")
    parser.add_argument("--tool", nargs="*", help="some of echelon, torchft, torchrun, ray, or names of rows")
    options = parser.parse_args()
    known = tools(options.torchft_python, options.ray_python)
    asked = [t for t in known if (not options.tool or {t.side, t.name} & set(options.tool)) and t.version()]
    for _, tool in interleave(asked, options.rounds):
        measure(tool)
    text = section(known, read_results(RAW_NAME))
    print(text)
    command = "python -m benchmarks.elastic_peers --torchft-python PYTHON"
    update_section(TITLE, f"{environment_line(command)}\n\n{text}\n")


def section(known: Sequence[Tool], raw: Sequence[dict[str, Any]]) -> str:
    """Return what stands below the section's title."""
    names = [each.name for each in fields(Kept)]
    rows = []
    for tool in known:
        own = [r for r in raw if r["tool"] == tool.name]
        ended = [Kept(**{name: r[name] for name in names}) for r in own if "why" not in r]
        failed = [str(r["why"]) for r in own if "why" in r]
        rows.append(row(tool, ended, failed, [r["environment"]["load"] for r in own]))
    steps = ", ".join(str(step) for step, _ in KILLS)
    about = (
        f"The same small model in each: {SAMPLES} samples, batches of {BATCH}, {WORKERS} workers, gloo, one thread "
        f"each, {STEPS} steps. A worker takes {STEP_S} s for its {BATCH // WORKERS} samples of a step, and longer for "
        f"more. SIGKILL of a worker other than the leading one after steps {steps}, once all workers train: "
        f"{len(KILLS)} kills a run."
    )
    terms = (
        "Medians, with least and most; steps trained again: mean. Stall: to the next finished step of any worker that "
        "trains. New step: one that had not been finished before the kill; all workers: a step of all of them. A step "
        "that a kill interrupts does not count as trained again. Samples lost and repeated are those of the model at "
        f"the end, for each run in sum over its {STEPS // EPOCH} epochs: what was rolled back is not in it. Losses "
        "are means over all samples, after the same step of the same tool's undisturbed run. Load: the machine's "
        "average in the minute before each run ended, its own part included."
    )
    told = [f"- {tool.name}: {_versions(tool, raw)}; {tool.settings}." for tool in known]
    table = markdown_table(HEADER, rows)
    return "\n\n".join([about, table, terms, "\n".join(told)])


def _versions(tool: Tool, raw: Sequence[dict[str, Any]]) -> str:
    told = [r["version"].split() for r in raw if r["tool"] == tool.name]
    return f"{told[-1][0]}, torch {told[-1][1]}" if told else "not measured"


if __name__ == "__main__":
    main()
