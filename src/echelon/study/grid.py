"""Products of lists: candidates and terms from what a study file lists, less what it excludes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from echelon.core.errors import UserError
from echelon.study.base import Candidate, Exclusion, Settings, Study, Terms
from echelon.study.settings import full_name, label_of, parse_try


def product(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """All combinations, the last name varying fastest.

    >>> product({"a": ["1", "2"], "b": ["x"]})
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def flatten(node: Any, where: str, prefix: str = "") -> dict[str, list[str]]:
    """Read settings, each with one value or a list of them, by dotted name; sections may be nested.

    Raises:
        UserError: an unknown setting, one that stands twice, or an empty list.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{where}: expected settings such as {{sync: allreduce}}")
    found: dict[str, list[str]] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            inner = flatten(value, where, f"{prefix}{key}.")
        else:
            values = value if isinstance(value, list) else [value]
            if not values or not all(isinstance(v, str) for v in values):
                raise UserError(f"{where}: {key} needs a value, or a list of values")
            inner = {full_name(f"{prefix}{key}", where): [v.strip() for v in values]}
        for name in inner:
            if name in found:
                raise UserError(f"{where}: {name} stands twice")
        found |= inner
    return found


def candidates_of(items: Iterable[Any], where: str) -> tuple[Candidate, ...]:
    """Read candidates: texts as for `--try`, or mappings whose lists are multiplied out. The same one twice is allowed.

    Raises:
        UserError: there is none, or an unknown setting.
    """
    settings: list[dict[str, str]] = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            settings.append(parse_try(item))
        else:
            settings += product(flatten(item, f"{where} {number}"))
    if not settings:
        raise UserError(f"{where}: no candidate to compare; write for example --try sync=allreduce")
    seen: Counter[str] = Counter()
    found = []
    for each in settings:
        label = label_of(each)
        seen[label] += 1
        found.append(Candidate(label if seen[label] == 1 else f"{label} #{seen[label]}", each))
    return tuple(found)


def terms_of(node: Any, where: str) -> tuple[Terms, ...]:
    """Read the terms: every combination is a comparison of its own.

    Raises:
        UserError: an unknown setting, or a combination that stands twice.
    """
    combinations = product(flatten(node or {}, where))
    varied = {name for name in combinations[0] if len({c[name] for c in combinations}) > 1}
    found = [Terms(label_of({n: v for n, v in c.items() if n in varied}) if varied else "", c) for c in combinations]
    if len({t.label for t in found}) < len(found):
        raise UserError(f"{where}: a value stands twice")
    return tuple(found)


def exclusions_of(items: Iterable[Any], where: str, study: Study) -> tuple[Exclusion, ...]:
    """Read exclusions: settings, each with one value or a list of them.

    Raises:
        UserError: an exclusion that excludes nothing, or all of them everything.
    """
    found = []
    for number, item in enumerate(items, 1):
        wanted = flatten(item, f"{where} {number}") if not isinstance(item, str) else _each_once(parse_try(item))
        if not any(_matches(wanted, {**t.settings, **c.settings}) for c in study.candidates for t in study.terms):
            raise UserError(f"{where} {number} excludes nothing: no candidate has these settings")
        found.append(wanted)
    if all(is_excluded(c, t, found) for c in study.candidates for t in study.terms):
        raise UserError(f"{where}: everything is excluded")
    return tuple(found)


def is_excluded(candidate: Candidate, terms: Terms, exclusions: Iterable[Exclusion]) -> bool:
    """Whether a candidate is not to be run under these terms: its settings match an exclusion in all that it names."""
    return any(_matches(wanted, {**terms.settings, **candidate.settings}) for wanted in exclusions)


def _each_once(settings: Settings) -> dict[str, list[str]]:
    return {name: [value] for name, value in settings.items()}


def _matches(wanted: Mapping[str, list[str]], settings: Settings) -> bool:
    return all(settings.get(name) in values for name, values in wanted.items())
