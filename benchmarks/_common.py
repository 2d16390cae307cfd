"""What every benchmark shares: where it ran, fair turns, medians, raw results as lines, tables in RESULTS.md."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
RAW = REPOSITORY / "benchmarks" / "results"
DATA = REPOSITORY / "data"
T = TypeVar("T")


def environment() -> dict[str, Any]:
    """Return the machine, the versions and the command, as they belong beside every result."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 1),
    }


def environment_line(command: str, where: dict[str, Any] | None = None) -> str:
    """Write the environment and the command as one line of Markdown."""
    here = where or environment()
    return (
        f"{here['date']} · {here['cores']} cores of {here['processor']} · {here['system']} · torch {here['torch']} · "
        f"Python {here['python']} · `{command}`"
    )


def command_line(module: str) -> str:
    """Write the command that is running, as one would type it."""
    return " ".join(["python", "-m", module, *(f"'{a}'" if set(a) & set(" ()") else a for a in sys.argv[1:])])


def interleave(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Give each contender a turn in each round, in turn forwards and backwards, so that drift favours none."""
    for turn in range(rounds):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            yield turn, contender


def median(values: Iterable[float]) -> float:
    """Return the median; NaN for nothing."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of windows that were measured one after the other; NaN for nothing."""
    return median(a / b for a, b in zip(above, below, strict=False))


def ratio_in_words(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median of the ratios of windows side by side, and the quartiles from three ratios on."""
    ratios = [a / b for a, b in zip(above, below, strict=False)]
    if len(ratios) < 3:
        return f"{median(ratios):.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def spread(values: Sequence[float]) -> float:
    """Return the distance between the quartiles as a share of the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; numbers are to be formatted by the caller."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


NOTES = "<!-- notes -->\n"


def update_section(title: str, body: str, path: Path = RESULTS) -> None:
    """Replace the section `## title` of a Markdown file, or append it; atomic, and safe beside other benchmarks.

    What was written by hand stays: in the section, all after a line `<!-- notes -->`.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = path.read_text() if path.exists() else "# Results\n"
        before, _, rest = f"{text.rstrip()}\n\n".partition(f"\n## {title}\n")
        old, following, after = rest.partition("\n## ")
        _, mark, notes = old.partition(NOTES)
        kept = f"\n{mark}{notes.rstrip()}\n" if mark else ""
        section = f"\n## {title}\n\n{body.strip()}\n{kept}"
        write_atomically(path, before.rstrip() + "\n" + section + (following + after if following else ""))
    finally:
        os.close(folder)


def write_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name, make it durable, rename it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def append_result(name: str, result: dict[str, Any], folder: Path = RAW) -> None:
    """Append one raw result, with the time and the environment, to `benchmarks/results/NAME.jsonl`: commit it.

    Tables are made of them, row by row and often weeks apart, so they must outlive the machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({**result, "time": time.time(), "environment": environment()})
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")


def read_results(name: str, folder: Path = RAW) -> list[dict[str, Any]]:
    """Return the raw results in the order in which they were measured; none yet is an empty list."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []
