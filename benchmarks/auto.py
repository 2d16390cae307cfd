"""`--auto` beside the ways that it may take, all of them measured, on (model, link, workers) drawn by a seed.

    python -m benchmarks.auto --seed 1 --case 0             one case: what --auto takes, then eight ways
    python -m benchmarks.auto --seed 1 --write              the table of all cases that were run

`echelon train --auto` chooses for a run that is long enough for every way; it is stopped as soon as it trains. Each way
is then run by hand for a while, and those near the fastest, what was taken and the default again in turns: a figure is
the median of the turns. Needs root, for links are shaped in network namespaces, and two cores.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    read_results,
    update_section,
)
from benchmarks.predictions import IMAGE_MODELS, make_data
from echelon.config import load_run_config
from echelon.reporting.report.records import load_run
from echelon.run.resolve import canonical

TITLE = "Choosing at the start"
LINKS = {"": 80, "1gbit": 80, "100mbit": 80, "10mbit": 40}
"""Links ("": loopback), and the steps of a run by hand."""
WORKERS = (2, 3, 4)
NEAR = 1.3
REFUSED = 2
TURNS = 2
CLOSE = 1.1
_LIMIT_S = 600
_AUTO_LIMIT_S = 900


@dataclass(frozen=True)
class Way:
    """Layout, sync and codec."""

    parallel: str = "dp=-1"
    sync: str = "allreduce"
    compression: str = "none"

    def __str__(self) -> str:
        """Name what differs from the default."""
        words = [text for text, plain in zip(self._texts(), Way()._texts(), strict=True) if text != plain]
        return ", ".join(words) or "the default"

    def _texts(self) -> tuple[str, ...]:
        return self.parallel, self.sync, self.compression

    @property
    def options(self) -> list[str]:
        """As options of the command line."""
        return [word for f in fields(self) for word in (f"--{f.name}", getattr(self, f.name))]

    def plain(self) -> Way:
        """Return it with its specs as they are read."""
        read = {name: canonical(f"strategy.{name}", getattr(self, name)) for name in ("sync", "compression")}
        return Way(self.parallel, **read)


def ways(workers: int) -> list[Way]:
    """Return what `--auto` may take within its tolerance, between so many workers."""
    return [
        Way(), Way(compression="bf16"), Way(compression="int8"), Way(sync="diloco(20)", compression="int8"),
        Way(sync="local(8)", compression="sign"), Way(sync="local(8, overlap=2)", compression="sign"),
        Way(parallel=f"dp={workers},zero1"), Way(parallel=f"fsdp={workers}"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A case: what was taken, and milliseconds of a step of each way, in turns."""

    case: int
    model: str
    link: str
    workers: int
    taken: str
    step_ms: dict[str, list[float]]

    def middle(self, way: str) -> float:
        """Return the median of a way's turns, ms."""
        return median(self.step_ms[way])

    @property
    def best(self) -> str:
        """The way whose median is smallest."""
        return min(self.step_ms, key=self.middle)

    @property
    def ratio(self) -> float:
        """A step of what was taken over one of the best."""
        return self.middle(self.taken) / self.middle(self.best)

    @property
    def holds(self) -> bool:
        """Whether it is within 10% of the best, or their turns overlap."""
        return self.ratio <= CLOSE or min(self.step_ms[self.taken]) <= max(self.step_ms[self.best])


def run_case(seed: int, number: int) -> Found:
    """Let `--auto` choose, then measure all ways."""
    draw = random.Random(f"auto {seed} {number}")
    model, link, workers = draw.choice(IMAGE_MODELS), draw.choice(list(LINKS)), draw.choice(WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        data, run = make_data(Path(folder), model, seed), Path(folder) / "run"
        own = ["--model", model, "--workers", str(workers), *(["--link", link] if link else [])]
        taken = _taken(data, run, own)
        named = {str(way): way for way in ways(workers)}
        known = {way.plain(): name for name, way in named.items()}
        step_ms: dict[str, list[float]] = {name: [] for name in named}

        def measure(name: str) -> None:
            """Run a way once more."""
            try:
                step_ms[name].append(_step_ms(data, run, [*own, *named[name].options], LINKS[link]))
            except subprocess.CalledProcessError as error:
                if error.returncode != REFUSED:
                    raise

        for name in named:
            measure(name)
        step_ms = {name: turns for name, turns in step_ms.items() if turns}  # others are refused: models without blocks
        chosen = known[taken]
        near = [name for name in step_ms if step_ms[name][0] <= NEAR * min(map(min, step_ms.values()))]
        for _ in range(TURNS):
            for name in dict.fromkeys([*near, chosen, str(Way())]):
                measure(name)
    return Found(number, model, link or "loopback", workers, chosen, step_ms)


def _taken(data: Path, run: Path, own: Sequence[str]) -> Way:
    """Return what `echelon train --auto` takes for a long run, which ends soon after it has begun."""
    _train(data, run, [*own, "--auto", "--max-time", "10s"], _AUTO_LIMIT_S)
    strategy = load_run_config(run / "config.yaml").strategy
    return Way(strategy.parallel, strategy.sync, strategy.compression).plain()


def _step_ms(data: Path, run: Path, options: Sequence[str], steps: int) -> float:
    _train(data, run, [*options, "--max-steps", str(steps)], _LIMIT_S)
    windows = load_run(run).windows
    return 1e3 * sum(w.seconds for w in windows) / sum(w.count for w in windows)


def _train(data: Path, run: Path, options: Sequence[str], limit_s: float) -> None:
    subprocess.run(["rm", "-rf", str(run)], check=True)
    command = [
        *(sys.executable, "-m", "echelon", "train", str(data), "--run", str(run), "--threads", "1"),
        *("--batch-size", "64", "--epochs", "100", "--lr", "0.02", "--eval-every", "0", *options),
    ]
    subprocess.run(command, check=True, timeout=limit_s, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def table(cases: Sequence[Found]) -> str:
    """Return the table: a row a case, a column a way."""
    head = ["model", "link", "workers", "--auto took", "taken / best", "taken / default", "best", "ms a step"]
    rows = []
    for case in sorted(cases, key=lambda case: case.ratio):
        every = "; ".join(f"{name} {case.middle(name):.0f}" for name in sorted(case.step_ms, key=case.middle))
        ratio = f"{case.ratio:.2f}" if case.holds else f"**{case.ratio:.2f}**"
        beside = case.middle(case.taken) / case.middle(str(Way()))
        rows.append([case.model, case.link, str(case.workers), case.taken, ratio, f"{beside:.2f}", case.best, every])
    return markdown_table(head, rows)


def main() -> None:
    """Run some cases, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    name = f"auto-{options.seed}"
    for number in options.case:
        case = run_case(options.seed, number)
        append_result(name, asdict(case))
        told = f"took {case.taken}, {case.ratio:.2f} of {case.best}, {'holds' if case.holds else 'MISSES'}"
        print(
            case.case, case.model, case.link, case.workers, told, {n: case.middle(n) for n in case.step_ms}, flush=True
        )
    if options.write:
        results = read_results(name)
        cases = [Found(**{f.name: result[f.name] for f in fields(Found)}) for result in results]
        held, slower = sum(c.holds for c in cases), sum(c.middle(c.taken) > 1.05 * c.middle(str(Way())) for c in cases)
        said = (
            f"In {held} of {len(cases)} cases what `--auto` took is within 10% of the fastest of eight ways, or their "
            f"turns overlap; in {slower} it is slower than the default by more than 5%."
        )
        where = environment_line(command_line("benchmarks.auto"), results[-1]["environment"])
        update_section(f"{TITLE}, seed {options.seed}", f"{where}\n\n{said}\n\n{table(cases)}")


if __name__ == "__main__":
    main()
