"""What the terms of a page mean, and its text as HTML: terms with their meaning, specs and flags on one line."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

TERMS = {
    "samples/s": "Training samples of all ranks per second of step time; pauses between steps are left out.",
    "a step": "One update of the parameters: forward, backward, communication and update of one global batch.",
    "sent a step": "Bytes that all ranks together send in a step so that replicas agree.",
    "own work": "What a rank spends in a step on anything but communication, in which it also waits for others.",
    "communicate": "Waiting for messages that backward does not hide, and for ranks that are slower.",
    "update": "The optimizer's step.",
    "other": "Time of a step that is in no phase: hooks, logging, garbage collection.",
    "wall time": "From the start of the command's process to its end; pauses between a stop and a resume are left out.",
    "times as fast": "Seconds of a step now over those that it would take: 1.00x is no change.",
    "saved of a step": "The share of a step's time that would be gone.",
    "verdict": "What the intervals allow to be said; an interval must lie on one side, and the effect must matter.",
    "to target": "Seconds of training steps until the target is reached; linear between evaluations.",
    "sent to target": "Bytes that all ranks sent until the target was reached.",
    "memory": "The largest peak of a rank.",
    "memory by rank": "Peak of each rank: resident memory on a CPU, the allocator's on a GPU.",
    "training": "Seconds of training steps alone: start, evaluations and checkpoints are left out.",
    "whole run": "Seconds from the run's command to its end.",
    "ROC AUC": "Area below the curve of true over false positive rate: 1 is perfect, 0.5 is chance.",
    "F1": "Harmonic mean of precision and recall.",
    "precision": "Of the samples that were given a class, the share that is of it.",
    "recall": "Of the samples of a class, the share that was given it.",
}
"""By the words of a table's head, or of a headline."""

_SPEC = re.compile(r"--[a-z][a-z-]*|[^\s(),;\[\]]+\([^()\n]{1,80}\)(?:[^\s(),;.]+(?:\([^()\n]{1,80}\))?)*")


def with_term(text: str) -> Markup:
    """Return a term with what it means, for who points at it; other text as it is, escaped."""
    meaning = TERMS.get(text)
    return Markup('<abbr title="{}">{}</abbr>').format(meaning, text) if meaning else escape(text)


def with_specs(text: str) -> Markup:
    """Return text, escaped, in which no line ends within a spec or a flag.

    >>> str(with_specs("try local(period=8, overlap=2) < 1"))
    'try <span class="spec">local(period=8, overlap=2)</span> &lt; 1'
    """
    done, pieces = 0, Markup()
    for spec in _SPEC.finditer(text):
        pieces += escape(text[done : spec.start()]) + Markup('<span class="spec">{}</span>').format(spec[0])
        done = spec.end()
    return pieces + escape(text[done:])
