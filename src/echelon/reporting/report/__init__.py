"""The report of a run: reads records only, knows no strategy, needs no torch.

`write_report` writes a run's `report.html` and `summary.json`; `closing_words` are its conclusions in sentences.
Other pages are built from the same pieces: `Chart`, `render_page` and the templates' `base.html.j2`.
"""

from __future__ import annotations

from echelon.core.figure import Chart
from echelon.reporting.report.page import compile_templates, render_page, write_shared_script
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import Summary, summarise
from echelon.reporting.report.words import closing_words
from echelon.reporting.report.write import REPORT_FILE, write_report

__all__ = [
    "REPORT_FILE",
    "Chart",
    "Summary",
    "closing_words",
    "compile_templates",
    "load_run",
    "render_page",
    "summarise",
    "write_report",
    "write_shared_script",
]
