"""Models that return more than logits: transformers' give a record of them, and keep keys and values for generating."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from echelon.tasks import nest


def give_logits(model: nn.Module) -> None:
    """Make a model's forward give its logits alone, in place; one that gives a tensor stays as it is.

    Hooks and no wrapper: names of parameters and the class, by which its family is known, stay.
    """
    model.register_forward_hook(_logits)
    keep_no_cache(model)


def keep_no_cache(model: nn.Module) -> None:
    """Make a model's forward return no keys and values for generating, in place."""
    if _can_cache(model):
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    return nest.logits_in(output)


def _without_cache(model: nn.Module, args: Any, kwargs: Mapping[str, object]) -> tuple[Any, dict[str, object]]:
    """Turn off the cache of keys and values: a block that is computed again would add its own to it twice."""
    return args, ({**kwargs, "use_cache": False} if _can_cache(model) else dict(kwargs))


def _can_cache(model: nn.Module) -> bool:
    """Whether its forward takes `use_cache`: that of a pipeline's stage, which is a copy with these hooks, does not."""
    return "use_cache" in inspect.signature(model.forward).parameters
