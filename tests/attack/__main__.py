"""Try every attack and every fault, and write what came of it into benchmarks/RESULTS.md.

python -m tests.attack [--only FILE/NAME ...] [--short] [--print]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from benchmarks._common import command_line, environment_line, markdown_table, update_section

from tests.attack.scenario import CannotRunHere, Scenario, all_scenarios

HEADER = ("scenario", "what is promised", "outcome", "seconds")


def outcome(scenario: Scenario) -> tuple[bool, str]:
    """Run a scenario in a folder of its own; returns whether the promise held, and the outcome in words."""
    with tempfile.TemporaryDirectory(prefix="echelon-attack-") as folder:
        try:
            return True, f"held: {scenario.run(Path(folder))}"
        except CannotRunHere as reason:
            return True, f"not tried here: {reason}"
        except AssertionError as error:
            return False, f"**broken**: {(str(error).strip() or repr(error)).splitlines()[0]}"


def main() -> None:
    """Try, print, write the table; exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="names or patterns such as container/*")
    parser.add_argument("--short", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    rows, all_held = [], True
    for name, scenario in all_scenarios().items():
        if (options.short and not scenario.short) or not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        began = time.monotonic()
        held, words = outcome(scenario)
        all_held &= held
        rows.append((name, scenario.promise, words.replace("|", "\\|"), f"{time.monotonic() - began:.0f}"))
        print(f"{name}: {words}", flush=True)
    table = markdown_table(HEADER, rows)
    if not options.print:
        update_section("Attacks and faults", f"{environment_line(command_line('tests.attack'))}\n\n{table}")
    sys.exit(0 if all_held else 1)


if __name__ == "__main__":
    main()
