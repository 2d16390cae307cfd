"""Candidates, terms and exclusions from the lists of a study file, and the runs that they make."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.core.errors import UserError
from echelon.study.base import Candidate, Exclusion, PlannedRun, Settings, Study, Terms
from echelon.study.settings import full_name, label_of, read_try

MAX_COMBINATIONS = 1000


def product(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return all combinations, the last name varying fastest.

    >>> product({"a": ["1", "2"], "b": ["x"]})
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]

    Raises:
        UserError: they are more than anyone could run.
    """
    if (count := math.prod(map(len, values.values()))) > MAX_COMBINATIONS:
        raise UserError(f"the lists of {', '.join(values)} make {count} combinations: at most {MAX_COMBINATIONS}")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def flatten(node: object, where: str, prefix: str = "") -> dict[str, list[str]]:
    """Read settings, each with one value or a list of them, by dotted name; sections may be nested.

    Raises:
        UserError: an unknown setting, one that stands twice, or an empty list.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: expected settings such as {{sync: allreduce}}")
    settings: dict[str, list[str]] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            inner = flatten(value, where, f"{prefix}{key}.")
        else:
            values = value if isinstance(value, list) else [value]
            if not values or not all(isinstance(v, str) for v in values):
                raise UserError(f"{where}: {key} needs a value, or a list of values")
            inner = {full_name(f"{prefix}{key}", where): [v.strip() for v in values]}
        for name in inner:
            if name in settings:
                raise UserError(f"{where}: {name} stands twice")
        settings |= inner
    return settings


def candidates_of(items: Iterable[object], where: str) -> tuple[Candidate, ...]:
    """Read candidates: texts as for `--try`, or mappings whose lists are multiplied out. The same one twice is allowed.

    Raises:
        UserError: there is none, or an unknown setting.
    """
    settings: list[dict[str, str]] = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            settings.append(read_try(item))
        else:
            settings += product(flatten(item, f"{where} {number}"))
    if not settings:
        raise UserError(f"{where}: no candidate to compare; write for example --try sync=allreduce")
    seen: Counter[str] = Counter()
    candidates = []
    for chosen in settings:
        label = label_of(chosen)
        seen[label] += 1
        candidates.append(Candidate(label if seen[label] == 1 else f"{label} #{seen[label]}", chosen))
    return tuple(candidates)


def terms_of(node: object, where: str) -> tuple[Terms, ...]:
    """Read the terms: every combination is a comparison of its own.

    Raises:
        UserError: an unknown setting, or a combination that stands twice.
    """
    combinations = product(flatten(node or {}, where))
    varied = {name for name in combinations[0] if len({c[name] for c in combinations}) > 1}
    terms = [Terms(label_of({n: v for n, v in c.items() if n in varied}) if varied else "", c) for c in combinations]
    if len({t.label for t in terms}) < len(terms):
        raise UserError(f"{where}: a value stands twice")
    return tuple(terms)


def exclusions_of(items: Iterable[object], where: str, study: Study) -> tuple[Exclusion, ...]:
    """Read exclusions: settings, each with one value or a list of them.

    Raises:
        UserError: an exclusion that excludes nothing, or all of them everything.
    """
    exclusions = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            wanted = {name: [value] for name, value in read_try(item).items()}
        else:
            wanted = flatten(item, f"{where} {number}")
        if not any(_matches(wanted, {**t.settings, **c.settings}) for c in study.candidates for t in study.terms):
            raise UserError(f"{where} {number} excludes nothing: no candidate has these settings")
        exclusions.append(wanted)
    if all(is_excluded(c, t, exclusions) for c in study.candidates for t in study.terms):
        raise UserError(f"{where}: everything is excluded")
    return tuple(exclusions)


def is_excluded(candidate: Candidate, terms: Terms, exclusions: Iterable[Exclusion]) -> bool:
    """Return whether a candidate is not run under these terms: its settings match all that one exclusion names."""
    return any(_matches(wanted, {**terms.settings, **candidate.settings}) for wanted in exclusions)


def _matches(wanted: Mapping[str, list[str]], settings: Settings) -> bool:
    return all(settings.get(name) in values for name, values in wanted.items())


def planned_runs(study: Study) -> list[PlannedRun]:
    """List the runs of as many epochs in the order in which they are to be started.

    All candidates run once with the first seed, then with the second, so that slow changes of the machine affect all
    of them alike. Each seed begins with another candidate, so that none always follows the same one.
    """
    runs = []
    for place in run_places(study):
        settings = place.settings(study)
        runs.append(PlannedRun(place.name(), place.candidate.label, place.terms.label, place.seed, settings))
    return runs


@dataclass(frozen=True)
class RunPlace:
    """A candidate under terms with a seed, and the numbers that both have in the study."""

    number: int
    candidate: Candidate
    terms_number: int
    terms: Terms
    seed: int

    def name(self) -> str:
        """Return the name of a run's folder."""
        return f"{self.terms_number}-{self.number:02d}-{_word(self.candidate, self.terms)}-s{self.seed}"

    def settings(self, study: Study) -> dict[str, str]:
        """Return the settings of its run, with the learning rate that was found for the candidate, if one was."""
        rate = study.choices.rates.get(self.candidate.label)
        found = {"optimizer.lr": rate} if rate else {}
        named = {**study.base, **self.terms.settings, **self.candidate.settings, **found}
        return {**named, "training.seed": str(self.seed)}


def run_places(study: Study) -> Iterator[RunPlace]:
    """Yield what is to be run, in order, without what is excluded."""
    for round_, seed in enumerate(study.seeds):
        for terms_number, terms in enumerate(study.terms):
            shift = round_ % len(study.candidates)
            order = list(enumerate(study.candidates))
            for number, candidate in order[shift:] + order[:shift]:
                if not is_excluded(candidate, terms, study.exclude):
                    yield RunPlace(number, candidate, terms_number, terms, seed)


def _word(candidate: Candidate, terms: Terms) -> str:
    """Return a short piece of a folder's name: a parameter server's sockets lie in it, and their paths are limited."""
    values = " ".join([*terms.settings.values(), *candidate.settings.values()])
    return re.sub(r"[^A-Za-z0-9.]+", "-", values).strip("-.")[:24].rstrip("-.") or "base"
