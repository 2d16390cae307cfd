"""Which runs a study consists of, and in what order: by seed, so that no method has the machine to itself for long."""

from __future__ import annotations

import re

from echelon.study.base import Candidate, PlannedRun, Study, Terms
from echelon.study.grid import is_excluded


def planned_runs(study: Study) -> list[PlannedRun]:
    """List the runs in the order in which they are to be started.

    All candidates run once with the first seed, then with the second: what slowly changes about the machine touches
    all of them alike. Each seed begins with another candidate, so that none always follows the same one.
    """
    found = []
    for round_, seed in enumerate(study.seeds):
        for place, terms in enumerate(study.terms):
            shift = round_ % len(study.candidates)
            order = list(enumerate(study.candidates))
            for number, candidate in order[shift:] + order[:shift]:
                if is_excluded(candidate, terms, study.exclude):
                    continue
                name = f"{place}-{number:02d}-{_word(candidate, terms)}-s{seed}"
                settings = {**study.base, **terms.settings, **candidate.settings, "training.seed": str(seed)}
                found.append(PlannedRun(name, candidate.label, terms.label, seed, settings))
    return found


def _word(candidate: Candidate, terms: Terms) -> str:
    """Return a short piece of a folder's name: a parameter server's sockets lie in it, and their paths are limited."""
    values = " ".join([*terms.settings.values(), *candidate.settings.values()])
    return re.sub(r"[^A-Za-z0-9.]+", "-", values).strip("-.")[:24].rstrip("-.") or "base"
