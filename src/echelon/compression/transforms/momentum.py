"""What Deep Gradient Compression does to a gradient before it is encoded: clipping and momentum in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, State, Terms
from echelon.compression.native import streaming_kernels_for
from echelon.compression.transforms.base import SentTensor, Transform
from echelon.torch_compat import foreach_add_, foreach_mul_


@dataclass(frozen=True)
class LocalClip(Transform):
    """g is scaled down to a Euclidean norm.

    Attributes:
        norm: the most that a worker's tensor may have, in gradient units.

    Paper: Lin et al. 2018, arXiv:1712.01887 (local gradient clipping).
    """

    norm: float

    def before(self, terms: Terms, state: State) -> Terms:
        """Scale the gradient, the only term."""
        ((gradient, _),) = terms
        norm = torch.linalg.vector_norm(gradient)
        return [(gradient * torch.clamp(self.norm / norm.clamp_min(1e-30), max=1.0), 1.0)]


@dataclass(frozen=True)
class MomentumCorrection(Transform):
    """u = m u + g, kept in the memory "velocity" [numel]; u is encoded, or g + m u in Nesterov's form.

    Where a sparse message carries a value, u is zeroed (momentum factor masking).

    Attributes:
        momentum: m, above 0 and below 1.
        nesterov: look ahead.

    Paper: Lin et al. 2018, arXiv:1712.01887 (momentum correction, masking; Nesterov's form in appendix B).
    """

    keeps: ClassVar[str] = "velocity"
    momentum: float
    nesterov: bool = False

    def before(self, terms: Terms, state: State) -> Terms:
        """Move the velocity by the gradient, the only term."""
        ((gradient, _),) = terms
        velocity = state.elementwise[self.keeps]
        if (kernels := streaming_kernels_for(velocity, gradient)) is not None:
            kernels.move_velocity(velocity, gradient, self.momentum)
        else:
            velocity.mul_(self.momentum).add_(gradient)
        return [(gradient, 1.0), (velocity, self.momentum)] if self.nesterov else [(velocity, 1.0)]

    def before_together(self, terms: Sequence[Terms], states: Sequence[State]) -> list[Terms]:
        """Move the velocities of several tensors by their gradients, the only terms."""
        gradients = [gradient for ((gradient, _),) in terms]
        velocities = [state.elementwise[self.keeps] for state in states]
        foreach_mul_(velocities, self.momentum)
        foreach_add_(velocities, gradients)
        pairs = zip(gradients, velocities, strict=True)
        return [[(g, 1.0), (v, self.momentum)] if self.nesterov else [(v, 1.0)] for g, v in pairs]

    def after(self, pending: Tensor, sent: SentTensor, state: State) -> None:
        """Forget the velocity of what of `pending` [numel] was sent, where little is."""
        if sent.sparse:
            sent.clear(state.elementwise[self.keeps])


def momentum_of(codec: Codec) -> MomentumCorrection | None:
    """Return the momentum that a codec's settings ask for before its encoding; None: they ask for none."""
    return MomentumCorrection(codec.absorbs_momentum, codec.looks_ahead) if codec.absorbs_momentum else None
