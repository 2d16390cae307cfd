"""What is done about a gradient that was computed on older parameters: pure functions on flat tensors.

Delay compensation (Zheng et al. 2017, DC-ASGD, arXiv:1609.08326): g + lambda g*g*(w_now - w_then), the diagonal of the
outer product of gradients standing for the Hessian. Constant form: lambda. Adaptive form, per worker:
MS <- 0.95 MS + 0.05 g*g; lambda_t = lambda_0 / sqrt(MS + 1e-7).
"""

from __future__ import annotations

import math

from torch import Tensor

DECAY = 0.95
EPSILON = 1e-7


def compensate_constant(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> Tensor:
    """Return g + strength * g*g*(now - then); all 1-D, of one shape."""
    return gradient + strength * gradient * gradient * (now - then)


def compensate_adaptive(gradient: Tensor, now: Tensor, then: Tensor, mean_square: Tensor, strength: float) -> Tensor:
    """Return the compensated gradient with lambda_t = strength / sqrt(MS + 1e-7); updates `mean_square` in place."""
    square = gradient * gradient
    mean_square.mul_(DECAY).add_(square, alpha=1 - DECAY)
    return gradient + strength * (mean_square + EPSILON).rsqrt() * square * (now - then)


def by_staleness(staleness: int) -> float:
    """Return the factor of the learning rate: 1 / max(1, staleness) (Zhang et al. 2016, arXiv:1511.05950)."""
    return 1.0 / max(1, staleness)


def by_age(age_s: float, decay_s: float) -> float:
    """Return the weight exp(-age / decay) of a gradient whose parameters were pulled `age_s` ago."""
    return math.exp(-max(0.0, age_s) / decay_s)


def corrected_momentum(wanted: float, workers: int) -> float:
    """Return the momentum that the optimizer needs so that it and asynchrony make up the wanted one.

    M asynchronous workers act like momentum 1 - 1/M (Mitliagkas et al. 2016, arXiv:1605.09774, theorem 1). Momenta
    compose here as their memories do: 1 - wanted = (1 - explicit) / M, so explicit = 1 - M (1 - wanted), at least 0.
    """
    return max(0.0, 1.0 - max(1, workers) * (1.0 - wanted))
