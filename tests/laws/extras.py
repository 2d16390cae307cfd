"""Marks for what is tried only where a package of an extra is installed; what has one is skipped before it begins."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def _needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: it is in the extra `{extra}`"
    )


NEEDS_DATASETS = _needs("datasets", "hf")
NEEDS_PEFT = _needs("peft", "lora")
NEEDS_TRANSFORMERS = _needs("transformers", "transformers")
