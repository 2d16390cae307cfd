"""A stand-in for the strategy of one process, for tests of a single step."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn


class Alone:
    """The strategy of one process: nothing is agreed on."""

    needs_warmup_backward, steps_together = False, True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def begin_step(self, units: int, global_units: int) -> int:
        return global_units

    def micro_batch(self, last: bool) -> nullcontext[None]:
        return nullcontext()

    def silent(self) -> nullcontext[None]:
        return nullcontext()

    def communication_began(self) -> None:
        return None
