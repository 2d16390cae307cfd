"""One atomic unit of everything a run is: saved whole, verified when read, and never unpickled.

Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.checkpoint.parts import (
        RANKS,
        WRITING_PART,
        AlikeTensors,
        PartWriter,
        RankPart,
        StoredPart,
        StoredTensor,
        merge,
        part_file,
        streamed_part,
        take_parts,
        whole,
    )
    from echelon.checkpoint.ranks import broadcast_state, copy_state, gather_rank_state, pick_rank_state
    from echelon.checkpoint.store import WRITING, Arriving, BaseState, CheckpointStore, Saved
    from echelon.checkpoint.tensors import StreamedTensor, export_weights

_WITH_TORCH = {
    "AlikeTensors": "parts",
    "Arriving": "store",
    "BaseState": "store",
    "CheckpointStore": "store",
    "PartWriter": "parts",
    "RANKS": "parts",
    "RankPart": "parts",
    "Saved": "store",
    "StoredPart": "parts",
    "StoredTensor": "parts",
    "StreamedTensor": "tensors",
    "WRITING": "store",
    "WRITING_PART": "parts",
    "broadcast_state": "ranks",
    "copy_state": "ranks",
    "export_weights": "tensors",
    "gather_rank_state": "ranks",
    "merge": "parts",
    "part_file": "parts",
    "pick_rank_state": "ranks",
    "streamed_part": "parts",
    "take_parts": "parts",
    "whole": "parts",
}

__all__ = [
    "RANKS",
    "WRITING",
    "WRITING_PART",
    "AlikeTensors",
    "Arriving",
    "BaseState",
    "CheckpointStore",
    "PartWriter",
    "RankPart",
    "Saved",
    "StoredPart",
    "StoredTensor",
    "StreamedTensor",
    "broadcast_state",
    "copy_state",
    "export_weights",
    "gather_rank_state",
    "merge",
    "part_file",
    "pick_rank_state",
    "streamed_part",
    "take_parts",
    "whole",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
