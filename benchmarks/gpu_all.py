"""What holds on a GPU, in one command of ten minutes: a table that is written row by row.

    python -m benchmarks.gpu_all                                # everything, into RESULTS.md
    python -m benchmarks.gpu_all --groups versions codecs       # some of it
    python -m benchmarks.gpu_all --groups runs --only fp8 EMA   # of whole runs those whose names begin so
    python -m benchmarks.gpu_all --device cpu --out table.md    # without a GPU: tries the command itself

Each group is a process of its own with its own limit; what it has found when that ends stands in the table. Groups:
versions and what the driver allows; every codec beside the CPU; the feed beside the CPU, under torch's sanitizer too;
2, 3 and 8 NCCL ranks, on one GPU where the driver allows it; what the sum of a model's gradients costs with each codec;
runs in each precision, alone; runs of two ranks in every layout, beside a CPU's; timings alone.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks._common import command_line, environment_line, markdown_table, update_section, write_atomically

TITLE = "GPU: everything in one call"


def main() -> None:
    """Run the groups one after the other, or be one."""
    args = _options()
    if args.group:
        _be_group(args)
        return
    from benchmarks._gpu_groups import GROUPS

    ends, rows = time.monotonic() + args.seconds, []
    unknown = set(args.groups) - set(GROUPS)
    if unknown:
        sys.exit(f"benchmarks.gpu_all: no group {', '.join(sorted(unknown))}: there are {', '.join(GROUPS)}")
    for name in args.groups or GROUPS:
        group = GROUPS[name]
        left_s = min(group.limit_s, ends - time.monotonic())
        for cells in _rows_of(name, args, left_s, dict(group.variables)):
            rows.append([name, *cells])
            print(" | ".join(rows[-1]), flush=True)
            _write(rows, args.out)
    if any(row[2] == "FAILS" for row in rows):
        sys.exit(1)


def _options() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=[])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], help="of whole runs: those whose names begin so")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="a file for the table, in place of RESULTS.md; without a GPU: nowhere")
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_all: no CUDA device here; --device cpu only tries the command")
    if args.device == "cpu" and not args.group:
        print("no CUDA device: nothing is compared, runs are on the CPU")
    return args


def _be_group(args: argparse.Namespace) -> None:
    from benchmarks._gpu_groups import group_rows

    for row in group_rows(args.group, args.device, args.only):
        row.tell()


def _rows_of(name: str, args: argparse.Namespace, limit_s: float, variables: dict[str, str]) -> Iterator[list[str]]:
    """Run a group; yields its rows as it finds them, with one more where it was cut off or failed."""
    ends = time.monotonic() + limit_s
    if limit_s <= 1:
        yield ["-", "skipped", "no time left"]
        return
    command = [sys.executable, "-m", "benchmarks.gpu_all", "--group", name, "--device", args.device]
    command += ["--only", *args.only] if args.only else []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env={**os.environ, **variables},
        )  # fmt: skip
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while (line := lines.get(timeout=max(0.1, ends - time.monotonic()))) is not None:
                if line.startswith("["):
                    yield json.loads(line)
            process.wait(timeout=max(0.1, ends - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            yield ["-", "FAILS", f"cut off after {limit_s:.0f} s"]
        else:
            if process.returncode:
                errors.seek(0)
                said = [line.strip() for line in errors if line.strip()]
                yield ["-", "FAILS", (said or ["no word"])[-1][:200]]
        finally:
            _end_all(process)
            reader.join(timeout=5)


def _end_all(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started, whatever sessions they are in: ranks left behind would use the GPU."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in (process, *started):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            each.kill()
    process.wait()


def _read(stream: Iterable[str], into: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        into.put(line)
    into.put(None)


def _write(rows: list[list[str]], out: Path | None) -> None:
    import torch

    text = markdown_table(["Group", "What", "Holds", "Figures"], rows)
    text = f"{environment_line(command_line('benchmarks.gpu_all'))}\n\n{text}"
    if out is not None:
        write_atomically(out, f"## {TITLE}\n\n{text}\n")
    elif torch.cuda.is_available():
        update_section(TITLE, text)


if __name__ == "__main__":
    main()
