"""The study's page: pictures first, then words, tables and what it takes to repeat it."""

from __future__ import annotations

from echelon.study.page.render import render_study

__all__ = ["render_study"]
