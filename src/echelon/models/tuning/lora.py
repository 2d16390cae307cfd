"""lora: small adapters beside frozen layers are trained, and the head: lora(r=8), lora(targets="qkv+proj").

A layer with the frozen weight W computes (W + alpha / r * B A) x, where A (r rows) and B (r columns) are trained.

Helps: To tune a large model with the memory and traffic of a small one.
Costs: two more small matrix products for each adapted layer.
Needs: --weights, the package peft (echelon[lora]), and a learning rate about ten times that of all.

Paper: Hu et al. 2021, LoRA (arXiv:2106.09685).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from echelon.core.adapters import adapted_layer
from echelon.core.bounds import Bounds, check_bounds
from echelon.core.errors import UserError
from echelon.core.hints import matches
from echelon.models.adapters import add_adapters, can_be_adapted, merged, never_called
from echelon.models.tuning.base import Call, TuningKind
from echelon.models.weights import head_names

_ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class Lora(TuningKind):
    """Settings of `lora`.

    Attributes:
        r: rank of the adapters.
        alpha: scale of the adapters, which are multiplied by alpha / r.
        targets: layers that get adapters: names or patterns of names, joined by +; auto: linear layers of attention (in
            a model without attention: all linear layers and convolutions except the head).
        package: that makes the adapters.
    """

    package: ClassVar[str] = "peft"
    trains: ClassVar[str] = "adapters"
    r: Annotated[int, Bounds(least=1)] = 8
    alpha: Annotated[float, Bounds(above=0)] = 16.0
    targets: str = "auto"

    def __post_init__(self) -> None:
        check_bounds(self)

    def prepare(self, model: nn.Module, call: Call | None = None) -> None:
        """Put adapters into the layers; not into those of which `call` uses the weights alone.

        Raises:
            UserError: no layer is meant, one that is named is never called, or peft is not installed.
        """
        add_adapters(model, self._layers(model, call), self.r, self.alpha)

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return the names of adapters' parameters."""
        return {name for name, _ in model.named_parameters(remove_duplicate=False) if adapted_layer(name)}

    def plain(self, weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
        """Return weights, any shape, of the model without adapters, which are added into it."""
        return merged(weights, model, self.alpha / self.r)

    def _layers(self, model: nn.Module, call: Call | None) -> list[str]:
        possible = [name for name in _own_layers(model) if can_be_adapted(model.get_submodule(name), self.r)]
        uncalled = never_called(model, possible, call) if call is not None else set()
        if self.targets != "auto":
            return self._named(possible, uncalled, type(model).__name__)
        head = {name.rpartition(".")[0] for name in head_names(model)}
        possible = [name for name in possible if name not in head | uncalled]
        found = [name for name in possible if _in_attention(model, name)] or possible
        if not found:
            raise UserError(
                f"--tune lora: {type(model).__name__} has no linear layer or convolution but its head that is larger "
                f"than r={self.r}: tune it with all, last or head"
            )
        return found

    def _named(self, possible: list[str], uncalled: set[str], model: str) -> list[str]:
        patterns = [each.strip() for each in self.targets.split("+")]
        for pattern in patterns:
            if not any(_is_meant(pattern, name) for name in possible):
                leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in possible))
                raise UserError(
                    f'--tune lora(targets="{self.targets}"): {pattern} matches no layer of {model} that adapters of '
                    f"rank {self.r} can be added to; there are {leaves or 'none'}"
                )
        meant = [name for name in possible if any(_is_meant(pattern, name) for pattern in patterns)]
        if unused := next((name for name in meant if name in uncalled), ""):
            raise UserError(
                f'--tune lora(targets="{self.targets}"): {unused} of {model} is never called, only its weight is used: '
                "name other layers"
            )
        return meant


def _is_meant(pattern: str, name: str) -> bool:
    """Whether a pattern is one of a layer's whole name, or of the last part of it."""
    return matches(pattern, name) or matches(f"**.{pattern}", name)


def _own_layers(model: nn.Module) -> list[str]:
    """Return the names of modules whose weight is theirs alone: what is tied would be changed for others too."""
    held = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        name
        for name, module in model.named_modules()
        if name and isinstance(weight := getattr(module, "weight", None), nn.Parameter) and held[id(weight)] == 1
    ]


def _in_attention(model: nn.Module, name: str) -> bool:
    """Whether a linear layer is part of attention, by the names of what it stands in, or their classes."""
    if isinstance(model.get_submodule(name), (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    parents = [name[:i] for i, letter in enumerate(name) if letter == "."]
    words = " ".join([name.rpartition(".")[0], *(type(model.get_submodule(each)).__name__ for each in parents)]).lower()
    return any(word in words for word in _ATTENTION)


TUNING = Lora
