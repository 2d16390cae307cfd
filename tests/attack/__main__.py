"""Try every attack and every fault, and write what came of it into benchmarks/RESULTS.md, each as its row of the table.

python -m tests.attack [--only FILE/NAME ...] [--short] [--busy] [--print]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from benchmarks._common import RESULTS, environment, environment_line, markdown_table, update_section

from tests.attack.scenario import CannotRunHere, Scenario, all_scenarios

SECTION = "Attacks and faults"
HEADER = ("scenario", "what is promised", "outcome", "seconds", "tried")


def outcome(scenario: Scenario) -> tuple[bool, str]:
    """Run a scenario in a folder of its own; returns whether the promise held, and the outcome in words."""
    with tempfile.TemporaryDirectory(prefix="echelon-attack-") as folder:
        try:
            return True, f"held: {scenario.run(Path(folder))}"
        except CannotRunHere as reason:
            return True, f"not tried here: {reason}"
        except AssertionError as error:
            return False, f"**broken**: {(str(error).strip() or repr(error)).splitlines()[0]}"


def earlier_rows(path: Path = RESULTS) -> dict[str, tuple[str, ...]]:
    """Return the rows of the table as it is, by scenario."""
    section = path.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: tuple(row) for row in cells if len(row) == len(HEADER) and row[0] != HEADER[0]}


def write(rows: dict[str, tuple[str, ...]]) -> None:
    """Put these rows in the place of the table's earlier ones; those of scenarios that are no more go."""
    known = all_scenarios()
    table = {name: row for name, row in (earlier_rows() | rows).items() if name in known}
    body = markdown_table(HEADER, [table[name] for name in sorted(table)])
    update_section(SECTION, f"{environment_line('python -m tests.attack')}\n\n{body}")


def main() -> None:
    """Try, print, write the table; exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="names or patterns such as container/*")
    parser.add_argument("--short", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--busy", action="store_true", help="note that the machine had other work meanwhile")
    options = parser.parse_args()
    all_held, day = True, str(environment()["date"])
    for name, scenario in all_scenarios().items():
        if (options.short and not scenario.short) or not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        began = time.monotonic()
        held, words = outcome(scenario)
        all_held &= held
        print(f"{name}: {words}", flush=True)
        if not options.print:  # at once: what follows may take hours, or be interrupted
            seconds = f"{time.monotonic() - began:.0f}{', beside other load' if options.busy else ''}"
            write({name: (name, scenario.promise, words.replace("|", "\\|"), seconds, day)})
    sys.exit(0 if all_held else 1)


if __name__ == "__main__":
    main()
