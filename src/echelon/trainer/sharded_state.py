"""The shared state of a split model as parts of whole tensors under plain names, and back: the same in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echelon.checkpoint.parts import ShardTensor, StoredTensor
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.parallel.local_shards import LocalShard, LocalShards, cut_out


def to_parts(state: StateView, pieces: LocalShards, regions: Mapping[str, LocalShard] | None = None) -> StateView:
    """Replace the tensors that lie in regions of whole ones by parts; those that another rank writes are left out.

    Groups of the optimizer become a dict by their settings, so that those of several ranks can be joined: a pipeline's
    stages have other parameters, and perhaps not all groups.

    Args:
        regions: by name, with what this rank writes of them; left out: those of the pieces.
    """

    def moment(region: LocalShard, tensor: Tensor) -> ShardTensor | None:
        """Return the same of the optimizer: where updates are divided, only one rank has a moment."""
        return ShardTensor(tensor, region) if region.writes or pieces.divided is not None else None

    regions = pieces.regions if regions is None else regions
    parts, optimizer = _Parts(regions, pieces), state["optimizer"]
    groups: dict[str, StateTree] = {}
    for group in optimizer["param_groups"]:
        joined = groups.setdefault(_settings_of(group), {**group, "params": {}})
        joined["params"].update(dict.fromkeys(group["params"], True))
    return {
        **parts.of_tensors(state, _written_part),
        "optimizer": {"state": parts.of_moments(optimizer["state"], moment), "param_groups": groups},
    }


def model_parts(tensors: StateView, pieces: LocalShards) -> StateView:
    """Return tensors of the model by name as parts; those that another rank writes are left out."""
    return _Parts(pieces.regions, pieces).each(tensors, _written_part)


def _written_part(region: LocalShard, tensor: Tensor) -> ShardTensor | None:
    """Return a tensor of the model as the part that this rank writes, if it does."""
    return ShardTensor(tensor, region) if region.writes else None


def list_groups(state: StateView) -> StateView:
    """Return a state of `to_parts`, joined over ranks, with the optimizer's groups as a list again."""
    groups = [{**g, "params": list(g["params"])} for g in state["optimizer"]["param_groups"].values()]
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


def to_own(state: StateView, pieces: LocalShards) -> StateView:
    """Return a checkpoint's shared state with this rank's pieces in place of whole or stored tensors.

    Raises:
        UserError: a name is missing, or of another shape.
    """

    def piece(region: LocalShard, tensor: Tensor | StoredTensor) -> Tensor:
        """Return what this rank has of a tensor."""
        return tensor.read(region) if isinstance(tensor, StoredTensor) else cut_out(tensor, region)

    missing = [name for name in pieces.regions if name not in state["model"]]
    wrong = [n for n, r in pieces.regions.items() if n not in missing and tuple(state["model"][n].shape) != r.shape]
    if missing or wrong:
        what = f"it has no {missing[0]}" if missing else f"its {wrong[0]} has another shape"
        raise UserError(f"the checkpoint is of another model: {what}")
    names = pieces.updated()
    optimizer = state["optimizer"]
    kept = {name: value for name, value in optimizer["state"].items() if name in names}
    groups = [{**g, "params": [n for n in g["params"] if n in names]} for g in optimizer["param_groups"]]
    parts = _Parts(pieces.regions, pieces)
    return {
        **parts.of_tensors(state, piece),
        "optimizer": {"state": parts.of_moments(kept, piece), "param_groups": [g for g in groups if g["params"]]},
    }


@dataclass(frozen=True)
class _Parts:
    """Changes the tensors of a state that lie in regions, by name."""

    regions: Mapping[str, LocalShard]
    pieces: LocalShards

    def of_tensors(self, state: StateView, change: Callable[[LocalShard, Any], Any]) -> StateView:
        """Change those of the model, and of its moving average."""
        changed = {**state, "model": self.each(state["model"], change)}
        if state["ema"]:
            changed["ema"] = {**state["ema"], "average": self.each(state["ema"]["average"], change)}
        return changed

    def each(self, tensors: StateView, change: Callable[[LocalShard, Any], Any]) -> StateView:
        """Change tensors by name, any shape; those of which nothing is left are left out."""
        made = {name: change(region, tensors[name]) for name, region in self.regions.items() if name in tensors}
        return {name: value for name, value in made.items() if value is not None}

    def of_moments(self, state: StateView, change: Callable[[LocalShard, Any], Any]) -> StateView:
        """Change what has one element per element of a parameter; numbers of steps stay."""
        made: dict[str, StateView] = {}
        parameters = dict(self.pieces.named_parameters())
        for name, values in state.items():
            region, local = self.regions[name], tuple(parameters[name].shape)
            kept: dict[str, object] = {}
            for key, value in values.items():
                shaped = (
                    isinstance(value, Tensor | StoredTensor)
                    and value.shape
                    and tuple(value.shape) in (local, region.shape)
                )
                if not shaped:
                    _check_whole(name, key, value, local == region.shape)
                    kept[key] = value
                elif (changed := change(region, value)) is not None:  # else another rank writes it
                    kept[key] = changed
            made[name] = kept
        return made


def _check_whole(name: str, key: str, value: object, is_whole: bool) -> None:
    """Refuse what an optimizer keeps of a piece in another shape than the piece's: nobody could join it.

    Raises:
        UserError: names it.
    """
    if not is_whole and isinstance(value, Tensor | StoredTensor) and math.prod(value.shape) > 1:
        raise UserError(
            f"the optimizer keeps {key} of {name} as {tuple(value.shape)}, not in its parameter's shape: what ranks "
            "have of it cannot be joined; use --parallel dp, or an optimizer that keeps it in the parameter's shape"
        )


def _settings_of(group: StateView) -> str:
    return ";".join(f"{key}={group[key]!r}" for key in sorted(group) if key != "params")
