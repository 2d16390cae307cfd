"""Settings of a GPU that contradict others are refused, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.config.build import build
from echelon.core.errors import UserError

GRAPHS = {"model.compile": True, "model.compile_mode": "reduce-overhead"}


@pytest.mark.parametrize(
    "settings", [GRAPHS, {"model.compile": True, "model.compile_mode": "default"}, {"data.decode": "gpu"}]
)
def test_what_works_is_taken(settings: dict[str, Any]) -> None:
    build(None, {"run": "unused", **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.compile_mode": "reduce-overhead"}, "a mode of torch.compile: add --compile"),
        ({**GRAPHS, "training.accumulate": 2}, "reduce-overhead with --accumulate: of a batch in parts"),
        ({**GRAPHS, "training.accumulate": 0}, "reduce-overhead with --accumulate: of a batch in parts"),
        ({**GRAPHS, "training.on_oom": "halve"}, "reduce-overhead with --on-oom halve: of a batch in parts"),
        ({"data.decode": "gpu", "training.device": "cpu"}, "leave out --device cpu and --loaders"),
        ({"data.decode": "gpu", "data.loaders": 2}, "leave out --device cpu and --loaders"),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(None, {"run": "unused", **settings})
