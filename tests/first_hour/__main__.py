"""`python -m tests.first_hour --out FOLDER`: the transcript of a first hour."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.first_hour.hour import spend_an_hour

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description="the transcript of a first hour")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the transcript and its pictures")
    parser.add_argument("--python", type=Path, help="an environment's Python that has echelon; default: a fresh one")
    options = parser.parse_args()
    problems = spend_an_hour(options.out.absolute(), options.python)
    print(f"{options.out / 'transcript.md'}: {len(problems)} problems", *problems, sep="\n")
    raise SystemExit(bool(problems))
