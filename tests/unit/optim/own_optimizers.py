"""Optimizers as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Plain(torch.optim.Optimizer):
    """A moving average of gradients, and weight decay; by element."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad + group["weight_decay"] * parameter, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter."""
        state = self.state[parameter]
        if not state:
            state["average"], state["steps"] = torch.zeros_like(parameter), 0
        state["steps"] += 1
        state["average"].mul_(group["beta"]).add_(gradient)
        parameter.add_(state["average"], alpha=-group["lr"] / (1 - group["beta"] ** state["steps"]))


class Normed(Plain):
    """By tensor."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient / (1 + gradient.norm()), group)


class Clipped(Plain):
    """By all of the model."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Declared(Clipped):
    """Says that it works by element, whatever steps show."""

    elementwise = True


class Langevin(Plain):
    """Draws noise."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient + 0.01 * torch.randn_like(gradient), group)


class InGroup(Plain):
    """Counts steps in its groups, and decays by them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient / group["count"], group)


class Eager(Plain):
    """Has state from the beginning."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["start"] = parameter.detach().clone()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.add_(parameter - self.state[parameter]["start"], alpha=-group["lr"]).sub_(group["lr"] * gradient)


class Heavy(torch.optim.SGD):
    """SGD that has momentum unless told otherwise; takes no weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.8) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


class Forgetful(Plain):
    """Counts steps where no checkpoint looks."""

    count = 0

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        super().update(parameter, gradient / self.count, group)


class Rebinding(Plain):
    """Gives parameters other memory."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.data = parameter.data - group["lr"] * gradient


class Listing(Plain):
    """Keeps a list."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient, group)
        self.state[parameter]["norms"] = [1.0]


class Closed(Plain):
    """Wants a closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


class WithoutRate(torch.optim.Optimizer):
    """Takes no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
