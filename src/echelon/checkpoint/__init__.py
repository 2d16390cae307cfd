"""One atomic unit of everything a run is: saved whole, verified when read, and never unpickled."""

from __future__ import annotations

from echelon.checkpoint.export import export_weights
from echelon.checkpoint.ranks import gather_rank_state, pick_rank_state
from echelon.checkpoint.store import RANKS, CheckpointStore, Saved
from echelon.checkpoint.tree import State

__all__ = ["RANKS", "CheckpointStore", "Saved", "State", "export_weights", "gather_rank_state", "pick_rank_state"]
