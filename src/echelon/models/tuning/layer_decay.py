"""layer_decay: the learning rate gets smaller from layer to layer, from the head down.

A parameter of layer i of n has the learning rate lr * decay^(n - i). The layers are timm's groups. What is trained is
as the other kinds say.

Helps: To tune all of a pretrained transformer without spoiling its first layers.
Costs: nothing extra.
Needs: --weights.

Paper: Clark et al. 2020, ELECTRA (arXiv:2003.10555); Bao et al. 2022, BEiT (arXiv:2106.08254).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import nn

from echelon.core.bounds import Bounds, check_bounds
from echelon.core.errors import UserError
from echelon.models.keras_model import KerasModule
from echelon.models.tuning.base import TuningKind, blocks_of


@dataclass(frozen=True)
class LayerDecay(TuningKind):
    """Settings of `layer_decay`.

    Attributes:
        decay: factor from a layer to the one below it.
    """

    trains: ClassVar[str] = "nothing"
    decay: Annotated[float, Bounds(above=0, most=1)] = 0.75

    def __post_init__(self) -> None:
        check_bounds(self)

    def rates(self, model: nn.Module) -> Mapping[str, float]:
        """Return decay^(n - i) for each parameter, i being the number of its layer among n.

        Raises:
            UserError: the model is of one layer, as far as its modules tell.
        """
        layers = _layers(model)
        last = max(layers.values())
        if last == min(layers.values()):
            raise UserError(
                f"--tune layer_decay: nothing tells layers of {type(model).__name__} apart, all would have one rate"
            )
        return {name: self.decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


def _layers(model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's layer: timm's, else that of its block, from 1 on; all behind come last."""
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return layers
    if isinstance(model, KerasModule):
        return _layers_of_keras(model)
    blocks, layers, seen = blocks_of(model), {}, False
    for name, _ in model.named_parameters():
        inside = [i + 1 for i, block in enumerate(blocks) if name.startswith(f"{block}.")]
        seen = seen or bool(inside)
        layers[name] = inside[0] if inside else len(blocks) + 1 if seen else 0
    return layers


def _layers_of_keras(model: KerasModule) -> dict[str, int]:
    """Return the number of each parameter's layer: those without a matrix, as normalisation, go with the one before."""
    layers: dict[str, int] = {}
    number = 0
    for _, names in model.layers:
        number += any(model.get_parameter(name).ndim > 1 for name in names)
        layers |= dict.fromkeys(names, number)
    return layers


TUNING = LayerDecay
