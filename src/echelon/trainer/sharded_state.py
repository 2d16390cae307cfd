"""The shared state of a split model as parts of whole tensors under plain names, and back: the same in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from echelon.checkpoint.parts import Part, Stored
from echelon.core.errors import UserError
from echelon.parallel.local_shards import Box, LocalShards, cut_out

State = Mapping[str, Any]


def to_parts(state: State, pieces: LocalShards) -> dict[str, Any]:
    """Replace the tensors that lie in `pieces.boxes` by parts; those that another rank writes are left out.

    Groups of the optimizer become a dict by their settings, so that those of several ranks can be joined: a pipeline's
    stages have other parameters, and perhaps not all groups.
    """

    def part(box: Box, tensor: Tensor) -> Part | None:
        return Part(tensor, box.shape, box.runs) if box.writes else None

    def moment(box: Box, tensor: Tensor) -> Part | None:  # where updates are divided, only one rank has it
        return Part(tensor, box.shape, box.runs) if box.writes or pieces.divided is not None else None

    optimizer = state["optimizer"]
    groups = {_settings_of(g): {**g, "params": dict.fromkeys(g["params"], True)} for g in optimizer["param_groups"]}
    return {
        **_in_tensors(state, pieces, part),
        "optimizer": {"state": _moments(optimizer["state"], pieces, moment), "param_groups": groups},
    }


def list_groups(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of `to_parts`, joined over ranks, with the optimizer's groups as a list again."""
    groups = [{**g, "params": list(g["params"])} for g in state["optimizer"]["param_groups"].values()]
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


def to_own(state: State, pieces: LocalShards) -> dict[str, Any]:
    """Return a checkpoint's shared state with this rank's pieces in place of whole or stored tensors.

    Raises:
        UserError: a name is missing, or of another shape.
    """

    def own(box: Box, tensor: Tensor | Stored) -> Tensor:
        return tensor.read(box.runs) if isinstance(tensor, Stored) else cut_out(tensor, box)

    missing = [name for name in pieces.boxes if name not in state["model"]]
    wrong = [n for n, box in pieces.boxes.items() if n not in missing and tuple(state["model"][n].shape) != box.shape]
    if missing or wrong:
        what = f"it has no {missing[0]}" if missing else f"its {wrong[0]} has another shape"
        raise UserError(f"the checkpoint is of another model: {what}")
    names = pieces.updated()
    optimizer = state["optimizer"]
    kept = {name: value for name, value in optimizer["state"].items() if name in names}
    groups = [{**g, "params": [n for n in g["params"] if n in names]} for g in optimizer["param_groups"]]
    return {
        **_in_tensors(state, pieces, own),
        "optimizer": {"state": _moments(kept, pieces, own), "param_groups": [g for g in groups if g["params"]]},
    }


def _in_tensors(state: State, pieces: LocalShards, change: Callable[[Box, Any], Any]) -> dict[str, Any]:
    changed = {**state, "model": _each(state["model"], pieces, change)}
    if state["ema"]:
        changed["ema"] = {**state["ema"], "average": _each(state["ema"]["average"], pieces, change)}
    return changed


def _each(tensors: State, pieces: LocalShards, change: Callable[[Box, Any], Any]) -> dict[str, Any]:
    made = {name: change(pieces.boxes[name], tensors[name]) for name in pieces.boxes if name in tensors}
    return {name: value for name, value in made.items() if value is not None}


def _moments(state: State, pieces: LocalShards, change: Callable[[Box, Any], Any]) -> dict[str, Any]:
    """Change what has one element per element of a parameter; numbers of steps stay."""
    made: dict[str, Any] = {}
    parameters = dict(pieces.named_parameters())
    for name, values in state.items():
        box, local = pieces.boxes[name], tuple(parameters[name].shape)
        kept: dict[str, Any] = {}
        for key, value in values.items():
            shaped = isinstance(value, Tensor | Stored) and value.shape and tuple(value.shape) in (local, box.shape)
            kept[key] = change(box, value) if shaped else value
        made[name] = {key: value for key, value in kept.items() if value is not None}
    return made


def _settings_of(group: State) -> str:
    return ";".join(f"{key}={group[key]!r}" for key in sorted(group) if key != "params")
