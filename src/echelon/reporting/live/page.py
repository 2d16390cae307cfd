"""The live page: the report's look, charts drawn as SVG by a small script of its own, numbers fetched once a second."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"
_REPORT_STYLE = Path(__file__).parents[1] / "report" / "templates" / "page.css"


def render_live(kind: str, title: str, parent: str, nonce: str) -> str:
    """Return the page of a run or of a study.

    Args:
        kind: `run` or `study`.
        title: its name, escaped here.
        parent: of a study's run, the study's name; empty otherwise.
        nonce: what the page's style and script carry, so that no other is obeyed.
    """
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    styles = [_REPORT_STYLE.read_text(encoding="utf-8"), (_TEMPLATES / "live.css").read_text(encoding="utf-8")]
    return environment.get_template("live.html.j2").render(
        kind=kind,
        title=title,
        parent=parent,
        nonce=nonce,
        style=Markup("\n".join(styles)),
        script=Markup((_TEMPLATES / "live.js").read_text(encoding="utf-8")),
    )
