"""A run of weeks: its record stays small, and neither a restart nor a view or a report pays for its length."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from echelon.observe.phases import PHASE_NAMES
from echelon.records.kinds import RESOURCE_NAMES
from tests.attack.scenario import Scenario
from tests.ranks.runs import Run, Runs

T0 = 1_750_000_000.0
WINDOW_S = 2.0
WEEK_WINDOWS = round(7 * 86400 / WINDOW_S)
STEPS = 20  # of a window
PAUSES = ("evaluation", "checkpoint", "recording")
VARIANTS = 40
MB = 1e6


def window_lines(ranks: int, t: object, step: object, chance: random.Random, servers: int = 0) -> list[bytes]:
    """Return the lines that a run of so many ranks writes every two seconds, as the trainer does.

    Args:
        servers: of parameters; 0: the ranks have none.
    """

    def row(n: int, scale: float) -> list[float]:
        return [scale * chance.uniform(0.9, 1.1) for _ in range(n)]

    phases = [row(len(PHASE_NAMES), WINDOW_S / len(PHASE_NAMES)) for _ in range(ranks)]
    waits = [[round(w, 6) for w in row(STEPS, 0.01)] for _ in range(ranks)] if ranks * STEPS <= 1024 else []
    steps = {
        "t": t, "kind": "steps", "epoch": 3, "step": step, "correct": 16.0 * STEPS, "losses": row(STEPS, 1.0),
        "seconds": WINDOW_S * chance.uniform(0.98, 1.02), "samples": 32 * STEPS, "lr": 0.1, "phase_names": PHASE_NAMES,
        "phases": phases, "wire_bytes": 1_000_000 * STEPS, "wire_bytes_by_group": {"linear": 1_000_000 * STEPS},
        "other_wire_bytes": 5000, "density": None, "memory_bytes": [400_000_000] * ranks, "gc_s": row(ranks, 1e-3),
        "comm_busy_s": row(ranks, 0.5), "comm_spread_s": row(ranks, 0.6), "pause_names": PAUSES,
        "pauses": [[0.0, 0.0, chance.uniform(0.003, 0.005)] for _ in range(ranks)], "waits": waits,
    }  # fmt: skip
    used = [[round(v, 1) for v in row(len(RESOURCE_NAMES) - 3, 1e8)] + [None] * 3 for _ in range(ranks)]
    resources = {"t": t, "kind": "resources", "names": RESOURCE_NAMES, "ranks": used, "step": step}
    return [json.dumps(line).encode() + b"\n" for line in (steps, resources, *server_lines(ranks, servers, t, step))]


def server_lines(workers: int, servers: int, t: object, step: object) -> list[dict[str, object]]:
    """Return the lines of counters of a run with servers: what each worker did, and each server."""
    if not servers:
        return []
    names = [f"worker{i}" for i in range(workers)]
    moved = dict.fromkeys(names, 123_456_789_012.0)
    waits = {name: {"server": 1234.567891, "step": 234.567891} for name in names}
    of_workers: dict[str, object] = {
        "t": t, "kind": "staleness", "step": step, "clocks": dict.fromkeys(names, 1_234_567.0), "late": 0,
        "waited_s": waits, "sent_bytes": moved, "received_bytes": moved,
    }  # fmt: skip
    counts = {str(i): 123_456 for i in range(2 * workers)}
    return [
        of_workers,
        *(
            {
                "t": t, "kind": "server", "name": f"server{i}", "step": step, "life": 1234567890, "updates": 7_654_321,
                "duplicates": 12, "late": 0, "busy_s": 3456.789012, "seconds": 12345.678901, "sent_bytes": 10**12,
                "received_bytes": 10**12, "refused": 0, "dropped": {}, "staleness": counts, "index": i, "ready": True,
                "standby": False, "attached": False, "address": f"tcp://10.0.0.{i}:54321",
            }
            for i in range(servers)
        ),
    ]  # fmt: skip


def start_line(ranks: int) -> bytes:
    """Return the line of a run's beginning."""
    start = {
        "t": T0, "kind": "start", "world_size": ranks, "hosts": ["node"] * ranks, "pids": [*range(100, 100 + ranks)],
        "steps_per_epoch": 100_000, "epochs": 1000, "backend": "gloo", "device": "cpu", "layout": {"dp": ranks},
        "launched_t": T0 - 3, "version": 1,
    }  # fmt: skip
    return json.dumps(start).encode() + b"\n"


def windows(ranks: int, servers: int = 0) -> Iterator[bytes]:
    """Yield the lines of window after window without end, of a few dozen that differ."""
    chance = random.Random(0)
    variants = [b"".join(window_lines(ranks, "@time", "@step", chance, servers)) for _ in range(VARIANTS)]
    number = 0
    while True:
        number += 1
        text = variants[number % VARIANTS].replace(b'"@time"', b"%.3f" % (T0 + WINDOW_S * number))
        yield text.replace(b'"@step"', b"%d" % (STEPS * number))


def write_record(folder: Path, ranks: int, n_bytes: int) -> int:
    """Write a record of so many bytes into one file, as earlier versions did; returns the last step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("training:\n  seed: 0\n")
    step = 0
    with (folder / "record.jsonl").open("wb") as file:
        file.write(start_line(ranks))
        for lines in windows(ranks):
            file.write(lines)
            step += STEPS
            if file.tell() >= n_bytes:
                return step
    raise AssertionError("unreachable")


MEASURE = """
import re, sys, time
from pathlib import Path
{imports}
folder = Path(sys.argv[1])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3  # of this program
before, began, cpu = peak(), time.perf_counter(), time.process_time()
{body}
print(time.perf_counter() - began, time.process_time() - cpu, peak() - before, peak(), value)
"""
RESTART = (
    "from unittest.mock import Mock\nfrom echelon.records.file import Recorder\n"
    "from echelon.trainer.progress import RunProgress",
    "progress = RunProgress(Recorder(folder), Mock(), Mock())\nprogress.resumed(int(sys.argv[2]) - 100, folder)\n"
    "progress.record.close()\nvalue = 1",
)
VIEW = (
    "from echelon.reporting.live.snapshot import look, to_json\nfrom echelon.reporting.live.state import LiveRun",
    "run = LiveRun(folder)\nrun.refresh()\nvalue = len(to_json(run, look(run))['curves']['loss'])",
)
REPORT = (
    "from echelon.reporting.report import write_report",
    "value = write_report(folder).steps",
)


def measured(what: tuple[str, str], folder: Path, *arguments: object) -> tuple[float, float, float, float, int]:
    """Run a piece of the product in a process; returns seconds, of a processor, MB added, MB in all, and its value."""
    script = MEASURE.format(imports=what[0], body=what[1])
    command = [sys.executable, "-c", script, str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    seconds, cpu_s, added, peak, value = done.stdout.split()
    return float(seconds), float(cpu_s), float(added), float(peak), int(value)


def reading(n_bytes: int) -> Scenario:
    """Return the scenario of a record of so many bytes that an earlier version left in one file."""

    def run(folder: Path) -> str:
        step = write_record(folder / "run", 8, n_bytes)
        restart = measured(RESTART, folder / "run", step)
        assert restart[1] < 1 and restart[2] < 50, f"a restart adds {restart[1]:.2f} s and {restart[2]:.0f} MB"
        view = measured(VIEW, folder / "run")
        assert view[1] < 20 and view[2] < 300, f"the first view takes {view[1]:.1f} s and {view[2]:.0f} MB"
        report = measured(REPORT, folder / "run")
        assert report[4] == step, f"the report knows {report[4]} of {step} steps"
        assert report[1] < 60 and report[3] < 1000, f"the report takes {report[1]:.0f} s and {report[3]:.0f} MB"
        return (
            f"a record of {n_bytes / MB:.0f} MB, {step} steps of 8 ranks: a restart adds {restart[1]:.3f} s and "
            f"{restart[2]:.0f} MB, the first view takes {view[1]:.1f} s and {view[2]:.0f} MB, the report "
            f"{report[1]:.1f} s and at most {report[3]:.0f} MB (seconds of a processor)"
        )

    size = "small" if n_bytes < 100 * MB else "large"
    promise = "A restart, a view and a report do not pay for the length of a record that an earlier version wrote"
    return Scenario(f"reading-{size}", promise, run, short=n_bytes < 100 * MB)


WRITER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from echelon.records.file import LineReader, Recorder
from echelon.records.kinds import Checkpoint, Start
from echelon.records.segments import all_segments
sys.path.insert(0, sys.argv[3])
from tests.attack.scenarios.history import start_line, windows
import io, tempfile
folder, ranks, count, first, segment, unmerged, servers = Path(sys.argv[1]), *map(int, sys.argv[2].split(","))
recorder = Recorder(folder, segment)
def records(lines):
    with tempfile.TemporaryFile() as file:
        file.write(lines)
        file.flush()
        return list(LineReader().read_lines(file, True, True))
(start,) = records(start_line(ranks))
recorder.write(replace(start, start_step=20 * first))
made = windows(ranks, servers)
variants = [records(next(made)) for _ in range(40)]
for number in range(first + 1, first + count + 1):
    for record in variants[number % 40]:
        recorder.write(replace(record, step=20 * number))
    recorder.write(Checkpoint(number)) if number % 50 == 0 else None
    print(number, flush=True)
    ends = time.monotonic() + 300
    while unmerged and number % 100 == 0 and sum(s.level == 0 for s in all_segments(folder)) > unmerged:
        assert time.monotonic() < ends, "nothing is merged"
        time.sleep(0.01)
recorder.close()
"""
ROOT = Path(__file__).parents[3]


def writer(
    folder: Path, ranks: int, count: int, first: int, segment: int, unmerged: int = 0, servers: int = 0
) -> subprocess.Popen[str]:
    """Start a process that writes so many windows as rank 0 does; it prints the number of each that is written.

    While more than `unmerged` segments wait to be merged, it waits: a run takes 40 minutes for a segment.
    """
    numbers = f"{ranks},{count},{first},{segment},{unmerged},{servers}"
    command = [sys.executable, "-c", WRITER, str(folder), numbers, str(ROOT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def disk_bytes(folder: Path) -> int:
    """Return the bytes of a record's files."""
    return sum(entry.stat().st_size for entry in os.scandir(folder) if "record" in entry.name)


def week(ranks: int, share: float, servers: int = 0) -> Scenario:
    """Return the scenario of a part of a week's record, written as fast as it is merged."""

    whose = f"{ranks} ranks" if not servers else f"{ranks} workers and {servers} servers"

    def run(folder: Path) -> str:
        count, largest = round(share * WEEK_WINDOWS), 0
        process, began = writer(folder, ranks, count, 0, 8 << 20, 2, servers), time.monotonic()
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) % 500 == 0:
                largest = max(largest, disk_bytes(folder))
        assert process.wait(60) == 0
        largest, view = max(largest, disk_bytes(folder)), measured(VIEW, folder)
        report = measured(REPORT, folder)
        assert report[4] == STEPS * count, f"the report knows {report[4]} of {STEPS * count} steps"
        assert largest < 100 * MB, f"{largest / MB:.0f} MB"
        assert report[1] < 60 and report[3] < 1000, f"the report takes {report[1]:.0f} s and {report[3]:.0f} MB"
        return (
            f"{count} windows of {whose} ({share:.0%} of a week, written in {time.monotonic() - began:.0f} s): "
            f"at most {largest / MB:.0f} MB on the disk; first view {view[1]:.1f} s, report {report[1]:.1f} s and "
            f"{report[3]:.0f} MB"
        )

    name = f"week-{ranks}-ranks" if not servers else "week-servers"
    return Scenario(name, "A record takes at most 100 MB a week, whatever the ranks", run, short=False)


def killed(folder: Path) -> str:
    """Kill the process that writes, and the one that merges, again and again; count what was written."""
    from echelon.records.file import newest, read_records
    from echelon.records.kinds import Checkpoint, Steps

    chance, written, kills = random.Random(1), 0, 0
    for _ in range(8):
        process = writer(folder, 2, 100_000, written, 60_000)
        assert process.stdout is not None
        last = written + chance.randrange(150, 400)
        for line in process.stdout:
            written = int(line)
            if written >= last:
                break
        process.send_signal(signal.SIGKILL)
        written = max([written, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        kills += 1
        written = next(newest(folder, Steps)).step // STEPS  # the last line may be whole and not yet told
    before = segment_count(folder)
    merge = [sys.executable, "-m", "echelon.records.compact", str(folder), str(os.getpid())]
    ends = time.monotonic() + 60
    while segment_count(folder) >= before and time.monotonic() < ends:
        subprocess.run(merge, check=True, timeout=300)  # does nothing while a killed writer's process still merges
        time.sleep(0.2)
    steps = read_records(folder, Steps)
    reached = 0
    for window in steps:
        assert window.step - window.count == reached, f"steps {reached} to {window.step - window.count} are missing"
        reached = window.step
    saved = [c.step for c in read_records(folder, Checkpoint)]
    assert len(set(saved)) == len(saved) and set(saved) >= {*range(50, written - 49, 50)} - {written}, "a line is lost"
    files = segment_count(folder)
    assert files < before, f"{files} of {before} segments are left after they were merged"
    return f"after {kills} kills all {reached} steps and {len(saved)} other lines are there once, in {files + 1} files"


def _first_step(run: Run) -> tuple[float, float]:
    """Return the processor's seconds and the peak of memory, in MB, of a resumed run's hungriest processes by its step.

    Then all of them are killed.
    """
    from echelon.records.file import newest
    from echelon.records.kinds import Start, Steps

    began = time.time()
    run.wait_for(lambda: next(newest(run.folder, Steps)).t > began, "a step", 600.0)
    seconds, peaks = [], []
    for pid in (run.process.pid, *next(newest(run.folder, Start)).pids):
        times = psutil.Process(pid).cpu_times()
        seconds.append(times.user + times.system)
        status = Path(f"/proc/{pid}/status").read_text()
        peaks.append(int(status.partition("VmHWM:")[2].split()[0]) / 1e3)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    assert not run.left_behind(), "processes were left"
    return sum(seconds), max(peaks)


def resumed(folder: Path) -> str:
    """Resume a run by the command, with its own record and then with one that has 2 GB before it."""
    with Runs(folder) as runs:
        run = runs.train("digits", "--workers", "2", "--model", "mlp", "--epochs", "1", folder="run")
        assert run.end() == 0, run.text()
        again = ("resume", "run", "--epochs", "1000000", "--eval-every", "0")
        before = [_first_step(runs.start(*again, folder="run")) for _ in range(2)]
        record = run.folder / "record.jsonl"
        steps = write_record(folder / "long", 8, 2_000_000_000)
        with (folder / "long" / record.name).open("ab") as long, record.open("rb") as short:
            shutil.copyfileobj(short, long)
        (folder / "long" / record.name).replace(record)
        after = _first_step(runs.start(*again, folder="run"))
    seconds, peak = after[0] - min(before)[0], after[1] - max(mb for _, mb in before)
    noise = abs(before[0][0] - before[1][0])
    assert peak < 50, f"{peak:.0f} MB more"
    assert seconds < 1 + noise, f"{seconds:.1f} s of the processor more (± {noise:.1f})"
    return (
        f"`echelon resume` of a run with {steps} steps and 2 GB before its own: {seconds:+.1f} s of the processor (± "
        f"{noise:.1f} between two resumes with its own record) and {peak:+.0f} MB at the peak, by the first step"
    )


def segment_count(folder: Path) -> int:
    """Return how many segments lie in a folder."""
    return sum("record-" in entry.name for entry in os.scandir(folder))


SCENARIOS = [
    reading(50_000_000),
    Scenario("killed", "A record loses no line, and has none twice, whenever its writers are killed", killed, False),
    reading(2_000_000_000),
    Scenario("resumed", "`echelon resume` does not pay for the length of a record either", resumed, short=False),
    week(8, 1.0),
    week(64, 1 / 7),
    week(8, 1 / 7, servers=2),
]
