"""One self-contained HTML page from a template: styles, script, plotly.js and the charts' data are inside it.

A page extends `base.html.j2` and places charts with the macro `draw(chart)`; nothing is fetched from a network.
Plotly.js is its bundle of cartesian charts (npm: `plotly.js-cartesian-dist-min`), compressed with `gzip -9 -n`; the
page carries it so, in base64, and the browser unpacks it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from echelon.core.figure import Chart
from echelon.core.json_values import finite
from echelon.reporting.report.terms import TERMS, with_specs, with_term

_TEMPLATES = Path(__file__).parent / "templates"
_CONTENTS = "<!-- contents -->"
PLOTLY_FILE = Path(__file__).parent / "plotly" / "plotly-cartesian.min.js.gz"


def render_page(template: str, charts: Iterable[Chart], **context: Any) -> str:
    """Fill a template of this folder; `charts` are those that it draws. All text is escaped."""
    drawn = list(charts)
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"term": with_term, "specs": with_specs}
    page = environment.get_template(template).render(
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        plotly=Markup(base64.b64encode(PLOTLY_FILE.read_bytes()).decode()) if drawn else Markup(""),
        figures=script_json({c.id: _figure(c) for c in drawn}),
        terms=TERMS,
        **context,
    )
    return page.replace(_CONTENTS, _contents(page), 1)


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
