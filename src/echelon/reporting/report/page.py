"""One self-contained HTML page from a template: styles, script, plotly.js and the charts' data are inside it.

A page extends `base.html.j2` and places charts with the macro `draw(chart)`; nothing is fetched from a network.
Plotly.js is its bundle of cartesian charts (npm: `plotly.js-cartesian-dist-min`), compressed with `gzip -9 -n`; the
page carries it so, in base64, and the browser unpacks it. Pages of a study's runs would carry the same 0.6 MB once
each: they refer to one file in the study's folder, by a relative path, and open without a network like the others.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from echelon.core.figure import Chart
from echelon.core.files import write_atomic
from echelon.core.json_values import finite

_TEMPLATES = Path(__file__).parent / "templates"
_CONTENTS = "<!-- contents -->"
SHARED_SCRIPT = "echelon-charts.js"
"""In a folder with `runs/`: plotly.js for the pages of these runs."""
PLOTLY_FILE = Path(__file__).parent / "plotly" / "plotly-cartesian.min.js.gz"
TERMS = {
    "samples/s": "Training samples of all ranks per second of step time; pauses between steps are left out.",
    "tokens/s": "Tokens that all ranks train on per second of step time; pauses between steps are left out.",
    "a step": "One update of the parameters: forward, backward, communication and update of one global batch.",
    "sent a step": "Bytes that all ranks together send in a step so that replicas agree.",
    "own work": "What a rank spends in a step on anything but communication, in which it also waits for others.",
    "communication": "Waiting for messages that backward does not hide, and for ranks or servers that are slower.",
    "update": "The optimizer's step.",
    "other": "Time of a step that is in no phase: hooks, logging, garbage collection.",
    "wall time": "From the start of the command's process to its end; pauses between a stop and a resume are left out.",
    "times as fast": "Seconds of a step now over those that it would take: 1.00x is no change.",
    "saved of a step": "The share of a step's time that would be gone.",
    "verdict": "What the intervals allow to be said; an interval must lie on one side, and the effect must matter.",
    "time to target": "From the first step until the target is reached, pauses counted; linear between evaluations.",
    "sent to target": "Bytes that all ranks sent until the target was reached.",
    "memory": "The largest peak of a rank.",
    "memory by rank": "Peak of each rank: resident memory on a CPU, the allocator's on a GPU.",
    "steps": "Seconds of training steps alone: evaluations, checkpoints and other pauses are left out.",
    "pauses": "Share of the whole run in which no step went on: evaluation, checkpoint, recording and others.",
    "times as fast to the end": "The baseline's whole run over this one's, of each seed: above 1.00x it is faster.",
    "times as fast to target": "The baseline's time to target over this one's, of each seed: above 1.00x it is faster.",
    "whole run": "From the first step to the end of the last evaluation or checkpoint; all pauses are counted.",
    "first step to end": "To the end of the last evaluation or checkpoint; all pauses are counted.",
    "command": "Seconds from the run's command to its end.",
    "ROC AUC": "Area below the curve of true over false positive rate: 1 is perfect, 0.5 is chance.",
    "F1": "Harmonic mean of precision and recall.",
    "precision": "Of the samples that were given a class, the share that is of it.",
    "recall": "Of the samples of a class, the share that was given it.",
}
"""What the terms of a page mean, shown where one points at them."""


def render_page(template: str, charts: Iterable[Chart], shared_script: str = "", **context: Any) -> str:
    """Fill a template of this folder; all text is escaped.

    Args:
        charts: those that it draws.
        shared_script: where `SHARED_SCRIPT` lies, seen from the page; empty: the page has plotly.js inside.
    """
    drawn = list(charts)
    page = (
        _templates()
        .get_template(template)
        .render(
            style=Markup(_asset("page.css")),
            script=Markup(_asset("page.js")),
            plotly=Markup(_packed_plotly()) if drawn and not shared_script else Markup(""),
            shared_script=shared_script if drawn else "",
            figures=script_json({c.id: _figure(c) for c in drawn}),
            terms=TERMS,
            **context,
        )
    )
    return page.replace(_CONTENTS, _contents(page), 1)


def compile_templates() -> None:
    """Make ready what `render_page` fills, which takes longer than to fill it; a second call takes nothing."""
    for name in _templates().list_templates(extensions=["j2"]):
        _templates().get_template(name)
    _packed_plotly()


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"term": with_term, "specs": with_specs, "command": with_words}
    return environment


def write_shared_script(folder: Path) -> None:
    """Write what the pages of `folder/runs/NAME` draw with; it puts into its own element what a page has inside."""
    write_atomic(folder / SHARED_SCRIPT, f'document.currentScript.textContent = "{_packed_plotly()}";\n')


def find_shared_script(run: Path) -> str:
    """Return where the page of a run finds `SHARED_SCRIPT`, relative to the run's folder; empty: there is none."""
    folder = run.resolve().parent
    return f"../../{SHARED_SCRIPT}" if folder.name == "runs" and (folder.parent / SHARED_SCRIPT).is_file() else ""


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    return base64.b64encode(PLOTLY_FILE.read_bytes()).decode()


def _contents(page: str) -> str:
    """Return links to the sections of a page, as they are in it."""
    sections = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', page)
    return "".join(f'<li><a href="#{place}">{title}</a></li>' for place, title in sections)


def script_json(value: object) -> Markup:
    """JSON that is safe inside a script element: `<`, `>` and `&` are escaped, NaN is null."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _figure(chart: Chart) -> dict[str, object]:
    return {
        "traces": chart.traces,
        "layout": {**chart.layout, "height": chart.height},
        "choices": [choice.traces for choice in chart.choices],
    }


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


"""By the words of a table's head, or of a headline."""

_SPEC = re.compile(r"`[^`]+`|--[a-z][a-z-]*|[^\s(),;\[\]]+\([^()\n]{1,80}\)(?:[^\s(),;.]+(?:\([^()\n]{1,80}\))?)*")

_WORD = re.compile(r"\s+|(?:'[^']*'|\"[^\"]*\"|\S)+")  # of a command, or what is between two
_LONG = re.compile(r"\S{20}")
_PHONE = 40  # characters of code that a phone's line holds


def with_term(text: str) -> Markup:
    """Return a term with what it means, for who points at it; other text as it is, escaped."""
    meaning = TERMS.get(text) or TERMS.get(text.rpartition(", ")[0])  # behind the comma is the unit
    return Markup('<abbr title="{}">{}</abbr>').format(meaning, text) if meaning else escape(text)


def with_specs(text: str) -> Markup:
    """Return text, escaped, in which no line ends within a spec, a flag or a command in backticks.

    >>> str(with_specs("try local(period=8, overlap=2) < 1"))
    'try <span class="spec">local(period=8, overlap=2)</span> &lt; 1'
    """
    done, pieces = 0, Markup()
    for spec in _SPEC.finditer(text):
        pieces += _breakable(text[done : spec.start()]) + _whole(spec[0].strip("`"), spec[0].startswith("`"))
        done = spec.end()
    return pieces + _breakable(text[done:])


def with_words(command: str) -> Markup:
    """Return a command, escaped, in which lines end between its words alone; a browser would break them at a hyphen.

    >>> str(with_words("train --threads 1"))
    '<span class="spec">train</span> <span class="spec">--threads</span> <span class="spec">1</span>'
    """
    words = _WORD.findall(command)
    return Markup("").join(_whole(word) if word.strip() else escape(word) for word in words)


def _whole(spec: str, is_code: bool = False) -> Markup:
    """Return a spec or a word, escaped, that no line ends in; one that is longer than a phone's line may break there.

    >>> str(_whole("topk(density=0.01,momentum_correction=false)"))
    '<span class="spec long">topk(density=0.01,<wbr>momentum_correction=false)</span>'
    """
    element = "code" if is_code else "span"
    if len(spec) <= _PHONE:
        return Markup(f'<{element} class="spec">{{}}</{element}>').format(spec)
    shown = Markup("<wbr>").join(map(escape, re.split(r"(?<=[,+/])(?=\S)", spec)))
    return Markup(f'<{element} class="spec long">{{}}</{element}>').format(shown)


def _breakable(text: str) -> Markup:
    """Return text, escaped, with places in long words at which a narrow column may break them."""
    pieces = re.split(r"(?<=[=,/])(?=\S)", text) if _LONG.search(text) else [text]
    return Markup("<wbr>").join(escape(piece) for piece in pieces)
