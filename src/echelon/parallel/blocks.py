"""The repeated blocks of a model, found from its hints or its structure: what is sharded and recomputed at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from echelon.core.hints import Hints, matching

LEAST_SHARE = 0.5  # of the parameters that repeated classes must hold to count as the model's blocks


def find_blocks(model: nn.Module, hints: Hints | None) -> dict[str, nn.Module]:
    """Return the blocks by name, in the order of the model's modules; empty where nothing repeats.

    From `hints.blocks` where there are hints; else the children of every ModuleList and Sequential that is not inside
    another block and that holds several modules of one class; else every module of the class, repeated at least
    twice, that holds most of the parameters.
    """
    named = dict(model.named_modules())
    if hints is not None and hints.blocks:
        found = matching(hints.blocks, named)
        return {name: named[name] for name in named if name in found}
    blocks = _in_containers(named)
    return blocks or _by_class(named)


def _in_containers(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for name, module in named.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or _inside(name, blocks):
            continue
        classes = Counter(type(child) for child in module.children() if _has_own(child))
        for key, child in module.named_children():
            if _has_own(child) and classes[type(child)] > 1 and next(child.children(), None) is not None:
                blocks[f"{name}.{key}" if name else key] = child
    return blocks


def _by_class(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    total = sum(p.numel() for p in named[""].parameters())
    classes = Counter(type(m) for m in named.values())
    for kind, count in classes.items():
        of_kind = {n: m for n, m in named.items() if type(m) is kind and n}
        outer = {n: m for n, m in of_kind.items() if not _inside(n, {k: v for k, v in of_kind.items() if k != n})}
        held = sum(p.numel() for m in outer.values() for p in m.parameters())
        if count > 1 and len(outer) > 1 and held >= LEAST_SHARE * total:
            return outer
    return {}


def _inside(name: str, blocks: Mapping[str, nn.Module]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
