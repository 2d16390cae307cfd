"""One atomic unit of everything a run is: saved whole, verified when read, and never unpickled."""

from __future__ import annotations

from echelon.checkpoint.parts import (
    RANKS,
    WRITING_PART,
    AlikeTensors,
    PartWriter,
    RankPart,
    StoredPart,
    merge,
    part_file,
    take_parts,
    whole,
)
from echelon.checkpoint.ranks import broadcast_state, copy_state, gather_rank_state, pick_rank_state
from echelon.checkpoint.store import WRITING, Arriving, BaseState, CheckpointStore, Saved
from echelon.checkpoint.tensors import export_weights

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
    "broadcast_state",
    "copy_state",
    "export_weights",
    "gather_rank_state",
    "merge",
    "part_file",
    "pick_rank_state",
    "take_parts",
    "whole",
]
